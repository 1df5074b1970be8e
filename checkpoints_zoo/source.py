"""Sources: places with manifests and shards. Here they are folders; each is pinned by its manifest's hash.

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

from checkpoints_zoo import catalog, manifest
from checkpoints_zoo.catalog import Description
from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound

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

    def file(self, inside: str) -> Path:
        """Find a file that a manifest names; return its path.

        Raises:
            DamagedError: the path, or a link on it, leads out of the source.
            SourceNotFound: there is no such file.
        """
        path = self.root / inside
        problem, missing = manifest.path_problem(inside), ""
        try:
            if not problem and not path.resolve().is_relative_to(self.root.resolve()):
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


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return what differs once a file was changed or replaced: its time of change can't be set by hand."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


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
        source: a folder, a file URI, "embedded", or None for the catalog's first source of that name.
        name: of the collection.

    Raises:
        CollectionNotFound: no source given, and the name is not in the catalog.
        SourceNotFound: the folder is none, or has no manifests.
    """
    if source is None:
        source = catalog.listing(name).sources[0]
    if str(source) == EMBEDDED:
        return Source(_EMBEDDED_ROOT, EMBEDDED)
    text = str(source)
    if text.startswith("file:///"):
        text = os.fsdecode(unquote_to_bytes(urlsplit(text).path))
    elif "://" in text:
        raise SourceNotFound(
            f"source {text}", expected="a folder", found="an address", do="This version reads folders only"
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
