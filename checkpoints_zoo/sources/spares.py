"""A folder that stands in for a cache that can't be written to, for as long as this process lives."""

from __future__ import annotations

import atexit
import errno
import shutil
import tempfile
import warnings
from pathlib import Path

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_spare: list[Path] = []


def spare(refused: Path, error: OSError) -> Path:
    """Return a folder that goes with this process, in place of a cache that can't be written to; say so once.

    Args:
        refused: the cache's folder.
        error: why it can't be written to.
    """
    if not _spare:
        _spare.append(Path(tempfile.mkdtemp(prefix="checkpoints-zoo-")))
        atexit.register(shutil.rmtree, _spare[0], ignore_errors=True)
        warnings.warn(
            f"the cache {refused} can't be written to ({error.strerror}): what is fetched goes with this process. "
            "Set HF_HOME to a folder that can be.",
            stacklevel=2,
        )
    return _spare[0]


def spares() -> list[Path]:
    """Return that folder if there is one."""
    return _spare[:]
