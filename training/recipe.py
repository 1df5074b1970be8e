"""Recipe files of 0.1 import `Recipe` from here, and are not edited: a recipe's hash covers its file's text."""

import warnings

from checkpoints_zoo.training.recipe import Recipe

__all__ = ["Recipe"]

warnings.warn(
    "training.recipe is checkpoints_zoo.training.recipe now: import Recipe from there in new recipe files",
    DeprecationWarning,
    stacklevel=2,
)
