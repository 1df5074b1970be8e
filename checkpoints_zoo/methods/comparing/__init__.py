"""Approximate posteriors against a population of independently trained members: how near, and what that does."""

from __future__ import annotations

from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.study import compare

__all__ = ["Comparison", "compare"]
