"""Populations of independently trained networks, loaded lazily, as ensembles and as points in weight space.

>>> import checkpoints_zoo as zoo
>>> members = zoo.load("convnet-digits", n=8)
>>> report = zoo.evaluate(members, "digits", ood="photos")
>>> report["accuracy"].value > 0.9
True
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_zoo import images, interop, metrics, symmetry
    from checkpoints_zoo.collection import Collection
    from checkpoints_zoo.comparing import Comparison, compare
    from checkpoints_zoo.comparing.compact_table import compare_compact
    from checkpoints_zoo.ensemble import Ensemble
    from checkpoints_zoo.equivalence import check_equivalence
    from checkpoints_zoo.errors import ZooError
    from checkpoints_zoo.evaluation import Report, evaluate
    from checkpoints_zoo.interop.checkpoints import from_checkpoints
    from checkpoints_zoo.interop.samples import from_samples
    from checkpoints_zoo.loading import collections, load
    from checkpoints_zoo.member import Member
    from checkpoints_zoo.posterior.aligning import alignment
    from checkpoints_zoo.posterior.barrier import barrier, barriers
    from checkpoints_zoo.posterior.compact import compact
    from checkpoints_zoo.posterior.corollary import corollary
    from checkpoints_zoo.posterior.mass import minimal_mass
    from checkpoints_zoo.posterior.mmd import mmd, ns
    from checkpoints_zoo.posterior.pairwise import pairwise
    from checkpoints_zoo.posterior.predictives import compare_predictives
    from checkpoints_zoo.publishing import publish
    from checkpoints_zoo.reporting import report
    from checkpoints_zoo.symmetry import symmetries
    from checkpoints_zoo.verification import verify

__version__ = _version("checkpoints-zoo")
__all__ = [
    "Collection", "Comparison", "Ensemble", "Member", "Report", "ZooError", "alignment", "barrier", "barriers",
    "check_equivalence", "collections", "compact", "compare", "compare_compact", "compare_predictives", "corollary",
    "evaluate", "from_checkpoints", "from_samples", "images", "interop", "load", "metrics", "minimal_mass", "mmd",
    "ns", "pairwise", "publish", "report", "symmetries", "symmetry", "verify",
]  # fmt: skip

# Resolved on first use, so that the command line starts without torch.
_PLACES = {
    "Collection": "collection", "Member": "member", "Ensemble": "ensemble", "ZooError": "errors",
    "collections": "loading", "load": "loading", "evaluate": "evaluation", "Report": "evaluation",
    "from_checkpoints": "interop.checkpoints", "from_samples": "interop.samples",
    "compare": "comparing", "Comparison": "comparing",
    "publish": "publishing", "verify": "verification", "symmetries": "symmetry", "check_equivalence": "equivalence",
    "alignment": "posterior.aligning", "barrier": "posterior.barrier", "barriers": "posterior.barrier",
    "compact": "posterior.compact", "compare_compact": "comparing.compact_table",
    "corollary": "posterior.corollary", "minimal_mass": "posterior.mass",
    "mmd": "posterior.mmd", "ns": "posterior.mmd", "pairwise": "posterior.pairwise",
    "compare_predictives": "posterior.predictives", "report": "reporting",
    "images": "", "interop": "", "metrics": "", "symmetry": "",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'checkpoints_zoo' has no attribute {name!r}")
    room = import_module(f"checkpoints_zoo.{_PLACES[name] or name}")
    value = getattr(room, name) if _PLACES[name] else room
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
