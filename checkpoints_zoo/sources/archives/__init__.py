"""Archives of safetensors files, read where they lie: which members they hold, and where each one's bytes are.

An uncompressed tar, whatever it is called, is indexed with few range reads; a gzipped one can only be streamed.
Nothing is ever unpacked, so no name in an archive becomes the name of a file.
"""

from __future__ import annotations

from checkpoints_zoo.sources.archives.contents import Entry, Head, Index, Other, numbers_in
from checkpoints_zoo.sources.archives.rows import (  # fmt: skip
    Lot,
    Lying,
    Tell,
    index_file,
    layout_key,
    layout_of_head,
    lot_of,
    rows_of,
    rows_of_lots,
    source_of_archive,
)
from checkpoints_zoo.sources.archives.streams import stream
from checkpoints_zoo.sources.archives.walking import index, is_as_predicted, walk

__all__ = [
    "Entry",
    "Head",
    "Index",
    "Lot",
    "Lying",
    "Other",
    "Tell",
    "index",
    "index_file",
    "is_as_predicted",
    "layout_key",
    "layout_of_head",
    "lot_of",
    "numbers_in",
    "rows_of",
    "rows_of_lots",
    "source_of_archive",
    "stream",
    "walk",
]  # fmt: skip
