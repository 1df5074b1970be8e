"""What an import is about, before it reads or writes any weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.interop.ingest import filling
from checkpoints_zoo.interop.ingest.origin import Origin
from checkpoints_zoo.interop.ingest.resharding import Row
from checkpoints_zoo.sources.fetching import GAP, LARGEST_RUN


@dataclass(frozen=True)
class Plan:
    """What an import would do.

    Args:
        collection, source, target: names of what is imported, from where, and the folder that is written to.
        files: of the source.
        members, ok, failed, excluded: rows of the manifest, and how many of them are what; None where only reading
            a gzipped archive tells.
        bytes: of the members that have some; of gzipped archives, their own.
        read: bytes of members that are to be read.
        requests: to the Hub, about.
    """

    collection: str
    source: str
    target: str
    files: int
    members: int | None
    ok: int | None
    failed: int | None
    excluded: int | None
    bytes: int
    read: int
    requests: int


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count rows by their status; return the three counts."""
    counts = Counter(row["status"] for row in rows)
    return {status: counts[status] for status in ("ok", "failed", "excluded")}


def unseen(name: str, origin: Origin, target: str) -> Plan:
    """Plan an import of archives that are gzipped, and whose members nobody knows yet; return the plan."""
    size = sum(origin.size(p) for p in origin.archives)
    requests = -(-size // 2**23) + len(origin.archives) if origin.repo else 0
    return Plan(name, origin.label, target, len(origin.paths), None, None, None, None, size, size, requests)


def planned(
    description: Description, origin: Origin, target: str, rows: Sequence[Mapping[str, Any]], headers: int, reads: bool
) -> Plan:
    """Plan an import of members that are known; return the plan.

    Args:
        description, origin, target: what is imported, from where, and to which folder.
        rows: as they would be.
        headers: that are still to be read, a request each.
        reads: whether weights are read, to be hashed, measured or copied.
    """
    located = [dict(row) for row in rows if row["path"] is not None]
    size = sum(row["nbytes"] for row in located)
    requests = 0
    if origin.repo is not None:
        requests = headers + (_ranges(located) + len(origin.paths) if reads else 0)
    return Plan(
        description.name, origin.label, target, len(origin.paths), len(rows), **counted(rows), bytes=size,
        read=size if reads else 0, requests=requests,
    )  # fmt: skip


def _ranges(rows: Sequence[Row]) -> int:
    """Count the ranges that bring members: neighbours of a batch together, long ones cut."""
    count = 0
    for batch in filling.batches(sorted(rows, key=lambda r: (r["path"], r["offset"]))):
        begin, end, inside = 0, 0, None
        for row in batch:
            start, stop = row["offset"], row["offset"] + row["nbytes"]
            if row["path"] != inside or start > end + GAP:
                count += -(-(end - begin) // LARGEST_RUN)
                begin, inside = start, row["path"]
            end = stop
        count += -(-(end - begin) // LARGEST_RUN)
    return count
