"""Build the indexes of a source's archives; each is built once and stored in the member cache."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import FormatError, NetworkError
from checkpoints_zoo.formats import catalog, disk, source_paths
from checkpoints_zoo.formats.catalog import Archives
from checkpoints_zoo.formats.shard_files import file_stamp
from checkpoints_zoo.sources import archives as archive
from checkpoints_zoo.sources import cache, fetching, hub, hub_addresses
from checkpoints_zoo.sources.archives import Index, streams

ARCHIVE_SUFFIXES = (".tgz", ".tar", ".tar.gz")
# Number of archives that are indexed at once; each archive is read over several connections.
ARCHIVES_INDEXED_AT_ONCE = 3

_indexes: dict[tuple[Any, ...], Index] = {}  # Indexes by archive: each index is loaded or built once in a process.
_indexes_lock = threading.Lock()


@dataclass(frozen=True)
class OpenedArchive:
    """An indexed archive.

    Args:
        source_path: path of the archive in the source.
        path: path of the tar file on this disk, which is unpacked if the archive is gzipped; None for a tar on the Hub,
            whose members are read by byte ranges.
    """

    source_path: str
    index: Index
    path: Path | None


def archives_in(file_paths: Iterable[str], archives: Archives) -> list[str]:
    """Select the archives of a collection from a source's files; return their paths, ordered by the numbers in the
    names."""
    archive_paths = [
        p for p in file_paths if p.startswith(f"{archives.folder}/") and p.lower().endswith(ARCHIVE_SUFFIXES)
    ]
    return sorted(archive_paths, key=lambda p: ([int(n) for n in archive.numbers_in(p)], p))


def list_on_hub(repo: hub_addresses.Repo, archives: Archives) -> list[str]:
    """List the archives of a collection in a repo, by one request for each commit; return their paths.

    Raises:
        NetworkError: the Hub gave no answer; or offline mode is on, and this commit was never listed on this machine.
    """
    record = Path("folders", repo.commit, f"{hashlib.sha256(archives.folder.encode()).hexdigest()[:32]}.json")
    paths = _load_json(repo.cache_name, record)
    if not (isinstance(paths, list) and all(isinstance(p, str) and not source_paths.path_refusal(p) for p in paths)):
        paths = archives_in(hub.list_files(repo, archives.folder), archives)
        if paths:
            _save_json(repo.cache_name, record, paths)
    return archives_in(paths, archives)


def open_remote(repo: hub_addresses.Repo, archive_paths: Sequence[str], check: bool = False) -> list[OpenedArchive]:
    """Index archives of a repo; an archive without a stored index is indexed by a few range reads. Return the opened
    archives.

    Args:
        repo, archive_paths: the repo, and the paths of the archives in it.
        check: whether gzipped archives and their unpacked tars are hashed again even if their hashes are recorded.

    Raises:
        NetworkError, AccessError, SourceNotFound: for the same reasons as in `hub.resolve_address`.
        DamagedError: a file is no archive, or is cut short.
    """
    if len(archive_paths) == 1:
        return [_open_remote(repo, archive_paths[0], archive.index_archive, check=check)]
    with ThreadPoolExecutor(ARCHIVES_INDEXED_AT_ONCE, thread_name_prefix="zoo-index") as pool:
        return list(pool.map(lambda p: _open_remote(repo, p, archive.index_archive, check=check), archive_paths))


def walk_remote(repo: hub_addresses.Repo, source_path: str) -> None:
    """Read all headers of an archive in a repo, and store the resulting index in place of the predicted index."""
    record = cache.read_file_record(repo.cache_name, repo.commit, source_path)
    index = _load_index(repo.cache_name, _index_path(record[0]), record[1]) if record else None
    if index and all(e.verified for e in index.entries):  # Another process has read all headers already.
        _indexes[repo, source_path] = index
    else:
        _open_remote(repo, source_path, archive.walk_archive, ignores_stored_index=True)


def _open_remote(
    repo: hub_addresses.Repo,
    source_path: str,
    build_index: Callable[..., Index],
    ignores_stored_index: bool = False,
    check: bool = False,
) -> OpenedArchive:
    from huggingface_hub import is_offline_mode

    key = (repo, source_path)
    if not ignores_stored_index and key in _indexes:
        return _unpack_if_gzipped(repo, source_path, _indexes[key], check)
    record, index = cache.read_file_record(repo.cache_name, repo.commit, source_path), None
    if record is not None and not ignores_stored_index:
        index = _load_index(repo.cache_name, _index_path(record[0]), record[1])
    if index is None and is_offline_mode():
        raise NetworkError(
            f"index of {source_path} of {repo.label}", found="none",
            expected="a stored index in the cache, since HF_HUB_OFFLINE is set",
            do="Load a member of the collection once online", path=source_path,
        )  # fmt: skip
    if index is None:
        remote = fetching.remote_file(repo, source_path)
        cache.write_file_record(
            cache.writable_folder(repo.cache_name), repo.commit, source_path, remote.etag, remote.size
        )
        index = build_index(remote.bytes_at, remote.size, f"{source_path} of {repo.label}")
        _save_json(repo.cache_name, _index_path(remote.etag), index.to_json())
    opened = _unpack_if_gzipped(repo, source_path, index, check)
    with _indexes_lock:
        _indexes[key] = index
    return opened


def _unpack_if_gzipped(repo: hub_addresses.Repo, source_path: str, index: Index, check: bool) -> OpenedArchive:
    """Unpack an archive if it is gzipped; return the opened archive."""
    if index.kind != "gzip":
        return OpenedArchive(source_path, index, None)
    path = hub.fetch_file(repo, source_path, check)
    return _open_unpacked(path, source_path, path.resolve().name, cache.writable_folder(repo.cache_name), check)


def _index_path(etag: str) -> Path:
    return Path("indexes", f"{hashlib.sha256(etag.encode()).hexdigest()[:32]}.json")


def _load_index(repo: str, file_name: Path, archive_nbytes: int) -> Index | None:
    """Load the stored index of an archive; return None if no index is stored, or if it belongs to another file."""
    try:
        index = Index.from_json(_load_json(repo, file_name))
    except FormatError:
        return None
    return index if index.size == archive_nbytes else None


def _load_json(repo: str, file_name: Path) -> Any:
    for folder in cache.cache_folders(repo):
        try:
            return catalog.read_json(folder / file_name)
        except (OSError, FormatError):
            continue
    return None


def _save_json(repo: str, file_name: Path, values: Any) -> None:
    folder = cache.writable_folder(repo)
    try:
        catalog.write_json(values, folder / file_name)
    except OSError as error:
        raise disk.disk_full_error(folder, error) from error


def list_in_folder(root: Path, archives: Archives) -> list[str]:
    """List the archives of a collection in a folder; return their paths relative to it."""
    file_paths = (p for p in (root / archives.folder).glob("*") if p.is_file())
    return archives_in((p.relative_to(root).as_posix() for p in file_paths), archives)


def open_local(root: Path, archive_paths: Sequence[str], check: bool = False) -> list[OpenedArchive]:
    """Index archives on this disk by reading every header; return the opened archives.

    Args:
        root, archive_paths: folder of the source, and the paths of the archives in it.
        check: whether the unpacked tars of gzipped archives are hashed again even if their hashes are recorded.

    Raises:
        DamagedError: a file is no archive, or is cut short.
        StorageError: the disk has no room to unpack a gzipped archive.
    """
    return [_open_local(root / source_path, source_path, check) for source_path in archive_paths]


def _open_local(path: Path, source_path: str, check: bool) -> OpenedArchive:
    file_key = (str(path), file_stamp(path))
    if file_key not in _indexes:
        _indexes[file_key] = archive.index_file(path)
    if _indexes[file_key].kind != "gzip":
        return OpenedArchive(source_path, _indexes[file_key], path)
    content_key = hashlib.sha256(repr(file_key).encode()).hexdigest()
    return _open_unpacked(path, source_path, content_key, cache.writable_folder("local/archives"), check)


def _open_unpacked(path: Path, source_path: str, content_key: str, cache_folder: Path, check: bool) -> OpenedArchive:
    unpacked_path = streams.unpack_once(path, content_key, cache_folder, check)
    file_key = (str(unpacked_path), file_stamp(unpacked_path))
    if file_key not in _indexes:
        _indexes[file_key] = archive.index_file(unpacked_path)
    return OpenedArchive(source_path, _indexes[file_key], unpacked_path)
