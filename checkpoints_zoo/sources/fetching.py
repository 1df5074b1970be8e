"""Fetching of members from a repo on the Hub: cached members are used, missing ones are fetched by a few range
reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, NetworkError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.selection import SnapshotKey, format_ids
from checkpoints_zoo.formats.shard_files import Location, check_own_header, tensor_prefix
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.sources import cache, hub
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file
from checkpoints_zoo.sources.hub import Repo
from checkpoints_zoo.sources.ranges import RemoteFile
from checkpoints_zoo.sources.web import WebFile

LARGEST_READ_GAP_NBYTES = (
    256 * 2**10
)  # Largest gap between two members that is read along, because another request would take longer.
LARGEST_RANGE_NBYTES = 32 * 2**20  # Number of bytes from which a range is split over several connections.
CONNECTION_COUNT = 8
WHOLE_FILE_SHARE = 0.4  # A file is fetched whole if the requested members take a larger share of its bytes.

# Cache of this process: each file on the Hub is asked for its size and link only once.
_remote_files: dict[tuple[Repo, str], RemoteFile] = {}


@dataclass(frozen=True)
class MemberRequest:
    """A request for the bytes of one snapshot, made from its manifest row.

    Args:
        key: (member, epoch); the epoch is None for the final snapshot.
        prefix: prefix of the member's tensor names in the shard.
        repo_path: path of the file in the repo.
        offset: offset of the member's first tensor in the file.
        layout: layout of the member's bytes.
        sha256: content hash of the member; None if unknown.
        name_in_archive: name of the member's file in its archive; "" outside archives.
        proof_nbytes: number of bytes before the member that are read too, because they prove the member's name.
        proves_member: function of the bytes before the tensors that returns whether the bytes belong to this member;
            None if no proof is needed.
    """

    key: SnapshotKey
    prefix: str
    repo_path: str
    offset: int
    layout: Layout = field(compare=False)
    sha256: str | None
    name_in_archive: str = ""
    proof_nbytes: int = 0
    proves_member: Callable[[bytes], bool] | None = field(default=None, compare=False)

    @property
    def start(self) -> int:
        return self.offset - self.layout.header_nbytes - self.proof_nbytes

    @property
    def end(self) -> int:
        return self.offset + self.layout.nbytes


@dataclass(frozen=True)
class Download:
    """A member to be fetched, and the cache file that its bytes are written to."""

    request: MemberRequest
    remote: RemoteFile | WebFile
    draft: cache.MemberDraft


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
    described: manifest.DescriptionWithLayouts,
    rows: pa.Table,
    allow_whole_files: bool = True,
    check: bool = False,
) -> list[Location]:
    """Fetch the bytes of manifest rows from a repo; return their locations on this disk.

    Args:
        repo: the repo that holds the bytes.
        described: the description that belongs to the manifest of the rows.
        rows: manifest rows of the members to fetch.
        allow_whole_files, check: the same arguments as in `fetch_members`.

    Raises:
        NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: for the same reasons as in
            `fetch_members`.
    """
    return fetch_members(repo, described.name, requests_of_rows(described, rows), allow_whole_files, check)


def requests_of_rows(described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[MemberRequest]:
    """Return the requests for the bytes of a manifest's rows."""
    column_names = ("path", "offset", "layout", "sha256")
    columns = zip(*(rows.column(c).to_pylist() for c in column_names), strict=True)
    return [
        MemberRequest(key, tensor_prefix(*key), repo_path, offset, described.layouts[layout_key], sha256)
        for key, (repo_path, offset, layout_key, sha256) in zip(snapshot_keys(rows), columns, strict=True)
    ]


def count_cached(repo: Repo, requests: Sequence[MemberRequest]) -> int:
    """Count the members that are in a cache of this machine; nothing is fetched."""
    header_of_layout = {id(request.layout): cache.cache_file_header(request.layout) for request in requests}
    return len(_find_local(repo, requests, header_of_layout)[0])


