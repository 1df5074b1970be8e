"""The compact posterior: how much of an ensemble a diagonal Gaussian over weights keeps, before and after alignment.

The method is that of Xiao, Liu & Bamler 2023 (arXiv 2401.00611). The Gaussians are fitted to all members and to random
halves of the members; the figures of the halves give the intervals.

This is one file, because its pictures show the figures that are measured here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.evaluation.drawing import BLUE, GREY, RED, check_picture_path, panels_figure, save_figure
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.gaussian import PRUNING_RULES, Gaussian, fit_subsets
from checkpoints_zoo.populations.untrained_networks import STACK_BYTES, Evaluator, make_evaluator

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_MEANINGS = {
    "agreement": "share of inputs given the same class as by the ensemble, 0..1",
    "total_variation": "distance to the ensemble's probabilities, 0..1",
    "sample_accuracy": "mean test accuracy of the samples, 0..1",
    "mean_accuracy": "test accuracy of the network of the means, 0..1",
}
DEFAULT_LEVELS = tuple(i / 20 for i in range(20))  # Default shares of pruned weights.
MOST_SAMPLES = 100  # Largest default number of networks drawn from each Gaussian.

PANEL_SIZE = (4.6, 3.9)  # Width and height of a panel in inches.
COLUMN_COLOURS = {"members": GREY, "q_d": RED, "q_r": BLUE}
COLUMN_NAMES = {"members": "members", "q_d": "$q_d$, before alignment", "q_r": "$q_r$, after alignment"}
COLUMN_SYMBOLS = {"members": "members", "q_d": "$q_d$", "q_r": "$q_r$"}


@dataclass(frozen=True, eq=False, repr=False)
class Compact(PrintedResult):
    """Gaussians fitted to members before (q_d) and after (q_r) alignment, and figures that compare the Gaussians with
    the ensemble.

    Args:
        collection, citation: name of the members' collection, and text that cites the members.
        to: reference of the alignment: "member 0", or "the mean".
        data: name and fingerprint of the images evaluated on.
        inputs, members, samples, splits, seed: numbers of inputs, members, samples and splits; seed of samples and
            splits.
        statistics: name and fingerprint of the images that running statistics were estimated on; "" if there are none.
        statistics_images: number of images that running statistics are estimated on.
        table: column ("members", "q_d", "q_r") -> row of `ROW_MEANINGS` -> Interval of the comparison with the ensemble
            of all members, to which the Gaussians were fitted; low and high are from a jackknife over members. The
            column "members" has no row of the mean's accuracy.
        held_out: column -> "agreement" and "total_variation" of Gaussians that are fitted to a random half of the
            members and compared with the ensemble of the other half (mean over the splits; 95 % of the splits lie
            between low and high).
        ensemble_accuracy: accuracy of the ensemble of all members.
        gain: accuracy of q_r's mean minus accuracy of q_d's mean.
        q_d, q_r: Gaussians fitted before and after alignment.
        levels: shares of weights pruned, 0..1.
        pruning: rule of `Gaussian.pruned` -> "q_d" or "q_r" -> accuracy of the pruned means at each level.
        drawing: accuracies of the members and of the samples, for the picture.
    """

    collection: str
    citation: str
    to: str
    data: str
    inputs: int
    members: int
    samples: int
    splits: int
    seed: int
    statistics: str
    statistics_images: int
    table: Mapping[str, Mapping[str, Interval]]
    held_out: Mapping[str, Mapping[str, Interval]]
    ensemble_accuracy: Interval
    gain: Interval
    q_d: Gaussian = field(repr=False)
    q_r: Gaussian = field(repr=False)
    levels: tuple[float, ...] = field(repr=False)
    pruning: Mapping[str, Mapping[str, tuple[float, ...]]] = field(repr=False)
    drawing: Mapping[str, tuple[float, ...]] = field(repr=False)

    def _one_line(self) -> str:
        return f"{self.collection!r}, {self.members} members aligned to {self.to}, gain {self.gain}"

    def to_text(self) -> str:
        """Return a table of the Gaussians' figures against the ensemble."""
        names = list(dict.fromkeys(name for figures in self.table.values() for name in figures))
        rows = [
            {"figure": name}
            | {
                column_name: str(figures[name]) if name in figures else "-"
                for column_name, figures in self.table.items()
            }
            for name in names
        ]
        measured = (
            f"on {self.data.split(' ')[0]}, {self.inputs:,} inputs; accuracy of q_r minus that of q_d: {self.gain}"
        )
        return f"{text_table(rows)}\n\n{self.members:,} members, {self.samples:,} samples, {measured}."

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each figure.

        Columns: `of` ("members", "q_d" or "q_r"), `figure`, `value`, `low`, `high`, and `held_out`, whether the figure
        comes from the held-out comparison.
        """
        import pandas as pd

        rows = [
            {"of": column_name, "figure": name, "value": x.value, "low": x.low, "high": x.high, "held_out": held}
            for held, table in ((False, self.table), (True, self.held_out))
            for column_name, figures in table.items()
            for name, x in figures.items()
        ]
        return pd.DataFrame(rows)

    def values(self) -> dict[str, Any]:
        """Return the figures as JSON values, with quantiles of the standard deviations."""
        names = (
            "collection", "citation", "to", "data", "inputs", "members", "samples", "splits", "seed", "statistics",
            "statistics_images",
        )  # fmt: skip
        quantiles = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]
        sigmas = {n: q.sigmas.double().sort().values for n, q in (("q_d", self.q_d), ("q_r", self.q_r))}
        return {
            **{name: getattr(self, name) for name in names},
            "level": self.gain.level,
            "table": {
                column_name: {n: asdict(x) for n, x in figures.items()} for column_name, figures in self.table.items()
            },
            "held_out": {
                column_name: {n: asdict(x) for n, x in figures.items()}
                for column_name, figures in self.held_out.items()
            },
            "ensemble_accuracy": asdict(self.ensemble_accuracy),
            "gain": asdict(self.gain),
            "weights": len(sigmas["q_d"]),
            "sigma": {
                name: {f"{q:g}": float(s[round(q * (len(s) - 1))]) for q in quantiles} for name, s in sigmas.items()
            },
            "pruning": {"levels": list(self.levels), **self.pruning},
        }

    def to_json(self) -> str:
        """Return the figures as JSON text."""
        return json.dumps(self.values(), indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw the standard deviations, the accuracies of samples and the pruned means into a PNG; return its path.

        Args:
            path: path of the PNG file; its folder is created. The file is written under a temporary name and renamed.

        Raises:
            UsageError: the path does not end in .png, or the file can't be written.
        """
        return save_figure(
            lambda: draw_compact(self), check_picture_path(path), f"{self.collection}: compact posterior"
        )


