"""Copying of members from any source into a folder, which becomes a source too.

Shards are written first, by rename, then the description, and the manifest last. The earlier content of the folder
therefore stays readable, and after an interruption the next copy reuses the finished shards.

This is one file, because the shards that are planned are those that are found finished or are written.
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
from checkpoints_zoo.formats import arrow_tables, catalog, disk, manifest, row_checks, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.member_parts import PARTS_COLUMN
from checkpoints_zoo.formats.selection import SnapshotKey, format_ids
from checkpoints_zoo.formats.shard_files import Location, shard_header, tensor_prefix
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.finding import SelectedMembers
from checkpoints_zoo.sources.folder_source import FolderSource

Row = dict[str, Any]

# Fields of the description that all members of one collection share.
COMMON_FIELDS = ("architecture", "arguments", "dataset", "classes", "preprocessing", "licence", "citation")

_SHARD_NAME = re.compile(r"[0-9]{5,}-[0-9a-f]{8}\.safetensors")


def copy_members(
    selected: SelectedMembers, dest: Path, report_line: Callable[[str], object] = lambda text: None
) -> SelectedMembers:
    """Write members into a folder as a source, or add them to the source there; return the copied members.

    Args:
        selected: the members to copy; manifest rows without weights are copied too.
        dest: the folder to copy into; other collections in the folder stay.
        report_line: function that is called with one line of text for each shard.

    Raises:
        UsageError, FormatError: for the same reasons as in `plan_copy`.
        DamagedError: the bytes of a member differ from the hash in its manifest row.
        StorageError: the disk is full, or the folder can't be written to.
        NetworkError, AccessError, SourceNotFound: the members can't be fetched.
    """
    name, root = selected.description.name, dest.expanduser().absolute()
    # The lock file is kept outside the folder, which should contain only files of the source.
    lock_folder = cache.writable_folder("local/copies")
    with disk.translate_write_errors(root), cache.hold_key_lock(lock_folder, str(root.resolve() / name)):
        plan = plan_copy(selected, dest)
        folder = root / "shards" / name
        # Delete files left by a copy that was killed.
        for temporary_file in (*folder.glob(".*.tmp"), *(root / "manifests").glob(f".{name}.*.tmp")):
            temporary_file.unlink()
        disk.check_room(root, sum(s.nbytes for s in plan.shards if not similar_files(folder, s)))
        for shard in plan.shards:
            path = find_finished(folder, shard)
            if path is None:
                locations, current_selection = _locate_members(shard, selected, plan.target)
                if current_selection is not selected:
                    break
                path = write_planned(folder, shard, locations, name)
            record_locations(shard, path.relative_to(root).as_posix())
            report_line(f"{path}: {len(shard.snapshots):,} members")
        else:
            return _finish_copy(plan, selected)
    # An archive was irregular: its members lie at other offsets than predicted, so the copy is planned again.
    return copy_members(current_selection, dest, report_line)


def _finish_copy(plan: CopyPlan, selected: SelectedMembers) -> SelectedMembers:
    """Write description and manifest, and delete shards that no manifest row names; return the copied members."""
    target, name = plan.target, plan.description.name
    manifest_table = manifest.build_manifest(plan.rows)
    row_checks.check_rows(manifest_table, plan.description, target.manifest_path(name))
    catalog.write_json(plan.description.to_json(), target.description_path(name))
    manifest.write_manifest(manifest_table, target.manifest_path(name))
    used_paths = {row["path"] for row in plan.rows}
    for path in (target.root / "shards" / name).glob("*") if plan.extends_collection else ():
        if _SHARD_NAME.fullmatch(path.name) and path.relative_to(target.root).as_posix() not in used_paths:
            path.unlink()
    description, rows = target.read_collection(name)
    position_of_key = {key: i for i, key in enumerate(snapshot_keys(rows))}
    copied_rows = arrow_tables.take_rows(rows, [position_of_key[key] for key in snapshot_keys(selected.rows)])
    return SelectedMembers(target, target.commit(name), description, copied_rows)


def _locate_members(
    shard: PlannedShard, selected: SelectedMembers, target: FolderSource
) -> tuple[list[Location], SelectedMembers]:
    """Find the bytes of a shard's members; return their locations, and the selected members with corrected rows.

    If reading an archive shows that its members lie at other offsets than predicted, the returned rows differ from the
    rows in `selected`.
    """
    source_positions = [p.position for p in shard.snapshots if p.position is not None]
    source_locations = iter(
        selected.source.locate(selected.description, arrow_tables.take_rows(selected.rows, source_positions))
    )
    rows = selected.source.updated_rows(selected.description.name, selected.rows)
    if rows is not selected.rows:
        name = selected.description.name
        return [], replace(
            selected,
            description=selected.source.read_collection(name)[0],
            commit=selected.source.commit(name),
            rows=rows,
        )
    target_rows = manifest.build_manifest([p.row for p in shard.snapshots if p.position is None])
    target_locations = iter(
        target.locate(target.read_collection(selected.description.name)[0], target_rows) if target_rows.num_rows else []
    )
    locations = [next(target_locations if p.position is None else source_locations) for p in shard.snapshots]
    shard_files.check_against_files(locations)
    return locations, selected


@dataclass
class CopyPlan:
    """The plan of a copy: the new manifest and the shards to write.

    Args:
        target: the source that the copy makes or adds members to.
        description: description of the resulting collection.
        rows: rows of the new manifest.
        extends_collection: whether the target folder has members of the collection already.
        shards: the shards to write.
        cached_nbytes: number of bytes that pass through the member cache, including bytes already in the cache.
    """

    target: FolderSource
    description: Description
    rows: list[Row]
    extends_collection: bool
    shards: list[PlannedShard]
    cached_nbytes: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the shards to write."""
        return sum(shard.nbytes for shard in self.shards)


