"""Evaluate networks that were made from trained ones (interpolated, averaged, sampled, pruned) on labelled images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.images import ImageData, ImageInput, Preprocess
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.populations.statistics import has_statistics, reestimate_statistics

STACK_BYTES = 1 << 27  # Bytes of networks that are in memory at once.


@dataclass(frozen=True)
class InputBatches:
    """Images as batches of inputs, of about the same size; every iteration starts with the first image.

    Args:
        data: images that become inputs.
        preprocess: preprocessing that turns images into inputs.
        device: torch device that inputs are moved to.
        batch: largest number of images in a batch.
    """

    data: ImageData
    preprocess: Preprocess
    device: torch.device
    batch: int

    def __iter__(self) -> Iterator[Tensor]:
        for piece in torch.tensor_split(self.data.images, -(-len(self.data) // self.batch)):
            yield self.data.inputs(piece, self.preprocess).to(self.device)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates stacked networks of one architecture on labelled images.

    Args:
        skeleton: module of the networks, without weights.
        test: labelled images to evaluate on.
        labels: labels of the test images, (input,).
        training: images to estimate running statistics on; None for networks without running statistics.
    """

    skeleton: nn.Module
    test: InputBatches
    labels: Tensor
    training: InputBatches | None

    @property
    def device(self) -> torch.device:
        return self.test.device

    @property
    def statistics_image_name(self) -> str:
        """Name and fingerprint of the images that running statistics are estimated on, "" if there are none."""
        return "" if self.training is None else arguments.report_image_name(self.training.data)

    @property
    def statistics_image_count(self) -> int:
        return 0 if self.training is None else len(self.training.data)

    def log_probs(self, stacked: Mapping[str, Tensor], *, reestimated: bool = True) -> Tensor:
        """Run stacked networks in float32; return log probabilities (member, input, class), float64 on the CPU.

        Args:
            stacked: parameters and buffers, name -> (member, …).
            reestimated: whether running statistics are estimated first; False uses the stack's running statistics.

        Raises:
            DamagedError: some logits are not finite.
        """
        networks = {name: t.float() if t.is_floating_point() else t for name, t in stacked.items()}
        if reestimated and self.training is not None:
            networks = reestimate_statistics(self.skeleton, networks, self.training)
        ensemble = Ensemble(self.skeleton, networks, range(len(next(iter(networks.values())))))
        with torch.inference_mode():
            logits = torch.cat([ensemble(inputs).cpu() for inputs in self.test], dim=1)
        return logits.double().log_softmax(-1).clone()

    def accuracies(self, log_probs: Tensor) -> Tensor:
        """Return the share of test inputs that each network classes correctly, (member,)."""
        return (log_probs.argmax(-1) == self.labels).double().mean(-1)

    def losses(self, log_probs: Tensor) -> Tensor:
        """Return each network's mean negative log-likelihood of the labels, nats, (member,)."""
        return -log_probs.gather(-1, self.labels.expand(len(log_probs), -1)[..., None]).squeeze(-1).mean(-1)


def make_evaluator(
    members: Collection,
    data: ImageInput | None,
    statistics: ImageInput | None,
    device: str | torch.device,
    batch: int,
) -> Evaluator:
    """Check images against members; return the Evaluator of networks of the members' architecture.

    Args:
        members: members whose architecture, classes and preprocessing are used.
        data: labelled images, as `images.of` takes them; None for the collection's own test set.
        statistics: images to estimate running statistics on, by name (the training split) or as `images.of` takes
            them; None for the collection's own training set.
        device: torch device on which networks run.
        batch: largest number of images in a forward pass.

    Raises:
        UsageError: the images lack labels or have other classes, there is no such device, or `batch` is no whole number
            of 2 or more.
    """
    if type(batch) is not int or batch < 2:
        raise UsageError("images a batch", expected="a whole number from 2", found=repr(batch))
    torch_device, skeleton = check_device(device), members._skeleton()
    test_images = arguments.images_of(members.description) if data is None else images.of(data)
    test, labels = arguments.require_labels(test_images, members.description)
    if not len(test):
        raise UsageError(f"images {test.name!r} to evaluate on", expected="one or more", found="none")
    training = None
    if has_statistics(skeleton):
        source = (
            arguments.images_of(members.description, "train") if statistics is None else _statistics_images(statistics)
        )
        if len(source) < 2:
            found = f"{len(source)} of {source.name!r}"
            raise UsageError("images to estimate running statistics on", expected="two or more", found=found)
        training = InputBatches(source, members.preprocess, torch_device, batch)
    return Evaluator(skeleton, InputBatches(test, members.preprocess, torch_device, batch), labels, training)


def _statistics_images(statistics: ImageInput) -> ImageData:
    """Return images for running statistics: of a data set that is given by name, the training split."""
    by_name = isinstance(statistics, str) and statistics in images.DATASETS
    return images.of(statistics, split="train" if by_name else None)
