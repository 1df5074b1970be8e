"""Nets of a user's own on the command line: MODULE:FUNCTION, which is imported, so that its code runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import UsageError


def function(text: str) -> Callable[..., Any]:
    """Find what MODULE:FUNCTION names, looking in the working folder too, from now on; return it.

    Raises:
        UsageError: there is none.
    """
    module, _, name = text.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # and it stays: worker processes look there as well
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"architecture {text}", expected="MODULE:FUNCTION that can be imported from here",
                         found=str(error)) from error  # fmt: skip
    if not callable(found):
        raise UsageError(f"architecture {text}", expected="a function", found=f"a {type(found).__name__}")
    build: Callable[..., Any] = found
    return build
