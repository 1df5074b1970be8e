"""What an evaluation found: figures with intervals, their curves over sizes, before and after temperature scaling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.evaluation import growth, plots
from checkpoints_zoo.evaluation.figures import KNOWN, TEMPERATURE, figure_of
from checkpoints_zoo.evaluation.growth import Growth, Needed
from checkpoints_zoo.evaluation.held_out import RULE
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.formats.text import finite_or_null

if TYPE_CHECKING:
    import pandas as pd

Curve = Mapping[int, Mapping[str, Interval]]


@dataclass(frozen=True)
class Calibrated:
    """The figures after temperature scaling: each ensemble's mean probabilities by a temperature of its own.

    Args:
        held_out: name and fingerprint of the images that the temperatures were fitted to.
        inputs: how many.
        share: of the images of the report that they are; None for other images.
        ensemble, member, curve: as in the report; with "temperature", without what scaling leaves as it is.
        growth: figure -> how it comes near its limit.
    """

    held_out: str
    inputs: int
    share: float | None
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Curve
    growth: Mapping[str, Growth] = field(default_factory=dict, repr=False)

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble after scaling.

        Raises:
            UsageError: no such figure.
        """
        return figure_of(self.ensemble, figure)

    @property
    def temperature(self) -> Interval:
        """Of the whole ensemble."""
        return self.ensemble[TEMPERATURE]

    @property
    def at_bound(self) -> bool:
        """Whether the temperature is the least or greatest that is tried, so that no best one was found."""
        return self.temperature.value in (KNOWN[TEMPERATURE].least, KNOWN[TEMPERATURE].largest)

    def needed(self, figure: str, within: float | str) -> Needed:
        """As `Report.needed`, of ensembles after scaling."""
        return growth.needed(self.growth, figure, within)

    def to_json(self) -> dict[str, Any]:
        """Return what is known of the temperature as JSON values."""
        drawn = None if self.share is None else RULE
        facts = {"held_out": self.held_out, "inputs": self.inputs, "share": self.share, "rule": drawn}
        return {**facts, **asdict(self.temperature), "at_bound": self.at_bound}


@dataclass(frozen=True)
class Report:
    """The figures of an ensemble, each an Interval (value, low, high).

    Args:
        collection: its name.
        citation: of the members.
        data, ood: names and fingerprints of the images ("digits/test 0123456789abcdef"), ood "" without any.
        inputs, ood_inputs: how many were measured.
        members: how many.
        ensemble: figure -> value of all members together; low and high by a delete-d jackknife.
        member: figure -> mean over the single members; low and high by a bootstrap over members.
        curve: size -> figure -> mean over ensembles of that size; low and high say where the figure of a fresh
            ensemble of that size falls (for all members: as `ensemble`).
        drawing: what the picture needs beside: per-member accuracy, reliability bins, information per input.
        growth: figure -> how it comes near its limit, the figure of an infinite ensemble.
        within: figure -> distance from the limit that was asked for.
        calibrated: the figures after temperature scaling, None if that was not asked for.
    """

    collection: str
    citation: str
    data: str
    ood: str
    inputs: int
    ood_inputs: int
    members: int
    ensemble: Mapping[str, Interval]
    member: Mapping[str, Interval]
    curve: Curve
    drawing: Mapping[str, Any] = field(repr=False, compare=False)
    growth: Mapping[str, Growth] = field(default_factory=dict, repr=False)
    within: Mapping[str, float | str] = field(default_factory=dict)
    calibrated: Calibrated | None = None

    def __getitem__(self, figure: str) -> Interval:
        """Return a figure of the whole ensemble.

        Raises:
            UsageError: no such figure.
        """
        return figure_of(self.ensemble, figure)

    @property
    def limits(self) -> dict[str, Interval]:
        """Figure -> estimate for an infinite ensemble of such members; low and high over members."""
        return {name: x.limit for name, x in self.growth.items()}

    def needed(self, figure: str, within: float | str) -> Needed:
        """Find how many members the mean figure takes to come within some distance of its limit; return it.

        Args:
            figure: its name.
            within: the distance, in the figure's unit, or as a share of the limit ("5%").

        Raises:
            UsageError: no such figure, or a distance that is none.

        >>> import checkpoints_zoo as zoo
        >>> report = zoo.evaluate(zoo.load("convnet-digits", n=16))
        >>> print(report.needed("brier", within=0.002))
        8 [7, 9]
        """
        return growth.needed(self.growth, figure, within)

    def answers(self) -> Iterator[tuple[str, Needed]]:
        """Yield what `within` asks for: "" or "scaled", and the members needed."""
        for figure, within in self.within.items():
            yield "", self.needed(figure, within)
            if self.calibrated is not None and figure in self.calibrated.growth:
                yield "scaled", self.calibrated.needed(figure, within)

    def _rows(self) -> list[dict[str, Any]]:
        rows = list(_rows(self.curve, self.member, ""))
        if self.calibrated is not None:
            rows += _rows(self.calibrated.curve, self.calibrated.member, ", scaled")
        return rows

    def to_frame(self) -> pd.DataFrame:
        """Return one row a figure and size: of, members, figure, value, low, high, unit, better."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def to_json(self) -> str:
        """Return the report as JSON text; what could not be computed is null."""
        facts = {
            n: getattr(self, n) for n in ("collection", "citation", "data", "ood", "inputs", "ood_inputs", "members")
        }
        growths = {"ensemble": self.growth}
        if self.calibrated is not None:
            growths["ensemble, scaled"] = self.calibrated.growth
        limits = [
            {"of": of, "figure": name, **asdict(x.limit)} for of, some in growths.items() for name, x in some.items()
        ]
        needed = [{"of": "ensemble, scaled" if scaled else "ensemble", **asdict(x)} for scaled, x in self.answers()]
        values = {
            **facts,
            "level": 0.95,
            "temperature": None if self.calibrated is None else self.calibrated.to_json(),
            "needed": needed,
            "limits": limits,
            "figures": self._rows(),
        }
        return json.dumps(finite_or_null(values), indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw reliability, curves over ensemble size, member accuracies and information into a PNG; return its path.

        Args:
            path: of the PNG.
        """
        return plots.report(self, Path(path))

    def plot_curves(self, path: str | Path, figures: Iterable[str] | None = None) -> Path:
        """Draw figures over ensemble size, with bands, limits and the members needed, into a PNG; return its path.

        Args:
            path: of the PNG.
            figures: their names; None for all.

        Raises:
            UsageError: no such figure.
        """
        return plots.curves(self, Path(path), figures)


def _rows(curve: Curve, member: Mapping[str, Interval], scaled: str) -> Iterator[dict[str, Any]]:
    """Yield one row a figure and size.

    Args:
        curve, member: of a report.
        scaled: what to write behind the name of what they are of.
    """
    parts = [("ensemble", size, figures) for size, figures in curve.items()]
    parts.append(("mean of members", 1, member))
    for of, size, figures in parts:
        for name, x in figures.items():
            known = KNOWN[name]
            yield {
                "of": f"{of}{scaled}", "members": size, "figure": name, "value": x.value, "low": x.low, "high": x.high,
                "unit": known.unit, "better": known.better,
            }  # fmt: skip
