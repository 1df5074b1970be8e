"""The first name of `checkpoints_zoo.training`: `python -m training` in the clone, `training.recipe` in recipe files.

Modules are the same objects under both names, so that a `Recipe` is one class.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _Same(MetaPathFinder, Loader):
    """Find `training.X` as `checkpoints_zoo.training.X`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = fullname.startswith("training.") and fullname != "training.__main__"
        return ModuleSpec(fullname, self) if inside and find_spec(f"checkpoints_zoo.{fullname}") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.own = import_module(f"checkpoints_zoo.{spec.name}").__spec__
        return sys.modules[f"checkpoints_zoo.{spec.name}"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own  # importing put the other name there


sys.meta_path.insert(0, _Same())
