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
LARGEST_HEIGHT_INCHES = 7.0  # largest height of a panel in inches
NO_WEIGHTS_NOTE = "Weights were not read, as stored predictions were given; without --stored this part is here."


def build_part(measured: Measurements) -> Part:
    """Return the part on symmetries."""
    title, weight_figures = "Symmetries", measured.weights
    if weight_figures is None:
        return Part("symmetry", title, [NoteBlock((NO_WEIGHTS_NOTE,), True)])
    blocks: list[Block] = []
    if weight_figures.table is None:
        blocks.append(NoteBlock((f"The symmetries of this network can't be derived. {weight_figures.reason}",), True))
    else:
        blocks += _symmetry_counts(weight_figures.table)
    if weight_figures.stored_mmd is None:
        blocks.append(NoteBlock(("Two halves of the members need four members or more.",), True))
    else:
        blocks.append(_layers_discrepancy_table(weight_figures, weight_figures.stored_mmd))
    if weight_figures.alignment is None and weight_figures.table is not None:
        blocks.append(NoteBlock(("One member has none to be aligned to.",), True))
    return Part("symmetry", title, [*blocks, *_distances_figure(weight_figures)])


def members_read(weight_figures: WeightFigures) -> str:
    """Return text that names the members whose weights were read."""
    member_count = len(weight_figures.members)
    if member_count < weight_figures.member_count:
        return f"the first {member_count:,} of {weight_figures.member_count:,} members"
    return "the one member" if member_count == 1 else f"all {member_count:,} members"


def _symmetry_counts(table: Table) -> list[Block]:
    """Return tables of the numbers of permutations and scales, and of their groups."""
    log10_all_permutations, log10_inner_permutations = (table.log10_permutations(streams) for streams in (True, False))
    power_text = markup("10<sup>{}</sup>", f"{log10_inner_permutations:.1f}")
    without_streams = (
        ()
        if math.isclose(log10_all_permutations, log10_inner_permutations)
        else (" (", power_text, " without the orders of residual streams)")
    )
    approximate_scale_count, sign_count = (
        table.approximate_scaling_freedom,
        sum(sign.size for sign in table.signs.values()),
    )
    count_note = NoteBlock(
        (
            "The units of this network can be ordered in ",
            markup("<b>10<sup>{}</sup></b>", f"{log10_all_permutations:.1f}"),
            " ways",
            *without_streams,
            " that leave its function as it is: its ",
            term("permutations"),
            ". ",
            bold(f"{table.scaling_freedom:,}"),
            " positive ",
            term("scales"),
            " can be chosen freely",
            f"; {approximate_scale_count:,} more could if norms had no ε." if approximate_scale_count else ".",
            *((" The signs of ", bold(f"{sign_count:,}"), " units can be flipped freely.") if sign_count else ()),
        ),
    )
    group_rows = [
        (group.name, f"{group.size:,}", _freedom_text(group.stream, group.blocks), f"{group.log10_order:.1f}",
         ", ".join(name for name, _ in group.writers))
        for group in list(table.groups.values())[:LARGEST_ROW_COUNT]
    ]  # fmt: skip
    scale_rows = [
        (scale.name, f"{scale.size:,}", "exact" if scale.exact else "approximate", ", ".join(scale.norms) or "–",
         ", ".join(name for name, _ in scale.writers))
        for scale in list(table.scales.values())[:LARGEST_ROW_COUNT]
    ]  # fmt: skip
    limit_note = (
        ""
        if max(len(table.groups), len(table.scales)) <= LARGEST_ROW_COUNT
        else f" The first {LARGEST_ROW_COUNT} are shown."
    )
    return [
        count_note,
        TableBlock("groups", ("group", "units", "kind", "log10 of permutations", "written by"), group_rows,
                   (bold("Permutations."), " Groups of units that one ", term("permutations", "permutation"),
                    f" moves together.{limit_note}"), text_columns=(0, 2, 4), sortable=True),
        TableBlock("scales", ("scale", "values", "kind", "undone by", "opened by"), scale_rows,
                   (bold("Scales."), " Positive ", term("scales", "factors"), f", one a unit.{limit_note}"),
                   text_columns=(0, 2, 3, 4), sortable=True),
    ]  # fmt: skip


