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
from checkpoints_zoo.formats.selection import Key, format_ids
from checkpoints_zoo.formats.shard_files import Location, check_own_header, tensor_prefix
from checkpoints_zoo.sources import cache, hub
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file
from checkpoints_zoo.sources.hub import Repo
from checkpoints_zoo.sources.ranges import RemoteFile

GAP = 256 * 2**10  # Gap between two members up to which reading the gap costs less than another request.
LARGEST_RANGE = 32 * 2**20  # Length from which a range is split over several connections.
CONNECTIONS = 8
WHOLE_FILE_SHARE = 0.4  # A file is fetched whole if the members take a larger share of its bytes than this.

# Cache of this process: each file on the Hub is asked for its size and link only once.
_remote_files: dict[tuple[Repo, str], RemoteFile] = {}


@dataclass(frozen=True)
class WantedMember:
    """A request for the bytes of one snapshot, made from its manifest row.

    Args:
        key: (member, epoch); the epoch is None for the final snapshot.
        prefix: prefix of the member's tensor names in the shard.
        repo_path: path of the file in the repo.
        offset: offset of the member's first tensor in the file.
        layout: layout of the member's bytes.
        sha256: content hash of the member; None if unknown.
        name_in_archive: name of the member's file in the archive that holds it.
        bytes_before: number of bytes before the member that are read too, because they prove its name.
        proves_member: function of the bytes before the member and its header; returns whether they belong to this
            member. None where no proof is needed.
    """

    key: Key
    prefix: str
    repo_path: str
    offset: int
    layout: Layout = field(compare=False)
    sha256: str | None
    name_in_archive: str = ""
    bytes_before: int = 0
    proves_member: Callable[[bytes], bool] | None = field(default=None, compare=False)

    @property
    def begin(self) -> int:
        return self.offset - self.layout.header_nbytes - self.bytes_before

    @property
    def end(self) -> int:
        return self.offset + self.layout.nbytes


@dataclass(frozen=True)
class _Download:
    """A member to be fetched, and the cache file that its bytes are written to."""

    wanted: WantedMember
    remote: RemoteFile
    draft: cache.MemberDraft


class _Stopped(Exception):
    """Raised in a thread that stops because another thread has failed."""


def remote_file(repo: Repo, repo_path: str) -> RemoteFile:
    """Ask the Hub for a file's link, ETag and size (once in a process for each file); return them.

    Raises:
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
    """
    if (repo, repo_path) not in _remote_files:
        _remote_files[repo, repo_path] = RemoteFile.of(repo, repo_path)
    return _remote_files[repo, repo_path]


def fetch_rows(
    repo: Repo, described: manifest.Described, rows: pa.Table, whole: bool = True, check: bool = False
) -> list[Location]:
    """Fetch the bytes of manifest rows from a repo; return their locations on this disk.

    Args:
        repo: the repo that holds the bytes.
        described: the description that belongs to the manifest.
        rows: manifest rows of the members to fetch.
        whole, check: the same arguments as in `fetch_members`.

    Raises:
        NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: for the same reasons as in
            `fetch_members`.
    """
    return fetch_members(repo, described.name, wanted_rows(described, rows), whole, check)


def wanted_rows(described: manifest.Described, rows: pa.Table) -> list[WantedMember]:
    """Return the requests for the bytes of a manifest's rows."""
    names = ("path", "offset", "layout", "sha256")
    columns = zip(*(rows.column(c).to_pylist() for c in names), strict=True)
    return [
        WantedMember(key, tensor_prefix(*key), repo_path, offset, described.layouts[layout], sha256)
        for key, (repo_path, offset, layout, sha256) in zip(snapshot_keys(rows), columns, strict=True)
    ]


def count_cached(repo: Repo, wanted: Sequence[WantedMember]) -> int:
    """Count the members that are in a cache of this machine; nothing is fetched."""
    heads = {id(x.layout): cache.header_of(x.layout) for x in wanted}
    return len(_find_local(repo, wanted, heads)[0])


