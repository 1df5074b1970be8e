"""Fetching of members from a repo on the Hub: cached members are used, missing ones are fetched by a few range
reads.

The offsets of members in an archive are predicted from its first headers. An archive is irregular if the header before
a member shows that another member lies at the predicted offset; the caller then reads all headers of the archive.

This is one file, because every step of a fetch works on the same requests: the search in the cache, the plan of ranges,
the check.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import cast

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, NetworkError, NotCompared
from checkpoints_zoo.formats import layout
from checkpoints_zoo.formats.layout import content_hash
from checkpoints_zoo.formats.selection import SnapshotKey, format_ids
from checkpoints_zoo.formats.shard_files import Location, check_own_header
from checkpoints_zoo.formats.text import count_with_noun, first_few
from checkpoints_zoo.sources import cache, hub, hub_cache
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.hub_ranges import RemoteFile
from checkpoints_zoo.sources.member_requests import (
    FetchedFile,
    FileRange,
    MemberRequest,
    RepoFile,
    requests_of_rows,
    tensor_location,
)
from checkpoints_zoo.sources.web import WebFile

# Largest number of unwanted bytes between two ranges that one request fetches: a second request would take longer.
LARGEST_READ_GAP_NBYTES = 256 * 2**10
LARGEST_RANGE_NBYTES = 32 * 2**20  # Number of bytes from which a range is split over several connections.
CONNECTION_COUNT = 8
LARGEST_LOCK_COUNT = 256  # Largest number of files that are locked at a time: each lock is an open file.
WHOLE_FILE_SHARE = 0.4  # A file is fetched whole if the requested members take a larger share of its bytes.
WHOLE_MODEL_SHARE = 0.98  # The same for a file of a model repo, which may hold buffers that no network needs.


# Cache of this process: each file on the Hub is asked for its size and link only once.
_remote_files: dict[RepoFile, RemoteFile] = {}


@dataclass(frozen=True)
class Download:
    """A member to be fetched, its files, and the cache file that its bytes are written to."""

    request: MemberRequest
    remotes: Mapping[FetchedFile, RemoteFile | WebFile]
    draft: cache.MemberDraft

    def write(self, position: int, file_range: FileRange, piece_offset: int, piece: bytes) -> bool:
        """Write what a piece of a file has of a range; return whether this completes the member.

        Args:
            position: position of the range's first byte in the member.
            file_range: the range.
            piece_offset: offset of the piece in the file.
        """
        first = max(piece_offset, file_range.start)
        wanted = piece[first - piece_offset : max(first, file_range.end) - piece_offset]
        return bool(wanted) and self.draft.write(position + first - file_range.start, wanted)

    @property
    def positions(self) -> list[tuple[int, FileRange]]:
        """The ranges, each with the position of its first byte in the member."""
        starts = accumulate((file_range.nbytes for file_range in self.request.ranges[:-1]), initial=0)
        return list(zip(starts, self.request.ranges, strict=True))


@dataclass(frozen=True)
class _Wanted:
    """A range of a member to be fetched, and the position of its first byte in the member."""

    download: Download
    position: int
    range: FileRange

    @property
    def remote(self) -> RemoteFile | WebFile:
        return self.download.remotes[self.range.file]


class _Stopped(Exception):
    """Raised in a thread that stops because another thread has failed."""


def remote_file(repo: Repo, repo_path: str) -> RemoteFile:
    """Ask the Hub for a file's link, ETag and size, once in a process for each file; return the file.

    Raises:
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
    """
    if (repo, repo_path) not in _remote_files:
        _remote_files[repo, repo_path] = RemoteFile.of(repo, repo_path)
    return _remote_files[repo, repo_path]


def fetch_rows(
    repo: Repo,
    described: layout.DescriptionWithLayouts,
    rows: pa.Table,
    allow_whole_files: bool = True,
    check: bool = False,
) -> list[Location]:
    """Fetch the bytes of manifest rows from a repo; return their locations on this disk.

    Args:
        repo: the repo that holds the bytes of rows without parts.
        described: the description that belongs to the manifest of the rows.
        rows: manifest rows of the members to fetch.
        allow_whole_files, check: the same arguments as in `fetch_members`.

    Raises:
        NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: for the same reasons as in
            `fetch_members`.
    """
    requests = [request for request in requests_of_rows(repo, described, rows) if request is not None]
    return fetch_members(str(repo), described.name, requests, allow_whole_files, check)


def count_cached(requests: Sequence[MemberRequest]) -> int:
    """Count the members that are in a cache of this machine; nothing is fetched."""
    return len(_find_local(requests, _headers_of_layouts(requests))[0])


def _headers_of_layouts(requests: Sequence[MemberRequest]) -> dict[int, bytes]:
    """Return the header of the cache files of each layout, by the id of the layout."""
    layouts = {id(request.layout): request.layout for request in requests}
    return {key: cache.cache_file_header(layout) for key, layout in layouts.items()}


def fetch_members(
    source_name: str,
    collection: str,
    requests: Sequence[MemberRequest],
    allow_whole_files: bool = True,
    check: bool = False,
) -> list[Location]:
    """Fetch members whose locations on the Hub are known, all missing members together; return the locations on this
    disk.

    Args:
        source_name: name of the source whose manifest the requests are from, for errors.
        collection: name of the collection, for errors.
        requests: the requested members.
        allow_whole_files: whether a file may be fetched whole, into the cache of the Hub's client, if most of its bytes
            are needed.
        check: whether cached members are hashed again, even if a hash is recorded.

    Raises:
        NetworkError: the Hub gave no answer; or offline mode is on, and members are missing, which the error lists.
        AccessError, SourceNotFound: a file may not be read, or does not exist.
        DamagedError: fetched bytes differ from the manifest; these bytes are not stored.
        StorageError: the disk is full.
    """
    locations, _ = fetch_as_predicted(source_name, collection, requests, allow_whole_files, check)
    return [locations[request] for request in requests]


def fetch_tensors(
    source_name: str, collection: str, requests: Sequence[MemberRequest], names: Iterable[str], check: bool = False
) -> dict[str, list[Location]]:
    """Fetch some tensors of members, and no other bytes of members that are not in a cache; return for each name the
    locations of the tensor in all members.

    A tensor can't be compared with the hash of its member: the file's ETag and size are compared, where the manifest
    has them.

    Args:
        source_name, collection, requests, check: the same arguments as in `fetch_members`.
        names: names of tensors, which all members have.

    Raises:
        UsageError: a member has no tensor of such a name.
        NetworkError, AccessError, SourceNotFound, DamagedError, StorageError: for the same reasons as in
            `fetch_members`.
    """
    name_list = list(dict.fromkeys(names))
    tensors_of_request = {request: [request.of_tensor(name) for name in name_list] for request in requests}
    whole, _ = _find_local(requests, _headers_of_layouts(requests), check)
    missing = [tensor for request in requests if request not in whole for tensor in tensors_of_request[request]]
    if any(request.sha256 is not None for request in requests if request not in whole):
        warnings.warn(  # Python shows it once a collection.
            f"single tensors of {collection} are fetched without the rest of their members, so that they can't be "
            "compared with the members' hashes: their files' ETags and sizes are compared",
            NotCompared,
            stacklevel=5,
        )
    tensors = fetch_as_predicted(source_name, collection, missing, False, check)[0] if missing else {}
    return {
        name: [
            tensor_location(whole[request], name) if request in whole else tensors[tensors_of_request[request][i]]
            for request in requests
        ]
        for i, name in enumerate(name_list)
    }


def fetch_as_predicted(
    source_name: str,
    collection: str,
    requests: Sequence[MemberRequest],
    allow_whole_files: bool = True,
    check: bool = False,
) -> tuple[dict[MemberRequest, Location], list[str]]:
    """Fetch members from predicted offsets, as `fetch_members` does; return their locations, and the paths of irregular
    archives.

    After the first irregular archive nothing more is fetched, so some locations are missing.
    """
    from huggingface_hub import is_offline_mode

    header_of_layout = _headers_of_layouts(requests)
    locations, irregular_paths = _find_local(requests, header_of_layout, check)
    missing_requests = [request for request in dict.fromkeys(requests) if request not in locations]
    if irregular_paths:
        return locations, irregular_paths
    if missing_requests and is_offline_mode():
        raise _offline_error(source_name, collection, missing_requests, len(requests), header_of_layout)
    if missing_requests:
        partly_cached_files = {request.first.repo_file for request in (locations if allow_whole_files else requests)}
        irregular_after_fetch = _fetch_missing(collection, missing_requests, header_of_layout, partly_cached_files)
        fetched_locations, irregular_paths = _find_local(missing_requests, header_of_layout)
        damaged_requests = [
            request
            for request in missing_requests
            if request not in fetched_locations and request.path not in {*irregular_after_fetch, *irregular_paths}
        ]
        # The wrong bytes are in files that were fetched whole. Fetching the members again by ranges either works or
        # raises the right error.
        if damaged_requests and not irregular_after_fetch and not irregular_paths:
            damaged_files = {request.first.repo_file for request in damaged_requests}
            irregular_after_fetch = _fetch_missing(collection, damaged_requests, header_of_layout, damaged_files)
            fetched_locations |= _find_local(damaged_requests, header_of_layout)[0]
        return locations | fetched_locations, sorted({*irregular_after_fetch, *irregular_paths})
    return locations, []


def _find_local(
    requests: Sequence[MemberRequest], header_of_layout: Mapping[int, bytes], check: bool = False
) -> tuple[dict[MemberRequest, Location], list[str]]:
    """Look for members in the cache of the Hub's client, then in our member cache; return their locations, and the
    paths of irregular archives.

    A file with wrong bytes is deleted from our cache and from the client's cache. In offline mode nothing is deleted,
    and members of a damaged file are used if they have their own hashes.
    """
    files = list(dict.fromkeys(request.first.repo_file for request in requests if len(request.ranges) == 1))
    files_without_hash = {request.first.repo_file for request in requests if request.sha256 is None}
    whole_file_of_file = {
        file: path
        for file in files
        if (path := hub_cache.cached_file(*file)) is not None
        and not (
            (file in files_without_hash or not hub_cache.is_offline())
            and hub_cache.check_whole_file(file[0], path, check)
        )
    }
    hash_record_of_file = {
        file: HashRecord(path, hub_cache.whole_file_record(file[0], path), check)
        for file, path in whole_file_of_file.items()
    }
    etags = _known_etags(requests)
    locations, irregular_paths = {}, set[str]()
    for request in requests:
        file = request.first.repo_file
        whole_file = whole_file_of_file.get(file) if len(request.ranges) == 1 else None
        cache_header = header_of_layout[id(request.layout)]
        if whole_file is not None:
            if request.belongs_to_member is not None and not request.belongs_to_member(
                _read_bytes(whole_file, request.first.start, request.offset)
            ):
                irregular_paths.add(request.path)
                continue
            if request.sha256 is None or _is_intact(
                whole_file, request.offset, request, b"", hash_record_of_file[file], str(request.offset)
            ):
                locations[request] = Location(
                    request.key[0], request.prefix, whole_file, request.offset, request.layout
                )
                continue
        location = cached_location(request, etags, cache_header, check)
        if location is not None:
            locations[request] = location
    for record_of_file in hash_record_of_file.values():
        record_of_file.save()
    return locations, sorted(irregular_paths)


def cached_location(
    request: MemberRequest, etags: Mapping[FetchedFile, str], cache_header: bytes, check: bool = False
) -> Location | None:
    """Look for a member in our cache; return its location, None if it is missing. A file with wrong bytes is deleted,
    but not in offline mode.

    Args:
        request: the request for the member.
        etags: ETags of the files that hold the member, as far as they are known.
        cache_header: header of the member's cache file.
        check: whether the member is hashed again even if a hash is recorded.
    """
    path = _find_cached_member(request, etags, cache_header)
    if path is None:
        return None
    data_offset = len(cache_header) or request.layout.header_nbytes
    member_hash = HashRecord(path, cache.hash_record_path(path), check)
    if _is_intact(path, data_offset, request, cache_header, member_hash, ""):
        member_hash.save()
        return Location(request.key[0], "", path, data_offset, request.layout)
    if not hub_cache.is_offline():
        delete_file(path, cache.hash_record_path(path))
    return None


def _known_etags(requests: Sequence[MemberRequest]) -> dict[FetchedFile, str]:
    """Return the ETags of the requests' files, as far as the manifest or our cache has them."""
    etags: dict[FetchedFile, str] = {}
    for file_range in (file_range for request in requests for file_range in request.ranges):
        if file_range.etag is not None:
            etags[file_range.file] = file_range.etag
    for repo, path in {x.repo_file for request in requests for x in request.ranges} - etags.keys():
        if (record := cache.read_file_record(repo.cache_name, repo.commit, path)) is not None:
            etags[repo, path] = record[0]
    return etags


