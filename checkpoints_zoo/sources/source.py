"""What every source can do. A folder, a repo of the Hub and archives in either are read in the same way.

| kind | where | its manifest |
|---|---|---|
| `FolderSource` | `folder_source.py` | a file, pinned by its hash |
| `HubSource` | `hub_source.py` | a file at a commit, fetched once |
| `ArchiveSource` | `archives/archive_source.py` | an index of archives, in a folder or a repo |

`finding.resolve` chooses. What a manifest says is checked before a byte of a shard is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import FormatError, SourceNotFound, ZooError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.shard_files import Location, stamp_of
from checkpoints_zoo.sources.hub import Repo


@dataclass(frozen=True)
class Source(ABC):
    """A place with collections: manifests, the bytes that they name, and predictions beside them.

    Args:
        root: the folder; of a repo, the one of its commit in the client's cache.
        label: how a citation names it: "embedded", a file URI, or an address on the Hub.
        repo: on the Hub, at its commit; None for what lies on this machine.
    """

    root: Path
    label: str
    repo: Repo | None

    @property
    @abstractmethod
    def shown(self) -> str:
        """What to call it to a reader."""

    @abstractmethod
    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""

    @abstractmethod
    def commit(self, name: str) -> str:
        """Return 40 hex digits that pin what the source says of a collection."""

    @abstractmethod
    def read(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both.

        Raises:
            CollectionNotFound: the source has no such manifest.
            SourceNotFound: the description is missing.
            FormatError, DamagedError: either breaks the format, or a path leads out of the source.
            LayoutError, StorageError, NetworkError, AccessError: archives, or a repo, that can't be read.
        """

    @abstractmethod
    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows, each of which has some; return where they lie on this machine.

        What is missing here is fetched in one go.

        Args:
            described: the description of the collection, or of stored predictions.
            rows: of its manifest.

        Raises:
            DamagedError, SourceNotFound: see `file`.
            NetworkError, AccessError, StorageError: see `fetching.local`.
        """

    def renewed(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows as they are now that members were read; others than before only out of archives.

        Raises:
            DamagedError: one of them is no member after all.
        """
        return rows

    @abstractmethod
    def files(self, folder: str) -> list[str]:
        """List the files below a folder of the source; return their paths in it, [] where there is no such folder."""

    @abstractmethod
    def file(self, inside: str) -> Path:
        """Find a file that a manifest names, fetching it where it is not here; return its path.

        Raises:
            DamagedError: the path, or a link on it, leads out of the source; or other bytes came than were announced.
            SourceNotFound: there is no such file.
            NetworkError, AccessError: a repo that can't be read.
        """


def not_there(source: Source, path: Path, name: str) -> ZooError:
    """Return the error for a collection whose manifest or description is not in a source."""
    if path.suffix == ".parquet":
        return catalog.not_found(name, source.collections(), f"source {source.label}")
    return SourceNotFound(
        f"source {source.label}",
        expected=f"{path.relative_to(source.root)} beside the manifest",
        found="no such file",
        collection=name,
        path=path,
    )


def read_checked(name: str, table: Path, words: Path) -> tuple[Description, pa.Table]:
    """Read and check a manifest and the description beside it, once for each state of the two files; return both.

    Args:
        name: of the collection.
        table, words: the files.

    Raises:
        FormatError, DamagedError: either breaks the format.
    """
    return _checked(name, table, words, (stamp_of(table), stamp_of(words)))


@lru_cache(maxsize=32)
def _checked(name: str, table: Path, words: Path, stamp: tuple[tuple[int, ...], ...]) -> tuple[Description, pa.Table]:
    description = Description.from_json(catalog.read_json(words), words)
    if description.name != name:
        raise FormatError(
            f"description {words}",
            expected=f"the name {name!r}, as the file's",
            found=repr(description.name[:80]),
            path=words,
        )
    rows = manifest.read(table)
    manifest.validate(rows, description, table)
    return description, rows
