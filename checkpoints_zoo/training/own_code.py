"""Code of the user's own, run: what it raises becomes an error that names its line."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from checkpoints_zoo.errors import UsageError, ZooError

_OURS = Path(__file__).parents[1]
_NOT_THEIRS = ("<", str(_OURS), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib")))


@contextmanager
def running(what: str, expected: str) -> Iterator[None]:
    """Turn whatever a user's code raises in the block into a UsageError.

    Args:
        what: the code, as errors name it.
        expected: of it.
    """
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise UsageError(what, expected=expected, found=said(error)) from error


def module_of(path: Path, name: str) -> ModuleType:
    """Run a Python file as a module of a name; return the module, which is imported under that name then.

    Raises:
        UsageError: another file.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"recipe file {path}", expected="a Python file", found="another one")
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickles of the file's classes look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def said(error: Exception) -> str:
    """Say in a line what was raised, and in which line of the user's code if there is one.

    >>> said(ValueError("too few"))
    'ValueError: too few'
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    where = f" (in line {theirs[-1].lineno} of {theirs[-1].filename})" if theirs else ""
    if isinstance(error, SyntaxError):
        where = f" (in line {error.lineno} of {error.filename})"
    first = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().split("\n")[0]
    return f"{type(error).__name__}: {first[:200]}{where}"
