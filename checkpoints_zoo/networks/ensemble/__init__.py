"""Ensembles: stacked members behind one module, run by whichever execution is quickest."""

from __future__ import annotations

from checkpoints_zoo.networks.ensemble.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.executions import EXECUTIONS

__all__ = ["EXECUTIONS", "Ensemble"]
