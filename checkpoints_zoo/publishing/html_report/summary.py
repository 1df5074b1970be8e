"""All figures in one table, and the curves over the sizes of ensembles."""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpoints_zoo.evaluation.figures import FIGURES, KNOWN, OOD_FIGURES
from checkpoints_zoo.evaluation.growth import Needed
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.tables import FAINTEST, as_text
from checkpoints_zoo.publishing.html_report.charts import axis, layout, size_axis, sizes
from checkpoints_zoo.publishing.html_report.definitions import WORDS, better, word
from checkpoints_zoo.publishing.html_report.gather import Measured
from checkpoints_zoo.publishing.html_report.page import Chart, Note, Panel, Part, Rows
from checkpoints_zoo.publishing.html_report.tags import Html, tag

GROUPS = {
    "Accuracy and likelihood": ("accuracy", "nll", "brier", "aurc"),
    "Calibration": ("ece", "adaptive_ece", "ace"),
    "Diversity": ("mi_id", "disagreement"),
    "Out-of-distribution detection": ("auroc", "aupr", "fpr95", "mi_ood"),
}
CURVES = tuple(n for n in FIGURES if n not in OOD_FIGURES)
MOST_SPREAD = 100  # of distances from a limit, as a share of them
NEAR = "5%"  # of a limit


def scale_of(figure: str) -> float:
    """Return what a figure is multiplied by to be shown: 100 for percent."""
    return 100 if figure == "accuracy" else 1


def unit_of(figure: str) -> str:
    """Return the unit that a figure is shown in."""
    return "%" if figure == "accuracy" else KNOWN[figure].unit.replace("..", "–")


def cell(interval: Interval, scale: float = 1) -> Html:
    """Write a figure and, smaller, its interval; return the HTML."""
    value, _, bounds = as_text(interval, scale).replace("-", "−").partition(" ")
    value = "–" if value == "−" else value
    return tag("span", value, *([" ", tag("small", bounds)] if bounds else []))


def part(found: Measured) -> Part:
    """Return the part with the table of all figures."""
    report = found.report
    chosen = few(sorted(report.curve)) if report.members > 1 else []
    single = report.members == 1
    header = ("", "unit", "the member" if single else "mean of members", *(f"ensemble of {s:,}" for s in chosen))
    rows: list[Sequence[str]] = []
    for group, names in GROUPS.items():
        known = [name for name in names if name in report.ensemble]
        if known:
            rows.append((group,))
        for name in known:
            known_of = report.ensemble if single else report.member
            mean = cell(known_of[name], scale_of(name)) if name in known_of else "–"
            named = Html(word(name) + " " + better(name))
            rows.append((named, unit_of(name), mean, *(cell(report.curve[s][name], scale_of(name)) for s in chosen)))
    against = f"; out of distribution: {found.on_ood}" if found.outside is not None else ""
    caption = (
        tag("b", "All figures. "), f"On {found.on}{against}. ", word("interval", "[ ]"), ": of the mean of members, "
        "its 95 % bootstrap interval; of an ensemble of fewer than all, ", word("band", "where 95 % of fresh "
        "ensembles"), " of that size fall; of all members, a 95 % jackknife interval. ↑ ↓: which way is better.",
    )  # fmt: skip
    few_members = [] if report.members > 2 else [Note(("Fewer than 3 members say nothing about intervals.",), True)]
    return Part("summary", "Summary", [Rows("all-figures", header, rows, caption, words=(0, 1)), *few_members])


