"""Copies of members: a source of its own in a folder, whatever source and layout the members come from.

Shards are written first, each under its name only once it is whole, then the description, the manifest last. So what
was in the folder stays readable, and a copy that was killed goes on with the shards that are there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.formats import catalog, disk, manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.selection import Key, format_ids
from checkpoints_zoo.formats.shard_files import Location, shard_header, tensor_prefix
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.source import FolderSource, SelectedMembers

Row = dict[str, Any]

# What members of one collection must have in common, wherever they come from.
COMMON = ("architecture", "arguments", "dataset", "classes", "preprocessing", "licence", "citation")

_SHARD = re.compile(r"[0-9]{5,}-[0-9a-f]{8}\.safetensors")


def copy_members(
    found: SelectedMembers, dest: Path, say: Callable[[str], object] = lambda text: None
) -> SelectedMembers:
    """Write members into a folder as a source of its own, or add them to the one there; return them as they lie there.

    Args:
        found: the members; rows without weights are taken over as they are.
        dest: the folder; other collections in it stay.
        say: told of each shard.

    Raises:
        UsageError, FormatError: see `plan_copy`.
        DamagedError: a member whose bytes are not what its row says.
        StorageError: no room, or a folder that can't be written to.
        NetworkError, AccessError, SourceNotFound: the members can't be had.
    """
    name, root = found.description.name, dest.expanduser().absolute()
    locks = cache.writable_folder("local/copies")  # the folder itself is to hold nothing but the source
    with disk.writing_into(root), cache.locked(locks, str(root.resolve() / name)):
        making = plan_copy(found, dest)
        folder = root / "shards" / name
        for left in (*folder.glob(".*.tmp"), *(root / "manifests").glob(f".{name}.*.tmp")):  # by a kill
            left.unlink()
        disk.check_room(root, sum(s.nbytes for s in making.shards if not similar_files(folder, s)))
        for shard in making.shards:
            path = find_finished(folder, shard)
            if path is None:
                locations, now = _located(shard, found, making.target)
                if now is not found:
                    break
                path = write_planned(folder, shard, locations, name)
            record_place(shard, path.relative_to(root).as_posix())
            say(f"{path}: {len(shard.pieces):,} members")
        else:
            return _closed(making, found)
    return copy_members(now, dest, say)  # an archive was found irregular: its members lie elsewhere than was thought


def _closed(making: CopyPlan, found: SelectedMembers) -> SelectedMembers:
    """Write description and manifest, remove shards that were replaced, by a killed copy too; return the members."""
    target, name = making.target, making.description.name
    table = manifest.build_manifest(making.rows)
    manifest.check_rows(table, making.description, target.manifest_path(name))
    catalog.write_json(making.description.to_json(), target.description_path(name))
    manifest.write_manifest(table, target.manifest_path(name))
    named = {row["path"] for row in making.rows}
    for path in (target.root / "shards" / name).glob("*") if making.adds else ():
        if _SHARD.fullmatch(path.name) and path.relative_to(target.root).as_posix() not in named:
            path.unlink()
    description, rows = target.read_collection(name)
    at = {key: i for i, key in enumerate(snapshot_keys(rows))}
    chosen = manifest.take_rows(rows, [at[key] for key in snapshot_keys(found.rows)])
    return SelectedMembers(
        target, target.commit(name), description, chosen, len(set(rows.column("member").to_pylist()))
    )


def _located(
    shard: PlannedShard, found: SelectedMembers, target: FolderSource
) -> tuple[list[Location], SelectedMembers]:
    """Find the bytes of a shard's members, bringing them here; return where they lie, and the members as they are now.

    Reading an archive can show that its members lie elsewhere than was thought. Then these are others than `found`.
    """
    new = [p.at for p in shard.pieces if p.at is not None]
    there = iter(found.source.locate(found.description, manifest.take_rows(found.rows, new)))
    rows = found.source.updated_rows(found.description.name, found.rows)
    if rows is not found.rows:
        name = found.description.name
        return [], replace(
            found, description=found.source.read_collection(name)[0], commit=found.source.commit(name), rows=rows
        )
    old = manifest.build_manifest([p.row for p in shard.pieces if p.at is None])
    here = iter(target.locate(target.read_collection(found.description.name)[0], old) if old.num_rows else [])
    locations = [next(here if p.at is None else there) for p in shard.pieces]
    shard_files.check_against_files(locations)
    return locations, found


@dataclass
class CopyPlan:
    """What a copy is about.

    Args:
        target: the source that it makes or adds to.
        description: as it will be.
        rows: of the new manifest.
        adds: whether the folder has members of the collection already.
        shards: that are to be written.
        cached: bytes that pass through the member cache, those that are there already included.
    """

    target: FolderSource
    description: Description
    rows: list[Row]
    adds: bool
    shards: list[PlannedShard]
    cached: int

    @property
    def nbytes(self) -> int:
        """Bytes of the shards that are to be written."""
        return sum(shard.nbytes for shard in self.shards)


def plan_copy(found: SelectedMembers, dest: Path) -> CopyPlan:
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
    target = FolderSource(root, root.as_uri())
    if found.source.repo is None and root.resolve() == found.source.root.resolve():
        raise UsageError(f"folder {dest}", expected="another one than the source", found="the source itself", path=dest)
    held = target.read_collection(name) if target.manifest_path(name).is_file() else None
    old = {} if held is None else {_key(row): row for row in held[1].to_pylist()}
    description = _described(found.description, found.rows, held[0] if held else None, dest)
    rows, fresh = dict(old), {}
    for at, row in enumerate(found.rows.to_pylist()):
        was = old.get(_key(row))
        rows[_key(row)], piece = _merged(row, was, at, name)
        if piece is not None:
            fresh[_key(row)] = piece
    _check_finals(rows.values(), name, dest)
    whole = found.source.read_collection(name)[1].select(["member", "path"]).to_pylist()
    snapshots = max(_snapshots(whole), _snapshots(rows.values()))
    shards = _shards(description, [rows[key] for key in sorted(rows)], fresh, snapshots)
    brought = found.source.repo is not None or bool(found.description.base)
    cached = sum(found.description.layouts[p.row["layout"]].nbytes for p in fresh.values()) if brought else 0
    return CopyPlan(target, description, list(rows.values()), held is not None, shards, cached)


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["member"], row["epoch"]


def _described(new: Description, rows: pa.Table, held: Description | None, dest: Path) -> Description:
    """Put the descriptions of what comes and what is there together; return the one of both."""
    used = set(rows.column("layout").to_pylist()) & set(new.layouts) or set(new.layouts)
    layouts = {key: shard_files.shard_layout(layout) for key, layout in new.layouts.items() if key in used}
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


def _merged(row: Row, was: Row | None, at: int, name: str) -> tuple[Row, PlannedSnapshot | None]:
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
    return merged, PlannedSnapshot(merged, at, known[0] or known[1])


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
    description: Description, rows: Sequence[Row], fresh: Mapping[tuple[int, int], PlannedSnapshot], snapshots: int
) -> list[PlannedShard]:
    """Say which shards are to be written: those that get a new member, with all that belongs into them."""
    found: dict[tuple[str, int], PlannedShard] = {}
    per = {key: shard_files.members_per_shard(layout, snapshots) for key, layout in description.layouts.items()}
    for row in rows:
        if row["path"] is None:
            continue
        key, number = row["layout"], row["member"] // per[row["layout"]]
        shard = found.setdefault((key, number), PlannedShard(number, key, description.layouts[key]))
        shard.pieces.append(fresh.get(_key(row)) or PlannedSnapshot(row, None, row["sha256"]))
    return [shard for _, shard in sorted(found.items()) if any(p.at is not None for p in shard.pieces)]


@dataclass
class PlannedSnapshot:
    """A snapshot in a shard that is to be written.

    Args:
        row: of the new manifest, which gets the place and the hash.
        at: its position among the rows to be copied, None for one that lies in the folder already.
        sha256: what its content must hash to, None where nobody knows.
    """

    row: Row
    at: int | None
    sha256: str | None

    @property
    def key(self) -> Key:
        """The member, and the epoch where it is not the final one."""
        return self.row["member"], None if self.row["final"] else self.row["epoch"]

    @property
    def prefix(self) -> str:
        return tensor_prefix(*self.key)


@dataclass
class PlannedShard:
    """A shard that is to be written: its number, the key of its layout, and its snapshots in order."""

    number: int
    key: str
    layout: Layout
    pieces: list[PlannedSnapshot] = field(default_factory=list)

    @property
    def prefixes(self) -> list[str]:
        return [piece.prefix for piece in self.pieces]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return shard_files.first_offset(self.layout, self.prefixes) + len(self.pieces) * self.layout.nbytes


def write_planned(folder: Path, shard: PlannedShard, locations: Sequence[Location], name: str) -> Path:
    """Write a shard, unless it is there; return its path."""
    if similar_files(folder, shard):  # of members that nobody has hashed before
        for piece, x in zip(shard.pieces, locations, strict=True):
            piece.sha256 = piece.sha256 or content_hash(x.layout, _read(x))
        if path := find_finished(folder, shard):
            return path
    members = _members(shard, locations, name)
    return shard_files.stream_shard(folder, shard.number, shard.layout, shard.prefixes, members)


def find_finished(folder: Path, shard: PlannedShard) -> Path | None:
    """Look for a shard that an earlier copy has written whole; return its path, None where there is none."""
    wanted = [piece.sha256 for piece in shard.pieces]
    if None in wanted:
        return None
    start, step = shard_files.first_offset(shard.layout, shard.prefixes), shard.layout.nbytes
    for path in similar_files(folder, shard):
        places = enumerate(shard.pieces)
        there = [Location(p.row["member"], p.prefix, path, start + i * step, shard.layout) for i, p in places]
        if shard_files.hash_members(there) == wanted:
            return path
    return None


def similar_files(folder: Path, shard: PlannedShard) -> list[Path]:
    """List the files that have a shard's number, header and size; return their paths."""
    header = shard_header(shard.layout, shard.prefixes)
    size, found = len(header) + len(shard.pieces) * shard.layout.nbytes, []
    for path in sorted(folder.glob(f"{shard.number:05d}-*.safetensors")):
        if path.stat().st_size == size:
            with path.open("rb") as file:
                if file.read(len(header)) == header:
                    found.append(path)
    return found


