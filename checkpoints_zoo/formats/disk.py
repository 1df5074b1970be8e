"""Writing to a disk: files by rename, checks of free space and of permission before work, locks."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from checkpoints_zoo.errors import StorageError, ZooError

FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOCK_ERRORS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)

_locks_in_process: dict[Path, threading.Lock] = {}  # for file systems without locks


def disk_full(path: Path, error: OSError, needed: int = 0) -> StorageError:
    """Return the error for a cache on a full disk."""
    return StorageError(
        f"cache {path}",
        expected=f"room for {needed:,} bytes" if needed else "room for what is fetched",
        found=str(error.strerror or error),
        do="Free some, or set HF_HOME to a folder on a larger disk: members that had arrived are kept",
        path=path,
    )


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside a path that no other process or thread uses: `.NAME.xxxxxxxx.tmp`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def replace_file(path: Path, mode: str = "w", sync: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside a path; at the end it replaces the path, after an error it is deleted.

    Args:
        path: path of the file to write; its folder is made if missing.
        mode: mode in which the file is opened: "w" for text in UTF-8, "wb" for bytes.
        sync: whether the file is flushed to the disk, so that it survives a power cut.

    Raises:
        OSError: the folder of the file can't be written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replace_file(Path(folder, "new", "a.txt")) as file:
    ...         count = file.write("whole")
    ...     Path(folder, "new", "a.txt").read_text()
    'whole'
    """
    temporary, text = temporary_name(path), "b" not in mode
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open(mode, encoding="utf-8" if text else None, newline="" if text else None) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):  # After the rename there is no temporary file.
            temporary.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shortage_of_room(root: Path, needed: int) -> str:
    """Return a text that states the free bytes of a folder's disk if they are too few; "" if they suffice."""
    free_bytes = shutil.disk_usage(root).free
    return f"{free_bytes:,} bytes free" if free_bytes < needed else ""


def check_room(root: Path, needed: int) -> None:
    """Check that a folder's disk has enough free space for the needed bytes.

    Raises:
        StorageError: the disk has fewer free bytes.
    """
    if shortage := shortage_of_room(root, needed):
        raise StorageError(
            f"folder {root}", expected=f"room for {needed:,} bytes", found=shortage,
            do="Free some, or give a folder on another disk", path=root,
        )  # fmt: skip


def check_folder(root: Path) -> None:
    """Make a folder and check that files can be written into it, before long work whose results will be written there.

    Raises:
        StorageError: they can't.
    """
    with writing_into(root), TemporaryFile(dir=root):
        pass


def check_output(path: Path, kind: str = "file") -> None:
    """Check that a file or folder can be written, before the work whose result will be written there; leave no test
    file.

    Args:
        path: path of the file or folder to check.
        kind: whether the path is a file or a folder: "file" or "folder".

    Raises:
        StorageError: the file or folder can't be written.
    """
    folder = path if kind == "folder" else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = "a folder of that name" if kind == "file" and path.is_dir() else ""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"{error.strerror or error}: {folder}"
    if found:
        raise StorageError(
            f"{kind} {path}", expected="a place that can be written to", found=found, do="Give another one", path=path
        )


@contextmanager
def writing_into(root: Path) -> Iterator[None]:
    """Make a folder; turn an OSError that the `with` block raises into a StorageError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except ZooError:
        raise
    except OSError as error:
        reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        expected, do = "one that can be written to, with room", "Run it again once it is: what is there stays"
        raise StorageError(f"folder {root}", expected=expected, found=reason, do=do, path=root) from error


@contextmanager
def locked(lock: Path, busy: ZooError | None = None) -> Iterator[None]:
    """Hold a lock while the `with` block runs; the system releases it when the process ends, even if it is killed.

    On a file system without locks a warning says so, and only this process's threads wait for each other.

    Args:
        lock: path of the lock file; its folder is made if missing.
        busy: the error to raise if another process holds the lock for longer than a second; None to wait.

    Raises:
        ZooError: `busy`.
        StorageError: the disk is full.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    with ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(lock, timeout=None if busy is None else 1))
        except TimeoutError as error:
            if busy is None:
                raise
            raise busy from error
        except OSError as error:
            if error.errno in FULL_ERRORS:
                raise disk_full(lock.parent, error) from error
            if error.errno not in LOCK_ERRORS:
                raise
            warnings.warn(
                f"the file system of {lock.parent} has no locks ({error.strerror}): let one process at a time write "
                "there",
                stacklevel=3,
            )
            in_process = _locks_in_process.setdefault(lock, threading.Lock())
            if not in_process.acquire(timeout=-1 if busy is None else 1) and busy is not None:
                raise busy from error
            stack.callback(in_process.release)
        yield
