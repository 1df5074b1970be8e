"""What a comparison with HMC found: the table of Xiao, Liu & Bamler 2023 with its own columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.methods.comparing import compact_text
from checkpoints_zoo.populations import pairwise_information

if TYPE_CHECKING:
    import pandas as pd

Figures = Mapping[str, Interval]
VERSION = 1  # of the JSON


@dataclass(frozen=True)
class Source:
    """Where a part of the table comes from.

    Args:
        citation: of the draws, without the folder of this machine.
        runs: chains of HMC, members of an ensemble, fits of VI.
        draws: of all runs.
        facts: what is known of how they were made, JSON values: see `comparing.drawn.Draws`.
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
        table: "hmc" and "ensemble" -> "sample", "q_d", "q_r", and "vi" -> "q" -> row of `posterior.splits.ROWS` ->
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
            given = json.loads(text)
            version = given.pop("version")
            if version != VERSION:
                raise FormatError("compact table", expected=f"version {VERSION}", found=str(version)[:80])
            given.pop("level")
            table = {m: {c: _read(f) for c, f in columns.items()} for m, columns in given.pop("table").items()}
            halves = {c: _read(f) for c, f in given.pop("halves").items()}
            sources = {n: Source(**source) for n, source in given.pop("sources").items()}
            return cls(sources=sources, table=table, halves=halves, **given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError("compact table", expected="the JSON that `to_json` gives", found=repr(error)) from error

    def to_text(self) -> str:
        """Return the table for people, and what it means."""
        return compact_text.text(self)

    def to_latex(self) -> str:
        """Return the table for LaTeX with booktabs, laid out as the paper's."""
        return compact_text.latex(self)

    def write(self, path: str | Path) -> Path:
        """Write the table by the ending of a name: .json, .tex, .csv or .parquet; return its path.

        Raises:
            UsageError: another ending.
            StorageError: a place that can't be written to.
        """
        path = Path(path).expanduser()
        texts = {".json": self.to_json, ".tex": self.to_latex}
        if path.suffix.lower() not in texts:
            return pairwise_information.write(self.to_frame(), path)
        return pairwise_information.write_text(texts[path.suffix.lower()](), path)


def _read(values: Mapping[str, Any]) -> dict[str, Interval]:
    return {name: Interval(**x) for name, x in values.items()}
