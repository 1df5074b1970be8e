"""One member of a collection: its row, its tensors, its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints_zoo.collection.selected import Selected
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import check_device


class Member:
    """A snapshot of one training run; its bytes are read when they are asked for.

    Args:
        collection: name of the collection.
        row: the member's row of the manifest.
        selected: it alone.
    """

    def __init__(self, collection: str, row: Mapping[str, Any], selected: Selected) -> None:
        self.collection = collection
        self.row = dict(row)
        self._selected = selected

    @property
    def id(self) -> int:
        return int(self.row["member"])

    @property
    def epoch(self) -> int:
        return int(self.row["epoch"])

    @property
    def selected(self) -> Selected:
        """The selection of this member alone: its view, module, preprocessing."""
        return self._selected

    @property
    def citation(self) -> str:
        """Text that names this member; `zoo.load` gives a collection of it alone."""
        return self._selected.citation

    def state_dict(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read the member's tensors; return them by name, counters rebuilt as zero, ready for a strict load.

        Args:
            device: where they are to be.
            dtype: of the weights; None for the stored one. Statistics stay float32 or wider.

        Raises:
            DamagedError: the bytes are not what the manifest says, or a value is not finite.
        """
        on, where = check_device(device), self._selected.locations()
        stacked = self._selected.read(on, dtype, locations=where)
        counters = {n: torch.zeros((), dtype=torch.int64, device=on) for n in where[0].layout.rebuilt}
        return {n: t[0] for n, t in stacked.items()} | counters

    def model(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32) -> nn.Module:
        """Build the member's module in eval mode; return it.

        Args:
            device: where it is to be.
            dtype: of the weights; None for the stored one.

        Raises:
            UsageError, LayoutError: no architecture of that name, or one whose tensors are others.
            DamagedError: see `state_dict`.
        """
        return modules.filled(self._selected.skeleton(), self.state_dict(device, dtype), torch.device(device))

    def __repr__(self) -> str:
        accuracy = self.row["test_accuracy"]
        figure = "" if accuracy is None else f", test accuracy {accuracy:.4f}"
        return f"Member({self.collection!r}, {self.id}, epoch {self.epoch}{figure})"
