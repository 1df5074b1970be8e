"""Logits of members on images: computed now, or read from where they were stored once.

Axes: logits are (member, input, class).
"""

from __future__ import annotations

from checkpoints_zoo.predictions.running import Members, by_members, logits
from checkpoints_zoo.predictions.stored import Predictions, check_same, predictions_of
from checkpoints_zoo.predictions.storing import predict

__all__ = ["Members", "Predictions", "by_members", "check_same", "logits", "predict", "predictions_of"]
