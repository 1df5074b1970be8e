"""Optional packages: imported when a function needs them, with an error that names a missing one."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

from checkpoints_zoo.errors import UsageError

# Warnings at the import of optional packages that only their authors can act on: (start of the message, category).
_IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    (r"`torch\.jit\.script` is deprecated", FutureWarning),  # asdl, linear_operator
    (r"The Tensor default of the field", FutureWarning),  # posteriors
)


def import_optional(module: str, *requirements: str) -> ModuleType:
    """Import a module of an optional package; return the module.

    Args:
        module: dotted name of the module.
        requirements: packages with versions, as pip takes them.

    Raises:
        UsageError: the package, or one that it needs, is not installed.

    >>> import_optional("no_such_package.metrics", "no-such-package>=1,<2")
    Traceback (most recent call last):
        ...
    checkpoints_zoo.errors.UsageError: module no_such_package.metrics: expected no-such-package>=1,<2 to be installed; \
found no module named 'no_such_package'. Run: pip install "no-such-package>=1,<2".
    """
    with warnings.catch_warnings():
        for message_pattern, category in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message_pattern, category=category)
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"module {module}",
                expected=f"{' and '.join(requirements)} to be installed",
                found=f"no module named {error.name!r}",
                do="Run: pip install " + " ".join(f'"{name}"' for name in requirements),
            ) from error
