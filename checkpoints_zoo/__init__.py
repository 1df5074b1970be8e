"""Populations of independently trained networks, loaded lazily, as ensembles and as points in weight space.

>>> import checkpoints_zoo as zoo
>>> members = zoo.load("convnet-digits", n=8)
>>> report = zoo.evaluate(members, "digits", ood="photos")
>>> report["accuracy"].value > 0.9
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any
from warnings import warn

from checkpoints_zoo.errors import explain_missing_packages

if TYPE_CHECKING:
    __version__: str

    from checkpoints_zoo import images, interop, symmetry
    from checkpoints_zoo.collection.collection import Collection, Member, collections, load
    from checkpoints_zoo.collection.equivalence import check_equivalence
    from checkpoints_zoo.errors import ZooError
    from checkpoints_zoo.evaluation import metrics
    from checkpoints_zoo.evaluation.evaluating import Report, evaluate
    from checkpoints_zoo.interop.checkpoints import from_checkpoints
    from checkpoints_zoo.interop.samples import from_samples
    from checkpoints_zoo.methods.comparing import Comparison, compare
    from checkpoints_zoo.methods.comparing.compact_comparison import compact
    from checkpoints_zoo.networks.ensemble import Ensemble
    from checkpoints_zoo.populations.alignment_table import alignment
    from checkpoints_zoo.populations.channel_exchangeability import corollary
    from checkpoints_zoo.populations.discrepancy import mmd, ns
    from checkpoints_zoo.populations.loss_barrier import barrier
    from checkpoints_zoo.populations.mass import minimal_mass
    from checkpoints_zoo.populations.pairwise_information import pairwise
    from checkpoints_zoo.populations.predictives import compare_predictives
    from checkpoints_zoo.predictions import predictions_from_probabilities
    from checkpoints_zoo.publishing.html_report import leaderboard_page, report_page
    from checkpoints_zoo.publishing.publisher import publish
    from checkpoints_zoo.publishing.verification import verify
    from checkpoints_zoo.symmetry import symmetries

__all__ = [
    "Collection", "Comparison", "Ensemble", "Member", "Report", "ZooError", "alignment", "barrier",
    "check_equivalence", "collections", "compact", "compare", "compare_predictives", "corollary", "evaluate",
    "from_checkpoints", "from_samples", "images", "interop", "leaderboard_page", "load", "metrics", "minimal_mass",
    "mmd", "ns", "pairwise", "predictions_from_probabilities", "publish", "report_page", "symmetries", "symmetry",
    "verify",
]  # fmt: skip

# Resolved on first use, so that the command line starts without torch.
_MODULE_OF_NAME = {
    "Collection": "collection.collection",
    "Member": "collection.collection",
    "collections": "collection.collection",
    "load": "collection.collection",
    "check_equivalence": "collection.equivalence",
    "ZooError": "errors",
    "Report": "evaluation.evaluating",
    "evaluate": "evaluation.evaluating",
    "from_checkpoints": "interop.checkpoints",
    "from_samples": "interop.samples",
    "Comparison": "methods.comparing",
    "compare": "methods.comparing",
    "compact": "methods.comparing.compact_comparison",
    "Ensemble": "networks.ensemble",
    "alignment": "populations.alignment_table",
    "corollary": "populations.channel_exchangeability",
    "mmd": "populations.discrepancy",
    "ns": "populations.discrepancy",
    "barrier": "populations.loss_barrier",
    "minimal_mass": "populations.mass",
    "pairwise": "populations.pairwise_information",
    "compare_predictives": "populations.predictives",
    "predictions_from_probabilities": "predictions",
    "leaderboard_page": "publishing.html_report",
    "report_page": "publishing.html_report",
    "publish": "publishing.publisher",
    "verify": "publishing.verification",
    "symmetries": "symmetry",
}
# Names of version 0.1 -> their names now; the old ones go in 0.3.
_NEW_NAME_OF = {"barriers": "barrier", "compare_compact": "compact", "report": "report_page"}
_PUBLIC_MODULES = {"images": "images", "interop": "interop", "metrics": "evaluation.metrics", "symmetry": "symmetry"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("checkpoints-zoo")
    if name in _NEW_NAME_OF:
        warn(f"zoo.{name} is zoo.{_NEW_NAME_OF[name]} now; the old name goes in 0.3", DeprecationWarning, 2)
        return getattr(import_module("checkpoints_zoo._moved"), name)
    if name not in _PUBLIC_MODULES and name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'checkpoints_zoo' has no attribute {name!r}")
    with explain_missing_packages(f"zoo.{name}"):
        if name in _PUBLIC_MODULES:
            public_object = import_module(f"checkpoints_zoo.{_PUBLIC_MODULES[name]}")
        else:
            public_object = getattr(import_module(f"checkpoints_zoo.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = public_object
    return public_object


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
