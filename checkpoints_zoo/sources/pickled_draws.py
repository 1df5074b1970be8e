"""Draws of a sampler that lie in pickles, a draw of each chain in each file: an index of the files, and their members.

The index is made from one file, which is read, and from the ETags and lengths of the others. A file is read whole and
compared with the index when one of its draws is needed. Its draws then lie in the member cache as one shard.

This is one file, because each pickle that is read is compared with the index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.formats import catalog, disk, manifest
from checkpoints_zoo.formats.catalog import Description, Listing, PickledDraws
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.pickled_arrays import read_pickled_arrays
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.formats.shard_files import Location, file_stamp, hash_members, shard_header, tensor_prefix
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import cache, haiku, hub_cache
from checkpoints_zoo.sources.archives import layout_key
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file

CONNECTION_COUNT = 8
LARGEST_FILE_NBYTES = 64 * 2**20
PARAMETERS_KEY = "params"  # Key of the parameters in a file; "net_state" beside it is empty.


class ReadableFile(Protocol):
    """A file on this machine or on the web, pinned to an ETag and a size."""

    @property
    def etag(self) -> str:
        """The file's ETag."""

    @property
    def size(self) -> int:
        """The file's size in bytes."""

    @property
    def error_subject(self) -> str:
        """Noun for the file in errors."""

    def check_unchanged(self, etag: str, size: int) -> None:
        """Raise a DamagedError if the file has another ETag or size than an earlier one."""

    def read_whole(self) -> bytes:
        """Return the file's bytes."""


class Folder(Protocol):
    """A folder with files of draws, on this machine or on the web."""

    @property
    def label(self) -> str:
        """The folder's address."""

    @property
    def cache_name(self) -> str:
        """Name of the folder in the member cache."""

    def file(self, path: str) -> ReadableFile:
        """Return a file of the folder."""


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine; its inode, size and times stand for an ETag."""

    path: Path
    etag: str
    size: int
    error_subject: str

    def check_unchanged(self, etag: str, size: int) -> None:
        """Raise a DamagedError if the file has changed."""
        if (self.etag, self.size) != (etag, size):
            raise DamagedError(
                self.error_subject, expected=f"{size:,} bytes, unchanged since the folder was indexed",
                found=f"a change, and {self.size:,} bytes", do="Load the collection again", path=self.path,
            )  # fmt: skip

    def read_whole(self) -> bytes:
        """Return the file's bytes."""
        return self.path.read_bytes()


@dataclass(frozen=True)
class LocalFolder:
    """A folder on this machine with files of draws."""

    root: Path

    @property
    def label(self) -> str:
        """The folder's address."""
        return self.root.as_uri()

    @property
    def cache_name(self) -> str:
        """Name of the folder in the member cache."""
        return f"local/draws-{hashlib.sha256(str(self.root).encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"

    def file(self, path: str) -> LocalFile:
        """Return a file of the folder.

        Raises:
            SourceNotFound: there is no such file.
            DamagedError: a link leads out of the folder.
        """
        local_path, subject = self.root / path, f"file {path} of {self.root}"
        if not local_path.is_file():
            raise SourceNotFound(
                subject, expected="a file of the collection", found="no such file",
                do="Get all files of the collection", path=local_path,
            )  # fmt: skip
        if not local_path.resolve().is_relative_to(self.root.resolve()):
            found = f"a link to {local_path.resolve()}"
            raise DamagedError(subject, expected="a file inside the folder", found=found, path=local_path)
        stamp = file_stamp(local_path)
        return LocalFile(local_path, "-".join(map(str, stamp)), stamp[1], subject)


