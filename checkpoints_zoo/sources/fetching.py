"""Members of a repo on the Hub, brought to this disk: what is here already, and the rest by a few range reads."""

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
from checkpoints_zoo.sources.hub import Repo
from checkpoints_zoo.sources.ranges import RemoteFile

GAP = 256 * 2**10  # bytes that cost less than another request
LARGEST_RANGE = 32 * 2**20  # several connections share a longer one
CONNECTIONS = 8
WHOLE_FILE_SHARE = 0.4  # share of a file from which on all of it is fetched

_remote_files: dict[tuple[Repo, str], RemoteFile] = {}  # files that were read from: one HEAD each for a process


@dataclass(frozen=True)
class WantedMember:
    """A snapshot whose bytes are asked for, as its row says.

    Args:
        key: member, and epoch where it is not the final one.
        prefix: what stands before its tensor names in the shard.
        repo_path: path of the file in the repo.
        offset: of its first tensor in the file.
        layout: of its bytes.
        sha256: of its content, None where nobody knows.
        called: its name in the archive that it lies in.
        before: bytes in front of it that are to be read as well, to see that it is called so.
        prove: looks at these and at its own header; says whether the bytes are the member's, None for no doubt.
    """

    key: Key
    prefix: str
    repo_path: str
    offset: int
    layout: Layout = field(compare=False)
    sha256: str | None
    called: str = ""
    before: int = 0
    prove: Callable[[bytes], bool] | None = field(default=None, compare=False)

    @property
    def begin(self) -> int:
        return self.offset - self.layout.lead - self.before

    @property
    def end(self) -> int:
        return self.offset + self.layout.nbytes


@dataclass(frozen=True)
class _Download:
    """A member to be fetched, and the file it is to become."""

    wanted: WantedMember
    remote: RemoteFile
    draft: cache.Draft


class _Stopped(Exception):
    """Another thread has failed: this one need not go on."""


def remote_file(repo: Repo, repo_path: str) -> RemoteFile:
    """Ask where a file of a repo lies, once in a process; return it.

    Raises:
        SourceNotFound, AccessError, NetworkError: see `hub.resolve_address`.
    """
    if (repo, repo_path) not in _remote_files:
        _remote_files[repo, repo_path] = RemoteFile.of(repo, repo_path)
    return _remote_files[repo, repo_path]


def fetch_rows(repo: Repo, described: manifest.Described, rows: pa.Table, whole: bool = True) -> list[Location]:
    """Bring the bytes of a manifest's rows from a repo to this disk; return where they lie now.

    Args:
        repo: that they lie in.
        described: the description beside the manifest.
        rows: of the manifest.
        whole: as in `fetch_members`.

    Raises:
        NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: see `fetch_members`.
    """
    names = ("path", "offset", "layout", "sha256")
    columns = zip(*(rows.column(c).to_pylist() for c in names), strict=True)
    wanted = [
        WantedMember(key, tensor_prefix(*key), repo_path, offset, described.layouts[layout], sha256)
        for key, (repo_path, offset, layout, sha256) in zip(snapshot_keys(rows), columns, strict=True)
    ]
    return fetch_members(repo, described.name, wanted, whole)


def fetch_members(repo: Repo, name: str, wanted: Sequence[WantedMember], whole: bool = True) -> list[Location]:
    """Bring members that nobody doubts to this disk, all that are missing in one go; return where they lie now.

    Args:
        repo: at the commit that the rows are of.
        name: of the collection, for errors.
        wanted: the members.
        whole: whether a file of which most is missing may be fetched whole, into the client's cache.

    Raises:
        NetworkError: no answer, or offline with members missing: they are listed.
        AccessError, SourceNotFound: a file that may not be read, or is not there.
        DamagedError: bytes that are not what the manifest says; they are not kept.
        StorageError: the disk is full.
    """
    locations, _ = fetch_predicted(repo, name, wanted, whole)
    return [locations[x] for x in wanted]


