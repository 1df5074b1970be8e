"""Requests for members' bytes on the Hub or the web: a member is one range of a file, or several ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import layout
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.member_parts import Part, parse_repo_file, parts_of_rows
from checkpoints_zoo.formats.selection import SnapshotKey
from checkpoints_zoo.formats.shard_files import Location, tensor_prefix
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.web import WebFolder

RepoFile = tuple[Repo, str]  # A file of a repo: the repo at its commit, and the path of the file in it.
# A file that is fetched: the repo or the folder on the web, and the path of the file in it.
FetchedFile = tuple[Repo | WebFolder, str]


@dataclass(frozen=True)
class FileRange:
    """A byte range of a file on the Hub or the web, with a member's bytes or a part of them.

    Args:
        file: the file.
        start, end: offsets of the first byte of the range and of the byte after the last one.
        etag: ETag of the file according to the manifest; None if the manifest does not say it.
    """

    file: FetchedFile
    start: int
    end: int
    etag: str | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def repo_file(self) -> RepoFile:
        """The file, which is known to be on the Hub."""
        repo, path = self.file
        if not isinstance(repo, Repo):
            raise TypeError(f"{path} is not on the Hub")
        return repo, path


@dataclass(frozen=True)
class MemberRequest:
    """A request for the bytes of one snapshot, made from its manifest row.

    Args:
        key: (member, epoch); the epoch is None for the final snapshot.
        prefix: prefix of the member's tensor names in the file.
        ranges: ranges that make up the bytes before the tensors and the tensors, one after another.
        layout: layout of the member's bytes.
        sha256: content hash of the member; None if unknown.
        name_in_archive: name of the member's file in its archive; "" outside archives.
        archive_header_nbytes: number of bytes of the archive's header before the member, which is fetched too and names
            the member; 0 if the member's offset is known, not predicted.
        belongs_to_member: function of the bytes before the tensors that returns whether they belong to this member;
            None if the member's offset is known.
    """

    key: SnapshotKey
    prefix: str
    ranges: tuple[FileRange, ...]
    layout: Layout = field(compare=False)
    sha256: str | None
    name_in_archive: str = ""
    archive_header_nbytes: int = 0
    belongs_to_member: Callable[[bytes], bool] | None = field(default=None, compare=False)

    @classmethod
    def of_range(
        cls, file: FetchedFile, key: SnapshotKey, prefix: str, offset: int, layout: Layout, sha256: str | None,
        archive_header_nbytes: int = 0, **optional_fields: Any,
    ) -> MemberRequest:  # fmt: skip
        """Return the request for a member whose bytes are one range of a file.

        Args:
            file: the file.
            offset: offset of the member's first tensor in the file.
            key, prefix, layout, sha256, archive_header_nbytes, optional_fields: the same arguments as in
                `MemberRequest`.
        """
        start, end = offset - layout.header_nbytes - archive_header_nbytes, offset + layout.nbytes
        return cls(
            key,
            prefix,
            (FileRange(file, start, end),),
            layout,
            sha256,
            archive_header_nbytes=archive_header_nbytes,
            **optional_fields,
        )

    @property
    def first(self) -> FileRange:
        return self.ranges[0]

    @property
    def offset(self) -> int:
        """Offset of the member's first tensor in its file."""
        return self.first.start + self.layout.header_nbytes + self.archive_header_nbytes

    @property
    def nbytes(self) -> int:
        """Number of bytes of all ranges."""
        return sum(file_range.nbytes for file_range in self.ranges)

    @property
    def path(self) -> str:
        """Path in its repo or folder of the file that has the member's first byte."""
        return self.first.file[1]

    def of_tensor(self, name: str) -> MemberRequest:
        """Return the request for one tensor of the member, whose bytes have no hash of their own.

        Raises:
            UsageError: the member has no such tensor.
        """
        layout, tensor_offset = tensor_layout(self.layout, name)
        start, ranges, range_start = self.layout.header_nbytes + self.archive_header_nbytes + tensor_offset, [], 0
        for file_range in self.ranges:
            first = max(start, range_start)
            last = min(start + layout.nbytes, range_start + file_range.nbytes)
            if first < last or (not layout.nbytes and range_start <= start <= range_start + file_range.nbytes):
                shift = file_range.start - range_start
                ranges.append(replace(file_range, start=first + shift, end=max(first, last) + shift))
            range_start += file_range.nbytes
        return MemberRequest(self.key, self.prefix, tuple(ranges), layout, None)


@lru_cache(maxsize=1024)
def tensor_layout(layout: Layout, name: str) -> tuple[Layout, int]:
    """Return the layout of one tensor of a member, and the offset of its bytes within the member.

    Raises:
        UsageError: the layout has no such tensor.
    """
    spec = layout.spec(name)
    return Layout.of_stored([(name, spec.dtype, spec.shape, name, spec.shape)], (), 0), spec.offset


def requests_of_rows(
    place: Repo | WebFolder | None, described: layout.DescriptionWithLayouts, rows: pa.Table
) -> list[MemberRequest | None]:
    """Return the requests for the bytes of a manifest's rows.

    Args:
        place: the repo or folder on the web that holds the bytes of rows without parts; None if a folder on this
            machine holds them, so that there is no request for such a row.
        described: the description that belongs to the manifest of the rows.
        rows: manifest rows of members with weights.
    """
    columns = zip(*(rows.column(c).to_pylist() for c in ("layout", "sha256")), strict=True)
    requests: list[MemberRequest | None] = []
    for key, parts, (layout_key, sha256) in zip(snapshot_keys(rows), parts_of_rows(rows), columns, strict=True):
        layout, prefix = described.layouts[layout_key], tensor_prefix(*key)
        address = parse_repo_file(parts[0].path)
        if address is not None:
            # Files of model repos hold one member each, under the plain names of its tensors.
            prefix = "" if address.kind == "model" else prefix
            requests.append(MemberRequest(key, prefix, tuple(map(_range_of_part, parts)), layout, sha256))
        elif place is None:
            requests.append(None)
        else:
            requests.append(
                MemberRequest.of_range((place, parts[0].path), key, prefix, parts[0].offset, layout, sha256)
            )
    return requests


def _range_of_part(part: Part) -> FileRange:
    """Return the range of a file on the Hub that a part of a checked row names."""
    address = parse_repo_file(part.path)
    if address is None:
        raise DamagedError(f"part {part.path}", expected="hf://[datasets/]ORG/NAME@COMMIT/FILE", path=part.path)
    file = Repo(address.id, address.commit, address.kind), address.path
    return FileRange(file, part.offset, part.offset + part.nbytes, part.etag)


def tensor_location(location: Location, name: str) -> Location:
    """Return the location of one tensor of a member in the member's file."""
    layout, offset = tensor_layout(location.layout, name)
    return replace(location, offset=location.offset + offset, layout=layout)
