"""`zoo.compare_compact`: HMC, an ensemble, VI, and Gaussians fitted to the first two, measured against HMC.

Each method is measured for all its runs and for random halves of them, which give the intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.metrics import Interval, Plan, agreement, jackknife_plan, total_variation
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.text import whole
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison, Source
from checkpoints_zoo.methods.comparing.draw_ensembles import INDEPENDENT, ONE, Mode, cited
from checkpoints_zoo.methods.comparing.draws import Fits, fit_all
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.fitting import DRAWS, RUNS
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.compact_posterior import MOST_SAMPLES, evaluate_gaussian, fit_gaussians
from checkpoints_zoo.populations.gaussian import Gaussian
from checkpoints_zoo.populations.predictives import join_intervals
from checkpoints_zoo.populations.untrained_networks import Evaluator, make_evaluator
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.workers import usable_cores

if TYPE_CHECKING:
    pass

# The posterior itself, at temperature 1, and not what predicts best. Chains start at modes, whose log density no draw
# comes near: shorter warm-ups and trajectories leave them on their way.
HMC, VI, ENSEMBLE = Hmc(temperature=1.0, steps=50, warmup=100), MeanField(temperature=1.0), DeepEnsemble()
NEAR = ("agreement", "total_variation")
_LEAST = {"samples": 1, "splits": 2}


def compare_compact(
    hmc: Collection,
    ensemble: Collection,
    vi: Collection | None = None,
    data: ImageInput | None = None,
    *,
    to: str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    statistics: ImageInput | None = None,
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
    >>> comparison = compare_compact(members[:4], members[4:], samples=2, splits=2)
    >>> comparison["hmc", "sample", "agreement"].value, comparison["ensemble", "sample", "agreement"].value > 0.9
    (1.0, True)
    """
    draws = {"hmc": hmc, "ensemble": ensemble} | ({} if vi is None else {"vi": vi})
    for name, members in draws.items():
        _check(name, members, hmc)
    drawn_samples = min(len(hmc), MOST_SAMPLES) if samples is None else samples
    for thing, number in (("samples", drawn_samples), ("splits", splits)):
        _check_whole(thing, number, _LEAST[thing])
    if to not in (None, "mean"):
        raise UsageError("what draws are aligned to", expected="None or 'mean'", found=repr(to)[:80])
    modes = {name: _mode(name, members) for name, members in draws.items()}
    judge = make_evaluator(hmc, data, statistics, device, batch)
    measured: dict[str, MethodPredictives] = {}
    with one_thread(hmc._member_nbytes < SMALL_MEMBER_BYTES and judge.device.type == "cpu"):
        for name in ("hmc", "ensemble"):
            target: int | str = modes[name].members.ids[0] if to is None else to
            measured[name] = measure_draws(modes[name], target, judge, splits, drawn_samples, seed)
        if vi is not None:
            measured["vi"] = measure_gaussians(modes["vi"], judge, splits, seed)
    return CompactComparison(
        sources={n: Source(cited(draws[n]), len(mode.runs), len(mode.members)) for n, mode in modes.items()},
        to="the first" if to is None else "the mean",
        data=arguments.image_key(judge.test.data),
        inputs=len(judge.test.data),
        samples=drawn_samples,
        splits=splits,
        seed=seed,
        statistics=judge.statistics,
        table={
            n: {c: table_column(method, c, measured["hmc"]) for c in method.columns} for n, method in measured.items()
        },
        halves={c: x for c in measured["hmc"].columns if (x := half_against_half(measured["hmc"], c))},
    )


