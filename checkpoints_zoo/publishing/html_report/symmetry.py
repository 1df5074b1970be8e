"""The symmetries of the members' network, and the distances between members with and without these symmetries."""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpoints_zoo.formats.text import count_with_noun
from checkpoints_zoo.populations.alignment_table import Alignment, draw_distances, draw_transpositions
from checkpoints_zoo.populations.discrepancy import MMD, draw_discrepancies
from checkpoints_zoo.publishing.html_report.definitions import term
from checkpoints_zoo.publishing.html_report.markup import bold, markup
from checkpoints_zoo.publishing.html_report.measurements import Measurements, WeightFigures
from checkpoints_zoo.publishing.html_report.page import (
    HALF_WIDTH_INCHES,
    Block,
    FigureBlock,
    NoteBlock,
    Panel,
    Part,
    TableBlock,
    draw_panel,
    number_table,
)
from checkpoints_zoo.symmetry import Table

LARGEST_ROW_COUNT = 64  # largest number of rows in a table of groups or scales
LARGEST_HEIGHT = 7.0  # largest height of a panel in inches
NO_WEIGHTS_NOTE = "Weights were not read, as stored predictions were given; without --stored this part is here."


def build_part(measured: Measurements) -> Part:
    """Return the part on symmetries."""
    title, weights = "Symmetries", measured.weights
    if weights is None:
        return Part("symmetry", title, [NoteBlock((NO_WEIGHTS_NOTE,), True)])
    blocks: list[Block] = []
    if weights.table is None:
        blocks.append(NoteBlock((f"The symmetries of this network can't be derived. {weights.reason}",), True))
    else:
        blocks += _symmetry_counts(weights.table)
    if weights.before is None:
        blocks.append(NoteBlock(("Two halves of the members need four members or more.",), True))
    else:
        blocks.append(_layers_discrepancy_table(weights, weights.before))
    if weights.aligned is None and weights.table is not None:
        blocks.append(NoteBlock(("One member has none to be aligned to.",), True))
    return Part("symmetry", title, [*blocks, *_distances_figure(weights)])


def members_read(weights: WeightFigures) -> str:
    """Return text that names the members whose weights were read."""
    member_count = len(weights.members)
    if member_count < weights.total:
        return f"the first {member_count:,} of {weights.total:,} members"
    return "the one member" if member_count == 1 else f"all {member_count:,} members"


def _symmetry_counts(table: Table) -> list[Block]:
    """Return tables of the numbers of permutations and scales, and of their groups."""
    all_permutations, inner_permutations = (table.log10_permutations(streams) for streams in (True, False))
    power_text = markup("10<sup>{}</sup>", f"{inner_permutations:.1f}")
    without_streams = (
        ()
        if math.isclose(all_permutations, inner_permutations)
        else (" (", power_text, " without the orders of residual streams)")
    )
    approximate, signs = table.approximate_scaling_freedom, sum(sign.size for sign in table.signs.values())
    note = NoteBlock(
        (
            "The units of this network can be ordered in ",
            markup("<b>10<sup>{}</sup></b>", f"{all_permutations:.1f}"),
            " ways",
            *without_streams,
            " that leave its function as it is: its ",
            term("permutations"),
            ". ",
            bold(f"{table.scaling_freedom:,}"),
            " positive ",
            term("scales"),
            " can be chosen freely",
            f"; {approximate:,} more could if norms had no ε." if approximate else ".",
            *((" The signs of ", bold(f"{signs:,}"), " units can be flipped freely.") if signs else ()),
        ),
    )
    groups = [
        (g.name, f"{g.size:,}", _freedom_text(g.stream, g.blocks), f"{g.log10_order:.1f}",
         ", ".join(name for name, _ in g.writers))
        for g in list(table.groups.values())[:LARGEST_ROW_COUNT]
    ]  # fmt: skip
    scales = [
        (s.name, f"{s.size:,}", "exact" if s.exact else "approximate", ", ".join(s.norms) or "–",
         ", ".join(name for name, _ in s.writers))
        for s in list(table.scales.values())[:LARGEST_ROW_COUNT]
    ]  # fmt: skip
    limit_note = (
        ""
        if max(len(table.groups), len(table.scales)) <= LARGEST_ROW_COUNT
        else f" The first {LARGEST_ROW_COUNT} are shown."
    )
    return [
        note,
        TableBlock("groups", ("group", "units", "kind", "log10 of permutations", "written by"), groups,
                   (bold("Permutations."), " Groups of units that one ", term("permutations", "permutation"),
                    f" moves together.{limit_note}"), words=(0, 2, 4), sortable=True),
        TableBlock("scales", ("scale", "values", "kind", "undone by", "opened by"), scales,
                   (bold("Scales."), " Positive ", term("scales", "factors"), f", one a unit.{limit_note}"),
                   words=(0, 2, 3, 4), sortable=True),
    ]  # fmt: skip


def _freedom_text(stream: bool, blocks: int) -> str:
    return f"{blocks:,} blocks" if blocks > 1 else "stream" if stream else "free"


def _layers_discrepancy_table(weights: WeightFigures, before: MMD) -> TableBlock:
    header: Sequence[str] = ("layer", "weights", "MMD² (10⁻³)", "p")
    after = weights.after
    header = (*header, "NS (10⁻³)", "p") if after is not None else header
    rows = []
    for name, x in list(before.groups.items())[-LARGEST_ROW_COUNT:]:
        cells = [name, f"{x.weights:,}", _thousandths(x.value), _p_text(x.p_value)]
        rows.append(
            [*cells, _thousandths(after[name].value), _p_text(after[name].p_value)] if after is not None else cells
        )
    first, second = before.members
    aligned_note = (", and ", term("ns"), ": without their symmetries") if after is not None else ()
    caption = (
        bold("Two halves of the members."), " ", term("mmd"), f" between the weights of {first:,} and {second:,} "
        f"members ({members_read(weights)}, at even and at odd positions), as they are", *aligned_note,
        f". p: test with {before.permutations:,} permutations; halves of one population differ by chance alone.",
    )  # fmt: skip
    return TableBlock("halves", header, rows, caption)