def cache_file_name(request: MemberRequest, etags: Mapping[FetchedFile, str], cache_header: bytes) -> str:
    """Return the name of a member's file in our cache, which depends only on the member's bytes and layout."""
    etag = etags[request.first.file]
    if len(request.ranges) > 1:
        # Several ranges are named by the hash of all of them.
        texts = [f"{etags[x.file]}|{x.start}|{x.end}" for x in request.ranges]
        etag = hashlib.sha256("+".join(texts).encode()).hexdigest()
    return cache.member_file_name(etag, request.offset, request.layout, cache_header, request.name_in_archive)


def _find_cached_member(request: MemberRequest, etags: Mapping[FetchedFile, str], cache_header: bytes) -> Path | None:
    """Look for a member's file of the right size in our cache; return its path, None if there is no such file."""
    if any(file_range.file not in etags for file_range in request.ranges):
        return None
    nbytes = (len(cache_header) or request.layout.header_nbytes) + request.layout.nbytes
    return cache.find_member(request.first.file[0].cache_name, cache_file_name(request, etags, cache_header), nbytes)


def _is_intact(
    cached_path: Path,
    data_offset: int,
    request: MemberRequest,
    expected_header: bytes,
    hash_record: HashRecord,
    record_key: str,
) -> bool:
    """Say whether a cached file has the bytes of a member. Bytes whose hash is recorded are not read again.

    Args:
        cached_path: path of the cached file.
        data_offset: offset of the member's first tensor in the file.
        request: the request for the member.
        expected_header: expected bytes at the start of the file; b"" if the start is not compared.
        hash_record: the recorded hashes of the cached file.
        record_key: key of the member's hash in the record.
    """
    recorded_hash = hash_record.hashes.get(record_key)
    if recorded_hash is not None and request.sha256 in (None, recorded_hash):
        return True
    header_nbytes = request.layout.header_nbytes
    cached_bytes = _read_bytes(
        cached_path, data_offset - max(len(expected_header), header_nbytes), data_offset + request.layout.nbytes
    )
    if len(cached_bytes) < max(
        len(expected_header), header_nbytes
    ) + request.layout.nbytes or not cached_bytes.startswith(expected_header):
        return False
    if header_nbytes:
        try:
            check_own_header(cached_bytes[:header_nbytes], request.layout, cached_path)
        except DamagedError:
            return False
    digest = content_hash(request.layout, memoryview(cached_bytes)[-request.layout.nbytes or len(cached_bytes) :])
    if digest != (request.sha256 or hash_record.old_hashes.get(record_key, digest)):
        return False
    hash_record.add(record_key, digest)
    return True


