"""The two sets that come with scikit-learn: handwritten digits, and patches of photographs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.text import nearest
from checkpoints_zoo.images import hub
from checkpoints_zoo.images.classes import CLASSES
from checkpoints_zoo.images.hub_sets import HUB_SETS
from checkpoints_zoo.images.image_data import ImageData

DIGITS_TEST = 540


def digits(split: str) -> ImageData:
    """Read scikit-learn's handwritten digits, split by the rule "digits-sha256-540"; return one of its two splits.

    The rule: images ranked by the sha256 of "digits-test|<index>"; the first 540 are the test set and the
    rest, in rank order too, the training set. It was fixed before anything was trained.

    Args:
        split: "test" or "train".
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = _rank("digits-test", len(bunch.target))
    chosen = order[:DIGITS_TEST] if split == "test" else order[DIGITS_TEST:]
    # Pixels are 0..16; in integers, round(k * 255 / 16).
    pixels = torch.from_numpy((bunch.images[chosen].astype(np.int64) * 255 + 8) // 16).to(torch.uint8)[:, None]
    labels = torch.from_numpy(bunch.target[chosen].astype(np.int64))
    return ImageData("digits", split, pixels, labels, CLASSES["digits"])


def photos() -> ImageData:
    """Cut scikit-learn's two photographs into 8x8 grey patches; return 1,000 of each, without labels.

    The patches of a photograph are numbered row by row and ranked by the sha256 of "photos|<file>|<index>".
    """
    from sklearn.datasets import load_sample_image

    patches = []
    for file in ("china.jpg", "flower.jpg"):
        red, green, blue = np.moveaxis(load_sample_image(file).astype(np.int64), -1, 0)
        # ITU-R 601 luma in 16-bit fixed point, as Pillow's mode "L".
        grey = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
        rows, columns = grey.shape[0] // 8, grey.shape[1] // 8
        tiles = grey[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).swapaxes(1, 2).reshape(-1, 1, 8, 8)
        patches.append(tiles[_rank(f"photos|{file}", len(tiles))[:1000]].astype(np.uint8))
    return ImageData("photos", "test", torch.from_numpy(np.concatenate(patches)))


def _rank(rule: str, count: int) -> list[int]:
    """Return the positions 0..count-1 in the order of the sha256 of "<rule>|<position>"."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"{rule}|{index}".encode()).hexdigest())


# Image data by name.


DATASETS: Mapping[str, Mapping[str, Callable[[], ImageData]]] = MappingProxyType(
    {
        "digits": {split: partial(digits, split) for split in ("test", "train")},
        "photos": {"test": photos},
        **{name: {split: partial(hub.read, name, split) for split in ("test", "train")} for name in HUB_SETS},
    }
)
"""What reads each split of each data set; the first two come with the package, the others are on the Hub."""


def load(name: str, split: str = "test") -> ImageData:
    """Load one split of a named data set; return it.

    What is on the Hub is fetched once, the files of this split alone, and read from the client's cache after that.

    Args:
        name: a key of `DATASETS`.
        split: "test" or "train" ("photos" has only "test"). Tiny-ImageNet's "test" is its validation set, since its
            own test set has no labels.

    Raises:
        UsageError: no data set, or no split, of that name.
        SourceNotFound, AccessError, NetworkError, DamagedError: what is on the Hub can't be had.
        FormatError: the repo on the Hub holds something else than expected.

    >>> load("digits").images.shape
    torch.Size([540, 1, 8, 8])
    """
    if name not in DATASETS:
        raise UsageError(
            f"data set {name!r}",
            expected=f"one of {', '.join(DATASETS)}",
            found=repr(name),
            do=f"Use the nearest name, {nearest(name, DATASETS)!r}",
        )
    splits = DATASETS[name]
    if split not in splits:
        raise UsageError(f"split of data set {name!r}", expected=f"one of {', '.join(splits)}", found=repr(split))
    return splits[split]()
