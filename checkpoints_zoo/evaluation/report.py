"""The result of an evaluation: figures with intervals, curves over sizes, before and after temperature scaling.

This file also makes the tables and texts of these figures; report_pictures.py draws them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import growth, report_pictures
from checkpoints_zoo.evaluation.drawing import check_picture_path, save_figure
from checkpoints_zoo.evaluation.figures import FIGURES, KNOWN_FIGURES, MEMBER_DIFFERENCES, TEMPERATURE, find_figure
from checkpoints_zoo.evaluation.growth import Growth, Needed
from checkpoints_zoo.evaluation.held_out import HELD_OUT_RULE
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.report_remarks import remarks_on
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.formats.printing import PrintedResult
from checkpoints_zoo.formats.text import align_columns, count_with_noun, finite_or_null, one_line

if TYPE_CHECKING:
    import pandas as pd

MOST_SIZES = 3  # Largest number of ensemble sizes in a text table.
Curve = Mapping[int, Mapping[str, Interval]]


@dataclass(frozen=True)
class ScaledFigures:
    """The figures after temperature scaling; each ensemble's mean probabilities have their own temperature.

    Args:
        held_out: name and fingerprint of the images that the temperatures were fitted to.
        inputs: number of the held-out inputs.
        share: the share of the report's images that was held out; None if other images were used.
        ensemble, member, curve: tables as in the report, with the figure "temperature" and without figures that scaling
            does not change.
        growth: figure -> the figure's limit, and the distance of each ensemble size from the limit.
    """

    held_out: str
    inputs: int
    share: float | None
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Curve
    growth: Mapping[str, Growth] = field(default_factory=dict, repr=False)

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble after scaling.

        Raises:
            UsageError: there is no figure of this name.
        """
        return find_figure(self.ensemble, figure)

    @property
    def temperature(self) -> Interval:
        """The temperature of the whole ensemble."""
        return self.ensemble[TEMPERATURE]

    @property
    def at_bound(self) -> bool:
        """Whether the temperature is the lowest or highest allowed value, so that the best value may lie outside."""
        return self.temperature.value in (
            KNOWN_FIGURES[TEMPERATURE].lowest_value,
            KNOWN_FIGURES[TEMPERATURE].highest_value,
        )

    def needed(self, figure: str, within: float | str) -> Needed:
        """Return the number of members needed after scaling, as `Report.needed` does."""
        return growth.needed_members(self.growth, figure, within)

    def to_json(self) -> dict[str, Any]:
        """Return the temperature and its held-out inputs as JSON values."""
        rule = None if self.share is None else HELD_OUT_RULE
        facts = {"held_out": self.held_out, "inputs": self.inputs, "share": self.share, "rule": rule}
        return {**facts, **asdict(self.temperature), "at_bound": self.at_bound}


