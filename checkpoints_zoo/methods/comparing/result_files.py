"""The cells of a comparison: each is one measurement of some draws, stored in one JSON file.

A cell's file is written under a temporary name and renamed; reading a cell checks the file's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.evaluation.metrics import Plan
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.methods.comparing.comparison import REFERENCE
from checkpoints_zoo.methods.comparing.draw_ensembles import MEMBERS_MODE, ONE_MODE, DrawEnsemble, content_hash
from checkpoints_zoo.methods.comparing.measures import Closeness, Predictive, Uncertainty
from checkpoints_zoo.populations.channel_exchangeability import corollary
from checkpoints_zoo.populations.independent_units import unit_numbers

DEFINITION_VERSION = 1  # Version of the figures' definitions; cells of another version are measured anew.
MEASUREMENTS = ("closeness", "predictive", "uncertainty", "corollary")
FROM_LOGITS = ("predictive", "uncertainty")  # Measurements that need no weights where logits are stored.

CellKey = Mapping[str, Any]
CellValues = dict[str, Any]


@dataclass(frozen=True)
class CellTask:
    """The measurement of one cell.

    Args:
        method: name of the method, or of the user's own draws.
        mode: the draws, grouped into the ensembles of one mode.
        run: position of the run that is measured alone, in mode "one"; None for all draws of the mode together.
        measured: kind of measurement: "closeness" (MMD and NS), "predictive" (agreement and total variation),
            "uncertainty" (figures of `zoo.evaluate`) or "corollary".
    """

    method: str
    mode: DrawEnsemble
    run: int | None
    measured: str

    @property
    def name(self) -> str:
        return f"{self.method} {self.mode_and_run} {self.measured}"

    @property
    def mode_and_run(self) -> str:
        """Name of the mode; in mode "one" the number of the run follows, counted from 0."""
        return self.mode.name + ("" if self.run is None else str(self.run))

    @property
    def draws(self) -> Collection:
        return self.mode.members if self.run is None else self.mode.run(self.run)

    def plan(self, seed: int, subsets: int) -> Plan | None:
        """Return the subsets of a jackknife over runs or members; None for a single run."""
        return None if self.run is not None else self.mode.plan(seed, subsets)


def cell_tasks(method: str, mode: DrawEnsemble) -> Iterator[CellTask]:
    """List the cells of draws in one mode.

    Mode "one" has cells for each run and no test of the corollary, since a run is only one independent unit.
    """
    if mode.name != ONE_MODE:
        yield from (CellTask(method, mode, None, what) for what in MEASUREMENTS)
        return
    for run in range(len(mode.runs)):
        yield from (CellTask(method, mode, run, what) for what in MEASUREMENTS if what != "corollary")


@dataclass(frozen=True)
class CellMeasurer:
    """Measures the values of any cell.

    Args:
        closeness, predictive, uncertainty: objects that measure distances of weights, distances of predictions, and the
            figures of ensembles.
    """

    closeness: Closeness
    predictive: Predictive
    uncertainty: Uncertainty

    @cached_property
    def _reference_hash(self) -> str:
        return content_hash(self.closeness.reference)

    def key(self, task: CellTask) -> dict[str, Any]:
        """Return everything that determines a cell's values: method, mode, draws, images, seed and settings."""
        key: dict[str, Any] = {
            "definition": DEFINITION_VERSION, "method": task.method, "mode": task.mode_and_run,
            "measured": task.measured, "draws": content_hash(task.draws), "seed": self.closeness.seed,
        }  # fmt: skip
        if task.mode.name != MEMBERS_MODE and task.measured not in FROM_LOGITS:
            key |= {"exchanged": "runs"}  # Versions up to 0.1 exchanged single draws.
        if task.run is None:
            key |= {"subsets": self.closeness.subsets, "runs": [list(run) for run in task.mode.runs]}
        if task.measured == "closeness":
            key |= {"reference": self._reference_hash, "permutations": self.closeness.permutations}
        if task.measured == "predictive":
            key |= {"reference": self._reference_hash, "data": self.predictive.test_images.fingerprint}
        if task.measured == "uncertainty":
            ood_images = self.uncertainty.ood_images
            key |= {
                "data": self.uncertainty.test_images.fingerprint,
                "ood": None if ood_images is None else ood_images.fingerprint,
                "figures": 2,  # Versions up to 0.1 had narrower intervals, and ECE and AUROC with other last digits.
            }
        return key

    def __call__(self, task: CellTask, device: str) -> dict[str, Any]:
        """Measure a cell; return its values as JSON values."""
        plan = task.plan(self.closeness.seed, self.closeness.subsets)
        if task.measured not in FROM_LOGITS:
            with suppress(SymmetryError):
                task.mode.members.symmetry_table  # noqa: B018 (derived once for all runs)
        if task.measured == "closeness":
            distances = (
                self.closeness.compare_halves()
                if task.method == REFERENCE
                else self.closeness.measure(task.draws, plan)
            )
            return {name: {group: x.to_json() for group, x in groups.items()} for name, groups in distances.items()}
        if task.measured == "predictive":
            is_reference = task.method == REFERENCE
            measure = (
                self.predictive.compare_halves if is_reference else partial(self.predictive.measure, task.draws, plan)
            )
            return {"figures": {n: x.to_json() for n, x in measure().items()}}
        if task.measured == "uncertainty":
            if task.method == REFERENCE:
                return self.uncertainty.measure_curve(task.draws)
            return {"figures": {n: x.to_json() for n, x in self.uncertainty.measure(task.draws, plan).items()}}
        if len(set(unit_numbers(task.draws)[0])) < 2:
            return {"p": None, "layers": {}}
        try:
            test = corollary(task.draws, seed=self.closeness.seed)
        except SymmetryError:
            return {"p": None, "layers": {}}
        return {"p": test.p, "layers": {layer.name: layer.p for layer in test.layers}}


