"""Module paths and functions of version 0.1: until 0.3 they work, and warn."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.images import ImageInput
    from checkpoints_zoo.methods.comparing.compact_comparison import CompactComparison
    from checkpoints_zoo.populations.loss_barrier import Barriers
    from checkpoints_zoo.predictions import Predictions

MOVED = {
    "checkpoints_zoo.architectures": "checkpoints_zoo.networks.architectures",
    "checkpoints_zoo.methods.searching": "checkpoints_zoo.methods.fitting",
    "checkpoints_zoo.metrics": "checkpoints_zoo.evaluation.metrics",
}


def redirect(old_path: str) -> None:
    """Replace an old module by its new one, and warn the importer.

    Args:
        old_path: name of the module that calls this while it is imported.
    """
    new_path = MOVED[old_path]
    warnings.warn(f"{old_path} is {new_path} now; the old path goes in 0.3", DeprecationWarning, stacklevel=3)
    sys.modules[old_path] = import_module(new_path)


def barriers(members: Collection, data: ImageInput | None = None, **options: Any) -> Barriers:
    """Measure the loss on the lines from one member to all others: `zoo.barrier(members, data=data)` now."""
    from checkpoints_zoo.populations.loss_barrier import barrier

    return barrier(members, data=data, **options)


def compare_compact(
    hmc: Collection,
    ensemble: Collection,
    vi: Collection | None = None,
    data: ImageInput | None = None,
    **options: Any,
) -> CompactComparison:
    """Compare an ensemble, VI and Gaussians with HMC: `zoo.compact(ensemble, data, against=hmc, vi=vi)` now."""
    from checkpoints_zoo.methods.comparing.compact_comparison import compact

    return compact(ensemble, data, against=hmc, vi=vi, **options)


def report(members: Collection | Predictions, *args: Any, **options: Any) -> Any:
    """Make the report page: `zoo.report_page(members, …)` now."""
    # By name: an old path in `methods` imports this module, and `publishing` stands above `methods`.
    return import_module("checkpoints_zoo.publishing.html_report").report_page(members, *args, **options)
