"""Ensembles: many members as one module, run by the fastest way of execution."""

from __future__ import annotations

from checkpoints_zoo.networks.ensemble.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.executions import EXECUTIONS

__all__ = ["EXECUTIONS", "Ensemble"]
