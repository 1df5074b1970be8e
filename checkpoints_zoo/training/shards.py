"""Finished snapshots are staged, then written into shards; the manifest comes last.

If a run is killed at any moment, the earlier content stays readable, and the next run uses the complete shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.formats import catalog, disk, manifest, row_checks, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location, check_against_files, read_members
from checkpoints_zoo.sources.copying import PlannedShard, PlannedSnapshot, record_locations, write_planned
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.training.packing import ManifestRow, PackedSnapshot, SnapshotKey, member_and_epoch


@dataclass(frozen=True)
class NewSnapshot:
    """A snapshot to be written into a shard: its row, and the present location of its bytes (None for a failed
    member)."""

    row: ManifestRow
    location: Location | None


def write_shards(
    source: FolderSource,
    description: Description,
    new_snapshots: Mapping[SnapshotKey, NewSnapshot],
    snapshots_per_member: int,
    *,
    complete_only: bool = False,
) -> Iterator[list[SnapshotKey]]:
    """Write every shard that gets new snapshots, and the manifest after each shard; yield the keys of the new
    snapshots.

    Which members share a shard depends on their ids alone. Snapshots that exist already are replaced; rows of members
    whose bytes are lost are left out. Shards that no row of the manifest names any more stay, since another process may
    be reading these shards; see `remove_unnamed_shards`.

    Args:
        source: source in a folder.
        description: description of the collection, with one layout.
        new_snapshots: snapshots to add; all snapshots of a member come together.
        snapshots_per_member: number of snapshots of a member, which determines how many members share a shard.
        complete_only: whether to write only shards whose members are all finished.

    Raises:
        DamagedError: a snapshot's bytes differ from its row.
    """
    name, ((key, layout),) = description.name, description.layouts.items()
    existing_rows = read_rows(source, name)
    lost_ids = lost_member_ids(source, existing_rows.values())
    existing_rows = {
        snapshot_key: row for snapshot_key, row in existing_rows.items() if snapshot_key[0] not in lost_ids
    }
    size = shard_files.members_per_shard(layout, snapshots_per_member)
    for number in sorted({member // size for member, _ in new_snapshots}):
        shard_rows = {
            snapshot_key: row for snapshot_key, row in existing_rows.items() if snapshot_key[0] // size == number
        }
        shard_rows |= {
            snapshot_key: dict(snapshot.row)
            for snapshot_key, snapshot in new_snapshots.items()
            if snapshot_key[0] // size == number
        }
        finished_ids = {snapshot_key[0] for snapshot_key, row in shard_rows.items() if row["final"]}
        if complete_only and len(finished_ids) < size:
            continue
        _write_shard(source, name, PlannedShard(number, key, layout), layout, shard_rows, new_snapshots)
        existing_rows |= shard_rows
        table = manifest.build_manifest([existing_rows[snapshot_key] for snapshot_key in sorted(existing_rows)])
        row_checks.check_rows(table, description, source.manifest_path(name))
        catalog.write_json(description.to_json(), source.description_path(name))
        manifest.write_manifest(table, source.manifest_path(name))
        for folder in (source.manifest_path(name).parent, source.root):  # The caller then removes the staged files.
            disk.sync_folder(folder)
        yield [snapshot_key for snapshot_key in shard_rows if snapshot_key in new_snapshots]


def _write_shard(
    source: FolderSource,
    collection: str,
    shard: PlannedShard,
    layout: Layout,
    shard_rows: Mapping[SnapshotKey, ManifestRow],
    new_snapshots: Mapping[SnapshotKey, NewSnapshot],
) -> None:
    """Write a shard, and the locations into the rows of its snapshots."""
    stored_keys = [k for k in sorted(shard_rows) if shard_rows[k]["status"] == "ok"]
    if not any(k in new_snapshots for k in stored_keys):
        return
    shard.snapshots += [PlannedSnapshot(shard_rows[k], None, shard_rows[k]["sha256"]) for k in stored_keys]
    locations = []
    for piece, k in zip(shard.snapshots, stored_keys, strict=True):
        snapshot = new_snapshots.get(k)
        if snapshot is not None and snapshot.location is not None:
            locations.append(snapshot.location)
        else:
            row = shard_rows[k]
            locations.append(Location(k[0], piece.prefix, source.local_path(row["path"]), row["offset"], layout))
    path = write_planned(source.root / "shards" / collection, shard, locations, collection)
    for folder in (path.parent, path.parent.parent):  # The shard must be complete before the manifest names it.
        disk.sync_folder(folder)
    record_locations(shard, path.relative_to(source.root).as_posix())


def read_rows(source: FolderSource, collection: str) -> dict[SnapshotKey, ManifestRow]:
    """Return the rows of a collection in a source by member and epoch; {} if there is no manifest."""
    if not source.manifest_path(collection).exists():
        return {}
    return {member_and_epoch(row): row for row in source.read_collection(collection)[1].to_pylist()}


def lost_member_ids(source: FolderSource, rows: Iterable[ManifestRow]) -> set[int]:
    """Return the ids of members whose bytes are lost: the file is missing or too short."""
    sizes: dict[str, int] = {}
    lost_ids = set()
    for row in rows:
        if (path := row["path"]) is None:
            continue
        if path not in sizes:
            try:
                sizes[path] = source.local_path(path).stat().st_size
            except SourceNotFound:
                sizes[path] = 0
        if sizes[path] < row["offset"] + row["nbytes"]:
            lost_ids.add(row["member"])
    return lost_ids


def remove_unnamed_shards(source: FolderSource, collection: str) -> None:
    """Remove shards that no row names any more, and temporary files of killed runs."""
    named_paths = {row["path"] for row in read_rows(source, collection).values()}
    for path in (source.root / "shards" / collection).glob("*"):
        if path.suffix == ".tmp" or path.relative_to(source.root).as_posix() not in named_paths:
            path.unlink()
    for path in (source.root / "manifests").glob(f".{collection}.*.tmp"):
        path.unlink()


def folder_source(out: Path) -> FolderSource:
    """Return a folder as a source."""
    return FolderSource(out.absolute(), out.absolute().as_uri())


class Staging:
    """The staged snapshots of a collection: finished, but in no shard yet.

    Args:
        folder: folder of the staged files; only this object writes into it.
        layout: layout of the snapshots' bytes.
        recipe_hash: hash of the recipe by which the members were trained.
        readonly: whether to keep incomplete files and files of another recipe; False deletes such files.
    """

    def __init__(self, folder: Path, layout: Layout, recipe_hash: str, *, readonly: bool = False) -> None:
        self.folder, self.layout, self.recipe_hash, self.readonly = folder, layout, recipe_hash, readonly
        self.rows: dict[SnapshotKey, ManifestRow] = {}
        self._digests: dict[SnapshotKey, str | None] = {}
        self._read_staged()

    def _read_staged(self) -> None:
        """Read the staged snapshots; remove files of members that were not finished when a run was killed."""
        for path in self.folder.glob("[0-9]*.json"):
            # An unreadable row, as after a power loss, is ignored: the member is trained again.
            with suppress(FormatError, DamagedError, KeyError, TypeError, ValueError):
                self._load_row(catalog.read_json(path))
        finished_members = self.members
        for key in [key for key in self.rows if key[0] not in finished_members]:
            del self.rows[key], self._digests[key]
        expected_paths = {path for key in self.rows for path in (self._json_path(key), self._tensors_path(key))}
        for path in () if self.readonly else self.folder.glob("*"):
            if path not in expected_paths:
                path.unlink()

    def _load_row(self, row_and_digest: dict[str, object]) -> None:
        row, digest = dict.fromkeys(SCHEMA.names) | row_and_digest["row"], row_and_digest["bytes"]  # type: ignore[operator]
        row["created"] = datetime.fromisoformat(row["created"])
        if row["recipe_hash"] != self.recipe_hash:
            raise ValueError("the row is of another recipe")
        key = member_and_epoch(row)
        self.rows[key], self._digests[key] = row, None if digest is None else str(digest)
        if digest is not None:
            try:
                check_against_files([self.location(key)])
                is_undamaged = hashlib.sha256(next(read_members([self.location(key)]))[1]).hexdigest() == digest
            except (DamagedError, OSError):
                is_undamaged = False
            if not is_undamaged:
                del self.rows[key], self._digests[key]

    @property
    def members(self) -> set[int]:
        """Return the ids of the finished members."""
        return {key[0] for key, row in self.rows.items() if row["final"]}

    def _file_name(self, snapshot_key: SnapshotKey) -> str:
        return f"{snapshot_key[0]:06d}@{snapshot_key[1]}"

    def _json_path(self, snapshot_key: SnapshotKey) -> Path:
        return self.folder / f"{self._file_name(snapshot_key)}.json"

    def _tensors_path(self, snapshot_key: SnapshotKey) -> Path:
        return self.folder / f"{self._file_name(snapshot_key)}-{self._digests[snapshot_key]}.safetensors"

    def location(self, key: SnapshotKey) -> Location:
        """Return the location of a snapshot's bytes."""
        return Location(key[0], "", self._tensors_path(key), shard_files.first_offset(self.layout, [""]), self.layout)

    def stage(self, finished: Iterable[PackedSnapshot]) -> None:
        """Stage the snapshots of a stack: each file is renamed when complete, a member's final snapshot last."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for snapshot in sorted(finished, key=lambda f: f.key):
            key, digest = snapshot.key, None
            if snapshot.raw is not None:
                digest = hashlib.sha256(snapshot.raw).hexdigest()
                shard_path = shard_files.write_shard(self.folder, 0, self.layout, [("", snapshot.raw)])
                shard_path.replace(self.folder / f"{self._file_name(key)}-{digest}.safetensors")
            row = snapshot.row | {"created": snapshot.row["created"].isoformat()}
            catalog.write_json({"row": row, "bytes": digest}, self._json_path(key))
            self.rows[key], self._digests[key] = dict(snapshot.row), digest
        disk.sync_folder(self.folder)

    def drop(self, snapshot_keys: Iterable[SnapshotKey]) -> None:
        """Delete staged snapshots that are in a shard now; their row files are deleted first."""
        for key in list(snapshot_keys):
            self._json_path(key).unlink()
            if self._digests[key] is not None:
                self._tensors_path(key).unlink()
            del self.rows[key], self._digests[key]
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


class MemberLog:
    """A JSON line for every member that finished: member, status, reason, accuracy, seconds, time.

    Args:
        path: path of the log file; runs append to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members: set[int] = set()
        self._ends_in_partial_line = False
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            self._ends_in_partial_line = bool(lines[-1])  # A killed run left half a line.
            for line in lines:
                try:
                    self.members.add(json.loads(line)["member"])
                except (ValueError, KeyError, TypeError):
                    continue

    def add(self, rows: Iterable[ManifestRow]) -> list[str]:
        """Append a line for each member whose final snapshot is among the rows; return the new lines."""
        lines = []
        for row in rows:
            if not row["final"] or row["member"] in self.members:
                continue
            self.members.add(row["member"])
            log_entry = {
                "member": row["member"], "status": row["status"], "reason": row["reason"],
                "accuracy": row.get("test_accuracy"), "seconds": row["wall_time_s"],
                "time": row["created"].isoformat(),
            }  # fmt: skip
            lines.append(json.dumps(log_entry))
        if lines:
            with disk.translate_write_errors(self.path.parent), self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._ends_in_partial_line + "".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            self._ends_in_partial_line = False
        return lines
