"""Writing to a disk: files that are written by rename, checks of free space and permission before work, and locks."""

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

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCK_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)

_locks_in_process: dict[Path, threading.Lock] = {}  # locks that are used on file systems without locks


def disk_full_error(path: Path, error: OSError, needed_nbytes: int = 0) -> StorageError:
    """Return the error for a cache on a full disk."""
    return StorageError(
        f"cache {path}",
        expected=f"room for {needed_nbytes:,} bytes" if needed_nbytes else "room for what is fetched",
        found=str(error.strerror or error),
        do="Free some space, or set HF_HOME to a folder on a larger disk: members that have arrived are kept",
        path=path,
    )


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside a path that no other process or thread uses: `.NAME.xxxxxxxx.tmp`."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def replace_file(path: Path, mode: str = "w", sync: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside a path. When the `with` block ends, the temporary file is renamed to the path; after
    an error it is deleted.

    Args:
        path: path of the file to write; a missing folder is made.
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
    temporary_path, is_text = temporary_name(path), "b" not in mode
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary_path.open(mode, encoding="utf-8" if is_text else None, newline="" if is_text else None) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary_path.replace(path)
    finally:
        with suppress(OSError):  # After the rename there is no temporary file.
            temporary_path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a power cut."""
    folder_descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def shortage_of_room(root: Path, needed_nbytes: int) -> str:
    """Return a text that states the number of free bytes of a folder's disk if there are too few; "" if there are
    enough."""
    free_bytes = shutil.disk_usage(root).free
    return f"{free_bytes:,} bytes free" if free_bytes < needed_nbytes else ""


def check_room(root: Path, needed_nbytes: int) -> None:
    """Check that a folder's disk has enough free space for the needed bytes.

    Raises:
        StorageError: the disk has fewer free bytes than needed.
    """
    if shortage_text := shortage_of_room(root, needed_nbytes):
        raise StorageError(
            f"folder {root}", expected=f"room for {needed_nbytes:,} bytes", found=shortage_text,
            do="Free some space, or give a folder on another disk", path=root,
        )  # fmt: skip


def check_folder(root: Path) -> None:
    """Make a folder, and check that files can be written into it, before long work whose results will be written into
    the folder.

    Raises:
        StorageError: files can't be written into the folder.
    """
    with translate_write_errors(root), TemporaryFile(dir=root):
        pass


def check_output(path: Path, file_or_folder: str = "file") -> None:
    """Check that a file or folder can be written, before long work whose result will be written; leave no test file.

    Args:
        path: path of the file or folder to check.
        file_or_folder: whether the path is a file or a folder: "file" or "folder".

    Raises:
        StorageError: the file or folder can't be written.
    """
    folder = path if file_or_folder == "folder" else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found = "a folder of that name" if file_or_folder == "file" and path.is_dir() else ""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"{error.strerror or error}: {folder}"
    if found:
        raise StorageError(
            f"{file_or_folder} {path}",
            expected="a place that can be written to",
            found=found,
            do="Give another one",
            path=path,
        )


@contextmanager
def translate_write_errors(root: Path) -> Iterator[None]:
    """Make a folder; turn an OSError that the `with` block raises into a StorageError."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except ZooError:
        raise
    except OSError as error:
        reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        expected, do = "a folder with free space that can be written to", "Then run it again: existing files stay"
        raise StorageError(f"folder {root}", expected=expected, found=reason, do=do, path=root) from error


@contextmanager
def hold_lock(lock_path: Path, busy_error: ZooError | None = None) -> Iterator[None]:
    """Hold a lock while the `with` block runs; the system releases the lock when the process ends, even if the process
    is killed.

    On a file system without locks there is a warning, and only the threads of this process wait for each other.

    Args:
        lock_path: path of the lock file; a missing folder is made.
        busy_error: the error to raise if another process holds the lock for longer than a second; None to wait.

    Raises:
        ZooError: another process holds the lock; the error is `busy_error`.
        StorageError: the disk is full.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    with ExitStack() as stack:
        try:
            lock_path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(WeakFileLock(lock_path, timeout=None if busy_error is None else 1))
        except TimeoutError as error:
            if busy_error is None:
                raise
            raise busy_error from error
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise disk_full_error(lock_path.parent, error) from error
            if error.errno not in NO_LOCK_ERRNOS:
                raise
            warnings.warn(
                f"the file system of {lock_path.parent} has no locks ({error.strerror}): let one process "
                "at a time write there",
                stacklevel=3,
            )
            process_lock = _locks_in_process.setdefault(lock_path, threading.Lock())
            if not process_lock.acquire(timeout=-1 if busy_error is None else 1) and busy_error is not None:
                raise busy_error from error
            stack.callback(process_lock.release)
        yield
