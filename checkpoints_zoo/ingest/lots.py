"""The members of an origin with their places and headers: what their rows are made of."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from checkpoints_zoo import archive, fetching, hub, indexing
from checkpoints_zoo.archive import Lot, Lying
from checkpoints_zoo.archive.contents import Contents
from checkpoints_zoo.archive.tar import TarHeader
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.ingest.nets import Net
from checkpoints_zoo.ingest.origin import Origin, Say

AT_ONCE = 3  # archives of a repo; each is read over several connections
_OF_SHARD = re.compile(r"[0-9]{6,}(@[0-9]+)?/")
Take = Callable[[int, int], bytes]


def of_archives(origin: Origin, staged: Mapping[str, archive.Index], predicted: bool) -> list[Lot]:
    """Index archives; return a lot each.

    Args:
        origin: whose archives they are.
        staged: of the gzipped ones, what they were found to hold; their members' paths are "ARCHIVE!POSITION".
        predicted: whether an index of a repo's archive may be predicted from some of its headers.

    Raises:
        DamagedError: an archive that is none, or is cut.
        NetworkError, AccessError: a repo that can't be read.
    """
    tars = [p for p in origin.archives if p not in origin.gzips]
    if origin.repo is None:
        opened = indexing.open_local(origin.root, tars)
    else:
        if not predicted:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="zoo-walk") as pool:
                list(pool.map(partial(indexing.walk_remote, origin.repo), tars))
        opened = indexing.open_remote(origin.repo, tars) if tars else []
    indexes = {one.inside: one.index for one in opened}
    lots = []
    for inside in origin.archives:
        if inside in indexes:
            lots.append(archive.lot_of(inside, indexes[inside]))
        elif inside in staged:
            lots.append(_of_staged(inside, staged[inside]))
    return lots


def _of_staged(inside: str, index: archive.Index) -> Lot:
    heads, last = index.heads, {e.name: i for i, e in enumerate(index.entries)}  # of one name the last counts
    kept = [(i, e) for i, e in enumerate(index.entries) if last[e.name] == i]
    return Lot([Lying(e.name, f"{inside}!{i}", heads[e.head].lead, heads[e.head]) for i, e in kept])


def unverified(origin: Origin) -> int:
    """Count the headers of a repo's archives that were only predicted so far, once these are indexed."""
    if origin.repo is None:
        return 0
    opened = indexing.open_remote(origin.repo, [p for p in origin.archives if p not in origin.gzips] or [])
    indexes = [one.index for one in opened]
    return sum(len(index.entries) for index in indexes if not all(e.verified for e in index.entries))


def of_files(origin: Origin, say: Say) -> Lot:
    """Read the headers of safetensors files; return their members.

    Raises:
        UsageError: a file is a shard of ours, and no member.
        NetworkError, AccessError: a repo that can't be read.
    """
    contents, members = Contents(origin.label), list[Lying]()
    if origin.repo is None:
        pieces = [_local(origin.root / p) for p in origin.files]
    else:
        with ThreadPoolExecutor(fetching.PARALLEL, thread_name_prefix="zoo-heads") as pool:
            pieces = list(pool.map(partial(_remote, origin.repo), origin.files))
    for inside, (size, take) in zip(origin.files, pieces, strict=True):
        entry = contents.add(TarHeader(inside, 0, 0, size, ""), take)
        if entry:
            head = contents.heads[entry.head]
            if all(_OF_SHARD.match(name) for name, _, _ in head.tensors):
                raise UsageError(
                    f"file {inside} of {origin.label}",
                    expected="one member a file",
                    found="a shard with several members of a collection",
                    do="`zoo-cli download NAME --source DIR --dest OUT` copies a collection that has a manifest",
                    path=inside,
                )
            members.append(Lying(inside, inside, head.lead, head))
    for other in contents.others:
        if not other.member:
            say(f"{other.name} is left out: {other.why}")
    return Lot(members, [(other.name, other.why) for other in contents.others if other.member])


def _local(path: Path) -> tuple[int, Take]:
    def take(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return path.stat().st_size, take


def _remote(repo: hub.Repo, inside: str) -> tuple[int, Take]:
    """Read the first bytes of a repo's file, enough for most headers; return its size and what reads on from there."""
    remote = fetching.remote(repo, inside)
    first = remote.bytes_at(0, min(remote.size, archive.walking.FIRST))

    def take(offset: int, length: int) -> bytes:
        return first[offset : offset + length] if offset + length <= len(first) else remote.bytes_at(offset, length)

    return remote.size, take


def fingerprint(origin: Origin, net: Net) -> str:
    """Hash what is imported: files with sizes and times, or a commit, and as what net; return 64 hex digits."""
    where = str(origin.repo) if origin.repo else ""
    files = [[p, *([] if origin.repo else _stamp(origin.root / p))] for p in origin.paths]
    return hashlib.sha256(json.dumps([where, files, asdict(net)], sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
