"""Stored predictions of a collection's members: what a set says of itself, its rows, and where their bytes lie.

A set is a folder of a source, `predictions/COLLECTION/SET/`: `manifest.json` (`Facts`), `manifest.parquet` with one row
a snapshot (`SCHEMA`), and shards like those of weights, whose members have one tensor, `logits` (input, class).
"""

from __future__ import annotations

from checkpoints_zoo.predictions.checking import other_weights, problems, weights_of
from checkpoints_zoo.predictions.facts import LOGITS, SCHEMA, Facts, layout_of
from checkpoints_zoo.predictions.sets import DESCRIPTION, TABLE, PredictionSet, check_set, folder_of, names, place, read

__all__ = [
    "DESCRIPTION", "LOGITS", "SCHEMA", "TABLE", "Facts", "PredictionSet", "check_set", "folder_of", "layout_of",
    "names", "other_weights", "place", "problems", "read", "weights_of",
]  # fmt: skip
