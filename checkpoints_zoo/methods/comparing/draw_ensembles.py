"""Draws of a method as ensembles: each run by itself, some draws of all runs, or independent members."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics

INDEPENDENT = "independent"  # in the manifest's column `method`
ONE, MULTI, MEMBERS = "one", "multi", "members"


@dataclass(frozen=True)
class DrawEnsemble:
    """Draws that are measured in one way.

    Args:
        name: "one" for each run alone with all its draws; "multi" for all runs together, every R-th draw of each of R
            runs, which are as many draws as a run has; "members" for independent members.
        members: the draws.
        runs: positions in `members` of each run's draws; of independent members, one each.
    """

    name: str
    members: Collection
    runs: tuple[tuple[int, ...], ...]

    @property
    def draws(self) -> int:
        """How many draws an ensemble has; the fewest, where runs differ."""
        return min(map(len, self.runs)) if self.name == ONE else len(self.members)

    def run(self, at: int) -> Collection:
        """Return the draws of one run."""
        return self.members.take(self.runs[at])

    def plan(self, seed: int, subsets: int) -> metrics.Plan:
        """Draw the halves of the runs that a delete-d jackknife over them measures; return positions of draws.

        Args:
            seed: of the halves.
            subsets: how many.
        """
        plan = metrics.jackknife_plan(len(self.runs), seed, subsets)
        chosen = [torch.tensor([at for run in some.tolist() for at in self.runs[run]]) for some in plan.chosen]
        return metrics.Plan(plan.members, chosen, plan.complete, plan.widen, plan.whole)


def group_draws(name: str, members: Collection) -> list[DrawEnsemble]:
    """Sort a method's draws into the ways to measure them; return these: one and multi mode, or members alone.

    Args:
        name: of the method, for errors.
        members: its draws: rows with the method "independent" are members, others are draws of the runs that the column
            `run` names, in the order of `draw`; without runs they are one.

    Raises:
        UsageError: fewer than two draws.
    """
    if len(members) < 2:
        raise UsageError(f"draws of {name}", expected="two or more", found=str(len(members)))
    columns = {n: members.rows.column(n).to_pylist() for n in ("method", "run", "draw")}
    if set(columns["method"]) == {INDEPENDENT}:
        return [independent_members(members)]
    by_run: dict[int, list[tuple[int, int]]] = {}
    for at, (run, draw) in enumerate(zip(columns["run"], columns["draw"], strict=True)):
        by_run.setdefault(-1 if run is None else run, []).append((at if draw is None else draw, at))
    runs = [[at for _, at in sorted(by_run[run])] for run in sorted(by_run)]
    ways = []
    if min(map(len, runs)) > 1:
        ways.append(_mode(ONE, members, runs))
    if len(runs) > 1:
        ways.append(_mode(MULTI, members, [run[:: len(runs)] for run in runs]))
    return ways


def independent_members(members: Collection) -> DrawEnsemble:
    """Return members as independent ones, whatever their rows say."""
    return DrawEnsemble(MEMBERS, members, tuple((at,) for at in range(len(members))))


def _mode(name: str, members: Collection, runs: Sequence[Sequence[int]]) -> DrawEnsemble:
    starts, count = [], 0
    for run in runs:
        starts.append(tuple(range(count, count + len(run))))
        count += len(run)
    return DrawEnsemble(name, members.take([at for run in runs for at in run]), tuple(starts))


def content_hash(members: Collection) -> str:
    """Return a hash of what tells members from others, wherever they lie, and of what a view does to them.

    From content hashes, or where the bytes lie in the source if these are null.
    """
    names = ("member", "epoch", "sha256", "path", "offset", "nbytes")
    columns = zip(*(members.rows.column(n).to_pylist() for n in names), strict=True)
    rows: list[list[object]] = [
        [member, epoch, sha256] if sha256 else [member, epoch, members._commit, path, offset, nbytes]
        for member, epoch, sha256, path, offset, nbytes in columns
    ]
    facts = [[str(step) for step in members._view.steps], *rows]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def portable_citation(members: Collection) -> str:
    """Return a citation without the folder of this machine."""
    label, at, rest = members.citation.rpartition("@")
    return rest if label.startswith("file:") else f"{label}{at}{rest}"
