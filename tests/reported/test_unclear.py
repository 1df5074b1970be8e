"""What was unclear: texts that name the thing, and arguments that mean what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError


def test_members_are_aligned_to_the_first_selected_one() -> None:
    """Issue 16, item 6: a selection without member 0."""
    members = zoo.load("convnet-digits", members="5,7,9")
    aligned, by_id = members.align(), members.align(to=5)
    assert str(aligned) == str(by_id)
    for name, tensor in aligned.stack().items():
        assert torch.equal(tensor, by_id.stack()[name])
        assert torch.equal(tensor[0], members.stack()[name][0])
    summary = zoo.alignment(members)
    assert (summary.to, int(summary.total[0])) == ("member 5", 0)


@pytest.mark.parametrize("shape", [(5, 32, 32, 3), (5, 28, 28, 1), (32, 32, 3), (5, 32, 32, 4)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch", "prepared"])
def test_channels_at_the_other_end_are_refused(shape: tuple[int, ...], last: bool, kind: str) -> None:
    """Case 36: an image of 32 channels, 32 high and 3 wide, is none."""
    array: Any = np.zeros(shape, np.uint8)
    if last:
        array = np.moveaxis(array, -1, -3)
    if kind != "numpy":
        array = torch.from_numpy(np.ascontiguousarray(array))
    read = zoo.images.prepared if kind == "prepared" else zoo.images.of
    given = array.float() if kind == "prepared" else array
    with pytest.raises(UsageError) as error:
        read(given, channels_last=last)
    assert str(error.value).endswith(" Leave channels_last out." if last else " Give `channels_last=True`.")
    assert ": expected axes (input, " in str(error.value)
    images = read(given, channels_last=not last).images
    assert images.shape[1] == shape[-1]


def test_a_name_is_suggested_only_if_it_is_similar() -> None:
    """Case 36: "nothere" is not like "mnist"."""
    with pytest.raises(UsageError) as error:
        zoo.images.of("nothere")
    assert str(error.value).endswith("found 'nothere'. Give another name, or a path that exists or contains a slash.")
    with pytest.raises(UsageError, match=r"Did you mean 'cifar100'\? Give a path that exists or contains a slash\."):
        zoo.images.of("cifar-100")
    with pytest.raises(UsageError, match=r"Did you mean 'cifar100'\?$"):
        zoo.images.load("cifar-100")


@pytest.mark.parametrize("labelled", [True, False])
def test_the_test_set_is_not_out_of_distribution(labelled: bool) -> None:
    """Case 36: its AUROC is 0.5."""
    members, digits = zoo.load("convnet-digits", n=2), zoo.images.load("digits")
    ood = digits if labelled else zoo.images.of(digits.images, name="others")
    with pytest.raises(UsageError) as error:
        zoo.evaluate(members, "digits", ood=ood)
    assert str(error.value) == (
        "images out of distribution: expected others than digits/test; found the same images."
        " Give images of another data set as `ood`."
    )
