"""Logits of members on images."""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoints_zoo.collection import Collection
from checkpoints_zoo.ensemble import Ensemble
from checkpoints_zoo.images import ImageData

GROUP_BYTES = 2**30


def logits(
    members: Collection,
    data: ImageData,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
) -> Tensor:
    """Run members on images, as many members at a time as a GiB holds; return logits (member, input, class).

    Args:
        members: a collection, of any size: the next group is read while one computes.
        data: the images, as they are: they are preprocessed here.
        device, dtype: what the members run on and in; the logits come back to the CPU.
        batch: images a forward pass.

    Raises:
        UsageError: images of a size that the members can't take.
        DamagedError: members whose weights or logits are not finite.
    """
    skeleton, groups = members.skeleton(), []
    size = max(1, min(len(members), GROUP_BYTES * len(members) // max(1, 2 * members.nbytes)))
    with torch.inference_mode():
        for ids, stacked in members.batches(size, device, dtype):
            ensemble = Ensemble(skeleton, stacked, ids)
            pieces = (members.preprocess(piece) for piece in torch.split(data.images, batch))
            groups.append(torch.cat([ensemble(piece.to(device, dtype)).cpu() for piece in pieces], dim=1))
    return torch.cat(groups)
