"""The main script of a program, as worker processes need it: they import it only if a job refers to it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

from checkpoints_zoo.errors import UsageError

MAIN_GUARD_ADVICE = (
    'Put `if __name__ == "__main__":` around the calls of a script, or its classes and functions into a module'
)
_importing_main = False  # True in a worker while it imports the main script.


def main_file() -> Path | None:
    """Return the path of the main script; None if there is no script: code from standard input, `-c`, a notebook or an
    interpreter."""
    file_name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file_name) if isinstance(file_name, str) and Path(file_name).is_file() else None


def refers_to_main(pickled: bytes) -> bool:
    """Say whether a pickle refers to classes or functions of the main script."""
    return b"__main__" in pickled or b"__mp_main__" in pickled


def needs_unguarded_main(pickled: bytes) -> bool:
    """Say whether a pickle refers to a main script whose calls would run when another process imports it, since no
    `if __name__ == "__main__":` stands around them; or to one that is no file."""
    if not refers_to_main(pickled):
        return False
    script = main_file()
    if script is None:
        return True
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # The main program is not Python code, for example a frozen program.
        return True
    if_conditions = [ast.walk(statement.test) for statement in statements if isinstance(statement, ast.If)]
    return not any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for condition_nodes in if_conditions
        for node in condition_nodes
    )


def main_import_arguments() -> dict[str, Any]:
    """Return the arguments by which `multiprocessing.spawn.prepare` imports the main script in a worker."""
    if main_file() is None:
        return {}
    preparation_data = spawn.get_preparation_data("zoo-worker")
    return {key: value for key, value in preparation_data.items() if key.startswith("init_main_from")}


@contextmanager
def hide_main() -> Iterator[None]:
    """Hide the main script while a process starts, so that the process does not import it before its first job."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module


def is_importing_main() -> bool:
    """Say whether this process is a worker that imports the main script."""
    return _importing_main


def import_main(main_arguments: dict[str, Any]) -> None:
    """Import the main script in a worker.

    Raises:
        UsageError: the main script ends the process, or runs jobs, while it is imported.
    """
    global _importing_main
    _importing_main = True
    try:
        spawn.prepare(main_arguments)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(
            "main script", expected="a script that workers can import", found=found, do=MAIN_GUARD_ADVICE
        ) from error
    finally:
        _importing_main = False
    main_arguments.clear()
