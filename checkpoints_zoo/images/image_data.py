"""One split of a data set in memory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


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

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 over shape, pixels, labels and class names."""
        labelled = self.labels is not None
        facts = {"shape": list(self.images.shape), "labelled": labelled, "classes": list(self.classes)}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(self.images.cpu().contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.cpu().numpy().astype("<i8").tobytes())
        return digest.hexdigest()[:16]
