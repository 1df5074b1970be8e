"""One member of a collection: its row, its tensors, its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints_zoo import modules, store
from checkpoints_zoo.pieces import Location


class Member:
    """A snapshot of one training run; its bytes are read when they are asked for.

    Args:
        collection: name of the collection.
        row: the member's row of the manifest.
        locate: finds its bytes.
        skeleton: builds its module without memory.
        cite: writes its citation.
    """

    def __init__(
        self,
        collection: str,
        row: Mapping[str, Any],
        locate: Callable[[], Location],
        skeleton: Callable[[], nn.Module],
        cite: Callable[[], str],
    ) -> None:
        self.collection = collection
        self.row = dict(row)
        self._locate = locate
        self._skeleton = skeleton
        self._cite = cite

    @property
    def id(self) -> int:
        return int(self.row["member"])

    @property
    def epoch(self) -> int:
        return int(self.row["epoch"])

    @property
    def citation(self) -> str:
        """Text that names this member; `zoo.load` gives a collection of it alone."""
        return self._cite()

    def state_dict(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read the member's tensors; return them by name, counters rebuilt as zero, ready for a strict load.

        Args:
            device: where they are to be.
            dtype: of the weights; None for the stored one. Statistics stay float32 or wider.

        Raises:
            DamagedError: the bytes are not what the manifest says, or a value is not finite.
        """
        location = self._locate()
        stacked = store.stack([location], device, dtype, check=True)
        counters = {n: torch.zeros((), dtype=torch.int64, device=device) for n in location.layout.rebuilt}
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
        return modules.filled(self._skeleton(), self.state_dict(device, dtype), torch.device(device))

    def __repr__(self) -> str:
        accuracy = self.row["test_accuracy"]
        figure = "" if accuracy is None else f", test accuracy {accuracy:.4f}"
        return f"Member({self.collection!r}, {self.id}, epoch {self.epoch}{figure})"
