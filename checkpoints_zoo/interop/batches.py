"""What a neighbour gets: members as an ensemble that is held in memory, images as batches of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.images import ImageData, ImageInput, Preprocess
from checkpoints_zoo.networks.ensemble import Ensemble

Batch = tuple[Tensor, Tensor]
NO_LABEL = -1


def as_ensemble(members: Collection | Ensemble) -> Ensemble:
    """Make a collection an ensemble in float32 on the CPU; return it, or the ensemble that is one already.

    Raises:
        UsageError: neither.
        DamagedError, TooLargeError: as `Collection.ensemble`.
    """
    argument: object = members
    if isinstance(argument, Ensemble):
        return argument
    if isinstance(argument, Collection):
        return argument.ensemble()
    expected = "a Collection, or an Ensemble: members.ensemble(device=..., execution=...)"
    raise UsageError("members", expected=expected, found=type(argument).__name__)


def check_collection(members: object) -> None:
    """Check that members are a collection.

    Raises:
        UsageError: they are something else.
    """
    if not isinstance(members, Collection):
        expected, do = "a Collection", "One member is a collection as well: members[3:4]"
        raise UsageError("members", expected=expected, found=type(members).__name__, do=do)


@dataclass(frozen=True)
class Collate:
    """Make examples (image, label) a batch (inputs, labels); images become inputs a batch at a time."""

    data: ImageData
    preprocess: Preprocess

    def __call__(self, examples: Sequence[Batch]) -> Batch:
        pixels, labels = zip(*examples, strict=True)
        return self.data.inputs(torch.stack(pixels), self.preprocess), torch.stack(labels)


def loader(
    members: Collection, data: ImageInput, split: str | None = None, *, ood: bool = False, batch: int = 128
) -> DataLoader[Any]:
    """Make images batches of (inputs, labels) as the members take them, in order; return the DataLoader.

    Args:
        members: whose preprocessing and classes count.
        data: images: their name, their place, or whatever `images.of` takes.
        split: of images that have several; None for "test".
        ood: whether they are out of distribution; all labels are -1 then.
        batch: images a batch.

    Raises:
        UsageError: no collection; images without labels, or of other classes than the members', unless they are `ood`;
            images of a size that the members can't take; others, as `images.of`.
        SourceNotFound, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: as `images.of`.

    >>> import checkpoints_zoo as zoo
    >>> inputs, labels = next(iter(zoo.interop.loader(zoo.load("convnet-digits"), "digits")))
    >>> inputs.shape, labels.shape
    (torch.Size([128, 1, 8, 8]), torch.Size([128]))
    """
    check_collection(members)
    image_data = images.of(data, split=split)
    labels = torch.full((len(image_data),), NO_LABEL) if ood else arguments.labels_of(image_data, members.description)
    collate = Collate(image_data, members.preprocess)
    image_data.inputs(image_data.images[:1], members.preprocess)  # says now whether they fit
    return DataLoader(TensorDataset(image_data.images, labels), batch_size=batch, collate_fn=collate)
