"""How far two sets of members are apart in weight space, as it was found: MMD² by group of tensors, and NS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.populations import mmd_plots
from checkpoints_zoo.populations.distances import WHOLE

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Discrepancy:
    """How far two sets of members are apart in one group of tensors.

    Args:
        weights: how many the group has.
        kernels: (name, bandwidth) of each kernel.
        values: MMD² with each kernel, unbiased: it may be below 0.
        value: their mean, which is the MMD² of the mean of the kernels.
        p_value: of the permutation test over all kernels: share of permutations at least as far apart.
    """

    weights: int
    kernels: tuple[tuple[str, float], ...]
    values: tuple[float, ...]
    value: float
    p_value: float


@dataclass(frozen=True)
class MMD:
    """Two sets of members against each other.

    Args:
        first, second: citations of the members, "" where there is none.
        members: how many each set has.
        permutations: of the test.
        groups: name -> Discrepancy; "all" is all weights together.
    """

    first: str
    second: str
    members: tuple[int, int]
    permutations: int
    groups: Mapping[str, Discrepancy]

    @property
    def value(self) -> float:
        """MMD² of all weights together, mean over kernels."""
        return self.groups[WHOLE].value

    @property
    def p_value(self) -> float:
        """Of all weights together."""
        return self.groups[WHOLE].p_value

    def __getitem__(self, group: str) -> Discrepancy:
        """Return a group.

        Raises:
            UsageError: no such group.
        """
        if group not in self.groups:
            names = ", ".join(list(self.groups)[:12])
            raise UsageError(f"group {group!r}", expected=f"one of {names}", found="none such")
        return self.groups[group]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a group: group, weights, mmd2 (mean over kernels) and p_value."""
        return [
            {"group": name, "weights": x.weights, "mmd2": x.value, "p_value": x.p_value}
            for name, x in self.groups.items()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row a group and kernel: group, weights, kernel, bandwidth, mmd2; then the group's mean and p."""
        import pandas as pd

        rows = [
            {"group": name, "weights": x.weights, "kernel": kernel, "bandwidth": width, "mmd2": value,
             "mean_mmd2": x.value, "p_value": x.p_value}
            for name, x in self.groups.items()
            for (kernel, width), value in zip(x.kernels, x.values, strict=True)
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        return json.dumps({**self.facts(), "groups": self.to_frame().to_dict("records")}, indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw MMD² and p-values of all groups into a PNG; return its path.

        Raises:
            UsageError: a name that is no PNG's, or a place that can't be written to.
        """
        return mmd_plots.mmd_figure(self, None, path)

    def facts(self) -> dict[str, Any]:
        """Return what was compared, as JSON values."""
        sets = {"first": self.first, "second": self.second, "members": self.members}
        return {**sets, "permutations": self.permutations}


@dataclass(frozen=True)
class NS:
    """Two sets of members as they are stored, and with the symmetries of their network removed.

    Args:
        mmd: of the weights as they are stored.
        ns: of their canonical form.
        scale, permute, streams: how that was made.
    """

    mmd: MMD
    ns: MMD
    scale: str | None
    permute: str | None
    streams: bool

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a group: as of `mmd`, and without symmetries ns_mmd2 and ns_p_value."""
        both = zip(self.mmd.rows(), self.ns.rows(), strict=True)
        return [{**row, "ns_mmd2": other["mmd2"], "ns_p_value": other["p_value"]} for row, other in both]

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame; those of single kernels are in `mmd.to_frame()` and `ns.to_frame()`."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def to_json(self) -> str:
        """Return all but single kernels as JSON text."""
        canonical = {"scale": self.scale, "permute": self.permute, "streams": self.streams}
        return json.dumps({**self.mmd.facts(), **canonical, "groups": self.rows()}, indent=1)

    def plot(self, path: str | Path) -> Path:
        """Draw MMD² and p-values of all groups, before and after removing symmetries, into a PNG; return its path.

        Raises:
            UsageError: a name that is no PNG's, or a place that can't be written to.
        """
        return mmd_plots.mmd_figure(self.mmd, self.ns, path)
