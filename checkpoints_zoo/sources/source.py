"""Sources: places with manifests and shards. Here a folder, pinned by its manifest's hash.

A source never leads out of its folder, and what its manifest says is checked before a byte of a shard is read.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Description, Listing
from checkpoints_zoo.formats.shard_files import Location, prefix, stamp_of
from checkpoints_zoo.sources import fetching, hub
from checkpoints_zoo.sources.archives import archived, indexing
from checkpoints_zoo.sources.archives.indexing import Opened

EMBEDDED = "embedded"
EMBEDDED_ROOT = Path(__file__).parents[1] / "embedded"


@dataclass(frozen=True)
class Source:
    """A folder with `manifests/` and what they name.

    Args:
        root: the folder.
        label: how a citation names it: "embedded", or the folder as a file URI.
    """

    root: Path
    label: str

    @property
    def shown(self) -> str:
        """What to call it to a reader."""
        return EMBEDDED if self.label == EMBEDDED else str(self.root)

    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""
        return sorted({*self._manifests(), *(x.name for x in in_archives() if self._archives(x))})

    def _manifests(self) -> list[str]:
        return [p.stem for p in (self.root / "manifests").glob("*.parquet")]

    def _has_manifest(self, name: str) -> bool:
        return (self.root / "manifests" / f"{name}.parquet").is_file()

    def _archives(self, listing: Listing) -> list[str]:
        """List the archives of a collection of the catalog; return their paths."""
        return indexing.in_folder(self.root, listing.archives) if listing.archives else []

    def _opened(self, paths: list[str]) -> list[Opened]:
        return indexing.open_local(self.root, paths)

    def archived(self, name: str) -> archived.Described | None:
        """Look into the archives that a collection lies in; return what they hold, None where it has a manifest.

        Raises:
            DamagedError, LayoutError, StorageError, NetworkError, AccessError: see `archived`.
        """
        listing = catalog.collections().get(catalog.check_name(name))
        if listing is None or listing.archives is None or self._has_manifest(name):
            return None
        paths = self._archives(listing)
        return archived.describe(listing, self._opened(paths), self.label) if paths else None

    def manifest_path(self, name: str) -> Path:
        return self.root / "manifests" / f"{catalog.check_name(name)}.parquet"

    def description_path(self, name: str) -> Path:
        return self.manifest_path(name).with_suffix(".json")

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits that pin what the source says."""
        if found := self.archived(name):
            return found.pin
        digest = hashlib.sha256()
        for path in (self.manifest_path(name), self.description_path(name)):
            digest.update(hashlib.sha256(self._read(path, name)).digest())
        return digest.hexdigest()[:40]

    def _read(self, path: Path, name: str) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise self._missing(path, name) from None

    def _missing(self, path: Path, name: str) -> Exception:
        if path.suffix == ".parquet":
            return catalog.not_found(name, self.collections(), f"source {self.label}")
        return SourceNotFound(
            f"source {self.label}",
            expected=f"{path.relative_to(self.root)} beside the manifest",
            found="no such file",
            collection=name,
            path=path,
        )

    def read(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both.

        Raises:
            CollectionNotFound: the source has no such manifest.
            SourceNotFound: the description is missing.
            FormatError, DamagedError: either breaks the format, or a path leads out of the source.
        """
        if found := self.archived(name):
            return found.description, found.rows
        path = self.manifest_path(name)
        for needed in (path, self.description_path(name)):
            if not needed.is_file():
                raise self._missing(needed, name)
        stamp = (stamp_of(path), stamp_of(self.description_path(name)))
        description, rows = _checked(self, name, stamp)
        return description, rows

    def grounds(self) -> list[Path]:
        """Return the folders that a link inside the source may lead into: those of whoever laid the links."""
        if self.label == EMBEDDED:  # installers link packages into their own cache
            return [Path(self.root.anchor)]
        if self.root.parent.name == "snapshots" and self.root.parents[1].name.startswith("datasets--"):
            return [self.root.parents[2]]  # a commit in the Hub client's cache: links to its blobs
        return [self.root]

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

    def renewed(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows as they are now that members were read: their archives may have been found irregular.

        Raises:
            DamagedError: one of them is no member after all.
        """
        found = self.archived(name)
        return found.renewed(rows) if found else rows

    def locate(self, description: Description, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows, each of which has some; return where they lie on this machine.

        Args:
            description: of the collection.
            rows: of its manifest.

        Raises:
            DamagedError, SourceNotFound: see `file`; what `fetching.local` raises where they lie in another source.
        """
        if found := self.archived(description.name):
            return archived.locate(self.root, None, found.renewed(rows), found)
        if description.base:
            return bring(hub.resolve(description.base), description, rows)
        columns = (rows.column(c).to_pylist() for c in ("member", "path", "offset", "layout"))
        members, paths, offsets, keys = columns
        files = {inside: self.file(inside) for inside in set(paths)}
        return [
            Location(m, prefix(*known), files[inside], offset, description.layouts[key])
            for m, known, inside, offset, key in zip(members, manifest.keys_of(rows), paths, offsets, keys, strict=True)
        ]


def bring(repo: hub.Repo, description: manifest.Described, rows: pa.Table, whole: bool = True) -> list[Location]:
    """Bring the bytes of rows from a repo to this machine; return where they lie.

    Args:
        repo, description, rows: what they are.
        whole: whether files may be fetched whole, as `fetching.local` says.
    """
    names = ("path", "offset", "layout", "sha256")
    columns = zip(*(rows.column(c).to_pylist() for c in names), strict=True)
    wanted = [
        fetching.Wanted(key, prefix(*key), inside, offset, description.layouts[layout], sha256)
        for key, (inside, offset, layout, sha256) in zip(manifest.keys_of(rows), columns, strict=True)
    ]
    return fetching.local(repo, description.name, wanted, whole)


def in_archives() -> list[Listing]:
    """Return the catalog's lines on collections that lie in archives somewhere."""
    return [x for x in catalog.collections().values() if x.archives]


@lru_cache(maxsize=32)
def _checked(source: Source, name: str, stamp: tuple[tuple[int, ...], ...]) -> tuple[Description, pa.Table]:
    """Read and check once for each state of the two files."""
    path = source.description_path(name)
    description = Description.from_json(catalog.read_json(path), path)
    if description.name != name:
        raise FormatError(
            f"description {path}",
            expected=f"the name {name!r}, as the file's",
            found=repr(description.name[:80]),
            path=path,
        )
    rows = manifest.read(source.manifest_path(name))
    manifest.validate(rows, description, source.manifest_path(name))
    return description, rows


# A source on the Hub: a repo at one commit.


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


def resolve(source: str | Path | None, name: str) -> Source:
    """Find the place a name is to be read from; return the source.

    Args:
        source: a folder, a file URI, an address on the Hub, "embedded", or None for the catalog's first source.
        name: of the collection.

    Raises:
        CollectionNotFound: no source given, and the name is not in the catalog.
        SourceNotFound: the folder is none, or has no manifests; there is no such repo or revision.
        AccessError, NetworkError: see `hub.resolve`.
    """
    if source is None:
        source = catalog.listing(name).sources[0]
    if str(source) == EMBEDDED:
        return Source(EMBEDDED_ROOT, EMBEDDED)
    text = str(source)
    if text.startswith(hub.SCHEME):
        repo = hub.resolve(text)
        return HubSource(hub.snapshot(repo), repo.label, repo)
    if text.startswith("file:///"):
        text = os.fsdecode(unquote_to_bytes(urlsplit(text).path))
    elif "://" in text:
        raise SourceNotFound(
            f"source {text}", expected="a folder, or hf://datasets/ORG/NAME[@REVISION]", found="another address"
        )
    root, found = Path(text), ""
    try:
        root = root.expanduser()
        archives = any((root / x.archives.folder).is_dir() for x in in_archives() if x.archives)
        if not (root / "manifests").is_dir() and not archives:
            kinds = {root.is_dir(): "a folder without manifests/", root.is_file(): "a file"}
            found = kinds.get(True, "nothing there")
    except (OSError, RuntimeError) as error:  # a name that is too long, the home of nobody
        found = str(error)
    if found:
        raise SourceNotFound(
            f"source {text}",
            expected="a folder with manifests/NAME.parquet in it",
            found=found,
            do="Give the folder that holds manifests/ and shards/",
            path=root,
        )
    return Source(root.absolute(), root.absolute().as_uri())
