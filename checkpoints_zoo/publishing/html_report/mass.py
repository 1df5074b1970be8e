"""The mass of each member beside its smallest mass over positive rescalings."""

from __future__ import annotations

from torch import Tensor

from checkpoints_zoo.populations.mass import draw_excess, draw_masses
from checkpoints_zoo.publishing.html_report.definitions import term
from checkpoints_zoo.publishing.html_report.markup import bold
from checkpoints_zoo.publishing.html_report.measurements import Measurements, WeightFigures
from checkpoints_zoo.publishing.html_report.page import (
    FigureBlock,
    NoteBlock,
    Part,
    TableBlock,
    draw_panel,
    number_table,
)
from checkpoints_zoo.publishing.html_report.symmetry import NO_WEIGHTS_NOTE, members_read
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass


def build_part(measured: Measurements) -> Part:
    """Return the page's part on mass."""
    weight_figures = measured.weights
    if weight_figures is None:
        return Part("mass", "Mass", [NoteBlock((NO_WEIGHTS_NOTE,), True)])
    if weight_figures.masses is None:
        reason = (
            "The scales that leave this network's function as it is can't be derived, so its minimal mass can't either."
        )
        return Part("mass", "Mass", [NoteBlock((reason,), True)])
    return Part(
        "mass",
        "Mass",
        [_mass_table(weight_figures, weight_figures.masses), _mass_figure(weight_figures, weight_figures.masses)],
    )


def _mass_table(weight_figures: WeightFigures, masses: MinimalMass) -> TableBlock:
    rows = [
        (term("mass"), *_summary_texts(masses.before)),
        ("its minimum", *_summary_texts(masses.after)),
        (term("excess", "excess (%)"), *_summary_texts(masses.excess)),
        (term("residual"), *_summary_texts(masses.residual)),
    ]
    unbounded_unit_count = sum(map(len, masses.degenerate.values()))
    dead_unit_count = sum(len(units) for member in masses.dead for units in member.values())
    unconverged_member_count = int((~masses.converged).sum())
    caption = (
        bold("Mass and minimal mass."),
        f" Of {members_read(weight_figures)}. {unbounded_unit_count:,} units before a norm can shrink "
        f"without limit in every member, and {dead_unit_count:,} dead units in single members; their mass, mean "
        f"{float(masses.unbounded.mean()):.4g}, is in none of these figures. Not converged: "
        f"{unconverged_member_count:,}. Scales held: {', '.join(masses.held[:12]) or 'none'}.",
    )
    return TableBlock("masses", ("", "mean", "smallest", "largest"), rows, caption)


def _summary_texts(values: Tensor) -> tuple[str, str, str]:
    """Return the mean, the smallest and the largest value as text."""
    return tuple(f"{float(v):.4g}" for v in (values.mean(), values.min(), values.max()))  # type: ignore[return-value]


def _mass_figure(weight_figures: WeightFigures, masses: MinimalMass) -> FigureBlock:
    value_tensors = (masses.before, masses.after, masses.excess, masses.residual)
    masses_before, smallest_masses, excesses, residuals = (values.double().tolist() for values in value_tensors)
    description = f"Histogram of the excess, from {min(excesses):.3g} to {max(excesses):.3g} %."
    panels = [
        draw_panel("mass-minimum", "Mass and its minimum",
                   f"Mass of {len(masses_before)} members against their minimum.",
                   lambda axes: draw_masses(axes, masses_before, smallest_masses)),
        draw_panel("mass-excess", "Excess", description, lambda axes: draw_excess(axes, excesses)),
    ]  # fmt: skip
    caption = (
        bold("Mass."), f" Of {members_read(weight_figures)}. (a) ", term("mass", "Mass"), " of each member as "
        "trained, and its smallest mass over the positive scales that leave its function as it is. (b) ",
        term("excess", "Excess"), " over it.",
    )  # fmt: skip
    rows = [
        (str(member), *(f"{x:.6g}" for x in values))
        for member, *values in zip(masses.ids, masses_before, smallest_masses, excesses, residuals, strict=True)
    ]
    header = ("member", "mass", "minimum", "excess (%)", "balance residual")
    return FigureBlock("mass-figure", panels, caption, [number_table("mass-numbers", header, rows, "Each member.")])
