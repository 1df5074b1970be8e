"""The mass of each member beside the smallest that rescaling can give it."""

from __future__ import annotations

from torch import Tensor

from checkpoints_zoo.evaluation.drawing import BLUE, GREY
from checkpoints_zoo.publishing.html_report.charts import (
    axis,
    bars,
    count_axis,
    counts,
    diagonal,
    dots,
    edges_of,
    layout,
    upright,
)
from checkpoints_zoo.publishing.html_report.definitions import word
from checkpoints_zoo.publishing.html_report.gather import Measured, Weighed
from checkpoints_zoo.publishing.html_report.page import Chart, Note, Panel, Part, Rows
from checkpoints_zoo.publishing.html_report.symmetry import NO_WEIGHTS, first_of
from checkpoints_zoo.publishing.html_report.tags import tag
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass


def part(found: Measured) -> Part:
    """Return the part on mass."""
    weighed = found.weighed
    if weighed is None:
        return Part("mass", "Mass", [Note((NO_WEIGHTS,), True)])
    if weighed.masses is None:
        why = "Which scales leave this network's function as it is can't be derived, so its minimal mass can't either."
        return Part("mass", "Mass", [Note((why,), True)])
    return Part("mass", "Mass", [_table(weighed, weighed.masses), _chart(weighed, weighed.masses)])


def _table(weighed: Weighed, found: MinimalMass) -> Rows:
    rows = [
        (word("mass"), *_spread(found.before)),
        ("its minimum", *_spread(found.after)),
        (word("excess", "excess (%)"), *_spread(found.excess)),
        (word("residual"), *_spread(found.residual)),
    ]
    without = sum(map(len, found.degenerate.values()))
    dead = sum(len(units) for member in found.dead for units in member.values())
    late = int((~found.converged).sum())
    caption = (
        tag("b", "Mass and minimal mass. "), f"Of {first_of(weighed)}. {without:,} units before a norm can shrink "
        f"without limit in every member, and {dead:,} dead ones in single members; their mass, mean "
        f"{float(found.unbounded.mean()):.4g}, is in none of these. Not converged: {late:,}. Scales held: "
        f"{', '.join(found.held[:12]) or 'none'}.",
    )  # fmt: skip
    return Rows("masses", ("", "mean", "smallest", "largest"), rows, caption)


def _spread(values: Tensor) -> tuple[str, str, str]:
    return tuple(f"{float(v):.4g}" for v in (values.mean(), values.min(), values.max()))  # type: ignore[return-value]


def _chart(weighed: Weighed, found: MinimalMass) -> Chart:
    before, after, excess = (values.double().tolist() for values in (found.before, found.after, found.excess))
    low, high = min(after), max(before)
    margin = 0.06 * (high - low) or 0.06 * high or 1.0
    ends = (low - margin, high + margin)
    names = [f"member {id}, excess {e:.3g} %" for id, e in zip(found.ids, excess, strict=True)]
    masses = [
        diagonal(*ends, "mass = its minimum"),
        *dots(before, after, names, "a member", BLUE, "mass %{x:.4g}, minimum %{y:.4g}"),
    ]
    edges = edges_of(excess, 24)
    heights = counts(excess, edges)
    mean = sum(excess) / len(excess)
    over = [
        bars(edges, heights, "members", BLUE, "members") | {"showlegend": False},
        upright(mean, max(heights) * 1.06, f"mean {mean:.3g}", GREY),
    ]
    panels = [
        Panel("mass-minimum", "Mass and its minimum", f"Mass of {len(before)} members against their minimum.", masses,
              layout(axis("mass as trained (sum of squares)", range=list(ends), nticks=6),
                     axis("minimum over scales", range=list(ends), nticks=6))),
        Panel("mass-excess", "Excess", f"Histogram of the excess, from {min(excess):.3g} to {max(excess):.3g} %.", over,
              layout(axis("mass above its minimum (%)", nticks=7),
                     count_axis("members", heights))),
    ]  # fmt: skip
    caption = (
        tag("b", "Mass. "), f"Of {first_of(weighed)}. (a) ", word("mass", "Mass"), " of each as trained, and the "
        "smallest that positive scales which leave its function as it is can give. (b) ", word("excess", "Excess"),
        " over it.",
    )  # fmt: skip
    return Chart("mass-figure", panels, caption)
