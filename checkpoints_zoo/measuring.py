"""The figures of single members on images, as manifests have them: by the stored bytes, computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo import metrics, predictions
from checkpoints_zoo.catalog import Description
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageData


def labels_of(inside: ImageData, description: Description) -> Tensor:
    """Check that images have labels, and of a collection's classes in the order of its logits; return them (input,).

    Raises:
        UsageError: they have none, or others.
    """
    if inside.labels is None or tuple(inside.classes) != description.classes:
        raise UsageError(
            f"images {inside.name!r} for {description.name}",
            expected=f"labels of the classes {', '.join(description.classes[:12])}, in this order",
            found=f"classes {', '.join(inside.classes[:12])}" if inside.labels is not None else "no labels",
            do="Give the test set of the collection, or images whose classes are in its order",
        )
    return inside.labels


def figures(
    members: Collection, inside: ImageData, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float]]]:
    """Measure members one by one; yield (member, accuracy, nll, brier and ece by name).

    Args:
        members: a collection.
        inside: images with labels.
        device: what the members run on.

    Raises:
        UsageError: images without labels, or of other classes or another size than the members take.
        DamagedError: members whose weights or logits are not finite.
    """
    labels = labels_of(inside, members.description)
    # Through their own code, so that a manifest's figures do not depend on how ensembles are run.
    found = predictions.logits(members, inside, device, execution="module").double()
    for member, logits in zip(members.ids, found, strict=True):
        if logits.shape[-1] != len(inside.classes):
            raise UsageError(
                f"images {inside.name!r} for {members.name}",
                expected=f"{logits.shape[-1]} classes, as many as the members' logits",
                found=f"{len(inside.classes)}",
            )
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        yield (
            member,
            {
                "accuracy": metrics.accuracy(probs, labels).item(),
                "nll": metrics.nll(log_probs, labels).item(),
                "brier": metrics.brier(probs, labels).item(),
                "ece": metrics.ece(probs, labels).item(),
            },
        )


def measured(members: Collection, inside: ImageData, device: str | torch.device = "cpu") -> dict[int, dict[str, Any]]:
    """Measure members on a test set; return member -> the manifest's columns on it.

    Args, Raises: as of `figures`.
    """
    name = eval_data(inside)
    return {
        member: {**{f"test_{figure}": value for figure, value in found.items()}, "eval_data": name}
        for member, found in figures(members, inside, device)
    }


def eval_data(inside: ImageData) -> str:
    """Return how a manifest names a test set."""
    return f"{inside.name}/{inside.split}"
