"""Members of gzipped archives, which can only be read from front to back: streamed once and laid aside until written.

OUT/.import/NAME/KEY/000007.safetensors     a member's file, by its position: no name in an archive becomes a file's
OUT/.import/NAME/KEY/index.json             what the archive holds, once it was read to its end
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, UsageError
from checkpoints_zoo.formats import catalog, disk, manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout, content_hash, finite_problems
from checkpoints_zoo.formats.shard_files import REPEATING, Location, prefix
from checkpoints_zoo.formats.text import few
from checkpoints_zoo.interop.ingest import pickles
from checkpoints_zoo.interop.ingest.networks import Build, Net, shapes_of
from checkpoints_zoo.interop.ingest.origin import Origin, Say, numbers_of
from checkpoints_zoo.interop.ingest.pickles import Within
from checkpoints_zoo.sources import archives, cache, fetching, hub
from checkpoints_zoo.sources.archives import Entry, Head, Index, Lot, Lying, Tell, indexing
from checkpoints_zoo.sources.archives.contents import Contents
from checkpoints_zoo.sources.archives.tar import BLOCK, TarHeader
from checkpoints_zoo.sources.ranges import Remote
from checkpoints_zoo.sources.source import FolderSource

if TYPE_CHECKING:
    from torch import nn

    from checkpoints_zoo.images import ImageData


# Hashes and accuracies of members whose manifest lacks them. Each member is read once, in batches.


BATCH_MEMBERS, BATCH_BYTES = 256, 2**28
FIGURES = ("test_accuracy", "test_nll", "test_brier", "test_ece", "eval_data")
STEPS = 20  # of the progress that is told


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows in batches of some members and bytes, one at least."""
    batch: list[Row] = []
    for row in rows:
        full = len(batch) == BATCH_MEMBERS or (len(batch) + 1) * row["nbytes"] > BATCH_BYTES
        if batch and full:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@contextmanager
def borrowed(repo: hub.Repo, description: Description, rows: Sequence[Row]) -> Iterator[list[Location]]:
    """Bring members from a repo for a while: those that were not in the member cache before leave it afterwards.

    Args:
        repo, description: where they lie.
        rows: of the members, in the order of their ids.
    """
    before = cache.files(repo.id)
    locations = fetching.bring(repo, description, manifest.table(rows), whole=False)
    try:
        yield locations
    finally:
        for path in {x.path for x in locations} & (cache.files(repo.id) - before):
            path.unlink(missing_ok=True)


@contextmanager
def _here(source: FolderSource, description: Description, rows: Sequence[Row]) -> Iterator[list[Location]]:
    """Find the members of a source, or borrow them from the one that they lie in."""
    if description.base:
        with borrowed(hub.resolve(description.base), description, rows) as locations:
            yield locations
    else:
        yield source.locate(description, manifest.table(rows))


def told(say: Say, what: str, total: int) -> Callable[[int], None]:
    """Return what tells how many are done, some twenty times in all."""
    last = 0

    def tell(done: int) -> None:
        nonlocal last
        if done == total or STEPS * done // total > last:
            last = STEPS * done // total
            say(f"{what}: {done:,} of {total:,}")

    return tell


def look(row: Row, location: Location) -> memoryview:
    """Read a member, and write its hash into its row; mark it as failed where a value is not finite. Return its bytes.

    Raises:
        DamagedError: its file has not the tensors that the row says, or others than before.
    """
    shard_files.check_against_files([location])
    _, raw = next(iter(shard_files.read([location])))
    judge(row, location, raw)
    return raw


def judge(row: Row, location: Location, raw: bytes | bytearray | memoryview) -> None:
    """Write a member's hash into its row, and mark it as failed where a value is not finite.

    Raises:
        DamagedError: the row has another hash.
    """
    digest = content_hash(location.layout, raw)
    if row["sha256"] not in (None, digest):
        raise DamagedError(
            f"member {row['member']} in file {location.path}",
            expected=f"sha256 {row['sha256'][:16]}…, as its row says",
            found=f"{digest[:16]}…",
            do="The file has changed: import it under another name",
            member=row["member"],
            path=location.path,
        )
    row["sha256"] = digest
    if row["status"] == "ok" and (bad := finite_problems(location.layout, raw)):
        row |= {"status": "failed", "reason": f"values that are not finite in {few(bad, 3)}"}


def mark_duplicates(rows: Sequence[Row]) -> None:
    """Mark members that have the weights of one before as excluded, by their hashes."""
    first: dict[str, int] = {}
    for row in sorted(rows, key=lambda r: (r["member"], r["epoch"])):
        if row["status"] != "ok" or row["sha256"] is None or row["method"] in REPEATING:
            continue
        other = first.setdefault(row["sha256"], row["member"])
        if other != row["member"]:
            row |= {"status": "excluded", "reason": f"the weights of member {other}"}
            row |= dict.fromkeys(FIGURES)


