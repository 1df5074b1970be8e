"""Checkpoints that lie anywhere become a collection: a manifest over the files as they are, or shards of our own.

What is imported lies in tar archives (gzipped or not), in safetensors files or in files of torch.save, on this disk or,
the last aside, on the Hub. Every step can be cut off and goes on where it was.
"""

from __future__ import annotations

from checkpoints_zoo.interop.ingest.importing import Imported, ingest
from checkpoints_zoo.interop.ingest.networks import NetSpec
from checkpoints_zoo.interop.ingest.survey import ImportPlan

__all__ = ["ImportPlan", "Imported", "NetSpec", "ingest"]