def fit_compact_posterior(
    members: Collection,
    data: ImageInput | None = None,
    *,
    to: int | str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    levels: Sequence[float] = DEFAULT_LEVELS,
    statistics: ImageInput | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> Compact:
    """Fit diagonal Gaussians to members before and after alignment, and compare them with the ensemble; return figures.

    Members keep their stored running statistics; running statistics of every other network are estimated anew.

    Args:
        members: two members or more, not aligned yet.
        data: labelled images, as `images.of` takes them; None for the collection's own test set.
        to: id of the member that all other members are aligned to, or "mean"; None for the first member.
        samples: number of networks drawn from each Gaussian; None for as many as members, at most 100.
        splits: number of random halves of the members from which the intervals are computed.
        seed: seed of the samples and the splits.
        levels: shares of weights to prune, 0..1.
        statistics: images for running statistics, by name (the training split) or as `images.of` takes them; None for
            the collection's own.
        device: torch device on which the networks run, in float32.
        batch: largest number of images in a forward pass.

    Raises:
        UsageError: there are fewer than two members, the images lack labels or have other classes, or a number is out
            of its range.
        SymmetryError: the architecture's symmetries can't be derived.
        MemberNotFound: there is no member with the id `to`.
        DamagedError: some weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> result = fit_compact_posterior(zoo.load("convnet-digits", n=8), splits=2, samples=4)
    >>> result.gain.value > 0.1
    True
    """
    arguments.check_collection(members)
    seed = arguments.check_seed(seed)
    if len(members) < 2:
        found = f"{len(members)} of {members.name}"
        expected = "two or more: one has no variance"
        raise UsageError("members of a compact posterior", expected=expected, found=found, do="Select more members")
    sample_count = min(len(members), MOST_SAMPLES) if samples is None else samples
    for option_name, number, smallest in (("samples", sample_count, 1), ("splits", splits, 2)):
        if type(number) is not int or number < smallest:
            raise UsageError(
                f"{option_name} of a compact posterior", expected=f"a whole number from {smallest}", found=repr(number)
            )
    evaluator = make_evaluator(members, data, statistics, device, batch)
    target: int | str = members.ids[0] if to is None else to
    aligned = members.align(to=target)
    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES and evaluator.device.type == "cpu"):
        subsets = [torch.arange(len(members)), *jackknife_subsets(len(members), splits, seed)]
        probs = predictions.logits(members, evaluator.test.data, evaluator.device, batch=batch).double().softmax(-1)
        gaussians = {
            "q_d": fit_gaussians(members, evaluator, subsets),
            "q_r": fit_gaussians(aligned, evaluator, subsets),
        }
        measured = measure_subsets(evaluator, probs, subsets, gaussians, sample_count, seed)
        pruning = {
            rule: {name: pruned_accuracies(evaluator, q[0], levels, rule) for name, q in gaussians.items()}
            for rule in PRUNING_RULES
        }
    figures = jackknife_intervals(measured, len(members), splits, seed)
    return Compact(
        collection=members.name,
        citation=members.citation,
        to="the mean" if target == "mean" else f"member {target}",
        data=arguments.report_image_name(evaluator.test.data),
        inputs=len(evaluator.test.data),
        members=len(members),
        samples=sample_count,
        splits=len(subsets) - 1,
        seed=seed,
        statistics=evaluator.statistics_image_name,
        statistics_images=evaluator.statistics_image_count,
        table={
            column_name: {row: figures[column_name, row] for row in ROW_MEANINGS if (column_name, row) in figures}
            for column_name in ("members", *gaussians)
        },
        held_out=held_out_figures(measured[1:]),
        ensemble_accuracy=figures["ensemble", "accuracy"],
        gain=figures["gain", "accuracy"],
        q_d=gaussians["q_d"][0],
        q_r=gaussians["q_r"][0],
        levels=tuple(levels),
        pruning=pruning,
        drawing=measured[0].accuracies,
    )