def _read_bytes(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _fetch_missing(
    collection: str,
    missing_requests: Sequence[MemberRequest],
    header_of_layout: Mapping[int, bytes],
    partly_cached_files: set[RepoFile],
) -> set[str]:
    """Fetch members, as whole files or by ranges; return the paths of irregular archives. After the first irregular
    archive nothing more is fetched.

    A file is fetched whole if most of its bytes are needed and it is not in `partly_cached_files`.
    """
    for batch in batches_of_few_files(missing_requests):
        if irregular_paths := _fetch_batch(collection, batch, header_of_layout, partly_cached_files):
            return irregular_paths
    return set()


def batches_of_few_files(requests: Iterable[MemberRequest]) -> Iterator[list[MemberRequest]]:
    """Yield requests in batches, in order; the ranges of a batch are in few files, unless one member is in more."""
    batch, files = list[MemberRequest](), set[FetchedFile]()
    for request in requests:
        files_of_request = {file_range.file for file_range in request.ranges}
        if batch and len(files | files_of_request) > LARGEST_LOCK_COUNT:
            yield batch
            batch, files = [], set()
        batch.append(request)
        files |= files_of_request
    if batch:
        yield batch


def _fetch_batch(
    collection: str,
    missing_requests: Sequence[MemberRequest],
    header_of_layout: Mapping[int, bytes],
    partly_cached_files: set[RepoFile],
) -> set[str]:
    """Fetch members of few files; return the paths of irregular archives. A lock is held for each file meanwhile."""
    ranges_of_file: dict[RepoFile, list[FileRange]] = {}
    for request in missing_requests:
        for file_range in request.ranges:
            ranges_of_file.setdefault(file_range.repo_file, []).append(file_range)
    # A link that expires is renewed while its file is read. After an error the next call asks the Hub for the link
    # again.
    known_remote_of_file = {
        file: remote for file in ranges_of_file if (remote := _remote_files.pop(file, None)) is not None
    }
    folder_of_repo = {repo: cache.writable_folder(repo.cache_name) for repo in {repo for repo, _ in ranges_of_file}}
    for folder in set(folder_of_repo.values()):
        cache.delete_stale(folder)

    def ask_hub(file: RepoFile) -> RemoteFile:
        repo, path = file
        remote = known_remote_of_file.get(file) or RemoteFile.of(repo, path)
        remote.check_size(max(file_range.end for file_range in ranges_of_file[file]))
        for etag in {file_range.etag for file_range in ranges_of_file[file]}:
            if etag is None:
                cache.write_file_record(folder_of_repo[repo], repo.commit, path, remote.etag, remote.size)
            else:
                remote.check_etag(etag)
        return remote

    with ThreadPoolExecutor(CONNECTION_COUNT, thread_name_prefix="zoo-fetch") as pool, ExitStack() as held_locks:
        remote_of_file = dict(zip(ranges_of_file, pool.map(ask_hub, ranges_of_file), strict=True))
        etags: dict[FetchedFile, str] = {file: remote.etag for file, remote in remote_of_file.items()}
        remotes = cast("Mapping[FetchedFile, RemoteFile | WebFile]", remote_of_file)
        # Locks are always taken in the same order, so that two processes can't block each other.
        for folder, etag in sorted({(folder_of_repo[file[0]], remote.etag) for file, remote in remote_of_file.items()}):
            held_locks.enter_context(cache.hold_key_lock(folder, etag))
        # Another process may have fetched some members in the meantime.
        cached_locations, _ = _find_local(missing_requests, header_of_layout)
        requests_left = [request for request in missing_requests if request not in cached_locations]
        touched_files = partly_cached_files | {request.first.repo_file for request in cached_locations}
        touched_files |= {
            x.repo_file for request in missing_requests if len(request.ranges) > 1 for x in request.ranges
        }
        whole_files = {
            file
            for file, remote in remote_of_file.items()
            if file not in touched_files
            and hub_cache.cached_file(*file) is None
            and sum(x.nbytes for x in ranges_of_file[file]) > _whole_file_share(file[0]) * remote.size
        }
        downloads, irregular_paths = [], set[str]()
        for file in ranges_of_file:
            if file in whole_files:
                hub.fetch_file(*file)
        for request in requests_left:
            if request.first.repo_file not in whole_files:
                cache_header = header_of_layout[id(request.layout)]
                draft_path = (
                    folder_of_repo[request.first.repo_file[0]]
                    / "members"
                    / cache_file_name(request, etags, cache_header)
                )
                draft = cache.MemberDraft(draft_path, cache_header, request.nbytes, request.archive_header_nbytes)
                downloads.append(Download(request, remotes, draft))
                if not request.nbytes:  # A tensor without elements: all of it has arrived.
                    draft.write(0, b"")
                    _check_and_keep(downloads.pop())
        if downloads:
            cache.check_room(downloads[0].draft.path.parent, sum(p.draft.size for p in downloads))
            irregular_paths = read_ranges(downloads, collection, pool)
    _remote_files.update(remote_of_file)
    return irregular_paths


def _whole_file_share(repo: Repo) -> float:
    """Return the share of a file's bytes from which the file is fetched whole."""
    return WHOLE_FILE_SHARE if repo.kind == "dataset" else WHOLE_MODEL_SHARE


def read_ranges(downloads: Sequence[Download], collection: str, pool: ThreadPoolExecutor) -> set[str]:
    """Read members' bytes over several connections, each member into its cache file; if one read fails, members that
    arrived stay.

    Return the paths of irregular archives; the reading ends at the first one.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stop_event, irregular_paths = threading.Event(), set[str]()
    planned_ranges = list(_plan_ranges(downloads))
    total_nbytes = sum(end - start for _, start, end in planned_ranges)
    bar_title = f"{collection}: {count_with_noun(len({x.request.key for x in downloads}), 'member')}"
    progress_bar = tqdm(total=total_nbytes, unit="B", unit_scale=True, desc=bar_title)  # type: ignore[no-untyped-call]
    with progress_bar:

        def read_range(wanted_ranges: Sequence[_Wanted], start: int, end: int) -> None:
            def write_piece(piece_offset: int, piece: bytes) -> None:
                if stop_event.is_set():
                    raise _Stopped
                for wanted in wanted_ranges:
                    download = wanted.download
                    if download.write(wanted.position, wanted.range, piece_offset, piece) and not _check_and_keep(
                        download
                    ):
                        irregular_paths.add(download.request.path)
                        stop_event.set()
                progress_bar.update(len(piece))

            wanted_ranges[0].remote.read(start, end, write_piece)

        futures = [pool.submit(read_range, *planned_range) for planned_range in planned_ranges]
        try:
            finished_futures, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed_futures = [f for f in finished_futures if not isinstance(f.exception(), _Stopped | None)]
        finally:
            stop_event.set()
            pool.shutdown(cancel_futures=True)
            for download in downloads:
                download.draft.discard()
    for future in failed_futures:
        future.result()
    return irregular_paths


def _plan_ranges(downloads: Sequence[Download]) -> Iterator[tuple[list[_Wanted], int, int]]:
    """Join ranges that lie close together in a file, and split long ones; yield (wanted ranges, start, end)."""
    groups: list[list[_Wanted]] = []
    group_end = 0
    wanted_ranges = [
        _Wanted(download, position, file_range)
        for download in downloads
        for position, file_range in download.positions
        if file_range.nbytes
    ]
    for wanted in sorted(wanted_ranges, key=lambda w: (w.range.file[0].cache_name, w.range.file[1], w.range.start)):
        if (
            groups
            and groups[-1][0].remote is wanted.remote
            and wanted.range.start <= group_end + LARGEST_READ_GAP_NBYTES
        ):
            groups[-1].append(wanted)
            group_end = max(group_end, wanted.range.end)
        else:
            groups.append([wanted])
            group_end = wanted.range.end
    for group in groups:
        group_start, last_end = group[0].range.start, max(w.range.end for w in group)
        range_count = -(-(last_end - group_start) // LARGEST_RANGE_NBYTES)
        cut_points = [group_start + (last_end - group_start) * i // range_count for i in range(range_count + 1)]
        for range_start, range_end in pairwise(cut_points):
            yield (
                [w for w in group if w.range.start < range_end and w.range.end > range_start],
                range_start,
                range_end,
            )


def _check_and_keep(download: Download) -> bool:
    """Check a member that has arrived, and store it; if its bytes are wrong, read the member a second time.

    Return False, without storing the bytes, if the bytes belong to another member than predicted.
    """
    digest, problem = _hash_and_compare(download) if _belongs_to_requested_member(download) else ("", None)
    if digest and problem is None:
        download.draft.store_under_final_name(digest)
        return True
    download.draft.discard()
    for position, file_range in download.positions:
        write_again = partial(download.write, position, file_range)
        download.remotes[file_range.file].read(file_range.start, file_range.end, write_again)
    digest, problem = _hash_and_compare(download) if _belongs_to_requested_member(download) else ("", None)
    if digest and problem is None:
        download.draft.store_under_final_name(digest)
        return True
    download.draft.discard()
    if problem is not None:
        raise problem
    return False


def _belongs_to_requested_member(download: Download) -> bool:
    """Say whether the bytes before the tensors belong to the requested member."""
    request = download.request
    return request.belongs_to_member is None or request.belongs_to_member(
        bytes(download.draft.archive_header) + bytes(download.draft.content()[: request.layout.header_nbytes])
    )


def _hash_and_compare(download: Download) -> tuple[str, DamagedError | None]:
    """Hash a member that has arrived; return its hash, and the error for bytes that differ from the manifest."""
    request = download.request
    draft_bytes = download.draft.content()
    member_text = f"member {format_ids([request.key])} in {download.remotes[request.first.file].error_subject}"
    if request.layout.header_nbytes:
        try:
            check_own_header(bytes(draft_bytes[: request.layout.header_nbytes]), request.layout, member_text)
        except DamagedError as error:
            return "", error
    digest = content_hash(request.layout, draft_bytes[len(draft_bytes) - request.layout.nbytes :])
    if request.sha256 in (None, digest):
        return digest, None
    return digest, DamagedError(
        member_text,
        expected=f"sha256 {request.sha256[:16]}… in the {request.layout.nbytes:,} bytes at {request.offset:,}",
        found=f"{digest[:16]}…, twice",
        do="Nothing was stored: tell the producer, or try another network",
        member=request.key[0],
        path=request.path,
    )


def _offline_error(
    source_name: str,
    collection: str,
    missing_requests: Sequence[MemberRequest],
    request_count: int,
    header_of_layout: Mapping[int, bytes],
) -> NetworkError:
    keys = list(dict.fromkeys(request.key for request in missing_requests))
    ids_text, etags = format_ids(keys), _known_etags(missing_requests)
    damaged_paths, damaged_keys = list[str](), list[SnapshotKey]()
    for request in missing_requests:  # A copy that is in a cache, but was not used, is damaged.
        if len(request.ranges) == 1 and hub_cache.cached_file(*request.first.repo_file) is not None:
            damaged_paths.append(request.path)
        elif _find_cached_member(request, etags, header_of_layout[id(request.layout)]) is not None:
            damaged_keys.append(request.key)
    damaged_texts = [f"file {path}" for path in dict.fromkeys(damaged_paths)]
    damaged_texts += [f"members {format_ids(damaged_keys)}"] if damaged_keys else []
    damaged_text = f"; the cached copy of {first_few(damaged_texts, 3)} is damaged" if damaged_texts else ""
    return NetworkError(
        f"{len(keys)} of {request_count} members of {collection}",
        expected="members in the cache, since HF_HUB_OFFLINE is set",
        found=f"no members {ids_text} of {source_name}{damaged_text}",
        do=f"Get them online: `zoo-cli download {collection} --members {ids_text} --source {source_name}`",
        collection=collection,
    )
