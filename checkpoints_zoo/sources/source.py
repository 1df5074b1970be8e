"""Sources: the interface of all kinds, and what the kinds with manifests have in common.

| kind | its manifest | its members |
|---|---|---|
| `FolderSource` | a file, pinned by its hash | files inside the folder |
| `HubSource` | a file at a commit | byte ranges, stored in the cache |
| `ArchiveSource` | made from an index of archives in a folder or repo | byte ranges of the archives |
| `WebSource` | a file at an https:// or gs:// address, pinned by its hash | byte ranges, stored in the cache |
| `DrawsSource` | made from an index of pickles in a folder, on this machine or the web | the pickles, read whole |

Each kind is a file beside this one, and `finding.open_source` chooses the kind. A manifest is checked before a byte of
a shard is read.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from checkpoints_zoo.errors import FormatError, SourceNotFound, ZooError
from checkpoints_zoo.formats import arrow_tables, catalog, layout, manifest, row_checks, selection
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.shard_files import Location, file_stamp
from checkpoints_zoo.sources import fetching, hub, hub_addresses
from checkpoints_zoo.sources.member_requests import requests_of_rows


@dataclass(frozen=True)
class Source(ABC):
    """A folder on this machine or on the web, or a repo, with collections: manifests, members' bytes, and stored
    predictions.

    Args:
        root: the folder of the source; for a repo, the folder of its commit in the cache of the Hub's client; for a
            folder on the web, the folder of its files in our cache.
        label: name of the source in citations: "embedded", a file URI, or an address on the Hub or the web.
        repo: the repo on the Hub, at its commit; None for a folder on this machine or on the web.
        check: whether each member is hashed when its location is found.
    """

    root: Path
    label: str
    repo: hub_addresses.Repo | None
    check: bool = field(default=False, kw_only=True)

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return self.label

    @property
    def uses_cache(self) -> bool:
        """Whether members' bytes pass through the member cache."""
        return self.repo is not None

    @abstractmethod
    def collections(self) -> list[str]:
        """Return the names of the source's collections: collections with a manifest, and collections of the catalog
        that lie in archives."""

    @abstractmethod
    def commit(self, name: str) -> str:
        """Return the version of a collection's manifest and description, 40 hex digits: a commit or a hash."""

    @abstractmethod
    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both.

        Raises:
            CollectionNotFound: the source has no such manifest.
            SourceNotFound: the description is missing.
            FormatError, DamagedError: the manifest or description does not follow the format, or a path leads out of
                the source.
            LayoutError, StorageError, NetworkError, AccessError: the archives or the repo can't be read.
        """

    def open_collection(self, name: str) -> tuple[Description, selection.Rows]:
        """Read a collection's description; return it, and the manifest's rows to select from. The rows of a small
        manifest are read and checked; of a large manifest, only selected rows are.

        Raises:
            ZooError: for the same reasons as in `read_collection`.
        """
        description, rows = self.read_collection(name)
        return description, selection.RowsInMemory(rows)

    def repo_of_bytes(self, described: layout.DescriptionWithLayouts) -> hub_addresses.Repo | None:
        """Return the repo that holds the bytes of rows without parts; None if they are files of a folder."""
        return hub.resolve_address(described.base) if described.base else self.repo

    @abstractmethod
    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Find the bytes of manifest rows; return their locations on this machine. Bytes that are missing on this
        machine are fetched together.

        Args:
            described: the description of the collection, or of stored predictions.
            rows: rows of the manifest that belongs to the description.

        Raises:
            DamagedError, SourceNotFound: for the same reasons as in `local_path`.
            NetworkError, AccessError, StorageError: for the same reasons as in `fetching.fetch_members`.
        """

    def locate_tensors(
        self, described: layout.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Find the bytes of some tensors of manifest rows; return for each name the locations of the tensor, or of its
        member, on this machine. Where a source fetches bytes by ranges, it fetches those of these tensors only.

        Args:
            described, rows: the same arguments as in `locate`.
            names: names of tensors that all members have.

        Raises:
            UsageError: a member has no tensor of such a name.
            ZooError: for the same reasons as in `locate`.
        """
        name_list = list(names)
        for name in name_list:
            for layout_key in _layout_keys(rows):
                described.layouts[layout_key].spec(
                    name
                )  # Raise the error of an unknown name before anything is fetched.
        return dict.fromkeys(name_list, self.locate(described, rows))

    def updated_rows(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows with their present locations; the reading of an archive may have corrected the
        locations.

        Raises:
            DamagedError: the file of a row turned out not to be a member.
        """
        return rows

    def count_local(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        requests = requests_of_rows(self.repo_of_bytes(described), described, rows)
        fetched = [request for request in requests if request is not None]
        return len(requests) - len(fetched) + fetching.count_cached(fetched)

    def transfer_nbytes(self, rows: pa.Table) -> int:
        """Return the number of bytes that reading manifest rows takes."""
        return arrow_tables.sum_of(rows, "nbytes")

    @abstractmethod
    def list_files(self, folder: str) -> list[str]:
        """List all files below a folder of the source; return their paths in the source, [] if there is no such
        folder."""

    @abstractmethod
    def local_path(self, source_path: str) -> Path:
        """Find a file that a manifest names, and fetch it if it is not on this machine; return its path.

        Raises:
            DamagedError: the path or a link on it leads out of the source, or the fetched bytes do not have the
                announced hash.
            SourceNotFound: there is no such file.
            NetworkError, AccessError: the repo can't be read.
        """


@dataclass(frozen=True)
class ManifestSource(Source):
    """A source with a manifest and a description of each collection, which are files in its folder `manifests/`."""

    @abstractmethod
    def collection_paths(self, name: str) -> tuple[Path, Path]:
        """Find a collection's manifest and description, and fetch them if they are not on this machine; return their
        paths.

        Raises:
            CollectionNotFound, SourceNotFound: the source has no such file.
            ZooError: for the same reasons as in `local_path`.
        """

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits."""
        digest = hashlib.sha256()
        for path in self.collection_paths(name):
            digest.update(_hash_file_once(path, file_stamp(path)))
        return digest.hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both."""
        return read_collection_files(name, *self.collection_paths(name))

    def open_collection(self, name: str) -> tuple[Description, selection.Rows]:
        """Read a collection's description; return it, and the manifest's rows to select from."""
        return open_collection_files(name, *self.collection_paths(name))

    def missing_file_error(self, path: Path, collection: str) -> ZooError:
        """Return the error for a collection whose manifest or description is missing."""
        if path.suffix == ".parquet":
            return catalog.collection_not_found(collection, self.collections(), f"source {self.label}")
        return SourceNotFound(
            f"source {self.label}",
            expected=f"{path.relative_to(self.root)} beside the manifest",
            found="no such file",
            collection=collection,
            path=path,
        )


def _layout_keys(rows: pa.Table) -> list[str]:
    """Return the keys of the layouts that rows name, each once."""
    return list(dict.fromkeys(key for key in rows.column("layout").to_pylist() if key is not None))


def read_collection_files(collection: str, manifest_path: Path, description_path: Path) -> tuple[Description, pa.Table]:
    """Read and check a manifest and its description; return description and manifest. Unchanged files are read only
    once.

    Args:
        collection: name of the collection.
        manifest_path, description_path: paths of the two files.

    Raises:
        FormatError, DamagedError: one of the files does not follow the format.
    """
    return _read_collection_files_once(
        collection, manifest_path, description_path, (file_stamp(manifest_path), file_stamp(description_path))
    )


@lru_cache(maxsize=32)
def _read_collection_files_once(
    collection: str, manifest_path: Path, description_path: Path, stamps: tuple[tuple[int, ...], ...]
) -> tuple[Description, pa.Table]:
    description = read_description(collection, description_path)
    rows = manifest.read_manifest(manifest_path)
    row_checks.check_rows(rows, description, manifest_path)
    return description, rows


def read_description(name: str, path: Path) -> Description:
    """Read a collection's description; return it.

    Raises:
        FormatError, DamagedError: the file does not follow the format, or names another collection.
    """
    description = Description.from_json(catalog.read_json(path), path)
    if description.name != name:
        raise FormatError(
            f"description {path}",
            expected=f"the name {name!r}, as in the file's name",
            found=repr(description.name[:80]),
            path=path,
        )
    return description


def open_collection_files(name: str, manifest_path: Path, description_path: Path) -> tuple[Description, selection.Rows]:
    """Return the description and the rows of a collection to select from: all rows, read and checked, of a small
    manifest; an opened file of a large one."""
    stamps = file_stamp(manifest_path), file_stamp(description_path)
    large_collection = _open_large_files_once(name, manifest_path, description_path, stamps)
    if large_collection is not None:
        return large_collection
    description, rows = _read_collection_files_once(name, manifest_path, description_path, stamps)
    return description, selection.RowsInMemory(rows)


@lru_cache(maxsize=32)
def _open_large_files_once(
    name: str, manifest_path: Path, description_path: Path, stamps: tuple[tuple[int, ...], ...]
) -> tuple[Description, manifest.ManifestFile] | None:
    """Open a large manifest; return the description and the manifest, None if the manifest is small or can't be
    read."""
    if manifest.row_count(manifest_path) < manifest.LARGE_ROW_COUNT:
        return None

    def open_manifest() -> BinaryIO:
        # Arrow opens only paths in UTF-8.
        file = manifest_path.open("rb")
        if file_stamp(manifest_path) != stamps[0]:
            file.close()
            raise FormatError(f"manifest {manifest_path}", found="a change while it was read", do="Load it again")
        return file

    description = read_description(name, description_path)
    return description, manifest.ManifestFile(open_manifest, manifest_path, description=description)


@lru_cache(maxsize=64)
def _hash_file_once(path: Path, stamp: tuple[int, ...]) -> bytes:
    """Return the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
