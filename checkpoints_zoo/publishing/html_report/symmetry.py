"""The symmetries of the members' network, and how far members are apart with and without them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpoints_zoo.evaluation.drawing import BLUE, GREEN, GREY, RED
from checkpoints_zoo.formats.text import counted
from checkpoints_zoo.populations.alignment_table import Alignment
from checkpoints_zoo.populations.discrepancy import MMD
from checkpoints_zoo.publishing.html_report.charts import axis, diagonal, dots, layout
from checkpoints_zoo.publishing.html_report.definitions import word
from checkpoints_zoo.publishing.html_report.gather import Measured, Weighed
from checkpoints_zoo.publishing.html_report.page import Block, Chart, Note, Panel, Part, Rows
from checkpoints_zoo.publishing.html_report.tags import in_plot, tag
from checkpoints_zoo.symmetry import Table

MOST_ROWS = 64  # of a table of groups or scales
NO_WEIGHTS = "Weights were not read, as stored predictions were given; without --stored this part is here."


def part(found: Measured) -> Part:
    """Return the part on symmetries."""
    title, weighed = "Symmetries", found.weighed
    if weighed is None:
        return Part("symmetry", title, [Note((NO_WEIGHTS,), True)])
    blocks: list[Block] = []
    if weighed.table is None:
        blocks.append(Note((f"The symmetries of this network can't be derived. {weighed.why}",), True))
    else:
        blocks += _counted(weighed.table)
    if weighed.before is None:
        blocks.append(Note(("Two halves of the members need four members or more.",), True))
    else:
        blocks.append(_discrepancies(weighed, weighed.before))
    panels = []
    if weighed.before is not None and weighed.after is not None:
        panels.append(_layers(weighed.before, weighed.after))
    if weighed.aligned is not None:
        panels += [_distances(weighed.aligned), _transpositions(weighed.aligned)]
    elif weighed.table is not None:
        blocks.append(Note(("One member has none to be aligned to.",), True))
    if panels:
        blocks.append(Chart("apart", panels, _apart(weighed, len(panels) == 3), len(panels)))
    return Part("symmetry", title, blocks)


def first_of(weighed: Weighed) -> str:
    """Say whose weights were read."""
    read = len(weighed.members)
    if read < weighed.of:
        return f"the first {read:,} of {weighed.of:,} members"
    return "the one member" if read == 1 else f"all {read:,} members"


def _counted(table: Table) -> list[Block]:
    every, inner = (table.log10_permutations(streams) for streams in (True, False))
    power = tag("sup", f"{inner:.1f}")
    some = () if math.isclose(every, inner) else (" (10", power, " without those of residual streams)")
    loose = table.approximate_scaling_freedom
    note = Note(
        ("The units of this network can be ordered in ", tag("b", "10", tag("sup", f"{every:.1f}")), " ways", *some,
         " that leave its function as it is: its ", word("permutations"), ". ",
         tag("b", f"{table.scaling_freedom:,}"), " positive ", word("scales"), " can be chosen freely",
         f"; {loose:,} more could if norms had no ε." if loose else "."),
    )  # fmt: skip
    groups = [
        (g.name, f"{g.size:,}", _kind(g.stream, g.blocks), f"{g.log10_order:.1f}",
         ", ".join(name for name, _ in g.writers))
        for g in list(table.groups.values())[:MOST_ROWS]
    ]  # fmt: skip
    scales = [
        (s.name, f"{s.size:,}", "exact" if s.exact else "approximate", ", ".join(s.norms) or "–",
         ", ".join(name for name, _ in s.writers))
        for s in list(table.scales.values())[:MOST_ROWS]
    ]  # fmt: skip
    of = "" if max(len(table.groups), len(table.scales)) <= MOST_ROWS else f" The first {MOST_ROWS} are shown."
    return [
        note,
        Rows("groups", ("group", "units", "kind", "log10 of permutations", "written by"), groups,
             (tag("b", "Permutations. "), "Groups of units that one ", word("permutations", "permutation"),
              f" moves together.{of}"), words=(0, 2, 4)),
        Rows("scales", ("scale", "values", "kind", "undone by", "opened by"), scales,
             (tag("b", "Scales. "), "Positive ", word("scales", "factors"), f", one a unit.{of}"), words=(0, 2, 3, 4)),
    ]  # fmt: skip


def _kind(stream: bool, blocks: int) -> str:
    return f"{blocks:,} blocks" if blocks > 1 else "stream" if stream else "free"


def _discrepancies(weighed: Weighed, before: MMD) -> Rows:
    header: Sequence[str] = ("layer", "weights", "MMD² (10⁻³)", "p")
    after = weighed.after
    header = (*header, "NS (10⁻³)", "p") if after is not None else header
    rows = []
    for name, x in list(before.groups.items())[-MOST_ROWS:]:
        cells = [name, f"{x.weights:,}", _thousandths(x.value), _p_text(x.p_value)]
        rows.append(
            [*cells, _thousandths(after[name].value), _p_text(after[name].p_value)] if after is not None else cells
        )
    first, second = before.members
    without = (", and ", word("ns"), ": without their symmetries") if after is not None else ()
    caption = (
        tag("b", "Two halves of the members. "), word("mmd"), f" between the weights of {first:,} and {second:,} "
        f"members ({first_of(weighed)}, those at even positions and those at odd ones), as they are", *without,
        f". p: test with {before.permutations:,} permutations; halves of one population differ by chance alone.",
    )  # fmt: skip
    return Rows("halves", header, rows, caption)


def _p_text(p_value: float | None) -> str:
    return "-" if p_value is None else f"{p_value:.3f}"


def _thousandths(value: float) -> str:
    return f"{1000 * value:.3f}".replace("-", "−")


def _apart(weighed: Weighed, halves: bool) -> Sequence[str]:
    first, second, third = "abc" if halves else " ab"
    pieces = [tag("b", "Apart, with and without symmetries. "), f"Of {first_of(weighed)}. "]
    if halves:
        pieces += [
            f"({first}) ",
            word("mmd"),
            " of the two halves, layer by layer, and ",
            word("ns"),
            "; on hover, p. ",
        ]
    if weighed.aligned is not None:
        pieces += [
            f"({second}) Squared distance of each member to {weighed.aligned.to}, as stored and after its units are "
            f"permuted to match (weight matching). ({third}) ", word("transpositions", "Transpositions"),
            " of that permutation in each group, mean over members, beside the mean of random permutations.",
        ]  # fmt: skip
    return pieces


def _layers(before: MMD, after: MMD) -> Panel:
    names = list(before.groups)[-MOST_ROWS:]
    traces = []
    for found, name, colour, symbol in ((before, "MMD²", BLUE, "circle"), (after, "NS", RED, "diamond")):
        traces.append({
            "type": "scatter", "mode": "markers", "name": name, "x": [found[n].value for n in names],
            "y": [in_plot(n, 28) for n in names], "customdata": [found[n].p_value for n in names],
            "marker": {"color": colour, "size": 9, "symbol": symbol},
            "hovertemplate": f"{name} of %{{y}}: %{{x:.3g}}, p = %{{customdata:.3f}}<extra></extra>",
        })  # fmt: skip
    told = "MMD² and NS of each layer: " + "; ".join(
        f"{n} {before[n].value:.2g} and {after[n].value:.2g}" for n in names[-8:]
    )
    x = axis("squared discrepancy (no unit)", nticks=5, exponentformat="power", zeroline=True, zerolinecolor=GREY)
    y = axis("", autorange="reversed", type="category")
    return Panel("halves-apart", "Two halves, by layer", told, traces, layout(x, y, height=_height(len(names))))


def _height(rows: int) -> int:
    return max(300, 110 + 18 * rows)


def _distances(found: Alignment) -> Panel:
    rows = [r for r in found.rows() if r["before"] > 0 or r["after"] > 0]
    before, after = ([float(r[n]) for r in rows] for n in ("before", "after"))
    ends = [min(after, default=0.0), max([*before, *after], default=1.0)]
    margin = 0.06 * (ends[1] - ends[0]) or 0.06
    names = [f"member {r['member']}, {r['transpositions']} transpositions" for r in rows]
    traces = [
        diagonal(ends[0] - margin, ends[1] + margin, "no nearer"),
        *dots(before, after, names, "a member", BLUE, "%{x:.4g} as stored, %{y:.4g} aligned"),
    ]
    nearer = sum(1 - a / b for a, b in zip(after, before, strict=True) if b) / max(1, len(rows))
    told = f"Squared distance to {found.to} of {counted(len(rows), 'member')}; aligned, {nearer:.0%} nearer on average."
    x, y = axis("as stored", nticks=6), axis("aligned", nticks=6)
    return Panel("alignment", "Squared distance to a reference", told, traces, layout(x, y))


def _transpositions(found: Alignment) -> Panel:
    """Draw the mean transpositions of each group, as a share of the most there can be, beside random ones."""
    groups = [name for name, size in found.sizes.items() if size > 1][:MOST_ROWS]
    others = [i for i, r in enumerate(found.rows()) if r["before"] > 0] or list(range(len(found)))
    shares, random = [], []
    for name in groups:
        size = found.sizes[name]
        shares.append(float(found.transpositions[name][others].double().mean()) / (size - 1))
        random.append((size - sum(1 / k for k in range(1, size + 1))) / (size - 1))
    names = [in_plot(f"{n} ({found.sizes[n]:,})", 28) for n in groups]
    traces = [
        {"type": "bar", "orientation": "h", "name": "members", "x": shares, "y": names, "width": [0.6] * len(names),
         "marker": {"color": GREEN, "opacity": 0.85}, "hovertemplate": "%{y}: %{x:.1%}<extra></extra>"},
        {"type": "scatter", "mode": "markers", "name": "random permutations", "x": random, "y": names,
         "marker": {"color": GREY, "symbol": "line-ns-open", "size": 16, "line": {"width": 2}},
         "hovertemplate": "random, %{y}: %{x:.1%}<extra></extra>"},
    ]  # fmt: skip
    told = f"Mean transpositions of {len(groups)} groups: " + "; ".join(
        f"{n} {s:.0%}, random {r:.0%}" for n, s, r in list(zip(groups, shares, random, strict=True))[:12]
    )
    x = axis("transpositions, share of the most there can be", range=[0, 1.04], tickformat=".0%")
    y = axis("", autorange="reversed", type="category")
    return Panel("transpositions", "Transpositions", told, traces, layout(x, y, height=_height(len(groups))))
