"""Files that are there whole or not at all: written under a temporary name, then renamed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside a path to write to: it takes the path's place at the end, and goes after an error.

    Args:
        path: of the file; its folder is made.

    Raises:
        OSError: a place that can't be written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder, "new", "a.txt")) as temporary:
    ...         count = temporary.write_text("whole")
    ...     Path(folder, "new", "a.txt").read_text()
    'whole'
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")  # processes and threads may do the same
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):  # none after a rename
            temporary.unlink()
