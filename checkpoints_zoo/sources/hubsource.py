"""A source on the Hub: a repo at one commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.catalog import Description, Listing
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.archives import archived, indexing
from checkpoints_zoo.sources.archives.indexing import Opened
from checkpoints_zoo.sources.source import Source, bring


@dataclass(frozen=True)
class HubSource(Source):
    """A repo of the Hub at one commit; its root is the folder of that commit in the client's cache."""

    repo: hub.Repo

    @property
    def shown(self) -> str:
        return str(self.repo)

    def _manifests(self) -> list[str]:
        return [Path(p).stem for p in hub.files(self.repo, "manifests") if p.endswith(".parquet")]

    def _has_manifest(self, name: str) -> bool:
        return hub.has(self.repo, f"manifests/{name}.parquet")

    def _archives(self, listing: Listing) -> list[str]:
        return indexing.on_hub(self.repo, listing.archives) if listing.archives else []

    def _opened(self, paths: list[str]) -> list[Opened]:
        return indexing.open_remote(self.repo, paths)

    def commit(self, name: str) -> str:
        return self.repo.commit

    def manifest_path(self, name: str) -> Path:
        return self._fetched(f"manifests/{catalog.check_name(name)}.parquet", name)

    def description_path(self, name: str) -> Path:
        return self._fetched(f"manifests/{catalog.check_name(name)}.json", name)

    def _fetched(self, inside: str, name: str) -> Path:
        try:
            return hub.fetch(self.repo, inside)
        except SourceNotFound as error:
            if error.path != inside:  # the repo or the commit is missing, not the file
                raise
            raise self._missing(self.root / inside, name) from error

    def locate(self, description: Description, rows: pa.Table) -> list[Location]:
        """Bring the bytes of rows to this machine, all that are missing in one go; return where they lie.

        Raises:
            NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: see `fetching.local`.
        """
        while found := self.archived(description.name):
            try:
                return archived.locate(self.root, self.repo, found.renewed(rows), found)
            except archived.Irregular as error:
                indexing.walk_remote(self.repo, str(error.path))
        return bring(hub.resolve(description.base) if description.base else self.repo, description, rows)
