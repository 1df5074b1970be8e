"""Logits of members on images: computed now, or stored once and read again.

Axes: logits are (member, input, class).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_zoo.predictions.in_memory import (
        PosteriorMean,
        PredictionsInMemory,
        describe,
        predictions_from_probabilities,
    )
    from checkpoints_zoo.predictions.running import Members, logits, logits_by_group
    from checkpoints_zoo.predictions.stored import Predictions, check_same_members, predictions_of
    from checkpoints_zoo.predictions.storing import predict

__all__ = [
    "Members", "PosteriorMean", "Predictions", "PredictionsInMemory", "check_same_members", "describe", "logits",
    "logits_by_group", "predict", "predictions_from_probabilities", "predictions_of",
]  # fmt: skip

# Name -> module, imported on first use: `zoo-cli publish --dry-run` reads stored sets without importing torch.
_PLACES = {
    **dict.fromkeys(
        ("PosteriorMean", "PredictionsInMemory", "describe", "predictions_from_probabilities"), "in_memory"
    ),
    "Members": "running",
    "logits_by_group": "running",
    "logits": "running",
    "Predictions": "stored",
    "check_same_members": "stored",
    "predictions_of": "stored",
    "predict": "storing",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'checkpoints_zoo.predictions' has no attribute {name!r}")
    return getattr(import_module(f"checkpoints_zoo.predictions.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
