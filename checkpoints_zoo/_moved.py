"""Module paths that the documents of 0.1 taught: until 0.3 they can be imported, and say where their names are now."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module

MOVED = {
    "checkpoints_zoo.architectures": "checkpoints_zoo.networks.architectures",
    "checkpoints_zoo.methods.searching": "checkpoints_zoo.methods.fitting",
    "checkpoints_zoo.metrics": "checkpoints_zoo.evaluation.metrics",
}


def redirect(old: str) -> None:
    """Put the module that a path means now in the place of the old one, and warn whoever imports it.

    Args:
        old: the module that calls this while it is imported.
    """
    new = MOVED[old]
    warnings.warn(f"{old} is {new} now; the old path goes in 0.3", DeprecationWarning, stacklevel=3)
    sys.modules[old] = import_module(new)