def fit_gaussians(members: Collection, evaluator: Evaluator, subsets: Sequence[Tensor]) -> list[Gaussian]:
    """Fit a Gaussian to each of some subsets of the members, which are read once; return the Gaussians.

    Args:
        members: stored or aligned members.
        evaluator: evaluator of networks of the members' architecture.
        subsets: positions of the members in each subset, two or more.
    """
    is_in_subset = torch.zeros(len(subsets), len(members), dtype=torch.bool)
    for row, subset in zip(is_in_subset, subsets, strict=True):
        row[subset] = True
    batches = members.batches(members._member_count_within(STACK_BYTES), evaluator.device, torch.float32)
    return fit_subsets(
        (stacked for _, stacked in batches),
        is_in_subset,
        evaluator.device,
        modules.superseded_names(members._skeleton()),
    )


def jackknife_subsets(member_count: int, split_count: int, seed: int) -> list[Tensor]:
    """Return the random subsets of members that `metrics.jackknife` measures besides the set of all members."""
    subsets: list[Tensor] = []

    def record_subset(member_positions: Tensor) -> Tensor:
        subsets.append(member_positions)
        return torch.zeros(1)

    metrics.jackknife(record_subset, member_count, seed, split_count)
    return subsets[1:]


@dataclass(frozen=True)
class GaussianPredictions:
    """Predictions and accuracies of a Gaussian's networks on the test images.

    Args:
        probs: mean probabilities over the samples, (input, class).
        accuracies: accuracy of each sampled network, (sample,).
        mean_accuracy: accuracy of the network whose weights are the Gaussian's means.
    """

    probs: Tensor
    accuracies: Tensor
    mean_accuracy: float


