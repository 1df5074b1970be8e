"""Members trained again from their rows, and compared with what is stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SelectionError, UsageError
from checkpoints_zoo.training.packing import Finished, Row, prepare
from checkpoints_zoo.training.population import Stacks
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import varied
from checkpoints_zoo.training.recipes import ALSO_CALLED, RECIPES, named
from checkpoints_zoo.workers import Engine, InProcess, Job

LEVEL_Z = 2.5758  # of a two-sided interval of 99 %


@dataclass(frozen=True)
class Retrained:
    """What came of training a member again.

    Args:
        member: its id.
        compared: "bytes" where it was trained by this build of torch on this processor, or "accuracy".
        same: whether it is as its row says: the same bytes, or an accuracy within the interval.
        text: what was compared with what.
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
) -> list[Retrained]:
    """Train some members again from their rows and compare them; return what came of each.

    Bit for bit where torch's version and the device are those of the row. Elsewhere the test accuracy must lie within
    the 99 % interval of a difference of two shares (Agresti and Caffo 2000, The American Statistician 54).

    Args:
        members: a collection that was trained here.
        count: how many of its members, spread evenly.
        recipe: that trained them; None for the one that the rows name.
        engine: what trains them.
        say: told what is being done.

    Raises:
        SelectionError: no members with weights.
        UsageError: the recipe isn't known, or another one than the rows say.
    """
    rows = [row for row in members.rows.to_pylist() if row["status"] == "ok" and row["final"]]
    if not rows or count < 1:
        raise SelectionError(f"members of {members.name} to train again", expected="one or more", found="none")
    rows = [rows[i * len(rows) // min(count, len(rows))] for i in range(min(count, len(rows)))]
    known = recipe or _recipe(members.name, rows[0])
    for row in rows:
        if row["recipe_hash"] != known.hash:
            raise UsageError(
                f"recipe of member {row['member']} of {members.name}",
                expected=f"hash {row['recipe_hash']}, as its row says",
                found=f"{known.hash} of recipe {known.name!r}",
                do="Give the recipe that trained it by --recipe, and what was set by --set",
                collection=members.name,
                member=row["member"],
            )
    ids = [row["member"] for row in rows]
    stacks = [tuple(ids[at : at + known.stack_width]) for at in range(0, len(ids), known.stack_width)]
    say(f"{members.name}: training {', '.join(map(str, ids))} again …")
    found: dict[int, Finished] = {}
    jobs = [Job(f"members {', '.join(map(str, stack))}", stack) for stack in stacks]
    with closing(engine.run(Stacks(known, None, prepare), jobs)) as results:
        for _, finished in results:
            found |= {f.row["member"]: f for f in finished if f.row["final"]}
    inputs = len(known.split("test"))
    return [_compared(row, found[row["member"]].row, inputs) for row in rows]


def _recipe(name: str, row: Row) -> Recipe:
    """Return the recipe of the package that a row names, with the fields that the row sets.

    A row may come from anybody, so it never makes a file run: a recipe that stands in a file is given by the caller.
    """
    base, *changes = (row["recipe"] or "").split(" ")
    if ALSO_CALLED.get(base, base) not in RECIPES:
        raise UsageError(
            f"recipe of {name}",
            expected=f"one of the package's in its rows ({', '.join(RECIPES)})",
            found=repr(base)[:80] if base else "none",
            do="If you trust its code, give its file: --recipe FILE.py",
        )
    return varied(named(base), changes)


def _compared(row: Row, again: Row, inputs: int) -> Retrained:
    """Compare a row with that of the member trained again."""
    member = row["member"]
    if again["status"] != "ok":
        return Retrained(member, "status", False, f"expected status ok; found {again['status']}: {again['reason']}")
    ours = again["torch_version"], again["device"]
    if (row["torch_version"], row["device"]) == ours and row["sha256"] is not None:
        same = row["sha256"] == again["sha256"]
        text = f"sha256 {again['sha256'][:16]}…" if same else ""
        text = text or f"expected sha256 {row['sha256'][:16]}…; found {again['sha256'][:16]}…"
        return Retrained(member, "bytes", same, text)
    if row["test_accuracy"] is None:
        raise UsageError(f"test accuracy of member {member}", expected="one in its row", found="none", member=member)
    before, now = row["test_accuracy"], again["test_accuracy"]
    within = interval(before, now, inputs)
    same = abs(now - before) <= within
    where = f"trained by torch {row['torch_version']} on {row['device']}, here {ours[0]} on {ours[1]}"
    return Retrained(member, "accuracy", same, f"{before:.4f} before, {now:.4f} now, ± {within:.4f} ({where})")


def interval(one: float, other: float, inputs: int) -> float:
    """Return how far two shares of so many inputs may lie apart by chance, at 99 %.

    FolderSource: Agresti and Caffo 2000, a success and a failure added to each.

    >>> round(interval(0.9, 0.9, 100), 3)
    0.112
    """
    shares = [(share * inputs + 1) / (inputs + 2) for share in (one, other)]
    return LEVEL_Z * math.sqrt(sum(p * (1 - p) for p in shares) / (inputs + 2))
