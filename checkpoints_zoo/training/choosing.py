"""Which recipe a command means, and the table of those that there are."""

from __future__ import annotations

from dataclasses import replace

from checkpoints_zoo.training import recipe_files
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import named
from checkpoints_zoo.training.variants import varied


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
    if init_seed is not None:
        found = replace(varied(found, [f"init_seed={init_seed}"]), name=f"{found.name}-from-{init_seed}")
    if init_permutation:
        made = varied(found, [f"init_permutation={init_permutation}"])
        found = replace(made, name=f"{found.name}-permuted-{init_permutation}")
    if changes:
        found = varied(found, changes)
    if name is not None and name != found.name:
        found = replace(found, name=name, made_from=found.made_from or found.name)
    return found