@dataclass(frozen=True)
class DrawIndex:
    """The files of a collection of draws, and the layout that all draws have.

    Args:
        files: path -> (ETag, size) of each file, in order.
        layout: layout of a draw.
        chains: number of draws of a file.
    """

    files: Mapping[str, tuple[str, int]]
    layout: Layout
    chains: int

    @property
    def commit(self) -> str:
        """Hash of the ETags and sizes of all files, 40 hex digits."""
        return hashlib.sha256(json.dumps(list(self.files.items())).encode()).hexdigest()[:40]

    def description(self, listing: Listing, facts: PickledDraws) -> Description:
        """Return the description of the collection."""
        return Description(
            listing.name, listing.title, listing.architecture, {}, listing.dataset, facts.classes, facts.preprocessing,
            {layout_key(listing.architecture, self.layout): self.layout}, listing.licence, facts.citation,
        )  # fmt: skip

    def rows(self, listing: Listing) -> Any:
        """Return the manifest. A draw's id is chains · file + chain; its offset counts within the draws of its file."""
        key = layout_key(listing.architecture, self.layout)
        return manifest.build_manifest(
            {
                "member": number * self.chains + chain, "epoch": 0, "final": True, "status": "ok", "method": "hmc",
                "run": chain, "draw": number, "path": path, "offset": chain * self.layout.nbytes,
                "nbytes": self.layout.nbytes, "layout": key, "dtype": self.layout.dtype,
            }
            for number, path in enumerate(self.files)
            for chain in range(self.chains)
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the index as JSON values."""
        return {"files": dict(self.files), "layout": self.layout.to_json(), "chains": self.chains}

    @classmethod
    def from_json(cls, values: Any, facts: PickledDraws) -> DrawIndex | None:
        """Read the values that `to_json` returned; return the index, None if they are of other files or damaged."""
        try:
            files = {path: (str(etag), int(size)) for path, (etag, size) in values["files"].items()}
            index = cls(files, Layout.from_json(values["layout"]), int(values["chains"]))
        except (FormatError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return index if (list(files), index.chains) == (facts.paths, facts.chains) else None


def open_index(folder: Folder, listing: Listing, facts: PickledDraws) -> DrawIndex:
    """Read the stored index of a folder, or make it: read the first file, and ask for the others' ETags and lengths.

    Raises:
        SourceNotFound, AccessError, NetworkError: a file is missing, or can't be read.
        FormatError, DamagedError, LayoutError: the first file has no draws of the network.
        StorageError: the disk is full.
    """
    path = _index_path(folder, listing)
    for cache_folder in cache.cache_folders(folder.cache_name):
        try:
            index = DrawIndex.from_json(catalog.read_json(cache_folder / path), facts)
        except (OSError, FormatError):
            continue
        if index is not None:
            return index
    paths = facts.paths
    first_file = folder.file(paths[0])
    layout, draws = _read_draws(first_file, facts.chains)
    with ThreadPoolExecutor(CONNECTION_COUNT, thread_name_prefix="zoo-index") as pool:
        asked = pool.map(folder.file, paths[1:])
        files = [first_file, *progress(asked, len(paths) - 1, f"{listing.name}: index", "files")]
    index = DrawIndex({p: (file.etag, file.size) for p, file in zip(paths, files, strict=True)}, layout, facts.chains)
    _store_draws(folder, index, paths[0], draws)
    writable_folder = cache.writable_folder(folder.cache_name)
    try:
        catalog.write_json(index.to_json(), writable_folder / path)
    except OSError as error:
        raise disk.disk_full_error(writable_folder, error) from error
    return index


def _index_path(folder: Folder, listing: Listing) -> Path:
    return Path("indexes", f"{hashlib.sha256(f'{folder.label}#{listing.name}'.encode()).hexdigest()[:32]}.json")


def fetch_draws(folder: Folder, listing: Listing, index: DrawIndex, rows: Any, check: bool = False) -> list[Location]:
    """Read the files of draws that are not in the cache yet; return the locations of the draws. If a file has changed,
    the stored index is deleted, so that the next load makes another one.

    Args:
        folder: the folder of the files.
        listing: the catalog's fields of the collection.
        index: the index of the folder.
        rows: manifest rows of the draws.
        check: whether cached draws are hashed again even if hashes are recorded.

    Raises:
        DamagedError: a file has changed since it was indexed, or is broken.
        FormatError, LayoutError: a file has other objects than draws of the network.
        SourceNotFound, AccessError, NetworkError, StorageError: a file can't be read, or the disk is full.
    """
    paths = dict.fromkeys(rows.column("path").to_pylist())
    shard_of_path = {path: _find_shard(folder, index, path, check) for path in paths}
    missing = [path for path, shard in shard_of_path.items() if shard is None]

    def fetch(path: str) -> Path:
        file = folder.file(path)
        try:
            file.check_unchanged(*index.files[path])
        except DamagedError:
            for cache_folder in cache.cache_folders(folder.cache_name):
                (cache_folder / _index_path(folder, listing)).unlink(missing_ok=True)
            raise
        layout, draws = _read_draws(file, index.chains)
        if layout != index.layout:
            raise FormatError(
                file.error_subject, expected=f"draws of {index.layout.dtype}, as in the first file",
                found=layout.dtype, path=path,
            )  # fmt: skip
        return _store_draws(folder, index, path, draws)

    if missing:
        cache.check_room(cache.writable_folder(folder.cache_name), len(missing) * index.chains * index.layout.nbytes)
        with ThreadPoolExecutor(CONNECTION_COUNT, thread_name_prefix="zoo-fetch") as pool:
            fetched = progress(pool.map(fetch, missing), len(missing), f"{listing.name}: draws", "files")
            shard_of_path |= dict(zip(missing, fetched, strict=True))
    locations = []
    for member, path, offset in zip(*(rows.column(c).to_pylist() for c in ("member", "path", "offset")), strict=True):
        shard = shard_of_path[path]
        assert shard is not None
        start = len(shard_header(index.layout, _prefixes(index, path)))
        locations.append(Location(member, tensor_prefix(member), shard, start + offset, index.layout))
    return locations


def count_cached(folder: Folder, index: DrawIndex, rows: Any) -> int:
    """Count the rows whose draws are in the cache; nothing is fetched."""
    paths = rows.column("path").to_pylist()
    is_cached = {path: _find_shard(folder, index, path) is not None for path in set(paths)}
    return sum(is_cached[path] for path in paths)


def _read_draws(file: ReadableFile, chains: int) -> tuple[Layout, list[bytes]]:
    """Read a file; return the layout of its draws, and the bytes of each draw."""
    if file.size > LARGEST_FILE_NBYTES:
        expected = f"at most {format_bytes(LARGEST_FILE_NBYTES)} in a file of {chains} draws"
        raise FormatError(file.error_subject, expected=expected, found=format_bytes(file.size))
    content = read_pickled_arrays(file.read_whole(), file.error_subject)
    parameters = content.get(PARAMETERS_KEY) if isinstance(content, dict) else None
    if not isinstance(parameters, Mapping):
        expected = f"a dict with the key {PARAMETERS_KEY!r}, haiku's parameters"
        raise FormatError(file.error_subject, expected=expected, found=type(content).__name__)
    arrays = dict(haiku.translate_parameters(parameters, file.error_subject))
    found_chains = len(next(iter(arrays.values())))
    if found_chains != chains:
        raise FormatError(file.error_subject, expected=f"{chains} draws, one of each chain", found=f"{found_chains}")
    dtypes = {array.dtype.itemsize for array in arrays.values()}
    if len(dtypes) > 1 or not dtypes <= {2, 4, 8}:
        expected = "one dtype of 16, 32 or 64 bits in all arrays"
        raise FormatError(file.error_subject, expected=expected, found=f"items of {sorted(dtypes)} bytes")
    itemsize = dtypes.pop()
    layout = Layout.of((name, f"F{8 * itemsize}", array.shape[1:]) for name, array in arrays.items())
    return layout, [
        b"".join(array[chain].astype(f"<f{itemsize}", order="C").tobytes() for array in arrays.values())
        + bytes(layout.pad)
        for chain in range(chains)
    ]


def _prefixes(index: DrawIndex, path: str) -> list[str]:
    first_member = list(index.files).index(path) * index.chains
    return [tensor_prefix(first_member + chain) for chain in range(index.chains)]


def _shard_name(index: DrawIndex, path: str) -> str:
    etag, size = index.files[path]
    key = json.dumps([path, etag, size, index.layout.to_json()]).encode()
    return f"{hashlib.sha256(key).hexdigest()[:40]}-draws.safetensors"


def _store_draws(folder: Folder, index: DrawIndex, path: str, draws: Sequence[bytes]) -> Path:
    """Write the draws of a file as one shard, and record their hashes; return the path of the shard."""
    cache_folder = cache.writable_folder(folder.cache_name)
    shard = cache_folder / "members" / _shard_name(index, path)
    try:
        with disk.replace_file(shard, "wb", sync=True) as written:
            written.write(shard_header(index.layout, _prefixes(index, path)) + b"".join(draws))
    except OSError as error:
        raise disk.disk_full_error(cache_folder, error) from error
    record = HashRecord(shard, cache.hash_record_path(shard))
    for chain, draw in enumerate(draws):
        record.add(str(chain), content_hash(index.layout, draw))
    record.save()
    return shard


def _find_shard(folder: Folder, index: DrawIndex, path: str, check: bool = False) -> Path | None:
    """Look for the shard of a file in the cache; return its path. A shard whose hashes are not the recorded ones is
    deleted, but not in offline mode."""
    prefixes = _prefixes(index, path)
    header = shard_header(index.layout, prefixes)
    nbytes = len(header) + index.chains * index.layout.nbytes
    shard = cache.find_member(folder.cache_name, _shard_name(index, path), nbytes)
    if shard is None:
        return None
    record = HashRecord(shard, cache.hash_record_path(shard), check)
    if len(record.hashes) == index.chains:
        return shard
    with shard.open("rb") as file:
        has_header = file.read(len(header)) == header
    starts = [len(header) + chain * index.layout.nbytes for chain in range(index.chains)]
    locations = [Location(n, p, shard, s, index.layout) for n, (p, s) in enumerate(zip(prefixes, starts, strict=True))]
    hashes = {str(chain): digest for chain, digest in enumerate(hash_members(locations))}
    if has_header and hashes == record.old_hashes:
        for chain, digest in hashes.items():
            record.add(chain, digest)
        record.save()
        return shard
    if not hub_cache.is_offline():
        delete_file(shard, cache.hash_record_path(shard))
    return None