def fill(
    source: FolderSource,
    name: str,
    inside: ImageData | None,
    build: Callable[[], nn.Module] | None,
    device: str,
    say: Say,
) -> None:
    """Read the members whose rows lack a hash, or figures on images if some are given, and write these down.

    Args:
        source: a folder with the collection's manifest.
        name: of the collection.
        inside: test images; None for hashes alone.
        build: of a net that the package lacks.
        device: what the members run on.
        say: told of the progress.

    Raises:
        UsageError: images that are not for these members.
        DamagedError, NetworkError, AccessError, StorageError: the members can't be read.
    """
    description, table = source.read(name)
    rows = table.to_pylist()
    wanted = None if inside is None else f"{inside.name}/{inside.split}"
    todo = [row for row in rows if row["path"] is not None and _lacks(row, wanted)]
    if todo:
        say(f"{name}: reading {len(todo):,} of {len(rows):,} members …")
    tell, done = told(say, name, len(todo)), 0
    for batch in batches(sorted(todo, key=lambda r: (r["path"], r["offset"]))):
        batch.sort(key=lambda r: (r["member"], r["epoch"]))
        with _here(source, description, batch) as locations:
            for row, location in zip(batch, locations, strict=True):
                look(row, location)
            if inside is not None:
                _measure(source, description, [r for r in batch if r["status"] == "ok"], inside, build, device)
        done += len(batch)
        manifest.write(manifest.table(rows), source.manifest_path(name))
        tell(done)
    mark_duplicates(rows)
    marked = manifest.table(rows)
    if not marked.equals(table):
        manifest.write(marked, source.manifest_path(name))


def _lacks(row: Mapping[str, Any], wanted: str | None) -> bool:
    """Say whether a row's member is to be read: it has no hash, or is to be measured on other images."""
    return row["sha256"] is None or (wanted is not None and row["status"] == "ok" and row["eval_data"] != wanted)


def _measure(
    source: FolderSource,
    description: Description,
    rows: Sequence[Row],
    inside: ImageData,
    build: Callable[[], nn.Module] | None,
    device: str,
) -> None:
    """Measure members and write the figures into their rows; mark those as failed whose logits are not finite."""
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.evaluation import measuring

    if not rows:
        return
    members = Collection(source, "", description, manifest.table(rows), build)
    try:
        found = measuring.manifest_columns(members, inside, device)
    except DamagedError as error:
        if len(rows) == 1:
            rows[0].update({"status": "failed", "reason": str(error)})
            return
        for row in rows:
            _measure(source, description, [row], inside, build, device)
        return
    for row in rows:
        row |= found[row["member"]]


# Members of any origin written into shards of our own: each is read once, one at a time in memory.


Row = dict[str, Any]


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
        for batch in batches(rows):
            far = [r for r in batch if self.origin.repo is not None and "!" not in r["path"]]
            if far and self.origin.repo is not None:
                with borrowed(self.origin.repo, self.description, far) as locations:
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
                yield row, layout, look(row, location)
                continue
            raw = pickles.raw(path, self.within, layout)
            judge(row, location, raw)
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
    tell, total = told(say, name, sum(map(len, missing.values()))), 0
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
    mark_duplicates(rows)
    table = manifest.table(rows)
    path = target.manifest_path(description.name)
    manifest.validate(table, description, path)
    manifest.write(table, path)


# The members of an origin with their places and headers: what their rows are made of.


SHOWN = 5  # files that an error names
AT_ONCE = 3  # archives of a repo; each is read over several connections
_OF_SHARD = re.compile(r"[0-9]{6,}(@[0-9]+)?/")
Take = Callable[[int, int], bytes]


def of_archives(origin: Origin, staged: Mapping[str, archives.Index], predicted: bool) -> list[Lot]:
    """Index archives; return a lot each.

    Args:
        origin: whose archives they are.
        staged: of the gzipped ones, what they were found to hold; their members' paths are "ARCHIVE!POSITION".
        predicted: whether an index of a repo's archive may be predicted from some of its headers.

    Raises:
        DamagedError: an archive that is none, or is cut.
        NetworkError, AccessError: a repo that can't be read.
    """
    tars = [p for p in origin.archives if p not in origin.gzips]
    if origin.repo is None:
        opened = indexing.open_local(origin.root, tars)
    else:
        if not predicted:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="zoo-walk") as pool:
                list(pool.map(partial(indexing.walk_remote, origin.repo), tars))
        opened = indexing.open_remote(origin.repo, tars) if tars else []
    indexes = {one.inside: one.index for one in opened}
    lots = []
    for inside in origin.archives:
        if inside in indexes:
            lots.append(archives.lot_of(inside, indexes[inside]))
        elif inside in staged:
            lots.append(_of_staged(inside, staged[inside]))
    return lots


