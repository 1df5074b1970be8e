"""What a copy would write, worked out from rows and descriptions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import manifest, safetensors
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.sources.finding import Found
from checkpoints_zoo.sources.hubsource import HubSource
from checkpoints_zoo.sources.shards import Piece, Row, Shard
from checkpoints_zoo.sources.source import Source

# What members of one collection must have in common, wherever they come from.
COMMON = ("architecture", "arguments", "dataset", "classes", "preprocessing", "licence", "citation")


@dataclass
class Plan:
    """What a copy is about.

    Args:
        target: the source that it makes or adds to.
        description: as it will be.
        rows: of the new manifest.
        adds: whether the folder has members of the collection already.
        shards: that are to be written.
        cached: bytes that pass through the member cache, those that are there already included.
    """

    target: Source
    description: Description
    rows: list[Row]
    adds: bool
    shards: list[Shard]
    cached: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that are to be written."""
        return sum(shard.nbytes for shard in self.shards)


def plan(found: Found, dest: Path) -> Plan:
    """Work out what a copy of members would write, reading no weights; return it.

    Args:
        found: the members.
        dest: the folder.

    Raises:
        UsageError: the folder is the source itself, or has members under these ids or this name that do not fit.
        FormatError, DamagedError: the manifest that is there breaks the format.
    """
    name = found.description.name
    root = dest.expanduser().absolute()
    target = Source(root, root.as_uri())
    if not isinstance(found.source, HubSource) and root.resolve() == found.source.root.resolve():
        raise UsageError(f"folder {dest}", expected="another one than the source", found="the source itself", path=dest)
    held = target.read(name) if target.manifest_path(name).is_file() else None
    old = {} if held is None else {_key(row): row for row in held[1].to_pylist()}
    description = _described(found.description, found.rows, held[0] if held else None, dest)
    rows, fresh = dict(old), {}
    for at, row in enumerate(found.rows.to_pylist()):
        was = old.get(_key(row))
        rows[_key(row)], piece = _merged(row, was, at, name)
        if piece is not None:
            fresh[_key(row)] = piece
    _check_finals(rows.values(), name, dest)
    whole = found.source.read(name)[1].select(["member", "path"]).to_pylist()
    snapshots = max(_snapshots(whole), _snapshots(rows.values()))
    shards = _shards(description, [rows[key] for key in sorted(rows)], fresh, snapshots)
    brought = isinstance(found.source, HubSource) or bool(found.description.base)
    cached = sum(found.description.layouts[p.row["layout"]].nbytes for p in fresh.values()) if brought else 0
    return Plan(target, description, list(rows.values()), held is not None, shards, cached)


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["member"], row["epoch"]


def _described(new: Description, rows: pa.Table, held: Description | None, dest: Path) -> Description:
    """Put the descriptions of what comes and what is there together; return the one of both."""
    used = set(rows.column("layout").to_pylist()) & set(new.layouts) or set(new.layouts)
    layouts = {key: safetensors.sharded(layout) for key, layout in new.layouts.items() if key in used}
    if held is None:
        return replace(new, layouts=layouts, base="")
    differing = [n for n in COMMON if getattr(new, n) != getattr(held, n)]
    differing += [f"layout {key!r}" for key, layout in layouts.items() if held.layouts.get(key, layout) != layout]
    if held.base:
        differing.append(f"base (the bytes there lie in {held.base})")
    if differing:
        raise UsageError(
            f"collection {new.name} in folder {dest}",
            expected="the description of the members that are to be added",
            found=f"another {', '.join(differing)}",
            do="Give another folder",
            collection=new.name,
            path=dest,
        )
    return replace(held, layouts={**held.layouts, **layouts})


def _merged(row: Row, was: Row | None, at: int, name: str) -> tuple[Row, Piece | None]:
    """Put what a row says and what is known of it in the folder together; return the row, and its piece if new."""
    merged = row if was is None else {c: was[c] if v is None and c != "reason" else v for c, v in row.items()}
    if row["path"] is None:
        return merged if was is None or was["final"] == row["final"] else was, None
    known = row["sha256"], None if was is None or was["path"] is None else was["sha256"]
    if known[0] and known[1] and known[0] != known[1]:
        raise UsageError(
            f"member {format_ids([(row['member'], None if row['final'] else row['epoch'])])} of {name}",
            expected=f"the weights that the folder has under this id, sha256 {known[1][:16]}…",
            found=f"{known[0][:16]}…",
            do="Give another folder",
            collection=name,
            member=row["member"],
        )
    if was is not None and None not in known and was["final"] == row["final"]:
        return merged | {column: was[column] for column in manifest.LOCATION}, None
    return merged, Piece(merged, at, known[0] or known[1])


def _check_finals(rows: Iterable[Row], name: str, dest: Path) -> None:
    """Check that no member ends at two epochs."""
    finals: dict[int, int] = {}
    for row in rows:
        if row["final"] and finals.setdefault(row["member"], row["epoch"]) != row["epoch"]:
            raise UsageError(
                f"member {row['member']} of {name} in folder {dest}",
                expected=f"epoch {finals[row['member']]} as its final one",
                found=f"{row['epoch']} in the members that are to be added",
                do="Give another folder",
                collection=name,
                member=row["member"],
            )


def _snapshots(rows: Iterable[Mapping[str, Any]]) -> int:
    """Count the snapshots that a member has at most, of which it follows how many members share a shard."""
    counts = Counter(row["member"] for row in rows if row["path"] is not None)
    return max(counts.values(), default=1)


def _shards(
    description: Description, rows: Sequence[Row], fresh: Mapping[tuple[int, int], Piece], snapshots: int
) -> list[Shard]:
    """Say which shards are to be written: those that get a new member, with all that belongs into them."""
    found: dict[tuple[str, int], Shard] = {}
    per = {key: safetensors.members_per_shard(layout, snapshots) for key, layout in description.layouts.items()}
    for row in rows:
        if row["path"] is None:
            continue
        key, number = row["layout"], row["member"] // per[row["layout"]]
        shard = found.setdefault((key, number), Shard(number, key, description.layouts[key]))
        shard.pieces.append(fresh.get(_key(row)) or Piece(row, None, row["sha256"]))
    return [shard for _, shard in sorted(found.items()) if any(p.at is not None for p in shard.pieces)]