class SubsetFigures:
    """The figures of one subset of the members, and of the Gaussians fitted to the subset."""

    def __init__(
        self,
        subset: Tensor,
        probs: Tensor,
        predictions_by_name: Mapping[str, GaussianPredictions],
        evaluator: Evaluator,
    ) -> None:
        held_out = torch.ones(len(probs), dtype=torch.bool)
        held_out[subset] = False
        ensemble, labels = probs[subset].mean(0), evaluator.labels
        member_accuracies = (probs[subset].argmax(-1) == labels).double().mean(-1)
        self.accuracies = {"members": tuple(member_accuracies.tolist())}
        self.figures = {
            "members": {
                **_compare_to_ensemble(ensemble, ensemble),
                "sample_accuracy": float(member_accuracies.mean()),
            }
        }
        self.ensemble_accuracy = float(metrics.accuracy(ensemble, labels, check=False))
        held_out_ensemble = probs[held_out].mean(0) if held_out.any() else ensemble
        self.held_out = {"members": _compare_to_ensemble(ensemble, held_out_ensemble)}
        for name, q in predictions_by_name.items():
            self.accuracies[name] = tuple(q.accuracies.tolist())
            accuracies = {"sample_accuracy": float(q.accuracies.mean()), "mean_accuracy": q.mean_accuracy}
            self.figures[name] = {**_compare_to_ensemble(q.probs, ensemble), **accuracies}
            self.held_out[name] = _compare_to_ensemble(q.probs, held_out_ensemble)

    @property
    def flat_figures(self) -> dict[tuple[str, str], float]:
        """Return the figures by column and row, the ensemble's accuracy, and the gain of the mean's accuracy."""
        gain = self.figures["q_r"]["mean_accuracy"] - self.figures["q_d"]["mean_accuracy"]
        flat = {
            (column_name, row): value for column_name, figures in self.figures.items() for row, value in figures.items()
        }
        return {**flat, ("ensemble", "accuracy"): self.ensemble_accuracy, ("gain", "accuracy"): gain}


def measure_subsets(
    evaluator: Evaluator,
    probs: Tensor,
    subsets: Sequence[Tensor],
    gaussians: Mapping[str, Sequence[Gaussian]],
    sample_count: int,
    seed: int,
) -> list[SubsetFigures]:
    """Sample the Gaussians fitted to each subset of the members, and compare them with the subset's ensemble; return
    figures.

    Args:
        evaluator: evaluator of networks on the test images.
        probs: class probabilities of the members, (member, input, class).
        subsets: positions of the members in each subset.
        gaussians: name -> one Gaussian per subset; all names get the same noise, each subset its own noise.
        sample_count: number of networks drawn from each Gaussian.
        seed: seed of the noise.
    """
    noise = {name: torch.Generator().manual_seed(seed) for name in gaussians}
    measured = []
    for i, subset in enumerate(subsets):
        networks = {
            name: evaluate_gaussian(evaluator, q[i], sample_count, noise[name]) for name, q in gaussians.items()
        }
        measured.append(SubsetFigures(subset, probs, networks, evaluator))
    return measured


