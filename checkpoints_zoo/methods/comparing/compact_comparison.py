"""Gaussians over weights against HMC: the table of Xiao, Liu & Bamler 2023 (arXiv 2401.00611), and `zoo.compact`.

HMC, an ensemble, VI, and Gaussians fitted to the draws of HMC and the ensemble are all compared with HMC. Each method
is measured with all its runs and with random halves of its runs, which give the intervals.

This is one file, because `zoo.compact` and the result that it returns stand together; compact_measuring.py measures the
columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.tables import as_text, write_frame, write_text
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.text import align_columns, escape_latex, whole_number
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.methods.comparing.compact_measuring import (
    MethodPredictives,
    compare_halves,
    measure_draws,
    measure_gaussians,
    table_column,
)
from checkpoints_zoo.methods.comparing.draw_ensembles import ONE_MODE, DrawEnsemble, portable_citation
from checkpoints_zoo.methods.comparing.draws import MethodFits, fit_all
from checkpoints_zoo.methods.deep_ensemble import DeepEnsemble
from checkpoints_zoo.methods.fitting import DEFAULT_DRAWS, DEFAULT_RUNS
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.methods.vi import MeanField
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.compact_posterior import DEFAULT_LEVELS, MOST_SAMPLES, Compact, fit_compact_posterior
from checkpoints_zoo.populations.independent_units import INDEPENDENT_METHOD
from checkpoints_zoo.populations.untrained_networks import make_evaluator
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.workers import usable_cores

if TYPE_CHECKING:
    import pandas as pd

JSON_VERSION = 1  # Version of the JSON text.
# Figure -> title of its row in the table, and factor of its values there.
ROW_TITLES_AND_SCALES = {
    "agreement": ("agreement with HMC (0..1)", 1),
    "total_variation": ("total variation to HMC (0..1)", 1),
    "sample_accuracy": ("test accuracy of samples (%)", 100),
    "mean_accuracy": ("test accuracy of the mean (%)", 100),
}
METHOD_TITLES = {"hmc": "HMC", "ensemble": "ensemble", "vi": "VI"}
_LATEX_COLUMNS = {"sample": "sample", "q_d": "$q_d$", "q_r": "$q_r$", "q": "$q$"}

# Temperature 1 is the posterior itself, whichever temperature predicts best. The chains start at modes, where the log
# density is higher than at any draw: with a shorter warm-up or shorter trajectories the chains have not left the modes.
DEFAULT_HMC, DEFAULT_VI, DEFAULT_ENSEMBLE = (
    Hmc(temperature=1.0, steps=50, warmup=100),
    MeanField(temperature=1.0),
    DeepEnsemble(),
)
_SMALLEST_OPTION_VALUES = {"samples": 1, "splits": 2}

Figures = Mapping[str, Interval]


@dataclass(frozen=True)
class MethodDraws:
    """The draws of one method in the table.

    Args:
        citation: citation of the draws, without the folder of this machine.
        runs: number of chains of HMC, of members of an ensemble, or of fits of VI.
        draws: number of draws of all runs.
        facts: settings and records of the fits as JSON values; see `draws.Draws`.
    """

    citation: str
    runs: int
    draws: int
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class CompactComparison:
    """HMC, an ensemble and VI, and Gaussians fitted to the first two, compared with HMC.

    Args:
        sources: "hmc", "ensemble" and "vi" -> the method's draws; "vi" is absent if there are no draws of VI.
        to: reference of the alignment: "the first" draw of each method, or "the mean".
        data: name and fingerprint of the images evaluated on.
        inputs: number of images.
        samples: number of networks drawn from each Gaussian.
        splits: number of random halves of the runs.
        seed: seed of samples and splits.
        statistics: name and fingerprint of the images that running statistics were estimated on; "" if there are none.
        table: method ("hmc", "ensemble" or "vi") -> column -> row of `ROW_TITLES_AND_SCALES` -> Interval. The columns
            are "sample" (the draws themselves), "q_d" (the Gaussian fitted to the draws before alignment) and "q_r"
            (the Gaussian fitted to the aligned draws); "vi" has "q" alone, the fitted posterior. Agreement and total
            variation compare a prediction with the mean prediction of all draws of HMC. The column "sample" has no
            accuracy of the mean. Intervals are delete-half jackknifes over chains, members and fits of VI, joined.
        halves: column of "hmc" -> "agreement" and "total_variation" between one half of the chains and the draws of the
            other half of the chains (mean over the splits, and range of 95 % of the splits).
    """

    sources: Mapping[str, MethodDraws]
    to: str
    data: str
    inputs: int
    samples: int
    splits: int
    seed: int
    statistics: str
    table: Mapping[str, Mapping[str, Figures]]
    halves: Mapping[str, Figures]

    def __getitem__(self, key: tuple[str, str, str]) -> Interval:
        """Return the figure of a (method, column, row), such as ("hmc", "q_r", "mean_accuracy").

        Raises:
            UsageError: there is no such figure.
        """
        method, column, row = key
        figures = self.table.get(method, {}).get(column, {})
        if row not in figures:
            row_names = ", ".join(f"{m} {c}" for m, columns in self.table.items() for c in columns)
            raise UsageError(f"figure {key!r}", expected=f"a row of one of {row_names}", found="none such")
        return figures[row]

    def _rows(self) -> list[dict[str, Any]]:
        whole_rows = [(m, c, False, f) for m, columns in self.table.items() for c, f in columns.items()]
        halves = [("hmc", c, True, f) for c, f in self.halves.items()]
        return [
            {
                "method": m,
                "column": c,
                "figure": n,
                "value": x.value,
                "low": x.low,
                "high": x.high,
                "held_out": is_held_out,
            }
            for m, c, is_held_out, figures_by_row in whole_rows + halves
            for n, x in figures_by_row.items()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each figure: method, column, figure, value, low, high, held_out."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return the result as JSON text, which `from_json` reads."""
        values = {"version": JSON_VERSION, "level": 0.95, **asdict(self)}
        return json.dumps(values, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that `to_json` returned; return the comparison.

        Raises:
            FormatError: the text is something else, or was written by a newer version.
        """
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != JSON_VERSION:
                raise FormatError("compact table", expected=f"version {JSON_VERSION}", found=str(version)[:80])
            values.pop("level")
            table = {
                m: {c: _intervals_from_json(f) for c, f in columns.items()}
                for m, columns in values.pop("table").items()
            }
            halves = {c: _intervals_from_json(f) for c, f in values.pop("halves").items()}
            sources = {n: MethodDraws(**source) for n, source in values.pop("sources").items()}
            return cls(sources=sources, table=table, halves=halves, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError("compact table", expected="the JSON that `to_json` gives", found=repr(error)) from error

    def to_text(self) -> str:
        """Return the table as text, with an explanation."""
        rows = [["", *column_titles(self)], *([words, *values] for words, values in table_cells(self))]
        blocks = [align_columns(rows, range(1, len(rows[0])))]
        if self.halves:
            rows = [["", *(f"HMC {column}" for column in self.halves)]]
            rows += [
                [
                    f"{ROW_TITLES_AND_SCALES[row][0]}, half against half",
                    *(as_text(figures[row], 1) for figures in self.halves.values()),
                ]
                for row in ("agreement", "total_variation")
            ]
            blocks.append(align_columns(rows, range(1, len(rows[0]))))
        return "\n\n".join([*blocks, "\n".join(explain_table(self))])

    def to_latex(self) -> str:
        """Return the table for LaTeX with booktabs, in the layout of the paper."""
        column_count = len(column_titles(self))
        method_cells, first_column, rules = [], 2, []
        for method, columns_of_method in self.table.items():
            method_cells.append(
                rf"\multicolumn{{{len(columns_of_method)}}}{{c}}{{{escape_latex(METHOD_TITLES[method])}}}"
            )
            rules.append(rf"\cmidrule(lr){{{first_column}-{first_column + len(columns_of_method) - 1}}}")
            first_column += len(columns_of_method)
        column_names = [
            _LATEX_COLUMNS[column] for columns_of_method in self.table.values() for column in columns_of_method
        ]
        lines = [
            rf"\begin{{tabular}}{{l{'r' * column_count}}}",
            r"\toprule",
            " & ".join(["", *method_cells]) + r" \\",
            " ".join(rules),
            " & ".join(["", *column_names]) + r" \\",
            r"\midrule",
            *(" & ".join([escape_latex(words), *("--" if x == "-" else x for x in values)]) + r" \\"
              for words, values in table_cells(self)),
            r"\bottomrule",
            r"\end{tabular}",
        ]  # fmt: skip
        return "\n".join(lines)

    def write(self, path: str | Path) -> Path:
        """Write the table by the ending of a name: .json, .tex, .csv or .parquet; return its path.

        Raises:
            UsageError: the name has another ending.
            StorageError: the file can't be written.
        """
        path = Path(path).expanduser()
        texts = {".json": self.to_json, ".tex": self.to_latex}
        if path.suffix.lower() not in texts:
            return write_frame(self.to_frame(), path)
        return write_text(texts[path.suffix.lower()](), path)


def _intervals_from_json(intervals_json: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval(**x) for name, x in intervals_json.items()}


def table_cells(comparison: CompactComparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table: the title of the row, and a text for each column in the table's order."""
    columns = [figures for figures_by_row in comparison.table.values() for figures in figures_by_row.values()]
    for row, (row_title, scale) in ROW_TITLES_AND_SCALES.items():
        yield row_title, [as_text(figures[row], scale) if row in figures else "-" for figures in columns]


def column_titles(comparison: CompactComparison) -> list[str]:
    """Return the names of the columns, such as "HMC q_r"."""
    return [
        f"{METHOD_TITLES[method]} {column}"
        for method, figures_by_row in comparison.table.items()
        for column in figures_by_row
    ]


def explain_table(comparison: CompactComparison) -> list[str]:
    """Explain rows, columns and intervals; return the lines."""
    hmc, ensemble, vi = (comparison.sources.get(name) for name in ("hmc", "ensemble", "vi"))
    sources = [f"HMC: {_count_draws_text(hmc, 'chain')}", f"ensemble: {ensemble.draws:,} members" if ensemble else ""]
    sources += [f"VI: {_count_draws_text(vi, 'fit')}"] if vi is not None else []
    lines = [
        f"Measured on {comparison.data.split(' ')[0]}, {comparison.inputs:,} inputs. {'; '.join(sources)}.",
        f"{comparison.samples} samples of each q_d and q_r; draws aligned to {comparison.to}"
        f"{' of each' if comparison.to == 'the first' else ''}.",
        "Agreement and total variation: averaged predictions against those of all of HMC's draws; HMC's own are 1 and"
        " 0. Half against half: one half of the chains, or what is fitted to it, against the draws of the other.",
        f"[ ]: 95 % jackknife intervals over chains, members and fits ({comparison.splits} halves of each), joined;"
        " half against half: where 95 % of the halves fall. None with fewer than three.",
    ]
    if vi is not None:
        lines.append("VI: each fit by itself, mean over fits. Its mean is that of a fit's draws.")
    if comparison.statistics:
        lines.append(f"Running statistics of Gaussians' networks: from {comparison.statistics.split(' ')[0]}.")
    return lines


def _count_draws_text(source: MethodDraws | None, run_noun: str) -> str:
    if source is None:
        return ""
    return f"{source.draws:,} draws of {source.runs:,} {run_noun}{'s' if source.runs != 1 else ''}"


@overload
def compact(
    members: Collection,
    data: ImageInput | None = None,
    *,
    against: None = None,
    vi: None = None,
    to: int | str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    levels: Sequence[float] = DEFAULT_LEVELS,
    statistics: ImageInput | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> Compact: ...


@overload
def compact(
    members: Collection,
    data: ImageInput | None = None,
    *,
    against: Collection,
    vi: Collection | None = None,
    to: str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    statistics: ImageInput | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> CompactComparison: ...


def compact(
    members: Collection,
    data: ImageInput | None = None,
    *,
    against: Collection | None = None,
    vi: Collection | None = None,
    to: int | str | None = None,
    samples: int | None = None,
    splits: int = 20,
    seed: int = 0,
    levels: Sequence[float] = DEFAULT_LEVELS,
    statistics: ImageInput | None = None,
    device: str | torch.device = "cpu",
    batch: int = 512,
) -> Compact | CompactComparison:
    """Fit diagonal Gaussians to members before and after alignment, and compare the Gaussians with the ensemble or with
    HMC; return all figures.

    Without `against` the Gaussians are compared with the ensemble of the members, and the result is a `Compact`. If
    `against` gives draws of HMC, then HMC is the reference: the members, the draws, and the Gaussians fitted to each
    are compared with it, as in the table of Xiao, Liu and Bamler 2023, and the result is a `CompactComparison`. Members
    keep their stored running statistics; the running statistics of every other network are estimated anew.

    Args:
        members: two members or more, not aligned yet.
        data: labelled images, as `images.of` takes them; None for the collection's own test set.
        against: draws of HMC of the same network; the column `run` of their rows numbers the chains.
        vi: draws of variational posteriors, two or more per `run`, used with `against`; None to leave out variational
            posteriors. The mean weights of a posterior are the mean over the draws of its run.
        to: id of the member that all other members are aligned to, or "mean"; None for the first member. With
            `against`, the draws of each method are aligned to "mean" or to their first draw.
        samples: number of networks drawn from each Gaussian; None for as many as members (draws of HMC), at most 100.
        splits: number of random halves of members, chains and fits from which the intervals are computed.
        seed: seed of samples and splits.
        levels: without `against`, shares of weights to prune, 0..1.
        statistics: images for running statistics, by name (the training split) or as `images.of` takes them; None for
            the collection's own.
        device: torch device on which the networks run, in float32.
        batch: largest number of images in a forward pass.

    Raises:
        UsageError: there are fewer than two members or draws, the draws are of another network, the images lack labels
            or have other classes, or a number is out of its range.
        SymmetryError: the architecture's symmetries can't be derived.
        MemberNotFound: there is no member with the id `to`.
        DamagedError: some weights or logits are not finite.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=8)
    >>> compact(members, splits=2, samples=4).gain.value > 0.1
    True
    >>> comparison = compact(members[4:], against=members[:4], samples=2, splits=2)
    >>> comparison["hmc", "sample", "agreement"].value, comparison["ensemble", "sample", "agreement"].value > 0.9
    (1.0, True)
    """
    if against is None:
        if vi is not None:
            raise UsageError("vi", expected="None without against=", found=type(vi).__name__, do="Give draws of HMC")
        return fit_compact_posterior(
            members, data, to=to, samples=samples, splits=splits, seed=seed, levels=levels, statistics=statistics,
            device=device, batch=batch,
        )  # fmt: skip
    if levels is not DEFAULT_LEVELS:
        advice = "Prune the Gaussians of one collection alone"
        raise UsageError("levels", expected="none with against=", found=repr(list(levels))[:80], do=advice)
    return compare_with_hmc(
        against, members, vi, data, to=to, samples=samples, splits=splits, seed=seed, statistics=statistics,
        device=device, batch=batch,
    )  # fmt: skip


def compare_with_hmc(
    hmc: Collection,
    ensemble: Collection,
    vi: Collection | None,
    data: ImageInput | None,
    *,
    to: int | str | None,
    samples: int | None,
    splits: int,
    seed: int,
    statistics: ImageInput | None,
    device: str | torch.device,
    batch: int,
) -> CompactComparison:
    """Compare an ensemble, VI, and Gaussians fitted before and after alignment, with HMC; see `compact`."""
    draws = {"hmc": hmc, "ensemble": ensemble} | ({} if vi is None else {"vi": vi})
    for name, members in draws.items():
        _check_network(name, members, hmc)
    seed = arguments.check_seed(seed)
    sample_count = min(len(hmc), MOST_SAMPLES) if samples is None else samples
    for option_name, number in (("samples", sample_count), ("splits", splits)):
        _check_whole_number(option_name, number, _SMALLEST_OPTION_VALUES[option_name])
    if to not in (None, "mean"):
        raise UsageError("what draws are aligned to", expected="None or 'mean'", found=repr(to)[:80])
    ensembles = {name: _sort_by_run(name, members) for name, members in draws.items()}
    evaluator = make_evaluator(hmc, data, statistics, device, batch)
    measured: dict[str, MethodPredictives] = {}
    with one_thread(hmc._member_nbytes < SMALL_MEMBER_BYTES and evaluator.device.type == "cpu"):
        for name in ("hmc", "ensemble"):
            target: int | str = ensembles[name].members.ids[0] if to is None else to
            measured[name] = measure_draws(ensembles[name], target, evaluator, splits, sample_count, seed)
        if vi is not None:
            measured["vi"] = measure_gaussians(ensembles["vi"], evaluator, splits, seed)
    return CompactComparison(
        sources={
            n: MethodDraws(portable_citation(draws[n]), len(group.runs), len(group.members))
            for n, group in ensembles.items()
        },
        to="the first" if to is None else "the mean",
        data=arguments.report_image_name(evaluator.test.data),
        inputs=len(evaluator.test.data),
        samples=sample_count,
        splits=splits,
        seed=seed,
        statistics=evaluator.statistics_image_name,
        table={
            n: {c: table_column(method, c, measured["hmc"]) for c in method.columns} for n, method in measured.items()
        },
        halves={c: x for c in measured["hmc"].columns if (x := compare_halves(measured["hmc"], c))},
    )


def fit_and_compare(
    recipe: Recipe,
    out: str | Path,
    *,
    runs: int = DEFAULT_RUNS,
    draws: int = DEFAULT_DRAWS,
    hmc: Hmc = DEFAULT_HMC,
    vi: MeanField = DEFAULT_VI,
    workers: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    say: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> CompactComparison:
    """Fit HMC and VI to a recipe, train an ensemble by the recipe, and compare the three methods; return the table of
    Xiao, Liu & Bamler 2023.

    Fits of the same settings that the folder already has are read from there.

    Args:
        recipe: recipe that names the network and its training.
        out: folder in which the draws are stored.
        runs, draws: number of chains of HMC and of fits of VI, and number of draws of each. The ensemble has as many
            members as one chain has draws.
        hmc, vi: the methods with their settings.
        workers: number of worker processes; None for one per core.
        seed: seed of fits, samples and splits.
        device: device to compute on.
        say: function that is called with lines of text on the progress.
        options: further arguments of `compact`.

    Raises:
        UsageError: a method can't be used for the network, a package is missing, or `compact` raises this error.
    """
    numbers = {"runs": (runs, 1), "draws": (draws, 2), "steps": (hmc.steps, 1), "warmup": (hmc.warmup, 0)}
    numbers |= {
        n: (options[n], smallest) for n, smallest in _SMALLEST_OPTION_VALUES.items() if options.get(n) is not None
    }
    for option_name, (number, smallest) in numbers.items():
        _check_whole_number(option_name, number, smallest)
    root = Path(out).expanduser().absolute()
    disk.check_folder(root)
    fits = MethodFits(recipe, root, runs, draws, seed, device=device)
    fitted_draws, refusals = fit_all(
        fits, (hmc, DEFAULT_ENSEMBLE, vi), usable_cores() if workers is None else workers, say
    )
    for name, reason in refusals.items():
        raise UsageError(f"method {name!r}", expected=f"one that can be fitted to {recipe.name}", found=reason)
    draws_by_name = {draws.name: draws for draws in fitted_draws}
    hmc_draws, ensemble_draws, vi_draws = (draws_by_name[method.name] for method in (hmc, DEFAULT_ENSEMBLE, vi))
    comparison = compact(
        ensemble_draws.members, against=hmc_draws.members, vi=vi_draws.members, seed=seed, device=device, **options
    )
    facts = {"hmc": hmc_draws.facts, "ensemble": ensemble_draws.facts, "vi": vi_draws.facts}
    return replace(comparison, sources={n: replace(source, facts=facts[n]) for n, source in comparison.sources.items()})


def _check_whole_number(option_name: str, number: object, smallest: int) -> None:
    if (integer := whole_number(number)) is None or integer < smallest:
        raise UsageError(
            f"{option_name} of a compact table", expected=f"a whole number from {smallest}", found=repr(number)
        )


def _check_network(method_name: str, members: Collection, hmc: Collection) -> None:
    arguments.check_collection(members, f"draws of {method_name}")
    shapes, expected = ({n: tuple(t.shape) for n, t in c._skeleton().state_dict().items()} for c in (members, hmc))
    if shapes != expected or members.classes != hmc.classes:
        differing_tensor = next((n for n in {**expected, **shapes} if shapes.get(n) != expected.get(n)), None)
        raise UsageError(
            f"draws of {method_name}",
            expected=f"the tensors and classes of {hmc.name}",
            found="other classes" if differing_tensor is None else f"others, such as {differing_tensor!r}",
            do="All draws have to be of one network",
        )


def _sort_by_run(method_name: str, members: Collection) -> DrawEnsemble:
    """Sort draws by their runs; each independent member is a run."""
    if len(members) < 2:
        raise UsageError(f"draws of {method_name}", expected="two or more", found=str(len(members)))
    columns = (members.rows.column(column).to_pylist() for column in ("method", "run"))
    positions_by_run: dict[int, list[int]] = {}
    for position, (method, run) in enumerate(zip(*columns, strict=True)):
        positions_by_run.setdefault(
            position if method == INDEPENDENT_METHOD else -1 if run is None else run, []
        ).append(position)
    positions_of_runs = [positions_by_run[run] for run in sorted(positions_by_run)]
    if method_name == "vi" and min(map(len, positions_of_runs)) < 2:
        raise UsageError("draws of vi", expected="two or more of each run", found="one of some", do="Draw more")
    ends = list(accumulate(map(len, positions_of_runs)))
    new_positions = tuple(tuple(range(end - len(run), end)) for run, end in zip(positions_of_runs, ends, strict=True))
    return DrawEnsemble(ONE_MODE, members.take([at for run in positions_of_runs for at in run]), new_positions)