def _freedom_text(is_stream: bool, block_count: int) -> str:
    return f"{block_count:,} blocks" if block_count > 1 else "stream" if is_stream else "free"


def _layers_discrepancy_table(weight_figures: WeightFigures, stored_mmd: MMD) -> TableBlock:
    header: Sequence[str] = ("layer", "weights", "MMD² (10⁻³)", "p")
    mmd_without_symmetries = weight_figures.mmd_without_symmetries
    header = (*header, "NS (10⁻³)", "p") if mmd_without_symmetries is not None else header
    rows = []
    for layer, layer_mmd in list(stored_mmd.groups.items())[-LARGEST_ROW_COUNT:]:
        cells = [layer, f"{layer_mmd.weights:,}", _thousandths(layer_mmd.value), _p_text(layer_mmd.p_value)]
        rows.append(
            [*cells, _thousandths(mmd_without_symmetries[layer].value), _p_text(mmd_without_symmetries[layer].p_value)]
            if mmd_without_symmetries is not None
            else cells
        )
    first_count, second_count = stored_mmd.members
    aligned_note = (", and ", term("ns"), ": without their symmetries") if mmd_without_symmetries is not None else ()
    caption = (
        bold("Two halves of the members."), " ", term("mmd"), f" between the weights of {first_count:,} "
        f"and {second_count:,} members ({members_read(weight_figures)}, at even and at odd positions), as they are",
        *aligned_note,
        f". p: test with {stored_mmd.permutations:,} permutations; halves of one population differ by chance alone.",
    )  # fmt: skip
    return TableBlock("halves", header, rows, caption)


def _p_text(p_value: float | None) -> str:
    return "-" if p_value is None else f"{p_value:.3f}"


def _thousandths(value: float) -> str:
    return f"{1000 * value:.3f}".replace("-", "−")


def _distances_figure(weight_figures: WeightFigures) -> list[FigureBlock]:
    """Draw the distances between members with and without symmetries; return the figure, or [] without distances."""
    stored_mmd, mmd_without_symmetries, alignment = (
        weight_figures.stored_mmd,
        weight_figures.mmd_without_symmetries,
        weight_figures.alignment,
    )
    panels: list[Panel] = []
    tables: list[TableBlock] = []
    caption: list[str] = [bold("Distances, with and without symmetries."), f" Of {members_read(weight_figures)}."]
    if stored_mmd is not None and mmd_without_symmetries is not None:
        panels.append(_layers_panel(stored_mmd, mmd_without_symmetries))
        tables.append(_layers_table(stored_mmd, mmd_without_symmetries))
        caption += [" (a) ", term("mmd"), " of the two halves, layer by layer, and ", term("ns"), "."]
    if alignment is not None:
        panels += _alignment_panels(alignment)
        tables += [_alignment_table(alignment), _groups_table(alignment)]
        panel_letters = "abc"[len(panels) - 2 : len(panels)]
        caption += [
            f" ({panel_letters[0]}) Squared distance of each member to {alignment.to}, as stored and after its units "
            f"are permuted to match (weight matching). ({panel_letters[1]}) ", term("transpositions", "Transpositions"),
            " of that permutation in each group, a box over the members.",
        ]  # fmt: skip
    return [FigureBlock("apart", panels, caption, tables, len(panels))] if panels else []


