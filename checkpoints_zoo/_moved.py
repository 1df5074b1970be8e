"""Module paths of the documentation of 0.1: until 0.3 they can be imported, with a warning that names the new path."""

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
    """Replace an old module by its new one, and warn the importer.

    Args:
        old: name of the module that calls this while it is imported.
    """
    new = MOVED[old]
    warnings.warn(f"{old} is {new} now; the old path goes in 0.3", DeprecationWarning, stacklevel=3)
    sys.modules[old] = import_module(new)
