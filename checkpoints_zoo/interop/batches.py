"""Arguments for neighbouring packages: members as an ensemble in memory, images as batches of inputs."""

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
    """Return the ensemble of a collection, in float32 on the CPU; an ensemble is returned unchanged.

    Raises:
        UsageError: `members` is neither a collection nor an ensemble.
        DamagedError, TooLargeError: the same cases as in `Collection.ensemble`.
    """
    argument: object = members
    if isinstance(argument, Ensemble):
        return argument
    if isinstance(argument, Collection):
        return argument.ensemble()
    expected = "a Collection, or an Ensemble: members.ensemble(device=..., execution=...)"
    raise UsageError("members", expected=expected, found=type(argument).__name__)


@dataclass(frozen=True)
class Collate:
    """Collate examples (image, label) into a batch (inputs, labels), preprocessing the images."""

    data: ImageData
    preprocess: Preprocess

    def __call__(self, examples: Sequence[Batch]) -> Batch:
        pixels, labels = zip(*examples, strict=True)
        return self.data.inputs(torch.stack(pixels), self.preprocess), torch.stack(labels)


def loader(
    members: Collection, data: ImageInput, split: str | None = None, *, ood: bool = False, batch: int = 128
) -> DataLoader[Any]:
    """Return a DataLoader of batches (inputs, labels), preprocessed for the members, in order.

    Args:
        members: members whose preprocessing and classes are used.
        data: images: a name, a path, or any other argument of `images.of`.
        split: split of the images; None for "test".
        ood: whether the images are out of distribution; then all labels are -1.
        batch: number of images in a batch.

    Raises:
        UsageError: members are no collection; images lack labels or have other classes than the members, unless `ood`;
            images have a wrong size; others the same cases as in `images.of`.
        SourceNotFound, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: the same cases as in
            `images.of`.

    >>> import checkpoints_zoo as zoo
    >>> inputs, labels = next(iter(zoo.interop.loader(zoo.load("convnet-digits"), "digits")))
    >>> inputs.shape, labels.shape
    (torch.Size([128, 1, 8, 8]), torch.Size([128]))
    """
    arguments.check_collection(members)
    image_data = images.of(data, split=split)
    labels = torch.full((len(image_data),), NO_LABEL) if ood else arguments.labels_of(image_data, members.description)
    collate = Collate(image_data, members.preprocess)
    image_data.inputs(image_data.images[:1], members.preprocess)  # raises an early error if the image size is wrong
    return DataLoader(TensorDataset(image_data.images, labels), batch_size=batch, collate_fn=collate)
