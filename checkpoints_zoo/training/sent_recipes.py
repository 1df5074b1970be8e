"""Recipes for other processes: functions are sent as file and name, and are imported again from that file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training.recipe import MAPPING_FIELDS, Recipe, run_module

FUNCTION_FIELDS = ("build", "images")


@dataclass(frozen=True)
class SentRecipe:
    """A recipe in plain values that can be pickled.

    Args:
        values: fields of the recipe, except its functions.
        hash: hash of the recipe.
        functions: field -> file, module and name of the function.
    """

    values: dict[str, Any]
    hash: str
    functions: dict[str, tuple[str, str, str]]


def serialize_recipe(recipe: Recipe) -> SentRecipe:
    """Return a recipe in plain values.

    Raises:
        UsageError: a function of the recipe is defined inside another one, where other processes can't find it.
    """
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe) if field.name not in FUNCTION_FIELDS}
    values |= {name: dict(values[name]) for name in MAPPING_FIELDS}
    functions = {name: getattr(recipe, name) for name in FUNCTION_FIELDS}
    function_places = {
        name: _locate_function(recipe.name, name, function)
        for name, function in functions.items()
        if function is not None
    }
    return SentRecipe(values, recipe.hash, function_places)


@dataclass(frozen=True)
class Skeleton:
    """A callable that builds a recipe's network for its structure; it can be sent to other processes.

    Args:
        recipe: recipe that names the network and its training.
    """

    recipe: Recipe

    def __call__(self) -> nn.Module:
        return self.recipe.skeleton()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_skeleton, (serialize_recipe(self.recipe),)


def _rebuild_skeleton(sent_recipe: SentRecipe) -> Skeleton:
    return Skeleton(rebuild_recipe(sent_recipe))


def _locate_function(recipe_name: str, field: str, function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the file, the module and the name of a function."""
    module, name = function.__module__, function.__qualname__
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or "<" in name:
        raise UsageError(
            f"{field} of recipe {recipe_name!r}",
            expected="a function or class at the top of a Python file, to be found by other processes",
            found=f"{name} of {module}",
        )
    return path, module, name


def rebuild_recipe(sent_recipe: SentRecipe) -> Recipe:
    """Rebuild a recipe from its plain values; return it.

    Raises:
        UsageError: the file of a function is missing or differs from the sender's, or the images differ.
    """
    paths = [path for path, _, _ in sent_recipe.functions.values()]
    recipe = None
    if all(Path(path).is_file() for path in paths):
        functions = {field: _find_function(*place) for field, place in sent_recipe.functions.items()}
        recipe = Recipe(**sent_recipe.values, **functions)
    if recipe is None or recipe.hash != sent_recipe.hash:
        needed_text = f"the same file {paths[0]}" if paths else "the same package"
        needed_text += ", and the images that it gives," if "images" in sent_recipe.functions else ""
        raise UsageError(
            f"recipe {sent_recipe.values['name']!r}",
            expected=f"hash {sent_recipe.hash}, as on the sending machine",
            found="no such file" if recipe is None else f"hash {recipe.hash}",
            do=f"Put {needed_text} onto every node",
        )
    return recipe


def _find_function(path: str, module_name: str, function_name: str) -> Any:
    """Return a function of a file."""
    value: Any = _import_file(Path(path), module_name)
    for part in function_name.split("."):
        value = getattr(value, part, None)
    return value


def _import_file(path: Path, module_name: str) -> object:
    """Import a file under a module's name, unless it is imported already; return the module."""
    # The module of a script is `__main__` in the process that starts, and `__mp_main__` in the processes that
    # multiprocessing starts. Other processes import the script as `__mp_main__`, so that its main guard does not run.
    module_names = ("__main__", "__mp_main__") if module_name == "__main__" else (module_name,)
    for candidate in module_names:
        known_file = getattr(sys.modules.get(candidate), "__file__", None)
        if known_file is not None and Path(known_file).resolve() == path.resolve():
            return sys.modules[candidate]
    return run_module(path, module_names[-1])
