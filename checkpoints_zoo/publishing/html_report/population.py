"""What the members are: where they lie, how they were trained, how accurate each is."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.evaluation.drawing import BLUE, GREY, RED
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.formats.text import MOST_LISTED, counted, format_bytes
from checkpoints_zoo.publishing.cards import TRAINING, Section
from checkpoints_zoo.publishing.html_report.charts import axis, bars, count_axis, counts, edges_of, layout, upright
from checkpoints_zoo.publishing.html_report.definitions import word
from checkpoints_zoo.publishing.html_report.gather import Measured
from checkpoints_zoo.publishing.html_report.page import Block, Chart, Facts, Note, Panel, Part
from checkpoints_zoo.publishing.html_report.tags import tag

QUIET = ("stack_width", "wall_time_s", "created", "data_fingerprint")  # not of the recipe


def part(found: Measured) -> Part:
    """Return the part on the population."""
    blocks: list[Block] = [_facts(found)]
    if not isinstance(found.members, Collection):
        blocks.append(Note(("How the members were trained is in their manifest, not in their predictions.",), True))
    return Part("population", "Population", [*blocks, _spread(found)])


def columns_of(members: Collection) -> dict[str, list[Any]]:
    """Return the columns of the selected rows, as they are in the manifest; times as seconds since 1970."""
    return dict(Section(members.name, members.description, members.rows).column)


def created(members: Collection) -> str:
    """Return the days on which the members were trained, "" where their manifest does not say so."""
    days = sorted({_day(s) for s in columns_of(members).get("created", []) if s is not None})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def _facts(found: Measured) -> Facts:
    members = found.members
    rows: list[tuple[str, str]] = [("collection", members.name if isinstance(members, Collection) else found.name)]
    if isinstance(members, Collection):
        told = members.description
        given = f" with {json.dumps(dict(told.arguments), ensure_ascii=False)}" if told.arguments else ""
        layouts = [told.layouts[k] for k in sorted({k for k in members.rows.column("layout").to_pylist() if k})]
        values = sum(math.prod(t.shape) for t in layouts[0].tensors) if len(layouts) == 1 else 0
        rows += [("architecture", f"{told.architecture}{given}")]
        rows += [("values of a member", f"{values:,}, {format_bytes(members._member_nbytes)}")] if values else []
        rows += [("trained on", told.dataset), ("classes", _classes(members.classes))]
        columns = columns_of(members)
        rows.append(("members", f"{len(members):,}, {_how(columns)}{_viewed(members)}"))
        rows += [("seeds", text) for text in [_told(columns.get("seed", []), whole=True)] if text]
        rows += [(name, text) for name in TRAINING if name not in QUIET and (text := _told(columns.get(name, [])))]
        rows += [("trained", day) for day in [created(members)] if day]
        rows += [("licence", told.licence)] if told.licence else []
        rows += [("to be cited as", told.citation)] if told.citation else []
    else:
        facts = members.facts
        rows += [("members", f"{len(members):,}"), ("classes", _classes(facts.classes))]
        rows += [("images", members.data), ("logits computed in", facts.computed)]
        rows += [("view of the weights", facts.view)] if facts.view else []
    says = "manifest says" if isinstance(members, Collection) else "stored predictions say"
    cells = [(name.replace("_", " "), value) for name, value in rows]
    return Facts("facts", cells, (tag("b", "The members. "), f"As their {says}."))


def _classes(names: Sequence[str]) -> str:
    return f"{len(names):,}: {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"


def _how(columns: dict[str, list[Any]]) -> str:
    methods = Counter(columns.get("method", [])) or Counter([None])
    if set(methods) == {"independent"}:
        return "trained independently of each other"
    return "by method: " + ", ".join(f"{m or 'not known'} ({n:,})" for m, n in sorted(methods.items(), key=str))


def _viewed(members: Collection) -> str:
    steps = "; ".join(map(str, members._view.steps))
    return f"; weights viewed: {steps}" if steps else ""


def _told(values: Sequence[Any], whole: bool = False) -> str:
    """Write one value, a few with how many members have each, or the range of many; return the text.

    Args:
        values: of the members, None where not known.
        whole: whether only the range of several is wanted.
    """
    found = Counter(v for v in values if v is not None)
    if not found:
        return ""
    shown = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in sorted(found)]
    without = len(values) - found.total()
    missing = f" ({counted(without, 'member')} without)" if without else ""
    if len(shown) == 1:
        return f"{shown[0]}{missing}"
    if len(shown) <= MOST_LISTED and not whole:
        listed = ", ".join(f"{text} ({found[v]:,})" for text, v in zip(shown, sorted(found), strict=True))
        return f"{listed}{missing}"
    return f"{shown[0]} to {shown[-1]}, {len(shown):,} different ones{missing}"


def _spread(found: Measured) -> Chart:
    """Draw the accuracy and the NLL of each member, their mean and the ensemble's."""
    report = found.report
    accuracies = [100 * a for a in report.drawing["member_accuracy"]]
    panels = [
        _histogram(
            found, "member-accuracy", "Accuracy", accuracies, "accuracy", "accuracy (%)", 100, 100 / report.inputs
        ),
        _histogram(found, "member-nll", "NLL", found.said.nll.tolist(), "nll", "NLL (nats)", 1, 0),
    ]
    several = len(accuracies) > 1
    deviation = f", standard deviation {statistics.stdev(accuracies):.2g} points" if several else ""
    caption = (
        tag("b", "The single members. "), "Test accuracy (a) and ", word("nll"), f" (b) of each of "
        f"{counted(report.members, 'member')} on {found.on}{deviation}. Dashed: mean of the members, solid: "
        f"{found.together}{'; [ ]: 95 % intervals, by a bootstrap and a jackknife over members' * bool(found.known)}.",
    )  # fmt: skip
    return Chart("single-members", panels, caption)


def _histogram(
    found: Measured, name: str, title: str, values: list[float], figure: str, unit: str, scale: float, step: float
) -> Panel:
    report = found.report
    mean, everyone = report.member[figure], report.ensemble[figure]
    edges = edges_of(values, 24, step)
    heights = counts(values, edges)
    top = max(heights) * 1.06
    ends = [min(edges[0], everyone.value * scale), max(edges[-1], everyone.value * scale)]
    margin = 0.04 * (ends[1] - ends[0])
    traces = [
        bars(edges, heights, "members", BLUE, "members") | {"showlegend": False},
        upright(mean.value * scale, top, f"members: {as_text(mean, scale)}", GREY, "dash"),
        upright(everyone.value * scale, top, f"ensemble: {as_text(everyone, scale)}", RED),
    ]
    told = (
        f"Histogram of the {title} of {counted(report.members, 'member')}, from {min(values):.4g} to "
        f"{max(values):.4g}; mean {mean.value * scale:.4g}, ensemble {everyone.value * scale:.4g}."
    )
    x = axis(unit, range=[ends[0] - margin, ends[1] + margin], nticks=7)
    return Panel(name, title, told, traces, layout(x, count_axis("members", heights)))
