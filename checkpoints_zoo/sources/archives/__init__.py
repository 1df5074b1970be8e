"""Archives of safetensors files, read where they lie: which members they hold, and where each one's bytes are.

An uncompressed tar, whatever it is called, is indexed with few range reads; a gzipped one can only be streamed.
Nothing is ever unpacked, so no name in an archive becomes the name of a file.
"""

from __future__ import annotations

from checkpoints_zoo.sources.archives.contents import Entry, Index, MemberHeader, Other, numbers_in
from checkpoints_zoo.sources.archives.rows import (  # fmt: skip
    IdentifyNet,
    MemberGroup,
    MemberRange,
    archive_group,
    index_file,
    layout_key,
    layout_of_head,
    rows_of_archives,
    rows_of_groups,
    source_of_archive,
)
from checkpoints_zoo.sources.archives.streams import stream_members
from checkpoints_zoo.sources.archives.walking import index_archive, is_as_predicted, walk_archive

__all__ = [
    "Entry",
    "IdentifyNet",
    "Index",
    "MemberGroup",
    "MemberHeader",
    "MemberRange",
    "Other",
    "archive_group",
    "index_archive",
    "index_file",
    "is_as_predicted",
    "layout_key",
    "layout_of_head",
    "numbers_in",
    "rows_of_archives",
    "rows_of_groups",
    "source_of_archive",
    "stream_members",
    "walk_archive",
]  # fmt: skip
