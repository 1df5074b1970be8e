"""Fill a manifest's hashes and test figures: each member that lacks them is read once, in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import content_hash, tensors_not_finite
from checkpoints_zoo.formats.shard_files import REPEATING_METHODS, Location
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.sources import cache, fetching, hub, hub_addresses
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.hash_records import delete_file

if TYPE_CHECKING:
    from torch import nn

    from checkpoints_zoo.images import ImageData


MOST_BATCH_MEMBERS, MOST_BATCH_BYTES = 256, 2**28
MEASURED_COLUMNS = ("test_accuracy", "test_nll", "test_brier", "test_ece", "eval_data")
PROGRESS_STEPS = 20  # number of progress messages in total
Row = dict[str, Any]


def fill_hashes_and_figures(
    source: FolderSource,
    collection: str,
    test_images: ImageData | None,
    build: Callable[[], nn.Module] | None,
    device: str,
    say: Say,
) -> None:
    """Read the members whose rows lack a hash or, with test images, figures; write hashes and figures into the rows.

    Args:
        source: source in a folder with the collection's manifest.
        collection: name of the collection.
        test_images: images to evaluate the members on; None to compute hashes only.
        build: function that builds a net that the package lacks.
        device: torch device on which the members are evaluated.
        say: function called with lines of text on the progress.

    Raises:
        UsageError: the images do not fit the members.
        DamagedError, NetworkError, AccessError, StorageError: the members can't be read.
    """
    description, table = source.read_collection(collection)
    rows = table.to_pylist()
    eval_data = None if test_images is None else f"{test_images.name}/{test_images.split}"
    pending_rows = [row for row in rows if row["path"] is not None and _is_incomplete(row, eval_data)]
    if pending_rows:
        say(f"{collection}: reading {len(pending_rows):,} of {len(rows):,} members …")
    report, done = progress_reporter(say, collection, len(pending_rows)), 0
    for batch in batch_rows(sorted(pending_rows, key=lambda r: (r["path"], r["offset"]))):
        batch.sort(key=lambda r: (r["member"], r["epoch"]))
        with _local_locations(source, description, batch) as locations:
            for row, location in zip(batch, locations, strict=True):
                read_and_check(row, location)
            if test_images is not None:
                _measure_members(
                    source, description, [r for r in batch if r["status"] == "ok"], test_images, build, device
                )
        done += len(batch)
        manifest.write_manifest(manifest.build_manifest(rows), source.manifest_path(collection))
        report(done)
    mark_duplicates(rows)
    final_table = manifest.build_manifest(rows)
    if not final_table.equals(table):
        manifest.write_manifest(final_table, source.manifest_path(collection))


def _is_incomplete(row: Mapping[str, Any], eval_data: str | None) -> bool:
    """Return whether a row's member must be read: the row has no hash, or no figures on these images."""
    return row["sha256"] is None or (eval_data is not None and row["status"] == "ok" and row["eval_data"] != eval_data)


def drop_stale_figures(rows: Iterable[Row], old_description: Description, description: Description) -> None:
    """Empty the test figures in rows if the members are described with other classes or another preprocessing than when
    the figures were measured.

    Args:
        rows: rows of an earlier import.
        old_description, description: the description of that import, and the one that takes its place.
    """
    for fact in ("classes", "preprocessing"):
        old_fact = getattr(old_description, fact)
        if old_fact and old_fact != getattr(description, fact):
            for row in rows:
                row |= dict.fromkeys(MEASURED_COLUMNS)


def batch_rows(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows in batches of limited members and bytes; each batch has at least one row."""
    batch: list[Row] = []
    for row in rows:
        is_full = len(batch) == MOST_BATCH_MEMBERS or (len(batch) + 1) * row["nbytes"] > MOST_BATCH_BYTES
        if batch and is_full:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@contextmanager
def _local_locations(source: FolderSource, description: Description, rows: Sequence[Row]) -> Iterator[list[Location]]:
    """Yield the locations of members on this disk; members of a repo are fetched for the `with` block."""
    if description.base:
        with borrow_members(hub.resolve_address(description.base), description, rows) as locations:
            yield locations
    else:
        yield source.locate(description, manifest.build_manifest(rows))


@contextmanager
def borrow_members(repo: hub_addresses.Repo, description: Description, rows: Sequence[Row]) -> Iterator[list[Location]]:
    """Fetch a repo's members for a `with` block, then delete members that the member cache did not have before.

    Args:
        repo, description: repo with the members' bytes, and their description.
        rows: manifest rows of the members, in the order of their ids.
    """
    paths_cached_before = cache.member_files(repo.cache_name)
    locations = fetching.fetch_rows(repo, description, manifest.build_manifest(rows), allow_whole_files=False)
    try:
        yield locations
    finally:
        for path in {x.path for x in locations} & (cache.member_files(repo.cache_name) - paths_cached_before):
            delete_file(path, cache.hash_record_path(path))


def read_and_check(row: Row, location: Location) -> memoryview:
    """Read a member and write its hash into its row; mark it as failed if a value is not finite. Return its bytes.

    Raises:
        DamagedError: the file lacks the tensors of the row, or has changed.
    """
    shard_files.check_against_files([location])
    _, raw = next(iter(shard_files.read_members([location])))
    check_member(row, location, raw)
    return raw


def check_member(row: Row, location: Location, raw: bytes | bytearray | memoryview) -> None:
    """Write a member's hash into its row; mark it as failed if a value is not finite.

    Raises:
        DamagedError: the row already has another hash.
    """
    digest = content_hash(location.layout, raw)
    if row["sha256"] not in (None, digest):
        raise DamagedError(
            f"member {row['member']} in file {location.path}",
            expected=f"sha256 {row['sha256'][:16]}…, as in its row",
            found=f"{digest[:16]}…",
            do="The file has changed: import it under another name",
            member=row["member"],
            path=location.path,
        )
    row["sha256"] = digest
    if row["status"] == "ok" and (tensor_names := tensors_not_finite(location.layout, raw)):
        row |= {"status": "failed", "reason": f"values that are not finite in {first_few(tensor_names, 3)}"}


def _measure_members(
    source: FolderSource,
    description: Description,
    rows: Sequence[Row],
    test_images: ImageData,
    build: Callable[[], nn.Module] | None,
    device: str,
) -> None:
    """Measure members and write the figures into their rows; mark members as failed if their logits are not finite."""
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
            _measure_members(source, description, [row], test_images, build, device)
        return
    for row in rows:
        row |= figures[row["member"]]


def mark_duplicates(rows: Sequence[Row]) -> None:
    """Mark members as excluded if an earlier member has the same hash."""
    first_member_of_hash: dict[str, int] = {}
    for row in sorted(rows, key=lambda r: (r["member"], r["epoch"])):
        if row["status"] != "ok" or row["sha256"] is None or row["method"] in REPEATING_METHODS:
            continue
        original_member = first_member_of_hash.setdefault(row["sha256"], row["member"])
        if original_member != row["member"]:
            row |= {"status": "excluded", "reason": f"the weights of member {original_member}"}
            row |= dict.fromkeys(MEASURED_COLUMNS)


def progress_reporter(say: Say, collection: str, total: int) -> Callable[[int], None]:
    """Return a function that reports the number of finished members, in about twenty messages in all."""
    last_step = 0

    def report(finished_count: int) -> None:
        nonlocal last_step
        if finished_count == total or PROGRESS_STEPS * finished_count // total > last_step:
            last_step = PROGRESS_STEPS * finished_count // total
            say(f"{collection}: {finished_count:,} of {total:,}")

    return report
