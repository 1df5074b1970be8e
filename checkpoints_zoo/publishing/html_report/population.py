"""The population: its members, how they were trained, and how accurate each member is."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.evaluation.drawing import histogram_edges
from checkpoints_zoo.evaluation.report import draw_member_accuracies, draw_member_values
from checkpoints_zoo.formats.text import LARGEST_LISTED_COUNT, count_with_noun, format_bytes
from checkpoints_zoo.publishing.cards import TRAINING_COLUMNS, Section
from checkpoints_zoo.publishing.html_report.definitions import term
from checkpoints_zoo.publishing.html_report.markup import bold
from checkpoints_zoo.publishing.html_report.measurements import Measurements
from checkpoints_zoo.publishing.html_report.page import (
    Block,
    FactsBlock,
    FigureBlock,
    NoteBlock,
    Part,
    draw_panel,
    number_table,
)

# Training columns that the list of settings leaves out.
OMITTED_COLUMNS = ("stack_width", "wall_time_s", "created", "data_fingerprint")


def build_part(measured: Measurements) -> Part:
    """Return the part on the population."""
    blocks: list[Block] = [_population_facts(measured)]
    if not isinstance(measured.members, Collection):
        reason = "How the members were trained is in their manifest, not in their predictions."
        blocks.append(NoteBlock((reason,), True))
    return Part("population", "Population", [*blocks, _members_figure(measured)])


def columns_of(members: Collection) -> dict[str, list[Any]]:
    """Return the columns of the selected rows, as they are in the manifest; times as seconds since 1970."""
    return dict(Section(members.name, members.description, members.rows).column)


def training_days(members: Collection) -> str:
    """Return the first and last day on which members were trained; "" if their manifest has no days."""
    days = sorted({_iso_day(s) for s in columns_of(members).get("created", []) if s is not None})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _iso_day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _population_facts(measured: Measurements) -> FactsBlock:
    members = measured.members
    rows: list[tuple[str, str]] = [("collection", measured.name)]
    if isinstance(members, Collection):
        description = members.description
        arguments = json.dumps(dict(description.arguments), ensure_ascii=False)
        with_arguments = f" with {arguments}" if description.arguments else ""
        layouts = [description.layouts[k] for k in sorted({k for k in members.rows.column("layout").to_pylist() if k})]
        values = sum(math.prod(t.shape) for t in layouts[0].tensors) if len(layouts) == 1 else 0
        rows += [("architecture", f"{description.architecture}{with_arguments}")]
        rows += [("values of a member", f"{values:,}, {format_bytes(members._member_nbytes)}")] if values else []
        rows += [("trained on", description.dataset), ("classes", _classes_text(members.classes))]
        columns = columns_of(members)
        rows.append(("members", f"{len(members):,}, {_methods_text(columns)}{_view_note(members)}"))
        rows += [("seeds", text) for text in [_values_text(columns.get("seed", []), only_range=True)] if text]
        rows += [
            (name, text)
            for name in TRAINING_COLUMNS
            if name not in OMITTED_COLUMNS and (text := _values_text(columns.get(name, [])))
        ]
        rows += [("trained", day) for day in [training_days(members)] if day]
        rows += [("licence", description.licence)] if description.licence else []
        rows += [("to be cited as", description.citation)] if description.citation else []
    else:
        facts = members.facts
        rows += [("members", f"{len(members):,}"), ("classes", _classes_text(facts.classes))]
        rows += [("images", members.data), ("logits computed in", facts.computed)]
        rows += [("view of the weights", facts.view)] if facts.view else []
    origin = "their manifest" if isinstance(members, Collection) else "their stored predictions"
    cells = [(name.replace("_", " "), value) for name, value in rows]
    return FactsBlock("facts", cells, (bold("The members."), f" From {origin}."))


def _classes_text(class_names: Sequence[str]) -> str:
    return f"{len(class_names):,}: {', '.join(class_names[:12])}{', …' if len(class_names) > 12 else ''}"


def _methods_text(columns: dict[str, list[Any]]) -> str:
    methods = Counter(columns.get("method", [])) or Counter([None])
    if set(methods) == {"independent"}:
        return "trained independently of each other"
    return "by method: " + ", ".join(f"{m or 'not known'} ({n:,})" for m, n in sorted(methods.items(), key=str))


def _view_note(members: Collection) -> str:
    steps = "; ".join(map(str, members._view.steps))
    return f"; weights viewed: {steps}" if steps else ""


def _values_text(values: Sequence[Any], only_range: bool = False) -> str:
    """Write one value, a few values with their numbers of members, or the range of many; return the text.

    Args:
        values: value of each member; None if it is not known.
        only_range: whether several different values are written as a range.
    """
    counts = Counter(v for v in values if v is not None)
    if not counts:
        return ""
    value_texts = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in sorted(counts)]
    missing_count = len(values) - counts.total()
    missing_text = f" ({count_with_noun(missing_count, 'member')} without)" if missing_count else ""
    if len(value_texts) == 1:
        return f"{value_texts[0]}{missing_text}"
    if len(value_texts) <= LARGEST_LISTED_COUNT and not only_range:
        value_list_text = ", ".join(
            f"{text} ({counts[v]:,})" for text, v in zip(value_texts, sorted(counts), strict=True)
        )
        return f"{value_list_text}{missing_text}"
    return f"{value_texts[0]} to {value_texts[-1]}, {len(value_texts):,} different ones{missing_text}"


def _members_figure(measured: Measurements) -> FigureBlock:
    """Draw the accuracy and the NLL of each member, their means and the ensemble's figures."""
    report = measured.report
    accuracies, losses = [100 * a for a in report.drawing["member_accuracy"]], measured.outputs.nll.tolist()

    def describe_panel(title: str, values: Sequence[float], figure: str, scale: float) -> str:
        return (
            f"Histogram of the {title} of {count_with_noun(report.members, 'member')}, from {min(values):.4g} to "
            f"{max(values):.4g}; mean {report.member[figure].value * scale:.4g}, ensemble "
            f"{report.ensemble[figure].value * scale:.4g}."
        )

    panels = [
        draw_panel("member-accuracy", "Accuracy", describe_panel("accuracy", accuracies, "accuracy", 100),
                   lambda axes: draw_member_accuracies(report, axes)),
        draw_panel("member-nll", "NLL", describe_panel("NLL", losses, "nll", 1),
                   lambda axes: draw_member_values(report, axes, "nll", losses, histogram_edges(losses))),
    ]  # fmt: skip
    deviation = ""
    if len(accuracies) > 1:
        deviation = f", standard deviation {statistics.stdev(accuracies):.2g} points"
    intervals = "; [ ]: 95 % intervals, by a bootstrap and a jackknife over members"
    caption = (
        bold("The single members."), " Test accuracy (a) and ", term("nll"), f" (b) of each of "
        f"{count_with_noun(report.members, 'member')} on {measured.images}{deviation}. Dashed: mean of the members, "
        f"solid: {measured.subject}{intervals if measured.interval_note else ''}.",
    )  # fmt: skip
    rows = [
        (str(member), f"{accuracy:.2f}", f"{loss:.4f}")
        for member, accuracy, loss in zip(measured.inside.ids, accuracies, losses, strict=True)
    ]
    table = number_table("members-numbers", ("member", "accuracy (%)", "NLL (nats)"), rows, "Each member.")
    return FigureBlock("single-members", panels, caption, [table])
