"""The recipes, as a table."""

from __future__ import annotations

from pathlib import Path

from checkpoints_zoo.cli.output import table
from checkpoints_zoo.training import recipe_files
from checkpoints_zoo.training.recipes import RECIPES, named


def table_of(text: str | None) -> str:
    """Return a table of the recipes of a file, or of those that come with the package, by the names they are chosen by.

    Raises:
        UsageError: no such recipe or file.
    """
    recipes = {name: make() for name, make in RECIPES.items()}
    if text is not None:
        recipes = recipe_files.read_all(Path(text)) if recipe_files.is_file(text) else {text: named(text)}
    return table(
        [
            {
                "recipe": name, "members": f"{r.members:,}", "architecture": r.architecture, "data": r.dataset,
                "epochs": r.epochs, "at once": r.stack_width, "precision": r.precision,
            }
            for name, r in recipes.items()
        ],
        right=["members"],
    )  # fmt: skip
