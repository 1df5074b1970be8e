"""Write members of an origin into new shards: each member is read once, and only one is in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.formats import catalog, disk, manifest, row_checks, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location, tensor_prefix
from checkpoints_zoo.interop.ingest import measuring, torch_files
from checkpoints_zoo.interop.ingest.measuring import Row
from checkpoints_zoo.interop.ingest.networks import Build, NetSpec, tensor_shapes
from checkpoints_zoo.interop.ingest.origin import Origin, Say
from checkpoints_zoo.interop.ingest.torch_files import StateDictPlace
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.folder_source import FolderSource


@dataclass(frozen=True)
class MemberReader:
    """Reads members of an origin.

    Args:
        origin: files that hold the members.
        description: description of the collection that the members go into.
        find_file: function that returns the file on this disk for the path in a row.
        state_dict_place: place of the state dict in files of torch.save; None for other files.
    """

    origin: Origin
    description: Description
    find_file: Callable[[str], Path]
    state_dict_place: StateDictPlace | None = None

    def read(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Layout, shard_files.Bytes]]:
        """Read and check members one by one; yield the row, the layout and the bytes of each.

        Raises:
            DamagedError: a member's bytes differ from its header.
            NetworkError, AccessError, StorageError: the repo can't be read, or the cache can't be written.
        """
        for batch in measuring.batch_rows(rows):
            remote_rows = [r for r in batch if self.origin.repo is not None and "!" not in r["path"]]
            if remote_rows and self.origin.repo is not None:
                with measuring.borrow_members(self.origin.repo, self.description, remote_rows) as locations:
                    yield from self._read_batch(batch, {x.member: x for x in locations})
            else:
                yield from self._read_batch(batch, {})

    def _read_batch(
        self, rows: Sequence[Row], borrowed_locations: Mapping[int, Location]
    ) -> Iterator[tuple[Row, Layout, shard_files.Bytes]]:
        for row in rows:
            layout = self.description.layouts[row["layout"]]
            path = self.find_file(row["path"])
            local_location = Location(row["member"], tensor_prefix(row["member"]), path, row["offset"], layout)
            location = borrowed_locations.get(row["member"], local_location)
            if self.state_dict_place is None:
                yield row, layout, measuring.read_and_check(row, location)
                continue
            raw = torch_files.read_member_bytes(path, self.state_dict_place, layout)
            measuring.check_member(row, location, raw)
            if row["status"] == "ok" and (problem := torch_files.checksum_problem(path)):
                row |= {"status": "failed", "reason": problem}
            yield row, layout, raw


def reshard(reader: MemberReader, rows: Sequence[Row], target: FolderSource, say: Say) -> None:
    """Write members into a folder as a new source, the manifest after each shard; existing shards stay.

    Args:
        reader: reader of the members' tensors.
        rows: manifest rows with byte locations in the origin; failed members have no location.
        target: the folder.
        say: function called with lines of text on the progress.

    Raises:
        DamagedError, NetworkError, AccessError, StorageError: the members can't be read, or the disk is full.
    """
    old_description, name = reader.description, reader.description.name
    keys, layouts = dict[str, str](), dict[str, Layout]()
    for key, layout in old_description.layouts.items():
        sharded_layout = shard_files.shard_layout(layout)
        keys[key] = archives.layout_key(old_description.architecture, sharded_layout)
        layouts[keys[key]] = sharded_layout
    description = replace(old_description, layouts=layouts, base="")
    finished_rows = _rows_in_existing_files(target, name)
    if finished_rows:
        measuring.drop_stale_figures(finished_rows.values(), target.read_collection(name)[0], description)
    for row in rows:
        if row["path"] is None:
            finished_rows[row["member"]] = row
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["member"]):
        if row["path"] is not None:
            key = keys[row["layout"]]
            groups.setdefault((key, row["member"] // shard_files.members_per_shard(layouts[key])), []).append(row)
    missing = {
        at: group for at, group in sorted(groups.items()) if not all(r["member"] in finished_rows for r in group)
    }
    disk.check_room(target.root, sum(layouts[key].nbytes * len(group) for (key, _), group in missing.items()))
    catalog.write_json(description.to_json(), target.description_path(name))
    if not missing:
        return _write_manifest(list(finished_rows.values()), description, target)
    report, total = measuring.progress_reporter(say, name, sum(map(len, missing.values()))), 0
    for (key, number), group in missing.items():
        for row in _write_shard(reader, group, number, key, layouts[key], target):
            finished_rows[row["member"]] = _fill_from_earlier_row(row, finished_rows.get(row["member"]))
        _write_manifest(list(finished_rows.values()), description, target)
        _remove_old_shards(target, name, number, finished_rows.values())
        for row in group:
            if "!" in row["path"]:
                reader.find_file(row["path"]).unlink(missing_ok=True)  # the shard has the member's bytes now
        total += len(group)
        report(total)
    shutil.rmtree(import_folder(target.root, name), ignore_errors=True)


def _fill_from_earlier_row(row: Row, earlier_row: Row | None) -> Row:
    """Fill the missing values of a row, such as figures, from an earlier row of the same weights; return the row."""
    if earlier_row is None or earlier_row["sha256"] != row["sha256"]:
        return row
    return row | {name: value for name, value in earlier_row.items() if row.get(name) is None}


def _remove_old_shards(target: FolderSource, collection: str, shard_number: int, rows: Iterable[Row]) -> None:
    """Delete shards of a number that no row names: a shard that gets more members is written anew."""
    named_paths = {row["path"] for row in rows}
    for path in (target.root / "shards" / collection).glob(f"{shard_number:05d}-*.safetensors"):
        if path.relative_to(target.root).as_posix() not in named_paths:
            path.unlink()


def _rows_in_existing_files(target: FolderSource, collection: str) -> dict[int, Row]:
    """Return member -> row of the members that were written before and whose files exist."""
    if not target.manifest_path(collection).is_file():
        return {}
    rows = target.read_collection(collection)[1].to_pylist()
    existing_paths = {p for p in {r["path"] for r in rows} if p is not None and (target.root / p).is_file()}
    return {r["member"]: r for r in rows if r["path"] in existing_paths}


def _write_shard(
    reader: MemberReader, rows: Sequence[Row], shard_number: int, layout_key: str, layout: Layout, target: FolderSource
) -> list[Row]:
    """Write a shard; return its members' rows with the new locations."""
    written_rows: list[Row] = []

    def read_members() -> Iterator[shard_files.Bytes]:
        for row, stored, raw in reader.read(rows):
            written_rows.append(row)
            yield shard_files.repack(stored, raw, layout)

    name = reader.description.name
    tensor_prefixes = [tensor_prefix(row["member"]) for row in rows]
    path = shard_files.stream_shard(
        target.root / "shards" / name, shard_number, layout, tensor_prefixes, read_members()
    )
    relative_path, first_offset = (
        path.relative_to(target.root).as_posix(),
        shard_files.first_offset(layout, tensor_prefixes),
    )
    return [
        row | {"path": relative_path, "offset": first_offset + i * layout.nbytes, "nbytes": layout.nbytes,
               "layout": layout_key, "dtype": layout.dtype}
        for i, row in enumerate(written_rows)
    ]  # fmt: skip


