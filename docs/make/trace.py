"""Trace which files of the package a piece of code passes.

    python -m docs.make.trace 'zoo.load("convnet-digits", n=16).ensemble()(x)' \
        --ready 'import torch, checkpoints_zoo as zoo; x = torch.rand(4, 1, 8, 8)'

A file is passed if the body of one of its functions runs, in any thread. What runs while a module of the package is
imported does not count: imports, definitions, class bodies, and functions that these call. Files come in the order in
which they are passed first. Child processes are not traced.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = "checkpoints_zoo"
OPTIMIZED = 0x01  # set in the code of functions, not in that of modules and class bodies
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # parts of the body that they stand in


class Tracer:
    """Collects the files of the package whose functions run."""

    def __init__(self) -> None:
        # The package is found, not imported: its `__init__` may be what the traced code imports first.
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(PACKAGE)
        self.folder = str(Path(spec.origin).parent) + os.sep
        self.passed: dict[str, str] = {}  # file -> the function that ran first

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace what runs within the `with` block, in threads that start there as well."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def files(self) -> dict[str, str]:
        """Return the files that were passed, relative to the package, each with the function that ran first."""
        return {Path(file).relative_to(self.folder).as_posix(): name for file, name in self.passed.items()}

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code  # No key of a dict: its hash takes as long as its bytecode.
        if code.co_filename not in self.passed and self._is_body(code) and not self._importing(frame):
            self.passed[code.co_filename] = code.co_qualname

    def _is_body(self, code: CodeType) -> bool:
        if not code.co_filename.startswith(self.folder):
            return False
        is_python = code.co_filename.endswith(".py")  # no template, whose compiled code bears the template's file name
        return is_python and bool(code.co_flags & OPTIMIZED) and code.co_name not in COMPREHENSIONS

    def _importing(self, frame: FrameType | None) -> bool:
        """Say whether a module of the package is being imported, since it stands further up in the stack."""
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(self.folder):
                return bool(frame.f_globals["__name__"] != "__main__")
            frame = frame.f_back
        return False


def trace(code: str, ready: str = "") -> dict[str, str]:
    """Run code in this process; return the files of the package that it passes, each with the function that ran first.

    Args:
        code: Python statements.
        ready: statements that run before them and are not traced; `code` sees the names that they leave.
    """
    scope: dict[str, object] = {"__name__": "traced"}
    exec(compile(ready, "<ready>", "exec"), scope)
    compiled, tracer = compile(code, "<traced>", "exec"), Tracer()
    with tracer.tracing():
        exec(compiled, scope)
    return tracer.files()


def main() -> None:
    """Trace the code of the command line; print the files."""
    parser = argparse.ArgumentParser(prog="python -m docs.make.trace", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("code", help="Python statements to trace")
    parser.add_argument("--ready", default="", help="statements that run before, untraced")
    parser.add_argument("--json", type=Path, help="write the files here, as JSON, and print nothing")
    options = parser.parse_args()
    found = trace(options.code, options.ready)
    if options.json:
        options.json.write_text(json.dumps(found), encoding="utf-8")
    else:
        print(*(f"{at:3} {file}: {name}" for at, (file, name) in enumerate(found.items(), 1)), sep="\n")


if __name__ == "__main__":
    main()