def plan_copy(selected: SelectedMembers, dest: Path) -> CopyPlan:
    """Plan a copy of members without reading weights; return the plan.

    Args:
        selected: the members to copy.
        dest: the folder to copy into.

    Raises:
        UsageError: the folder is the source itself, or has other members with the same ids, or another collection of
            the same name.
        FormatError, DamagedError: the folder's manifest does not follow the format.
    """
    name = selected.description.name
    root = dest.expanduser().absolute()
    target = FolderSource(root, root.as_uri())
    if not selected.source.uses_cache and root.resolve() == selected.source.root.resolve():
        raise UsageError(f"folder {dest}", expected="another one than the source", found="the source itself", path=dest)
    existing_collection = target.read_collection(name) if target.manifest_path(name).is_file() else None
    old_rows = (
        {} if existing_collection is None else {_snapshot_key(row): row for row in existing_collection[1].to_pylist()}
    )
    description = _merge_descriptions(
        selected.description, selected.rows, existing_collection[0] if existing_collection else None, dest
    )
    new_rows, new_snapshots = dict(old_rows), {}
    for position, row in enumerate(selected.rows.to_pylist()):
        old_row = old_rows.get(_snapshot_key(row))
        new_rows[_snapshot_key(row)], planned_snapshot = _merge_row(row, old_row, position, name)
        if planned_snapshot is not None:
            new_snapshots[_snapshot_key(row)] = planned_snapshot
    _check_finals(new_rows.values(), name, dest)
    source_rows = selected.source.read_collection(name)[1].select(["member", "path"]).to_pylist()
    most_snapshots_per_member = max(_most_snapshots(source_rows), _most_snapshots(new_rows.values()))
    shards = _plan_shards(
        description, [new_rows[key] for key in sorted(new_rows)], new_snapshots, most_snapshots_per_member
    )
    passes_cache = selected.source.uses_cache or bool(selected.description.base)
    cached_nbytes = sum(
        selected.description.layouts[planned_snapshot.row["layout"]].nbytes
        for planned_snapshot in new_snapshots.values()
        if passes_cache or planned_snapshot.row.get(PARTS_COLUMN)
    )
    return CopyPlan(
        target, description, list(new_rows.values()), existing_collection is not None, shards, cached_nbytes
    )


def _snapshot_key(row: Mapping[str, Any]) -> tuple[int, int]:
    return row["member"], row["epoch"]


def _merge_descriptions(
    new_description: Description, rows: pa.Table, existing_description: Description | None, dest: Path
) -> Description:
    """Merge the descriptions of the new members and of the folder's collection; return the merged description."""
    used_layouts = set(rows.column("layout").to_pylist()) & set(new_description.layouts) or set(new_description.layouts)
    shard_layouts = {
        key: shard_files.shard_layout(layout) for key, layout in new_description.layouts.items() if key in used_layouts
    }
    if existing_description is None:
        return replace(new_description, layouts=shard_layouts, base="")
    differing_fields = [n for n in COMMON_FIELDS if getattr(new_description, n) != getattr(existing_description, n)]
    differing_fields += [
        f"layout {key!r}"
        for key, layout in shard_layouts.items()
        if existing_description.layouts.get(key, layout) != layout
    ]
    if existing_description.base:
        differing_fields.append(f"base (the bytes there lie in {existing_description.base})")
    if differing_fields:
        raise UsageError(
            f"collection {new_description.name} in folder {dest}",
            expected="the description of the members to add",
            found=f"another {', '.join(differing_fields)}",
            do="Give another folder",
            collection=new_description.name,
            path=dest,
        )
    return replace(existing_description, layouts={**existing_description.layouts, **shard_layouts})


