"""A training run: members are trained, staged when they finish, and written into shards; the manifest comes last."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import fmean

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.formats import disk, shard_files
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.training.loop import check_network
from checkpoints_zoo.training.packing import ManifestRow, PackedSnapshot, description_of, layout_of, pack_members
from checkpoints_zoo.training.population import Progress, check_ids, train_members
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.shards import (
    MemberLog,
    NewSnapshot,
    Staging,
    folder_source,
    lost_member_ids,
    read_rows,
    remove_unnamed_shards,
    write_shards,
)
from checkpoints_zoo.training.state import claim_folder, runs_folder, training_lock, write_description
from checkpoints_zoo.workers import Engine, InProcess

Say = Callable[[str], object]


class Export:
    """The folder of a source while a recipe's members are trained into it.

    Args:
        recipe: recipe by which the members are trained.
        out: folder of the source; this process holds its lock.

    Raises:
        UsageError: the folder holds members of another recipe under this name.
    """

    def __init__(self, recipe: Recipe, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.recipe, self.source = recipe, folder_source(out)
        self.layout = layout_of(recipe)
        existing_rows = _existing_rows(recipe, out)
        self.lost = lost_member_ids(self.source, existing_rows)
        self.members_in_shards = {row["member"] for row in existing_rows} - self.lost
        self.description = description_of(recipe, self.layout)
        self.staging = Staging(runs_folder(out, recipe.name) / "finished", self.layout, recipe.hash)
        self.size = shard_files.members_per_shard(self.layout, len(recipe.snapshots) + 1)

    @property
    def members(self) -> set[int]:
        """Return the ids of the finished members, in shards or staged."""
        return self.members_in_shards | self.staging.members

    def claim_runs_folder(self, member_ids: Collection[int]) -> Path:
        """Record the recipe and the description in the folder of runs; return that folder.

        Args:
            member_ids: ids of the members to be trained.

        Raises:
            DamagedError: the source has lost the bytes of other members.
        """
        if lost_ids := sorted(self.lost.difference(member_ids)):
            ids_text = format_ids([(member, None) for member in lost_ids])
            raise DamagedError(
                f"members {ids_text} of {self.recipe.name} in folder {self.source.root}",
                expected="their bytes in shards",
                found="rows in the manifest alone",
                do=f"Put the shards back, or train these members as well: --members {ids_text}",
                collection=self.recipe.name,
                path=self.source.root,
            )
        self._check_description()
        with disk.translate_write_errors(self.source.root):
            folder = claim_folder(self.source.root, self.recipe)
            write_description(folder, self.description)
        return folder

    def _check_description(self) -> None:
        """Check that the members in the folder have the recipe's title and licence, which its hash does not cover."""
        if not self.members_in_shards:
            return
        stored = self.source.read_collection(self.recipe.name)[0]
        for field in ("title", "licence"):
            stored_value, recipe_value = getattr(stored, field), getattr(self.description, field)
            if stored_value != recipe_value:
                raise UsageError(
                    f"{field} of collection {self.recipe.name} in folder {self.source.root}",
                    expected=f"{stored_value!r}, as its members have",
                    found=repr(recipe_value),
                    do="Give another folder or name, or change the file in manifests/ once all members are trained",
                )

    def stage(self, finished_snapshots: Sequence[PackedSnapshot]) -> None:
        """Stage finished snapshots on disk, so that a kill from now on loses none of them."""
        with disk.translate_write_errors(self.source.root):
            self.staging.stage(finished_snapshots)

    def write_complete_shards(self, finished_snapshots: Sequence[PackedSnapshot]) -> None:
        """Write the shards that the finished snapshots have completed."""
        finished_ids = self.members
        for number in {f.row["member"] // self.size for f in finished_snapshots}:
            if all(member in finished_ids for member in range(number * self.size, (number + 1) * self.size)):
                self.write_shards(complete_only=True)
                return

    def write_shards(self, *, complete_only: bool = False) -> None:
        """Write the staged snapshots into shards; `complete_only` leaves out shards with unfinished members."""
        new_snapshots = {
            key: NewSnapshot(row, self.staging.location(key) if row["status"] == "ok" else None)
            for key, row in self.staging.rows.items()
        }
        snapshots_per_member = len(self.recipe.snapshots) + 1
        try:
            with disk.translate_write_errors(self.source.root):
                for keys in write_shards(
                    self.source, self.description, new_snapshots, snapshots_per_member, complete_only=complete_only
                ):
                    self.members_in_shards |= {member for member, _ in keys}
                    self.staging.drop(keys)
        except DamagedError as error:
            error.do = "The members trained now are kept. Delete that file, and train its members again"
            raise

    def finish(self) -> None:
        """Write all staged snapshots into shards, and remove files that no row names any more."""
        self.write_shards()
        self.staging.drop(())  # A killed run may have left an empty folder.
        remove_unnamed_shards(self.source, self.recipe.name)


def _existing_rows(recipe: Recipe, out: Path) -> list[ManifestRow]:
    """Read the rows of the manifest; refuse members of another recipe under this name."""
    rows = list(read_rows(folder_source(out), recipe.name).values())
    other_hashes = {r["recipe_hash"] for r in rows} - {recipe.hash}
    if other_hashes:
        raise UsageError(
            f"folder {out.absolute()}",
            expected=f"members of recipe {recipe.name!r} with hash {recipe.hash}",
            found=f"members of {', '.join(map(str, other_hashes))}",
            do="Give another folder, or name the changed recipe differently",
        )
    return rows


def train_into(
    recipe: Recipe,
    ids: Sequence[int],
    out: Path,
    engine: Engine = InProcess(),  # noqa: B008 (it can't be changed)
    say: Say = lambda text: None,
    progress: Callable[[Progress], None] | None = None,
    log: Say = lambda text: None,
) -> int:
    """Train the members that a folder does not hold yet, and export them into it; return how many were trained.

    A member depends on its seed alone; on a processor, its last bits depend on the number of torch's threads too.
    The shards do not depend on how the run is divided, killed and resumed, nor on an engine with the same number of
    threads; nor do the rows, except `created`, `wall_time_s` and `device`. The members that the folder held before
    can be read during the run.

    Args:
        recipe: recipe of the members.
        ids: ids of the members, each once; members that are already in the folder are skipped.
        out: folder of the source.
        engine: engine that trains the members.
        say: function that is called with lines of text on the progress.
        progress: function that is called after every epoch of a stack that this process trains.
        log: function that is called with a line of JSON for each finished member.

    Raises:
        UsageError: some ids are invalid, the network can't be trained, or the folder has members of another recipe
            under this name.
        DamagedError: the folder has lost the bytes of members that are not among the ids.
        LockedError: another process is training into the folder.
        StorageError: the disk is full, or can't be written to.
        WorkerError: workers died repeatedly.
    """
    check_ids(ids)
    check_network(recipe)
    with training_lock(out):
        export = Export(recipe, out)
        member_log = MemberLog(export.claim_runs_folder(ids) / "log.jsonl")
        member_log.add(export.staging.rows.values())
        stored_ids = export.members
        missing_ids = [member for member in ids if member not in stored_ids]
        if len(missing_ids) < len(ids):
            say(f"{recipe.name}: {len(ids) - len(missing_ids)} of these members are in {out} already")
        if export.lost:
            say(f"{recipe.name}: the bytes of {len(export.lost)} members are gone; these are trained again")
        if missing_ids:
            partial_stack_size = len(missing_ids) % recipe.stack_width
            cost_note = "; a stack that is not full takes as long as a full one" if partial_stack_size else ""
            say(f"{recipe.name}: {len(missing_ids):,} members to train, {recipe.stack_width:,} at a time{cost_note}")
        export.write_shards(complete_only=True)
        start_time, accuracies, done_count = time.monotonic(), list[float](), 0

        def finish(finished: list[PackedSnapshot]) -> None:
            nonlocal done_count
            newly_finished = [
                f for f in finished if f.row["member"] not in stored_ids
            ]  # A resumed stack may hold members that are stored already.
            export.stage(newly_finished)
            stored_ids.update(f.row["member"] for f in newly_finished)
            for line in member_log.add(f.row for f in newly_finished):
                log(line)
            export.write_complete_shards(newly_finished)  # Later runs log only staged members.
            final_rows = [f.row for f in newly_finished if f.row["final"]]
            done_count += len(final_rows)
            accuracies.extend(row["test_accuracy"] for row in final_rows if row.get("test_accuracy") is not None)
            progress_text = _progress_text(done_count, len(missing_ids), time.monotonic() - start_time, accuracies)
            say(f"{recipe.name}: {progress_text}")

        train_members(recipe, missing_ids, out, finish, progress, engine, pack_members)
        export.finish()
    return len(missing_ids)


def _progress_text(done_count: int, total_count: int, seconds: float, accuracies: Sequence[float]) -> str:
    """Return a line on the progress: members done, rate, time left, mean accuracy."""
    rate = done_count / max(seconds, 1e-3)
    mean = f", mean test accuracy {fmean(accuracies):.4f}" if accuracies else ""
    time_left = (total_count - done_count) / rate if rate else 0.0
    return (
        f"{done_count:,} of {total_count:,} members, {rate * 60:.3g} a minute, {_duration_text(time_left)} left{mean}"
    )


def _duration_text(seconds: float) -> str:
    """Format seconds in the two largest units, such as 3 h 20 min."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{n} {unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (seconds_left, "s")) if n]
    return " ".join(parts[:2]) or "0 s"
