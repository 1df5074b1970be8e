"""Which recipe a command means, and the table of those that there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from training import recipe_files
from training.recipe import Recipe
from training.recipes import RECIPES, named
from training.variants import varied


def chosen(
    text: str, changes: tuple[str, ...] = (), name: str | None = None, init_permutation: int = 0,
    init_seed: int | None = None,
) -> Recipe:  # fmt: skip
    """Return the recipe that the command line asks for.

    Args:
        text: a recipe's name, or FILE.py, or FILE.py:NAME.
        changes: FIELD=VALUE each.
        name: of the collection; None for the recipe's own.
        init_permutation, init_seed: as the recipe's fields; the collection's name then says so.

    Raises:
        UsageError: no such recipe, or a change that can't be.
    """
    found = recipe_files.read(text) if recipe_files.is_file(text) else named(text)
    if init_permutation or init_seed is not None:
        suffix = f"-from-{init_seed}" if init_seed is not None else ""
        suffix += f"-permuted-{init_permutation}" if init_permutation else ""
        found = replace(found, name=found.name + suffix, init_permutation=init_permutation, init_seed=init_seed)
    if changes:
        found = varied(found, changes)
    if name is not None and name != found.name:
        found = replace(found, name=name, made_from=found.made_from or found.name)
    return found


def table_of(text: str | None) -> str:
    """Return a table of the recipes of a file, or of those that come with the package: members, data, epochs."""
    recipes = [make() for make in RECIPES.values()]
    if text is not None:
        recipes = list(recipe_files.read_all(Path(text)).values()) if recipe_files.is_file(text) else [named(text)]
    rows = [("recipe", "members", "architecture", "data", "epochs", "at once", "precision")]
    rows += [
        (r.name, f"{r.members:,}", r.architecture, r.dataset, str(r.epochs), str(r.stack_width), r.precision)
        for r in recipes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {1, 4, 5}
    lines = (
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
