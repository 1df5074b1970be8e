"""The result of a comparison with HMC: the table of Xiao, Liu & Bamler 2023 (arXiv 2401.00611) with its own columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.evaluation.tables import as_text, write_frame, write_text
from checkpoints_zoo.formats.text import aligned
from checkpoints_zoo.methods.comparing.comparison import escaped

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1  # of the JSON
ROWS = {
    "agreement": ("agreement with HMC (0..1)", 1),
    "total_variation": ("total variation to HMC (0..1)", 1),
    "sample_accuracy": ("test accuracy of samples (%)", 100),
    "mean_accuracy": ("test accuracy of the mean (%)", 100),
}
TITLES = {"hmc": "HMC", "ensemble": "ensemble", "vi": "VI"}
_LATEX = {"sample": "sample", "q_d": "$q_d$", "q_r": "$q_r$", "q": "$q$"}

Figures = Mapping[str, Interval]


@dataclass(frozen=True)
class Source:
    """The draws behind a part of the table.

    Args:
        citation: of the draws, without the folder of this machine.
        runs: chains of HMC, members of an ensemble, fits of VI.
        draws: of all runs.
        facts: how they were made, JSON values: see `draws.Draws`.
    """

    citation: str
    runs: int
    draws: int
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class CompactComparison:
    """HMC, an ensemble and VI, and Gaussians fitted to the first two, compared with HMC.

    Args:
        sources: "hmc", "ensemble", "vi": the draws; without "vi" where there are none.
        to: what draws were aligned to: "the first" of each, or "the mean".
        data: name and fingerprint of the images evaluated on.
        inputs, samples, splits, seed: images; networks drawn from each Gaussian; random halves; of both.
        statistics: name and fingerprint of the images that running statistics were estimated on; "" without any.
        table: "hmc" and "ensemble" -> "sample", "q_d", "q_r", and "vi" -> "q" -> row of `ROWS` ->
            Interval. Agreement and total variation are to the mean prediction of all of HMC's draws. Samples have no
            mean. Intervals are delete-half jackknifes over chains, members and fits of VI, joined.
        halves: column of "hmc" -> "agreement" and "total_variation" of one half of the chains to the draws of the
            other: mean over the halves, low and high where 95 % of them fall.
    """

    sources: Mapping[str, Source]
    to: str
    data: str
    inputs: int
    samples: int
    splits: int
    seed: int
    statistics: str
    table: Mapping[str, Mapping[str, Figures]]
    halves: Mapping[str, Figures]

    def __getitem__(self, place: tuple[str, str, str]) -> Interval:
        """Return the figure of a (method, column, row), such as ("hmc", "q_r", "mean_accuracy").

        Raises:
            UsageError: no such figure.
        """
        method, column, row = place
        figures = self.table.get(method, {}).get(column, {})
        if row not in figures:
            there = ", ".join(f"{m} {c}" for m, columns in self.table.items() for c in columns)
            raise UsageError(f"figure {place!r}", expected=f"a row of one of {there}", found="none such")
        return figures[row]

    def _rows(self) -> list[dict[str, Any]]:
        whole = [(m, c, False, f) for m, columns in self.table.items() for c, f in columns.items()]
        halves = [("hmc", c, True, f) for c, f in self.halves.items()]
        return [
            {"method": m, "column": c, "figure": n, "value": x.value, "low": x.low, "high": x.high, "held_out": held}
            for m, c, held, of in whole + halves
            for n, x in of.items()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row a figure: method, column, figure, value, low, high, held_out."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return all of it as JSON text, which `from_json` reads."""
        values = {"version": VERSION, "level": 0.95, **asdict(self)}
        return json.dumps(values, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` gave; return the comparison.

        Raises:
            FormatError: something else, or of a newer version.
        """
        try:
            values = json.loads(text)
            version = values.pop("version")
            if version != VERSION:
                raise FormatError("compact table", expected=f"version {VERSION}", found=str(version)[:80])
            values.pop("level")
            table = {m: {c: _read(f) for c, f in columns.items()} for m, columns in values.pop("table").items()}
            halves = {c: _read(f) for c, f in values.pop("halves").items()}
            sources = {n: Source(**source) for n, source in values.pop("sources").items()}
            return cls(sources=sources, table=table, halves=halves, **values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError("compact table", expected="the JSON that `to_json` gives", found=repr(error)) from error

    def to_text(self) -> str:
        """Return the table for people, and what it means."""
        rows = [["", *headings(self)], *([words, *values] for words, values in cells(self))]
        blocks = [aligned(rows, range(1, len(rows[0])))]
        if self.halves:
            rows = [["", *(f"HMC {column}" for column in self.halves)]]
            rows += [
                [
                    f"{ROWS[row][0]}, half against half",
                    *(as_text(figures[row], 1) for figures in self.halves.values()),
                ]
                for row in ("agreement", "total_variation")
            ]
            blocks.append(aligned(rows, range(1, len(rows[0]))))
        return "\n\n".join([*blocks, "\n".join(meaning(self))])

    def to_latex(self) -> str:
        """Return the table for LaTeX with booktabs, laid out as the paper's."""
        count = len(headings(self))
        spans, at, rules = [], 2, []
        for method, of in self.table.items():
            spans.append(rf"\multicolumn{{{len(of)}}}{{c}}{{{escaped(TITLES[method])}}}")
            rules.append(rf"\cmidrule(lr){{{at}-{at + len(of) - 1}}}")
            at += len(of)
        names = [_LATEX[column] for of in self.table.values() for column in of]
        lines = [
            rf"\begin{{tabular}}{{l{'r' * count}}}",
            r"\toprule",
            " & ".join(["", *spans]) + r" \\",
            " ".join(rules),
            " & ".join(["", *names]) + r" \\",
            r"\midrule",
            *(" & ".join([escaped(words), *("--" if x == "-" else x for x in values)]) + r" \\"
              for words, values in cells(self)),
            r"\bottomrule",
            r"\end{tabular}",
        ]  # fmt: skip
        return "\n".join(lines)

    def write(self, path: str | Path) -> Path:
        """Write the table by the ending of a name: .json, .tex, .csv or .parquet; return its path.

        Raises:
            UsageError: another ending.
            StorageError: a place that can't be written to.
        """
        path = Path(path).expanduser()
        texts = {".json": self.to_json, ".tex": self.to_latex}
        if path.suffix.lower() not in texts:
            return write_frame(self.to_frame(), path)
        return write_text(texts[path.suffix.lower()](), path)


def _read(values: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval(**x) for name, x in values.items()}


def cells(result: CompactComparison) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the table: its words, and a text for each column in the table's order."""
    columns = [figures for of in result.table.values() for figures in of.values()]
    for row, (words, scale) in ROWS.items():
        yield words, [as_text(figures[row], scale) if row in figures else "-" for figures in columns]


def headings(result: CompactComparison) -> list[str]:
    """Return the names of the columns, such as "HMC q_r"."""
    return [f"{TITLES[method]} {column}" for method, of in result.table.items() for column in of]


def meaning(result: CompactComparison) -> list[str]:
    """Say what rows, columns and intervals mean; return the lines."""
    hmc, ensemble, vi = (result.sources.get(name) for name in ("hmc", "ensemble", "vi"))
    sources = [f"HMC: {_count(hmc, 'chain')}", f"ensemble: {ensemble.draws:,} members" if ensemble else ""]
    sources += [f"VI: {_count(vi, 'fit')}"] if vi is not None else []
    lines = [
        f"Measured on {result.data.split(' ')[0]}, {result.inputs:,} inputs. {'; '.join(sources)}.",
        f"{result.samples} samples of each q_d and q_r; draws aligned to {result.to}"
        f"{' of each' if result.to == 'the first' else ''}.",
        "Agreement and total variation: averaged predictions against those of all of HMC's draws; HMC's own are 1 and"
        " 0. Half against half: one half of the chains, or what is fitted to it, against the draws of the other.",
        f"[ ]: 95 % jackknife intervals over chains, members and fits ({result.splits} halves of each), joined; half"
        " against half: where 95 % of the halves fall. None with fewer than three.",
    ]
    if vi is not None:
        lines.append("VI: each fit by itself, mean over fits. Its mean is that of a fit's draws.")
    if result.statistics:
        lines.append(f"Running statistics of Gaussians' networks: from {result.statistics.split(' ')[0]}.")
    return lines


def _count(source: Source | None, word: str) -> str:
    if source is None:
        return ""
    return f"{source.draws:,} draws of {source.runs:,} {word}{'s' if source.runs != 1 else ''}"