@dataclass(frozen=True, repr=False)
class Report(PrintedResult):
    """The result of an evaluation: figures of ensembles, each an Interval (value, low, high).

    Args:
        collection: name of the collection.
        citation: citation of the members.
        data, ood: names and fingerprints of the images ("digits/test 0123456789abcdef"); ood is "" if there are none.
        inputs, ood_inputs: number of test inputs, and number of inputs out of distribution.
        members: number of measured members.
        ensemble: figure -> value of the ensemble of all members; low and high are from a delete-d jackknife, which
            leaves out half of the members (d = N/2).
        member: figure -> mean over the single members; low and high are from a bootstrap over members.
        curve: size -> figure -> mean over ensembles of that size; low and high bound the figure of a new ensemble of
            that size (for all members, low and high are the same as in `ensemble`).
        drawing: further values for the picture: accuracy of each member, reliability bins, mutual information of each
            input.
        growth: figure -> the figure's limit (the figure of an infinite ensemble), and the distance of each ensemble
            size from the limit.
        within: figure -> requested distance from the limit.
        calibrated: the figures after temperature scaling; None without scaling.
        has_members: whether members were measured; a posterior mean has none, and no figures of diversity.
    """

    collection: str
    citation: str
    data: str
    ood: str
    inputs: int
    ood_inputs: int
    members: int
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Curve
    drawing: Mapping[str, Any] = field(repr=False, compare=False)
    growth: Mapping[str, Growth] = field(default_factory=dict, repr=False)
    within: Mapping[str, float | str] = field(default_factory=dict)
    calibrated: ScaledFigures | None = None
    has_members: bool = True

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble.

        Raises:
            UsageError: there is no figure of this name, or a posterior mean has no such figure.
        """
        if not self.has_members and figure in FIGURES and FIGURES[figure].input_kind == MEMBER_DIFFERENCES:
            expected = "a figure that is defined without members"
            found = "one of the differences between members, and a posterior mean has none"
            raise UsageError(f"figure {figure!r}", expected=expected, found=found)
        return find_figure(self.ensemble, figure)

    def _one_line(self) -> str:
        figures = ", ".join(f"{n} {self.ensemble[n].value:.4g}" for n in ("accuracy", "nll") if n in self.ensemble)
        return f"{self.collection!r}, {count_with_noun(self.members, 'member')} on {self.data.split(' ')[0]}, {figures}"

    def to_text(self, sizes: Iterable[int] | None = None, figures: Iterable[str] = KNOWN_FIGURES) -> str:
        """Return a table with one figure a row and one ensemble size a column, and lines that explain the table.

        Args:
            sizes: ensemble sizes of the columns; None for the smallest, a middle and the largest size.
            figures: names of the figures in the rows.
        """
        all_sizes = sorted(self.curve)
        shown_sizes = (
            all_sizes if len(all_sizes) <= MOST_SIZES else [all_sizes[0], all_sizes[len(all_sizes) // 2], all_sizes[-1]]
        )
        return _report_text(self, shown_sizes if sizes is None else list(sizes), list(figures))

    @property
    def limits(self) -> dict[str, Interval]:
        """Figure -> estimate for an infinite ensemble of such members, with an interval over members."""
        return {name: x.limit for name, x in self.growth.items()}

    def needed(self, figure: str, within: float | str) -> Needed:
        """Return how many members bring the mean figure within some distance of its limit.

        Args:
            figure: name of the figure.
            within: the allowed distance from the limit, in the figure's unit, or as a share of the limit ("5%").

        Raises:
            UsageError: there is no figure of this name, or the distance is not above 0.

        >>> import checkpoints_zoo as zoo
        >>> report = zoo.evaluate(zoo.load("convnet-digits", n=16))
        >>> print(report.needed("brier", within=0.002))
        8
        """
        return growth.needed_members(self.growth, figure, within)

    @property
    def remarks(self) -> list[str]:
        """Sentences about missing intervals, and about figures that are best for fewer than all members."""
        return remarks_on(self, self.ensemble)

    def answers(self) -> Iterator[tuple[str, Needed]]:
        """Yield the needed members for each distance in `within`: ("", needed) before scaling, ("scaled", needed)
        after."""
        for figure, within in self.within.items():
            yield "", self.needed(figure, within)
            if self.calibrated is not None and figure in self.calibrated.growth:
                yield "scaled", self.calibrated.needed(figure, within)

    def _rows(self) -> list[dict[str, Any]]:
        rows = list(_figure_rows(self.curve, self.member, ""))
        if self.calibrated is not None:
            rows += _figure_rows(self.calibrated.curve, self.calibrated.member, ", scaled")
        return rows

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each figure and size; columns: of, members, figure, value, low, high, unit,
        better."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return the report as JSON text, with null for values that could not be computed."""
        report_fields = {
            n: getattr(self, n) for n in ("collection", "citation", "data", "ood", "inputs", "ood_inputs", "members")
        }
        growths = {"ensemble": self.growth}
        if self.calibrated is not None:
            growths["ensemble, scaled"] = self.calibrated.growth
        limits = [
            {"of": row_kind, "figure": name, **asdict(x.limit)}
            for row_kind, growth_by_figure in growths.items()
            for name, x in growth_by_figure.items()
        ]
        needed = [{"of": "ensemble, scaled" if scaled else "ensemble", **asdict(x)} for scaled, x in self.answers()]
        values = {
            **report_fields,
            "level": 0.95,
            "temperature": None if self.calibrated is None else self.calibrated.to_json(),
            "needed": needed,
            "remarks": self.remarks,
            "limits": limits,
            "figures": self._rows(),
        }
        return json.dumps(finite_or_null(values), indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw reliability, curves over ensemble size, member accuracies and mutual information into a PNG file; return
        its path.

        Equal reports give files with equal bytes.

        Args:
            path: path of the PNG file; its folder is made if missing. The file is written under a temporary name and
                then renamed.

        Raises:
            UsageError: the name does not end in .png, or the file can't be written.
        """
        return save_figure(
            lambda: report_pictures.draw_report(self),
            check_picture_path(path),
            report_pictures.picture_title(self),
            report_pictures.citation_without_source(self),
        )

    def plot_curves(self, path: str | Path, figures: Iterable[str] | None = None) -> Path:
        """Draw figures over ensemble size, with bands, limits and needed members, into a PNG file; return its path.

        Args:
            path: path of the PNG file; its folder is made if missing. The file is written under a temporary name and
                then renamed.
            figures: names of the figures, one panel each; None for all figures.

        Raises:
            UsageError: a figure does not exist, the name does not end in .png, or the file can't be written.
        """
        names = report_pictures.select_figures(self, figures)
        return save_figure(
            lambda: report_pictures.draw_curves(self, names),
            check_picture_path(path),
            report_pictures.picture_title(self),
            report_pictures.citation_without_source(self),
        )


def _figure_rows(curve: Curve, member: Mapping[str, Interval], kind_suffix: str) -> Iterator[dict[str, Any]]:
    """Yield one table row for each figure and size.

    Args:
        curve, member: the fields `curve` (figures by ensemble size) and `member` (mean figures of single members) of a
            report.
        kind_suffix: text that is appended to the column "of": "" or ", scaled".
    """
    kinds_sizes_figures = [("ensemble", size, figures) for size, figures in curve.items()]
    kinds_sizes_figures.append(("mean of members", 1, member))
    for row_kind, size, figures in kinds_sizes_figures:
        for name, x in figures.items():
            description = KNOWN_FIGURES[name]
            yield {
                "of": f"{row_kind}{kind_suffix}", "members": size, "figure": name, "value": x.value, "low": x.low,
                "high": x.high, "unit": description.unit, "better": description.better,
            }  # fmt: skip


def _report_text(report: Report, sizes: Sequence[int], figures: Sequence[str]) -> str:
    """Lay out a report and explain its intervals; return the text."""
    header_cells = ["ensemble of", *(f"{size:,}" for size in sizes)]
    rows = []
    for scaled, curve in ((False, report.curve), (True, report.calibrated.curve if report.calibrated else None)):
        for name in figures:
            if curve is None or name not in curve[report.members]:
                continue
            label = f"{KNOWN_FIGURES[name].label}{', scaled' if scaled and name != TEMPERATURE else ''}"
            rows.append([label, *(as_text(curve[size][name], KNOWN_FIGURES[name].scale) for size in sizes)])
    table = align_columns([header_cells, *rows], range(1, len(header_cells)))
    blocks = [table, "\n".join(_needed_members_lines(report)), _measurement_notes(report)]
    return "\n\n".join(block for block in blocks if block)


def _needed_members_lines(report: Report) -> Iterator[str]:
    """Yield a line of text for each distance in `within` that states the needed number of members."""
    for kind, answer in report.answers():
        growths = report.calibrated.growth if kind and report.calibrated is not None else report.growth
        scale = KNOWN_FIGURES[answer.figure].scale
        name, _, unit = KNOWN_FIGURES[answer.figure].label.removesuffix(")").rpartition(" (")
        within = f"{answer.within * scale:.4g}{'' if '..' in unit else f' {unit}'}"
        limit = as_text(growths[answer.figure].limit, scale)
        yield f"members needed for {name}{f', {kind},' if kind else ''} within {within} of its limit {limit}: {answer}"


def _measurement_notes(report: Report) -> str:
    """Return sentences on the measured members and inputs, the meaning of intervals, and the report's remarks."""
    measured_on = f"{report.data.split(' ')[0]}, {report.inputs:,} inputs"
    if report.ood:
        measured_on += f"; OOD: {report.ood.split(' ')[0]}, {report.ood_inputs:,} inputs"
    intervals = "[ ]: the range of 95 % of new ensembles of that size; for all members, a 95 % jackknife interval."
    if report.calibrated is not None:
        measured_on += (
            f". Temperature fitted to {report.calibrated.inputs:,} inputs of {report.calibrated.held_out.split(' ')[0]}"
        )
        if report.calibrated.at_bound:
            measured_on += ", on which no temperature is best: it is at its bound"
    lines = [one_line(f"Measured now on {measured_on}.", 400), *([intervals] if report.members >= 3 else [])]
    return "\n".join([*lines, *(line for remark in report.remarks for line in wrap(remark, 118))])
