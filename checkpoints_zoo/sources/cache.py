"""The member cache: each fetched member is one safetensors file, which gets its final name when all its bytes have
arrived.

$HF_HOME/assets/checkpoints_zoo/datasets--org--name/, or models--org--name/; a folder on the web is
named datasets--web+HOST--PATH, and what stands for its commit is "pins"
    members/ETAG-OFFSET-NBYTES-LAYOUT.safetensors     a member, shared by all commits with the same bytes
    members/HASH-draws.safetensors                    the draws of one pickle
    records/NAME.json                                 identity and hash of a member's file, of an unpacked archive,
                                                      or of a file in the cache of the Hub's client
    files/COMMIT/HASH.json                            ETag and size of a path at a commit
    folders/COMMIT/HASH.json                          archives in a folder at a commit
    indexes/HASH.json                                 index of an archive, or of pickled draws
    whole/HASH.parquet, whole/HASH.json               a file of a folder on the web
    trees/COMMIT.json                                 files of a model repo at a commit
    headers/ETAG.json, headers/HASH.head              header of a safetensors file of a model repo
    unpacked/ETAG.tar                                 an unpacked gzipped archive
    parts/ETAG.parquet                                a large manifest of which some byte ranges are here
    parts/ETAG.json                                   the byte ranges that are here
    locks/ETAG.lock                                   held while members of that file are fetched

This is one file, because its functions share the names of these files.
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
from checkpoints_zoo.sources import hub_cache
from checkpoints_zoo.sources.hash_records import HashRecord
from checkpoints_zoo.sources.hub_cache import cache_root

STALE_SECONDS = 24 * 3600  # An older temporary file counts as left by a killed process.


@dataclass(frozen=True)
class CachedRepoSummary:
    """Summary of one repo's cached members: the repo's name ("org/name", or "models/org/name"), the number of members,
    and their number of bytes."""

    repo: str
    members: int
    bytes: int


def cache_folders(repo: str) -> list[Path]:
    """Return a repo's folders in the cache, and in the temporary cache that replaces a cache which can't be written
    to."""
    return [
        cache_root_folder / hub_cache.folder_name(repo)
        for cache_root_folder in (cache_root(), *hub_cache.fallback_folders())
    ]


def writable_folder(repo: str) -> Path:
    """Return a repo's folder in the cache, or a temporary folder if the cache can't be written to.

    Raises:
        StorageError: the disk is full.
    """
    cache_folder = cache_root() / hub_cache.folder_name(repo)
    try:
        (cache_folder / "members").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder / "members"):
            return cache_folder
    except OSError as error:
        if error.errno in disk.DISK_FULL_ERRNOS:
            raise disk.disk_full_error(cache_folder, error) from error
        cache_folder = hub_cache.fallback_folder(cache_root(), error) / hub_cache.folder_name(repo)
    (cache_folder / "members").mkdir(parents=True, exist_ok=True)
    return cache_folder


def check_room(cache_folder: Path, needed_nbytes: int) -> None:
    """Check that the disk has free space before anything is fetched.

    Raises:
        StorageError: the disk has too little free space.
    """
    if shortage_text := disk.shortage_of_room(cache_folder, needed_nbytes):
        raise disk.disk_full_error(cache_folder, OSError(errno.ENOSPC, shortage_text), needed_nbytes)


def cache_file_header(layout: Layout) -> bytes:
    """Return the header to write into a member's cache file; b"" if the member's bytes include their own header."""
    return b"" if layout.header_nbytes else shard_header(layout, [""])


def etag_name(etag: str) -> str:
    """Return the start of the names of cache files with bytes of a file that has this ETag."""
    return etag if re.fullmatch("[0-9a-f]{40,64}", etag) else hashlib.sha256(etag.encode()).hexdigest()


def member_file_name(etag: str, offset: int, layout: Layout, cache_header: bytes, name_in_archive: str = "") -> str:
    """Return the name of a member's cache file, which depends only on the member's bytes and layout.

    Args:
        etag, offset: ETag of the file on the Hub that holds the member, and offset of the member's first tensor in it.
        layout, cache_header: layout of the member, and header of its cache file as `cache_file_header` returns it.
        name_in_archive: checked name of the member's file in its archive; "" outside archives.
    """
    identifying_bytes = (cache_header or json.dumps(layout.to_json()).encode()) + name_in_archive.encode(
        "utf-8", "surrogateescape"
    )
    return f"{etag_name(etag)}-{offset}-{layout.nbytes}-{hashlib.sha256(identifying_bytes).hexdigest()[:8]}.safetensors"


def find_member(repo: str, file_name: str, nbytes: int) -> Path | None:
    """Look for a member's cache file of the right size; return the file's path, None if there is no such file."""
    for cache_folder in cache_folders(repo):
        path = cache_folder / "members" / file_name
        try:
            if path.is_file() and path.stat().st_size == nbytes:
                return path
        except OSError:
            continue
    return None


def hash_record_path(cached_path: Path) -> Path:
    """Return the path of the hash record of a member's file or of an unpacked archive."""
    return cached_path.parents[1] / "records" / f"{cached_path.name}.json"


