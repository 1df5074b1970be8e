"""Indexes of the archives of a source: each is found once, and kept in the member cache beside the members."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import FormatError, NetworkError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Archives
from checkpoints_zoo.formats.shard_files import file_stamp
from checkpoints_zoo.sources import archives as archive
from checkpoints_zoo.sources import cache, fetching, hub
from checkpoints_zoo.sources.archives import Index, streams

SUFFIXES = (".tgz", ".tar", ".tar.gz")
AT_ONCE = 3  # archives; each is read over several connections

_indexes: dict[tuple[Any, ...], Index] = {}  # each is read or found once in a process
_lock = threading.Lock()


@dataclass(frozen=True)
class OpenedArchive:
    """An archive whose members can be read.

    Args:
        inside: its path in the source.
        index: what it holds.
        path: of the file on this disk that its members' offsets count in: the archive, or the tar that a gzipped one
            became; None for one on the Hub, of which members are read by ranges.
    """

    inside: str
    index: Index
    path: Path | None


def archives_in(paths: Iterable[str], archives: Archives) -> list[str]:
    """Pick a collection's archives from a source's files; return their paths in the order of the numbers in them."""
    inside = [p for p in paths if p.startswith(f"{archives.folder}/") and p.lower().endswith(SUFFIXES)]
    return sorted(inside, key=lambda p: ([int(n) for n in archive.numbers_in(p)], p))


def list_on_hub(repo: hub.Repo, archives: Archives) -> list[str]:
    """List a collection's archives in a repo, by one request for a commit; return their paths.

    Raises:
        NetworkError: no answer; or offline, and the repo was never listed here.
    """
    where = Path("folders", repo.commit, f"{hashlib.sha256(archives.folder.encode()).hexdigest()[:32]}.json")
    kept = _kept(repo.id, where)
    if not (isinstance(kept, list) and all(isinstance(p, str) and not manifest.path_problem(p) for p in kept)):
        kept = archives_in(hub.list_files(repo, archives.folder), archives)
        if kept:
            _keep(repo.id, where, kept)
    return archives_in(kept, archives)


def open_remote(repo: hub.Repo, paths: Sequence[str]) -> list[OpenedArchive]:
    """Index archives of a repo, those not indexed before by a few range reads each; return them.

    Raises:
        NetworkError, AccessError, SourceNotFound: see `hub.resolve_address`.
        DamagedError: no archive, or one that is cut.
    """
    if len(paths) == 1:
        return [_open_remote(repo, paths[0], archive.index_archive)]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="zoo-index") as pool:
        return list(pool.map(lambda inside: _open_remote(repo, inside, archive.index_archive), paths))


def walk_remote(repo: hub.Repo, inside: str) -> None:
    """Read all headers of an archive of a repo, and keep that index in place of the predicted one."""
    at = cache.read_file_record(repo.id, repo.commit, inside)
    kept = _known(repo.id, _place_of(at[0]), at[1]) if at else None
    if kept and all(e.verified for e in kept.entries):  # another process has been there
        _indexes[repo, inside] = kept
    else:
        _open_remote(repo, inside, archive.walk_archive, anew=True)


def _open_remote(repo: hub.Repo, inside: str, find: Callable[..., Index], anew: bool = False) -> OpenedArchive:
    from huggingface_hub import is_offline_mode

    key = (repo, inside)
    if not anew and key in _indexes:
        return _with_tar(repo, inside, _indexes[key])
    at, index = cache.read_file_record(repo.id, repo.commit, inside), None
    if at is not None and not anew:
        index = _known(repo.id, _place_of(at[0]), at[1])
    if index is None and is_offline_mode():
        raise NetworkError(
            f"index of {inside} of {repo.label}", expected="it in the cache, since HF_HUB_OFFLINE is set",
            found="nothing there", do="Load a member of the collection once online", path=inside,
        )  # fmt: skip
    if index is None:
        remote = fetching.remote_file(repo, inside)
        cache.write_file_record(cache.writable_folder(repo.id), repo.commit, inside, remote.etag, remote.size)
        index = find(remote.bytes_at, remote.size, f"{inside} of {repo.label}")
        _keep(repo.id, _place_of(remote.etag), index.to_json())
    opened = _with_tar(repo, inside, index)
    with _lock:
        _indexes[key] = index
    return opened


def _with_tar(repo: hub.Repo, inside: str, index: Index) -> OpenedArchive:
    """Unpack an archive if it is gzipped, which can't be read in part; return it opened."""
    if index.kind != "gzip":
        return OpenedArchive(inside, index, None)
    path = hub.cached_file(repo, inside) or hub.fetch_file(repo, inside)
    return _as_tar(path, inside, path.resolve().name, cache.writable_folder(repo.id))


def _place_of(etag: str) -> Path:
    return Path("indexes", f"{hashlib.sha256(etag.encode()).hexdigest()[:32]}.json")


def _known(repo: str, where: Path, size: int) -> Index | None:
    """Read an index that was kept; return None where there is none that can be used."""
    try:
        index = Index.from_json(_kept(repo, where))
    except FormatError:
        return None
    return index if index.size == size else None


def _kept(repo: str, where: Path) -> Any:
    for place in cache.cache_folders(repo):
        try:
            return catalog.read_json(place / where)
        except (OSError, FormatError):
            continue
    return None


def _keep(repo: str, where: Path, values: Any) -> None:
    place = cache.writable_folder(repo)
    try:
        catalog.write_json(values, place / where)
    except OSError as error:
        raise cache.disk_full(place, error) from error


def list_in_folder(root: Path, archives: Archives) -> list[str]:
    """List a collection's archives in a folder; return their paths in it."""
    found = (p for p in (root / archives.folder).glob("*") if p.is_file())
    return archives_in((p.relative_to(root).as_posix() for p in found), archives)


def open_local(root: Path, paths: Sequence[str]) -> list[OpenedArchive]:
    """Index archives on this disk, every header read; return them.

    Raises:
        DamagedError: no archive, or one that is cut.
        StorageError: no room for what a gzipped one unpacks to.
    """
    return [_open_local(root / inside, inside) for inside in paths]


def _open_local(path: Path, inside: str) -> OpenedArchive:
    key = (str(path), file_stamp(path))
    if key not in _indexes:
        _indexes[key] = archive.index_file(path)
    if _indexes[key].kind != "gzip":
        return OpenedArchive(inside, _indexes[key], path)
    stamp = hashlib.sha256(repr(key).encode()).hexdigest()
    return _as_tar(path, inside, stamp, cache.writable_folder("local/archives"))


def _as_tar(path: Path, inside: str, key: str, place: Path) -> OpenedArchive:
    tar = streams.unpack_once(path, key, place)
    stamp = (str(tar), file_stamp(tar))
    if stamp not in _indexes:
        _indexes[stamp] = archive.index_file(tar)
    return OpenedArchive(inside, _indexes[stamp], tar)
