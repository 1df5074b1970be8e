"""Merge folders with parts of a collection into one source, as if one run had trained all members.

Shards and descriptions have the same bytes as after one run. Rows of manifests are the same too, except the columns on
the run: `RUN_COLUMNS`. If several folders have the same member, the oldest row stays.
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
from checkpoints_zoo.formats import disk, manifest, row_checks, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.training.packing import ManifestRow, SnapshotKey
from checkpoints_zoo.training.shards import (
    NewSnapshot,
    Staging,
    folder_source,
    lost_member_ids,
    read_rows,
    remove_unnamed_shards,
    write_shards,
)
from checkpoints_zoo.training.state import (
    read_description,
    reading_lock,
    recorded_recipe_hash,
    runs_folder,
    training_lock,
)

# Columns of the manifest about the run that trained a member. Two runs that train the same member may write different
# values into these columns.
RUN_COLUMNS = ("code_version", "torch_version", "device", "wall_time_s", "created")


@dataclass(frozen=True)
class CollectionPiece:
    """The part of a collection in one folder: description, snapshots, and the staging of unwritten snapshots."""

    folder: Path
    description: Description
    snapshots: dict[SnapshotKey, NewSnapshot]
    staging: Staging | None


def merge(
    folders: Sequence[Path],
    out: Path,
    names: Sequence[str] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> dict[str, int]:
    """Merge the members of several folders into one source; return the number of members of each collection in the
    source.

    The result does not depend on the order of the folders. Finished members that are in no shard yet are merged too,
    and so are the members in `out`. If the process is killed, the same call continues; the earlier content of `out`
    stays readable.

    Args:
        folders: folders with trained members; no run may be training into them.
        out: folder of the merged source; it may hold members already.
        names: names of the collections to merge; None for all collections in the folders.
        say: function called with a line of text for each shard.

    Raises:
        CollectionNotFound: a folder has no trained members, or no folder has a collection of that name.
        UsageError: members come from different recipes, a member has different bytes in two folders, or `out` is one of
            the folders.
        LockedError: a run is training into one of the folders.
        DamagedError: a member's bytes differ from its row.
        StorageError: the disk is full, or can't be written to.
    """
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise UsageError(f"folder {out}", expected="another one than the pieces", found="one of them", path=out)
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(reading_lock(folder))
        names_by_folder = {folder: _collection_names(folder) for folder in folders}
        for folder, collection_names in names_by_folder.items():
            if not collection_names:
                found = "none" if folder.is_dir() else "nothing there"
                raise CollectionNotFound(
                    f"folder {folder}", expected="members that were trained", found=found, path=folder
                )
        selected_names = (
            sorted({name for collection_names in names_by_folder.values() for name in collection_names})
            if names is None
            else list(names)
        )
        for name in selected_names:
            if not any(name in collection_names for collection_names in names_by_folder.values()):
                raise CollectionNotFound(
                    f"collection {name!r}", expected=f"one in {', '.join(map(str, folders))}", found="none"
                )
        with disk.translate_write_errors(out):
            stack.enter_context(training_lock(out))
        return {
            name: _merge_collection(name, [f for f in folders if name in names_by_folder[f]], out, say)
            for name in selected_names
        }


def _merge_collection(collection: str, folders: Sequence[Path], out: Path, say: Callable[[str], object]) -> int:
    """Merge one collection; return its number of members."""
    target, pieces = folder_source(out), [_read_piece(collection, folder) for folder in folders]
    if collection in _collection_names(out):
        pieces.append(_read_piece(collection, out))
    description = _common_description(pieces)
    _check_recipes(collection, pieces)
    snapshots = _choose_snapshots(collection, pieces)
    existing_rows = read_rows(target, collection)
    new_snapshots = {
        key: snapshot
        for key, snapshot in snapshots.items()
        if existing_rows.get(key) != {**snapshot.row, **_location_columns(existing_rows.get(key))}
    }
    snapshots_per_member = max(Counter(member for member, _ in snapshots).values())
    with disk.translate_write_errors(out):
        for keys in write_shards(target, description, new_snapshots, snapshots_per_member):
            say(f"{collection}: {len(keys):,} snapshots in {out}")
        for piece in pieces:
            if piece.folder == out and piece.staging is not None:
                piece.staging.drop(piece.staging.rows)
        remove_unnamed_shards(target, collection)
    return len({member for member, _ in snapshots})


def _collection_names(folder: Path) -> set[str]:
    """Return the names of the collections in a folder, staged ones included."""
    staged_names = {path.parent.parent.name for path in (folder / ".training").glob("*/finished/*.json")}
    return {path.stem for path in (folder / "manifests").glob("*.parquet")} | staged_names


def _read_piece(collection: str, folder: Path) -> CollectionPiece:
    """Read the part of a collection in a folder, staged snapshots included."""
    source, runs = folder_source(folder), runs_folder(folder, collection)
    rows = read_rows(source, collection)
    description = source.read_collection(collection)[0] if rows else read_description(runs)
    if len(description.layouts) != 1 or description.base:
        raise UsageError(
            f"collection {collection} in folder {folder}",
            expected="a trained collection: one layout, and its bytes in the folder",
            found=f"{len(description.layouts)} layouts" if not description.base else f"bytes in {description.base}",
            collection=collection,
            path=folder,
        )
    if missing := sorted(lost_member_ids(source, rows.values())):
        raise DamagedError(
            f"members {format_ids([(member, None) for member in missing])} of {collection} in folder {folder}",
            expected="their bytes in shards",
            found="rows in the manifest alone",
            do="Put the shards back, or train these members into that folder again",
            collection=collection,
            path=folder,
        )
    stored_keys = [key for key, row in rows.items() if row["path"] is not None]
    table = manifest.build_manifest([rows[key] for key in stored_keys])
    locations = source.locate(description, table) if stored_keys else []
    shard_files.check_against_files(locations)
    location_of_key = dict(zip(stored_keys, locations, strict=True))
    snapshots = {key: NewSnapshot(row, location_of_key.get(key)) for key, row in rows.items()}
    staging, recipe_hash = None, recorded_recipe_hash(runs)
    if recipe_hash is not None and (runs / "finished").is_dir():
        staging = Staging(runs / "finished", next(iter(description.layouts.values())), recipe_hash, readonly=True)
        for key, row in staging.rows.items():
            snapshots.setdefault(key, NewSnapshot(row, staging.location(key) if row["status"] == "ok" else None))
    return CollectionPiece(folder, description, snapshots, staging)


def _common_description(pieces: Sequence[CollectionPiece]) -> Description:
    """Return the description that all pieces share.

    Raises:
        UsageError: two descriptions differ.
    """
    first = pieces[0]
    for piece in pieces[1:]:
        first_json, piece_json = first.description.to_json(), piece.description.to_json()
        if differing := sorted(
            field for field in first_json.keys() | piece_json.keys() if first_json.get(field) != piece_json.get(field)
        ):
            raise UsageError(
                f"collection {first.description.name} in folder {piece.folder}",
                expected=f"the description that it has in {first.folder}",
                found=f"another {', '.join(differing)}",
                collection=first.description.name,
                path=piece.folder,
            )
    return first.description


def _check_recipes(collection: str, pieces: Sequence[CollectionPiece]) -> None:
    """Check that all members come from one recipe.

    Raises:
        UsageError: there are several recipes, or some rows lack a recipe hash.
    """
    folder_of_hash = {
        snapshot.row["recipe_hash"]: piece.folder for piece in reversed(pieces) for snapshot in piece.snapshots.values()
    }
    if len(folder_of_hash) > 1 or None in folder_of_hash:
        recipes_text = ", ".join(
            f"{recipe_hash or 'none'} in {folder}" for recipe_hash, folder in sorted(folder_of_hash.items(), key=str)
        )
        raise UsageError(
            f"members of {collection}",
            expected="one recipe hash in all rows",
            found=recipes_text,
            do="Name a changed recipe differently",
            collection=collection,
        )


def _choose_snapshots(collection: str, pieces: Sequence[CollectionPiece]) -> dict[SnapshotKey, NewSnapshot]:
    """Choose the oldest row of each snapshot; return the snapshots by member and epoch.

    Raises:
        UsageError: a member has different bytes in two pieces, or failed in only one of them.
    """
    oldest_snapshot_and_folder: dict[SnapshotKey, tuple[NewSnapshot, Path]] = {}
    for piece in pieces:
        for key, snapshot in piece.snapshots.items():
            if key not in oldest_snapshot_and_folder:
                oldest_snapshot_and_folder[key] = (snapshot, piece.folder)
                continue
            earlier_snapshot, earlier_folder = oldest_snapshot_and_folder[key]
            descriptions = [
                f"sha256 {x.row['sha256'][:16]}…" if x.row["status"] == "ok" else x.row["status"]
                for x in (earlier_snapshot, snapshot)
            ]
            if (earlier_snapshot.row["status"], earlier_snapshot.row["sha256"]) != (
                snapshot.row["status"],
                snapshot.row["sha256"],
            ):
                raise UsageError(
                    f"member {format_ids([(key[0], None if snapshot.row['final'] else key[1])])} of {collection}",
                    expected=f"the weights that it has in {earlier_folder}, {descriptions[0]}",
                    found=f"{descriptions[1]} in {piece.folder}",
                    do="Keep one of the two: the same recipe on another processor or torch may round differently",
                    collection=collection,
                    member=key[0],
                )
            if _age_key(snapshot.row) < _age_key(earlier_snapshot.row):
                oldest_snapshot_and_folder[key] = (snapshot, piece.folder)
    return {key: snapshot for key, (snapshot, _) in oldest_snapshot_and_folder.items()}


def _age_key(row: ManifestRow) -> tuple[Any, str]:
    """Return the key that sorts rows of one snapshot: by time, then by all columns except the location."""
    return row["created"], json.dumps(
        {k: row.get(k) for k in SCHEMA.names if k not in row_checks.LOCATION_COLUMNS}, default=str
    )


def _location_columns(row: ManifestRow | None) -> ManifestRow:
    return {} if row is None else {column: row[column] for column in row_checks.LOCATION_COLUMNS}