def fetch_members(
    repo: Repo, collection: str, requests: Sequence[MemberRequest], allow_whole_files: bool = True, check: bool = False
) -> list[Location]:
    """Fetch members whose locations in the repo are known, all missing members together; return the locations on this
    disk.

    Args:
        repo: the repo, at the commit from which the manifest rows are.
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
    locations, _ = fetch_predicted(repo, collection, requests, allow_whole_files, check)
    return [locations[request] for request in requests]


def fetch_predicted(
    repo: Repo, collection: str, requests: Sequence[MemberRequest], allow_whole_files: bool = True, check: bool = False
) -> tuple[dict[MemberRequest, Location], list[str]]:
    """Fetch members like `fetch_members`; return their locations, and the paths of irregular archives.

    In an irregular archive a member lies at another offset than predicted. After the first irregular archive nothing
    more is fetched, so some locations are missing.
    """
    from huggingface_hub import is_offline_mode

    header_of_layout = {
        key: cache.cache_file_header(layout)
        for key, layout in {id(request.layout): request.layout for request in requests}.items()
    }
    locations, irregular_paths = _find_local(repo, requests, header_of_layout, check)
    missing_requests = [request for request in requests if request not in locations]
    if irregular_paths:
        return locations, irregular_paths
    if missing_requests and is_offline_mode():
        raise _offline_error(repo, collection, missing_requests, len(requests), header_of_layout)
    if missing_requests:
        partly_cached_paths = {request.repo_path for request in (locations if allow_whole_files else requests)}
        irregular_after_fetch = _fetch_missing(
            repo, collection, missing_requests, header_of_layout, partly_cached_paths
        )
        fetched_locations, irregular_paths = _find_local(repo, missing_requests, header_of_layout)
        damaged_requests = [
            request
            for request in missing_requests
            if request not in fetched_locations and request.repo_path not in {*irregular_after_fetch, *irregular_paths}
        ]
        # The wrong bytes are in files that were fetched whole. Fetching the members again by ranges either works or
        # raises the right error.
        if damaged_requests and not irregular_after_fetch and not irregular_paths:
            irregular_after_fetch = _fetch_missing(
                repo,
                collection,
                damaged_requests,
                header_of_layout,
                {request.repo_path for request in damaged_requests},
            )
            fetched_locations |= _find_local(repo, damaged_requests, header_of_layout)[0]
        return locations | fetched_locations, sorted({*irregular_after_fetch, *irregular_paths})
    return locations, []


def _find_local(
    repo: Repo, requests: Sequence[MemberRequest], header_of_layout: Mapping[int, bytes], check: bool = False
) -> tuple[dict[MemberRequest, Location], list[str]]:
    """Look for members in the cache of the Hub's client, then in our member cache; return their locations, and the
    paths of irregular archives.

    A file with wrong bytes is deleted from our cache and from the client's cache. In offline mode nothing is deleted,
    and members of a damaged file are used if they have their own hashes.
    """
    repo_paths = list(dict.fromkeys(request.repo_path for request in requests))
    paths_without_hash = {request.repo_path for request in requests if request.sha256 is None}
    whole_file_of_path = {
        repo_path: path
        for repo_path in repo_paths
        if (path := hub.cached_file(repo, repo_path)) is not None
        and not ((repo_path in paths_without_hash or not hub.is_offline()) and hub.check_whole_file(repo, path, check))
    }
    hash_record_of_path = {
        repo_path: HashRecord(path, hub.whole_file_record(repo, path), check)
        for repo_path, path in whole_file_of_path.items()
    }
    etag_and_size_of_path = {
        repo_path: cache.read_file_record(repo.id, repo.commit, repo_path) for repo_path in repo_paths
    }
    locations, irregular_paths = {}, set[str]()
    for request in requests:
        whole_file, etag_and_size, cache_header = (
            whole_file_of_path.get(request.repo_path),
            etag_and_size_of_path[request.repo_path],
            header_of_layout[id(request.layout)],
        )
        if whole_file is not None:
            if request.proves_member is not None and not request.proves_member(
                _read_bytes(whole_file, request.start, request.offset)
            ):
                irregular_paths.add(request.repo_path)
                continue
            if request.sha256 is None or _is_intact(
                whole_file, request.offset, request, b"", hash_record_of_path[request.repo_path], str(request.offset)
            ):
                locations[request] = Location(
                    request.key[0], request.prefix, whole_file, request.offset, request.layout
                )
                continue
        if etag_and_size is not None:
            location = cached_location(repo.id, request, etag_and_size[0], cache_header, check)
            if location is not None:
                locations[request] = location
    for record_of_file in hash_record_of_path.values():
        record_of_file.save()
    return locations, sorted(irregular_paths)


def cached_location(
    repo: str, request: MemberRequest, etag: str, cache_header: bytes, check: bool = False
) -> Location | None:
    """Look for a member in our cache; return its location, None if it is missing. A file with wrong bytes is deleted,
    but not in offline mode.

    Args:
        repo: name of the repo or web folder in the cache.
        request: the request for the member.
        etag: ETag of the file that holds the member.
        cache_header: header of the member's cache file.
        check: whether the member is hashed again even if a hash is recorded.
    """
    path = _find_cached_member(repo, request, etag, cache_header)
    if path is None:
        return None
    data_offset = len(cache_header) or request.layout.header_nbytes
    member_hash = HashRecord(path, cache.hash_record_path(path), check)
    if _is_intact(path, data_offset, request, cache_header, member_hash, ""):
        member_hash.save()
        return Location(request.key[0], "", path, data_offset, request.layout)
    if not hub.is_offline():
        delete_file(path, cache.hash_record_path(path))
    return None


def _find_cached_member(repo: str, request: MemberRequest, etag: str, cache_header: bytes) -> Path | None:
    """Look for a member's file of the right size in our cache; return its path, None if there is no such file."""
    name = cache.member_file_name(etag, request.offset, request.layout, cache_header, request.name_in_archive)
    nbytes = (len(cache_header) or request.layout.header_nbytes) + request.layout.nbytes
    return cache.find_member(repo, name, nbytes)


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
    repo: Repo,
    collection: str,
    missing_requests: Sequence[MemberRequest],
    header_of_layout: Mapping[int, bytes],
    partly_cached_paths: set[str],
) -> set[str]:
    """Fetch members, as whole files or by ranges; return the paths of irregular archives.

    A file is fetched whole if most of its bytes are needed and it is not in `partly_cached_paths`.
    """
    requests_of_file: dict[str, list[MemberRequest]] = {}
    for request in missing_requests:
        requests_of_file.setdefault(request.repo_path, []).append(request)
    # A link that expires is renewed while its file is read. After an error the next call asks the Hub for the link
    # again.
    known_remote_of_path = {
        repo_path: remote
        for repo_path in requests_of_file
        if (remote := _remote_files.pop((repo, repo_path), None)) is not None
    }
    folder = cache.writable_folder(repo.id)
    cache.delete_stale(folder)

    def ask_hub(repo_path: str) -> RemoteFile:
        remote = known_remote_of_path.get(repo_path) or RemoteFile.of(repo, repo_path)
        remote.check_size(max(request.end for request in requests_of_file[repo_path]))
        cache.write_file_record(folder, repo.commit, repo_path, remote.etag, remote.size)
        return remote

    with ThreadPoolExecutor(CONNECTION_COUNT, thread_name_prefix="zoo-fetch") as pool, ExitStack() as held_locks:
        remote_of_path = dict(zip(requests_of_file, pool.map(ask_hub, requests_of_file), strict=True))
        # Locks are always taken in the same order, so that two processes can't block each other.
        for etag in sorted({remote.etag for remote in remote_of_path.values()}):
            held_locks.enter_context(cache.hold_key_lock(folder, etag))
        # Another process may have fetched some members in the meantime.
        cached_locations, _ = _find_local(repo, missing_requests, header_of_layout)
        downloads, irregular_paths = [], set[str]()
        for repo_path, remote in remote_of_path.items():
            requests_left = [request for request in requests_of_file[repo_path] if request not in cached_locations]
            is_untouched = repo_path not in partly_cached_paths and len(requests_left) == len(
                requests_of_file[repo_path]
            )
            is_untouched = is_untouched and hub.cached_file(repo, repo_path) is None
            if (
                is_untouched
                and sum(request.end - request.start for request in requests_left) > WHOLE_FILE_SHARE * remote.size
            ):
                hub.fetch_file(repo, repo_path)
                continue
            for request in requests_left:
                cache_header = header_of_layout[id(request.layout)]
                draft_path = (
                    folder
                    / "members"
                    / cache.member_file_name(
                        remote.etag, request.offset, request.layout, cache_header, request.name_in_archive
                    )
                )
                downloads.append(
                    Download(
                        request,
                        remote,
                        cache.MemberDraft(draft_path, cache_header, request.end - request.start, request.proof_nbytes),
                    )
                )
        if downloads:
            cache.check_room(folder, sum(p.draft.size for p in downloads))
            irregular_paths = read_ranges(downloads, collection, pool)
    _remote_files.update({(repo, repo_path): remote for repo_path, remote in remote_of_path.items()})
    return irregular_paths


