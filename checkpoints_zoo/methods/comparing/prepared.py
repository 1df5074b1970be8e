"""A comparison with checked arguments, which lists and runs the remaining fits and measurements."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.text import finite_or_null
from checkpoints_zoo.methods.comparing.comparison import REFERENCE, Comparison, Row
from checkpoints_zoo.methods.comparing.draw_ensembles import (
    MEMBERS_MODE,
    group_draws,
    independent_members,
    portable_citation,
)
from checkpoints_zoo.methods.comparing.draws import Draws, MethodFits, fit_all
from checkpoints_zoo.methods.comparing.equivalent_size import equivalent_sizes
from checkpoints_zoo.methods.comparing.estimates import Estimate, mean_over_runs
from checkpoints_zoo.methods.comparing.measures import NS_PERMUTE, NS_SCALE, Closeness, Predictive, Uncertainty
from checkpoints_zoo.methods.comparing.result_files import (
    FROM_LOGITS,
    MEASUREMENTS,
    CellFiles,
    CellMeasurer,
    CellTask,
    cell_tasks,
)
from checkpoints_zoo.methods.deep_ensemble import check_no_shared_members
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.populations.independent_units import INDEPENDENT_METHOD
from checkpoints_zoo.populations.kernels import ALL_TENSORS
from checkpoints_zoo.workers import Job, choose_engine, pickle_for_worker

Say = Callable[[str], object]


@dataclass(frozen=True)
class RemainingWork:
    """The remaining work of a comparison.

    Args:
        fits: methods that have to be fitted; the measurements of their draws are not counted.
        cells: names of the measurements to be made of existing draws.
        found: number of measurements that exist already.
        left_out: method -> reason why it can't be fitted here.
        folders: method -> source of its draws, for fitted methods.
    """

    fits: tuple[str, ...]
    cells: tuple[str, ...]
    found: int
    left_out: Mapping[str, str]
    folders: Mapping[str, str]


@dataclass(frozen=True)
class PreparedComparison:
    """A comparison with checked arguments, before anything is fitted.

    Args:
        name: name of the collection whose recipe the methods are fitted to.
        reference: the population.
        closeness, predictive, uncertainty: objects that measure draws: distances of their weights and of their
            predictions to the reference, and their figures as an ensemble.
        out: folder for draws, measurements and comparison.json.
        fits: recipe, folder and numbers of the fits; None if nothing is fitted.
        methods: methods to be fitted.
        named: whether the caller named the methods, so that none may be left out.
        unavailable: method -> reason why it can't be fitted here.
        custom_draws: draws that the caller supplied.
        workers: number of worker processes.
        say: function that is called with a line of text on the progress.
    """

    name: str
    reference: Collection
    closeness: Closeness
    predictive: Predictive
    uncertainty: Uncertainty
    out: Path
    fits: MethodFits | None
    methods: tuple[Method, ...]
    named: bool
    unavailable: Mapping[str, str]
    custom_draws: tuple[Draws, ...]
    workers: int
    say: Say = field(repr=False)

    @cached_property
    def cell_files(self) -> CellFiles:
        return CellFiles(self.out / "cells", self.say)

    @cached_property
    def cell_measurer(self) -> CellMeasurer:
        return CellMeasurer(self.closeness, self.predictive, self.uncertainty)

    def remaining_work(self) -> RemainingWork:
        """Return the fits and measurements that `run` would make."""
        fitted_draws = {m.name: None if self.fits is None else self.fits.load_draws(m) for m in self.methods}
        tasks = self._tasks([*(d for d in fitted_draws.values() if d is not None), *self.custom_draws])
        missing_cells = tuple(task.name for task in tasks if self.cell_files.read(self.cell_measurer.key(task)) is None)
        finished_folders = {
            m.name: str(self.fits.folder(m)) for m in self.methods if self.fits and fitted_draws[m.name] is not None
        }
        missing_fits = tuple(n for n, d in fitted_draws.items() if d is None)
        return RemainingWork(
            missing_fits, missing_cells, len(tasks) - len(missing_cells), self.unavailable, finished_folders
        )

    def run(self, *, from_logits: bool = False) -> Comparison:
        """Make the missing fits and measurements; write comparison.json into the folder, and return the comparison.

        Args:
            from_logits: whether everything that logits determine is measured again, from the stored logits.

        Raises:
            StorageError: the folder can't be written to.
            UsageError: a named method can't be fitted, or the reference contains some of the trained members.
        """
        disk.check_folder(self.out)
        draws, left_out = list[Draws](), dict(self.unavailable)
        if self.fits is not None and self.methods:
            draws, reason_of_refused = fit_all(self.fits, self.methods, self.workers, self.say)
            if reason_of_refused and self.named:
                name, reason = next(iter(reason_of_refused.items()))
                raise UsageError(f"method {name!r}", expected="one that can be fitted here", found=reason)
            left_out |= reason_of_refused
            draws = [_check_fresh(d, self.reference) for d in draws]
        draws += self.custom_draws
        for custom_draws in self.custom_draws:
            if shared_count := _count_shared_members(custom_draws.members, self.reference):
                self.say(
                    f"{custom_draws.name}: {shared_count:,} of its draws are members of the reference too: no p-values"
                )
        tasks = self._tasks(draws)
        values_of_cells = {
            task.name: None
            if from_logits and task.measured in FROM_LOGITS
            else self.cell_files.read(self.cell_measurer.key(task))
            for task in tasks
        }
        missing_tasks = [task for task in tasks if values_of_cells[task.name] is None]
        if missing_tasks:
            if any(task.measured == "predictive" and task.method != REFERENCE for task in missing_tasks):
                self.predictive.reference_probabilities  # noqa: B018 (computed once for all workers)
            self.say(f"{self.name}: measuring {len(missing_tasks)} of {len(tasks)} cells …")
            for task, measured_values in self._measure_cells(missing_tasks):
                values_of_cells[task.name] = self.cell_files.write(self.cell_measurer.key(task), measured_values)
        comparison = self._assemble_comparison(draws, tasks, values_of_cells, left_out)
        comparison.write_json(self.out / "comparison.json")
        return comparison

    def _tasks(self, draws: Iterable[Draws]) -> list[CellTask]:
        """List the cells: all methods, each with its modes, then the reference."""
        tasks = [t for d in draws for mode in group_draws(d.name, d.members) for t in cell_tasks(d.name, mode)]
        return [*tasks, *cell_tasks(REFERENCE, independent_members(self.reference))]

    def _measure_cells(self, tasks: list[CellTask]) -> Iterable[tuple[CellTask, dict[str, Any]]]:
        worker_count = min(self.workers, len(tasks))
        if worker_count > 1:
            try:
                pickle_for_worker((self.cell_measurer, tasks))
            except UsageError as error:
                self.say(f"measuring in one process: {error.found}")
                worker_count = 1
        jobs = (Job(task.name, task) for task in tasks)
        for job, cell_values in choose_engine(worker_count, (self.closeness.device,), say=self.say).run(
            self.cell_measurer, jobs
        ):
            yield job.argument, cell_values

    def _assemble_comparison(
        self, draws: list[Draws], tasks: list[CellTask], cell_values: Mapping[str, Any], left_out: Mapping[str, str]
    ) -> Comparison:
        growth = cell_values[f"{REFERENCE} {MEMBERS_MODE} uncertainty"]["growth"]
        tasks_by_row: dict[tuple[str, str], list[CellTask]] = {}
        for task in tasks:
            tasks_by_row.setdefault((task.method, task.mode.name), []).append(task)
        test_images, ood_images = self.uncertainty.test_images, self.uncertainty.ood_images
        settings = {
            "permutations": self.closeness.permutations,
            "subsets": self.closeness.subsets,
            "seed": self.closeness.seed,
            "runs": None if self.fits is None else self.fits.runs,
            "per_run": None if self.fits is None else self.fits.draws,
            "scale": NS_SCALE,
            "permute": NS_PERMUTE,
            "cite_as": self.reference.description.citation,
            "inputs": len(test_images),
            "ood_inputs": 0 if ood_images is None else len(ood_images),
            "versions": {n: version(n) for n in ("checkpoints-zoo", "torch")} | {"python": platform.python_version()},
        }
        return Comparison(
            collection=self.name,
            reference=portable_citation(self.reference),
            members=len(self.reference),
            data=arguments.report_image_name(test_images),
            ood="" if ood_images is None else arguments.report_image_name(ood_images),
            rows=tuple(_row_of_cells(cell_tasks, cell_values, growth) for cell_tasks in tasks_by_row.values()),
            methods=finite_or_null(
                {
                    d.name: {
                        "draws": portable_citation(d.members),
                        "cite_as": d.members.description.citation,
                        **d.facts,
                    }
                    for d in draws
                }
            ),
            left_out=left_out,
            settings=settings,
        )


def _check_fresh(draws: Draws, reference: Collection) -> Draws:
    """Check by hashes that the reference contains none of the trained members; return the draws, with the result of the
    check in `facts`.

    Raises:
        UsageError: the reference contains some of the trained members.
    """
    columns = [members.rows.column(n) for members in (draws.members, reference) for n in ("method", "sha256")]
    if set(columns[0].to_pylist()) != {INDEPENDENT_METHOD}:
        return draws
    has_all_values = columns[1].null_count + columns[3].null_count == 0
    if has_all_values:
        check_no_shared_members(draws.members, reference)
    return replace(draws, facts={**draws.facts, "fresh": True if has_all_values else None})


def _count_shared_members(draws: Collection, reference: Collection) -> int:
    """Count, by their hashes, the draws that are members of the reference."""
    draw_counts, reference_counts = (Counter(c.rows.column("sha256").to_pylist()) for c in (draws, reference))
    return sum(count for digest, count in draw_counts.items() if digest is not None and digest in reference_counts)


def _row_of_cells(tasks: list[CellTask], cell_values: Mapping[str, Any], growth: Mapping[str, Any]) -> Row:
    """Make the row of a method and mode from the row's cells; figures of single runs are averaged."""
    values_by_measurement = {what: [cell_values[t.name] for t in tasks if t.measured == what] for what in MEASUREMENTS}
    runs_measured_alone, first_task, corollary_values = (
        tasks[0].run is not None,
        tasks[0],
        values_by_measurement["corollary"],
    )
    distances_by_measure = {
        name: {
            group: _join_runs(
                name, [cell[name][group] for cell in values_by_measurement["closeness"]], runs_measured_alone
            )
            for group in groups
        }
        for name, groups in values_by_measurement["closeness"][0].items()
    }
    figures = {
        name: _join_runs(name, [cell["figures"][name] for cell in cells], runs_measured_alone)
        for cells in (values_by_measurement["predictive"], values_by_measurement["uncertainty"])
        for name in cells[0]["figures"]
    }
    return Row(
        method=first_task.method,
        mode=first_task.mode.name,
        runs=len(first_task.mode.runs),
        draws=first_task.mode.draws,
        figures={**{n: groups[ALL_TENSORS] for n, groups in distances_by_measure.items()}, **figures},
        layers={n: {g: x for g, x in groups.items() if g != ALL_TENSORS} for n, groups in distances_by_measure.items()},
        corollary=corollary_values[0]["p"] if corollary_values else None,
        corollary_layers=corollary_values[0]["layers"] if corollary_values else {},
        worth=equivalent_sizes(growth, figures),
    )


def _join_runs(figure_name: str, estimates_json: list[dict[str, Any]], runs_measured_alone: bool) -> Estimate:
    """Average a figure over runs that were measured alone; return the only estimate if all runs were measured
    together."""
    estimates = [Estimate.from_json(cell) for cell in estimates_json]
    if not runs_measured_alone:
        return estimates[0]
    return mean_over_runs(figure_name, [x.value for x in estimates])
