"""The summary: all figures in one table, and the curves over the sizes of ensembles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from checkpoints_zoo.evaluation.figures import (
    CALIBRATION,
    DIVERSITY,
    FIGURES,
    KNOWN_FIGURES,
    LIKELIHOOD,
    OOD_DETECTION,
    OOD_FIGURES,
)
from checkpoints_zoo.evaluation.growth import Needed
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.report import Report, draw_curve
from checkpoints_zoo.evaluation.tables import ROUNDING_ERROR, as_text
from checkpoints_zoo.publishing.html_report.definitions import TERMS, better, term
from checkpoints_zoo.publishing.html_report.markup import bold, markup
from checkpoints_zoo.publishing.html_report.measurements import Measurements
from checkpoints_zoo.publishing.html_report.page import (
    HALF_WIDTH_INCHES,
    THIRD_WIDTH_INCHES,
    Block,
    FigureBlock,
    NoteBlock,
    Panel,
    Part,
    TableBlock,
    draw_panel,
    number_table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GROUPS = (LIKELIHOOD, CALIBRATION, DIVERSITY, OOD_DETECTION)
CURVE_FIGURES = tuple(n for n in FIGURES if n not in OOD_FIGURES)
LARGEST_SPREAD = 100  # largest relative spread of the distances from a limit
NEAR_LIMIT_DISTANCE = "5%"  # distance from a figure's limit, as a share of the limit


def scale_of(figure: str) -> float:
    """Return the factor of a figure on the page: 100 for percent."""
    return KNOWN_FIGURES[figure].scale


def unit_of(figure: str) -> str:
    """Return the unit in which a figure is shown."""
    return "%" if scale_of(figure) == 100 else KNOWN_FIGURES[figure].unit.replace("..", "–")


def cell(interval: Interval, scale: float = 1) -> Markup:
    """Return a figure and, in small print, its interval as HTML."""
    value_text, _, bounds_text = as_text(interval, scale).replace("-", "−").partition(" ")
    value_text = "–" if value_text == "−" else value_text
    return markup("{} <small>{}</small>", value_text, bounds_text) if bounds_text else markup("{}", value_text)


def build_part(measured: Measurements) -> Part:
    """Return the part with the table of all figures."""
    report = measured.report
    shown_sizes = choose_sizes(sorted(report.curve)) if report.members > 1 else []
    has_one_member = report.members == 1
    header = (
        "",
        "unit",
        "the member" if has_one_member else "mean of members",
        *(f"ensemble of {size:,}" for size in shown_sizes),
    )
    rows: list[Sequence[str]] = []
    for group in GROUPS:
        measured_figures = [name for name in report.ensemble if FIGURES[name].group == group]
        if measured_figures:
            rows.append((group,))
        for name in measured_figures:
            intervals = report.ensemble if has_one_member else report.member
            mean_cell = cell(intervals[name], scale_of(name)) if name in intervals else "–"
            name_cell = markup("{} {}", term(name), better(name))
            rows.append(
                (
                    name_cell,
                    unit_of(name),
                    mean_cell,
                    *(cell(report.curve[size][name], scale_of(name)) for size in shown_sizes),
                )
            )
    ood_text = f"; out of distribution: {measured.images_ood}" if measured.outside is not None else ""
    means_text = "of the mean of members, its 95 % bootstrap interval; " if measured.has_member_intervals else ""
    interval_texts = (
        term("interval", "[ ]"), f": {means_text}of an ensemble of fewer than all, ",
        term("band", "where 95 % of new ensembles"),
        " of that size fall; of all members, a 95 % jackknife interval. ",
    )  # fmt: skip
    caption = (
        bold("All figures."),
        f" On {measured.images}{ood_text}. ",
        *(interval_texts if report.members > 2 else ()),
        "↑ ↓: which way is better.",
    )
    few_members_note = (
        [] if report.members > 2 else [NoteBlock(("Fewer than 3 members say nothing about intervals.",), True)]
    )
    remark_notes = [NoteBlock((remark,)) for remark in report.remarks]
    table = TableBlock("all-figures", header, rows, caption, text_columns=(0, 1))
    return Part("summary", "Summary", [table, *few_members_note, *remark_notes])


def choose_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the ensemble sizes in the table of all figures: of many sizes, the middle and the last one."""
    return list(sizes) if len(sizes) <= 2 else [sizes[len(sizes) // 2], sizes[-1]]


def build_sizes_part(measured: Measurements) -> Part:
    """Return the part with the curves over the sizes of ensembles."""
    title = "Ensemble size"
    if measured.report.members < 2:
        return Part("sizes", title, [NoteBlock(("Curves over sizes need two members or more.",), True)])
    blocks: list[Block] = [draw_curves(measured, "curves", CURVE_FIGURES, 3), _infinite_ensemble_table(measured.report)]
    return Part("sizes", title, [*blocks, *_needed_members_tables(measured.report)])


def _infinite_ensemble_table(report: Report) -> TableBlock:
    """Return a table of the figures' limits for infinite ensembles, and the numbers of members that come near them."""
    rows = []
    for name, growth in report.growth.items():
        limit, scale = growth.limit, scale_of(name)
        # A limit of 0 has no percentage. If ensembles of half the members are no better than single members, the number
        # of members is not known.
        has_near_limit_count = (
            math.isfinite(limit.value) and abs(limit.value) > ROUNDING_ERROR and (growth.spread or 0) < LARGEST_SPREAD
        )
        needed_cell = _needed_members_cell(report.needed(name, NEAR_LIMIT_DISTANCE)) if has_near_limit_count else "–"
        rows.append((term(name), unit_of(name), cell(report.ensemble[name], scale), cell(limit, scale), needed_cell))
    caption = (
        bold("Limits."),
        " The figure of an infinite ensemble of such members, estimated from the curves, and how "
        f"many members the mean figure takes to come within {NEAR_LIMIT_DISTANCE.replace('%', ' %')} of it and stay "
        "there. [ ]: 95 % intervals over members, … for no upper bound; ≈: more than there are, by 1/k.",
    )
    header = ("", "unit", f"all {report.members:,}", "limit", "members needed")
    return TableBlock("limits", header, rows, caption, text_columns=(0, 1))


def _needed_members_tables(report: Report) -> list[TableBlock]:
    """Return a table of the numbers of members that reach the requested distances from the limits."""
    rows = [
        (
            term(needed.figure),
            unit_of(needed.figure),
            scaling_text or "as measured",
            f"{needed.within * scale_of(needed.figure):.4g}",
            _needed_members_cell(needed),
        )
        for scaling_text, needed in report.answers()
    ]
    caption = (bold("Members needed."), " To come within a distance of the limit and stay there.")
    header = ("", "unit", "probabilities", "distance", "members needed")
    return [TableBlock("needed", header, rows, caption, text_columns=(0, 1, 2))] if rows else []


def _needed_members_cell(needed: Needed) -> Markup:
    """Return the number of needed members as HTML."""
    count_text = f"≈ {needed.extrapolated:,}" if needed.members is None else f"{needed.members:,}"
    upper_end = "…" if needed.high is None else f"{needed.high:,}"
    if needed.low is None:
        return markup("{}", count_text)
    return markup("{} <small>{}</small>", count_text, f"[{needed.low:,}, {upper_end}]")


def draw_curves(measured: Measurements, element_id: str, figures: Sequence[str], panels_per_row: int) -> FigureBlock:
    """Draw figures over the sizes of ensembles; return the block."""
    report = measured.report
    images_text = measured.images_ood if figures == OOD_FIGURES else measured.images
    limit_note = " Dashed: the limit." if any(figure in report.growth for figure in figures) else ""
    band_texts = (
        "; ", term("band", "band"), ": where 95 % of new ensembles of that size fall; diamond: all members, with "
        "their 95 % jackknife interval, where there is one",
    )  # fmt: skip
    caption = (
        bold("Figures against ensemble size."), f" On {images_text}. Line: mean over random ensembles of that size, of "
        f"{report.members:,} members", *(band_texts if report.members > 2 else ()), f".{limit_note}",
    )  # fmt: skip
    header = ("members", *(TERMS[figure][0] + (" (%)" if figure == "accuracy" else "") for figure in figures))
    rows = [
        (f"{size:,}", *(cell(figures_of_size[figure], scale_of(figure)) for figure in figures))
        for size, figures_of_size in sorted(report.curve.items())
    ]
    table = number_table(f"{element_id}-numbers", header, rows, "The mean figures, with bands and intervals.")
    panels = [
        _curve_panel(report, figure, HALF_WIDTH_INCHES if panels_per_row == 2 else THIRD_WIDTH_INCHES)
        for figure in figures
    ]
    return FigureBlock(element_id, panels, caption, [table], panels_per_row)


def _curve_panel(report: Report, figure: str, size_inches: tuple[float, float]) -> Panel:
    def draw(axes: Axes) -> None:
        draw_curve(report, axes, figure)
        axes.set_xlabel("members in the ensemble")
        axes.legend([], [])  # the caption explains band, line and diamond

    figure_scale, title = scale_of(figure), TERMS[figure][0]
    sizes = sorted(report.curve)
    first_value, last_value = (report.curve[size][figure].value for size in (sizes[0], sizes[-1]))
    description = (
        f"{title} against ensemble size, from {first_value * figure_scale:.4g} for {sizes[0]} to "
        f"{last_value * figure_scale:.4g} for {sizes[-1]} members."
    )
    if not any(math.isfinite(figures_of_size[figure].value) for figures_of_size in report.curve.values()):
        description = f"{title} is not defined here."
    element_id = f"curve-{figure.replace('_', '-')}"
    return draw_panel(element_id, title[0].upper() + title[1:], description, draw, size_inches)