def _p_text(p_value: float | None) -> str:
    return "-" if p_value is None else f"{p_value:.3f}"


def _thousandths(value: float) -> str:
    return f"{1000 * value:.3f}".replace("-", "−")


def _distances_figure(weights: WeightFigures) -> list[FigureBlock]:
    """Draw the distances between members with and without symmetries; return the figure, or [] without distances."""
    before, after, aligned = weights.before, weights.after, weights.aligned
    panels: list[Panel] = []
    tables: list[TableBlock] = []
    caption: list[str] = [bold("Distances, with and without symmetries."), f" Of {members_read(weights)}."]
    if before is not None and after is not None:
        panels.append(_layers_panel(before, after))
        tables.append(_layers_table(before, after))
        caption += [" (a) ", term("mmd"), " of the two halves, layer by layer, and ", term("ns"), "."]
    if aligned is not None:
        panels += _alignment_panels(aligned)
        tables += [_alignment_table(aligned), _groups_table(aligned)]
        letters = "abc"[len(panels) - 2 : len(panels)]
        caption += [
            f" ({letters[0]}) Squared distance of each member to {aligned.to}, as stored and after its units are "
            f"permuted to match (weight matching). ({letters[1]}) ", term("transpositions", "Transpositions"),
            " of that permutation in each group, a box over the members.",
        ]  # fmt: skip
    return [FigureBlock("apart", panels, caption, tables, len(panels))] if panels else []


def _layers_panel(before: MMD, after: MMD) -> Panel:
    height = min(LARGEST_HEIGHT, max(HALF_WIDTH_INCHES[1], 1 + 0.2 * len(before.groups)))
    names = list(before.groups)
    description = "MMD² and NS of each layer: " + "; ".join(
        f"{n} {before[n].value:.2g} and {after[n].value:.2g}" for n in names[-8:]
    )
    return draw_panel(
        "halves-apart",
        "Two halves, by layer",
        description,
        lambda axes: draw_discrepancies(axes, before, after, height),
        (HALF_WIDTH_INCHES[0], height),
    )


def _layers_table(before: MMD, after: MMD) -> TableBlock:
    rows = [
        (
            name,
            *(
                "-" if x is None else f"{x:.4g}".replace("-", "−")
                for x in (b.value, b.p_value, after[name].value, after[name].p_value)
            ),
        )
        for name, b in before.groups.items()
    ]
    return number_table("halves-numbers", ("layer", "MMD²", "p", "NS", "p of NS"), rows, "(a) Each layer.", words=(0,))


def _alignment_panels(aligned: Alignment) -> list[Panel]:
    rows = [r for r in aligned.rows() if r["before"] > 0]
    mean_decrease = sum(1 - r["after"] / r["before"] for r in rows) / max(1, len(rows))
    distances = (
        f"Squared distance to {aligned.to} of {count_with_noun(len(rows), 'member')}; aligned, {mean_decrease:.0%} "
        "nearer on average."
    )
    groups = "; ".join(f"{name} {share:.0%}" for name, _, share, _ in _group_shares(aligned)[:12])
    height = min(LARGEST_HEIGHT, max(HALF_WIDTH_INCHES[1], 1 + 0.2 * len(aligned.sizes)))
    return [
        draw_panel(
            "alignment", "Squared distance to a reference", distances, lambda axes: draw_distances(axes, aligned)
        ),
        draw_panel(
            "transpositions",
            "Transpositions",
            f"Mean transpositions of each group: {groups}.",
            lambda axes: draw_transpositions(axes, aligned),
            (HALF_WIDTH_INCHES[0], height),
        ),
    ]


def _alignment_table(aligned: Alignment) -> TableBlock:
    rows = [
        (str(r["member"]), f"{r['before']:.6g}", f"{r['after']:.6g}", f"{r['transpositions']:,}")
        for r in aligned.rows()
    ]
    header = ("member", "distance as stored", "distance aligned", "transpositions")
    return number_table("alignment-numbers", header, rows, f"Each member, aligned to {aligned.to}.")


def _group_shares(aligned: Alignment) -> list[tuple[str, int, float, float]]:
    """Return for each group: name, size, and share of the possible transpositions, for members and at random."""
    moved_rows = [i for i, r in enumerate(aligned.rows()) if r["before"] > 0] or list(range(len(aligned)))
    shares = []
    for name, size in aligned.sizes.items():
        if size > 1:
            mean = float(aligned.transpositions[name][moved_rows].double().mean()) / (size - 1)
            random = (size - sum(1 / k for k in range(1, size + 1))) / (size - 1)
            shares.append((name, size, mean, random))
    return shares


def _groups_table(aligned: Alignment) -> TableBlock:
    rows = [
        (name, f"{size:,}", f"{100 * mean:.2f}", f"{100 * random:.2f}")
        for name, size, mean, random in _group_shares(aligned)
    ]
    header = ("group", "units", "members (%)", "random permutations (%)")
    caption = "Mean transpositions of each group, as a share of the most there can be."
    return number_table("transpositions-numbers", header, rows, caption, words=(0,))
