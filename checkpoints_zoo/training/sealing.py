"""Finished snapshots go into shards, and their rows into the manifest: each shard by itself, the manifest last.

Killed at any moment, what was there before is still there and readable; a shard that is whole is found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats import catalog, manifest, safetensors
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.sources.copying import Piece, Shard, place, written
from checkpoints_zoo.sources.source import Source
from checkpoints_zoo.training.measure import Key, Row, key_of


@dataclass(frozen=True)
class Fresh:
    """A snapshot that is to go into a shard: its row, and where its bytes lie now; None for a member that failed."""

    row: Row
    at: Location | None


def source_of(out: Path) -> Source:
    """Return a folder as a source."""
    return Source(out.absolute(), out.absolute().as_uri())


def rows_of(source: Source, name: str) -> dict[Key, Row]:
    """Return the rows of a collection that a source has, by member and epoch; none where it has no manifest."""
    if not source.manifest_path(name).exists():
        return {}
    return {key_of(row): row for row in source.read(name)[1].to_pylist()}


def lost(source: Source, rows: Iterable[Row]) -> set[int]:
    """Return the members whose bytes are gone: their file is, or ends before them."""
    sizes: dict[str, int] = {}
    gone = set()
    for row in rows:
        if (path := row["path"]) is None:
            continue
        if path not in sizes:
            try:
                sizes[path] = source.file(path).stat().st_size
            except SourceNotFound:
                sizes[path] = 0
        if sizes[path] < row["offset"] + row["nbytes"]:
            gone.add(row["member"])
    return gone


def seal(
    source: Source,
    description: Description,
    fresh: Mapping[Key, Fresh],
    snapshots: int,
    *,
    whole: bool = False,
) -> Iterator[list[Key]]:
    """Write every shard that gets fresh snapshots, and after each the manifest; yield what is in it then.

    What a shard holds is a function of the ids alone. Snapshots that are there already are replaced, and rows of
    members whose bytes are gone left out. Shards that no row names any more stay for whoever reads them: see `tidy`.

    Args:
        source: a folder.
        description: of the collection, with one layout.
        fresh: what is to be added, whole members.
        snapshots: that a member has, of which it follows how many members share a shard.
        whole: whether to write only shards of which every id is there.

    Raises:
        DamagedError: bytes that are not what their row says.
    """
    name, ((key, layout),) = description.name, description.layouts.items()
    held = rows_of(source, name)
    gone = lost(source, held.values())
    held = {k: row for k, row in held.items() if k[0] not in gone}
    size = safetensors.members_per_shard(layout, snapshots)
    for number in sorted({member // size for member, _ in fresh}):
        group = {k: row for k, row in held.items() if k[0] // size == number}
        group |= {k: dict(one.row) for k, one in fresh.items() if k[0] // size == number}
        finals = {k[0] for k, row in group.items() if row["final"]}
        if whole and len(finals) < size:
            continue
        _write(source, name, Shard(number, key, layout), layout, group, fresh)
        held |= group
        table = manifest.table([held[k] for k in sorted(held)])
        manifest.validate(table, description, source.manifest_path(name))
        catalog.write_json(description.to_json(), source.description_path(name))
        manifest.write(table, source.manifest_path(name))
        for folder in (source.manifest_path(name).parent, source.root):  # who is told removes the other copy
            safetensors.sync_folder(folder)
        yield [k for k in group if k in fresh]


def _write(
    source: Source, name: str, shard: Shard, layout: Layout, group: Mapping[Key, Row], fresh: Mapping[Key, Fresh]
) -> None:
    """Write a shard, and into the rows of its snapshots where they lie in it."""
    stored = [k for k in sorted(group) if group[k]["status"] == "ok"]
    if not any(k in fresh for k in stored):
        return
    shard.pieces += [Piece(group[k], None, group[k]["sha256"]) for k in stored]
    locations = []
    for piece, k in zip(shard.pieces, stored, strict=True):
        one = fresh.get(k)
        if one is not None and one.at is not None:
            locations.append(one.at)
        else:
            row = group[k]
            locations.append(Location(k[0], piece.prefix, source.file(row["path"]), row["offset"], layout))
    path = written(source.root / "shards" / name, shard, locations, name)
    for folder in (path.parent, path.parent.parent):  # before the manifest names it
        safetensors.sync_folder(folder)
    place(shard, path.relative_to(source.root).as_posix())


def tidy(source: Source, name: str) -> None:
    """Remove shards that no row names any more, and what kills left of files being written."""
    named = {row["path"] for row in rows_of(source, name).values()}
    for path in (source.root / "shards" / name).glob("*"):
        if path.suffix == ".tmp" or path.relative_to(source.root).as_posix() not in named:
            path.unlink()
    for path in (source.root / "manifests").glob(f".{name}.*.tmp"):
        path.unlink()
