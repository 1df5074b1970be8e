"""Fit methods by name, store their draws as a collection, and search for settings.

This is one file, because a search makes fits, and a fit is found again by the key under which it was stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.text import nearest_name, whole_number
from checkpoints_zoo.interop.checkpoints import Facts
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.interop.samples import from_samples
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble, train_members
from checkpoints_zoo.methods.dropout import Dropout
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.laplace import Laplace, LaplaceLastLayer
from checkpoints_zoo.methods.method import Method, Run, version_of
from checkpoints_zoo.methods.modes import Tensors, gpu_name
from checkpoints_zoo.methods.problem import FORWARD_BATCH, Problem
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.methods.swag import Swag
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.training.recipe import Recipe

DEFAULT_RUNS, DEFAULT_DRAWS = 10, 100  # Default number of runs of a fit, and of draws of each run.
SEARCH_HELD_OUT = 250  # Number of training images that a search holds out.

METHODS: dict[str, type[Method]] = {
    "dropout": Dropout,
    "vi": MeanField,
    "swag": Swag,
    "laplace": Laplace,
    "laplace-last-layer": LaplaceLastLayer,
    "sgld": Sgld,
    "sghmc": Sghmc,
    "csghmc": CyclicalSghmc,
    "hmc": Hmc,
    "snapshot": Snapshot,
    "deep-ensemble": DeepEnsemble,
}

# Settings with the lowest NLL in a search. A method with each setting was fitted from one mode to all training images
# except the last 250 (in rank order); the ensemble of the draws was measured on the last 250. The test split was not
# used. For other collections methods have their default settings.
CHOSEN_SETTINGS: Mapping[str, Mapping[str, Method]] = {
    "convnet-digits": {  # All results of the search are in docs/studies/comparison.json.
        "dropout": Dropout(rate=0.02),
        "vi": MeanField(lr=0.01, steps=1000, temperature=0.03),
        "swag": Swag(lr=0.05, epochs=20, scale=2.0),
        "laplace": Laplace("evidence", 0.01),
        "laplace-last-layer": LaplaceLastLayer("weight-decay", 0.03),
        "sgld": Sgld(lr=0.03, temperature=0.03, burn_in=500, thinning=20),
        "sghmc": Sghmc(lr=0.01, friction=0.1, temperature=0.3, burn_in=500, thinning=20),
        "csghmc": CyclicalSghmc(lr=0.03, friction=0.1, temperature=1.0, cycles=5, steps=500),
        "hmc": Hmc(temperature=1.0, steps=6, warmup=20),
        "snapshot": Snapshot(lr=0.1, cycle=1),
    },
    "resnet8-digits": {
        "dropout": Dropout(rate=0.01),
        "vi": MeanField(lr=0.01, steps=300, temperature=0.1),
        "swag": Swag(lr=0.05, epochs=20, scale=0.5),
        "laplace": Laplace("evidence", 0.003),
        "laplace-last-layer": LaplaceLastLayer("weight-decay", 0.01),
        "sgld": Sgld(lr=0.03, temperature=0.03, burn_in=100, thinning=5),
        "sghmc": Sghmc(lr=0.03, friction=0.3, temperature=0.03, burn_in=100, thinning=5),
        "csghmc": CyclicalSghmc(lr=0.1, friction=0.3, temperature=0.1, cycles=3, steps=150),
        "snapshot": Snapshot(lr=0.05, cycle=1),
    },
}


def method_by_name(name: str, collection: str) -> Method:
    """Return a method with the settings chosen for a collection, or its defaults.

    Raises:
        UsageError: there is no such method; the nearest name is given.

    >>> method_by_name("swag", "convnet-digits").name
    'swag'
    """
    if name not in METHODS:
        raise UsageError(
            f"method {name!r}",
            expected=f"one of {', '.join(METHODS)}",
            found="no such name",
            do=f"Did you mean {nearest_name(name, METHODS)}?",
        )
    return CHOSEN_SETTINGS.get(collection, {}).get(name) or METHODS[name]()


@dataclass(frozen=True)
class FitRecord:
    """The record of a method's draws in a folder.

    Args:
        collection: name of the collection.
        method: name of the method.
        settings: settings of the method.
        recipe, recipe_hash, data_fingerprint: recipe and training images of the fit.
        runs, draws, seed: the same arguments as in `fit`.
        seconds: time of fitting and drawing.
        facts: for each run, a mapping name -> number, such as acceptance and evidence.
        versions: versions of this package, of torch, and of the packages that the method needs.
        method_version: version of the method, see `version_of`; records by version 0.1 of this package have no
            `method_version`.
        device: name of the GPU; "" for a processor, and in records by version 0.1 of this package.
    """

    collection: str
    method: str
    settings: Mapping[str, Any]
    recipe: str
    recipe_hash: str
    data_fingerprint: str
    runs: int
    draws: int
    seed: int
    seconds: float
    facts: Sequence[Mapping[str, float]]
    versions: Mapping[str, str]
    method_version: int = 1
    device: str = ""

    @property
    def key(self) -> str:
        """Hash of everything that decides the draws."""
        return fit_key(self.method, self.settings, self.recipe_hash, self.data_fingerprint, self.runs, self.draws,
                       self.seed, self.method_version, self.device)  # fmt: skip


def fit_key(
    method: str,
    settings: Mapping[str, Any],
    recipe_hash: str,
    fingerprint: str,
    runs: int,
    draws: int,
    seed: int,
    version: int,
    device: str = "",
) -> str:
    """Return 16 hex digits of the sha256 over everything that decides a method's draws.

    Version 1 and an empty name of the GPU are left out of the hashed text, so that keys of records without them stay
    the same.
    """
    hashed_values: list[Any] = [method, dict(settings), recipe_hash, fingerprint, runs, draws, seed]
    hashed_values += [version] if version > 1 else []
    hashed_values += [device] if device else []
    return hashlib.sha256(json.dumps(hashed_values, sort_keys=True).encode()).hexdigest()[:16]


def draws_name(recipe: Recipe, method: str, runs: int) -> str:
    """Return the name of a method's collection: COLLECTION-METHOD, or COLLECTION-METHOD-multi with several runs.

    >>> from checkpoints_zoo.training.recipes import convnet_digits
    >>> draws_name(convnet_digits(), "swag", 10), draws_name(convnet_digits(), "swag", 1)
    ('convnet-digits-swag-multi', 'convnet-digits-swag')
    """
    return f"{recipe.name}-{method}{'-multi' if runs > 1 else ''}"


def fit(
    method: str | Method,
    recipe: Recipe,
    *,
    out: str | Path,
    runs: int = DEFAULT_RUNS,
    draws: int = DEFAULT_DRAWS,
    seed: int = 0,
    modes: str | Path | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
) -> Collection:
    """Fit a method to a recipe's training images, and store its draws; return their collection.

    If the folder has draws with the same settings, the draws of the folder are returned. Members are numbered run by
    run. A method of independent members trains `draws` members, whatever `runs` is.

    Args:
        method: the method with its settings; or its name, for the settings that were chosen for the recipe.
        recipe: recipe of the network; its weight decay determines the prior.
        out: folder of the source.
        runs: number of runs, each from another mode.
        draws: number of draws of each run.
        seed: seed of all random numbers.
        modes: folder of trained modes; None for the folder `modes` in `out`.
        device: torch device for the computation.
        say: function that is called with a line of text on the progress.

    Raises:
        UsageError: there is no such method, the method can't be used for the network, a package is missing, or the
            folder has other draws under the same name.
        StorageError: the disk is full.
    """
    chosen_method = method_by_name(method, recipe.name) if isinstance(method, str) else method
    for option_name, number, smallest in (("runs", runs, 1), ("draws", draws, 2)):
        if (integer := whole_number(number)) is None or integer < smallest:
            raise UsageError(option_name, expected=f"a whole number from {smallest}", found=repr(number)[:80])
    runs, draws, seed = int(runs), int(draws), arguments.check_seed(seed)
    root = Path(out).expanduser().absolute()
    name = draws_name(recipe, chosen_method.name, 1 if chosen_method.independent else runs)
    settings, version = asdict(chosen_method), version_of(chosen_method)
    fingerprint = recipe.split("train").fingerprint
    gpu = gpu_name(device)
    key = fit_key(chosen_method.name, settings, recipe.hash, fingerprint, runs, draws, seed, version, gpu)
    architecture = recipe.skeleton if recipe.build is not None else None
    stored_fit = read_fit_record(root, name)
    if FolderSource(root, root.as_uri()).manifest_path(name).is_file():
        if stored_fit is not None and stored_fit.key == key:
            return load(name, source=root, architecture=architecture)
        # If there are draws without a record, the fit was killed at its end; a new fit gives the same draws.
        if stored_fit is not None and not chosen_method.independent:
            raise UsageError(
                f"collection {name} in folder {root}",
                expected=f"none, or draws of {chosen_method.name} with settings "
                f"{_settings_text(settings, version, gpu)}",
                found=f"settings {_settings_text(stored_fit.settings, stored_fit.method_version, stored_fit.device)}",
                do=f"Give another folder, or delete manifests/{name}.parquet there",
                collection=name,
            )
    start_time = time.monotonic()
    say(f"{name}: {chosen_method.title} …")
    facts: Sequence[Mapping[str, float]] = ()
    if chosen_method.independent:
        train_members(recipe, root, name, draws, device, say)
    else:
        problem = Problem.of(recipe, folder=root / "modes" if modes is None else Path(modes), device=device)
        finished_runs = chosen_method.fit(problem, runs, draws, seed)
        with torch.random.fork_rng(devices=[]):  # Networks are built on the CPU, whose generator is restored.
            _store_draws(finished_runs, chosen_method, recipe, root, name, settings, device)
        facts = [dict(run.facts) for run in finished_runs]
    seconds = time.monotonic() - start_time
    record = FitRecord(name, chosen_method.name, settings, recipe.name, recipe.hash, fingerprint, runs, draws, seed,
                       seconds, facts, _package_versions(chosen_method), version, gpu)  # fmt: skip
    with replace_file(_record_path(root, name)) as file:
        file.write(json.dumps(asdict(record), indent=1))
    say(f"{name}: done in {seconds:.0f} s")
    return load(name, source=root, architecture=architecture)


def _settings_text(settings: Mapping[str, Any], version: int, device: str) -> str:
    return (
        json.dumps(dict(settings))
        + (f" and version {version}" if version > 1 else "")
        + (f" on {device}" if device else "")
    )


def read_fit_record(root: Path, collection: str) -> FitRecord | None:
    """Read the record of a method's draws in a folder; return the record, or None if there is no readable record."""
    try:
        return FitRecord(**json.loads(_record_path(root, collection).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _record_path(root: Path, collection: str) -> Path:
    return root / "fits" / f"{collection}.json"


def _store_draws(
    finished_runs: Sequence[Run],
    method: Method,
    recipe: Recipe,
    root: Path,
    collection: str,
    settings: Mapping[str, Any],
    device: str,
) -> None:
    def iterate_states() -> Iterator[Tensors]:
        for run in finished_runs:
            for at in range(len(next(iter(run.states.values())))):
                yield {n: t[at] for n, t in run.states.items()}

    draw_counts = [len(next(iter(run.states.values()))) for run in finished_runs]
    train_images, test_images = recipe.split("train"), recipe.split("test")
    facts: Facts = {
        "title": f"{method.title} around members of {recipe.name}",
        "dataset": recipe.dataset,
        "classes": train_images.classes,
        "preprocessing": recipe.preprocess,
        "licence": recipe.licence,
        "citation": method.source,
    }
    from_samples(
        iterate_states(),
        recipe.architecture if recipe.build is None else recipe.skeleton,
        method=method.name,
        out=root,
        name=collection,
        arguments=None if recipe.build is not None else recipe.arguments,
        run=[run for run, count in enumerate(draw_counts) for _ in range(count)],
        columns={
            "recipe": f"{recipe.name} {method.name} {json.dumps(settings, sort_keys=True)}",
            "data_fingerprint": train_images.fingerprint,
            "weight_decay": recipe.weight_decay,
            "torch_version": torch.__version__,
            "code_version": version("checkpoints-zoo"),
        },
        evaluate=test_images,
        device=device,
        **facts,
    )


def _package_versions(method: Method) -> dict[str, str]:
    package_names = [need.split(">")[0].split("<")[0].split("=")[0] for need in method.needs]
    return {name: version(name) for name in ("checkpoints-zoo", "torch", *package_names)}


@dataclass(frozen=True)
class Trial:
    """Settings that a search tried, and the figures of their draws on the held-out images.

    Args:
        method: name of the method.
        settings: settings of the method.
        accuracy, nll: accuracy, and negative log-likelihood in nats, of the mean probabilities of a run's draws,
            averaged over the runs.
        seconds: time of the fit.
        failed: reason why there are no figures; "" if there are figures.
    """

    method: str
    settings: Mapping[str, Any]
    accuracy: float
    nll: float
    seconds: float
    failed: str = ""


def search(
    method_class: type[Method], problem: Problem, *, runs: int = 2, draws: int = 50, seed: int = 0
) -> tuple[Method, Sequence[Trial]]:
    """Fit a method with each of its grid's settings; return the settings with the lowest NLL, and all trials.

    Args:
        method_class: class of the method.
        problem: problem with held-out images.
        runs, draws: numbers of runs and draws of each fit.
        seed: seed of the fits.

    Raises:
        UsageError: the problem has no held-out images, or no settings have finite figures.
    """
    if problem.held_out is None:
        raise UsageError("problem of a search", expected="images held out", found="none", do="Problem.of(…, held_out=)")
    trials, candidates = [], list(method_class.grid(problem))
    for method in candidates:
        start_time = time.monotonic()
        try:
            finished_runs = method.fit(problem, runs, draws, seed)
            accuracies_and_nlls = [held_out_accuracy_and_nll(problem, run.states) for run in finished_runs]
            accuracy, nll = (sum(values) / len(values) for values in zip(*accuracies_and_nlls, strict=True))
            failure = ""
        except UsageError as error:
            accuracy = nll = float("nan")
            failure = str(error)
        settings = asdict(method)
        trials.append(Trial(method.name, settings, accuracy, nll, time.monotonic() - start_time, failure))
    finite_positions = [at for at, t in enumerate(trials) if t.nll == t.nll and abs(t.nll) != float("inf")]
    if not finite_positions:
        raise UsageError(
            f"search for settings of {method_class.name}",
            expected="a finite NLL of some",
            found=f"none of {len(trials)}{f': {trials[0].failed}' if trials and trials[0].failed else ''}",
        )
    best_position = min(finite_positions, key=lambda at: trials[at].nll)
    return candidates[best_position], trials


def held_out_accuracy_and_nll(problem: Problem, stacked_draws: Tensors) -> tuple[float, float]:
    """Return the accuracy and the NLL (nats) of draws' mean probabilities on a problem's held-out images.

    Args:
        problem: problem with held-out images.
        stacked_draws: stacked weights of the draws, name -> (draw, *shape).
    """
    held_out = problem.held_out
    if held_out is None or held_out.labels is None:
        raise UsageError("problem", expected="labelled images held out", found="none")
    draw_count = len(next(iter(stacked_draws.values())))
    ensemble = Ensemble(problem.network().eval().requires_grad_(False), stacked_draws, range(draw_count))
    with torch.inference_mode():
        logit_parts = [
            ensemble(problem.recipe.preprocess(some_images)).double()
            for some_images in torch.split(held_out.images, FORWARD_BATCH)
        ]
    log_probs = torch.cat(logit_parts, 1).log_softmax(-1).logsumexp(0) - math.log(draw_count)
    accuracy = metrics.accuracy(
        log_probs.exp(), held_out.labels, check=False
    )  # The accuracy is NaN if the settings are useless.
    return float(accuracy), float(metrics.nll(log_probs, held_out.labels, check=False))
