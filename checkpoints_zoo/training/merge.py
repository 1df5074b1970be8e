"""Pieces of collections, trained anywhere, put together into one source: the same as if one run had trained them all.

The bytes of shards and descriptions are those of one run. So are the rows of manifests, but for the columns that tell
of the run and not of the member: `TOLD`. Of a member that several pieces have, the row that was made first stays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import CollectionNotFound, DamagedError, UsageError
from checkpoints_zoo.formats import disk, manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.training.packing import Key, Row
from checkpoints_zoo.training.shards import Fresh, Staging, lost, rows_of, seal, source_of, tidy
from checkpoints_zoo.training.state import folder_of, locked, read_description, recorded_hash, untouched

# What a row tells of the run that made it, and two runs of one member may tell otherwise.
TOLD = ("code_version", "torch_version", "device", "wall_time_s", "created")


@dataclass(frozen=True)
class Part:
    """What a folder has of a collection: its description, its snapshots, and those that are in no shard yet."""

    folder: Path
    description: Description
    fresh: dict[Key, Fresh]
    staging: Staging | None


def merge(
    folders: Sequence[Path],
    out: Path,
    names: Sequence[str] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, int]:
    """Put the members of several folders together into one source; return how many each collection has then.

    Whatever the order of the folders, the source is the same, byte for byte. Members that were finished but are in no
    shard yet count too. Killed at any moment it goes on when it is called again; what was in `out` before stays
    readable, and its members count as well.

    Args:
        folders: sources that were trained, none of them still being trained.
        out: folder of the source that it makes or adds to.
        names: of the collections; None for all that the folders have.
        say: told of each shard.

    Raises:
        CollectionNotFound: no folder has such a collection.
        UsageError: members of different recipes, one member with different bytes, or `out` among the folders.
        LockedError: a run is training into one of the folders.
        DamagedError: bytes that are not what their row says.
        StorageError: the disk is full, or can't be written to.
    """
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise UsageError(f"folder {out}", expected="another one than the pieces", found="one of them", path=out)
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(untouched(folder))
        known = {folder: _collections(folder) for folder in folders}
        wanted = sorted({name for found in known.values() for name in found}) if names is None else list(names)
        for name in wanted:
            if not any(name in found for found in known.values()):
                raise CollectionNotFound(
                    f"collection {name!r}", expected=f"one in {', '.join(map(str, folders))}", found="none"
                )
        if not wanted:
            raise CollectionNotFound(
                f"folders {', '.join(map(str, folders))}", expected="members that were trained", found="none"
            )
        with disk.writing_into(out):
            stack.enter_context(locked(out))
        return {name: _merged(name, [f for f in folders if name in known[f]], out, say) for name in wanted}


def _merged(name: str, folders: Sequence[Path], out: Path, say: Callable[[str], object]) -> int:
    """Put one collection together; return how many members it has then."""
    target, parts = source_of(out), [_part(name, folder) for folder in folders]
    if name in _collections(out):
        parts.append(_part(name, out))
    description = _described(parts)
    _check_recipes(name, parts)
    chosen = _chosen(name, parts)
    there = rows_of(target, name)
    new = {key: one for key, one in chosen.items() if there.get(key) != {**one.row, **_place(there.get(key))}}
    snapshots = max(Counter(member for member, _ in chosen).values())
    with disk.writing_into(out):
        for keys in seal(target, description, new, snapshots):
            say(f"{name}: {len(keys):,} snapshots in {out}")
        for part in parts:
            if part.folder == out and part.staging is not None:
                part.staging.drop(part.staging.rows)
        tidy(target, name)
    return len({member for member, _ in chosen})


def _collections(folder: Path) -> set[str]:
    """Return the names of the collections that were trained into a folder."""
    staged = {path.parent.parent.name for path in (folder / ".training").glob("*/finished/*.json")}
    return {path.stem for path in (folder / "manifests").glob("*.parquet")} | staged


def _part(name: str, folder: Path) -> Part:
    """Read what a folder has of a collection, snapshots that are in no shard yet included."""
    source, runs = source_of(folder), folder_of(folder, name)
    rows = rows_of(source, name)
    description = source.read(name)[0] if rows else read_description(runs)
    if len(description.layouts) != 1 or description.base:
        raise UsageError(
            f"collection {name} in folder {folder}",
            expected="one that was trained: one layout, and its bytes in the folder",
            found=f"{len(description.layouts)} layouts" if not description.base else f"bytes in {description.base}",
            collection=name,
            path=folder,
        )
    if gone := sorted(lost(source, rows.values())):
        raise DamagedError(
            f"members {format_ids([(member, None) for member in gone])} of {name} in folder {folder}",
            expected="their bytes in shards",
            found="rows in the manifest alone",
            do="Put the shards back, or train these members into that folder again",
            collection=name,
            path=folder,
        )
    stored = [key for key, row in rows.items() if row["path"] is not None]
    table = manifest.table([rows[key] for key in stored])
    locations = source.locate(description, table) if stored else []
    shard_files.check_against_files(locations)
    at = dict(zip(stored, locations, strict=True))
    fresh = {key: Fresh(row, at.get(key)) for key, row in rows.items()}
    staging, recipe_hash = None, recorded_hash(runs)
    if recipe_hash is not None and (runs / "finished").is_dir():
        staging = Staging(runs / "finished", next(iter(description.layouts.values())), recipe_hash, readonly=True)
        for key, row in staging.rows.items():
            fresh.setdefault(key, Fresh(row, staging.location(key) if row["status"] == "ok" else None))
    return Part(folder, description, fresh, staging)


def _described(parts: Sequence[Part]) -> Description:
    """Return the description that all parts have.

    Raises:
        UsageError: two have others.
    """
    first = parts[0]
    for part in parts[1:]:
        one, other = first.description.to_json(), part.description.to_json()
        if differing := sorted(field for field in one.keys() | other.keys() if one.get(field) != other.get(field)):
            raise UsageError(
                f"collection {first.description.name} in folder {part.folder}",
                expected=f"the description that it has in {first.folder}",
                found=f"another {', '.join(differing)}",
                collection=first.description.name,
                path=part.folder,
            )
    return first.description


def _check_recipes(name: str, parts: Sequence[Part]) -> None:
    """Check that all members come from one recipe.

    Raises:
        UsageError: they don't, or some don't say.
    """
    hashes = {one.row["recipe_hash"]: part.folder for part in reversed(parts) for one in part.fresh.values()}
    if len(hashes) > 1 or None in hashes:
        shown = ", ".join(f"{recipe or 'none'} in {folder}" for recipe, folder in sorted(hashes.items(), key=str))
        raise UsageError(
            f"members of {name}",
            expected="one recipe hash in all rows",
            found=shown,
            do="Name a changed recipe differently",
            collection=name,
        )


def _chosen(name: str, parts: Sequence[Part]) -> dict[Key, Fresh]:
    """Choose one row for each snapshot, the first that was made; return these.

    Raises:
        UsageError: a member with different bytes in two parts, or that failed in one alone.
    """
    found: dict[Key, tuple[Fresh, Path]] = {}
    for part in parts:
        for key, one in part.fresh.items():
            if key not in found:
                found[key] = (one, part.folder)
                continue
            was, where = found[key]
            shown = [
                f"sha256 {x.row['sha256'][:16]}…" if x.row["status"] == "ok" else x.row["status"] for x in (was, one)
            ]
            if (was.row["status"], was.row["sha256"]) != (one.row["status"], one.row["sha256"]):
                raise UsageError(
                    f"member {format_ids([(key[0], None if one.row['final'] else key[1])])} of {name}",
                    expected=f"the weights that it has in {where}, {shown[0]}",
                    found=f"{shown[1]} in {part.folder}",
                    do="Keep one of the two: the same recipe on another processor or torch may round differently",
                    collection=name,
                    member=key[0],
                )
            if _first(one.row) < _first(was.row):
                found[key] = (one, part.folder)
    return {key: one for key, (one, _) in found.items()}


def _first(row: Row) -> tuple[Any, str]:
    """Order rows of one snapshot: by time, then by all that doesn't say where its bytes lie."""
    return row["created"], json.dumps({k: row.get(k) for k in SCHEMA.names if k not in manifest.LOCATION}, default=str)


def _place(row: Row | None) -> Row:
    return {} if row is None else {column: row[column] for column in manifest.LOCATION}
