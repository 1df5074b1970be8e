"""Get the draws to compare: fit several methods at once, read draws from a folder, or take the caller's draws.

This is one file, because draws of all three origins become the same class.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.errors import CollectionNotFound, FormatError, UsageError
from checkpoints_zoo.formats.catalog import read_json
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.text import finite_or_null
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.method import Method, version_of
from checkpoints_zoo.methods.modes import gpu_name
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.sources import cache
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.sent_recipes import SentRecipe, Skeleton, rebuild_recipe, serialize_recipe
from checkpoints_zoo.workers import Job, choose_engine

_SLOW_METHODS = ("deep-ensemble", "hmc")  # Slow methods start first, so that all processes end at about the same time.
_DRAWS_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Draws:
    """Draws of one method, to be compared with the reference.

    Args:
        name: name of the method.
        members: the draws.
        facts: record of the draws as JSON values: title, source, settings, seconds, acceptance and the like of each
            run, trials of a search, versions; empty for draws that the caller supplied.
    """

    name: str
    members: Collection
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FitOutcome:
    """The result of a fit: the folder of its draws, or the reason why there are none."""

    root: Path
    refusal: str = ""


@dataclass(frozen=True)
class MethodFits:
    """Methods fitted to a recipe, each in its own folder, whose name has a hash of the settings.

    Args:
        recipe: recipe that names the network and its training.
        out: folder of the comparison.
        runs, draws, seed: the same arguments as in `fitting.fit`.
        search: whether a search for the best settings of each method runs before the method is fitted.
        device: device to compute on.
    """

    recipe: Recipe
    out: Path
    runs: int
    draws: int
    seed: int
    search: bool = False
    device: str = "cpu"

    @property
    def modes_folder(self) -> Path:
        return self.out / "modes"

    @cached_property
    def _fingerprint(self) -> str:
        return self.recipe.split("train").fingerprint

    def with_settings(self, method: Method) -> Method | None:
        """Return a method with the settings of its fit; None if a search has yet to find the settings."""
        if not self.search or method.independent:  # Members are trained as the recipe says.
            return method
        search_record = self._stored_search(method)
        return None if search_record is None else type(method)(**search_record["settings"])

    def folder(self, method: Method) -> Path | None:
        """Return the folder of a method's draws; None if a search has yet to find the settings."""
        configured_method = self.with_settings(method)
        return None if configured_method is None else self._draws_folder(configured_method)

    def load_draws(self, method: Method) -> Draws | None:
        """Load the draws of a method; return None if the method is not fitted yet."""
        configured_method = self.with_settings(method)
        if configured_method is None:
            return None
        root, name = self._draws_folder(configured_method), self._draws_name(configured_method)
        record = fitting.read_fit_record(root, name)
        if record is None or record.key != self._fit_key(configured_method):
            return None
        build = Skeleton(self.recipe) if self.recipe.build is not None else None
        try:
            members = load(name, source=root, architecture=build)
        except CollectionNotFound:
            return None
        search_record = {"search": self._stored_search(method)} if self.search and not method.independent else {}
        draws_facts = {
            "title": configured_method.title,
            "source": configured_method.source,
            "fit": asdict(record),
            **search_record,
        }
        return Draws(configured_method.name, members, finite_or_null(draws_facts))

    def __call__(self, method: Method, device: str) -> FitOutcome:
        """Fit a method; return the folder of the draws, or the reason why the method can't be fitted to this network on
        this machine."""
        try:
            configured_method = self.with_settings(method) or self._search(method)
            root, name = self._draws_folder(configured_method), self._draws_name(configured_method)
            if not configured_method.independent and fitting.read_fit_record(root, name) is None:
                shutil.rmtree(
                    root, ignore_errors=True
                )  # an unfinished fit starts anew; the training of members continues
            fitting.fit(
                configured_method, self.recipe, out=root, runs=self.runs, draws=self.draws, seed=self.seed,
                device=device, modes=self.modes_folder,
            )  # fmt: skip
        except UsageError as error:
            return FitOutcome(self.out, str(error))
        return FitOutcome(root)

    def __reduce__(self) -> tuple[Any, ...]:
        other_arguments = (self.out, self.runs, self.draws, self.seed, self.search, self.device)
        return _unpickle_fits, (serialize_recipe(self.recipe), *other_arguments)

    def _search(self, method: Method) -> Method:
        problem = Problem.of(
            self.recipe, held_out=fitting.SEARCH_HELD_OUT, folder=self.modes_folder, device=self.device
        )
        best_method, search_record = fitting.search(type(method), problem, seed=self.seed)
        record = {"settings": asdict(best_method), "tried": [asdict(t) for t in search_record]}
        with replace_file(self._search_path(method)) as file:
            file.write(json.dumps(finite_or_null(record), indent=1, allow_nan=False))
        return best_method

    def _stored_search(self, method: Method) -> dict[str, Any] | None:
        path = self._search_path(method)
        try:
            return read_json(path) if path.is_file() else None
        except FormatError:
            return None

    def _search_path(self, method: Method) -> Path:
        hashed_values: list[Any] = [self.recipe.hash, self._fingerprint, self.seed, fitting.SEARCH_HELD_OUT]
        hashed_values += [version] if (version := version_of(method)) > 1 else []
        digest = hashlib.sha256(json.dumps(hashed_values).encode()).hexdigest()[:8]
        return self.out / "searches" / f"{method.name}-{digest}.json"

    def _fit_key(self, method: Method) -> str:
        settings = asdict(method)
        return fitting.fit_key(
            method.name, settings, self.recipe.hash, self._fingerprint, self.runs, self.draws, self.seed,
            version_of(method), gpu_name(self.device),
        )  # fmt: skip

    def _draws_folder(self, method: Method) -> Path:
        return self.out / "draws" / f"{method.name}-{self._fit_key(method)[:8]}"

    def _draws_name(self, method: Method) -> str:
        return fitting.draws_name(self.recipe, method.name, 1 if method.independent else self.runs)