def evaluate_gaussian(
    evaluator: Evaluator, q: Gaussian, sample_count: int, generator: torch.Generator
) -> GaussianPredictions:
    """Evaluate samples of a Gaussian and the network of its mean weights; return probabilities and accuracies.

    Args:
        evaluator: evaluator of networks on the test images.
        q: Gaussian to evaluate.
        sample_count: number of samples.
        generator: random generator of the noise.
    """
    probs: Tensor | float = 0.0
    accuracies = []
    for count in _batch_sizes(q, sample_count):
        log_probs = evaluator.log_probs(q.sample(count, generator))
        probs = probs + log_probs.exp().sum(0)
        accuracies.append(evaluator.accuracies(log_probs))
    center_accuracy = float(evaluator.accuracies(evaluator.log_probs(q.center)))
    return GaussianPredictions(torch.as_tensor(probs) / sample_count, torch.cat(accuracies), center_accuracy)


def pruned_accuracies(
    evaluator: Evaluator, q: Gaussian, levels: Sequence[float], pruning_rule: str
) -> tuple[float, ...]:
    """Return the accuracy of a Gaussian's pruned means at each level, with running statistics estimated anew."""
    start, accuracies = 0, []
    for count in _batch_sizes(q, len(levels)):
        accuracies += evaluator.accuracies(
            evaluator.log_probs(q.pruned(levels[start : start + count], pruning_rule))
        ).tolist()
        start += count
    return tuple(accuracies)


