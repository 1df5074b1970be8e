"""The member cache: each fetched member is one safetensors file, renamed to its final name once it is whole.

$HF_HOME/assets/checkpoints_zoo/datasets--org--name/
    members/ETAG-OFFSET-NBYTES-LAYOUT.safetensors     the same at every commit that has the same bytes
    records/NAME.json                                 identity and hash of a member, or of a whole file of the client
    files/COMMIT/HASH.json                            ETag and size of a path at a commit
    folders/COMMIT/HASH.json                          archives in a folder at a commit
    indexes/HASH.json                                 index of an archive
    unpacked/ETAG.tar                                 an unpacked gzipped archive
    locks/ETAG.lock                                   held while members of that file are fetched
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import shard_header
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.hash_records import HashRecord
from checkpoints_zoo.sources.hub import cache_root

STALE_SECONDS = 24 * 3600  # an older temporary file was left by a killed process


@dataclass(frozen=True)
class CachedRepoSummary:
    """The size of one repo's cache: "org/name", number of members, and their bytes."""

    repo: str
    members: int
    bytes: int


def cache_folders(repo: str) -> list[Path]:
    """Return a repo's folders: in the cache, and in the temporary one that may replace it in this process."""
    return [place / hub.folder_name(repo) for place in (cache_root(), *hub.fallback_folders())]


def writable_folder(repo: str) -> Path:
    """Return a repo's folder in the cache, or a temporary one if the cache can't be written to.

    Raises:
        StorageError: the disk is full.
    """
    place = cache_root() / hub.folder_name(repo)
    try:
        (place / "members").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place / "members"):
            return place
    except OSError as error:
        if error.errno in disk.FULL_ERRORS:
            raise disk.disk_full(place, error) from error
        place = hub.fallback_folder(cache_root(), error) / hub.folder_name(repo)
    (place / "members").mkdir(parents=True, exist_ok=True)
    return place


def check_room(place: Path, needed: int) -> None:
    """Check that the disk has room before anything is fetched.

    Raises:
        StorageError: it has too little.
    """
    if shortage := disk.shortage_of_room(place, needed):
        raise disk.disk_full(place, OSError(errno.ENOSPC, shortage), needed)


def header_of(layout: Layout) -> bytes:
    """Return the header of a member's file; b"" if the member brings a header of its own."""
    return b"" if layout.lead else shard_header(layout, [""])


def member_file_name(etag: str, offset: int, layout: Layout, head: bytes, name_in_archive: str = "") -> str:
    """Return the name of a member's file, which depends on its bytes and layout alone.

    Args:
        etag, offset: of the file that holds the member, and of its first tensor in it.
        layout, head: of the member's file; see `header_of`.
        name_in_archive: the member's proven name in its archive.
    """
    tag = etag if re.fullmatch("[0-9a-f]{40,64}", etag) else hashlib.sha256(etag.encode()).hexdigest()
    described = (head or json.dumps(layout.to_json()).encode()) + name_in_archive.encode("utf-8", "surrogateescape")
    return f"{tag}-{offset}-{layout.nbytes}-{hashlib.sha256(described).hexdigest()[:8]}.safetensors"


def find_member(repo: str, name: str, size: int) -> Path | None:
    """Look for a member's file of the right size; return its path, None if there is none."""
    for place in cache_folders(repo):
        path = place / "members" / name
        try:
            if path.is_file() and path.stat().st_size == size:
                return path
        except OSError:
            continue
    return None


def record_path(path: Path) -> Path:
    """Return where the record of a member's file lies."""
    return path.parents[1] / "records" / f"{path.name}.json"


def member_files(repo: str) -> set[Path]:
    """Return the cached files of a repo's members."""
    return {path for place in cache_folders(repo) for path in (place / "members").glob("*.safetensors")}


def _record_path(place: Path, commit: str, repo_path: str) -> Path:
    return place / "files" / commit / f"{hashlib.sha256(repo_path.encode()).hexdigest()[:32]}.json"


