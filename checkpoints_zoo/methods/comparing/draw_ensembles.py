"""Group the draws of a method into ensembles: each run alone, some draws of all runs, or independent members."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.populations.independent_units import INDEPENDENT_METHOD

ONE_MODE, MULTI_MODE, MEMBERS_MODE = "one", "multi", "members"


@dataclass(frozen=True)
class DrawEnsemble:
    """A method's draws, grouped into the ensembles of one mode.

    Args:
        name: name of the mode. "one": each run alone with all its draws. "multi": every R-th draw of each of R runs,
            together as many as a run has. "members": independent members.
        members: the draws.
        runs: for each run, the positions of its draws in `members`; an independent member is a run of one draw.
    """

    name: str
    members: Collection
    runs: tuple[tuple[int, ...], ...]

    @property
    def draws(self) -> int:
        """Number of draws of an ensemble; of the smallest ensemble if runs differ."""
        return min(map(len, self.runs)) if self.name == ONE_MODE else len(self.members)

    def run(self, run_number: int) -> Collection:
        """Return the draws of one run."""
        return self.members.take(self.runs[run_number])

    def plan(self, seed: int, subsets: int) -> metrics.Plan:
        """Draw halves of the runs for a delete-d jackknife; return the plan, with the positions of the halves' draws.

        For independent members the intervals are computed as in `zoo.evaluate`: intervals are wider if the
        members' influence is skewed.

        Args:
            seed: seed of the random halves.
            subsets: number of subsets.
        """
        plan = metrics.jackknife_plan(len(self.runs), seed, subsets, skewness=self.name == MEMBERS_MODE)
        positions_of_subsets = [
            torch.tensor([at for run in runs_of_subset.tolist() for at in self.runs[run]])
            for runs_of_subset in plan.chosen
        ]
        return replace(plan, chosen=positions_of_subsets)


def group_draws(method_name: str, members: Collection) -> list[DrawEnsemble]:
    """Group a method's draws by mode; return the ensembles of the modes "one" and "multi", or only of "members".

    Args:
        method_name: name of the method, for error texts.
        members: the draws. Rows with the method "independent" are members. Other rows are draws of the run in column
            `run`, in the order of column `draw`; draws without a run are one run.

    Raises:
        UsageError: there are fewer than two draws.
    """
    if len(members) < 2:
        raise UsageError(f"draws of {method_name}", expected="two or more", found=str(len(members)))
    columns = {n: members.rows.column(n).to_pylist() for n in ("method", "run", "draw")}
    if set(columns["method"]) == {INDEPENDENT_METHOD}:
        return [independent_members(members)]
    order_and_position_by_run: dict[int, list[tuple[int, int]]] = {}
    for position, (run, draw) in enumerate(zip(columns["run"], columns["draw"], strict=True)):
        order_and_position_by_run.setdefault(-1 if run is None else run, []).append(
            (position if draw is None else draw, position)
        )
    positions_of_runs = [
        [position for _, position in sorted(order_and_position_by_run[run])]
        for run in sorted(order_and_position_by_run)
    ]
    ensembles = []
    if min(map(len, positions_of_runs)) > 1:
        ensembles.append(_ensemble_of_runs(ONE_MODE, members, positions_of_runs))
    if len(positions_of_runs) > 1:
        ensembles.append(
            _ensemble_of_runs(MULTI_MODE, members, [run[:: len(positions_of_runs)] for run in positions_of_runs])
        )
    return ensembles


def independent_members(members: Collection) -> DrawEnsemble:
    """Return the ensemble of members that count as independent, whatever the column `method` says."""
    return DrawEnsemble(MEMBERS_MODE, members, tuple((at,) for at in range(len(members))))


def _ensemble_of_runs(
    mode_name: str, members: Collection, old_positions_of_runs: Sequence[Sequence[int]]
) -> DrawEnsemble:
    new_positions_of_runs, draw_count = [], 0
    for run in old_positions_of_runs:
        new_positions_of_runs.append(tuple(range(draw_count, draw_count + len(run))))
        draw_count += len(run)
    return DrawEnsemble(
        mode_name, members.take([at for run in old_positions_of_runs for at in run]), tuple(new_positions_of_runs)
    )


def content_hash(members: Collection) -> str:
    """Return a hash of the members' contents and of the view's steps, the same wherever the members are stored.

    Rows enter the hash by their content hash, or without one by the location of their bytes in the source.
    """
    column_names = ("member", "epoch", "sha256", "path", "offset", "nbytes")
    columns = zip(*(members.rows.column(n).to_pylist() for n in column_names), strict=True)
    rows: list[list[object]] = [
        [member, epoch, sha256] if sha256 else [member, epoch, members._commit, path, offset, nbytes]
        for member, epoch, sha256, path, offset, nbytes in columns
    ]
    hashed_values = [[str(step) for step in members._view.steps], *rows]
    return hashlib.sha256(json.dumps(hashed_values).encode()).hexdigest()[:16]


def portable_citation(members: Collection) -> str:
    """Return the citation of members without the folder of this machine."""
    label, separator, revision = members.citation.rpartition("@")
    return revision if label.startswith("file:") else f"{label}{separator}{revision}"
