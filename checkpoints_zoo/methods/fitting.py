"""Fit methods by name: draws are stored as a collection with their settings, and settings are chosen by a search."""

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
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.text import nearest_name
from checkpoints_zoo.interop.checkpoints import Facts
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.interop.samples import from_samples
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble, train_members
from checkpoints_zoo.methods.dropout import Dropout
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.laplace import Laplace, LaplaceLastLayer
from checkpoints_zoo.methods.method import Method, Run
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import PIECE, Problem
from checkpoints_zoo.methods.sgmcmc import CyclicalSghmc, Sghmc, Sgld
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.methods.swag import Swag
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.sources.source import FolderSource
from checkpoints_zoo.training.recipe import Recipe

RUNS, DRAWS = 10, 100  # of a fit, by default
HELD_OUT = 250  # images, of a search, by default

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

# Settings chosen by a search: by the NLL that the draws of one mode have together on the last 250 training images (in
# rank order), fitted to the others; the test split was never looked at. Other collections have the defaults.
CHOSEN: Mapping[str, Mapping[str, Method]] = {
    "convnet-digits": {  # the search's record is in docs/studies/comparison.json
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


def method_of(name: str, collection: str) -> Method:
    """Return a method with the settings chosen for a collection, or its defaults.

    Raises:
        UsageError: no such method; the nearest name is given.

    >>> method_of("swag", "convnet-digits").name
    'swag'
    """
    if name not in METHODS:
        raise UsageError(
            f"method {name!r}",
            expected=f"one of {', '.join(METHODS)}",
            found="no such name",
            do=f"Did you mean {nearest_name(name, METHODS)}?",
        )
    return CHOSEN.get(collection, {}).get(name) or METHODS[name]()


@dataclass(frozen=True)
class Fit:
    """The record of a method's draws in a folder.

    Args:
        collection: its name.
        method: its name.
        settings: of the method.
        recipe, recipe_hash, data_fingerprint: what it was fitted to.
        runs, draws, seed: how many of each, and of what.
        seconds: that fitting and drawing took.
        facts: one mapping a run: what the fit says of itself.
        versions: of this package, torch, and what the method needs.
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

    @property
    def key(self) -> str:
        """Hash of what decides the draws."""
        return key_of(self.method, self.settings, self.recipe_hash, self.data_fingerprint, self.runs, self.draws,
                      self.seed)  # fmt: skip


def key_of(
    method: str, settings: Mapping[str, Any], recipe_hash: str, fingerprint: str, runs: int, draws: int, seed: int
) -> str:
    """Return the first 16 hex digits of the sha256 over what decides a method's draws."""
    facts = [method, dict(settings), recipe_hash, fingerprint, runs, draws, seed]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def name_of(recipe: Recipe, method: str, runs: int) -> str:
    """Name a method's collection: COLLECTION-METHOD, COLLECTION-METHOD-multi with several runs.

    >>> from checkpoints_zoo.training.recipes import convnet_digits
    >>> name_of(convnet_digits(), "swag", 10), name_of(convnet_digits(), "swag", 1)
    ('convnet-digits-swag-multi', 'convnet-digits-swag')
    """
    return f"{recipe.name}-{method}{'-multi' if runs > 1 else ''}"


def fit(
    method: str | Method,
    recipe: Recipe,
    *,
    out: str | Path,
    runs: int = RUNS,
    draws: int = DRAWS,
    seed: int = 0,
    modes: str | Path | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
) -> Collection:
    """Fit a method to a recipe's training images, and store its draws; return the collection of them.

    Draws that are in the folder already, with the same settings, are returned as they are. Members are numbered run by
    run. A method of independent members trains `draws` of them, whatever the runs.

    Args:
        method: its name, with the settings chosen for the recipe, or the method itself.
        recipe: of the network: a prior needs its weight decay.
        out: folder of the source.
        runs: posteriors, from different modes.
        draws: of each.
        seed: of everything random.
        modes: folder where trained modes are kept; None for `modes` in the source's.
        device: to compute on.
        say: told of the progress.

    Raises:
        UsageError: no such method, a network that it can't be used for, a package that is missing, or other draws under
            the same name in the folder.
        StorageError: no room.
    """
    wanted = method_of(method, recipe.name) if isinstance(method, str) else method
    for what, number, least in (("runs", runs, 1), ("draws", draws, 2)):
        if number < least:
            raise UsageError(what, expected=f"{least} or more", found=str(number))
    root = Path(out).expanduser().absolute()
    name = name_of(recipe, wanted.name, 1 if wanted.independent else runs)
    settings = asdict(wanted)
    fingerprint = recipe.split("train").fingerprint
    key = key_of(wanted.name, settings, recipe.hash, fingerprint, runs, draws, seed)
    build = recipe.skeleton if recipe.build is not None else None
    recorded = recorded_fit(root, name)
    if FolderSource(root, root.as_uri()).manifest_path(name).is_file():
        if recorded is not None and recorded.key == key:
            return load(name, source=root, architecture=build)
        # Draws without a record are of a fit that was killed at the end: made again, they are the same.
        if recorded is not None and not wanted.independent:
            raise UsageError(
                f"collection {name} in folder {root}",
                expected=f"none, or draws of {wanted.name} with settings {json.dumps(settings)}",
                found=f"settings {json.dumps(dict(recorded.settings))}",
                do=f"Give another folder, or delete manifests/{name}.parquet there",
                collection=name,
            )
    began = time.monotonic()
    say(f"{name}: {wanted.title} …")
    facts: Sequence[Mapping[str, float]] = ()
    if wanted.independent:
        train_members(recipe, root, name, draws, device, say)
    else:
        problem = Problem.of(recipe, folder=root / "modes" if modes is None else Path(modes), device=device)
        fitted = wanted.fit(problem, runs, draws, seed)
        with torch.random.fork_rng(devices=[]):  # networks are built there
            _store(fitted, wanted, recipe, root, name, settings, device)
        facts = [dict(run.facts) for run in fitted]
    seconds = time.monotonic() - began
    done = Fit(name, wanted.name, settings, recipe.name, recipe.hash, fingerprint, runs, draws, seed, seconds, facts,
               _versions(wanted))  # fmt: skip
    with replace_file(_path(root, name)) as file:
        file.write(json.dumps(asdict(done), indent=1))
    say(f"{name}: done in {seconds:.0f} s")
    return load(name, source=root, architecture=build)


def recorded_fit(root: Path, name: str) -> Fit | None:
    """Read the record of a method's draws in a folder; return it, None if there is none that can be read."""
    try:
        return Fit(**json.loads(_path(root, name).read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _path(root: Path, name: str) -> Path:
    return root / "fits" / f"{name}.json"


def _store(
    fitted: Sequence[Run],
    method: Method,
    recipe: Recipe,
    root: Path,
    name: str,
    settings: Mapping[str, Any],
    device: str,
) -> None:
    def states() -> Iterator[Tensors]:
        for run in fitted:
            for at in range(len(next(iter(run.states.values())))):
                yield {n: t[at] for n, t in run.states.items()}

    counts = [len(next(iter(run.states.values()))) for run in fitted]
    train, test = recipe.split("train"), recipe.split("test")
    facts: Facts = {
        "title": f"{method.title} around members of {recipe.name}",
        "dataset": recipe.dataset,
        "classes": train.classes,
        "preprocessing": recipe.preprocess,
        "licence": recipe.licence,
        "citation": method.source,
    }
    from_samples(
        states(),
        recipe.architecture if recipe.build is None else recipe.skeleton,
        method=method.name,
        out=root,
        name=name,
        arguments=None if recipe.build is not None else recipe.arguments,
        run=[run for run, count in enumerate(counts) for _ in range(count)],
        columns={
            "recipe": f"{recipe.name} {method.name} {json.dumps(settings, sort_keys=True)}",
            "data_fingerprint": train.fingerprint,
            "weight_decay": recipe.weight_decay,
            "torch_version": torch.__version__,
            "code_version": version("checkpoints-zoo"),
        },
        evaluate=test,
        device=device,
        **facts,
    )


def _versions(method: Method) -> dict[str, str]:
    packages = [need.split(">")[0].split("<")[0].split("=")[0] for need in method.needs]
    return {name: version(name) for name in ("checkpoints-zoo", "torch", *packages)}


@dataclass(frozen=True)
class Tried:
    """Settings that a search tried, and how their draws did on the images held out.

    Args:
        method: its name.
        settings: of it.
        accuracy, nll: of the mean probabilities of one run's draws, mean over the runs; NLL in nats.
        seconds: that the fit took.
        failed: why there are no figures; "" if there are.
    """

    method: str
    settings: Mapping[str, Any]
    accuracy: float
    nll: float
    seconds: float
    failed: str = ""


def search(
    kind: type[Method], problem: Problem, *, runs: int = 2, draws: int = 50, seed: int = 0
) -> tuple[Method, Sequence[Tried]]:
    """Fit a method with each of its grid's settings; return the one with the least NLL, and all that was tried.

    Args:
        kind: the method.
        problem: with images held out.
        runs, draws: of each fit.
        seed: of the fits.

    Raises:
        UsageError: no images held out, or no settings with finite figures.
    """
    if problem.held_out is None:
        raise UsageError("problem of a search", expected="images held out", found="none", do="Problem.of(…, held_out=)")
    tried, methods = [], list(kind.grid(problem))
    for method in methods:
        began = time.monotonic()
        try:
            fitted = method.fit(problem, runs, draws, seed)
            figures = [judged(problem, run.states) for run in fitted]
            accuracy, nll = (sum(values) / len(values) for values in zip(*figures, strict=True))
            failed = ""
        except UsageError as error:
            accuracy = nll = float("nan")
            failed = str(error)
        settings = asdict(method)
        tried.append(Tried(method.name, settings, accuracy, nll, time.monotonic() - began, failed))
    finite = [at for at, t in enumerate(tried) if t.nll == t.nll and abs(t.nll) != float("inf")]
    if not finite:
        raise UsageError(
            f"search for settings of {kind.name}",
            expected="a finite NLL of some",
            found=f"none of {len(tried)}{f': {tried[0].failed}' if tried and tried[0].failed else ''}",
        )
    best = min(finite, key=lambda at: tried[at].nll)
    return methods[best], tried


def judged(problem: Problem, states: Tensors) -> tuple[float, float]:
    """Return the accuracy and the NLL (nats) of draws' mean probabilities on a problem's images held out.

    Args:
        problem: with images held out.
        states: name -> (draw, *shape).
    """
    held_out = problem.held_out
    if held_out is None or held_out.labels is None:
        raise UsageError("problem", expected="labelled images held out", found="none")
    draws = len(next(iter(states.values())))
    ensemble = Ensemble(problem.network().eval().requires_grad_(False), states, range(draws))
    with torch.inference_mode():
        parts = [ensemble(problem.recipe.preprocess(some)).double() for some in torch.split(held_out.images, PIECE)]
    log_probs = torch.cat(parts, 1).log_softmax(-1).logsumexp(0) - math.log(draws)
    accuracy = metrics.accuracy(log_probs.exp(), held_out.labels, check=False)  # NaN says that settings are none
    return float(accuracy), float(metrics.nll(log_probs, held_out.labels, check=False))
