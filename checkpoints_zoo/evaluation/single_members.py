"""Measure single members on images, for the columns of manifests: stored weights, computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.arguments import manifest_image_name, require_labels
from checkpoints_zoo.images import ImageData


def member_figures(
    members: Collection, data: ImageData, device: str | torch.device = "cpu"
) -> Iterator[tuple[int, dict[str, float]]]:
    """Measure each member alone; yield (id of the member, figure -> value) with accuracy, nll, brier and ece.

    Args:
        members: a collection.
        data: labelled images to measure on.
        device: device that the members run on.

    Raises:
        UsageError: the images have no labels, or their classes or size do not fit the members.
        DamagedError: weights or logits of a member are not finite.
    """
    data, labels = require_labels(data, members.description)
    # Each member runs as a module, so that figures in a manifest do not depend on the execution of ensembles.
    all_logits = predictions.logits(members, data, device, execution="module").double()
    for member, logits in zip(members.ids, all_logits, strict=True):
        if logits.shape[-1] != len(data.classes):
            raise UsageError(
                f"images {data.name!r} for {members.name}",
                expected=f"{logits.shape[-1]} classes, as many as the members' logits",
                found=f"{len(data.classes)}",
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


def manifest_columns(
    members: Collection, data: ImageData, device: str | torch.device = "cpu"
) -> dict[int, dict[str, Any]]:
    """Measure members on a test set; return member -> values of the manifest's columns on the test set.

    Arguments and errors are the same as in `member_figures`.
    """
    name = manifest_image_name(data)
    return {
        member: {**{f"test_{figure}": value for figure, value in figures.items()}, "eval_data": name}
        for member, figures in member_figures(members, data, device)
    }
