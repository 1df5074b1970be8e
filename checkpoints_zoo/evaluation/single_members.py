"""The figures of single members on images, as manifests have them: by the stored bytes, computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.arguments import eval_data, labelled
from checkpoints_zoo.images import ImageData


def member_figures(
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
    inside, labels = labelled(inside, members.description)
    # Through their own code, so that a manifest's figures do not depend on how ensembles are run.
    all_logits = predictions.logits(members, inside, device, execution="module").double()
    for member, logits in zip(members.ids, all_logits, strict=True):
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


def manifest_columns(
    members: Collection, inside: ImageData, device: str | torch.device = "cpu"
) -> dict[int, dict[str, Any]]:
    """Measure members on a test set; return member -> the manifest's columns on it.

    Args, Raises: as of `member_figures`.
    """
    name = eval_data(inside)
    return {
        member: {**{f"test_{figure}": value for figure, value in figures.items()}, "eval_data": name}
        for member, figures in member_figures(members, inside, device)
    }