def _members(shard: PlannedShard, locations: Sequence[Location], name: str) -> Iterator[shard_files.Bytes]:
    """Read a shard's members one by one and check each; yield their bytes as they are to lie in it."""
    for piece, location in zip(shard.pieces, locations, strict=True):
        raw = _read(location)
        digest = content_hash(location.layout, raw)
        if piece.sha256 not in (None, digest):
            raise DamagedError(
                f"member {format_ids([piece.key])} of {name} in file {location.path}",
                expected=f"sha256 {str(piece.sha256)[:16]}…, as its row says",
                found=f"{digest[:16]}…",
                do="Its shard was not written. Get the member again, or leave it out",
                collection=name,
                member=location.member,
                path=location.path,
            )
        piece.sha256 = digest
        yield raw if location.layout == shard.layout else shard_files.repack(location.layout, raw, shard.layout)


def _read(location: Location) -> memoryview:
    return next(iter(shard_files.read_members([location])))[1]


def record_place(shard: PlannedShard, inside: str) -> None:
    """Write down in the rows of a shard's members where they lie now."""
    start, step = shard_files.first_offset(shard.layout, shard.prefixes), shard.layout.nbytes
    for i, piece in enumerate(shard.pieces):
        where = (inside, start + i * step, step, shard.key, shard.layout.dtype)
        piece.row.update(zip(manifest.LOCATION, where, strict=True))
        piece.row["sha256"] = piece.sha256
