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
from checkpoints_zoo.publishing.card_sections import Section
from checkpoints_zoo.publishing.cards import TRAINING_COLUMNS
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
    return dict(Section(members.name, members.description, members.rows).row_values)


def training_days(members: Collection) -> str:
    """Return the first and last day on which members were trained; "" if their manifest has no days."""
    days = sorted({_iso_day(seconds) for seconds in columns_of(members).get("created", []) if seconds is not None})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _iso_day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _population_facts(measured: Measurements) -> FactsBlock:
    members = measured.members
    fact_rows: list[tuple[str, str]] = [("collection", measured.name)]
    if isinstance(members, Collection):
        description = members.description
        arguments_json = json.dumps(dict(description.arguments), ensure_ascii=False)
        arguments_text = f" with {arguments_json}" if description.arguments else ""
        layouts = [description.layouts[k] for k in sorted({k for k in members.rows.column("layout").to_pylist() if k})]
        value_count = sum(math.prod(t.shape) for t in layouts[0].tensors) if len(layouts) == 1 else 0
        fact_rows += [("architecture", f"{description.architecture}{arguments_text}")]
        fact_rows += (
            [("values of a member", f"{value_count:,}, {format_bytes(members._member_nbytes)}")] if value_count else []
        )
        fact_rows += [("trained on", description.dataset), ("classes", _classes_text(members.classes))]
        columns = columns_of(members)
        fact_rows.append(("members", f"{len(members):,}, {_methods_text(columns)}{_view_note(members)}"))
        fact_rows += [("seeds", text) for text in [_values_text(columns.get("seed", []), as_range=True)] if text]
        fact_rows += [
            (name, text)
            for name in TRAINING_COLUMNS
            if name not in OMITTED_COLUMNS and (text := _values_text(columns.get(name, [])))
        ]
        fact_rows += [("trained", day) for day in [training_days(members)] if day]
        fact_rows += [("licence", description.licence)] if description.licence else []
        fact_rows += [("to be cited as", description.citation)] if description.citation else []
    else:
        facts = members.facts
        fact_rows += [("members", f"{len(members):,}"), ("classes", _classes_text(facts.classes))]
        fact_rows += [("images", members.data), ("logits computed in", facts.computed)]
        fact_rows += [("view of the weights", facts.view)] if facts.view else []
    origin_text = "their manifest" if isinstance(members, Collection) else "their stored predictions"
    shown_rows = [(name.replace("_", " "), value) for name, value in fact_rows]
    return FactsBlock("facts", shown_rows, (bold("The members."), f" From {origin_text}."))


def _classes_text(class_names: Sequence[str]) -> str:
    return f"{len(class_names):,}: {', '.join(class_names[:12])}{', …' if len(class_names) > 12 else ''}"


def _methods_text(columns: dict[str, list[Any]]) -> str:
    count_of_method = Counter(columns.get("method", [])) or Counter([None])
    if set(count_of_method) == {"independent"}:
        return "trained independently of each other"
    return "by method: " + ", ".join(
        f"{method or 'not known'} ({count:,})" for method, count in sorted(count_of_method.items(), key=str)
    )


def _view_note(members: Collection) -> str:
    steps_text = "; ".join(map(str, members._view.steps))
    return f"; weights viewed: {steps_text}" if steps_text else ""


def _values_text(values: Sequence[Any], as_range: bool = False) -> str:
    """Write one value, a few values with their numbers of members, or the range of many; return the text.

    Args:
        values: value of each member, None where a member's value is unknown.
        as_range: whether several different values are written as a range.
    """
    count_of_value = Counter(v for v in values if v is not None)
    if not count_of_value:
        return ""
    value_texts = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in sorted(count_of_value)]
    missing_count = len(values) - count_of_value.total()
    missing_text = f" ({count_with_noun(missing_count, 'member')} without)" if missing_count else ""
    if len(value_texts) == 1:
        return f"{value_texts[0]}{missing_text}"
    if len(value_texts) <= LARGEST_LISTED_COUNT and not as_range:
        value_list_text = ", ".join(
            f"{text} ({count_of_value[v]:,})" for text, v in zip(value_texts, sorted(count_of_value), strict=True)
        )
        return f"{value_list_text}{missing_text}"
    return f"{value_texts[0]} to {value_texts[-1]}, {len(value_texts):,} different ones{missing_text}"


def _members_figure(measured: Measurements) -> FigureBlock:
    """Draw the accuracy and the NLL of each member, their means and the ensemble's figures."""
    report = measured.report
    accuracy_percentages, nll_values = (
        [100 * a for a in report.drawing["member_accuracy"]],
        measured.outputs.nll.tolist(),
    )

    def describe_panel(figure_title: str, values: Sequence[float], figure: str, scale: float) -> str:
        return (
            f"Histogram of the {figure_title} of {count_with_noun(report.members, 'member')}, "
            f"from {min(values):.4g} to {max(values):.4g}; mean {report.member[figure].value * scale:.4g}, ensemble "
            f"{report.ensemble[figure].value * scale:.4g}."
        )

    panels = [
        draw_panel("member-accuracy", "Accuracy", describe_panel("accuracy", accuracy_percentages, "accuracy", 100),
                   lambda axes: draw_member_accuracies(report, axes)),
        draw_panel("member-nll", "NLL", describe_panel("NLL", nll_values, "nll", 1),
                   lambda axes: draw_member_values(report, axes, "nll", nll_values, histogram_edges(nll_values))),
    ]  # fmt: skip
    deviation_text = ""
    if len(accuracy_percentages) > 1:
        deviation_text = f", standard deviation {statistics.stdev(accuracy_percentages):.2g} points"
    resampling = "a bootstrap and a jackknife" if measured.has_member_intervals else "a jackknife"
    intervals_note = f"; [ ]: 95 % intervals, by {resampling} over members"
    caption = (
        bold("The single members."), " Test accuracy (a) and ", term("nll"), f" (b) of each of "
        f"{count_with_noun(report.members, 'member')} on {measured.images}{deviation_text}. Dashed: mean of the "
        f"members, solid: {measured.subject}{intervals_note if measured.interval_note else ''}.",
    )  # fmt: skip
    rows = [
        (str(member), f"{accuracy:.2f}", f"{loss:.4f}")
        for member, accuracy, loss in zip(measured.inside.ids, accuracy_percentages, nll_values, strict=True)
    ]
    table = number_table("members-numbers", ("member", "accuracy (%)", "NLL (nats)"), rows, "Each member.")
    return FigureBlock("single-members", panels, caption, [table])
