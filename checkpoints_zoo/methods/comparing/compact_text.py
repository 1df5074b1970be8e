"""The table of HMC, an ensemble and VI as text and LaTeX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from checkpoints_zoo.evaluation.plots import stated
from checkpoints_zoo.formats.text import aligned
from checkpoints_zoo.methods.comparing.tables import escaped

if TYPE_CHECKING:
    from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison, Source

ROWS = {
    "agreement": ("agreement with HMC (0..1)", 1),
    "total_variation": ("total variation to HMC (0..1)", 1),
    "sample_accuracy": ("test accuracy of samples (%)", 100),
    "mean_accuracy": ("test accuracy of the mean (%)", 100),
}
TITLES = {"hmc": "HMC", "ensemble": "ensemble", "vi": "VI"}
_LATEX = {"sample": "sample", "q_d": "$q_d$", "q_r": "$q_r$", "q": "$q$"}


def cells(found: CompactComparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table: its words, and a text for each column in the table's order."""
    columns = [figures for of in found.table.values() for figures in of.values()]
    for row, (words, scale) in ROWS.items():
        yield words, [stated(figures[row], scale) if row in figures else "-" for figures in columns]


def headings(found: CompactComparison) -> list[str]:
    """Return the names of the columns, such as "HMC q_r"."""
    return [f"{TITLES[method]} {column}" for method, of in found.table.items() for column in of]


def text(found: CompactComparison) -> str:
    """Return the table for people, and what it means."""
    rows = [["", *headings(found)], *([words, *values] for words, values in cells(found))]
    blocks = [aligned(rows, range(1, len(rows[0])))]
    if found.halves:
        rows = [["", *(f"HMC {column}" for column in found.halves)]]
        rows += [
            [f"{ROWS[row][0]}, half against half", *(stated(figures[row], 1) for figures in found.halves.values())]
            for row in ("agreement", "total_variation")
        ]
        blocks.append(aligned(rows, range(1, len(rows[0]))))
    return "\n\n".join([*blocks, "\n".join(meaning(found))])


def meaning(found: CompactComparison) -> list[str]:
    """Say what rows, columns and intervals mean; return the lines."""
    hmc, ensemble, vi = (found.sources.get(name) for name in ("hmc", "ensemble", "vi"))
    sources = [f"HMC: {_count(hmc, 'chain')}", f"ensemble: {ensemble.draws:,} members" if ensemble else ""]
    sources += [f"VI: {_count(vi, 'fit')}"] if vi is not None else []
    lines = [
        f"Measured on {found.data.split(' ')[0]}, {found.inputs:,} inputs. {'; '.join(sources)}.",
        f"{found.samples} samples of each q_d and q_r; draws aligned to {found.to}"
        f"{' of each' if found.to == 'the first' else ''}.",
        "Agreement and total variation: averaged predictions against those of all of HMC's draws; HMC's own are 1 and"
        " 0. Half against half: one half of the chains, or what is fitted to it, against the draws of the other.",
        f"[ ]: 95 % jackknife intervals over chains, members and fits ({found.splits} halves of each), joined; half"
        " against half: where 95 % of the halves fall. None with fewer than three.",
    ]
    if vi is not None:
        lines.append("VI: each fit by itself, mean over fits. Its mean is that of a fit's draws.")
    if found.statistics:
        lines.append(f"Running statistics of Gaussians' networks: from {found.statistics.split(' ')[0]}.")
    return lines


def latex(found: CompactComparison) -> str:
    """Return the table for LaTeX with booktabs, laid out as the paper's."""
    count = len(headings(found))
    spans, at, rules = [], 2, []
    for method, of in found.table.items():
        spans.append(rf"\multicolumn{{{len(of)}}}{{c}}{{{escaped(TITLES[method])}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + len(of) - 1}}}")
        at += len(of)
    names = [_LATEX[column] for of in found.table.values() for column in of]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * count}}}",
        r"\toprule",
        " & ".join(["", *spans]) + r" \\",
        " ".join(rules),
        " & ".join(["", *names]) + r" \\",
        r"\midrule",
        *(" & ".join([escaped(words), *("--" if x == "-" else x for x in values)]) + r" \\"
          for words, values in cells(found)),
        r"\bottomrule",
        r"\end{tabular}",
    ]  # fmt: skip
    return "\n".join(lines)


def _count(source: Source | None, word: str) -> str:
    if source is None:
        return ""
    return f"{source.draws:,} draws of {source.runs:,} {word}{'s' if source.runs != 1 else ''}"