def fetch_members(
    repo: Repo, name: str, wanted: Sequence[WantedMember], whole: bool = True, check: bool = False
) -> list[Location]:
    """Fetch members with known locations, all missing ones together; return their locations on this disk.

    Args:
        repo: the repo, at the commit that the rows are from.
        name: name of the collection, for errors.
        wanted: the members.
        whole: whether a file may be fetched as a whole, into the cache of the Hub's client, if most of it is needed.
        check: whether to hash cached members again that were hashed before.

    Raises:
        NetworkError: the Hub gave no answer; or offline mode is on, and members are missing, which the error lists.
        AccessError, SourceNotFound: a file may not be read, or does not exist.
        DamagedError: fetched bytes differ from the manifest; they are not stored.
        StorageError: the disk is full.
    """
    locations, _ = fetch_predicted(repo, name, wanted, whole, check)
    return [locations[x] for x in wanted]


def fetch_predicted(
    repo: Repo, name: str, wanted: Sequence[WantedMember], whole: bool = True, check: bool = False
) -> tuple[dict[WantedMember, Location], list[str]]:
    """Fetch members like `fetch_members`; return their locations, and the paths of irregular archives.

    In an irregular archive a member lies at another offset than predicted. After the first irregular archive nothing
    more is fetched, so some locations are missing.
    """
    from huggingface_hub import is_offline_mode

    heads = {key: cache.header_of(layout) for key, layout in {id(x.layout): x.layout for x in wanted}.items()}
    locations, irregular = _find_local(repo, wanted, heads, check)
    missing = [x for x in wanted if x not in locations]
    if irregular:
        return locations, irregular
    if missing and is_offline_mode():
        raise _offline_error(repo, name, missing, len(wanted))
    if missing:
        partly_cached = {x.repo_path for x in (locations if whole else wanted)}
        irregular_fetched = _fetch_missing(repo, name, missing, heads, partly_cached)
        fetched, irregular = _find_local(repo, missing, heads)
        wrong = [x for x in missing if x not in fetched and x.repo_path not in {*irregular_fetched, *irregular}]
        # The wrong bytes are in files fetched as a whole: fetch them again by ranges, which either works or raises the
        # right error.
        if wrong and not irregular_fetched and not irregular:
            irregular_fetched = _fetch_missing(repo, name, wrong, heads, {x.repo_path for x in wrong})
            fetched |= _find_local(repo, wrong, heads)[0]
        return locations | fetched, sorted({*irregular_fetched, *irregular})
    return locations, []


def _find_local(
    repo: Repo, wanted: Sequence[WantedMember], heads: Mapping[int, bytes], check: bool = False
) -> tuple[dict[WantedMember, Location], list[str]]:
    """Look for members in the cache of the Hub's client, then in our member cache; return their locations, and the
    paths of irregular archives.

    A file with wrong bytes is deleted from our cache and from the client's cache. Offline, a file of the client's cache
    stays if its members are right: each member is compared with its own hash.
    """
    files = list(dict.fromkeys(x.repo_path for x in wanted))
    without_hash = {x.repo_path for x in wanted if x.sha256 is None}
    whole_files = {
        repo_path: path
        for repo_path in files
        if (path := hub.cached_file(repo, repo_path)) is not None
        and not ((repo_path in without_hash or not hub.is_offline()) and hub.check_whole_file(repo, path, check))
    }
    hashes = {
        repo_path: HashRecord(path, hub.whole_file_record(repo, path), check) for repo_path, path in whole_files.items()
    }
    records = {repo_path: cache.read_file_record(repo.id, repo.commit, repo_path) for repo_path in files}
    locations, irregular = {}, set[str]()
    for x in wanted:
        whole_file, record, head = whole_files.get(x.repo_path), records[x.repo_path], heads[id(x.layout)]
        if whole_file is not None:
            if x.proves_member is not None and not x.proves_member(_read_bytes(whole_file, x.begin, x.offset)):
                irregular.add(x.repo_path)
                continue
            if x.sha256 is None or _is_intact(whole_file, x.offset, x, b"", hashes[x.repo_path], str(x.offset)):
                locations[x] = Location(x.key[0], x.prefix, whole_file, x.offset, x.layout)
                continue
        if record is not None:
            start = len(head) or x.layout.header_nbytes
            name = cache.member_file_name(record[0], x.offset, x.layout, head, x.name_in_archive)
            path = cache.find_member(repo.id, name, start + x.layout.nbytes)
            if path is None:
                continue
            member_hash = HashRecord(path, cache.record_path(path), check)
            if _is_intact(path, start, x, head, member_hash, ""):
                member_hash.save()
                locations[x] = Location(x.key[0], "", path, start, x.layout)
            else:
                delete_file(path, cache.record_path(path))
    for each in hashes.values():
        each.save()
    return locations, sorted(irregular)


