"""What every source can do, and two kinds of it: a folder, and a repo of the Hub at one commit.

| kind | its manifest | its members |
|---|---|---|
| `FolderSource` | a file, pinned by its hash | files, from which it never leads out |
| `HubSource` | a file at a commit, which comes whole | byte ranges, which are kept in the cache |
| `ArchiveSource` (`archives/archive_source.py`) | an index of archives in a folder or a repo | parts of the archives |

`finding.resolve` chooses. What a manifest says is checked before a byte of a shard is read.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound, ZooError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Archives, Description
from checkpoints_zoo.formats.manifest import keys_of
from checkpoints_zoo.formats.shard_files import Location, prefix, stamp_of
from checkpoints_zoo.sources import fetching, hub
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import Opened

EMBEDDED = "embedded"
EMBEDDED_ROOT = Path(__file__).parents[1] / "embedded"


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
    repo: hub.Repo | None

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


@dataclass(frozen=True)
class FolderSource(Source):
    """A folder with `manifests/` and what they name."""

    repo: None = field(default=None, init=False, repr=False)

    @property
    def shown(self) -> str:
        """What to call it to a reader."""
        return EMBEDDED if self.label == EMBEDDED else str(self.root)

    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""
        manifests = [p.stem for p in (self.root / "manifests").glob("*.parquet")]
        return sorted({*manifests, *(x.name for x, archives in catalog.in_archives() if self.archives(archives))})

    def has(self, name: str) -> bool:
        """Say whether a collection has a manifest here."""
        return self.manifest_path(name).is_file()

    def archives(self, known: Archives) -> list[str]:
        """List the archives of a collection of the catalog; return their paths."""
        return indexing.in_folder(self.root, known)

    def opened(self, archives: list[str]) -> list[Opened]:
        """Index archives; return them."""
        return indexing.open_local(self.root, archives)

    def manifest_path(self, name: str) -> Path:
        """Return where a collection's manifest lies, or is to be written."""
        return self.root / "manifests" / f"{catalog.check_name(name)}.parquet"

    def description_path(self, name: str) -> Path:
        """Return where a collection's description lies, or is to be written."""
        return self.manifest_path(name).with_suffix(".json")

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits that pin what the source says."""
        digest = hashlib.sha256()
        for path in (self.manifest_path(name), self.description_path(name)):
            try:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
            except FileNotFoundError:
                raise _not_there(self, path, name) from None
        return digest.hexdigest()[:40]

    def read(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both."""
        paths = self.manifest_path(name), self.description_path(name)
        for path in paths:
            if not path.is_file():
                raise _not_there(self, path, name)
        return _read_checked(name, *paths)

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows; return where they lie. Those that lie in a repo of the Hub are brought here."""
        if described.base:
            return fetching.bring(hub.resolve(described.base), described, rows)
        columns = (rows.column(c).to_pylist() for c in ("member", "path", "offset", "layout"))
        members, paths, offsets, keys = columns
        files = {inside: self.file(inside) for inside in set(paths)}
        return [
            Location(m, prefix(*known), files[inside], offset, described.layouts[key])
            for m, known, inside, offset, key in zip(members, keys_of(rows), paths, offsets, keys, strict=True)
        ]

    def files(self, folder: str) -> list[str]:
        """List the files below a folder of the source, behind links too but no folder twice; return their paths."""
        found, seen = list[str](), set[tuple[int, int]]()
        for at, inside, names in os.walk(self.root / folder, followlinks=True):
            stat = Path(at).stat()
            if (stat.st_dev, stat.st_ino) in seen:
                inside[:] = []
                continue
            seen.add((stat.st_dev, stat.st_ino))
            found += [Path(at, name).relative_to(self.root).as_posix() for name in names]
        return sorted(found)

    def file(self, inside: str) -> Path:
        """Find a file that a manifest names; return its path.

        Raises:
            DamagedError: the path, or a link on it, leads out of the source.
            SourceNotFound: there is no such file.
        """
        path = self.root / inside
        problem, missing = manifest.path_problem(inside), ""
        try:
            if not problem and not any(path.resolve().is_relative_to(x.resolve()) for x in self.grounds()):
                problem = f"a link to {path.resolve()}"
            elif not problem and not path.is_file():
                missing = "no such file"
        except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
            missing = str(error)
        if problem:
            raise DamagedError(
                f"path {inside!r} in a manifest of {self.label}",
                expected="a file inside the source",
                found=problem,
                path=inside,
            )
        if missing:
            raise SourceNotFound(
                f"file {inside} of source {self.label}",
                expected="a file, since the manifest names it",
                found=missing,
                do="Get the source again, or select members of other files",
                path=path,
            )
        return path

    def grounds(self) -> list[Path]:
        """Return the folders that a link inside the source may lead into: those of whoever laid the links."""
        if self.label == EMBEDDED:  # installers link packages into their own cache
            return [Path(self.root.anchor)]
        if self.root.parent.name == "snapshots" and self.root.parents[1].name.startswith("datasets--"):
            return [self.root.parents[2]]  # a commit in the Hub client's cache: links to its blobs
        return [self.root]


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
        return _read_checked(name, table, words)

    def _fetched(self, inside: str, name: str) -> Path:
        try:
            return self.file(inside)
        except SourceNotFound as error:
            if error.path != inside:  # the repo or the commit is missing, not the file
                raise
            raise _not_there(self, self.root / inside, name) from error

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Bring the bytes of rows to this machine, all that are missing in one go; return where they lie."""
        return fetching.bring(hub.resolve(described.base) if described.base else self.repo, described, rows)

    def files(self, folder: str) -> list[str]:
        """List the files below a folder of the repo; return their paths, [] where there is no such folder."""
        return hub.files(self.repo, folder, below=True)

    def file(self, inside: str) -> Path:
        """Fetch a whole file; return its path."""
        return hub.fetch(self.repo, inside)


def _not_there(source: Source, path: Path, name: str) -> ZooError:
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


def _read_checked(name: str, table: Path, words: Path) -> tuple[Description, pa.Table]:
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