def member_files(repo: str) -> set[Path]:
    """Return the paths of the cached members of a repo."""
    return {path for cache_folder in cache_folders(repo) for path in (cache_folder / "members").glob("*.safetensors")}


def _file_record_path(cache_folder: Path, commit: str, repo_path: str) -> Path:
    return cache_folder / "files" / commit / f"{hashlib.sha256(repo_path.encode()).hexdigest()[:32]}.json"


def read_file_record(repo: str, commit: str, repo_path: str) -> tuple[str, int] | None:
    """Return the recorded ETag and size of a file at a commit, None if there is no record."""
    for cache_folder in cache_folders(repo):
        try:
            record = json.loads(_file_record_path(cache_folder, commit, repo_path).read_bytes())
            if record["path"] == repo_path and type(record["etag"]) is str and type(record["size"]) is int:
                return record["etag"], record["size"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def write_file_record(cache_folder: Path, commit: str, repo_path: str, etag: str, nbytes: int) -> None:
    """Record the ETag and size of a file at a commit; the record is written by rename.

    Raises:
        StorageError: the disk is full.
    """
    try:
        with disk.replace_file(_file_record_path(cache_folder, commit, repo_path)) as file:
            file.write(json.dumps({"path": repo_path, "etag": etag, "size": nbytes}))
    except OSError as error:
        raise disk.disk_full_error(cache_folder, error) from error


def hold_key_lock(cache_folder: Path, lock_key: str) -> AbstractContextManager[None]:
    """Return a context that holds the lock of a key, such as an ETag, so that only one process fetches the file."""
    return disk.hold_lock(cache_folder / "locks" / f"{hashlib.sha256(lock_key.encode()).hexdigest()[:32]}.lock")


class MemberDraft:
    """A member's file under a temporary name, while its bytes arrive.

    Args:
        path: final path of the file.
        header: bytes of the file's header, written before the member's bytes.
        arriving_nbytes: number of bytes of the member that will arrive.
        archive_header_nbytes: number of leading bytes that are the archive's header: it names the member to which the
            other bytes belong, and is not stored.
    """

    def __init__(self, path: Path, header: bytes, arriving_nbytes: int, archive_header_nbytes: int = 0) -> None:
        self.path = path
        self.temporary = disk.temporary_name(path)
        self._header_nbytes, self.size, self._bytes_left = len(header), arriving_nbytes, arriving_nbytes
        self.archive_header = bytearray(archive_header_nbytes)
        self._lock = threading.Lock()
        self._header = header
        self._file: FileIO | None = None
        self._position = 0  # Current position in the temporary file.

    def write(self, offset: int, arrived_bytes: bytes) -> bool:
        """Write a piece of the member at an offset from the member's first byte; return whether all bytes have arrived.
        Each byte of the member must be written once.

        Raises:
            StorageError: the disk is full.
        """
        with self._lock:
            try:
                if self._file is None:
                    self._file, self._position = FileIO(self.temporary, "w+"), self._header_nbytes
                    _write_all(self._file, self._header)
                archive_header_nbytes = max(0, min(len(arrived_bytes), len(self.archive_header) - offset))
                self.archive_header[offset : offset + archive_header_nbytes] = arrived_bytes[:archive_header_nbytes]
                if stored_piece := arrived_bytes[archive_header_nbytes:]:
                    file_offset = self._header_nbytes + offset + archive_header_nbytes - len(self.archive_header)
                    if (
                        file_offset != self._position
                    ):  # Most pieces continue at the current position, so that no seek is needed.
                        self._file.seek(file_offset)
                    _write_all(self._file, stored_piece)
                    self._position = file_offset + len(stored_piece)
            except OSError as error:
                raise disk.disk_full_error(self.path.parent, error, self.size) from error
            self._bytes_left -= len(arrived_bytes)
            return self._bytes_left == 0

    def content(self) -> memoryview:
        """Return the written bytes of the file as a memory map."""
        with self.temporary.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def store_under_final_name(self, digest: str) -> None:
        """Write the file's bytes to the disk, rename the file to its final name, and record its hash.

        Args:
            digest: hash of the member, computed from the written bytes.

        Raises:
            StorageError: the disk is full.
        """
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
            self._close()
            if self.path.is_dir() and not self.path.is_symlink():  # Another program made a folder with this name.
                shutil.rmtree(self.path)
            self.temporary.replace(self.path)
        except OSError as error:
            raise disk.disk_full_error(self.path.parent, error, self.size) from error
        record = HashRecord(self.path, hash_record_path(self.path))
        record.add("", digest)
        record.save()

    def discard(self) -> None:
        """Close and delete the temporary file."""
        with self._lock:
            self._close()
            self.temporary.unlink(missing_ok=True)
            self._bytes_left = self.size

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _write_all(file: FileIO, bytes_to_write: bytes) -> None:
    unwritten_bytes = memoryview(bytes_to_write)
    while unwritten_bytes:
        unwritten_bytes = unwritten_bytes[file.write(unwritten_bytes) or 0 :]


def delete_stale(cache_folder: Path) -> None:
    """Delete old temporary files of killed processes."""
    for path in (cache_folder / "members").glob(".*.tmp"):
        try:
            if path.stat().st_mtime < time.time() - STALE_SECONDS:
                path.unlink()
        except OSError:
            continue


def cached_repos() -> list[CachedRepoSummary]:
    """List the repos with cached members; return a summary of each."""
    summaries = []
    for repo_folder in _repo_folders():
        member_sizes = [
            p.stat().st_size for p in (repo_folder / "members").glob("*.safetensors") if not p.name.startswith(".")
        ]
        if member_sizes:
            name = repo_folder.name.replace("--", "/", 2).removeprefix("datasets/")
            summaries.append(CachedRepoSummary(name, len(member_sizes), sum(member_sizes)))
    return summaries


def _repo_folders() -> list[Path]:
    """Return the folders of all repos in the cache."""
    return sorted(path for kind in ("datasets", "models") for path in cache_root().glob(f"{kind}--*--*"))


def delete_members(repo: str | None = None) -> int:
    """Delete the cached members of a repo, or of all repos for None; return the number of freed bytes.

    Files that are being fetched stay; files that a process has open stay readable to it.
    """
    freed_nbytes = 0
    for repo_folder in _repo_folders() if repo is None else [cache_root() / hub_cache.folder_name(repo)]:
        for path in (repo_folder / "members").glob("*.safetensors"):
            if path.name.startswith("."):
                continue
            member_nbytes = path.stat().st_size
            path.unlink(missing_ok=True)
            freed_nbytes += member_nbytes
        delete_stale(repo_folder)
        for path in (*(repo_folder / "unpacked").glob("*.tar"), *(repo_folder / "parts").glob("*.*")):
            freed_nbytes += _nbytes_on_disk(path)
            path.unlink(missing_ok=True)
        for subfolder_name in ("files", "folders", "headers", "indexes", "records", "trees", "whole"):
            shutil.rmtree(repo_folder / subfolder_name, ignore_errors=True)
    return freed_nbytes


def _nbytes_on_disk(path: Path) -> int:
    """Return the number of bytes that a file takes on disk: a sparse file takes less than its size."""
    status = path.stat()
    return min(status.st_size, 512 * status.st_blocks) if hasattr(status, "st_blocks") else status.st_size
