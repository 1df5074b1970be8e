"""What a comparison with HMC found: the table of Xiao, Liu & Bamler 2023 with its own columns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.metrics import Interval, Plan, agreement, jackknife_plan, total_variation
from checkpoints_zoo.evaluation.tables import stated, write_frame, write_text
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.text import aligned, whole
from checkpoints_zoo.images import Given
from checkpoints_zoo.methods import fit
from checkpoints_zoo.methods.comparing import drawn
from checkpoints_zoo.methods.comparing.comparison import escaped
from checkpoints_zoo.methods.comparing.drawn import Fits
from checkpoints_zoo.methods.comparing.modes import INDEPENDENT, ONE, Mode, cited
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.populations.compact_posterior import MOST_SAMPLES, evaluate_gaussian, fit_gaussians
from checkpoints_zoo.populations.evaluator import Evaluator, make_evaluator
from checkpoints_zoo.populations.gaussian import Gaussian
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.workers import cores

if TYPE_CHECKING:
    import pandas as pd


# The table of HMC, an ensemble and VI as text and LaTeX.


ROWS = {
    "agreement": ("agreement with HMC (0..1)", 1),
    "total_variation": ("total variation to HMC (0..1)", 1),
    "sample_accuracy": ("test accuracy of samples (%)", 100),
    "mean_accuracy": ("test accuracy of the mean (%)", 100),
}
TITLES = {"hmc": "HMC", "ensemble": "ensemble", "vi": "VI"}
_LATEX = {"sample": "sample", "q_d": "$q_d$", "q_r": "$q_r$", "q": "$q$"}


def cells(found: CompactComparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table: its words, and a text for each column in the table's order."""
    columns = [figures for of in found.table.values() for figures in of.values()]
    for row, (words, scale) in ROWS.items():
        yield words, [stated(figures[row], scale) if row in figures else "-" for figures in columns]


def headings(found: CompactComparison) -> list[str]:
    """Return the names of the columns, such as "HMC q_r"."""
    return [f"{TITLES[method]} {column}" for method, of in found.table.items() for column in of]


def text(found: CompactComparison) -> str:
    """Return the table for people, and what it means."""
    rows = [["", *headings(found)], *([words, *values] for words, values in cells(found))]
    blocks = [aligned(rows, range(1, len(rows[0])))]
    if found.halves:
        rows = [["", *(f"HMC {column}" for column in found.halves)]]
        rows += [
            [f"{ROWS[row][0]}, half against half", *(stated(figures[row], 1) for figures in found.halves.values())]
            for row in ("agreement", "total_variation")
        ]
        blocks.append(aligned(rows, range(1, len(rows[0]))))
    return "\n\n".join([*blocks, "\n".join(meaning(found))])


def meaning(found: CompactComparison) -> list[str]:
    """Say what rows, columns and intervals mean; return the lines."""
    hmc, ensemble, vi = (found.sources.get(name) for name in ("hmc", "ensemble", "vi"))
    sources = [f"HMC: {_count(hmc, 'chain')}", f"ensemble: {ensemble.draws:,} members" if ensemble else ""]
    sources += [f"VI: {_count(vi, 'fit')}"] if vi is not None else []
    lines = [
        f"Measured on {found.data.split(' ')[0]}, {found.inputs:,} inputs. {'; '.join(sources)}.",
        f"{found.samples} samples of each q_d and q_r; draws aligned to {found.to}"
        f"{' of each' if found.to == 'the first' else ''}.",
        "Agreement and total variation: averaged predictions against those of all of HMC's draws; HMC's own are 1 and"
        " 0. Half against half: one half of the chains, or what is fitted to it, against the draws of the other.",
        f"[ ]: 95 % jackknife intervals over chains, members and fits ({found.splits} halves of each), joined; half"
        " against half: where 95 % of the halves fall. None with fewer than three.",
    ]
    if vi is not None:
        lines.append("VI: each fit by itself, mean over fits. Its mean is that of a fit's draws.")
    if found.statistics:
        lines.append(f"Running statistics of Gaussians' networks: from {found.statistics.split(' ')[0]}.")
    return lines


