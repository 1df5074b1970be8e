"""Recipes from a user's own Python file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training.own_code import module_of, running
from checkpoints_zoo.training.recipe import Recipe

_EXPECTED = "RECIPE, a Recipe or a function that returns one, or RECIPES, a dict of such by name"


def is_file(text: str) -> bool:
    """Say whether a recipe's name on the command line means a file: FILE.py, or FILE.py:NAME."""
    return text.endswith(".py") or ".py:" in text


def read(text: str) -> Recipe:
    """Run a user's file, and return the recipe that it defines.

    The file is code, and trusted as such. It defines `RECIPE`, or `RECIPES`, of which the name behind the colon takes
    one (or none is needed, since there is one alone). A recipe is a `Recipe`, or a function without arguments that
    returns one; its `build` may be a function of the file.

    Args:
        text: path of the file, and ":NAME" where it has several recipes.

    Raises:
        UsageError: no such file, or one without such a recipe.
    """
    path, _, name = text.rpartition(":") if not text.endswith(".py") else (text, "", "")
    recipes = read_all(Path(path))
    if not name and len(recipes) == 1:
        return next(iter(recipes.values()))
    if name not in recipes:
        raise UsageError(
            f"recipe file {path}",
            expected=f"{path}:NAME, with one of the names {', '.join(recipes)}",
            found=repr(name) if name else "no name",
        )
    return recipes[name]


def read_all(path: Path) -> dict[str, Recipe]:
    """Run a user's file, and return all recipes that it defines, by name.

    Raises:
        UsageError: no such file, or one without recipes.
    """
    if not path.is_file():
        raise UsageError(f"recipe file {path}", expected="a Python file", found="no such file")
    module_name = f"recipe_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    with running(f"recipe file {path}", "Python that runs"):
        module = module_of(path.resolve(), module_name)
    found: Any = getattr(module, "RECIPES", None)
    if found is None and hasattr(module, "RECIPE"):
        found = {"": module.RECIPE}
    if not isinstance(found, Mapping) or not found:
        raise UsageError(f"recipe file {path}", expected=_EXPECTED, found=repr(found)[:80] if found else "neither")
    with running(f"recipe file {path}", "recipes"):
        recipes = [value() if callable(value) else value for value in found.values()]
    for recipe in recipes:
        if not isinstance(recipe, Recipe):
            raise UsageError(f"recipe file {path}", expected=_EXPECTED, found=repr(recipe)[:80])
    return {name or recipe.name: recipe for name, recipe in zip(found, recipes, strict=True)}
