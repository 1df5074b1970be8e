"""The members of an origin with their locations and headers, from which the rows of the manifest are made.

A gzipped archive can only be read from front to back. Each gzipped archive is streamed once, and its members are staged
on disk until a shard has them:

OUT/.import/NAME/KEY/000007.safetensors     a member, named by its position, never by a name in the archive
OUT/.import/NAME/KEY/index.json             index of the archive, written after its last member

This is one file, because members of archives, of gzipped archives and of files become the same records.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any

from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.interop.ingest.origin import Origin, Say, number_files
from checkpoints_zoo.sources import archives, fetching, hub_addresses, hub_cache
from checkpoints_zoo.sources.archives import Entry, IdentifyNet, Index, MemberGroup, MemberHeader, MemberRange, indexing
from checkpoints_zoo.sources.archives.contents import Contents
from checkpoints_zoo.sources.archives.tar import BLOCK_BYTES, TarHeader
from checkpoints_zoo.sources.hub_ranges import RemoteFile

MAX_LISTED = 5  # number of files that an error names.
PARALLEL_ARCHIVES = 3  # number of archives that are read at once from a repo, each over several connections
_SHARD_NAME = re.compile(r"[0-9]{6,}(@[0-9]+)?/")
RANGE_BYTES = 2**23  # number of bytes that a stream of a repo's file reads at once
ReadRange = Callable[[int, int], bytes]


def members_of_archives(
    origin: Origin, staged_indexes: Mapping[str, archives.Index], may_predict_index: bool
) -> list[MemberGroup]:
    """Index the archives of an origin; return the members of each.

    Args:
        origin: origin that has the archives.
        staged_indexes: indexes of the gzipped archives; paths of their members are "ARCHIVE!POSITION".
        may_predict_index: whether an index of a repo's archive may be predicted from some of its headers.

    Raises:
        DamagedError: a file is no archive, or is cut.
        NetworkError, AccessError: the repo can't be read.
    """
    tar_paths = [p for p in origin.archives if p not in origin.gzips]
    if origin.repo is None:
        archive_indexes = indexing.open_local(origin.root, tar_paths)
    else:
        if not may_predict_index:
            with ThreadPoolExecutor(PARALLEL_ARCHIVES, thread_name_prefix="zoo-walk") as pool:
                list(pool.map(partial(indexing.walk_remote, origin.repo), tar_paths))
        archive_indexes = indexing.open_remote(origin.repo, tar_paths) if tar_paths else []
    index_by_path = {archive.source_path: archive.index for archive in archive_indexes}
    groups = []
    for path in origin.archives:
        if path in index_by_path:
            groups.append(archives.archive_group(path, index_by_path[path]))
        elif path in staged_indexes:
            groups.append(_members_of_staged(path, staged_indexes[path]))
    return groups


def _members_of_staged(archive_path: str, index: archives.Index) -> MemberGroup:
    # If entries have equal names, the last one counts.
    headers, last_position_of_name = index.headers, {e.name: i for i, e in enumerate(index.entries)}
    entries = [(i, e) for i, e in enumerate(index.entries) if last_position_of_name[e.name] == i]
    return MemberGroup(
        [
            MemberRange(e.name, f"{archive_path}!{i}", headers[e.header_number].header_nbytes, headers[e.header_number])
            for i, e in entries
        ]
    )


def count_predicted_headers(origin: Origin) -> int:
    """Return the number of members of a repo's archives whose headers were only predicted so far."""
    if origin.repo is None:
        return 0
    archive_indexes = indexing.open_remote(origin.repo, [p for p in origin.archives if p not in origin.gzips] or [])
    indexes = [archive.index for archive in archive_indexes]
    return sum(len(index.entries) for index in indexes if not all(e.verified for e in index.entries))


