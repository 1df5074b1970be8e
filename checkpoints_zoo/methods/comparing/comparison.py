"""What a comparison found: one row a method and mode, each figure with its interval."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.methods.comparing import plots, tables
from checkpoints_zoo.methods.comparing.estimates import ALL, Estimate
from checkpoints_zoo.methods.comparing.worth import Worth
from checkpoints_zoo.populations import pairwise_information as frames
from checkpoints_zoo.populations.kernels import WHOLE

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1  # of the JSON
REFERENCE = "reference"


@dataclass(frozen=True)
class Row:
    """A method measured in one way.

    Args:
        method: its name; "reference" for the population itself.
        mode: "one", each run alone: figures are means over runs; "multi", some draws of all runs together; "members",
            independent members.
        runs: how many; of independent members, the members.
        draws: of an ensemble.
        figures: name -> estimate: "mmd" and "ns" of all weights, and those of `zoo.evaluate`.
        layers: "mmd" and "ns" -> layer -> estimate.
        corollary: p-value of `zoo.corollary`, all layers together; of one mode, of the first run's draws. None where
            the network has no table of symmetries.
        corollary_layers: layer -> p-value, not adjusted for their number.
        worth: figure -> how many independent members have it on average.
    """

    method: str
    mode: str
    runs: int
    draws: int
    figures: Mapping[str, Estimate]
    layers: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    corollary: float | None = None
    corollary_layers: Mapping[str, float] = field(default_factory=dict)
    worth: Mapping[str, Worth] = field(default_factory=dict)

    def __getitem__(self, figure: str) -> Estimate:
        """Return a figure.

        Raises:
            UsageError: no such figure.
        """
        if figure not in self.figures:
            raise UsageError(f"figure {figure!r}", expected=f"one of {', '.join(self.figures)}", found="none such")
        return self.figures[figure]

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return {
            "method": self.method, "mode": self.mode, "runs": self.runs, "draws": self.draws,
            "figures": {n: x.to_json() for n, x in self.figures.items()},
            "layers": {n: {g: x.to_json() for g, x in of.items()} for n, of in self.layers.items()},
            "corollary": self.corollary, "corollary_layers": dict(self.corollary_layers),
            "worth": {n: x.to_json() for n, x in self.worth.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave; return it."""
        figures = {n: Estimate.from_json(x) for n, x in given["figures"].items()}
        layers = {n: {g: Estimate.from_json(x) for g, x in of.items()} for n, of in given["layers"].items()}
        placed = {n: Worth.from_json(x) for n, x in given["worth"].items()}
        plain = {n: given[n] for n in ("method", "mode", "runs", "draws", "corollary", "corollary_layers")}
        return cls(figures=figures, layers=layers, worth=placed, **plain)


@dataclass(frozen=True)
class Comparison:
    """Approximate posteriors against a population.

    Args:
        collection: name of the collection whose recipe the methods were fitted to.
        reference: citation of the population.
        members: how many it has.
        data, ood: names and fingerprints of the images; ood "" without any.
        rows: methods in their order, one mode before multi mode; the reference last: its ensemble, and for "mmd" and
            "ns" its members at even positions against those at odd ones.
        methods: name -> what is known of its draws, JSON values: settings, seconds, facts of each run, searches.
        left_out: name -> why a method has no rows.
        settings: permutations, seed, how symmetries were removed, how many images, versions: JSON values.
    """

    collection: str
    reference: str
    members: int
    data: str
    ood: str
    rows: tuple[Row, ...]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    left_out: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __getitem__(self, named: tuple[str, str]) -> Row:
        """Return the row of a (method, mode).

        Raises:
            UsageError: no such row.
        """
        for row in self.rows:
            if (row.method, row.mode) == named:
                return row
        there = ", ".join(f"({row.method!r}, {row.mode!r})" for row in self.rows)
        raise UsageError(f"row {named!r}", expected=f"one of {there}", found="none such")

    def to_frame(self) -> pd.DataFrame:
        """Return one row a method, mode, figure and group of tensors, the group "all" but for layers of MMD and NS.

        Columns: method, mode, runs, draws, figure, group, value, low, high, p, unit, better, worth, worth_low,
        worth_high. In the figures' units, not times 100.
        """
        import pandas as pd

        return pd.DataFrame(list(self._records()))

    def _records(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            shared = {"method": row.method, "mode": row.mode, "runs": row.runs, "draws": row.draws}
            for name, x in row.figures.items():
                groups = {**row.layers.get(name, {}), WHOLE: x}
                for group, y in groups.items():
                    placed = row.worth.get(name) if group == WHOLE else None
                    yield {
                        **shared, "figure": name, "group": group, "value": y.value, "low": y.low, "high": y.high,
                        "p": y.p, "unit": ALL[name].unit, "better": ALL[name].better,
                        "worth": None if placed is None else placed.members,
                        "worth_low": None if placed is None else placed.low,
                        "worth_high": None if placed is None else placed.high,
                    }  # fmt: skip
            if row.corollary is not None:
                empty = dict.fromkeys(("low", "high", "worth", "worth_low", "worth_high"))
                for group, p in {**row.corollary_layers, WHOLE: row.corollary}.items():
                    yield {
                        **shared, "figure": "corollary", "group": group, "value": p, "p": p, "unit": "", "better": "",
                        **empty,
                    }  # fmt: skip

    def to_json(self) -> str:
        """Return all of it as JSON text, which `from_json` reads."""
        plain = {n: getattr(self, n) for n in ("collection", "reference", "members", "data", "ood")}
        values = {
            "version": VERSION,
            **plain,
            "level": 0.95,
            "meaning": tables.meaning(self),
            "rows": [row.to_json() for row in self.rows],
            "methods": self.methods,
            "left_out": self.left_out,
            "settings": self.settings,
        }
        return json.dumps(values, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` gave; return the comparison.

        Raises:
            FormatError: something else, or of a newer version.
        """
        try:
            given = json.loads(text)
            if given["version"] != VERSION:
                raise FormatError("comparison", expected=f"version {VERSION}", found=str(given["version"])[:80])
            plain = {
                n: given[n]
                for n in ("collection", "reference", "members", "data", "ood", "methods", "left_out", "settings")
            }
            return cls(rows=tuple(Row.from_json(row) for row in given["rows"]), **plain)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError("comparison", expected="the JSON that `to_json` gives", found=repr(error)) from error

    def to_latex(self) -> str:
        """Return the table for LaTeX with booktabs, in the columns' order of Laurent et al. 2024, all times 100."""
        return tables.latex(self)

    def to_text(self) -> str:
        """Return the tables for people: figures, how many members they are worth, p-values, and what they mean."""
        return tables.text(self)

    def write_json(self, path: str | Path) -> Path:
        """Write the JSON; return its path.

        Raises:
            StorageError: a place that can't be written to.
        """
        return frames.write_text(self.to_json(), path)

    def write_latex(self, path: str | Path) -> Path:
        """Write the table for LaTeX; return its path.

        Raises:
            StorageError: a place that can't be written to.
        """
        return frames.write_text(self.to_latex(), path)

    def write_frame(self, path: str | Path) -> Path:
        """Write the frame as .csv or .parquet; return its path.

        Raises:
            UsageError: another ending.
            StorageError: a place that can't be written to.
        """
        return frames.write(self.to_frame(), path)

    def plot(self, path: str | Path) -> Path:
        """Draw each figure against MMD² and NS into a PNG, one marker a method; return its path.

        Raises:
            UsageError: a name that is no PNG's, or a place that can't be written to.
        """
        return plots.comparison(self, path)
