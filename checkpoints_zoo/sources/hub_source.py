"""A source that is a repo on the Hub at one commit; members are byte ranges, which the cache stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.formats import catalog, layout, manifest, selection
from checkpoints_zoo.formats.catalog import Archives, Description
from checkpoints_zoo.formats.shard_files import Location, file_stamp
from checkpoints_zoo.sources import fetching, hub, hub_addresses, hub_cache
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import OpenedArchive
from checkpoints_zoo.sources.member_requests import requests_of_rows
from checkpoints_zoo.sources.source import (
    ManifestSource,
    open_collection_files,
    read_collection_files,
    read_description,
)
from checkpoints_zoo.sources.sparse_files import SparseHubFile

T = TypeVar("T")


@dataclass(frozen=True)
class HubSource(ManifestSource):
    """A source that is a Hub repo at one commit; its root is the commit's folder in the cache of the Hub's client."""

    repo: hub_addresses.Repo

    @classmethod
    def of(cls, repo: hub_addresses.Repo) -> HubSource:
        """Return the source of a repo at a commit."""
        return cls(hub_cache.snapshot_folder(repo), repo.label, repo)

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

    def collection_paths(self, name: str) -> tuple[Path, Path]:
        """Fetch a collection's manifest and description; return their paths."""
        source_path = f"manifests/{catalog.check_name(name)}.parquet"
        return self._fetch_path(source_path, name), self._fetch_path(source_path[:-8] + ".json", name)

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Fetch and check a collection's description and manifest; return both.

        Where the client's cache does not say which hash a file should have, a file that can't be read is fetched again.
        """
        paths = self.collection_paths(name)
        try:
            return read_collection_files(name, *paths)
        except (FormatError, DamagedError):
            unchecked_paths = [path for path in paths if not hub_cache.has_announced_hash(path)]
            if not unchecked_paths or hub_cache.is_offline():
                raise
        for path in unchecked_paths:
            hub_cache.drop_whole_file(self.repo, path)
        return super().read_collection(name)

    def open_collection(self, name: str) -> tuple[Description, selection.Rows]:
        """Fetch a collection's description, and the manifest if it is small; return the description, and the manifest's
        rows to select from."""
        source_path = f"manifests/{catalog.check_name(name)}.parquet"
        sparse_file = self._found(source_path, name, lambda path: SparseHubFile.of(self.repo, path))
        if sparse_file is not None:
            description_path = self._fetch_path(source_path[:-8] + ".json", name)
            return _open_large_manifest_once(name, sparse_file, description_path, file_stamp(description_path))
        paths = self.collection_paths(name)
        if all(hub_cache.has_announced_hash(path) for path in paths):
            return open_collection_files(name, *paths)
        description, rows = self.read_collection(name)
        return description, selection.RowsInMemory(rows)

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
            raise self.missing_file_error(self.root / source_path, collection) from error

    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Fetch the missing bytes of manifest rows together; return the locations of all rows."""
        repo = self.repo_of_bytes(described) or self.repo
        return fetching.fetch_rows(repo, described, rows, check=self.check)

    def locate_tensors(
        self, described: layout.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Fetch the missing bytes of some tensors of manifest rows together; return for each name the locations of the
        tensor."""
        repo = self.repo_of_bytes(described) or self.repo
        requests = [r for r in requests_of_rows(repo, described, rows) if r is not None]
        return fetching.fetch_tensors(str(repo), described.name, requests, names, self.check)

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder of the repo; return their paths, [] if there is no such folder."""
        return hub.list_files(self.repo, folder, recursive=True)

    def local_path(self, source_path: str) -> Path:
        """Fetch a whole file; return its path."""
        return hub.fetch_file(self.repo, source_path, self.check)


@lru_cache(maxsize=32)
def _open_large_manifest_once(
    name: str, sparse_file: SparseHubFile, description_path: Path, stamp: tuple[int, ...]
) -> tuple[Description, manifest.ManifestFile]:
    """Read a description, and the footer of a large manifest on the Hub; return the description and the manifest."""
    description = read_description(name, description_path)
    sparse_file.fetch_footer()
    return description, manifest.ManifestFile(
        sparse_file.open, sparse_file.path, description=description, sparse_file=sparse_file
    )
