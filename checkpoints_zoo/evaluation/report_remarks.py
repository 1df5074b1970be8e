"""Remarks on a report: sentences on missing intervals, and on figures that are best for fewer than all members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from checkpoints_zoo.evaluation.figures import (
    CALIBRATION,
    FIGURES,
    KNOWN_FIGURES,
    MEMBER_DIFFERENCES,
    SENSITIVE_FIGURES,
)
from checkpoints_zoo.evaluation.metrics import FEWEST_MEMBERS_IF_SKEWED
from checkpoints_zoo.evaluation.tables import ROUNDING_ERROR
from checkpoints_zoo.formats.text import count_with_noun

if TYPE_CHECKING:
    from checkpoints_zoo.evaluation.report import Report


def remarks_on(report: Report, figures: Iterable[str]) -> list[str]:
    """Return the remarks of a report that are about some of its figures."""
    names = [name for name in report.ensemble if name in set(figures)]
    return [*_sentences_on_missing_intervals(report, names), *_sentences_on_better_small_sizes(report, names)]


def _sentences_on_missing_intervals(report: Report, figures: Sequence[str]) -> Iterator[str]:
    """Yield sentences on the intervals of figures that the report leaves out, with the reason."""
    if not report.has_members:
        titles = [figure.title for figure in FIGURES.values() if figure.input_kind == MEMBER_DIFFERENCES]
        yield f"A posterior mean has no members: no intervals, and {'; '.join(titles)} are not defined."
    elif report.members < 3:
        yield "No intervals: they need 3 members or more."
    elif report.members < FEWEST_MEMBERS_IF_SKEWED:
        names = [KNOWN_FIGURES[name].title for name in KNOWN_FIGURES if name in SENSITIVE_FIGURES and name in figures]
        if not names:
            return
        share = 100 * 0.9**report.members
        yield (
            f"No intervals of limits, of means of members, and of the ensemble's {'; '.join(names)}: they need "
            f"{FEWEST_MEMBERS_IF_SKEWED} members or more. If a tenth of the population is far worse than the others, "
            f"{share:.0f} % of samples of {report.members} members have none of these, and an interval would miss the "
            "truth."
        )


def _sentences_on_better_small_sizes(report: Report, figures: Sequence[str]) -> Iterator[str]:
    """Yield sentences on figures that are best for fewer than all members, with a possible reason."""
    chance_texts: list[str] = []
    calibration_texts: list[str] = []
    other_texts: list[str] = []
    for name in figures:
        full_value = report.ensemble[name]
        sign = {"higher": 1, "lower": -1}.get(KNOWN_FIGURES[name].better)
        if sign is None or name not in report.growth:
            continue
        values = {size: sign * intervals[name].value for size, intervals in report.curve.items() if name in intervals}
        best_size = max(values, key=lambda size: values[size])
        if best_size == report.members or values[best_size] - values[report.members] <= ROUNDING_ERROR:
            continue
        bound = full_value.high if sign > 0 else full_value.low
        if bound is None or values[best_size] <= sign * bound:
            chance_texts.append(f"{KNOWN_FIGURES[name].title} (for {count_with_noun(best_size, 'member')})")
            continue
        scale = KNOWN_FIGURES[name].scale
        ends = f"{report.curve[best_size][name].value * scale:.3g}", f"{full_value.value * scale:.3g}"
        text = f"{KNOWN_FIGURES[name].title} ({ends[0]} for {count_with_noun(best_size, 'member')}, {ends[1]} for all)"
        (calibration_texts if KNOWN_FIGURES[name].group == CALIBRATION else other_texts).append(text)
    if calibration_texts:
        yield (
            f"Worse for all members than for fewer: {', '.join(calibration_texts)}. The mean of more members is less "
            "confident; where confidence is below accuracy, calibration gets worse. Temperature scaling corrects this."
        )
    if other_texts:
        yield (
            f"Worse for all members than for fewer: {', '.join(other_texts)}. Averaging probabilities does not improve "
            "every figure, and members that are worse than the others pull the mean down."
        )
    if chance_texts:
        yield (
            f"Best for fewer than all members: {', '.join(chance_texts)}. The difference is within the interval of all "
            "members, so it may be chance."
        )