def members_of_files(origin: Origin, say: Say) -> MemberGroup:
    """Read the headers of safetensors files; return their members.

    Raises:
        UsageError: a file is a shard of a collection, not a single member.
        NetworkError, AccessError: the repo can't be read.
    """
    contents, members = Contents(origin.label), list[MemberRange]()
    if origin.repo is None:
        readers = [_local_size_and_reader(origin.root / p) for p in origin.files]
    else:
        with ThreadPoolExecutor(fetching.CONNECTION_COUNT, thread_name_prefix="zoo-heads") as pool:
            readers = list(pool.map(partial(_remote_size_and_reader, origin.repo), origin.files))
    for path, (size, read_range) in zip(origin.files, readers, strict=True):
        entry = contents.add(TarHeader(path, 0, 0, size, ""), read_range)
        if entry:
            head = contents.headers[entry.header_number]
            if all(_SHARD_NAME.match(name) for name, _, _ in head.tensors):
                raise UsageError(
                    f"file {path} of {origin.label}",
                    expected="one member a file",
                    found="a shard with several members of a collection",
                    do="`zoo-cli download NAME --source DIR --dest OUT` copies a collection that has a manifest",
                    path=path,
                )
            members.append(MemberRange(path, path, head.header_nbytes, head))
    for other in contents.others:
        if not other.is_damaged_member:
            say(f"{other.name} is left out: {other.reason}")
    return MemberGroup(members, [(other.name, other.reason) for other in contents.others if other.is_damaged_member])