def _of_staged(inside: str, index: archives.Index) -> Lot:
    heads, last = index.heads, {e.name: i for i, e in enumerate(index.entries)}  # of one name the last counts
    kept = [(i, e) for i, e in enumerate(index.entries) if last[e.name] == i]
    return Lot([Lying(e.name, f"{inside}!{i}", heads[e.head].lead, heads[e.head]) for i, e in kept])


def unverified(origin: Origin) -> int:
    """Count the headers of a repo's archives that were only predicted so far, once these are indexed."""
    if origin.repo is None:
        return 0
    opened = indexing.open_remote(origin.repo, [p for p in origin.archives if p not in origin.gzips] or [])
    indexes = [one.index for one in opened]
    return sum(len(index.entries) for index in indexes if not all(e.verified for e in index.entries))


def of_files(origin: Origin, say: Say) -> Lot:
    """Read the headers of safetensors files; return their members.

    Raises:
        UsageError: a file is a shard of ours, and no member.
        NetworkError, AccessError: a repo that can't be read.
    """
    contents, members = Contents(origin.label), list[Lying]()
    if origin.repo is None:
        pieces = [_local(origin.root / p) for p in origin.files]
    else:
        with ThreadPoolExecutor(fetching.PARALLEL, thread_name_prefix="zoo-heads") as pool:
            pieces = list(pool.map(partial(_remote, origin.repo), origin.files))
    for inside, (size, take) in zip(origin.files, pieces, strict=True):
        entry = contents.add(TarHeader(inside, 0, 0, size, ""), take)
        if entry:
            head = contents.heads[entry.head]
            if all(_OF_SHARD.match(name) for name, _, _ in head.tensors):
                raise UsageError(
                    f"file {inside} of {origin.label}",
                    expected="one member a file",
                    found="a shard with several members of a collection",
                    do="`zoo-cli download NAME --source DIR --dest OUT` copies a collection that has a manifest",
                    path=inside,
                )
            members.append(Lying(inside, inside, head.lead, head))
    for other in contents.others:
        if not other.member:
            say(f"{other.name} is left out: {other.why}")
    return Lot(members, [(other.name, other.why) for other in contents.others if other.member])


def numbered(lot: Lot, paths: Sequence[str]) -> Lot:
    """Number the members of a folder by their files' names; return the lot with the numbers.

    Args:
        lot: of the folder's files, one member each.
        paths: of these, in order.
    """
    names = [*(m.name for m in lot.members), *(name for name, _ in lot.broken)]
    known = set(names)
    there = [path for path in paths if path in known]
    ids = dict(zip(there, numbers_of(there), strict=True))
    return replace(lot, numbers=[ids[name] for name in names])


def members_of(lots: Sequence[Lot]) -> dict[str, int]:
    """Return path -> member of the files that are one's own, in the order of the members."""
    named = (zip((*(m.name for m in lot.members), *(n for n, _ in lot.broken)), lot.numbers, strict=True)
             for lot in lots if lot.numbers)  # fmt: skip
    return dict(sorted((pair for pairs in named for pair in pairs), key=lambda pair: pair[1]))


def check_all(label: str, lots: Sequence[Lot], tell: Tell) -> None:
    """Check that every file is a member of the net.

    Raises:
        DamagedError, LayoutError: naming the files that are not, and why.
    """
    phrases: dict[int, str] = {}
    wrong = [broken for lot in lots for broken in lot.broken]
    misfits = []
    for member in (m for lot in lots for m in lot.members):
        if id(member.head) not in phrases:
            try:
                tell(member.head)
                phrases[id(member.head)] = ""
            except LayoutError as error:
                phrases[id(member.head)] = error.found or str(error)
        if phrase := phrases[id(member.head)]:
            misfits.append((member.name, phrase))
    if not wrong and not misfits:
        return
    count = sum(len(lot.members) + len(lot.broken) for lot in lots)
    # What is wrong with a damaged file names it already.
    shown = [*(why.rstrip(".") for _, why in wrong), *(f"{name}: {why}" for name, why in misfits)][:SHOWN]
    more = len(wrong) + len(misfits) - len(shown)
    raise (DamagedError if wrong else LayoutError)(
        f"checkpoints of {label}",
        expected=f"{count:,} of the architecture, by name and shape of their tensors",
        found=f"{len(wrong) + len(misfits):,} that are not. {'. '.join(shown)}{f'. And {more:,} more' if more else ''}",
        do="Nothing was written. Move them away, or give the architecture that they were trained with",
        path=[*wrong, *misfits][0][0],
    )


