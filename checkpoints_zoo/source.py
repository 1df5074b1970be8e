"""Sources: places with manifests and shards: a folder, pinned by its manifest's hash, or a repo of the Hub at a commit.

A source never leads out of its folder, and what its manifest says is checked before a byte of a shard is read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import pyarrow as pa

from checkpoints_zoo import catalog, fetching, hub, manifest
from checkpoints_zoo.catalog import Description
from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.header import prefix, stamp_of
from checkpoints_zoo.layout import Layout
from checkpoints_zoo.pieces import Location
from checkpoints_zoo.selection import keys_of

EMBEDDED = "embedded"
_EMBEDDED_ROOT = Path(__file__).parent / "embedded"


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
        """Return the names of the collections that have a manifest here."""
        return sorted(p.stem for p in (self.root / "manifests").glob("*.parquet"))

    def manifest_path(self, name: str) -> Path:
        return self.root / "manifests" / f"{catalog.check_name(name)}.parquet"

    def description_path(self, name: str) -> Path:
        return self.manifest_path(name).with_suffix(".json")

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits that pin what the source says."""
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
        path = self.manifest_path(name)
        for needed in (path, self.description_path(name)):
            if not needed.is_file():
                raise self._missing(needed, name)
        stamp = (stamp_of(path), stamp_of(self.description_path(name)))
        description, rows = _checked(self, name, stamp)
        return description, rows

    def _grounds(self) -> list[Path]:
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
            if not problem and not any(path.resolve().is_relative_to(x.resolve()) for x in self._grounds()):
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

    def locate(self, name: str, rows: pa.Table, layouts: Mapping[str, Layout]) -> list[Location]:
        """Find the bytes of rows, each of which has some; return where they lie on this machine.

        Args:
            name: of the collection.
            rows: of its manifest.
            layouts: by key.

        Raises:
            DamagedError, SourceNotFound: see `file`.
        """
        columns = (rows.column(c).to_pylist() for c in ("member", "path", "offset", "layout"))
        members, paths, offsets, keys = columns
        files = {inside: self.file(inside) for inside in set(paths)}
        return [
            Location(m, prefix(*known), files[inside], offset, layouts[key])
            for m, known, inside, offset, key in zip(members, keys_of(rows), paths, offsets, keys, strict=True)
        ]


@dataclass(frozen=True)
class HubSource(Source):
    """A repo of the Hub at one commit; its root is the folder of that commit in the client's cache."""

    repo: hub.Repo

    @property
    def shown(self) -> str:
        return str(self.repo)

    def collections(self) -> list[str]:
        return hub.manifests(self.repo)

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

    def locate(self, name: str, rows: pa.Table, layouts: Mapping[str, Layout]) -> list[Location]:
        """Bring the bytes of rows to this machine, all that are missing in one go; return where they lie.

        Raises:
            NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: see `fetching.local`.
        """
        names = ("path", "offset", "layout", "sha256")
        columns = zip(*(rows.column(c).to_pylist() for c in names), strict=True)
        wanted = [
            fetching.Wanted(key, prefix(*key), inside, offset, layouts[layout], sha256)
            for key, (inside, offset, layout, sha256) in zip(keys_of(rows), columns, strict=True)
        ]
        return fetching.local(self.repo, name, wanted)


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
        return Source(_EMBEDDED_ROOT, EMBEDDED)
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
        if not (root / "manifests").is_dir():
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