def _is_intact(path: Path, start: int, x: WantedMember, head: bytes, record: HashRecord, part: str) -> bool:
    """Say whether a cached file has a member's bytes. Bytes whose hash is recorded are not read again.

    Args:
        path: path of the cached file.
        start: offset of the member's first tensor in the file.
        x: the member.
        head: expected bytes at the start of the file; b"" if they are not compared.
        record: recorded hashes of the file.
        part: name of the member's part in the record.
    """
    recorded = record.hashes.get(part)
    if recorded is not None and x.sha256 in (None, recorded):
        return True
    header_nbytes = x.layout.header_nbytes
    raw = _read_bytes(path, start - max(len(head), header_nbytes), start + x.layout.nbytes)
    if len(raw) < max(len(head), header_nbytes) + x.layout.nbytes or not raw.startswith(head):
        return False
    if header_nbytes:
        try:
            check_own_header(raw[:header_nbytes], x.layout, path)
        except DamagedError:
            return False
    digest = content_hash(x.layout, memoryview(raw)[-x.layout.nbytes or len(raw) :])
    if digest != (x.sha256 or record.old_hashes.get(part, digest)):
        return False
    record.add(part, digest)
    return True


def _read_bytes(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _fetch_missing(
    repo: Repo, name: str, missing: Sequence[WantedMember], heads: Mapping[int, bytes], partly_cached: set[str]
) -> set[str]:
    """Fetch members: a whole file if most of it is needed and nothing of it is cached (`partly_cached`), else ranges.

    Return the paths of irregular archives.
    """
    files: dict[str, list[WantedMember]] = {}
    for x in missing:
        files.setdefault(x.repo_path, []).append(x)
    # A link that expires is renewed while its file is read. After an error the next call asks the Hub for the link
    # again.
    known_remotes = {
        repo_path: remote for repo_path in files if (remote := _remote_files.pop((repo, repo_path), None)) is not None
    }
    folder = cache.writable_folder(repo.id)
    cache.delete_stale(folder)

    def ask(repo_path: str) -> RemoteFile:
        remote = known_remotes.get(repo_path) or RemoteFile.of(repo, repo_path)
        remote.check_size(max(x.end for x in files[repo_path]))
        cache.write_file_record(folder, repo.commit, repo_path, remote.etag, remote.size)
        return remote

    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="zoo-fetch") as pool, ExitStack() as locks:
        remotes = dict(zip(files, pool.map(ask, files), strict=True))
        # Locks are always taken in the same order, so that two processes can't block each other.
        for etag in sorted({remote.etag for remote in remotes.values()}):
            locks.enter_context(cache.locked_key(folder, etag))
        # Another process may have fetched some members in the meantime.
        already_there, _ = _find_local(repo, missing, heads)
        parts, irregular = [], set[str]()
        for repo_path, remote in remotes.items():
            still_missing = [x for x in files[repo_path] if x not in already_there]
            is_untouched = repo_path not in partly_cached and len(still_missing) == len(files[repo_path])
            is_untouched = is_untouched and hub.cached_file(repo, repo_path) is None
            if is_untouched and sum(x.end - x.begin for x in still_missing) > WHOLE_FILE_SHARE * remote.size:
                hub.fetch_file(repo, repo_path)
                continue
            for x in still_missing:
                head = heads[id(x.layout)]
                path = (
                    folder
                    / "members"
                    / cache.member_file_name(remote.etag, x.offset, x.layout, head, x.name_in_archive)
                )
                parts.append(_Download(x, remote, cache.MemberDraft(path, head, x.end - x.begin, x.bytes_before)))
        if parts:
            cache.check_room(folder, sum(p.draft.size for p in parts))
            irregular = _read_ranges(parts, name, pool)
    _remote_files.update({(repo, repo_path): remote for repo_path, remote in remotes.items()})
    return irregular