def fit_and_compare(
    recipe: Recipe,
    out: str | Path,
    *,
    runs: int = RUNS,
    draws: int = DRAWS,
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
    disk.check_folder(root)
    fits = Fits(recipe, root, runs, draws, seed, device=device)
    made, refused = fit_all(fits, (hmc, ENSEMBLE, vi), usable_cores() if workers is None else workers, say)
    for name, reason in refused.items():
        raise UsageError(f"method {name!r}", expected=f"one that can be fitted to {recipe.name}", found=reason)
    by_name = {draws.name: draws for draws in made}
    of_hmc, of_ensemble, of_vi = (by_name[method.name] for method in (hmc, ENSEMBLE, vi))
    comparison = compare_compact(
        of_hmc.members, of_ensemble.members, of_vi.members, seed=seed, device=device, **options
    )  # fmt: skip
    facts = {"hmc": of_hmc.facts, "ensemble": of_ensemble.facts, "vi": of_vi.facts}
    return replace(comparison, sources={n: replace(source, facts=facts[n]) for n, source in comparison.sources.items()})


def _check_whole(thing: str, number: object, least: int) -> None:
    if (known := whole(number)) is None or known < least:
        raise UsageError(f"{thing} of a compact table", expected=f"a whole number from {least}", found=repr(number))


def _check(name: str, members: Collection, hmc: Collection) -> None:
    if not isinstance(members, Collection):
        raise UsageError(f"draws of {name}", expected="a Collection", found=type(members).__name__)
    shapes, expected = ({n: tuple(t.shape) for n, t in c._skeleton().state_dict().items()} for c in (members, hmc))
    if shapes != expected or members.classes != hmc.classes:
        differ = next((n for n in {**expected, **shapes} if shapes.get(n) != expected.get(n)), None)
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


@dataclass(frozen=True)
class Column:
    """Predictives of some networks on the test images, and the networks' accuracies.

    Args:
        probs: their mean probabilities, (predictive, input, class).
        sample_accuracy: mean accuracy of the networks, (predictive,).
        mean_accuracy: of the network of their mean weights, (predictive,); None where there is none.
    """

    probs: Tensor
    sample_accuracy: Tensor
    mean_accuracy: Tensor | None = None

    def near(self, others: Tensor) -> dict[str, Tensor]:
        """Compare each predictive with another one; return figure -> (predictive,).

        Args:
            others: (input, class), or one for each predictive.
        """
        pairs = list(zip(self.probs, others.expand_as(self.probs), strict=True))
        return {
            "agreement": torch.stack([agreement(p, q, check=False) for p, q in pairs]),
            "total_variation": torch.stack([total_variation(p, q, check=False) for p, q in pairs]),
        }

    @property
    def accuracies(self) -> dict[str, Tensor]:
        values = {"sample_accuracy": self.sample_accuracy}
        return values if self.mean_accuracy is None else {**values, "mean_accuracy": self.mean_accuracy}


@dataclass(frozen=True)
class MethodPredictives:
    """Predictives of a method's draws, and of the Gaussians fitted to them, for all runs and halves of them.

    Args:
        plan: halves of its runs (chains, or independent members), the first being all.
        weights: (half, predictive), the share that each predictive has in a figure of a half.
        columns: "sample", "q_d" and "q_r"; "q" of draws that are a Gaussian's already.
        rest: predictive of the runs that a half lacks, (half - 1, input, class).
    """

    plan: Plan
    weights: Tensor
    columns: Mapping[str, Column]
    rest: Tensor

    def halves(self, values: Tensor) -> Tensor:
        """Average a figure of each predictive (predictive,) into one of each half; return (half,)."""
        return self.weights @ values

    def interval(self, values: Tensor) -> Interval:
        """Put an interval over the runs around a figure of each predictive (predictive,); return it."""
        return _within(self.plan.intervals(self.halves(values)[:, None])[0])


def measure_draws(
    mode: Mode, to: int | str, judge: Evaluator, splits: int, samples: int, seed: int
) -> MethodPredictives:
    """Measure draws, and Gaussians fitted to them before (q_d) and after (q_r) alignment; return the figures of both.

    Each half of the runs has Gaussians of its own; both get the same noise, each half its own.

    Args:
        mode: the draws and their runs.
        to: what they are aligned to, as `Collection.align` takes it.
        judge: on the test images.
        splits: random halves of the runs.
        samples: networks drawn from each Gaussian.
        seed: of halves and noise.
    """
    plan = jackknife_plan(len(mode.runs), seed, splits)
    chosen = [_positions(mode, runs) for runs in plan.chosen]
    probs = _probs(mode, judge)
    columns = {"sample": _sample(probs, judge, chosen)}
    for name, view in (("q_d", mode.members), ("q_r", mode.members.align(to=to))):
        columns[name] = _of_gaussians(fit_gaussians(view, judge, chosen), judge, samples, seed)
    rest = [probs[_without(len(probs), half)].mean(0) for half in chosen[1:]]
    others = torch.stack(rest) if rest else probs.new_zeros((0, *probs.shape[1:]))
    return MethodPredictives(plan, torch.eye(len(chosen), dtype=torch.float64), columns, others)


def measure_gaussians(mode: Mode, judge: Evaluator, splits: int, seed: int) -> MethodPredictives:
    """Measure draws of runs that are a Gaussian's each, such as VI's: one predictive a run; return their figures.

    The network of the means has the mean weights of a run's draws.

    Args:
        mode: the draws and their runs.
        judge: on the test images.
        splits: random halves of the runs.
        seed: of the halves.
    """
    plan = jackknife_plan(len(mode.runs), seed, splits)
    runs = [torch.tensor(run) for run in mode.runs]
    weights = torch.zeros(len(plan.chosen), len(runs), dtype=torch.float64)
    for row, some in zip(weights, plan.chosen, strict=True):
        row[some] = 1 / len(some)
    probs = _probs(mode, judge)
    sample = _sample(probs, judge, runs)
    means = [judge.accuracies(judge.log_probs(q.center)) for q in fit_gaussians(mode.members, judge, runs)]
    columns = {"q": Column(sample.probs, sample.sample_accuracy, torch.cat(means))}
    return MethodPredictives(plan, weights, columns, probs.new_zeros((0, *probs.shape[1:])))


def table_column(method: MethodPredictives, column: str, against: MethodPredictives) -> dict[str, Interval]:
    """Return a column of the table: figure -> value and interval, over the runs of the method and of the other.

    Args:
        method: whose column.
        column: its name.
        against: the method that it is compared with; if it is the same, each half is compared with its own draws.
    """
    of, target = method.columns[column], against.columns["sample"].probs
    by_row = {}
    if method is against:
        by_row = {name: method.interval(values) for name, values in of.near(target).items()}
    else:
        distances = of.near(target[0])
        # Figure of all runs of the method against each half of the others'.
        theirs = [method.halves(torch.stack([n[row] for n in map(of.near, target)]).T)[0] for row in NEAR]
        for name, values in zip(NEAR, theirs, strict=True):
            other = against.plan.intervals(values[:, None])[0]
            by_row[name] = join_intervals([method.plan.intervals(method.halves(distances[name])[:, None])[0], other])
    return by_row | {name: method.interval(values) for name, values in of.accuracies.items()}


def half_against_half(method: MethodPredictives, column: str) -> dict[str, Interval]:
    """Compare one half of the runs, or its Gaussians, with the draws of the other; return figure -> mean over halves.

    Low and high are where 95 % of the halves fall. Empty with fewer than three runs.
    """
    if not len(method.rest):
        return {}
    of = Column(method.columns[column].probs[1:], method.columns[column].sample_accuracy[1:])
    by_row = {}
    for name, values in of.near(method.rest).items():
        low, high = torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist()
        by_row[name] = Interval(float(values.mean()), low, high)
    return by_row


def _within(x: Interval) -> Interval:
    """Return an interval cut at 0 and 1."""
    if x.low is None or x.high is None:
        return x
    return Interval(x.value, max(0.0, x.low), min(1.0, x.high))


def _probs(mode: Mode, judge: Evaluator) -> Tensor:
    logits = predictions.logits(mode.members, judge.test.data, judge.device, batch=judge.test.batch)
    return logits.double().softmax(-1)


def _sample(probs: Tensor, judge: Evaluator, chosen: Sequence[Tensor]) -> Column:
    right = judge.accuracies(probs)
    return Column(torch.stack([probs[some].mean(0) for some in chosen]),
                  torch.stack([right[some].mean() for some in chosen]))  # fmt: skip


def _of_gaussians(fitted: Sequence[Gaussian], judge: Evaluator, samples: int, seed: int) -> Column:
    noise = torch.Generator().manual_seed(seed)
    evaluated = [evaluate_gaussian(judge, q, samples, noise) for q in fitted]
    return Column(
        torch.stack([x.probs for x in evaluated]),
        torch.stack([x.accuracies.mean() for x in evaluated]),
        torch.tensor([x.mean_accuracy for x in evaluated], dtype=torch.float64),
    )


def _positions(mode: Mode, runs: Tensor) -> Tensor:
    return torch.tensor([at for run in runs.tolist() for at in mode.runs[run]])


def _without(count: int, chosen: Tensor) -> Tensor:
    rest = torch.ones(count, dtype=torch.bool)
    rest[chosen] = False
    return rest
