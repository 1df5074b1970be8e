"""Sources of members: the interface, the kinds of sources, and the selection of members by name or citation.

| kind | its manifest | its members |
|---|---|---|
| `FolderSource` | a file, pinned by its hash | files inside the folder |
| `HubSource` | a file at a commit | byte ranges, stored in the cache |
| `ArchiveSource` | made from an index of archives in a folder or repo | byte ranges of the archives |
| `WebSource` | a file at an https:// or gs:// address, pinned by its hash | byte ranges, stored in the cache |
| `DrawsSource` | made from an index of pickles in a folder, on this machine or the web | the pickles, read whole |

`open_source` chooses the kind. A manifest is checked before a byte of a shard is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints_zoo.errors import (
    CollectionNotFound,
    DamagedError,
    FormatError,
    MemberNotFound,
    SelectionError,
    SourceNotFound,
    ZooError,
)
from checkpoints_zoo.formats import catalog, manifest, selection
from checkpoints_zoo.formats.catalog import Archives, Description, Listing, PickledDraws
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.selection import SnapshotKey
from checkpoints_zoo.formats.shard_files import Location, check_hashes, file_stamp, tensor_prefix
from checkpoints_zoo.formats.text import first_few, one_line
from checkpoints_zoo.sources import archives, fetching, hub, pickled_draws, revisions, web, web_members
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import OpenedArchive
from checkpoints_zoo.sources.parts import PartialFile
from checkpoints_zoo.sources.pickled_draws import DrawIndex, LocalFolder
from checkpoints_zoo.sources.web import WebFolder

T = TypeVar("T")
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

EMBEDDED = "embedded"
EMBEDDED_ROOT = Path(__file__).parents[1] / "embedded"

# (name of a collection, its indexes) -> collection; each collection is built once in a process.
_archived_collections: dict[tuple[str, tuple[tuple[str, int], ...]], ArchivedCollection] = {}


@dataclass(frozen=True)
class Source(ABC):
    """A folder or repo with collections: manifests, members' bytes, and stored predictions.

    Args:
        root: the folder of the source; for a repo, the folder of its commit in the cache of the Hub's client.
        label: name of the source in citations: "embedded", a file URI, or an address on the Hub.
        repo: the repo on the Hub, at its commit; None for a local source.
        check: whether each member is hashed when its location is found.
    """

    root: Path
    label: str
    repo: hub.Repo | None
    check: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def display_name(self) -> str:
        """The name of the source in texts for people."""

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

    @abstractmethod
    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
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
        self, described: manifest.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
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

    def count_local(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        requests = fetching.requests_of_rows(_repo_of_bytes(self, described), described, rows)
        fetched = [request for request in requests if request is not None]
        return len(requests) - len(fetched) + fetching.count_cached(fetched)

    def transfer_nbytes(self, rows: pa.Table) -> int:
        """Return the number of bytes that reading manifest rows takes."""
        return manifest.sum_of(rows, "nbytes")

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
class FolderSource(Source):
    """A source that is a folder: it contains `manifests/` and the files that the manifests name."""

    repo: None = field(default=None, init=False, repr=False)

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return EMBEDDED if self.label == EMBEDDED else str(self.root)

    def collections(self) -> list[str]:
        """Return the names of the source's collections: collections with a manifest, and collections of the catalog
        that lie in archives."""
        manifest_names = [p.stem for p in (self.root / "manifests").glob("*.parquet")]
        return sorted(
            {
                *manifest_names,
                *(listing.name for listing, archives in catalog.archived_listings() if self.list_archives(archives)),
            }
        )

    def has_manifest(self, name: str) -> bool:
        """Say whether a collection has a manifest in this source."""
        return self.manifest_path(name).is_file()

    def list_archives(self, archives: Archives) -> list[str]:
        """List the archives of a collection that the catalog describes; return their paths."""
        return indexing.list_in_folder(self.root, archives)

    def open_archives(self, archive_paths: list[str]) -> list[OpenedArchive]:
        """Index archives of the source; return them opened."""
        for archive_path in archive_paths:  # Refuse an archive that is a link out of the source.
            self.local_path(archive_path)
        return indexing.open_local(self.root, archive_paths, self.check)

    def manifest_path(self, name: str) -> Path:
        """Return the path of a collection's manifest, whether it exists or not."""
        return self.root / "manifests" / f"{catalog.check_name(name)}.parquet"

    def description_path(self, name: str) -> Path:
        """Return the path of a collection's description, whether it exists or not."""
        return self.manifest_path(name).with_suffix(".json")

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits."""
        digest = hashlib.sha256()
        for path in (self.manifest_path(name), self.description_path(name)):
            try:
                digest.update(_hash_file_once(path, file_stamp(path)))
            except FileNotFoundError:
                raise _missing_file_error(self, path, name) from None
        return digest.hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both."""
        return _read_collection_files(name, *self._existing_paths(name))

    def open_collection(self, name: str) -> tuple[Description, selection.Rows]:
        """Read a collection's description; return it, and the manifest's rows to select from."""
        return _open_collection_files(name, *self._existing_paths(name))

    def _existing_paths(self, name: str) -> tuple[Path, Path]:
        """Return the paths of a collection's manifest and description.

        Raises:
            CollectionNotFound, SourceNotFound: one of the files does not exist.
        """
        file_paths = self.manifest_path(name), self.description_path(name)
        for path in file_paths:
            if not path.is_file():
                raise _missing_file_error(self, path, name)
        return file_paths

    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Find the bytes of manifest rows; return their locations. Bytes that lie in repos on the Hub (the
        description's `base`, or the parts of a row) are fetched."""
        requests = fetching.requests_of_rows(_repo_of_bytes(self, described), described, rows)
        fetched = iter(self._fetch(described.name, requests))
        local_rows = manifest.take_rows(rows, [i for i, request in enumerate(requests) if request is None])
        local = iter(self._locate_files(described, local_rows) if local_rows.num_rows else [])
        return [next(local if request is None else fetched) for request in requests]

    def locate_tensors(
        self, described: manifest.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Find the bytes of some tensors of manifest rows; of rows whose bytes lie in repos on the Hub, fetch those of
        these tensors only. Return for each name the locations of the tensor, or of its member."""
        requests = fetching.requests_of_rows(_repo_of_bytes(self, described), described, rows)
        fetched_requests = [request for request in requests if request is not None]
        if len(fetched_requests) < len(requests):
            return super().locate_tensors(described, rows, names)
        return fetching.fetch_tensors(self.display_name, described.name, fetched_requests, names, self.check)

    def _fetch(self, collection: str, requests: Iterable[fetching.MemberRequest | None]) -> list[Location]:
        fetched_requests = [request for request in requests if request is not None]
        if not fetched_requests:
            return []
        return fetching.fetch_members(self.display_name, collection, fetched_requests, check=self.check)

    def _locate_files(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows whose files are in the folder; return their locations."""
        column_values = (rows.column(c).to_pylist() for c in ("path", "offset", "layout"))
        paths, offsets, layout_keys = column_values
        local_path_of = {path: self.local_path(path) for path in set(paths)}
        locations = [
            Location(key[0], tensor_prefix(*key), local_path_of[path], offset, described.layouts[layout_key])
            for key, path, offset, layout_key in zip(snapshot_keys(rows), paths, offsets, layout_keys, strict=True)
        ]
        if self.check:
            check_hashes(locations, rows.column("sha256").to_pylist())
        return locations

    def list_files(self, folder: str) -> list[str]:
        """List all files below a folder, following links but visiting each folder once; return their paths in the
        source."""
        paths, visited_folders = list[str](), set[tuple[int, int]]()
        for folder_path, subfolder_names, file_names in os.walk(self.root / folder, followlinks=True):
            folder_stat = Path(folder_path).stat()
            if (folder_stat.st_dev, folder_stat.st_ino) in visited_folders:
                subfolder_names[:] = []
                continue
            visited_folders.add((folder_stat.st_dev, folder_stat.st_ino))
            paths += [Path(folder_path, name).relative_to(self.root).as_posix() for name in file_names]
        return sorted(paths)

    def local_path(self, source_path: str) -> Path:
        """Find a file that a manifest names; return the path on this disk.

        Raises:
            DamagedError: the path or a link on it leads out of the source.
            SourceNotFound: there is no such file.
        """
        path = self.root / source_path
        path_problem, missing_reason = manifest.path_problem(source_path), ""
        try:
            if not path_problem and not any(
                path.resolve().is_relative_to(folder.resolve()) for folder in self.allowed_folders()
            ):
                path_problem = f"a link to {path.resolve()}"
            elif not path_problem and not path.is_file():
                missing_reason = "no such file"
        except (OSError, RuntimeError) as error:  # The path is too long, or links form a circle.
            missing_reason = str(error)
        if path_problem:
            raise DamagedError(
                f"path {source_path!r} in a manifest of {self.label}",
                expected="a file inside the source",
                found=path_problem,
                path=source_path,
            )
        if missing_reason:
            raise SourceNotFound(
                f"file {source_path} of source {self.label}",
                expected="a file, since the manifest names it",
                found=missing_reason,
                do="Get the source again, or select members of other files",
                path=path,
            )
        return path

    def allowed_folders(self) -> list[Path]:
        """Return the folders that links inside the source may lead into."""
        if self.label == EMBEDDED:  # Installers may link the files of a package from their own cache.
            return [Path(self.root.anchor)]
        if self.root.parent.name == "snapshots" and self.root.parents[1].name.startswith("datasets--"):
            # A commit in the cache of the Hub's client consists of links to the client's blobs.
            return [self.root.parents[2]]
        return [self.root]


@dataclass(frozen=True)
class HubSource(Source):
    """A source that is a Hub repo at one commit; its root is the commit's folder in the cache of the Hub's client."""

    repo: hub.Repo

    @classmethod
    def of(cls, repo: hub.Repo) -> HubSource:
        """Return the source of a repo at a commit."""
        return cls(hub.snapshot(repo), repo.label, repo)

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return str(self.repo)

    def collections(self) -> list[str]:
        """Return the names of the source's collections: collections with a manifest, and collections of the catalog
        that lie in archives."""
        manifest_names = [Path(p).stem for p in hub.list_files(self.repo, "manifests") if p.endswith(".parquet")]
        return sorted(
            {
                *manifest_names,
                *(listing.name for listing, archives in catalog.archived_listings() if self.list_archives(archives)),
            }
        )

    def has_manifest(self, name: str) -> bool:
        """Say whether a collection has a manifest in this source."""
        return hub.has_file(self.repo, f"manifests/{catalog.check_name(name)}.parquet")

    def list_archives(self, archives: Archives) -> list[str]:
        """List the archives of a collection that the catalog describes; return their paths."""
        return indexing.list_on_hub(self.repo, archives)

    def open_archives(self, archive_paths: list[str]) -> list[OpenedArchive]:
        """Index archives of the source; return them opened."""
        return indexing.open_remote(self.repo, archive_paths, self.check)

    def commit(self, name: str) -> str:
        """Return the repo's commit, which is the version of all its collections."""
        return self.repo.commit

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Fetch and check a collection's description and manifest; return both.

        Where the client's cache does not say which hash a file should have, a file that can't be read is fetched again.
        """
        source_paths = [f"manifests/{catalog.check_name(name)}.{suffix}" for suffix in ("parquet", "json")]
        local_paths = [self._fetch_path(source_path, name) for source_path in source_paths]
        try:
            return _read_collection_files(name, local_paths[0], local_paths[1])
        except (FormatError, DamagedError):
            unchecked_paths = [path for path in local_paths if not hub.has_announced_hash(path)]
            if not unchecked_paths or hub.is_offline():
                raise
        for path in unchecked_paths:
            hub.drop_whole_file(self.repo, path)
        local_paths = [self._fetch_path(source_path, name) for source_path in source_paths]
        return _read_collection_files(name, local_paths[0], local_paths[1])

    def open_collection(self, name: str) -> tuple[Description, selection.Rows]:
        """Fetch a collection's description, and the manifest if it is small; return the description, and the manifest's
        rows to select from."""
        source_paths = [f"manifests/{catalog.check_name(name)}.{x}" for x in ("parquet", "json")]
        parts = self._found(source_paths[0], name, lambda path: PartialFile.of(self.repo, path))
        description_path = self._fetch_path(source_paths[1], name)
        if parts is not None:
            return _open_parts_once(name, parts, description_path, file_stamp(description_path))
        manifest_path = self._fetch_path(source_paths[0], name)
        if all(hub.has_announced_hash(path) for path in (manifest_path, description_path)):
            return _open_collection_files(name, manifest_path, description_path)
        return super().open_collection(name)

    def _fetch_path(self, source_path: str, collection: str) -> Path:
        return self._found(source_path, collection, self.local_path)

    def _found(self, source_path: str, collection: str, find: Callable[[str], T]) -> T:
        """Find a manifest or description; return the result of `find`.

        Raises:
            CollectionNotFound, SourceNotFound: the repo has no such file.
        """
        try:
            return find(source_path)
        except SourceNotFound as error:
            if error.path != source_path:  # The repo or the commit is missing, not the file.
                raise
            raise _missing_file_error(self, self.root / source_path, collection) from error

    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Fetch the missing bytes of manifest rows together; return the locations of all rows."""
        repo = _repo_of_bytes(self, described) or self.repo
        return fetching.fetch_rows(repo, described, rows, check=self.check)

    def locate_tensors(
        self, described: manifest.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Fetch the missing bytes of some tensors of manifest rows together; return for each name the locations of the
        tensor."""
        repo = _repo_of_bytes(self, described) or self.repo
        requests = [r for r in fetching.requests_of_rows(repo, described, rows) if r is not None]
        return fetching.fetch_tensors(str(repo), described.name, requests, names, self.check)

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder of the repo; return their paths, [] if there is no such folder."""
        return hub.list_files(self.repo, folder, recursive=True)

    def local_path(self, source_path: str) -> Path:
        """Fetch a whole file; return its path."""
        return hub.fetch_file(self.repo, source_path, self.check)


def _repo_of_bytes(source: Source, described: manifest.DescriptionWithLayouts) -> hub.Repo | None:
    """Return the repo that holds the bytes of rows without parts; None if they are files of a folder."""
    return hub.resolve_address(described.base) if described.base else source.repo


def _split_by_place(
    requests: Iterable[fetching.MemberRequest],
) -> tuple[list[fetching.MemberRequest], list[fetching.MemberRequest]]:
    """Return the requests for bytes on the Hub, and those for bytes in a folder on the web."""
    on_hub, on_web = list[fetching.MemberRequest](), list[fetching.MemberRequest]()
    for request in requests:
        (on_hub if isinstance(request.first.file[0], hub.Repo) else on_web).append(request)
    return on_hub, on_web


def _layout_keys(rows: pa.Table) -> list[str]:
    """Return the keys of the layouts that rows name, each once."""
    return list(dict.fromkeys(key for key in rows.column("layout").to_pylist() if key is not None))


def _missing_file_error(source: Source, path: Path, collection: str) -> ZooError:
    """Return the error for a collection whose manifest or description is missing in a source."""
    if path.suffix == ".parquet":
        return catalog.collection_not_found(collection, source.collections(), f"source {source.label}")
    return SourceNotFound(
        f"source {source.label}",
        expected=f"{path.relative_to(source.root)} beside the manifest",
        found="no such file",
        collection=collection,
        path=path,
    )


def _read_collection_files(
    collection: str, manifest_path: Path, description_path: Path
) -> tuple[Description, pa.Table]:
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
    description = _read_description(collection, description_path)
    rows = manifest.read_manifest(manifest_path)
    manifest.check_rows(rows, description, manifest_path)
    return description, rows


def _read_description(name: str, path: Path) -> Description:
    description = Description.from_json(catalog.read_json(path), path)
    if description.name != name:
        raise FormatError(
            f"description {path}",
            expected=f"the name {name!r}, as in the file's name",
            found=repr(description.name[:80]),
            path=path,
        )
    return description


def _open_collection_files(
    name: str, manifest_path: Path, description_path: Path
) -> tuple[Description, selection.Rows]:
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

    description = _read_description(name, description_path)
    return description, manifest.ManifestFile(open_manifest, manifest_path, description=description)


@lru_cache(maxsize=32)
def _open_parts_once(
    name: str, parts: PartialFile, description_path: Path, stamp: tuple[int, ...]
) -> tuple[Description, manifest.ManifestFile]:
    """Read a description, and the footer of a large manifest on the Hub; return the description and the manifest."""
    description = _read_description(name, description_path)
    parts.fetch_footer()
    return description, manifest.ManifestFile(parts.open, parts.path, description=description, parts=parts)


@lru_cache(maxsize=64)
def _hash_file_once(path: Path, stamp: tuple[int, ...]) -> bytes:
    """Return the SHA-256 digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@dataclass(frozen=True)
class ArchiveSource(Source):
    """A source that consists of the archives of one collection in a folder or repo. Other files than members are read
    from the folder or repo.

    Args:
        base_source: the folder or repo that contains the archives.
        listing: the catalog's name, title and other fields of the collection.
        archives: the catalog's facts on the archives.
    """

    base_source: FolderSource | HubSource
    listing: Listing
    archives: Archives

    @classmethod
    def of(cls, base_source: FolderSource | HubSource, listing: Listing, archives: Archives) -> ArchiveSource:
        """Return the source that reads a collection's archives in a folder or repo."""
        return cls(
            base_source.root,
            base_source.label,
            base_source.repo,
            base_source,
            listing,
            archives,
            check=base_source.check,
        )

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return self.base_source.display_name

    def collections(self) -> list[str]:
        """Return the names of the collections in the folder or repo."""
        return self.base_source.collections()

    def commit(self, name: str) -> str:
        """Return the version of the collection: the repo's commit, or for a folder a hash of the members' locations."""
        if self.repo is not None:
            return self.repo.commit
        keys_and_locations = [
            [*key, *location] for key, location in self._archived_collection().location_of_snapshot.items()
        ]
        return hashlib.sha256(json.dumps(keys_and_locations).encode()).hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Index the archives; return a description and manifest rows made from the indexes."""
        collection = self._archived_collection()
        return collection.description, collection.rows

    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Find members in the archives, and fetch the missing ones; return their locations."""
        # Descriptions with another name are of stored predictions, which are ordinary files beside the archives.
        if described.name != self.listing.name:
            return self.base_source.locate(described, rows)
        while True:
            collection = self._archived_collection()
            locations_or_requests = collection.locations_or_requests(collection.updated_rows(rows), self.repo)
            requests = [x for x in locations_or_requests if isinstance(x, fetching.MemberRequest)]
            if self.repo is None or not requests:
                return [x for x in locations_or_requests if isinstance(x, Location)]
            locations, irregular_paths = fetching.fetch_predicted(
                str(self.repo), described.name, requests, check=self.check
            )
            if not irregular_paths:
                return [locations[x] if isinstance(x, fetching.MemberRequest) else x for x in locations_or_requests]
            for source_path in irregular_paths:
                indexing.walk_remote(self.repo, source_path)

    def count_local(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        if self.repo is None or described.name != self.listing.name:
            return self.base_source.count_local(described, rows)
        collection = self._archived_collection()
        locations_or_requests = collection.locations_or_requests(collection.updated_rows(rows), self.repo)
        requests = [x for x in locations_or_requests if isinstance(x, fetching.MemberRequest)]
        return len(locations_or_requests) - len(requests) + fetching.count_cached(requests)

    def updated_rows(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows with their present locations, since reading may have shown that an archive is
        irregular."""
        return self._archived_collection().updated_rows(rows)

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder of the folder or repo; return their paths."""
        return self.base_source.list_files(folder)

    def local_path(self, source_path: str) -> Path:
        """Find a file of the folder or repo; return its path on this machine."""
        return self.base_source.local_path(source_path)

    def _archived_collection(self) -> ArchivedCollection:
        opened_archives = self.base_source.open_archives(self.base_source.list_archives(self.archives))
        collection_key = (self.listing.name, tuple((x.source_path, id(x.index)) for x in opened_archives))
        # The cached collection keeps these indexes alive, so that their ids in the key stay valid.
        if collection_key not in _archived_collections:
            _archived_collections[collection_key] = ArchivedCollection.of(
                self.listing, self.archives, opened_archives, self.label
            )
        return _archived_collections[collection_key]


@dataclass(frozen=True)
class ArchivedCollection:
    """A collection that lies in archives, with a description and rows like those of a manifest.

    Args:
        opened_archives: the indexed archives of the collection.
        description, rows: description and manifest rows of the collection in the archives.
        location_of_snapshot: (member, epoch) -> (path of the archive, offset in it).
    """

    opened_archives: tuple[OpenedArchive, ...]
    description: Description
    rows: pa.Table
    location_of_snapshot: Mapping[SnapshotKey, tuple[str, int]]

    @classmethod
    def of(
        cls, listing: Listing, archive_facts: Archives, opened_archives: Sequence[OpenedArchive], label: str
    ) -> ArchivedCollection:
        """Make description and manifest rows from the indexes of archives; return the collection.

        Args:
            listing, archive_facts: the catalog's fields of the collection, and its facts on the archives.
            opened_archives: the opened archives of the collection.
            label: label of the source, for error texts.

        Raises:
            DamagedError, LayoutError: the archives have no members, or members of an unknown network.
            FormatError: the network has another number of classes than the catalog states.
        """
        rows, layouts, network_fields = archives.rows_of_archives(
            {archive.source_path: archive.index for archive in opened_archives}
        )
        link_texts = [
            f"{other_file.name} ({other_file.reason})"
            for archive in opened_archives
            for other_file in archive.index.others
            if other_file.reason in archives.LINK_KINDS
        ]
        if link_texts:
            warnings.warn(
                f"{len(link_texts)} {'link' if len(link_texts) == 1 else 'links'} in the archives of {listing.name} "
                f"in {label} left out: {first_few([one_line(link) for link in link_texts], 3)}. "
                "Their bytes are in the tar under another name.",
                stacklevel=2,
            )
        if len(archive_facts.classes) != network_fields["arguments"].get("classes", len(archive_facts.classes)):
            raise FormatError(
                f"archives of {listing.name} in {label}",
                expected=f"a net for {len(archive_facts.classes)} classes",
                found=f"{network_fields['architecture']} with {network_fields['arguments']}",
            )
        description = Description(
            listing.name, listing.title, network_fields["architecture"], network_fields["arguments"],
            listing.dataset, archive_facts.classes, archive_facts.preprocessing, layouts, listing.licence,
            archive_facts.citation,
        )  # fmt: skip
        manifest_table = manifest.build_manifest(rows)
        manifest.check_rows(manifest_table, description, Path(f"of {listing.name} in {label}"))
        paths_and_offsets = zip(
            manifest_table.column("path").to_pylist(), manifest_table.column("offset").to_pylist(), strict=True
        )
        return cls(
            tuple(opened_archives),
            description,
            manifest_table,
            dict(zip(snapshot_keys(manifest_table), paths_and_offsets, strict=True)),
        )

    def updated_rows(self, rows: pa.Table) -> pa.Table:
        """Return rows with the locations of their members in the archives, which were only predicted before.

        Raises:
            DamagedError: the file of a row turned out not to be a member.
        """
        keys = snapshot_keys(rows)
        old_locations = zip(rows.column("path").to_pylist(), rows.column("offset").to_pylist(), strict=True)
        if all(
            self.location_of_snapshot.get(key) == location for key, location in zip(keys, old_locations, strict=True)
        ):
            return rows
        position_of_key = {key: position for position, key in enumerate(snapshot_keys(self.rows))}
        lost_keys = [key for key in keys if key not in position_of_key]
        if lost_keys:
            raise DamagedError(
                f"member {lost_keys[0][0]} of {self.description.name}", found="no such file once all headers were read",
                expected="its file in the archive, as the regular names suggest", do="Load the collection again",
                member=lost_keys[0][0],
            )  # fmt: skip
        new_rows = manifest.take_rows(self.rows, [position_of_key[key] for key in keys])
        manifest.check_located(new_rows, self.description.name)
        return new_rows

    def locations_or_requests(self, rows: pa.Table, repo: hub.Repo | None) -> list[Location | fetching.MemberRequest]:
        """Return, for each member, its location if it is local, or a request for its bytes if it is in a repo on the
        Hub."""
        archive_of_path = {x.source_path: x for x in self.opened_archives}
        columns = (rows.column(c).to_pylist() for c in ("path", "offset", "layout"))
        return [
            _locate_member(archive_of_path[source_path], repo, key, offset, self.description.layouts[layout_key])
            for key, source_path, offset, layout_key in zip(snapshot_keys(rows), *columns, strict=True)
        ]


def _locate_member(
    archive: OpenedArchive, repo: hub.Repo | None, key: SnapshotKey, offset: int, layout: Layout
) -> Location | fetching.MemberRequest:
    """Return the location of the member whose tensors begin at an offset of an archive; for an archive in a repo on the
    Hub, return a request for its bytes."""
    if archive.path is not None:
        return Location(key[0], tensor_prefix(*key), archive.path, offset, layout)
    if repo is None:
        raise SourceNotFound(f"archive {archive.source_path}", expected="a file in the folder", found="none")
    index, entry = archive.index, archive.index.entry_at(offset)
    is_predicted = not entry.verified
    proof_nbytes = entry.data_offset - entry.start if is_predicted else 0
    proves_member = partial(archives.is_as_predicted, entry=entry, index=index) if is_predicted else None
    return fetching.MemberRequest.of_range(
        (repo, archive.source_path), key, tensor_prefix(*key), offset, layout, None, proof_nbytes,
        name_in_archive=entry.name, proves_member=proves_member,
    )  # fmt: skip


@dataclass(frozen=True)
class WebSource(Source):
    """A source that is a folder on the web. Such a folder can't be listed, so that its collections have to be named.

    Args:
        folder: the folder.
    """

    folder: WebFolder

    @classmethod
    def of(cls, folder: WebFolder) -> WebSource:
        """Return the source in a folder on the web."""
        return cls(hub.cache_root() / hub.folder_name(folder.cache_name), folder.label, None, folder)

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return self.label

    @property
    def uses_cache(self) -> bool:
        """Whether members' bytes pass through the member cache."""
        return True

    def collections(self) -> list[str]:
        """Raise an error, because a folder on the web can't be listed."""
        raise SourceNotFound(
            f"collections of {self.label}",
            expected="the name of one",
            found="a folder on the web, which can't be listed",
            do="Give the name that the folder's producer gave it",
        )

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits."""
        digest = hashlib.sha256()
        for path in self._collection_paths(name):
            digest.update(_hash_file_once(path, file_stamp(path)))
        return digest.hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Fetch and check a collection's description and manifest; return both."""
        return _read_collection_files(name, *self._collection_paths(name))

    def open_collection(self, name: str) -> tuple[Description, selection.Rows]:
        """Fetch a collection's description and manifest; return the description, and the rows to select from."""
        return _open_collection_files(name, *self._collection_paths(name))

    def _collection_paths(self, name: str) -> tuple[Path, Path]:
        """Return the paths of the fetched manifest and description, which are asked for once by each source object."""
        paths = self._fetched_paths
        if name not in paths:
            manifest_path = f"manifests/{catalog.check_name(name)}.parquet"
            try:
                paths[name] = self.local_path(manifest_path), self.local_path(manifest_path[:-8] + ".json")
            except SourceNotFound as error:
                raise CollectionNotFound(
                    f"collection {name!r} of {self.label}", expected=f"{manifest_path} and .json there",
                    found=error.found, do="Check the address and the name: a folder on the web can't be listed",
                    collection=name,
                ) from error  # fmt: skip
        return paths[name]

    @cached_property
    def _fetched_paths(self) -> dict[str, tuple[Path, Path]]:
        return {}

    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Fetch the missing bytes of manifest rows together; return the locations of all rows."""
        requests = self._requests(described, rows)
        on_hub, on_web = _split_by_place(requests)
        from_web = web_members.fetch_members(self.folder, described.name, on_web, self.check)
        from_hub = fetching.fetch_members(self.label, described.name, on_hub, check=self.check)
        locations = dict(zip([*on_web, *on_hub], [*from_web, *from_hub], strict=True))
        return [locations[request] for request in requests]

    def locate_tensors(
        self, described: manifest.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Fetch the missing bytes of manifest rows, of rows in repos on the Hub those of some tensors only; return for
        each name the locations of the tensor, or of its member."""
        on_hub, on_web = _split_by_place(self._requests(described, rows))
        if on_web:
            return super().locate_tensors(described, rows, names)
        return fetching.fetch_tensors(self.label, described.name, on_hub, names, self.check)

    def _requests(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[fetching.MemberRequest]:
        place = _repo_of_bytes(self, described) or self.folder
        return [request for request in fetching.requests_of_rows(place, described, rows) if request is not None]

    def count_local(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        on_hub, on_web = _split_by_place(self._requests(described, rows))
        return web_members.count_cached(self.folder, on_web) + fetching.count_cached(on_hub)

    def list_files(self, folder: str) -> list[str]:
        """Return [], because a folder on the web can't be listed."""
        return []

    def local_path(self, source_path: str) -> Path:
        """Fetch a whole file; return its path on this machine."""
        return web_members.fetch_file(self.folder, source_path)


@dataclass(frozen=True)
class DrawsSource(Source):
    """A source that consists of the pickled draws of one collection of the catalog, in a folder on this machine or the
    web.

    Args:
        folder: the folder.
        listing: the catalog's name, title and other fields of the collection.
        facts: the catalog's facts on the draws.
    """

    folder: WebFolder | LocalFolder
    listing: Listing
    facts: PickledDraws

    @classmethod
    def of(cls, base_source: FolderSource | WebSource, listing: Listing, facts: PickledDraws) -> DrawsSource:
        """Return the source that reads a collection's draws in a folder."""
        folder = base_source.folder if isinstance(base_source, WebSource) else LocalFolder(base_source.root)
        return cls(base_source.root, base_source.label, None, folder, listing, facts, check=base_source.check)

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return self.label

    @property
    def uses_cache(self) -> bool:
        """Whether members' bytes pass through the member cache."""
        return True

    @cached_property
    def _index(self) -> DrawIndex:
        return pickled_draws.open_index(self.folder, self.listing, self.facts)

    def collections(self) -> list[str]:
        """Return the name of the collection."""
        return [self.listing.name]

    def commit(self, name: str) -> str:
        """Hash the ETags and lengths of the files; return 40 hex digits."""
        return self._index.commit

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Make the description and the manifest from the index of the files; return both."""
        return self._index.description(self.listing, self.facts), self._index.rows(self.listing)

    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Read the files of draws that are not in the cache; return the locations of the draws."""
        return pickled_draws.fetch_draws(self.folder, self.listing, self._index, rows, self.check)

    def count_local(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose draws are in the cache; nothing is fetched."""
        return pickled_draws.count_cached(self.folder, self._index, rows)

    def transfer_nbytes(self, rows: pa.Table) -> int:
        """Return the number of bytes of the files of manifest rows: a file is read whole, with all its draws."""
        return sum(self._index.files[path][1] for path in set(rows.column("path").to_pylist()))

    def list_files(self, folder: str) -> list[str]:
        """Return [], because the folder has nothing but files of draws."""
        return []

    def local_path(self, source_path: str) -> Path:
        """Raise an error, because no file but the draws is in the folder."""
        raise SourceNotFound(f"file {source_path} of {self.label}", expected="a file of draws", found="another name")


def open_source(source: str | Path | None, collection: str, check: bool = False) -> Source:
    """Open the source that contains a collection; return it.

    Args:
        source: a folder, a file URI, an address on the Hub or the web, "embedded", or None for the first source that
            the catalog names.
        collection: name of the collection; "" for the whole folder or repo.
        check: whether each member is hashed when its location is found.

    Raises:
        CollectionNotFound: no source is given, and the catalog has no such name.
        SourceNotFound: the folder does not exist or has no manifests, or the repo or revision does not exist.
        AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
    """
    folder_or_repo = _open_folder_or_repo(_source_in_catalog(collection) if source is None else source, collection)
    return collection_source(collection, replace(folder_or_repo, check=check))


def _source_in_catalog(collection: str) -> str:
    """Return the first source that the catalog names for a collection.

    Raises:
        CollectionNotFound: the catalog has no such name; if a folder with collections has it, the error says so.
    """
    try:
        return catalog.find_listing(collection).sources[0]
    except CollectionNotFound as error:
        folder = str(collection)
        if folder and "://" not in folder:
            with suppress(SourceNotFound):
                if names := _open_folder_or_repo(folder).collections():
                    load_text = f"zoo.load({names[0]!r}, source={folder!r}), or --source {folder} {names[0]}"
                    error.do = f"{folder} is a folder with {first_few(names, 3)}: {load_text}"
        raise


def collection_source(collection: str, base_source: Source) -> Source:
    """Choose whether a collection is read by its manifest, from archives or from pickled draws; return the source.

    Args:
        collection: name of the collection.
        base_source: the folder or repo; it is returned unchanged if it has a manifest of the collection, or no
            archives.
    """
    listing = catalog.collections().get(collection)
    if listing is not None and listing.draws is not None and isinstance(base_source, FolderSource | WebSource):
        has_manifest = isinstance(base_source, FolderSource) and base_source.has_manifest(collection)
        return base_source if has_manifest else DrawsSource.of(base_source, listing, listing.draws)
    if listing is None or listing.archives is None or not isinstance(base_source, FolderSource | HubSource):
        return base_source
    if base_source.has_manifest(collection) or not base_source.list_archives(listing.archives):
        return base_source
    return ArchiveSource.of(base_source, listing, listing.archives)


def _open_folder_or_repo(source: str | Path, collection: str = "") -> FolderSource | HubSource | WebSource:
    """Return the folder or repo that an address or path names, as a source; `collection` is wanted from it."""
    if str(source) == EMBEDDED:
        return FolderSource(EMBEDDED_ROOT, EMBEDDED)
    address_or_path = str(source)
    if address_or_path.startswith(hub.ADDRESS_SCHEME):
        if revisions.parse_model_address(revisions.expand_braces(address_or_path)[0]):
            name = collection if collection in catalog.collections() else "NAME"
            command = f"zoo-cli import '{address_or_path}' --revisions 'step*' --collection {name} --out index/"
            raise SourceNotFound(
                f"source {address_or_path}", expected="a folder or data set repo with manifests/",
                found="model repos, which have none",
                do=f"Index them once: `{command}`; then give source='index/'",
            )  # fmt: skip
        return HubSource.of(hub.resolve_address(address_or_path))
    if web.is_web_address(address_or_path):
        return WebSource.of(WebFolder.of(address_or_path))
    if address_or_path.startswith("file:///"):
        address_or_path = unquote(urlsplit(address_or_path).path, sys.getfilesystemencoding(), "surrogateescape")
    elif "://" in address_or_path:
        raise SourceNotFound(
            f"source {address_or_path}",
            expected="a folder, hf://datasets/ORG/NAME[@REVISION], https://HOST/PATH or gs://BUCKET/PATH",
            found="another address",
        )
    root, problem = Path(address_or_path), ""
    try:
        root = root.expanduser()
        has_archives = any((root / archive_facts.folder).is_dir() for _, archive_facts in catalog.archived_listings())
        listing = catalog.collections().get(collection)
        has_draws = listing is not None and listing.draws is not None and (root / listing.draws.paths[0]).is_file()
        if not (root / "manifests").is_dir() and not has_archives and not has_draws:
            problem_of_kind = {root.is_dir(): "a folder without manifests/", root.is_file(): "a file"}
            problem = problem_of_kind.get(True, "nothing there")
    except (OSError, RuntimeError) as error:  # The path is too long, or refers to the home folder of an unknown user.
        problem = str(error)
    if problem:
        is_repo_id = problem == "nothing there" and _REPO_ID.fullmatch(address_or_path)
        hub_advice = f", or for a repo of the Hub {hub.ADDRESS_SCHEME}datasets/{address_or_path}" if is_repo_id else ""
        raise SourceNotFound(
            f"source {address_or_path}",
            expected="a folder with manifests/NAME.parquet in it",
            found=problem,
            do=f"Give the folder that holds manifests/ and shards/{hub_advice}",
            path=root,
        )
    return FolderSource(root.absolute(), root.absolute().as_uri())


@dataclass(frozen=True)
class SelectedMembers:
    """Selected members of a collection: their manifest rows, the description, and the source of the members.

    Args:
        source, commit: the source, and the commit or hash that identifies its version.
        description: description of the collection.
        rows: the manifest rows of the selected members.
    """

    source: Source
    commit: str
    description: Description
    rows: pa.Table

    @cached_property
    def of(self) -> int:
        """Number of members in the whole collection."""
        rows = self.source.open_collection(self.description.name)[1].read(["member"])
        return int(pc.count_distinct(rows.column("member")).as_py())

    @property
    def citation(self) -> str:
        return selection.cite(self.source.label, self.commit, self.description.name, self.rows)


def select_members(
    collection: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
    check: bool = False,
) -> SelectedMembers:
    """Select members of a collection by its manifest, without importing torch or pandas; return them.

    The arguments and errors are those of `zoo.load`.
    """
    citation = selection.parse_citation(str(collection))
    if citation:
        if any(x is not None for x in (n, where, members, sample)) or snapshots:
            raise SelectionError("selection", expected="a citation alone", found="a citation with another selection")
        collection, members = citation.name, citation.ids
        source = citation.source if source is None else source
    opened_source = open_source(source, collection, check)
    description, manifest_rows = opened_source.open_collection(collection)
    commit = opened_source.commit(collection)
    try:
        selected_rows = selection.select_rows(
            manifest_rows, collection, n=n, where=where, members=members, sample=sample, snapshots=snapshots
        )
    except (MemberNotFound, SelectionError) as error:
        if citation and citation.commit != commit:
            raise selection.source_changed(citation, commit, str(error).rstrip(".")) from error
        raise
    if citation:
        selection.verify_citation(citation, commit, selected_rows)
    return SelectedMembers(opened_source, commit, description, selected_rows)