def _read_ranges(parts: Sequence[_Download], name: str, pool: ThreadPoolExecutor) -> set[str]:
    """Read members' bytes over several connections, each member into its cache file; if one fails, members that arrived
    stay.

    Return the paths of irregular archives; the reading ends at the first one.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stop, irregular = threading.Event(), set[str]()
    ranges = list(_plan_ranges(parts))
    total = sum(end - begin for _, begin, end in ranges)
    title = f"{name}: {len(parts)} member{'s' if len(parts) > 1 else ''}"
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=title)  # type: ignore[no-untyped-call]
    with bar:

        def run(downloads: Sequence[_Download], begin: int, end: int) -> None:
            def sink(at: int, piece: bytes) -> None:
                if stop.is_set():
                    raise _Stopped
                for part in downloads:
                    start = max(at, part.wanted.begin)
                    some = piece[start - at : max(start - at, part.wanted.end - at)]
                    if some and part.draft.write(start - part.wanted.begin, some) and not _check_and_keep(part):
                        irregular.add(part.wanted.repo_path)
                        stop.set()
                bar.update(len(piece))

            downloads[0].remote.read(begin, end, sink)

        futures = [pool.submit(run, *each) for each in ranges]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [f for f in done if not isinstance(f.exception(), _Stopped | None)]
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            for part in parts:
                part.draft.discard()
    for future in failed:
        future.result()
    return irregular


def _plan_ranges(parts: Sequence[_Download]) -> Iterator[tuple[list[_Download], int, int]]:
    """Join members that lie close together into ranges, and split long ranges; yield (members, begin, end)."""
    runs: list[list[_Download]] = []
    reached = 0
    for part in sorted(parts, key=lambda p: (p.wanted.repo_path, p.wanted.begin)):
        if runs and runs[-1][0].remote is part.remote and part.wanted.begin <= reached + GAP:
            runs[-1].append(part)
            reached = max(reached, part.wanted.end)
        else:
            runs.append([part])
            reached = part.wanted.end
    for run in runs:
        begin, end = run[0].wanted.begin, max(p.wanted.end for p in run)
        count = -(-(end - begin) // LARGEST_RANGE)
        cut_points = [begin + (end - begin) * i // count for i in range(count + 1)]
        for start, stop in pairwise(cut_points):
            yield [p for p in run if p.wanted.begin < stop and p.wanted.end > start], start, stop


def _check_and_keep(part: _Download) -> bool:
    """Check a member that has arrived, and store it; if its bytes are wrong, read them a second time.

    Return False, without storing the bytes, if they belong to another member than predicted.
    """
    digest, problem = _hash_and_compare(part) if _is_proven(part) else ("", None)
    if digest and problem is None:
        part.draft.keep(digest)
        return True
    part.draft.discard()
    begin = part.wanted.begin

    def again(at: int, piece: bytes) -> None:
        part.draft.write(at - begin, piece)

    part.remote.read(begin, part.wanted.end, again)
    digest, problem = _hash_and_compare(part) if _is_proven(part) else ("", None)
    if digest and problem is None:
        part.draft.keep(digest)
        return True
    part.draft.discard()
    if problem is not None:
        raise problem
    return False


def _is_proven(part: _Download) -> bool:
    """Say whether the headers before the tensors belong to the requested member."""
    x = part.wanted
    return x.proves_member is None or x.proves_member(
        bytes(part.draft.before) + bytes(part.draft.content()[: x.layout.header_nbytes])
    )


def _hash_and_compare(part: _Download) -> tuple[str, DamagedError | None]:
    """Hash a member that has arrived; return its hash, and the error for bytes that differ from the manifest."""
    x = part.wanted
    content = part.draft.content()
    member_text = f"member {format_ids([x.key])} in file {x.repo_path} of {part.remote.repo.label}"
    if x.layout.header_nbytes:
        try:
            check_own_header(bytes(content[: x.layout.header_nbytes]), x.layout, member_text)
        except DamagedError as error:
            return "", error
    digest = content_hash(x.layout, content[len(content) - x.layout.nbytes :])
    if x.sha256 in (None, digest):
        return digest, None
    return digest, DamagedError(
        member_text,
        expected=f"sha256 {x.sha256[:16]}… in the {x.layout.nbytes:,} bytes at {x.offset:,}",
        found=f"{digest[:16]}…, twice",
        do="Nothing of it was stored: tell the producer, or try another network",
        member=x.key[0],
        path=x.repo_path,
    )


def _offline_error(repo: Repo, name: str, missing: Sequence[WantedMember], requested: int) -> NetworkError:
    ids = format_ids([x.key for x in missing])
    return NetworkError(
        f"{len(missing)} of {requested} members of {name}",
        expected="them in the cache, since HF_HUB_OFFLINE is set",
        found=f"no members {ids} of {repo}",
        do=f"Get them online: `zoo-cli download {name} --members {ids} --source {repo}`",
        collection=name,
    )