def _write_manifest(rows: list[Row], description: Description, target: FolderSource) -> None:
    measuring.mark_duplicates(rows)
    table = manifest.build_manifest(rows)
    path = target.manifest_path(description.name)
    row_checks.check_rows(table, description, path)
    manifest.write_manifest(table, path)


def import_folder(out: Path, collection: str) -> Path:
    """Return the folder for staged members of a running import."""
    return out / ".import" / collection


def remove_temporary_files(root: Path, collection: str) -> None:
    """Delete temporary files of a collection that a killed import left."""
    temporary_pattern = f".{collection}.*.tmp"
    for folder, pattern in (
        (f"shards/{collection}", ".*.tmp"),
        ("manifests", temporary_pattern),
        ("files", temporary_pattern),
        (".import", ".*.tmp"),
    ):
        for path in (root / folder).glob(pattern):
            path.unlink()


def check_same_import(target: FolderSource, collection: str, import_record: ImportRecord) -> None:
    """Check that a folder has no collection of this name, except from this import; delete files that other imports
    staged.

    If files were added since an earlier import, the import counts as the same: it adds members.

    Raises:
        UsageError: the folder has another collection of this name.
    """
    path = _record_path(target, collection)
    try:
        earlier_record = catalog.read_json(path) if path.is_file() else None
    except FormatError:
        earlier_record = None
    if isinstance(earlier_record, dict) and (
        earlier_record.get("import") == import_record.fingerprint or import_record.extends(earlier_record)
    ):
        return
    if target.manifest_path(collection).is_file():
        raise UsageError(
            f"collection {collection} in folder {target.root}",
            expected="none, or one that an import of these same files has begun",
            found="one that was not imported"
            if earlier_record is None
            else "one of other files, of files that changed, or of another net",
            do=f"Give another folder or name, or delete manifests/{collection}.parquet there",
            collection=collection,
            path=target.root,
        )
    shutil.rmtree(import_folder(target.root, collection), ignore_errors=True)


def record_import(target: FolderSource, collection: str, import_record: ImportRecord) -> None:
    """Record in a folder which import writes a collection."""
    catalog.write_json(import_record.to_json(), _record_path(target, collection))


def _record_path(target: FolderSource, collection: str) -> Path:
    return import_folder(target.root, collection).with_name(f"{collection}.json")


@dataclass(frozen=True)
class ImportRecord:
    """Identity of an import: the hash of its files and net, the hash of the net alone, and the stamp of each file.

    Args:
        fingerprint: hash of the files (with sizes and times, or the commit) and the net, 64 hex digits.
        net: hash of the net, 64 hex digits.
        files: path -> size and time of files on this machine that have one member each; {} for others, such as
            archives.
    """

    fingerprint: str
    net: str
    files: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, origin: Origin, net: NetSpec, build: Build | None = None) -> ImportRecord:
        """Return the record of an import."""
        repo = str(origin.repo) if origin.repo else ""
        stamps = {p: [] if origin.repo else _file_stamp(origin.root / p) for p in origin.paths}
        spec = [net.to_json(), *([] if build is None else [tensor_shapes(net, build)])]
        fingerprint = _json_hash([repo, [[path, *stamp] for path, stamp in stamps.items()], *spec])
        return cls(fingerprint, _json_hash(spec), {} if origin.repo or origin.archives else stamps)

    def extends(self, earlier_record: Mapping[str, Any]) -> bool:
        """Say whether an import of the same net has all files of an earlier import, unchanged."""
        files = earlier_record.get("files")
        if not isinstance(files, dict) or not files or earlier_record.get("net") != self.net:
            return False
        return all(list(self.files.get(path, ())) == stamp for path, stamp in files.items())

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"import": self.fingerprint, "net": self.net, "files": {p: list(s) for p, s in self.files.items()}}


def _json_hash(json_values: Any) -> str:
    return hashlib.sha256(json.dumps(json_values, sort_keys=True).encode()).hexdigest()


def _file_stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
