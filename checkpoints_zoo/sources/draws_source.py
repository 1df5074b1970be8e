"""A source that consists of pickled draws in a folder on this machine or the web; an index of its files stands for the
manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats import layout
from checkpoints_zoo.formats.catalog import Description, Listing, PickledDraws
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.sources import pickled_draws
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.pickled_draws import DrawIndex, LocalFolder
from checkpoints_zoo.sources.source import Source
from checkpoints_zoo.sources.web import WebFolder
from checkpoints_zoo.sources.web_source import WebSource


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

    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Read the files of draws that are not in the cache; return the locations of the draws."""
        return pickled_draws.fetch_draws(self.folder, self.listing, self._index, rows, self.check)

    def count_local(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> int:
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