@dataclass(frozen=True)
class CellFiles:
    """A folder of cells.

    Args:
        folder: folder of the cells' files; the folder is created with the first cell.
        say: function that is called with messages about damaged files.
    """

    folder: Path
    say: Callable[[str], object] = field(default=lambda text: None, repr=False)

    def path(self, key: CellKey) -> Path:
        """Return the path of a cell, whose name has the method, the mode, the measure and a hash of the key."""
        digest = hashlib.sha256(_canonical_json(key).encode()).hexdigest()[:12]
        return self.folder / f"{key['method']}-{key['mode']}-{key['measured']}-{digest}.json"

    def read(self, key: CellKey) -> CellValues | None:
        """Read the values of a cell; return None if the cell is not measured yet, or if its file is damaged, which
        `say` reports."""
        path = self.path(key)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            content = None
        if not isinstance(content, dict) or content.get("sha256") != _checksum(
            content.get("key"), content.get("values")
        ):
            self.say(f"{path} is damaged: measured anew")
            return None
        if _canonical_json(content["key"]) != _canonical_json(key):
            self.say(f"{path} is another cell: measured anew")
            return None
        values: CellValues = content["values"]
        return values

    def write(self, key: CellKey, values: CellValues) -> CellValues:
        """Write the values of a cell; return the values that `read` will return.

        Raises:
            StorageError: the file can't be written.
        """
        content = {"key": dict(key), "values": values, "sha256": _checksum(key, values)}
        text = json.dumps(content, indent=1, allow_nan=False)
        with disk.translate_write_errors(self.folder), replace_file(self.path(key)) as file:
            file.write(text)
        stored: CellValues = json.loads(text)["values"]
        return stored


def _canonical_json(json_value: Any) -> str:
    return json.dumps(json_value, sort_keys=True)


def _checksum(cell_key: Any, cell_values: Any) -> str:
    return hashlib.sha256(_canonical_json([cell_key, cell_values]).encode()).hexdigest()