def _layers_panel(stored_mmd: MMD, mmd_without_symmetries: MMD) -> Panel:
    height = min(LARGEST_HEIGHT_INCHES, max(HALF_WIDTH_INCHES[1], 1 + 0.2 * len(stored_mmd.groups)))
    layer_names = list(stored_mmd.groups)
    description = "MMD² and NS of each layer: " + "; ".join(
        f"{layer} {stored_mmd[layer].value:.2g} and {mmd_without_symmetries[layer].value:.2g}"
        for layer in layer_names[-8:]
    )
    return draw_panel(
        "halves-apart",
        "Two halves, by layer",
        description,
        lambda axes: draw_discrepancies(axes, stored_mmd, mmd_without_symmetries, height),
        (HALF_WIDTH_INCHES[0], height),
    )


def _layers_table(stored_mmd: MMD, mmd_without_symmetries: MMD) -> TableBlock:
    rows = [
        (
            layer,
            *(
                "-" if value is None else f"{value:.4g}".replace("-", "−")
                for value in (
                    layer_mmd.value,
                    layer_mmd.p_value,
                    mmd_without_symmetries[layer].value,
                    mmd_without_symmetries[layer].p_value,
                )
            ),
        )
        for layer, layer_mmd in stored_mmd.groups.items()
    ]
    return number_table(
        "halves-numbers", ("layer", "MMD²", "p", "NS", "p of NS"), rows, "(a) Each layer.", text_columns=(0,)
    )


def _alignment_panels(alignment: Alignment) -> list[Panel]:
    moved_rows = [row for row in alignment.rows() if row["before"] > 0]
    mean_decrease = sum(1 - row["after"] / row["before"] for row in moved_rows) / max(1, len(moved_rows))
    distances_text = (
        f"Squared distance to {alignment.to} of {count_with_noun(len(moved_rows), 'member')}; aligned, "
        f"{mean_decrease:.0%} nearer on average."
    )
    shares_text = "; ".join(f"{name} {share:.0%}" for name, _, share, _ in _group_shares(alignment)[:12])
    height = min(LARGEST_HEIGHT_INCHES, max(HALF_WIDTH_INCHES[1], 1 + 0.2 * len(alignment.sizes)))
    return [
        draw_panel(
            "alignment", "Squared distance to a reference", distances_text, lambda axes: draw_distances(axes, alignment)
        ),
        draw_panel(
            "transpositions",
            "Transpositions",
            f"Mean transpositions of each group: {shares_text}.",
            lambda axes: draw_transpositions(axes, alignment),
            (HALF_WIDTH_INCHES[0], height),
        ),
    ]


def _alignment_table(alignment: Alignment) -> TableBlock:
    rows = [
        (str(row["member"]), f"{row['before']:.6g}", f"{row['after']:.6g}", f"{row['transpositions']:,}")
        for row in alignment.rows()
    ]
    header = ("member", "distance as stored", "distance aligned", "transpositions")
    return number_table("alignment-numbers", header, rows, f"Each member, aligned to {alignment.to}.")


def _group_shares(alignment: Alignment) -> list[tuple[str, int, float, float]]:
    """Return for each group: name, size, and share of the possible transpositions, for members and at random."""
    moved_positions = [i for i, row in enumerate(alignment.rows()) if row["before"] > 0] or list(range(len(alignment)))
    group_shares = []
    for name, unit_count in alignment.sizes.items():
        if unit_count > 1:
            member_share = float(alignment.transpositions[name][moved_positions].double().mean()) / (unit_count - 1)
            random_share = (unit_count - sum(1 / k for k in range(1, unit_count + 1))) / (unit_count - 1)
            group_shares.append((name, unit_count, member_share, random_share))
    return group_shares


def _groups_table(alignment: Alignment) -> TableBlock:
    rows = [
        (name, f"{unit_count:,}", f"{100 * member_share:.2f}", f"{100 * random_share:.2f}")
        for name, unit_count, member_share, random_share in _group_shares(alignment)
    ]
    header = ("group", "units", "members (%)", "random permutations (%)")
    caption = "Mean transpositions of each group, as a share of the most there can be."
    return number_table("transpositions-numbers", header, rows, caption, text_columns=(0,))
