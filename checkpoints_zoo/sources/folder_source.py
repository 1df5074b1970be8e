"""A source that is a folder on this machine, with manifests and shards."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, SourceNotFound
from checkpoints_zoo.formats import arrow_tables, catalog, layout, source_paths
from checkpoints_zoo.formats.catalog import Archives
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.member_parts import PARTS_COLUMN
from checkpoints_zoo.formats.shard_files import Location, check_hashes, tensor_prefix
from checkpoints_zoo.sources import fetching
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import OpenedArchive
from checkpoints_zoo.sources.member_requests import MemberRequest, requests_of_rows
from checkpoints_zoo.sources.source import ManifestSource

EMBEDDED = "embedded"
EMBEDDED_ROOT = Path(__file__).parents[1] / "embedded"


@dataclass(frozen=True)
class FolderSource(ManifestSource):
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

    def collection_paths(self, name: str) -> tuple[Path, Path]:
        """Return the paths of a collection's manifest and description, which exist."""
        file_paths = self.manifest_path(name), self.description_path(name)
        for path in file_paths:
            if not path.is_file():
                raise self.missing_file_error(path, name)
        return file_paths

    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Find the bytes of manifest rows; return their locations. Bytes that lie in repos on the Hub (the
        description's `base`, or the parts of a row) are fetched."""
        if not described.base and PARTS_COLUMN not in rows.column_names:  # All bytes lie in the folder.
            return self._locate_files(described, rows)
        requests = requests_of_rows(self.repo_of_bytes(described), described, rows)
        fetched = iter(self._fetch(described.name, requests))
        local_rows = arrow_tables.take_rows(rows, [i for i, request in enumerate(requests) if request is None])
        local = iter(self._locate_files(described, local_rows) if local_rows.num_rows else [])
        return [next(local if request is None else fetched) for request in requests]

    def locate_tensors(
        self, described: layout.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Find the bytes of some tensors of manifest rows; of rows whose bytes lie in repos on the Hub, fetch those of
        these tensors only. Return for each name the locations of the tensor, or of its member."""
        requests = requests_of_rows(self.repo_of_bytes(described), described, rows)
        fetched_requests = [request for request in requests if request is not None]
        if len(fetched_requests) < len(requests):
            return super().locate_tensors(described, rows, names)
        return fetching.fetch_tensors(self.display_name, described.name, fetched_requests, names, self.check)

    def _fetch(self, collection: str, requests: Iterable[MemberRequest | None]) -> list[Location]:
        fetched_requests = [request for request in requests if request is not None]
        if not fetched_requests:
            return []
        return fetching.fetch_members(self.display_name, collection, fetched_requests, check=self.check)

    def _locate_files(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
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
        path_problem, missing_reason = source_paths.path_refusal(source_path), ""
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
