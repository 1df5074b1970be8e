"""Members as objects of neighbouring packages, and members made of checkpoints, samples and model repos. A file that is
named after a package serves that package.

The neighbouring packages are optional: each is imported only when a function needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints_zoo.interop import laplace, lightning, lightning_uq_box, posteriors, torch_uncertainty
    from checkpoints_zoo.interop.batches import loader

__all__ = ["laplace", "lightning", "lightning_uq_box", "loader", "posteriors", "torch_uncertainty"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'checkpoints_zoo.interop' has no attribute {name!r}")
    if name == "loader":
        return import_module("checkpoints_zoo.interop.batches").loader
    return import_module(f"checkpoints_zoo.interop.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