def fetch_predicted(
    repo: Repo, name: str, wanted: Sequence[WantedMember], whole: bool = True
) -> tuple[dict[WantedMember, Location], list[str]]:
    """Bring members to this disk as `fetch_members` does; return their locations, and the paths of irregular archives.

    In an irregular archive a member lies elsewhere than was predicted. As soon as one is known, nothing more is
    fetched, and members may be missing among those that are returned.
    """
    from huggingface_hub import is_offline_mode

    heads = {key: cache.header_of(layout) for key, layout in {id(x.layout): x.layout for x in wanted}.items()}
    locations, irregular = _find_local(repo, wanted, heads)
    missing = [x for x in wanted if x not in locations]
    if irregular:
        return locations, irregular
    if missing and is_offline_mode():
        raise _offline_error(repo, name, missing, len(wanted))
    if missing:
        partly_cached = {x.repo_path for x in (locations if whole else wanted)}
        on_the_way = _fetch_missing(repo, name, missing, heads, partly_cached)
        arrived, irregular = _find_local(repo, missing, heads)
        return locations | arrived, sorted({*on_the_way, *irregular})
    return locations, []


def _find_local(
    repo: Repo, wanted: Sequence[WantedMember], heads: Mapping[int, bytes]
) -> tuple[dict[WantedMember, Location], list[str]]:
    """Look for members in the client's cache, then in ours; return those found, and the paths of irregular archives."""
    files = {x.repo_path: None for x in wanted}
    whole_files = {repo_path: path for repo_path in files if (path := hub.cached_file(repo, repo_path)) is not None}
    records = {
        repo_path: cache.read_file_record(repo.id, repo.commit, repo_path)
        for repo_path in files
        if repo_path not in whole_files
    }
    locations, irregular = {}, set[str]()
    for x in wanted:
        if x.repo_path in whole_files:
            if x.prove is not None and not x.prove(_read_bytes(whole_files[x.repo_path], x.begin, x.offset)):
                irregular.add(x.repo_path)
                continue
            locations[x] = Location(x.key[0], x.prefix, whole_files[x.repo_path], x.offset, x.layout)
        elif (record := records[x.repo_path]) is not None:
            head = heads[id(x.layout)]
            start = len(head) or x.layout.lead
            name = cache.member_file_name(record[0], x.offset, x.layout, head, x.called)
            path = cache.find_member(repo.id, name, start + x.layout.nbytes)
            if path is not None:
                locations[x] = Location(x.key[0], "", path, start, x.layout)
    return locations, sorted(irregular)


