"""Image data by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import bundled, reading
from checkpoints_zoo.images.hub_sets import HUB_SETS
from checkpoints_zoo.images.image_data import ImageData

DATASETS: Mapping[str, Mapping[str, Callable[[], ImageData]]] = MappingProxyType(
    {
        "digits": {split: partial(bundled.digits, split) for split in ("test", "train")},
        "photos": {"test": bundled.photos},
        **{name: {split: partial(reading.read, name, split) for split in ("test", "train")} for name in HUB_SETS},
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
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"data set {name!r}",
            expected=f"one of {', '.join(DATASETS)}",
            found=repr(name),
            do=f"Use the nearest name, {nearest!r}",
        )
    splits = DATASETS[name]
    if split not in splits:
        raise UsageError(f"split of data set {name!r}", expected=f"one of {', '.join(splits)}", found=repr(split))
    return splits[split]()
