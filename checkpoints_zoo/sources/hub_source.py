"""A repo of the Hub at one commit. Manifests come whole through the client's cache, members by byte ranges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Archives, Description
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.sources import fetching, hub
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import Opened
from checkpoints_zoo.sources.source import Source, not_there, read_checked


@dataclass(frozen=True)
class HubSource(Source):
    """A repo of the Hub at one commit; its root is the folder of that commit in the client's cache."""

    repo: hub.Repo

    @classmethod
    def of(cls, repo: hub.Repo) -> HubSource:
        """Return the source that a repo at a commit is."""
        return cls(hub.snapshot(repo), repo.label, repo)

    @property
    def shown(self) -> str:
        """What to call it to a reader."""
        return str(self.repo)

    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""
        manifests = [Path(p).stem for p in hub.files(self.repo, "manifests") if p.endswith(".parquet")]
        return sorted({*manifests, *(x.name for x, archives in catalog.in_archives() if self.archives(archives))})

    def has(self, name: str) -> bool:
        """Say whether a collection has a manifest here."""
        return hub.has(self.repo, f"manifests/{catalog.check_name(name)}.parquet")

    def archives(self, known: Archives) -> list[str]:
        """List the archives of a collection of the catalog; return their paths."""
        return indexing.on_hub(self.repo, known)

    def opened(self, archives: list[str]) -> list[Opened]:
        """Index archives; return them."""
        return indexing.open_remote(self.repo, archives)

    def commit(self, name: str) -> str:
        """Return the commit, which pins every collection."""
        return self.repo.commit

    def read(self, name: str) -> tuple[Description, pa.Table]:
        """Fetch and check a collection's description and manifest; return both."""
        table, words = (self._fetched(f"manifests/{catalog.check_name(name)}.{x}", name) for x in ("parquet", "json"))
        return read_checked(name, table, words)

    def _fetched(self, inside: str, name: str) -> Path:
        try:
            return self.file(inside)
        except SourceNotFound as error:
            if error.path != inside:  # the repo or the commit is missing, not the file
                raise
            raise not_there(self, self.root / inside, name) from error

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Bring the bytes of rows to this machine, all that are missing in one go; return where they lie."""
        return fetching.bring(hub.resolve(described.base) if described.base else self.repo, described, rows)

    def files(self, folder: str) -> list[str]:
        """List the files below a folder of the repo; return their paths, [] where there is no such folder."""
        return hub.files(self.repo, folder, below=True)

    def file(self, inside: str) -> Path:
        """Fetch a whole file; return its path."""
        return hub.fetch(self.repo, inside)
