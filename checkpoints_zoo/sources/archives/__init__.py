"""Archives of safetensors files; the index of an archive lists its members and the byte range of each.

An uncompressed tar, under any name, is indexed by a few range reads; a gzipped one can only be read from its start.
Members are never unpacked into files, so no name in an archive becomes a path.
"""

from __future__ import annotations

from checkpoints_zoo.sources.archives.contents import Entry, Index, MemberHeader, OtherFile, numbers_in
from checkpoints_zoo.sources.archives.rows import (  # fmt: skip
    IdentifyNet,
    MemberGroup,
    MemberRange,
    archive_group,
    index_file,
    layout_key,
    layout_of_header,
    rows_of_archives,
    rows_of_groups,
    source_of_archive,
)
from checkpoints_zoo.sources.archives.streams import stream_members
from checkpoints_zoo.sources.archives.tar import LINK_KINDS
from checkpoints_zoo.sources.archives.walking import index_archive, is_as_predicted, walk_archive

__all__ = [
    "LINK_KINDS",
    "Entry",
    "IdentifyNet",
    "Index",
    "MemberGroup",
    "MemberHeader",
    "MemberRange",
    "OtherFile",
    "archive_group",
    "index_archive",
    "index_file",
    "is_as_predicted",
    "layout_key",
    "layout_of_header",
    "numbers_in",
    "rows_of_archives",
    "rows_of_groups",
    "source_of_archive",
    "stream_members",
    "walk_archive",
]  # fmt: skip