def _unpickle_fits(recipe: SentRecipe, *other_arguments: Any) -> MethodFits:
    return MethodFits(rebuild_recipe(recipe), *other_arguments)


def available_methods(names: Iterable[str] | None, collection: str) -> tuple[list[Method], dict[str, str]]:
    """Find methods by name; return the usable methods, and for each unusable method the reason why the method is left
    out.

    Args:
        names: names of the methods; None for all. A named method whose package is missing is an error.
        collection: name of the collection for which a search has chosen the settings.

    Raises:
        UsageError: there is no such method, a method is named twice, or packages of a named method are not installed.
    """
    requested_names = list(fitting.METHODS if names is None else names)
    if len(set(requested_names)) < len(requested_names):
        raise UsageError("methods", expected="each once", found=", ".join(requested_names))
    usable_methods, reason_of_left_out = [], {}
    for method in [fitting.method_by_name(name, collection) for name in requested_names]:
        missing_packages = [need for need in method.needs if not _is_installed(need)]
        if not missing_packages:
            usable_methods.append(method)
            continue
        error = UsageError(
            f"method {method.name!r}",
            expected=f"{' and '.join(missing_packages)} to be installed",
            found="none such",
            do="Run: pip install " + " ".join(f'"{need}"' for need in missing_packages),
        )
        if names is not None:
            raise error
        reason_of_left_out[method.name] = str(error)
    return usable_methods, reason_of_left_out


def _is_installed(requirement: str) -> bool:
    from packaging.requirements import Requirement

    parsed_requirement = Requirement(requirement)
    try:
        return parsed_requirement.specifier.contains(version(parsed_requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def fit_all(
    fits: MethodFits, methods: Sequence[Method], worker_count: int, say: Callable[[str], object]
) -> tuple[list[Draws], dict[str, str]]:
    """Fit the methods that are not in the folder yet, several at once; return all draws, and refusals by method.

    Args:
        fits: recipe, folder and numbers of runs and draws of the fits.
        methods: methods in the order of the table.
        worker_count: number of worker processes; each computes on one thread.
        say: function that is called with lines of text on the progress.

    Raises:
        WorkerError, StorageError: workers died repeatedly, or the disk is full; other errors that concern all methods
            are raised too.
    """
    reason_of_refused: dict[str, str] = {}
    if any(fits.load_draws(method) is None for method in methods):
        # If two calls use one folder at once, the second waits and reads the fits of the first.
        with cache.hold_key_lock(cache.writable_folder("local/fits"), str(fits.out.resolve())):
            missing_methods = [method for method in methods if fits.load_draws(method) is None]
            reason_of_refused = _fit_missing(fits, missing_methods, worker_count, say)
    loaded_draws = [fits.load_draws(method) for method in methods]
    return [draws for draws in loaded_draws if draws is not None], reason_of_refused


def _fit_missing(
    fits: MethodFits, methods: Sequence[Method], worker_count: int, say: Callable[[str], object]
) -> dict[str, str]:
    """Fit methods, several at once; return method -> reason why the method can't be fitted."""
    reason_of_refused: dict[str, str] = {}
    if any(not method.independent for method in methods):  # Methods start from modes, which are trained once here.
        say(f"{fits.recipe.name}: {fits.runs} modes for all methods …")
        Problem.of(fits.recipe, folder=fits.modes_folder, device=fits.device).modes(fits.runs)
    ordered_methods = sorted(
        methods, key=lambda m: _SLOW_METHODS.index(m.name) if m.name in _SLOW_METHODS else len(_SLOW_METHODS)
    )
    say(f"{fits.recipe.name}: fitting {', '.join(m.name for m in ordered_methods)} …")
    jobs = [Job(method.name, method) for method in ordered_methods]
    for job, outcome in choose_engine(worker_count, (fits.device,), say=say).run(fits, jobs):
        finished_draws = fits.load_draws(job.argument)
        if outcome.refusal:
            reason_of_refused[job.name] = outcome.refusal
            say(f"{job.name}: left out: {outcome.refusal}")
        elif finished_draws is not None:
            draws_text = f"{finished_draws.members.name} in {fits.folder(job.argument)}"
            seconds = finished_draws.facts["fit"]["seconds"]
            say(f"{job.name}: {len(finished_draws.members):,} draws in {seconds:.0f} s: {draws_text}")
    return reason_of_refused


def check_custom_draws(draws: Mapping[str, Collection] | None, used_names: Iterable[str]) -> list[Draws]:
    """Check draws that the caller supplied; return the checked draws.

    Args:
        draws: name of the method -> its draws.
        used_names: names of the fitted methods.

    Raises:
        UsageError: draws are no collection, or a name is malformed or taken.
    """
    checked_draws = []
    if draws is not None and not isinstance(draws, Mapping):
        raise UsageError("draws", expected="a dict of name -> Collection", found=type(draws).__name__)
    for name, members in (draws or {}).items():
        if not _DRAWS_NAME_PATTERN.fullmatch(str(name)) or name in set(used_names) | {"reference"}:
            raise UsageError(
                f"name {name!r} of draws",
                expected="letters, digits, dots and dashes, and no method's that is fitted",
                found="another",
            )
        if not isinstance(members, Collection):
            raise UsageError(
                f"draws {name!r}",
                expected="a Collection, as `zoo.load` and `zoo.from_samples` give it",
                found=type(members).__name__,
            )
        checked_draws.append(Draws(name, members))
    return checked_draws
