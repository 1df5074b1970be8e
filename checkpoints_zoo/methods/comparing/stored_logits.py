"""Logits of draws on images, computed once for a comparison and kept in its folder, so that figures can be measured
again without networks."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.formats import disk
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.methods.comparing.draw_ensembles import content_hash
from checkpoints_zoo.predictions import PredictionsInMemory

_DIGEST_NBYTES = 32


@dataclass(frozen=True)
class StoredLogits:
    """A folder of logits: each file has a hash, then the logits (member, input, class) in float32.

    Args:
        folder: the folder; None to store nothing.
    """

    folder: Path | None = None

    def read(self, members: Collection, data: ImageData, device: str = "cpu") -> Tensor:
        """Read the members' logits on images, or compute and store them; return logits (member, input, class), float32
        on the CPU. A damaged file is written anew.

        Args:
            members: the members.
            data: the images.
            device: device to compute on.

        Raises:
            StorageError: the folder can't be written to.
        """
        if self.folder is None:
            return predictions.logits(members, data, device)
        shape = len(members), len(data), len(members.classes)
        key = f"{content_hash(members)} {data.fingerprint} {shape}"
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.logits"
        with suppress(OSError):
            content = np.fromfile(path, np.uint8)
            if len(content) == _DIGEST_NBYTES + 4 * math.prod(shape):
                digest = hashlib.sha256(content[_DIGEST_NBYTES:].data).digest()
                if content[:_DIGEST_NBYTES].tobytes() == digest:
                    return torch.from_numpy(content[_DIGEST_NBYTES:].view("<f4").reshape(shape))
        logits = predictions.logits(members, data, device).float().contiguous()
        raw = logits.numpy().astype("<f4", copy=False)
        with disk.translate_write_errors(self.folder), disk.replace_file(path, "wb") as file:
            file.write(hashlib.sha256(raw.data).digest())
            file.write(raw.data)
        return logits

    def as_predictions(self, members: Collection, data: ImageData, device: str = "cpu") -> PredictionsInMemory:
        """Return the members' logits on images as predictions."""
        hashes = members.rows.column("sha256").to_pylist()
        keys = [(*key, digest or "") for key, digest in zip(members._snapshot_keys, hashes, strict=True)]
        facts = predictions.describe(members.name, data, members.classes, "float32")
        return PredictionsInMemory(facts, self.read(members, data, device), keys, members.citation)


NOT_STORED = StoredLogits()