def _local_size_and_reader(path: Path) -> tuple[int, ReadRange]:
    def read_range(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return path.stat().st_size, read_range


def _remote_size_and_reader(repo: hub_addresses.Repo, repo_path: str) -> tuple[int, ReadRange]:
    """Read the first bytes of a repo's file, enough for most headers; return its size and its range reader."""
    remote_file = fetching.remote_file(repo, repo_path)
    first_bytes = remote_file.bytes_at(0, min(remote_file.size, archives.walking.FIRST_READ_BYTES))

    def read_range(offset: int, length: int) -> bytes:
        return (
            first_bytes[offset : offset + length]
            if offset + length <= len(first_bytes)
            else remote_file.bytes_at(offset, length)
        )

    return remote_file.size, read_range


def number_members(group: MemberGroup, file_paths: Sequence[str], earlier_ids: Mapping[str, int]) -> MemberGroup:
    """Number the members of a folder by their file names; return them with the numbers.

    Args:
        group: members of the folder, one a file.
        file_paths: paths of the files, in order.
        earlier_ids: path -> member id of the files that were imported before. Files that were imported before keep
            their numbers; if numbering all files would change such a number, the other files get the next free numbers.
    """
    names = [*(m.name for m in group.members), *(name for name, _ in group.damaged)]
    present_names = set(names)
    member_paths = [path for path in file_paths if path in present_names]
    id_of_path = dict(zip(member_paths, number_files(member_paths), strict=True))
    kept_ids = {path: member for path, member in earlier_ids.items() if path in id_of_path}
    if any(id_of_path[path] != member for path, member in kept_ids.items()):
        free_ids = itertools.count(max(kept_ids.values()) + 1)
        id_of_path = {path: kept_ids[path] if path in kept_ids else next(free_ids) for path in member_paths}
    return replace(group, numbers=[id_of_path[name] for name in names])


def member_id_by_path(groups: Sequence[MemberGroup]) -> dict[str, int]:
    """Return path -> member of the members with their own files, in the order of the members."""
    name_id_pairs = (
        zip((*(m.name for m in group.members), *(n for n, _ in group.damaged)), group.numbers, strict=True)
        for group in groups
        if group.numbers
    )
    return dict(
        sorted(
            (name_and_id for pairs in name_id_pairs for name_and_id in pairs), key=lambda name_and_id: name_and_id[1]
        )
    )


def check_all_fit(label: str, groups: Sequence[MemberGroup], identify_net: IdentifyNet) -> None:
    """Check that every file holds a member of the net.

    Raises:
        DamagedError, LayoutError: some files hold no member of the net; the error names them and the reason.
    """
    problems: dict[int, str] = {}
    damaged_members = [name_and_problem for group in groups for name_and_problem in group.damaged]
    members_of_other_networks = []
    for member in (m for group in groups for m in group.members):
        if id(member.header) not in problems:
            try:
                identify_net(member.header)
                problems[id(member.header)] = ""
            except LayoutError as error:
                problems[id(member.header)] = error.found or str(error)
        if problem := problems[id(member.header)]:
            members_of_other_networks.append((member.name, problem))
    if not damaged_members and not members_of_other_networks:
        return
    file_count = sum(len(group.members) + len(group.damaged) for group in groups)
    # The text on a damaged file names the file already.
    problem_texts = [
        *(why.rstrip(".") for _, why in damaged_members),
        *(f"{name}: {why}" for name, why in members_of_other_networks),
    ][:MAX_LISTED]
    more = len(damaged_members) + len(members_of_other_networks) - len(problem_texts)
    and_more = f". And {more:,} more" if more else ""
    raise (DamagedError if damaged_members else LayoutError)(
        f"checkpoints of {label}",
        expected=f"{file_count:,} of the architecture, by name and shape of their tensors",
        found=f"{len(damaged_members) + len(members_of_other_networks):,} that are not. "
        f"{'. '.join(problem_texts)}{and_more}",
        do="Nothing was written. Move these files away, or give the architecture that they were trained with",
        path=[*damaged_members, *members_of_other_networks][0][0],
    )


def stage_gzips(origin: Origin, folder: Path, say: Say) -> dict[str, Index]:
    """Stream the gzipped archives of an origin, unless they are staged already; return their indexes by path.

    Args:
        origin: origin that has the archives.
        folder: folder in which the archives' members are staged.
        say: function called with a line of text for each archive.

    Raises:
        DamagedError: an archive is cut, or has a damaged member.
        NetworkError, AccessError: the repo can't be read.
    """
    return {
        p: _stage_gzip(origin, p, folder / staging_folder_name(origin, p), say)
        for p in origin.archives
        if p in origin.gzips
    }


def _stage_gzip(origin: Origin, archive_path: str, folder: Path, say: Say) -> Index:
    index_path = folder / "index.json"
    if index_path.is_file():
        try:
            return Index.from_json(catalog.read_json(index_path))
        except FormatError:
            pass  # if the index has another version, the archive is streamed again
    say(f"{archive_path}: a gzipped archive, read once from front to back …")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    number_of_header: dict[tuple[Any, ...], int] = {}
    distinct_headers, entries, offset = list[MemberHeader](), list[Entry](), 0
    with _open_archive(origin, archive_path) as file:
        for position, (name, header, raw) in enumerate(archives.stream_members(file, archive_path)):
            tensors = tuple((n, dtype, shape) for n, (dtype, shape, _, _) in header.tensors.items())
            key = (header.data_start, tensors)
            if key not in number_of_header:
                number_of_header[key] = len(distinct_headers)
                distinct_headers.append(MemberHeader(header.data_start, tensors))
            # Offsets in a gzipped archive can't be used for reading: the index has each member's position instead.
            entries.append(Entry(name, offset, offset + BLOCK_BYTES, number_of_header[key], True))
            offset += BLOCK_BYTES + len(raw)
            (folder / f"{position:06d}.safetensors").write_bytes(raw)
    index = Index(archive_path, offset, "tar", tuple(distinct_headers), tuple(entries))
    catalog.write_json(index.to_json(), index_path)
    return index


def staging_folder_name(origin: Origin, archive_path: str) -> str:
    """Return the name of an archive's staging folder; a changed archive gets another folder."""
    if origin.repo is None:
        stat = (origin.root / archive_path).stat()
        file_stamp = f"{archive_path} {stat.st_size} {stat.st_mtime_ns}"
    else:
        file_stamp = f"{origin.repo} {archive_path}"
    return hashlib.sha256(file_stamp.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _open_archive(origin: Origin, archive_path: str) -> IO[bytes]:
    if origin.repo is None:
        return (origin.root / archive_path).open("rb")
    if cached_path := hub_cache.cached_file(origin.repo, archive_path):
        return cached_path.open("rb")
    return BufferedReader(_RemoteFile(fetching.remote_file(origin.repo, archive_path)), RANGE_BYTES)


class _RemoteFile(RawIOBase):
    """A file of a repo as a stream, read by ranges; nothing is cached."""

    def __init__(self, remote: RemoteFile) -> None:
        self.remote, self.position = remote, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.remote.bytes_at(self.position, min(len(buffer), self.remote.size - self.position))
        buffer[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)


def file_finder(origin: Origin, folder: Path) -> Callable[[str], Path]:
    """Return a function that maps the path in a row to a file on this disk."""
    folder_names = {p: staging_folder_name(origin, p) for p in origin.gzips}

    def find_file(row_path: str) -> Path:
        name, separator, position = row_path.rpartition("!")
        if separator and name in folder_names:
            return folder / folder_names[name] / f"{int(position):06d}.safetensors"
        return origin.root / row_path

    return find_file