def _merge_row(row: Row, old_row: Row | None, position: int, collection: str) -> tuple[Row, PlannedSnapshot | None]:
    """Merge a new row with the folder's row of the same snapshot; return the merged row, and the snapshot to write,
    None if the folder has the snapshot."""
    merged_row = (
        row if old_row is None else {c: old_row.get(c) if v is None and c != "reason" else v for c, v in row.items()}
    )
    if row["path"] is None:
        return merged_row if old_row is None or old_row["final"] == row["final"] else old_row, None
    new_and_old_hash = row["sha256"], None if old_row is None or old_row["path"] is None else old_row["sha256"]
    if new_and_old_hash[0] and new_and_old_hash[1] and new_and_old_hash[0] != new_and_old_hash[1]:
        raise UsageError(
            f"member {format_ids([(row['member'], None if row['final'] else row['epoch'])])} of {collection}",
            expected=f"the weights that the folder has under this id, sha256 {new_and_old_hash[1][:16]}…",
            found=f"{new_and_old_hash[0][:16]}…",
            do="Give another folder",
            collection=collection,
            member=row["member"],
        )
    if old_row is not None and None not in new_and_old_hash and old_row["final"] == row["final"]:
        place_columns = (*row_checks.LOCATION_COLUMNS, PARTS_COLUMN)
        return merged_row | {column: old_row.get(column) for column in place_columns}, None
    return merged_row, PlannedSnapshot(merged_row, position, new_and_old_hash[0] or new_and_old_hash[1])


def _check_finals(rows: Iterable[Row], collection: str, dest: Path) -> None:
    """Check that no member has final snapshots at two different epochs."""
    final_epoch_of_member: dict[int, int] = {}
    for row in rows:
        if row["final"] and final_epoch_of_member.setdefault(row["member"], row["epoch"]) != row["epoch"]:
            raise UsageError(
                f"member {row['member']} of {collection} in folder {dest}",
                expected=f"the final epoch {final_epoch_of_member[row['member']]}",
                found=f"{row['epoch']} in the members to add",
                do="Give another folder",
                collection=collection,
                member=row["member"],
            )