def _local(path: Path) -> tuple[int, Take]:
    def take(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return path.stat().st_size, take


def _remote(repo: hub.Repo, inside: str) -> tuple[int, Take]:
    """Read the first bytes of a repo's file, enough for most headers; return its size and what reads on from there."""
    remote = fetching.remote(repo, inside)
    first = remote.bytes_at(0, min(remote.size, archives.walking.FIRST))

    def take(offset: int, length: int) -> bytes:
        return first[offset : offset + length] if offset + length <= len(first) else remote.bytes_at(offset, length)

    return remote.size, take


def fingerprint(origin: Origin, net: Net, build: Build | None = None) -> str:
    """Hash what is imported: files with sizes and times, or a commit, and as what net; return 64 hex digits."""
    where = str(origin.repo) if origin.repo else ""
    files = [[p, *([] if origin.repo else _stamp(origin.root / p))] for p in origin.paths]
    shapes = [] if build is None else [shapes_of(net, build)]
    return hashlib.sha256(json.dumps([where, files, asdict(net), *shapes], sort_keys=True).encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


PIECE = 2**23  # bytes of one range


def key_of(origin: Origin, inside: str) -> str:
    """Name the folder that an archive's members are laid aside in: another one once the archive has changed."""
    if origin.repo is None:
        stat = (origin.root / inside).stat()
        stamp = f"{inside} {stat.st_size} {stat.st_mtime_ns}"
    else:
        stamp = f"{origin.repo} {inside}"
    return hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def staged(origin: Origin, aside: Path, say: Say) -> dict[str, Index]:
    """Stream the gzipped archives of an origin that were not streamed before; return their indexes by path.

    Args:
        origin: whose archives they are.
        aside: folder for their members.
        say: told of each archive.

    Raises:
        DamagedError: an archive that is cut, or has a damaged member.
        NetworkError, AccessError: a repo that can't be read.
    """
    return {p: _staged(origin, p, aside / key_of(origin, p), say) for p in origin.archives if p in origin.gzips}


def _staged(origin: Origin, inside: str, folder: Path, say: Say) -> Index:
    known = folder / "index.json"
    if known.is_file():
        try:
            return Index.from_json(catalog.read_json(known))
        except FormatError:
            pass  # of another version: streamed again
    say(f"{inside}: a gzipped archive, read once from front to back …")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    heads: dict[tuple[Any, ...], int] = {}
    kinds, entries, at = list[Head](), list[Entry](), 0
    with _opened(origin, inside) as file:
        for position, (name, header, raw) in enumerate(archives.stream(file, inside)):
            tensors = tuple((n, dtype, shape) for n, (dtype, shape, _, _) in header.tensors.items())
            key = (header.data_start, tensors)
            if key not in heads:
                heads[key] = len(kinds)
                kinds.append(Head(header.data_start, tensors))
            # The index is that of the members one behind the other: their places in the archive say nothing.
            entries.append(Entry(name, at, at + BLOCK, heads[key], True))
            at += BLOCK + len(raw)
            (folder / f"{position:06d}.safetensors").write_bytes(raw)
    index = Index(inside, at, "tar", tuple(kinds), tuple(entries))
    catalog.write_json(index.to_json(), known)
    return index


def _opened(origin: Origin, inside: str) -> IO[bytes]:
    if origin.repo is None:
        return (origin.root / inside).open("rb")
    if path := hub.cached(origin.repo, inside):
        return path.open("rb")
    return BufferedReader(_Ranges(fetching.remote(origin.repo, inside)), PIECE)


class _Ranges(RawIOBase):
    """A file of a repo, read on and on by ranges: nothing of it is kept."""

    def __init__(self, remote: Remote) -> None:
        self.remote, self.at = remote, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.remote.bytes_at(self.at, min(len(buffer), self.remote.size - self.at))
        buffer[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)


def places(origin: Origin, aside: Path) -> Callable[[str], Path]:
    """Return what finds the file of a path in an origin's rows, on this disk."""
    keys = {p: key_of(origin, p) for p in origin.gzips}

    def place(inside: str) -> Path:
        name, mark, position = inside.rpartition("!")
        if mark and name in keys:
            return aside / keys[name] / f"{int(position):06d}.safetensors"
        return origin.root / inside

    return place
