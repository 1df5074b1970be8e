"""Members of any origin, written into shards of our own: each is read once, one at a time in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.formats import catalog, disk, manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location, prefix
from checkpoints_zoo.interop.ingest import measuring, pickles
from checkpoints_zoo.interop.ingest.measuring import Row
from checkpoints_zoo.interop.ingest.networks import Build, Net, shapes_of
from checkpoints_zoo.interop.ingest.origin import Origin, Say
from checkpoints_zoo.interop.ingest.pickles import Within
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.source import FolderSource


@dataclass(frozen=True)
class Reader:
    """Reads members of an origin.

    Args:
        origin, description: what they are.
        place: finds the file of a row's path on this disk.
        within: where in files of torch.save the state dicts lie, None for other files.
    """

    origin: Origin
    description: Description
    place: Callable[[str], Path]
    within: Within | None = None

    def read(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Layout, shard_files.Bytes]]:
        """Read members one by one and judge them; yield each with its row, the layout of its bytes, and these.

        Raises:
            DamagedError: bytes that are not what the headers said.
            NetworkError, AccessError, StorageError: a repo that can't be read, or members that can't be kept.
        """
        for batch in measuring.batches(rows):
            far = [r for r in batch if self.origin.repo is not None and "!" not in r["path"]]
            if far and self.origin.repo is not None:
                with measuring.borrowed(self.origin.repo, self.description, far) as locations:
                    yield from self._each(batch, {x.member: x for x in locations})
            else:
                yield from self._each(batch, {})

    def _each(
        self, rows: Sequence[Row], there: Mapping[int, Location]
    ) -> Iterator[tuple[Row, Layout, shard_files.Bytes]]:
        for row in rows:
            layout = self.description.layouts[row["layout"]]
            path = self.place(row["path"])
            here = Location(row["member"], prefix(row["member"]), path, row["offset"], layout)
            location = there.get(row["member"], here)
            if self.within is None:
                yield row, layout, measuring.look(row, location)
                continue
            raw = pickles.raw(path, self.within, layout)
            measuring.judge(row, location, raw)
            if row["status"] == "ok" and (problem := pickles.checksum_problem(path)):
                row |= {"status": "failed", "reason": problem}
            yield row, layout, raw


def reshard(reader: Reader, rows: Sequence[Row], target: FolderSource, say: Say) -> None:
    """Write members into a folder as a source of its own, whole shards first; what is there already stays.

    Args:
        reader: of the members.
        rows: with their places in the origin, or without any.
        target: the folder.
        say: told of each shard.

    Raises:
        DamagedError, NetworkError, AccessError, StorageError: the members can't be read, or there is no room.
    """
    old, name = reader.description, reader.description.name
    keys, layouts = dict[str, str](), dict[str, Layout]()
    for key, layout in old.layouts.items():
        wanted = shard_files.sharded(layout)
        keys[key] = archives.layout_key(old.architecture, wanted)
        layouts[keys[key]] = wanted
    description = replace(old, layouts=layouts, base="")
    done = _done(target, name)
    for row in rows:
        if row["path"] is None:
            done[row["member"]] = row
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["member"]):
        if row["path"] is not None:
            key = keys[row["layout"]]
            groups.setdefault((key, row["member"] // shard_files.members_per_shard(layouts[key])), []).append(row)
    missing = {at: some for at, some in sorted(groups.items()) if not all(r["member"] in done for r in some)}
    disk.check_room(target.root, sum(layouts[key].nbytes * len(some) for (key, _), some in missing.items()))
    catalog.write_json(description.to_json(), target.description_path(name))
    if not missing:
        return _write(list(done.values()), description, target)
    tell, total = measuring.told(say, name, sum(map(len, missing.values()))), 0
    for (key, number), some in missing.items():
        for row in _shard(reader, some, number, key, layouts[key], target):
            done[row["member"]] = row
        _write(list(done.values()), description, target)
        for row in some:
            if "!" in row["path"]:
                reader.place(row["path"]).unlink(missing_ok=True)  # it was laid aside, and lies in the shard now
        total += len(some)
        tell(total)
    shutil.rmtree(aside(target.root, name), ignore_errors=True)


def _done(target: FolderSource, name: str) -> dict[int, Row]:
    """Return member -> row of what was written before, and is still there."""
    if not target.manifest_path(name).is_file():
        return {}
    rows = target.read(name)[1].to_pylist()
    there = {p for p in {r["path"] for r in rows} if p is not None and (target.root / p).is_file()}
    return {r["member"]: r for r in rows if r["path"] in there}


def _shard(
    reader: Reader, rows: Sequence[Row], number: int, key: str, layout: Layout, target: FolderSource
) -> list[Row]:
    """Write a shard; return its members' rows as they are now."""
    found: list[Row] = []

    def members() -> Iterator[shard_files.Bytes]:
        for row, stored, raw in reader.read(rows):
            found.append(row)
            yield shard_files.repack(stored, raw, layout)

    name = reader.description.name
    prefixes = [prefix(row["member"]) for row in rows]
    path = shard_files.stream_shard(target.root / "shards" / name, number, layout, prefixes, members())
    inside, start = path.relative_to(target.root).as_posix(), shard_files.first_offset(layout, prefixes)
    return [
        row | {"path": inside, "offset": start + i * layout.nbytes, "nbytes": layout.nbytes, "layout": key,
               "dtype": layout.dtype}
        for i, row in enumerate(found)
    ]  # fmt: skip