def read_ranges(downloads: Sequence[Download], collection: str, pool: ThreadPoolExecutor) -> set[str]:
    """Read members' bytes over several connections, each member into its cache file; if one read fails, members that
    arrived stay.

    Return the paths of irregular archives; the reading ends at the first one.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stop_event, irregular_paths = threading.Event(), set[str]()
    download_ranges = list(_plan_ranges(downloads))
    total_nbytes = sum(end - start for _, start, end in download_ranges)
    bar_title = f"{collection}: {len(downloads)} member{'s' if len(downloads) > 1 else ''}"
    progress_bar = tqdm(total=total_nbytes, unit="B", unit_scale=True, desc=bar_title)  # type: ignore[no-untyped-call]
    with progress_bar:

        def read_range(range_downloads: Sequence[Download], start: int, end: int) -> None:
            def write_piece(piece_offset: int, piece: bytes) -> None:
                if stop_event.is_set():
                    raise _Stopped
                for download in range_downloads:
                    first_offset = max(piece_offset, download.request.start)
                    member_bytes = piece[
                        first_offset - piece_offset : max(
                            first_offset - piece_offset, download.request.end - piece_offset
                        )
                    ]
                    if (
                        member_bytes
                        and download.draft.write(first_offset - download.request.start, member_bytes)
                        and not _check_and_keep(download)
                    ):
                        irregular_paths.add(download.request.repo_path)
                        stop_event.set()
                progress_bar.update(len(piece))

            range_downloads[0].remote.read(start, end, write_piece)

        futures = [pool.submit(read_range, *download_range) for download_range in download_ranges]
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


def _plan_ranges(downloads: Sequence[Download]) -> Iterator[tuple[list[Download], int, int]]:
    """Join members that lie close together into ranges, and split long ranges; yield (downloads of a range, start,
    end)."""
    groups: list[list[Download]] = []
    group_end = 0
    for download in sorted(downloads, key=lambda p: (p.request.repo_path, p.request.start)):
        if (
            groups
            and groups[-1][0].remote is download.remote
            and download.request.start <= group_end + LARGEST_READ_GAP_NBYTES
        ):
            groups[-1].append(download)
            group_end = max(group_end, download.request.end)
        else:
            groups.append([download])
            group_end = download.request.end
    for group in groups:
        group_start, last_end = group[0].request.start, max(p.request.end for p in group)
        range_count = -(-(last_end - group_start) // LARGEST_RANGE_NBYTES)
        cut_points = [group_start + (last_end - group_start) * i // range_count for i in range(range_count + 1)]
        for range_start, range_end in pairwise(cut_points):
            yield (
                [p for p in group if p.request.start < range_end and p.request.end > range_start],
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
    request_start = download.request.start

    def write_again(offset: int, piece: bytes) -> None:
        download.draft.write(offset - request_start, piece)

    download.remote.read(request_start, download.request.end, write_again)
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
    return request.proves_member is None or request.proves_member(
        bytes(download.draft.proof_bytes) + bytes(download.draft.content()[: request.layout.header_nbytes])
    )


def _hash_and_compare(download: Download) -> tuple[str, DamagedError | None]:
    """Hash a member that has arrived; return its hash, and the error for bytes that differ from the manifest."""
    request = download.request
    draft_bytes = download.draft.content()
    member_text = f"member {format_ids([request.key])} in {download.remote.error_subject}"
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
        path=request.repo_path,
    )


def _offline_error(
    repo: Repo,
    collection: str,
    missing_requests: Sequence[MemberRequest],
    request_count: int,
    header_of_layout: Mapping[int, bytes],
) -> NetworkError:
    ids_text = format_ids([request.key for request in missing_requests])
    etag_and_size_of_path = {
        request.repo_path: cache.read_file_record(repo.id, repo.commit, request.repo_path)
        for request in missing_requests
    }
    damaged_paths, damaged_keys = list[str](), list[SnapshotKey]()
    for request in missing_requests:  # A copy that is in a cache, but was not used, is damaged.
        etag_and_size = etag_and_size_of_path[request.repo_path]
        if hub.cached_file(repo, request.repo_path) is not None:
            damaged_paths.append(request.repo_path)
        elif (
            etag_and_size
            and _find_cached_member(repo.id, request, etag_and_size[0], header_of_layout[id(request.layout)])
            is not None
        ):
            damaged_keys.append(request.key)
    damaged_texts = [f"file {path}" for path in dict.fromkeys(damaged_paths)]
    damaged_texts += [f"members {format_ids(damaged_keys)}"] if damaged_keys else []
    damaged_text = f"; the cached copy of {first_few(damaged_texts, 3)} is damaged" if damaged_texts else ""
    return NetworkError(
        f"{len(missing_requests)} of {request_count} members of {collection}",
        expected="members in the cache, since HF_HUB_OFFLINE is set",
        found=f"no members {ids_text} of {repo}{damaged_text}",
        do=f"Get them online: `zoo-cli download {collection} --members {ids_text} --source {repo}`",
        collection=collection,
    )
