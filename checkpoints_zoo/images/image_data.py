"""One split of a data set in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images.preprocess import Preprocess


@dataclass(frozen=True, eq=False)
class ImageData:
    """One split of a data set.

    Args:
        name, split: what it is ("digits", "test").
        images: uint8 pixels in 0..255, (input, channel, height, width), for every data set.
        labels: int64 positions in `classes`, (input,), or None where there are none.
        classes: class names, in the order of the labels.
        revision: commit of the repo on the Hub that it was read from; "" for what comes with the package.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    revision: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def _facts(self) -> dict[str, Any]:
        labelled = self.labels is not None
        return {"shape": list(self.images.shape), "labelled": labelled, "classes": list(self.classes)}

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 over shape, pixels, labels and class names."""
        digest = hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def inputs(self, some: Tensor, preprocess: Preprocess) -> Tensor:
        """Turn some of the images into what members take; return float32 inputs (batch, channel, height, width).

        Args:
            some: of `images`.
            preprocess: of the members.

        Raises:
            UsageError: images of a size or with channels that the members can't take.
        """
        self._check(some, preprocess, "images")
        return preprocess(some)

    def _check(self, some: Tensor, preprocess: Preprocess, what: str) -> None:
        wanted, found = (preprocess.channels, *preprocess.size), tuple(some.shape[1:])
        if found == wanted:
            return
        do = f"`zoo.images.of(…, size={preprocess.size}, channels={wanted[0]})` makes them fit"
        if found == (*preprocess.size, preprocess.channels):
            do = f"`zoo.images.{'of' if what == 'images' else 'prepared'}(…, channels_last=True)` says so"
        elif what != "images":
            do = "Prepare them as the members want them"
        raise UsageError(
            f"{what} {self.name!r}",
            expected=f"shape (input, {', '.join(map(str, wanted))}), axes (input, channel, height, width)",
            found=f"shape (input, {', '.join(map(str, found))})",
            do=do,
        )


@dataclass(frozen=True, eq=False)
class Prepared(ImageData):
    """One split of a data set whose images are preprocessed already: members take them as they are.

    Args:
        images: float32 inputs of members, (input, channel, height, width).
        name, split, labels, classes, revision: as of `ImageData`. The fingerprint is over the float32 values.
    """

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "dtype": "float32"}

    def inputs(self, some: Tensor, preprocess: Preprocess) -> Tensor:
        """Return some of the inputs as they are, once their shape is known to fit."""
        self._check(some, preprocess, "inputs")
        return some
