"""Import of checkpoints as a collection: a manifest that points into the original files, or copies in shards.

Sources are tar archives (gzipped or not), safetensors files, and files of torch.save; on this disk or, except files of
torch.save, on the Hub. An interrupted import continues where it stopped.
"""

from __future__ import annotations

from checkpoints_zoo.interop.ingest.importing import Imported, ingest
from checkpoints_zoo.interop.ingest.networks import NetSpec
from checkpoints_zoo.interop.ingest.survey import ImportPlan

__all__ = ["ImportPlan", "Imported", "NetSpec", "ingest"]
