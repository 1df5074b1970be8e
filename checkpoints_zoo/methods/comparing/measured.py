"""One cell of a comparison: which draws, in which mode, what is measured; and the work that gives its values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.evaluation.metrics import Plan
from checkpoints_zoo.methods.comparing.comparison import REFERENCE
from checkpoints_zoo.methods.comparing.estimates import Closeness, Uncertainty
from checkpoints_zoo.methods.comparing.modes import ONE, Mode, content
from checkpoints_zoo.populations.corollary_check import corollary

DEFINITION = 1  # of the figures: cells of another one are measured anew
MEASURED = ("closeness", "uncertainty", "corollary")


@dataclass(frozen=True)
class Task:
    """A cell to be measured.

    Args:
        method: name of the draws.
        mode: the draws.
        run: position of the run that is measured alone, in one mode; None for all draws of the mode together.
        measured: "closeness" (MMD and NS), "uncertainty" (figures of `zoo.evaluate`), "corollary".
    """

    method: str
    mode: Mode
    run: int | None
    measured: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.place} {self.measured}"

    @property
    def place(self) -> str:
        """The mode, and the run of one mode, from 0."""
        return self.mode.name + ("" if self.run is None else str(self.run))

    @property
    def draws(self) -> Collection:
        return self.mode.members if self.run is None else self.mode.run(self.run)

    def plan(self, seed: int, subsets: int) -> Plan | None:
        """Return the subsets for a jackknife over runs or members, None for a run alone."""
        return None if self.run is not None else self.mode.plan(seed, subsets)


def tasks_of(method: str, mode: Mode) -> Iterator[Task]:
    """List the cells of draws in one mode: those of one mode run by run, with the corollary of the first alone."""
    if mode.name != ONE:
        yield from (Task(method, mode, None, what) for what in MEASURED)
        return
    for run in range(len(mode.runs)):
        yield from (Task(method, mode, run, what) for what in MEASURED if run == 0 or what != "corollary")


@dataclass(frozen=True)
class Measuring:
    """The work of all cells.

    Args:
        closeness, uncertainty: how they are measured.
    """

    closeness: Closeness
    uncertainty: Uncertainty

    @cached_property
    def _reference(self) -> str:
        return content(self.closeness.reference)

    def key(self, task: Task) -> dict[str, Any]:
        """Return what decides a cell's values."""
        key: dict[str, Any] = {
            "definition": DEFINITION, "method": task.method, "mode": task.place, "measured": task.measured,
            "draws": content(task.draws), "seed": self.closeness.seed,
        }  # fmt: skip
        if task.run is None:
            key |= {"subsets": self.closeness.subsets, "runs": [list(run) for run in task.mode.runs]}
        if task.measured == "closeness":
            key |= {"reference": self._reference, "permutations": self.closeness.permutations}
        if task.measured == "uncertainty":
            outside = self.uncertainty.outside
            key |= {
                "data": self.uncertainty.inside.fingerprint,
                "ood": None if outside is None else outside.fingerprint,
            }
        return key

    def __call__(self, task: Task, device: str) -> dict[str, Any]:
        """Measure a cell; return its values as JSON values."""
        plan = task.plan(self.closeness.seed, self.closeness.subsets)
        if task.measured != "uncertainty":
            with suppress(SymmetryError):
                task.mode.members.symmetry_table  # noqa: B018 (derived once, its runs have it then)
        if task.measured == "closeness":
            near = self.closeness.halves() if task.method == REFERENCE else self.closeness.of(task.draws, plan)
            return {name: {group: x.to_json() for group, x in groups.items()} for name, groups in near.items()}
        if task.measured == "uncertainty":
            if task.method == REFERENCE:
                return self.uncertainty.curve(task.draws)
            return {"figures": {n: x.to_json() for n, x in self.uncertainty.of(task.draws, plan).items()}}
        try:
            found = corollary(task.draws, seed=self.closeness.seed)
        except SymmetryError:
            return {"p": None, "layers": {}}
        return {"p": found.p, "layers": {layer.name: layer.p for layer in found.layers}}
