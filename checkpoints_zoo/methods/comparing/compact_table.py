"""The table of Xiao, Liu & Bamler 2023 (arXiv 2401.00611) with its own columns: HMC, an ensemble, VI, against HMC.

q_d is a diagonal Gaussian fitted to draws as they are, q_r one fitted to draws that were aligned to one of them; VI's q
is one from the start. `posterior.compact` is the same for an ensemble by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import measuring
from checkpoints_zoo.executor import cores
from checkpoints_zoo.formats import safetensors, selection
from checkpoints_zoo.images import Given
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.comparing import drawn
from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison, Source
from checkpoints_zoo.methods.comparing.compact_sides import Side, figures, half_against_half, of_draws, of_gaussians
from checkpoints_zoo.methods.comparing.drawn import Fits
from checkpoints_zoo.methods.comparing.modes import INDEPENDENT, ONE, Mode, cited
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.populations.compact_posterior import MOST
from checkpoints_zoo.populations.evaluator import evaluator
from checkpoints_zoo.training.recipe import Recipe

# The posterior itself, at temperature 1, and not what predicts best. Chains start at modes, whose log density no draw
# comes near: shorter warm-ups and trajectories leave them on their way.
HMC, VI, ENSEMBLE = Hmc(temperature=1.0, steps=50, warmup=100), MeanField(temperature=1.0), DeepEnsemble()

_LEAST = {"samples": 1, "splits": 2}


def compare_compact(
    hmc: Collection,
    ensemble: Collection,
    vi: Collection | None = None,
    data: Given | None = None,
    *,
    to: str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    statistics: Given | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> CompactComparison:
    """Compare an ensemble, VI, and Gaussians fitted before and after alignment, with HMC; return the paper's table.

    Args:
        hmc: its draws; the column `run` of their rows tells the chains.
        ensemble: members, of the same network.
        vi: draws of variational posteriors, two or more of each `run`; None for none. Mean weights are those of a run's
            draws.
        data: labelled images, as `images.of` takes them; None for the collection's own test set.
        to: "mean" to align draws to their mean; None for the first of each.
        samples: networks drawn from each Gaussian; None for as many as HMC has draws, at most 100.
        splits: random halves of chains, of members and of fits that the intervals come from.
        seed: of samples and splits.
        statistics: images for running statistics; None for the collection's own training set.
        device: what the networks run on, in float32.
        batch: images a forward pass, at most.

    Raises:
        UsageError: fewer than two draws, draws of another network, images without labels or of other classes, a number
            out of its range.
        SymmetryError: an architecture whose symmetries can't be derived.
        DamagedError: weights or logits that are not finite.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=8)
    >>> found = compare_compact(members[:4], members[4:], samples=2, splits=2)
    >>> found["hmc", "sample", "agreement"].value, found["ensemble", "sample", "agreement"].value > 0.9
    (1.0, True)
    """
    sides = {"hmc": hmc, "ensemble": ensemble} | ({} if vi is None else {"vi": vi})
    for name, members in sides.items():
        _check(name, members, hmc)
    drawn_samples = min(len(hmc), MOST) if samples is None else samples
    for thing, number in (("samples", drawn_samples), ("splits", splits)):
        _check_whole(thing, number, _LEAST[thing])
    if to not in (None, "mean"):
        raise UsageError("what draws are aligned to", expected="None or 'mean'", found=repr(to)[:80])
    found = {name: _mode(name, members) for name, members in sides.items()}
    judge = evaluator(hmc, data, statistics, device, batch)
    measured: dict[str, Side] = {}
    with one_thread(hmc.member_nbytes < SMALL_MEMBER and judge.device.type == "cpu"):
        for name in ("hmc", "ensemble"):
            target: int | str = found[name].members.ids[0] if to is None else to
            measured[name] = of_draws(found[name], target, judge, splits, drawn_samples, seed)
        if vi is not None:
            measured["vi"] = of_gaussians(found["vi"], judge, splits, seed)
    return CompactComparison(
        sources={n: Source(cited(sides[n]), len(mode.runs), len(mode.members)) for n, mode in found.items()},
        to="the first" if to is None else "the mean",
        data=measuring.named(judge.test.data),
        inputs=len(judge.test.data),
        samples=drawn_samples,
        splits=splits,
        seed=seed,
        statistics=judge.statistics,
        table={n: {c: figures(side, c, measured["hmc"]) for c in side.columns} for n, side in measured.items()},
        halves={c: x for c in measured["hmc"].columns if (x := half_against_half(measured["hmc"], c))},
    )


def fit_and_compare(
    recipe: Recipe,
    out: str | Path,
    *,
    runs: int = fitting.RUNS,
    draws: int = fitting.DRAWS,
    hmc: Hmc = HMC,
    vi: MeanField = VI,
    workers: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    say: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> CompactComparison:
    """Fit HMC and VI to a recipe, train an ensemble by it, and compare all; return the paper's table.

    What was fitted before, with the same settings, is read from the folder.

    Args:
        recipe: of the network.
        out: folder of the draws.
        runs, draws: chains of HMC and fits of VI, and draws of each; as many members as draws.
        hmc, vi: the methods with their settings.
        workers: processes; None for one a core.
        seed: of fits, samples and splits.
        device: to compute on.
        say: told of the progress.
        options: of `compare_compact`.

    Raises:
        UsageError: a network that a method can't be used for, a package that is missing, and as `compare_compact`.
    """
    numbers = {"runs": (runs, 1), "draws": (draws, 2), "steps": (hmc.steps, 1), "warmup": (hmc.warmup, 0)}
    numbers |= {n: (options[n], least) for n, least in _LEAST.items() if options.get(n) is not None}
    for thing, (number, least) in numbers.items():
        _check_whole(thing, number, least)
    root = Path(out).expanduser().absolute()
    safetensors.check_folder(root)
    fits = Fits(recipe, root, runs, draws, seed, device=device)
    made, refused = drawn.fit(fits, (hmc, ENSEMBLE, vi), cores() if workers is None else workers, say)
    for name, reason in refused.items():
        raise UsageError(f"method {name!r}", expected=f"one that can be fitted to {recipe.name}", found=reason)
    by_name = {draws.name: draws for draws in made}
    of_hmc, of_ensemble, of_vi = (by_name[method.name] for method in (hmc, ENSEMBLE, vi))
    found = compare_compact(
        of_hmc.members, of_ensemble.members, of_vi.members, seed=seed, device=device, **options
    )  # fmt: skip
    facts = {"hmc": of_hmc.facts, "ensemble": of_ensemble.facts, "vi": of_vi.facts}
    return replace(found, sources={n: replace(source, facts=facts[n]) for n, source in found.sources.items()})


def _check_whole(thing: str, number: object, least: int) -> None:
    if (known := selection.whole(number)) is None or known < least:
        raise UsageError(f"{thing} of a compact table", expected=f"a whole number from {least}", found=repr(number))


def _check(name: str, members: Collection, hmc: Collection) -> None:
    if not isinstance(members, Collection):
        raise UsageError(f"draws of {name}", expected="a Collection", found=type(members).__name__)
    own, theirs = ({n: tuple(t.shape) for n, t in c.skeleton().state_dict().items()} for c in (members, hmc))
    if own != theirs or members.classes != hmc.classes:
        differ = next((n for n in {**theirs, **own} if own.get(n) != theirs.get(n)), None)
        raise UsageError(
            f"draws of {name}",
            expected=f"the tensors and classes of {hmc.name}",
            found="other classes" if differ is None else f"others, such as {differ!r}",
            do="All draws have to be of one network",
        )


def _mode(name: str, members: Collection) -> Mode:
    """Sort draws by their runs; each independent member is a run of its own."""
    if len(members) < 2:
        raise UsageError(f"draws of {name}", expected="two or more", found=str(len(members)))
    columns = (members.rows.column(column).to_pylist() for column in ("method", "run"))
    by_run: dict[int, list[int]] = {}
    for at, (method, run) in enumerate(zip(*columns, strict=True)):
        by_run.setdefault(at if method == INDEPENDENT else -1 if run is None else run, []).append(at)
    runs = [by_run[run] for run in sorted(by_run)]
    if name == "vi" and min(map(len, runs)) < 2:
        raise UsageError("draws of vi", expected="two or more of each run", found="one of some", do="Draw more")
    ends = list(accumulate(map(len, runs)))
    places = tuple(tuple(range(end - len(run), end)) for run, end in zip(runs, ends, strict=True))
    return Mode(ONE, members.take([at for run in runs for at in run]), places)
