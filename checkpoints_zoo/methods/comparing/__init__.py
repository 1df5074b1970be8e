"""Compare approximate posteriors with a population of independently trained members: distances and figures."""

from __future__ import annotations

from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.study import compare

__all__ = ["Comparison", "compare"]