def read_file_record(repo: str, commit: str, repo_path: str) -> tuple[str, int] | None:
    """Return the recorded ETag and size of a file at a commit, None if there is no record."""
    for place in cache_folders(repo):
        try:
            record = json.loads(_record_path(place, commit, repo_path).read_bytes())
            if record["path"] == repo_path and type(record["etag"]) is str and type(record["size"]) is int:
                return record["etag"], record["size"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def write_file_record(place: Path, commit: str, repo_path: str, etag: str, size: int) -> None:
    """Record the ETag and size of a file at a commit, by rename.

    Raises:
        StorageError: the disk is full.
    """
    try:
        with disk.replace_file(_record_path(place, commit, repo_path)) as file:
            file.write(json.dumps({"path": repo_path, "etag": etag, "size": size}))
    except OSError as error:
        raise disk.disk_full(place, error) from error


def locked_key(place: Path, key: str) -> AbstractContextManager[None]:
    """Hold the lock of a key, such as an ETag, so that only one process fetches the file."""
    return disk.locked(place / "locks" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.lock")


class Draft:
    """A member's file under a temporary name, while its bytes arrive.

    Args:
        path: its final name.
        head: header that is written before the bytes.
        size: number of bytes that arrive.
        before: how many of the first bytes are not stored; they prove which member the others are.
    """

    def __init__(self, path: Path, head: bytes, size: int, before: int = 0) -> None:
        self.path = path
        self.temporary = disk.temporary_name(path)
        self._start, self.size, self._left = len(head), size, size
        self.before = bytearray(before)
        self._lock = threading.Lock()
        self._head = head
        self._file: FileIO | None = None
        self._at = 0  # in the file

    def write(self, at: int, piece: bytes) -> bool:
        """Write bytes at an offset behind the head, each once; return whether all bytes have arrived.

        Raises:
            StorageError: the disk is full.
        """
        with self._lock:
            try:
                if self._file is None:
                    self._file, self._at = FileIO(self.temporary, "w+"), self._start
                    _write_all(self._file, self._head)
                skipped = max(0, min(len(piece), len(self.before) - at))
                self.before[at : at + skipped] = piece[:skipped]
                if stored := piece[skipped:]:
                    begin = self._start + at + skipped - len(self.before)
                    if begin != self._at:  # a system call that most pieces don't need
                        self._file.seek(begin)
                    _write_all(self._file, stored)
                    self._at = begin + len(stored)
            except OSError as error:
                raise disk.disk_full(self.path.parent, error, self.size) from error
            self._left -= len(piece)
            return self._left == 0

    def content(self) -> memoryview:
        """Return the written bytes of the file, mapped."""
        with self.temporary.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def keep(self, digest: str) -> None:
        """Give the file its final name, once its bytes are on the disk, and record its hash.

        Args:
            digest: hash of the member, which has just been computed from these bytes.

        Raises:
            StorageError: the disk is full.
        """
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
            self._close()
            if self.path.is_dir() and not self.path.is_symlink():  # something else made it
                shutil.rmtree(self.path)
            self.temporary.replace(self.path)
        except OSError as error:
            raise disk.disk_full(self.path.parent, error, self.size) from error
        record = HashRecord(self.path, record_path(self.path))
        record.add("", digest)
        record.save()

    def discard(self) -> None:
        """Delete the temporary file."""
        with self._lock:
            self._close()
            self.temporary.unlink(missing_ok=True)
            self._left = self.size

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: FileIO, piece: bytes) -> None:
    remaining = memoryview(piece)
    while remaining:
        remaining = remaining[file.write(remaining) or 0 :]


def delete_stale(place: Path) -> None:
    """Delete old temporary files of killed processes."""
    for path in (place / "members").glob(".*.tmp"):
        try:
            if path.stat().st_mtime < time.time() - STALE_SECONDS:
                path.unlink()
        except OSError:
            continue


def cached_repos() -> list[CachedRepoSummary]:
    """List the cached repos; return one entry for each."""
    lines = []
    for place in sorted(cache_root().glob("datasets--*--*")):
        sizes = [p.stat().st_size for p in (place / "members").glob("*.safetensors") if not p.name.startswith(".")]
        if sizes:
            lines.append(CachedRepoSummary("/".join(place.name.split("--", 2)[1:]), len(sizes), sum(sizes)))
    return lines


def delete_members(repo: str | None = None) -> int:
    """Delete the cached members of a repo, None for all; return how many bytes that freed.

    Files that are being fetched stay; files that a process has open stay readable to it.
    """
    freed = 0
    for place in (
        sorted(cache_root().glob("datasets--*--*")) if repo is None else [cache_root() / hub.folder_name(repo)]
    ):
        for path in (place / "members").glob("*.safetensors"):
            if path.name.startswith("."):
                continue
            size = path.stat().st_size
            path.unlink(missing_ok=True)
            freed += size
        delete_stale(place)
        for path in (place / "unpacked").glob("*.tar"):
            freed += path.stat().st_size
            path.unlink(missing_ok=True)
        for folder in ("files", "folders", "indexes", "records"):
            shutil.rmtree(place / folder, ignore_errors=True)
    return freed
