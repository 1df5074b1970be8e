"""Augmentation: pixel for pixel torchvision's for given offsets; offsets and flips are uniform."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torchvision.transforms.v2 import functional as tv

from checkpoints_zoo.training.augment import AUGMENTATIONS, Augmentation
from checkpoints_zoo.training.seeds import epoch_views


@given(
    padding=st.integers(0, 4), flip=st.booleans(), seed=st.integers(0, 999), channels=st.sampled_from([1, 3]),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)  # fmt: skip
def test_views_are_torchvisions(padding: int, flip: bool, seed: int, channels: int, size: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (7, channels, *size), dtype=torch.uint8, generator=generator)
    augmentation = Augmentation(padding, flip)
    choices = torch.randint(augmentation.view_count, (7,), generator=generator)
    got = augmentation(images, choices)
    assert (got.dtype, got.shape) == (images.dtype, images.shape)
    for image, choice, view in zip(images, choices.tolist(), got, strict=True):
        # The numbers count flips first, then rows, then columns.
        mirrored, shift = divmod(choice, (2 * padding + 1) ** 2)
        top, left = divmod(shift, 2 * padding + 1)
        wanted = tv.crop(tv.pad(image, [padding] * 4), top, left, *size)
        assert torch.equal(view, tv.horizontal_flip(wanted) if mirrored else wanted)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_views_are_all_of_torchvisions_and_no_others(name: str) -> None:
    augmentation = AUGMENTATIONS[name]
    images = torch.randint(1, 256, (1, 2, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    padding, side = augmentation.padding, 2 * augmentation.padding + 1
    crops = [tv.crop(tv.pad(images[0], [padding] * 4), y, x, 12, 12) for y in range(side) for x in range(side)]
    wanted = crops + ([tv.horizontal_flip(crop) for crop in crops] if augmentation.flip else [])
    got = augmentation(images.expand(augmentation.view_count, -1, -1, -1), torch.arange(augmentation.view_count))
    assert {bytes(v.numpy()) for v in got} == {bytes(w.contiguous().numpy()) for w in wanted}
    assert len({bytes(v.numpy()) for v in got}) == augmentation.view_count


def test_the_named_ones() -> None:
    views = {name: (a.padding, a.flip, a.view_count) for name, a in AUGMENTATIONS.items()}
    assert views == {
        "none": (0, False, 1), "shift1": (1, False, 9), "crop4": (4, False, 81), "crop4-flip": (4, True, 162),
    }  # fmt: skip


def test_shift1_is_black_outside() -> None:
    image = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3).expand(9, 1, 3, 3)
    nine = AUGMENTATIONS["shift1"](image, torch.arange(9))[:, 0].tolist()
    assert nine[0] == [[0, 0, 0], [0, 1, 2], [0, 4, 5]]
    assert nine[4] == image[0, 0].tolist()
    assert nine[8] == [[5, 6, 0], [8, 9, 0], [0, 0, 0]]


def test_offsets_and_flips_are_uniform_and_independent() -> None:
    """Chi-squared at 0.1 %: of each offset, of flips, and of all views together, over members and epochs."""
    augmentation = AUGMENTATIONS["crop4-flip"]
    drawn = torch.cat([epoch_views(m, e, 5000, augmentation.view_count) for m in (0, 7) for e in (0, 1, 2)])
    top, left, flipped = augmentation.offsets(drawn)
    for values, kinds in ((top, 9), (left, 9), (flipped.long(), 2), (drawn, 162)):
        assert int(values.min()) == 0
        assert int(values.max()) == kinds - 1
        assert chisquare(torch.bincount(values).numpy()).pvalue > 0.001
    # The same test finds offsets that favour the middle a little.
    skewed = torch.where(torch.arange(len(top)) % 20 == 0, 4, top)
    assert chisquare(torch.bincount(skewed).numpy()).pvalue < 0.001


def test_draws_differ_between_members_and_epochs_alone() -> None:
    first = epoch_views(3, 1, 100, 162)
    assert torch.equal(first, epoch_views(3, 1, 100, 162))
    assert not torch.equal(first, epoch_views(4, 1, 100, 162))
    assert not torch.equal(first, epoch_views(3, 2, 100, 162))