def _read_bytes(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _fetch_missing(
    repo: Repo, name: str, missing: Sequence[WantedMember], heads: Mapping[int, bytes], partly_cached: set[str]
) -> set[str]:
    """Fetch members, whole files where most of one is missing and nothing of it is here (`partly_cached`) yet.

    Return the paths of archives that were found irregular on the way.
    """
    files: dict[str, list[WantedMember]] = {}
    for x in missing:
        files.setdefault(x.repo_path, []).append(x)
    # A link that has run out by now is renewed on the way. One that brought nothing good is asked for anew.
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
        for etag in sorted({remote.etag for remote in remotes.values()}):  # in one order: nobody waits in a circle
            locks.enter_context(cache.locked_key(folder, etag))
        already_there, _ = _find_local(repo, missing, heads)  # another process may have been faster
        parts, irregular = [], set[str]()
        for repo_path, remote in remotes.items():
            still_missing = [x for x in files[repo_path] if x not in already_there]
            is_untouched = repo_path not in partly_cached and len(still_missing) == len(files[repo_path])
            if is_untouched and sum(x.end - x.begin for x in still_missing) > WHOLE_FILE_SHARE * remote.size:
                hub.fetch_file(repo, repo_path)
                continue
            for x in still_missing:
                head = heads[id(x.layout)]
                path = folder / "members" / cache.member_file_name(remote.etag, x.offset, x.layout, head, x.called)
                parts.append(_Download(x, remote, cache.Draft(path, head, x.end - x.begin, x.before)))
        if parts:
            cache.check_room(folder, sum(p.draft.size for p in parts))
            irregular = _read_ranges(parts, name, pool)
    _remote_files.update({(repo, repo_path): remote for repo_path, remote in remotes.items()})
    return irregular


def _read_ranges(parts: Sequence[_Download], name: str, pool: ThreadPoolExecutor) -> set[str]:
    """Read members' bytes over several connections, each into its file; keep those that arrived even if one fails.

    Return the paths of archives that were found irregular; the first one ends the reading.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    stop, irregular = threading.Event(), set[str]()
    ranges = list(_plan_ranges(parts))
    total = sum(end - begin for _, begin, end in ranges)
    title = f"{name}: {len(parts)} member{'s' if len(parts) > 1 else ''}"
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=title)  # type: ignore[no-untyped-call]
    with bar:

        def run(those: Sequence[_Download], begin: int, end: int) -> None:
            def sink(at: int, piece: bytes) -> None:
                if stop.is_set():
                    raise _Stopped
                for part in those:
                    start = max(at, part.wanted.begin)
                    some = piece[start - at : max(start - at, part.wanted.end - at)]
                    if some and part.draft.write(start - part.wanted.begin, some) and not _check_and_keep(part):
                        irregular.add(part.wanted.repo_path)
                        stop.set()
                bar.update(len(piece))

            those[0].remote.read(begin, end, sink)

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
    """Join members that lie close together, and cut what is long; yield (members, begin, end)."""
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
        cuts = [begin + (end - begin) * i // count for i in range(count + 1)]
        for start, stop in pairwise(cuts):
            yield [p for p in run if p.wanted.begin < stop and p.wanted.end > start], start, stop


def _check_and_keep(part: _Download) -> bool:
    """Check a member that has arrived, once more from afresh where it is not what it should be, and keep it.

    Return False if the bytes are another member's than was predicted; then they are not kept.
    """
    if _is_proven(part) and _find_damage(part) is None:
        part.draft.keep()
        return True
    part.draft.discard()
    begin = part.wanted.begin

    def again(at: int, piece: bytes) -> None:
        part.draft.write(at - begin, piece)

    part.remote.read(begin, part.wanted.end, again)
    proved = _is_proven(part)
    problem = _find_damage(part) if proved else None
    if problem is None and proved:
        part.draft.keep()
        return True
    part.draft.discard()
    if problem is not None:
        raise problem
    return False


def _is_proven(part: _Download) -> bool:
    """Say whether bytes that have arrived are the member's, by the headers in front of its tensors."""
    x = part.wanted
    return x.prove is None or x.prove(bytes(part.draft.before) + bytes(part.draft.content()[: x.layout.lead]))


def _find_damage(part: _Download) -> DamagedError | None:
    """Return the error for bytes that are not what the manifest says, None where they are."""
    x = part.wanted
    if not x.layout.lead and x.sha256 is None:
        return None
    content = part.draft.content()
    member_text = f"member {format_ids([x.key])} in file {x.repo_path} of {part.remote.repo.label}"
    if x.layout.lead:
        try:
            check_own_header(bytes(content[: x.layout.lead]), x.layout, member_text)
        except DamagedError as error:
            return error
    if x.sha256 is None:
        return None
    digest = content_hash(x.layout, content[len(content) - x.layout.nbytes :])
    if digest == x.sha256:
        return None
    return DamagedError(
        member_text,
        expected=f"sha256 {x.sha256[:16]}… in the {x.layout.nbytes:,} bytes at {x.offset:,}",
        found=f"{digest[:16]}…, twice",
        do="Nothing of it was kept: tell the producer, or try another network",
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
