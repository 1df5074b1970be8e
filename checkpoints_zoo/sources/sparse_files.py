"""Sparse files in our cache: large files on the Hub of which byte ranges are on this machine, with a record of the
ranges."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from checkpoints_zoo.errors import DamagedError, NetworkError
from checkpoints_zoo.formats import disk, limits
from checkpoints_zoo.sources import cache, fetching, hub, hub_cache
from checkpoints_zoo.sources.hub_addresses import Repo

# Largest number of unwanted bytes between two ranges that are fetched by one request. It is smaller than between
# members, because a selection reads short columns of many row groups.
LARGEST_GAP = 64 * 2**10
FOOTER_NBYTES = 64 * 2**10  # Number of bytes at the end of a Parquet file that are fetched first.

Range = tuple[int, int]


@dataclass(frozen=True)
class SparseHubFile:
    """A large file on the Hub, of which byte ranges are fetched when they are needed.

    Args:
        repo, repo_path: the repo, and the path of the file in it.
        etag, size: ETag of the file, and its size in bytes.
        folder: the repo's folder in our cache.
    """

    repo: Repo
    repo_path: str
    etag: str
    size: int
    folder: Path

    @classmethod
    def of(cls, repo: Repo, repo_path: str) -> SparseHubFile | None:
        """Look up a file's size, or ask the Hub; return the file if it is large. A small file is fetched whole; None is
        returned for it, and for a cached file.

        Raises:
            SourceNotFound, AccessError, NetworkError, DamagedError: for the same reasons as in `hub.fetch_file`.
            FormatError: the file is larger than the limit for manifests.
        """
        if hub_cache.cached_file(repo, repo_path) is not None:
            return None
        record = cache.read_file_record(repo.cache_name, repo.commit, repo_path)
        if record is None:
            if hub.fetch_small_file(repo, repo_path) is not None:
                return None
            remote = fetching.remote_file(repo, repo_path)
            record = remote.etag, remote.size
            cache.write_file_record(cache.writable_folder(repo.cache_name), repo.commit, repo_path, *record)
        etag, size = record
        limits.check_size(size, repo_path, f"file {repo_path} of {repo.label}")
        return (
            None
            if size < hub.LARGE_NBYTES
            else cls(repo, repo_path, etag, size, cache.writable_folder(repo.cache_name))
        )

    @property
    def path(self) -> Path:
        """Path of the sparse file, which has the size of the whole file."""
        return self.folder / "parts" / f"{cache.etag_name(self.etag)}{Path(self.repo_path).suffix}"

    def open(self) -> BinaryIO:
        """Open the file, of which fetched ranges can be read."""
        return (hub_cache.cached_file(self.repo, self.repo_path) or self.path).open("rb")

    def fetch_footer(self) -> None:
        """Fetch the footer of a Parquet file, whose length stands in the last bytes of the file."""
        self.fetch([(self.size - FOOTER_NBYTES, self.size)])
        with self.open() as file:
            file.seek(self.size - 8)
            length = int.from_bytes(file.read(4), "little")
        self.fetch([(self.size - 8 - length, self.size)])

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Fetch the missing bytes of ranges (start, end), or the whole file if they are most of it.

        Raises:
            NetworkError: the Hub gave no answer; or offline mode is on, and bytes are missing.
            AccessError: the file may not be read.
            DamagedError: the answer is not the requested range, or the file has changed.
            StorageError: the disk is full.
        """
        in_file = [(max(0, start), min(end, self.size)) for start, end in ranges]
        if not _without(in_file, self._present()) or hub_cache.cached_file(self.repo, self.repo_path) is not None:
            return
        if hub_cache.is_offline():
            raise NetworkError(
                f"rows of {self.repo_path} of {self.repo}",
                expected="them in the cache, since HF_HUB_OFFLINE is set",
                found="only rows or columns of other selections",
                do="Make this selection once online",
            )
        with cache.hold_key_lock(self.folder, self.etag):
            missing = _without(_join(in_file, LARGEST_GAP), self._present())
            missing_nbytes = sum(end - start for start, end in missing)
            if missing_nbytes > fetching.WHOLE_FILE_SHARE * self.size:
                hub.fetch_file(self.repo, self.repo_path)
            elif missing:
                cache.check_room(self.folder, missing_nbytes)
                self._fetch_missing(missing)

    def drop(self) -> None:
        """Delete the fetched ranges."""
        for path in (self._record_path, self.path):
            path.unlink(missing_ok=True)

    @property
    def _record_path(self) -> Path:
        return self.path.with_suffix(".json")

    def _present(self) -> list[Range]:
        """Return the ranges that are in the sparse file, in order; [] if the file or its record is missing."""
        try:
            if self.path.stat().st_size != self.size:
                return []
            return [(int(start), int(end)) for start, end in json.loads(self._record_path.read_bytes())]
        except (OSError, ValueError, TypeError):
            return []

    def _fetch_missing(self, missing: Sequence[Range]) -> None:
        """Fetch ranges over several connections, and record the ranges that arrived."""
        remote = fetching.remote_file(self.repo, self.repo_path)
        if (remote.etag, remote.size) != (self.etag, self.size):
            raise DamagedError(
                remote.error_subject, expected=f"ETag {self.etag[:16]}", found=remote.etag[:16], path=self.repo_path,
                do="A commit's files never change: tell the mirror's owner",
            )  # fmt: skip

        def fetch_range(bounds: Range) -> None:
            with self.path.open("r+b") as file:

                def write(offset: int, piece: bytes) -> None:
                    file.seek(offset)
                    file.write(piece)

                remote.read(*bounds, write)
                file.flush()
                os.fsync(file.fileno())

        present_ranges = self._present()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not present_ranges:
                with self.path.open("wb") as file:
                    file.truncate(self.size)
            with ThreadPoolExecutor(fetching.CONNECTION_COUNT, thread_name_prefix="zoo-fetch") as pool:
                futures = [pool.submit(fetch_range, bounds) for bounds in missing]
            arrived = [bounds for bounds, future in zip(missing, futures, strict=True) if future.exception() is None]
            with disk.replace_file(self._record_path) as record:
                record.write(json.dumps(_join([*present_ranges, *arrived], 0)))
            for future in futures:
                future.result()
        except OSError as error:
            if error.errno in disk.DISK_FULL_ERRNOS:
                raise disk.disk_full_error(self.folder, error) from error
            raise


def _join(ranges: Iterable[Range], largest_gap: int) -> list[Range]:
    """Join ranges between which there are no larger gaps; return them in order."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1] + largest_gap:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif start < end:
            joined.append((start, end))
    return joined


def _without(ranges: Iterable[Range], present_ranges: Sequence[Range]) -> list[Range]:
    """Return what of some ranges is not in present ranges, which are in order and do not touch each other."""
    missing, present_ends = [], [end for _, end in present_ranges]
    for start, end in _join(ranges, 0):
        for present_start, present_end in present_ranges[bisect_right(present_ends, start) :]:
            if present_start >= end:
                break
            if present_start > start:
                missing.append((start, present_start))
            start = present_end
        if start < end:
            missing.append((start, end))
    return missing
