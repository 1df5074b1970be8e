"""Hashes and accuracies of members whose manifest lacks them: each member is read once, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import content_hash, finite_problems
from checkpoints_zoo.formats.shard_files import REPEATING, Location
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.sources import cache, fetching, hub
from checkpoints_zoo.sources.source import FolderSource

if TYPE_CHECKING:
    from torch import nn

    from checkpoints_zoo.images import ImageData


BATCH_MEMBERS, BATCH_BYTES = 256, 2**28
FIGURES = ("test_accuracy", "test_nll", "test_brier", "test_ece", "eval_data")
PROGRESS_STEPS = 20  # of the progress that is told
Row = dict[str, Any]


def fill_columns(
    source: FolderSource,
    name: str,
    test_images: ImageData | None,
    build: Callable[[], nn.Module] | None,
    device: str,
    say: Say,
) -> None:
    """Read the members whose rows lack a hash, or figures on images if some are given, and write these down.

    Args:
        source: a folder with the collection's manifest.
        name: of the collection.
        test_images: test images; None for hashes alone.
        build: of a net that the package lacks.
        device: what the members run on.
        say: told of the progress.

    Raises:
        UsageError: images that are not for these members.
        DamagedError, NetworkError, AccessError, StorageError: the members can't be read.
    """
    description, table = source.read_collection(name)
    rows = table.to_pylist()
    eval_data = None if test_images is None else f"{test_images.name}/{test_images.split}"
    pending = [row for row in rows if row["path"] is not None and _is_incomplete(row, eval_data)]
    if pending:
        say(f"{name}: reading {len(pending):,} of {len(rows):,} members …")
    report, done = progress_reporter(say, name, len(pending)), 0
    for batch in batch_rows(sorted(pending, key=lambda r: (r["path"], r["offset"]))):
        batch.sort(key=lambda r: (r["member"], r["epoch"]))
        with _local_members(source, description, batch) as locations:
            for row, location in zip(batch, locations, strict=True):
                read_and_check(row, location)
            if test_images is not None:
                _measure(source, description, [r for r in batch if r["status"] == "ok"], test_images, build, device)
        done += len(batch)
        manifest.write_manifest(manifest.build_manifest(rows), source.manifest_path(name))
        report(done)
    mark_duplicates(rows)
    final_table = manifest.build_manifest(rows)
    if not final_table.equals(table):
        manifest.write_manifest(final_table, source.manifest_path(name))


def _is_incomplete(row: Mapping[str, Any], eval_data: str | None) -> bool:
    """Say whether a row's member is to be read: it has no hash, or is to be measured on other images."""
    return row["sha256"] is None or (eval_data is not None and row["status"] == "ok" and row["eval_data"] != eval_data)


def batch_rows(rows: Sequence[Row]) -> Iterator[list[Row]]:
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
def _local_members(source: FolderSource, description: Description, rows: Sequence[Row]) -> Iterator[list[Location]]:
    """Find the members of a source, or borrow them from the one that they lie in."""
    if description.base:
        with borrow_members(hub.resolve_address(description.base), description, rows) as locations:
            yield locations
    else:
        yield source.locate(description, manifest.build_manifest(rows))


@contextmanager
def borrow_members(repo: hub.Repo, description: Description, rows: Sequence[Row]) -> Iterator[list[Location]]:
    """Bring members from a repo for a while: those that were not in the member cache before leave it afterwards.

    Args:
        repo, description: where they lie.
        rows: of the members, in the order of their ids.
    """
    cached_before = cache.member_files(repo.id)
    locations = fetching.fetch_rows(repo, description, manifest.build_manifest(rows), whole=False)
    try:
        yield locations
    finally:
        for path in {x.path for x in locations} & (cache.member_files(repo.id) - cached_before):
            path.unlink(missing_ok=True)


def read_and_check(row: Row, location: Location) -> memoryview:
    """Read a member, and write its hash into its row; mark it as failed where a value is not finite. Return its bytes.

    Raises:
        DamagedError: its file has not the tensors that the row says, or others than before.
    """
    shard_files.check_against_files([location])
    _, raw = next(iter(shard_files.read_members([location])))
    check_member(row, location, raw)
    return raw


def check_member(row: Row, location: Location, raw: bytes | bytearray | memoryview) -> None:
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
        row |= {"status": "failed", "reason": f"values that are not finite in {first_few(bad, 3)}"}


def _measure(
    source: FolderSource,
    description: Description,
    rows: Sequence[Row],
    test_images: ImageData,
    build: Callable[[], nn.Module] | None,
    device: str,
) -> None:
    """Measure members and write the figures into their rows; mark those as failed whose logits are not finite."""
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.evaluation import single_members

    if not rows:
        return
    members = Collection(source, "", description, manifest.build_manifest(rows), build)
    try:
        figures = single_members.manifest_columns(members, test_images, device)
    except DamagedError as error:
        if len(rows) == 1:
            rows[0].update({"status": "failed", "reason": str(error)})
            return
        for row in rows:
            _measure(source, description, [row], test_images, build, device)
        return
    for row in rows:
        row |= figures[row["member"]]


def mark_duplicates(rows: Sequence[Row]) -> None:
    """Mark members that have the weights of one before as excluded, by their hashes."""
    first: dict[str, int] = {}
    for row in sorted(rows, key=lambda r: (r["member"], r["epoch"])):
        if row["status"] != "ok" or row["sha256"] is None or row["method"] in REPEATING:
            continue
        original = first.setdefault(row["sha256"], row["member"])
        if original != row["member"]:
            row |= {"status": "excluded", "reason": f"the weights of member {original}"}
            row |= dict.fromkeys(FIGURES)


def progress_reporter(say: Say, name: str, total: int) -> Callable[[int], None]:
    """Return what tells how many are done, some twenty times in all."""
    last_step = 0

    def report(done: int) -> None:
        nonlocal last_step
        if done == total or PROGRESS_STEPS * done // total > last_step:
            last_step = PROGRESS_STEPS * done // total
            say(f"{name}: {done:,} of {total:,}")

    return report