def _batch_sizes(q: Gaussian, sample_count: int) -> list[int]:
    """Return how many networks are made at a time, so that their bytes fit into `STACK_BYTES`."""
    samples_per_batch = max(1, STACK_BYTES // max(1, 4 * sum(mean.numel() for mean in q.mean.values())))
    return [min(samples_per_batch, sample_count - start) for start in range(0, sample_count, samples_per_batch)]


def jackknife_intervals(
    figures_of_subsets: Sequence[SubsetFigures], member_count: int, split_count: int, seed: int
) -> dict[tuple[str, str], Interval]:
    """Return the figures of all members, with jackknife intervals from the figures of the subsets.

    Args:
        figures_of_subsets: figures of all members, followed by the figures of each subset of `jackknife_subsets`.
        member_count, split_count, seed: same arguments as in `jackknife_subsets`.
    """
    next_figures = iter(figures_of_subsets)
    results = metrics.jackknife(
        lambda _: torch.tensor(list(next(next_figures).flat_figures.values()), dtype=torch.float64),
        member_count,
        seed,
        split_count,
    )
    return {key: _cut_to_range(key, x) for key, x in zip(figures_of_subsets[0].flat_figures, results, strict=True)}


def _cut_to_range(column_and_row: tuple[str, str], interval: Interval) -> Interval:
    """Cut an interval at the figure's range, 0..1 (-1..1 for a difference); return the interval."""
    if interval.low is None or interval.high is None:
        return interval
    return replace(
        interval, low=max(interval.low, -1.0 if column_and_row[0] == "gain" else 0.0), high=min(interval.high, 1.0)
    )


def held_out_figures(figures_of_splits: Sequence[SubsetFigures]) -> dict[str, dict[str, Interval]]:
    """Return the figures of one half of the members against the ensemble of the other half: means over splits, and
    ranges of 95 % of the splits."""
    if not figures_of_splits:
        return {}
    intervals_by_column: dict[str, dict[str, Interval]] = {}
    for column_name, figures in figures_of_splits[0].held_out.items():
        intervals_by_column[column_name] = {}
        for row in figures:
            values = torch.tensor(
                [split.held_out[column_name][row] for split in figures_of_splits], dtype=torch.float64
            )
            low, high = torch.quantile(values, values.new_tensor([0.025, 0.975])).tolist()
            intervals_by_column[column_name][row] = Interval(float(values.mean()), low, high)
    return intervals_by_column


def _compare_to_ensemble(probs: Tensor, ensemble_probs: Tensor) -> dict[str, float]:
    return {
        "agreement": float(metrics.agreement(probs, ensemble_probs, check=False)),
        "total_variation": float(metrics.total_variation(probs, ensemble_probs, check=False)),
    }


def draw_compact(compact: Compact) -> Figure:
    """Draw the panels; return the figure, whose axes have the names of the panels as labels."""
    counts = f"{compact.members} members, aligned to {compact.to}; {compact.samples} samples"
    figure = panels_figure(
        3, PANEL_SIZE, f"{compact.collection}: {counts}", f"{compact.data.split(' ')[0]}, {compact.inputs:,} inputs"
    )
    grid = figure.add_gridspec(1, 3)
    _draw_sigmas(figure.add_subplot(grid[0], label="sigma"), {"q_d": compact.q_d.sigmas, "q_r": compact.q_r.sigmas})
    _draw_accuracies(figure.add_subplot(grid[1], label="accuracy"), compact)
    _draw_pruning(figure.add_subplot(grid[2], label="pruning"), compact)
    return figure


def _draw_sigmas(axes: Axes, sigmas: dict[str, Tensor]) -> None:
    import numpy as np

    values = {name: s.double().cpu().numpy() for name, s in sigmas.items()}
    edges = np.linspace(0, max(float(s.max()) for s in values.values()) or 1.0, 41).tolist()
    highest_bar = 0.0
    for name, s in values.items():
        bar_heights, *_ = axes.hist(
            s, edges, histtype="stepfilled", facecolor=(COLUMN_COLOURS[name], 0.3),
            edgecolor=COLUMN_COLOURS[name], linewidth=1.4,
            label=f"{COLUMN_NAMES[name]}: median {np.median(s):.3g}",
        )  # fmt: skip
        highest_bar = max(highest_bar, float(np.max(bar_heights)))
    axes.set(title="Standard deviations", xlabel="σ of a weight", ylabel="weights", ylim=(0, highest_bar * 1.35))
    axes.set_xlim(0, None)
    axes.legend(loc="upper right")


def _draw_accuracies(axes: Axes, compact: Compact) -> None:
    edges = [5.0 * i for i in range(21)]
    highest_bar = 0.0
    for name, accuracies in compact.drawing.items():
        shares = [100 * a for a in accuracies]
        legend_label = COLUMN_SYMBOLS[name] if name == "members" else f"samples of {COLUMN_SYMBOLS[name]}"
        weights = [1 / len(shares)] * len(shares)
        bar_heights, *_ = axes.hist(
            shares, edges, weights=weights, histtype="stepfilled", facecolor=(COLUMN_COLOURS[name], 0.3),
            edgecolor=COLUMN_COLOURS[name], linewidth=1.4,
            label=f"{legend_label}: mean {sum(shares) / len(shares):.1f} %",
        )  # fmt: skip
        highest_bar = max(highest_bar, float(max(bar_heights)))
    for name in ("q_d", "q_r"):
        mean = 100 * compact.table[name]["mean_accuracy"].value
        text = f"mean of {COLUMN_SYMBOLS[name]}: {mean:.1f} %"
        axes.axvline(mean, ymax=0.6, color=COLUMN_COLOURS[name], linewidth=2, linestyle="--", label=text)
    axes.set(
        title="Accuracies", xlabel="test accuracy (%)", ylabel="share", xlim=(0, 100), ylim=(0, highest_bar * 1.75)
    )
    axes.set_yticks([i / 5 for i in range(6) if i / 5 <= highest_bar * 1.2])
    axes.legend(loc="upper left")


def _draw_pruning(axes: Axes, compact: Compact) -> None:
    levels = [100 * level for level in compact.levels]
    text_of_rule = {"sigma": "lowest σ kept", "snr": "largest |μ|/σ kept"}
    for rule, style in (("sigma", "-"), ("snr", ":")):
        for name, accuracies in compact.pruning[rule].items():
            percentages: Sequence[float] = [100 * a for a in accuracies]
            label = f"mean of {COLUMN_SYMBOLS[name]}, {text_of_rule[rule]}"
            axes.plot(levels, percentages, style, color=COLUMN_COLOURS[name], marker="o", markersize=3, label=label)
    axes.set(title="Pruning", xlabel="weights set to 0 (%)", ylabel="test accuracy (%)", ylim=(0, 135))
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="upper right", ncols=2, fontsize=7.5)
