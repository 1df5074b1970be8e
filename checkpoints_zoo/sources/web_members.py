"""Members and files of a folder on the web, fetched once into the member cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from checkpoints_zoo.errors import NetworkError
from checkpoints_zoo.formats import disk, limits
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.sources import cache, fetching, hub_cache
from checkpoints_zoo.sources.fetching import Download
from checkpoints_zoo.sources.member_requests import MemberRequest
from checkpoints_zoo.sources.web import WebFile, WebFolder

_PINS = "pins"  # stands for the commit in the cache's records of ETags and sizes


def fetch_file(folder: WebFolder, path: str) -> Path:
    """Fetch a whole file, unless the version that the host has now is in the cache; return its path on this machine.
    In offline mode the version that was fetched last is returned.

    Raises:
        SourceNotFound, AccessError, NetworkError, DamagedError: for the same reasons as in `WebFile.read`.
        FormatError: a manifest or description is too large.
        StorageError: the disk is full.
    """
    known_version = cache.read_file_record(folder.cache_name, _PINS, path)
    if hub_cache.is_offline() and known_version is not None and (cached := _find_file(folder, path, *known_version)):
        return cached
    file = folder.file(path)
    if cached := _find_file(folder, path, file.etag, file.size):
        return cached
    limits.check_size(file.size, path, file.error_subject)
    cache_folder = cache.writable_folder(folder.cache_name)
    cache.check_room(cache_folder, file.size)
    cached = cache_folder / "whole" / _file_name(path, file.etag, file.size)
    try:
        with disk.replace_file(cached, "wb") as stored:
            file.read(0, file.size, lambda _, piece: stored.write(piece))
    except OSError as error:
        if error.errno in disk.DISK_FULL_ERRNOS:
            raise disk.disk_full_error(cache_folder, error, file.size) from error
        raise
    cache.write_file_record(cache_folder, _PINS, path, file.etag, file.size)
    return cached


def _file_name(path: str, etag: str, size: int) -> str:
    name = hashlib.sha256(f"{path}\0{etag}\0{size}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return f"{name}{Path(path).suffix}"


def _find_file(folder: WebFolder, path: str, etag: str, size: int) -> Path | None:
    for cache_folder in cache.cache_folders(folder.cache_name):
        cached = cache_folder / "whole" / _file_name(path, etag, size)
        if cached.is_file() and cached.stat().st_size == size:
            return cached
    return None


def count_cached(folder: WebFolder, requests: Sequence[MemberRequest]) -> int:
    """Count the members that are in the cache; nothing is fetched."""
    return sum(_cached_location(folder, request, False) is not None for request in requests)


def fetch_members(
    folder: WebFolder, collection: str, requests: Sequence[MemberRequest], check: bool = False
) -> list[Location]:
    """Fetch members by ranges of their files, all missing members together; return the locations on this disk.

    A file is pinned when its first member is fetched: a file that changes afterwards is refused.

    Args:
        folder: the folder that the requests' paths are in.
        collection: name of the collection, for the progress bar and errors.
        requests: the requested members.
        check: whether cached members are hashed again even if a hash is recorded.

    Raises:
        NetworkError, AccessError, SourceNotFound: for the same reasons as in `WebFile.read`.
        DamagedError: a file has changed, or fetched bytes differ from the manifest; these bytes are not stored.
        StorageError: the disk is full.
    """
    locations = {request: _cached_location(folder, request, check) for request in requests}
    missing = [request for request, location in locations.items() if location is None]
    if not missing:
        return [location for location in map(locations.get, requests) if location is not None]
    if hub_cache.is_offline():
        raise NetworkError(
            f"{len(missing)} of {len(requests)} members of {collection}",
            expected="members in the cache, since HF_HUB_OFFLINE is set",
            found="none of these",
            do="Load them once online",
            collection=collection,
        )
    cache.delete_stale(cache.writable_folder(folder.cache_name))
    for batch in fetching.batches_of_few_files(missing):
        _fetch_batch(folder, collection, batch, check)
    return [location for request in requests if (location := _cached_location(folder, request, False)) is not None]


def _fetch_batch(folder: WebFolder, collection: str, missing: Sequence[MemberRequest], check: bool) -> None:
    """Fetch members of few files into the cache; a lock is held for each file meanwhile."""
    cache_folder = cache.writable_folder(folder.cache_name)
    paths = list(dict.fromkeys(request.path for request in missing))
    with ThreadPoolExecutor(fetching.CONNECTION_COUNT, thread_name_prefix="zoo-fetch") as pool, ExitStack() as locks:
        file_of_path = dict(zip(paths, pool.map(folder.file, paths), strict=True))
        for path, file in file_of_path.items():
            _pin(folder, path, file)
        for path in sorted(file_of_path):
            locks.enter_context(cache.hold_key_lock(cache_folder, path))
        downloads = []
        for request in missing:
            if _cached_location(folder, request, check) is None:  # Another process may have fetched it meanwhile.
                file = file_of_path[request.path]
                header = cache.cache_file_header(request.layout)
                etags = {request.first.file: _key(request.path, file.etag, file.size)}
                draft_path = cache_folder / "members" / fetching.cache_file_name(request, etags, header)
                draft = cache.MemberDraft(draft_path, header, request.nbytes)
                downloads.append(Download(request, {request.first.file: file}, draft))
        if downloads:
            cache.check_room(cache_folder, sum(download.draft.size for download in downloads))
            fetching.read_ranges(downloads, collection, pool)


def _pin(folder: WebFolder, path: str, file: WebFile) -> None:
    """Record the version of a file at its first read. Another version is refused once, and then recorded."""
    known_version = cache.read_file_record(folder.cache_name, _PINS, path)
    if known_version != (file.etag, file.size):
        cache_folder = cache.writable_folder(folder.cache_name)
        cache.write_file_record(cache_folder, _PINS, path, file.etag, file.size)
    if known_version is not None:
        file.check_unchanged(*known_version)


def _cached_location(folder: WebFolder, request: MemberRequest, check: bool) -> Location | None:
    version = cache.read_file_record(folder.cache_name, _PINS, request.path)
    if version is None:
        return None
    etags = {request.first.file: _key(request.path, *version)}
    return fetching.cached_location(request, etags, cache.cache_file_header(request.layout), check)


def _key(path: str, etag: str, size: int) -> str:
    """Return what stands for the ETag in names of cache files: hosts choose ETags as they like, or send none."""
    return f"{path}\0{etag}\0{size}"
