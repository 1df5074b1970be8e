"""Choose the held-out inputs that a temperature is fitted to: a share of the test inputs, or other images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError

HELD_OUT_RULE = "held-out-sha256"


def draw_held_out(fingerprint: str, input_count: int, share: float) -> tuple[Tensor, Tensor]:
    """Draw a share of the inputs by the rule "held-out-sha256"; return the sorted positions of the kept and of the
    held-out inputs.

    The rule: sort the positions by the sha256 of "held-out|<fingerprint of the images>|<position>"; the first
    share * inputs, rounded, are held out. The result is the same for all members and every seed.

    Args:
        fingerprint: fingerprint of the images.
        input_count: number of the images.
        share: the share of the inputs to hold out, between 0 and 1.

    Raises:
        UsageError: the share is so small or large that no input or every input would be held out.

    >>> kept, held_out = draw_held_out("0123456789abcdef", 10, 0.2)
    >>> held_out.tolist(), len(kept)
    ([3, 7], 8)
    """
    count = round(check_share(share) * input_count)
    if not 0 < count < input_count:
        expected = f"one that holds out some of the {input_count:,} and leaves some"
        raise UsageError("share of the inputs held out", expected=expected, found=f"{share!r}")
    digests = (hashlib.sha256(f"held-out|{fingerprint}|{i}".encode()).hexdigest() for i in range(input_count))
    ranked_positions = [i for _, i in sorted((digest, i) for i, digest in enumerate(digests))]
    return torch.tensor(sorted(ranked_positions[count:])), torch.tensor(sorted(ranked_positions[:count]))


def check_share(share: float) -> float:
    """Check that the share of held-out inputs is above 0 and below 1; return the share.

    Raises:
        UsageError: the share is another number.
    """
    if not 0 < share < 1:
        raise UsageError("share of the inputs held out", expected="above 0 and below 1", found=f"{share!r}")
    return share


def check_not_trained_on(
    held_out_image_name: str, training_set_name: str, training_fingerprints: Iterable[str]
) -> None:
    """Check that held-out images are not the members' training images.

    Args:
        held_out_image_name: name, split and fingerprint of the images ("digits/test 0123456789abcdef").
        training_set_name: name and split of the training set ("digits/train").
        training_fingerprints: fingerprints of the members' training sets, from the rows of the manifest that have one.

    Raises:
        UsageError: the images are the training images.
    """
    name, _, fingerprint = held_out_image_name.partition(" ")
    if name == training_set_name or fingerprint in set(training_fingerprints):
        raise _same_images_error(
            name, "the images that the members were trained on, where their confidence is too high"
        )


def check_not_measured_on(held_out_image_name: str, measured_image_name: str) -> None:
    """Check that held-out images are not the test images.

    Args:
        held_out_image_name: name, split and fingerprint of the held-out images.
        measured_image_name: name, split and fingerprint of the test images.

    Raises:
        UsageError: both are the same images.
    """
    if held_out_image_name.partition(" ")[2] == measured_image_name.partition(" ")[2]:
        raise _same_images_error(held_out_image_name.partition(" ")[0], "the images that the members are measured on")


def _same_images_error(image_name: str, found: str) -> UsageError:
    return UsageError(
        f"images {image_name} held out for the temperature",
        expected="images that the members were neither trained on nor are measured on",
        found=found,
        do="Give other images, or a share of the test images such as held_out=0.2, which all figures then leave out",
    )