def few(known: Sequence[int]) -> list[int]:
    """Return the sizes that a table has room for beside the mean of members: middle and last of many."""
    return list(known) if len(known) <= 2 else [known[len(known) // 2], known[-1]]


def growing(found: Measured) -> Part:
    """Return the part with the curves over the sizes of ensembles."""
    if found.report.members < 2:
        return Part("sizes", "Ensemble size", [Note(("Curves over sizes need two members or more.",), True)])
    return Part("sizes", "Ensemble size", [curves(found, "curves", CURVES, 3), _limits(found), *_needed(found)])


def _limits(found: Measured) -> Rows:
    """Lay out the limits of the figures, and how many members it takes to come near them."""
    report = found.report
    rows = []
    for name, growth in report.growth.items():
        limit, scale = growth.limit, scale_of(name)
        # A limit of 0 has no percentage, and where halves of the members gain nothing nothing can be said.
        known = math.isfinite(limit.value) and abs(limit.value) > FAINTEST and (growth.spread or 0) < MOST_SPREAD
        near = _members(report.needed(name, NEAR)) if known else "–"
        all_of_them = cell(report.ensemble[name], scale)
        rows.append((word(name), unit_of(name), all_of_them, cell(limit, scale), near))
    caption = (
        tag("b", "Limits. "), "The figure of an infinite ensemble of such members, estimated from the curves, and how "
        f"many members the mean figure takes to come within {NEAR.replace('%', ' %')} of it and stay there. [ ]: "
        "95 % intervals over members, … for no upper bound; ≈: more than there are, by 1/k.",
    )  # fmt: skip
    header = ("", "unit", f"all {report.members:,}", "limit", "members needed")
    return Rows("limits", header, rows, caption, words=(0, 1))


def _needed(found: Measured) -> list[Rows]:
    """Lay out the members needed for the distances that were asked for."""
    rows = [
        (
            word(x.figure),
            unit_of(x.figure),
            scaled or "as measured",
            f"{x.within * scale_of(x.figure):.4g}",
            _members(x),
        )
        for scaled, x in found.report.answers()
    ]
    caption = (tag("b", "Members needed. "), "To come within a distance of the limit and stay there.")
    header = ("", "unit", "probabilities", "distance", "members needed")
    return [Rows("needed", header, rows, caption, words=(0, 1, 2))] if rows else []


def _members(needed: Needed) -> Html:
    """Write how many members are needed; return the HTML."""
    count = f"≈ {needed.extrapolated:,}" if needed.members is None else f"{needed.members:,}"
    high = "…" if needed.high is None else f"{needed.high:,}"
    bounds = [] if needed.low is None else [" ", tag("small", f"[{needed.low:,}, {high}]")]
    return tag("span", count, *bounds)


def curves(found: Measured, name: str, figures: Sequence[str], across: int) -> Chart:
    """Draw figures over the sizes of ensembles; return the chart."""
    report = found.report
    panels = [_curve(found, figure) for figure in figures]
    on = found.on_ood if figures == OOD_FIGURES else found.on
    caption = (
        tag("b", "Figures against ensemble size. "), f"On {on}. Line: mean over random ensembles of that size, of "
        f"{report.members:,} members; ", word("band", "band"), ": where 95 % of fresh ensembles of that size fall; "
        "diamond: all members, with their 95 % jackknife interval.",
    )  # fmt: skip
    header = ("members", *(WORDS[figure][0] + (" (%)" if figure == "accuracy" else "") for figure in figures))
    rows = [
        (f"{size:,}", *(cell(known[figure], scale_of(figure)) for figure in figures))
        for size, known in sorted(report.curve.items())
    ]
    return Chart(name, panels, caption, across, Rows(f"{name}-rows", header, rows, ()))


def _curve(found: Measured, figure: str) -> Panel:
    report, scale = found.report, scale_of(figure)
    curve = {size: known[figure] for size, known in report.curve.items()}
    label = WORDS[figure][0]
    ends = [curve[min(curve)].value * scale, curve[max(curve)].value * scale]
    told = (
        f"{label} against ensemble size, from {ends[0]:.4g} for {min(curve)} to {ends[1]:.4g} for {max(curve)} members."
    )
    y = axis(f"{label.replace('mutual information', 'MI')} ({unit_of(figure)})", nticks=6, rangemode="nonnegative")
    if not any(math.isfinite(x.value) for x in curve.values()):
        told = f"{label} is not defined here."
    drawn = layout(size_axis(sorted(curve)), y, key=False, height=240)
    return Panel(
        f"curve-{figure.replace('_', '-')}",
        label[0].upper() + label[1:],
        told,
        sizes(curve, report.members, scale),
        drawn,
    )
