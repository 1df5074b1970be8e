"""Tables of a comparison: text for people, LaTeX; all figures times 100, as the paper's posters have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from checkpoints_zoo.formats.text import aligned
from checkpoints_zoo.methods.comparing.estimates import SHORT, Estimate
from checkpoints_zoo.methods.comparing.worth import FIGURES as GROWING

if TYPE_CHECKING:
    from checkpoints_zoo.methods.comparing.comparison import Comparison, Row

SCALE = 100
MODES = {"one": "one mode", "multi": "multi mode", "members": "members"}
COLUMN_NAMES = {"aurc": "AURC"} | SHORT
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def text(found: Comparison) -> str:
    """Return the tables for people, and what they mean."""
    columns = [n for n in SHORT if any(n in row.figures for row in found.rows)]
    figures = [
        {**_named(row), "runs × draws": _size(row)} | {SHORT[n]: stated(row.figures.get(n)) for n in columns}
        for row in found.rows
    ]
    placed = [n for n in GROWING if any(n in row.worth for row in found.rows)]
    worth = [
        _named(row) | {COLUMN_NAMES[n]: row.worth[n].short if n in row.worth else "-" for n in placed}
        for row in found.rows
        if row.worth
    ]
    tests = [
        _named(row) | {"MMD": _p(row.figures.get("mmd")), "NS": _p(row.figures.get("ns")),
                       "corollary": "-" if row.corollary is None else f"{row.corollary:.2g}"}
        for row in found.rows
    ]  # fmt: skip
    blocks = [
        "All figures times 100: MMD² and NS (no unit), shares in %, Brier (0..200), NLL and mutual information in"
        f" nats × 100.\n{_table(figures)}",
        f"Worth as many independent members of the reference:\n{_table(worth)}" if worth and placed else "",
        f"p-values:\n{_table(tests)}",
        "\n".join(meaning(found)),
    ]
    return "\n\n".join(block for block in blocks if block)


def latex(found: Comparison) -> str:
    """Return the table of figures for LaTeX: booktabs, values as $value \\pm half$ of the interval."""
    columns = [n for n in SHORT if any(n in row.figures for row in found.rows)]
    lines = [
        r"% Figures times 100: shares in \%, Brier 0..200, NLL and mutual information in nats; MMD^2 has no unit.",
        rf"\begin{{tabular}}{{ll{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["Method", "Mode", *(escaped(SHORT[n]) for n in columns)]) + r" \\",
    ]
    before = ""
    for row in found.rows:
        group = "reference" if row.method == "reference" else "method"
        lines += [r"\midrule"] if group != before else []
        before = group
        cells = [_latex_value(row.figures.get(n)) for n in columns]
        lines.append(" & ".join([escaped(row.method), escaped(MODES[row.mode]), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def escaped(value: str) -> str:
    """Return text with LaTeX's special characters escaped.

    >>> escaped("a_b & 5 %")
    'a\\\\_b \\\\& 5 \\\\%'
    """
    return "".join(_LATEX.get(c, c) for c in value)


def meaning(found: Comparison) -> list[str]:
    """Say what rows, figures and intervals mean; return the lines."""
    on = found.data.split(" ")[0] + (f"; OOD: {found.ood.split(' ')[0]}" if found.ood else "; no OOD images")
    lines = [
        f"Measured on {on}. Reference: {found.members:,} members; its own MMD and NS are those of its members at even"
        " positions against those at odd ones.",
        "One mode: each run's draws alone, mean over runs ± Student's 95 % interval. Multi mode: every R-th draw of all"
        " R runs together; members: independent ones; both ± a 95 % delete-d jackknife, over runs or members. One run"
        " has no interval.",
        "MMD: MMD² of all weights, unbiased, mean over 20 kernels; bandwidths from the reference's own pairs, so that"
        " all rows are on one scale. Draws at one point far from the reference have 1 + its mean kernel, below 2."
        " NS: the same after scale unit-norm, permute first.",
        f"p of MMD and NS: {found.settings.get('permutations', 0):,} permutations, bandwidths from all pairs; of one"
        " mode twice the median over runs (Rüger 1978). Exact where draws are independent, as one run's are not.",
        "Corollary: p-value that each layer's largest weight is equally often in each unit; one mode: of the first run."
        " Exact for independent members alone: draws of one run share a start, and fail it for that.",
        "Worth: the size at which ensembles of the reference's members have the figure on average; [ ] by the figure's"
        " own interval; <1: worse than a single member, >: than all members at hand.",
    ]
    return lines + [f"Left out: {name}: {reason}" for name, reason in found.left_out.items()]


def stated(found: Estimate | None, scale: float = SCALE) -> str:
    """Write a figure and half its interval, in digits that the interval allows; return the text.

    >>> stated(Estimate(0.97712, 0.97312, 0.98112)), stated(Estimate(0.05, None, None)), stated(None)
    ('97.7±0.4', '5.00', '-')
    """
    if found is None or not math.isfinite(found.value):
        return "-"
    value = found.value * scale
    if found.low is None or found.high is None:
        return f"{value:.{_digits(value)}f}"
    half = max(found.high - found.value, found.value - found.low) * scale
    digits = _digits(value)
    if half > 0:
        power = math.floor(math.log10(half))
        digits = min(4, max(0, (half < 2 * 10**power) - power))  # two digits of an interval that begins with 1
    return f"{value:.{digits}f}±{half:.{digits}f}"


def _digits(value: float) -> int:
    """Return how many digits after the point three significant ones take, two or fewer unless it is small."""
    return 2 if value == 0 else min(4, max(0, 2 - math.floor(math.log10(abs(value)))))


def _latex_value(found: Estimate | None) -> str:
    written = stated(found)
    return "--" if written == "-" else "$" + written.replace("±", r" \pm ") + "$"


def _named(row: Row) -> dict[str, str]:
    return {"method": row.method, "mode": MODES[row.mode]}


def _size(row: Row) -> str:
    if row.mode == "members":
        return f"{row.draws:,}"
    return f"{row.runs} × {row.draws if row.mode == 'one' else row.draws // row.runs}"


def _p(found: Estimate | None) -> str:
    return "-" if found is None or found.p is None else f"{found.p:.2g}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Lay rows out in columns, all but the first two to the right; return the text."""
    if not rows:
        return ""
    return aligned([list(rows[0]), *(list(row.values()) for row in rows)], range(2, len(rows[0])))