def latex(found: CompactComparison) -> str:
    """Return the table for LaTeX with booktabs, laid out as the paper's."""
    count = len(headings(found))
    spans, at, rules = [], 2, []
    for method, of in found.table.items():
        spans.append(rf"\multicolumn{{{len(of)}}}{{c}}{{{escaped(TITLES[method])}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + len(of) - 1}}}")
        at += len(of)
    names = [_LATEX[column] for of in found.table.values() for column in of]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * count}}}",
        r"\toprule",
        " & ".join(["", *spans]) + r" \\",
        " ".join(rules),
        " & ".join(["", *names]) + r" \\",
        r"\midrule",
        *(" & ".join([escaped(words), *("--" if x == "-" else x for x in values)]) + r" \\"
          for words, values in cells(found)),
        r"\bottomrule",
        r"\end{tabular}",
    ]  # fmt: skip
    return "\n".join(lines)


def _count(source: Source | None, word: str) -> str:
    if source is None:
        return ""
    return f"{source.draws:,} draws of {source.runs:,} {word}{'s' if source.runs != 1 else ''}"


Figures = Mapping[str, Interval]
VERSION = 1  # of the JSON


@dataclass(frozen=True)
class Source:
    """Where a part of the table comes from.

    Args:
        citation: of the draws, without the folder of this machine.
        runs: chains of HMC, members of an ensemble, fits of VI.
        draws: of all runs.
        facts: what is known of how they were made, JSON values: see `comparing.drawn.Draws`.
    """

    citation: str
    runs: int
    draws: int
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class CompactComparison:
    """HMC, an ensemble and VI, and Gaussians fitted to the first two, compared with HMC.

    Args:
        sources: "hmc", "ensemble", "vi": the draws; without "vi" where there are none.
        to: what draws were aligned to: "the first" of each, or "the mean".
        data: name and fingerprint of the images evaluated on.
        inputs, samples, splits, seed: images; networks drawn from each Gaussian; random halves; of both.
        statistics: name and fingerprint of the images that running statistics were estimated on; "" without any.
        table: "hmc" and "ensemble" -> "sample", "q_d", "q_r", and "vi" -> "q" -> row of `posterior.splits.ROWS` ->
            Interval. Agreement and total variation are to the mean prediction of all of HMC's draws. Samples have no
            mean. Intervals are delete-half jackknifes over chains, members and fits of VI, joined.
        halves: column of "hmc" -> "agreement" and "total_variation" of one half of the chains to the draws of the
            other: mean over the halves, low and high where 95 % of them fall.
    """

    sources: Mapping[str, Source]
    to: str
    data: str
    inputs: int
    samples: int
    splits: int
    seed: int
    statistics: str
    table: Mapping[str, Mapping[str, Figures]]
    halves: Mapping[str, Figures]

    def __getitem__(self, place: tuple[str, str, str]) -> Interval:
        """Return the figure of a (method, column, row), such as ("hmc", "q_r", "mean_accuracy").

        Raises:
            UsageError: no such figure.
        """
        method, column, row = place
        figures = self.table.get(method, {}).get(column, {})
        if row not in figures:
            there = ", ".join(f"{m} {c}" for m, columns in self.table.items() for c in columns)
            raise UsageError(f"figure {place!r}", expected=f"a row of one of {there}", found="none such")
        return figures[row]

    def _rows(self) -> list[dict[str, Any]]:
        whole = [(m, c, False, f) for m, columns in self.table.items() for c, f in columns.items()]
        halves = [("hmc", c, True, f) for c, f in self.halves.items()]
        return [
            {"method": m, "column": c, "figure": n, "value": x.value, "low": x.low, "high": x.high, "held_out": held}
            for m, c, held, of in whole + halves
            for n, x in of.items()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row a figure: method, column, figure, value, low, high, held_out."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return all of it as JSON text, which `from_json` reads."""
        values = {"version": VERSION, "level": 0.95, **asdict(self)}
        return json.dumps(values, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` gave; return the comparison.

        Raises:
            FormatError: something else, or of a newer version.
        """
        try:
            given = json.loads(text)
            version = given.pop("version")
            if version != VERSION:
                raise FormatError("compact table", expected=f"version {VERSION}", found=str(version)[:80])
            given.pop("level")
            table = {m: {c: _read(f) for c, f in columns.items()} for m, columns in given.pop("table").items()}
            halves = {c: _read(f) for c, f in given.pop("halves").items()}
            sources = {n: Source(**source) for n, source in given.pop("sources").items()}
            return cls(sources=sources, table=table, halves=halves, **given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError("compact table", expected="the JSON that `to_json` gives", found=repr(error)) from error

    def to_text(self) -> str:
        """Return the table for people, and what it means."""
        return text(self)

    def to_latex(self) -> str:
        """Return the table for LaTeX with booktabs, laid out as the paper's."""
        return latex(self)

    def write(self, path: str | Path) -> Path:
        """Write the table by the ending of a name: .json, .tex, .csv or .parquet; return its path.

        Raises:
            UsageError: another ending.
            StorageError: a place that can't be written to.
        """
        path = Path(path).expanduser()
        texts = {".json": self.to_json, ".tex": self.to_latex}
        if path.suffix.lower() not in texts:
            return write_frame(self.to_frame(), path)
        return write_text(texts[path.suffix.lower()](), path)


def _read(values: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval(**x) for name, x in values.items()}


# Predictives of HMC's draws, of an ensemble, of VI, and of Gaussians fitted to them, for all runs and halves of them.


NEAR = ("agreement", "total_variation")


@dataclass(frozen=True)
class Column:
    """What some networks say of the test images, once for each predictive.

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
        found = {"sample_accuracy": self.sample_accuracy}
        return found if self.mean_accuracy is None else {**found, "mean_accuracy": self.mean_accuracy}


@dataclass(frozen=True)
class Side:
    """A method's draws, and the Gaussians fitted to them.

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

    def own(self, values: Tensor) -> Interval:
        """Put an interval over the runs around a figure of each predictive (predictive,); return it."""
        return within(self.plan.intervals(self.halves(values)[:, None])[0])


def joined(parts: Sequence[Interval]) -> Interval:
    """Join intervals of one figure, each over the runs of another method: half widths add in squares; return it.

    None where one of the methods has too few runs.
    """
    value, half = parts[0].value, 0.0
    for part in parts:
        if part.high is None:
            return Interval(value, None, None)
        half = math.hypot(half, part.high - value)
    return within(Interval(value, value - half, value + half))


def within(x: Interval) -> Interval:
    """Return an interval cut at 0 and 1."""
    if x.low is None or x.high is None:
        return x
    return Interval(x.value, max(0.0, x.low), min(1.0, x.high))


def of_draws(mode: Mode, to: int | str, judge: Evaluator, splits: int, samples: int, seed: int) -> Side:
    """Measure draws, and Gaussians fitted to them before (q_d) and after (q_r) alignment; return the side.

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
    chosen = [_positions(mode, some) for some in plan.chosen]
    probs = _probs(mode, judge)
    columns = {"sample": _sample(probs, judge, chosen)}
    for name, view in (("q_d", mode.members), ("q_r", mode.members.align(to=to))):
        columns[name] = _of_gaussians(fit_gaussians(view, judge, chosen), judge, samples, seed)
    rest = [probs[_without(len(probs), some)].mean(0) for some in chosen[1:]]
    shape = (0, *probs.shape[1:])
    return Side(plan, torch.eye(len(chosen), dtype=torch.float64), columns,
                torch.stack(rest) if rest else probs.new_zeros(shape))  # fmt: skip


def of_gaussians(mode: Mode, judge: Evaluator, splits: int, seed: int) -> Side:
    """Measure draws of runs that are a Gaussian's each, such as VI's: one predictive a run; return the side.

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
    return Side(plan, weights, columns, probs.new_zeros((0, *probs.shape[1:])))


def figures(side: Side, column: str, against: Side) -> dict[str, Interval]:
    """Return a column of the table: figure -> value and interval, over the runs of the side and of the one against.

    Args:
        side: whose column.
        column: its name.
        against: what it is compared with; where that is the side itself, each half is compared with its own draws.
    """
    of, target = side.columns[column], against.columns["sample"].probs
    found = {}
    if side is against:
        found = {name: side.own(values) for name, values in of.near(target).items()}
    else:
        own = of.near(target[0])
        # Figure of all runs of the side against each half of the others'.
        theirs = [side.halves(torch.stack([n[row] for n in map(of.near, target)]).T)[0] for row in NEAR]
        for name, values in zip(NEAR, theirs, strict=True):
            other = against.plan.intervals(values[:, None])[0]
            found[name] = joined([side.plan.intervals(side.halves(own[name])[:, None])[0], other])
    return found | {name: side.own(values) for name, values in of.accuracies.items()}


def half_against_half(side: Side, column: str) -> dict[str, Interval]:
    """Compare what one half of the runs gives with the draws of the other; return figure -> mean over the halves.

    Low and high are where 95 % of the halves fall. Empty with fewer than three runs.
    """
    if not len(side.rest):
        return {}
    of = Column(side.columns[column].probs[1:], side.columns[column].sample_accuracy[1:])
    found = {}
    for name, values in of.near(side.rest).items():
        low, high = torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist()
        found[name] = Interval(float(values.mean()), low, high)
    return found


def _probs(mode: Mode, judge: Evaluator) -> Tensor:
    logits = predictions.logits(mode.members, judge.test.data, judge.device, batch=judge.test.batch)
    return logits.double().softmax(-1)


def _sample(probs: Tensor, judge: Evaluator, chosen: Sequence[Tensor]) -> Column:
    right = judge.accuracies(probs)
    return Column(torch.stack([probs[some].mean(0) for some in chosen]),
                  torch.stack([right[some].mean() for some in chosen]))  # fmt: skip


def _of_gaussians(fitted: Sequence[Gaussian], judge: Evaluator, samples: int, seed: int) -> Column:
    noise = torch.Generator().manual_seed(seed)
    found = [evaluate_gaussian(judge, q, samples, noise) for q in fitted]
    return Column(
        torch.stack([x.probs for x in found]),
        torch.stack([x.accuracies.mean() for x in found]),
        torch.tensor([x.mean_accuracy for x in found], dtype=torch.float64),
    )


def _positions(mode: Mode, runs: Tensor) -> Tensor:
    return torch.tensor([at for run in runs.tolist() for at in mode.runs[run]])


def _without(count: int, chosen: Tensor) -> Tensor:
    rest = torch.ones(count, dtype=torch.bool)
    rest[chosen] = False
    return rest


# The table of Xiao, Liu & Bamler 2023 (arXiv 2401.00611) with its own columns: HMC, an ensemble, VI, against HMC.


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
    drawn_samples = min(len(hmc), MOST_SAMPLES) if samples is None else samples
    for thing, number in (("samples", drawn_samples), ("splits", splits)):
        _check_whole(thing, number, _LEAST[thing])
    if to not in (None, "mean"):
        raise UsageError("what draws are aligned to", expected="None or 'mean'", found=repr(to)[:80])
    found = {name: _mode(name, members) for name, members in sides.items()}
    judge = make_evaluator(hmc, data, statistics, device, batch)
    measured: dict[str, Side] = {}
    with one_thread(hmc._member_nbytes < SMALL_MEMBER and judge.device.type == "cpu"):
        for name in ("hmc", "ensemble"):
            target: int | str = found[name].members.ids[0] if to is None else to
            measured[name] = of_draws(found[name], target, judge, splits, drawn_samples, seed)
        if vi is not None:
            measured["vi"] = of_gaussians(found["vi"], judge, splits, seed)
    return CompactComparison(
        sources={n: Source(cited(sides[n]), len(mode.runs), len(mode.members)) for n, mode in found.items()},
        to="the first" if to is None else "the mean",
        data=arguments.image_key(judge.test.data),
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
    runs: int = fit.RUNS,
    draws: int = fit.DRAWS,
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
    shard_files.check_folder(root)
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
    if (known := whole(number)) is None or known < least:
        raise UsageError(f"{thing} of a compact table", expected=f"a whole number from {least}", found=repr(number))


def _check(name: str, members: Collection, hmc: Collection) -> None:
    if not isinstance(members, Collection):
        raise UsageError(f"draws of {name}", expected="a Collection", found=type(members).__name__)
    own, theirs = ({n: tuple(t.shape) for n, t in c._skeleton().state_dict().items()} for c in (members, hmc))
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