def _write(rows: list[Row], description: Description, target: FolderSource) -> None:
    measuring.mark_duplicates(rows)
    table = manifest.table(rows)
    path = target.manifest_path(description.name)
    manifest.validate(table, description, path)
    manifest.write(table, path)


def aside(out: Path, name: str) -> Path:
    """Return the folder for what an import lays aside while it runs."""
    return out / ".import" / name


def sweep(root: Path, name: str) -> None:
    """Delete what a kill left of files of a collection that were being written."""
    own = f".{name}.*.tmp"
    for folder, pattern in ((f"shards/{name}", ".*.tmp"), ("manifests", own), ("files", own), (".import", ".*.tmp")):
        for path in (root / folder).glob(pattern):
            path.unlink()


def check_begun(target: FolderSource, name: str, fingerprint: str) -> None:
    """Check that a folder has no collection of this name, or one that this import began; clear what another laid aside.

    Raises:
        UsageError: it has another one.
    """
    record = _record(target, name)
    try:
        begun = catalog.read_json(record) if record.is_file() else None
    except FormatError:
        begun = None
    if begun == {"import": fingerprint}:
        return
    if target.manifest_path(name).is_file():
        raise UsageError(
            f"collection {name} in folder {target.root}",
            expected="none, or one that an import of these same files has begun",
            found="one that was not imported" if begun is None else "one of other files, or of another net",
            do=f"Give another folder or name, or delete manifests/{name}.parquet there",
            collection=name,
            path=target.root,
        )
    shutil.rmtree(aside(target.root, name), ignore_errors=True)


def begin(target: FolderSource, name: str, fingerprint: str) -> None:
    """Write down which import it is that a folder gets a collection from."""
    catalog.write_json({"import": fingerprint}, _record(target, name))


def _record(target: FolderSource, name: str) -> Path:
    return aside(target.root, name).with_name(f"{name}.json")


def fingerprint(origin: Origin, net: Net, build: Build | None = None) -> str:
    """Hash what is imported: files with sizes and times, or a commit, and as what net; return 64 hex digits."""
    where = str(origin.repo) if origin.repo else ""
    files = [[p, *([] if origin.repo else _stamp(origin.root / p))] for p in origin.paths]
    shapes = [] if build is None else [shapes_of(net, build)]
    return hashlib.sha256(json.dumps([where, files, asdict(net), *shapes], sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]