def _most_snapshots(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the largest number of snapshots that a member has; this decides how many members share a shard."""
    snapshot_count_of_member = Counter(row["member"] for row in rows if row["path"] is not None)
    return max(snapshot_count_of_member.values(), default=1)


def _plan_shards(
    description: Description,
    rows: Sequence[Row],
    new_snapshots: Mapping[tuple[int, int], PlannedSnapshot],
    most_snapshots_per_member: int,
) -> list[PlannedShard]:
    """Return the shards to write: every shard with a new member; the shard is written with all its members."""
    shards: dict[tuple[str, int], PlannedShard] = {}
    members_per_shard_of_layout = {
        layout_key: shard_files.members_per_shard(layout, most_snapshots_per_member)
        for layout_key, layout in description.layouts.items()
    }
    for row in rows:
        if row["path"] is None:
            continue
        layout_key, shard_number = row["layout"], row["member"] // members_per_shard_of_layout[row["layout"]]
        shard = shards.setdefault(
            (layout_key, shard_number), PlannedShard(shard_number, layout_key, description.layouts[layout_key])
        )
        shard.snapshots.append(new_snapshots.get(_snapshot_key(row)) or PlannedSnapshot(row, None, row["sha256"]))
    return [shard for _, shard in sorted(shards.items()) if any(p.position is not None for p in shard.snapshots)]


@dataclass
class PlannedSnapshot:
    """A snapshot in a shard to write.

    Args:
        row: the snapshot's row in the new manifest; location and hash are filled in after writing.
        position: position of the snapshot among the rows to copy; None if the folder has the snapshot already.
        sha256: expected content hash of the snapshot; None if unknown.
    """

    row: Row
    position: int | None
    sha256: str | None

    @property
    def key(self) -> SnapshotKey:
        """(member, epoch); the epoch is None for the final snapshot."""
        return self.row["member"], None if self.row["final"] else self.row["epoch"]

    @property
    def prefix(self) -> str:
        return tensor_prefix(*self.key)


@dataclass
class PlannedShard:
    """A shard to write: its number, the key of its layout, and its snapshots in order."""

    number: int
    layout_key: str
    layout: Layout
    snapshots: list[PlannedSnapshot] = field(default_factory=list)

    @property
    def prefixes(self) -> list[str]:
        return [planned_snapshot.prefix for planned_snapshot in self.snapshots]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the shard file."""
        return shard_files.first_offset(self.layout, self.prefixes) + len(self.snapshots) * self.layout.nbytes


def write_planned(folder: Path, shard: PlannedShard, locations: Sequence[Location], collection: str) -> Path:
    """Write a shard unless a finished copy of the shard exists; return the path of the shard file."""
    if similar_files(folder, shard):  # A finished shard may exist: compute missing hashes to find out.
        for planned_snapshot, location in zip(shard.snapshots, locations, strict=True):
            planned_snapshot.sha256 = planned_snapshot.sha256 or content_hash(location.layout, _read_member(location))
        if path := find_finished(folder, shard):
            return path
    members_bytes = _checked_members(shard, locations, collection)
    return shard_files.stream_shard(folder, shard.number, shard.layout, shard.prefixes, members_bytes)


def find_finished(folder: Path, shard: PlannedShard) -> Path | None:
    """Look for the same shard, written by an earlier copy; return the path of the shard file, or None."""
    expected_hashes = [piece.sha256 for piece in shard.snapshots]
    if None in expected_hashes:
        return None
    first_offset, member_nbytes = shard_files.first_offset(shard.layout, shard.prefixes), shard.layout.nbytes
    for path in similar_files(folder, shard):
        numbered_snapshots = enumerate(shard.snapshots)
        locations = [
            Location(
                planned_snapshot.row["member"],
                planned_snapshot.prefix,
                path,
                first_offset + i * member_nbytes,
                shard.layout,
            )
            for i, planned_snapshot in numbered_snapshots
        ]
        if shard_files.hash_members(locations) == expected_hashes:
            return path
    return None


def similar_files(folder: Path, shard: PlannedShard) -> list[Path]:
    """List the files that have the number, header and size of a shard; return their paths."""
    header = shard_header(shard.layout, shard.prefixes)
    shard_nbytes, paths = len(header) + len(shard.snapshots) * shard.layout.nbytes, []
    for path in sorted(folder.glob(f"{shard.number:05d}-*.safetensors")):
        if path.stat().st_size == shard_nbytes:
            with path.open("rb") as file:
                if file.read(len(header)) == header:
                    paths.append(path)
    return paths


def _checked_members(
    shard: PlannedShard, locations: Sequence[Location], collection: str
) -> Iterator[shard_files.Bytes]:
    """Read and check a shard's members one by one; yield their bytes in the shard's layout."""
    for planned_snapshot, location in zip(shard.snapshots, locations, strict=True):
        member_bytes = _read_member(location)
        digest = content_hash(location.layout, member_bytes)
        if planned_snapshot.sha256 not in (None, digest):
            raise DamagedError(
                f"member {format_ids([planned_snapshot.key])} of {collection} in file {location.path}",
                expected=f"sha256 {str(planned_snapshot.sha256)[:16]}…, as its row says",
                found=f"{digest[:16]}…",
                do="The member's shard was not written. Get the member again, or leave it out",
                collection=collection,
                member=location.member,
                path=location.path,
            )
        planned_snapshot.sha256 = digest
        yield (
            member_bytes
            if location.layout == shard.layout
            else shard_files.repack(location.layout, member_bytes, shard.layout)
        )


def _read_member(location: Location) -> memoryview:
    return next(iter(shard_files.read_members([location])))[1]


def record_locations(shard: PlannedShard, source_path: str) -> None:
    """Set the new locations and hashes in the rows of a shard's members."""
    first_offset, member_nbytes = shard_files.first_offset(shard.layout, shard.prefixes), shard.layout.nbytes
    for i, planned_snapshot in enumerate(shard.snapshots):
        location = (source_path, first_offset + i * member_nbytes, member_nbytes, shard.layout_key, shard.layout.dtype)
        planned_snapshot.row.update(zip(row_checks.LOCATION_COLUMNS, location, strict=True))
        planned_snapshot.row |= {"sha256": planned_snapshot.sha256, PARTS_COLUMN: None}
