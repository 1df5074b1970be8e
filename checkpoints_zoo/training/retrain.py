"""Retraining: members are trained again from their rows and compared with the stored members."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SelectionError, UsageError
from checkpoints_zoo.training.packing import ManifestRow, PackedSnapshot, pack_members, split_threads
from checkpoints_zoo.training.population import StackTrainer
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import vary_recipe
from checkpoints_zoo.training.recipes import RECIPE_ALIASES, RECIPES, recipe_by_name
from checkpoints_zoo.workers import Engine, InProcess, Job

NORMAL_QUANTILE_99 = 2.5758  # Quantile of the normal distribution for a two-sided interval of 99 %.


@dataclass(frozen=True)
class RetrainResult:
    """Result of the comparison of a retrained member with the stored member.

    Args:
        member: id of the member.
        compared: kind of comparison: "bytes", "accuracy" or "status".
        same: whether the bytes are equal, or the accuracy is within the 99 % interval.
        text: sentence with the compared values.
    """

    member: int
    compared: str
    same: bool
    text: str


def retrain(
    members: Collection,
    count: int = 3,
    recipe: Recipe | None = None,
    engine: Engine = InProcess(),  # noqa: B008 (it can't be changed)
    say: Callable[[str], object] = lambda text: None,
) -> list[RetrainResult]:
    """Train some members again from their rows; return the results of the comparison with the stored members.

    If torch's version, the device and the number of threads are as in the member's row, bytes are compared. With
    another version, device or number of threads, the difference of the two test accuracies must be within its 99 %
    interval, as a difference of two shares (Agresti and Caffo 2000, The American Statistician 54).

    Args:
        members: collection that this package has trained.
        count: number of members to retrain, spread evenly.
        recipe: recipe of the members; None for the recipe that the rows name.
        engine: engine that trains the members, in this process or in others.
        say: function called with a line of text.

    Raises:
        SelectionError: no member has weights.
        UsageError: the recipe is not known, or its hash differs from the hash in the rows.
    """
    rows = [row for row in members.rows.to_pylist() if row["status"] == "ok" and row["final"]]
    if not rows or count < 1:
        raise SelectionError(f"members of {members.name} to train again", expected="one or more", found="none")
    rows = [rows[i * len(rows) // min(count, len(rows))] for i in range(min(count, len(rows)))]
    expected_recipe = recipe or _recipe_of_row(members.name, rows[0])
    for row in rows:
        if row["recipe_hash"] != expected_recipe.hash:
            raise UsageError(
                f"recipe of member {row['member']} of {members.name}",
                expected=f"hash {row['recipe_hash']}, as its row says",
                found=f"{expected_recipe.hash} of recipe {expected_recipe.name!r}",
                do="Give the recipe that trained it with --recipe, and the fields that were set with --set",
                collection=members.name,
                member=row["member"],
            )
    ids = [row["member"] for row in rows]
    stacks = [
        tuple(ids[start : start + expected_recipe.stack_width])
        for start in range(0, len(ids), expected_recipe.stack_width)
    ]
    say(f"{members.name}: training {', '.join(map(str, ids))} again …")
    retrained_snapshots: dict[int, PackedSnapshot] = {}
    jobs = [Job(f"members {', '.join(map(str, stack))}", stack) for stack in stacks]
    with closing(engine.run(StackTrainer(expected_recipe, None, pack_members), jobs)) as results:
        for _, snapshots in results:
            retrained_snapshots |= {f.row["member"]: f for f in snapshots if f.row["final"]}
    inputs = len(expected_recipe.split("test"))
    return [_compare_rows(row, retrained_snapshots[row["member"]].row, inputs) for row in rows]


def _recipe_of_row(collection: str, row: ManifestRow) -> Recipe:
    """Return the package's recipe that a row names, with the fields that the row sets.

    Rows are data from anybody, so no file that a row names is run. A recipe from a file must be passed by the caller.
    """
    base, *changes = (row["recipe"] or "").split(" ")
    if RECIPE_ALIASES.get(base, base) not in RECIPES:
        raise UsageError(
            f"recipe of {collection}",
            expected=f"one of the package's in its rows ({', '.join(RECIPES)})",
            found=repr(base)[:80] if base else "none",
            do="If you trust its code, give its file: --recipe FILE.py",
        )
    return vary_recipe(recipe_by_name(base), changes)


def _compare_rows(row: ManifestRow, new_row: ManifestRow, input_count: int) -> RetrainResult:
    """Compare a row with the row of the retrained member; return the result."""
    member = row["member"]
    if new_row["status"] != "ok":
        return RetrainResult(
            member, "status", False, f"expected status ok; found {new_row['status']}: {new_row['reason']}"
        )
    device, threads = split_threads(row["device"] or "")
    new_device, new_threads = split_threads(new_row["device"])
    is_same_machine = (row["torch_version"], device) == (new_row["torch_version"], new_device)
    if is_same_machine and row["sha256"] is not None:
        agrees = row["sha256"] == new_row["sha256"]
        if agrees:
            return RetrainResult(member, "bytes", True, f"sha256 {new_row['sha256'][:16]}…")
        if threads == new_threads:
            text = f"expected sha256 {row['sha256'][:16]}…; found {new_row['sha256'][:16]}…"
            return RetrainResult(member, "bytes", False, text)
    if row["test_accuracy"] is None:
        raise UsageError(f"test accuracy of member {member}", expected="one in its row", found="none", member=member)
    stored_accuracy, new_accuracy = row["test_accuracy"], new_row["test_accuracy"]
    half_width = difference_half_width(stored_accuracy, new_accuracy, input_count)
    agrees = abs(new_accuracy - stored_accuracy) <= half_width
    machines_text = f"trained by torch {row['torch_version']} on {row['device']}, "
    machines_text += f"here {new_row['torch_version']} on {new_row['device']}"
    if is_same_machine:
        threads_note = "" if threads else "; the number of threads is not in its row"
        machines_text += f"; last bits depend on the number of threads{threads_note}"
    return RetrainResult(
        member,
        "accuracy",
        agrees,
        f"{stored_accuracy:.4f} before, {new_accuracy:.4f} now, ± {half_width:.4f} ({machines_text})",
    )


def difference_half_width(first_share: float, second_share: float, input_count: int) -> float:
    """Return the half width of the 99 % interval of the difference between two shares of `input_count` inputs.

    Source: Agresti and Caffo 2000; one success and one failure are added to each share.

    >>> round(difference_half_width(0.9, 0.9, 100), 3)
    0.112
    """
    shares = [(share * input_count + 1) / (input_count + 2) for share in (first_share, second_share)]
    return NORMAL_QUANTILE_99 * math.sqrt(sum(p * (1 - p) for p in shares) / (input_count + 2))
