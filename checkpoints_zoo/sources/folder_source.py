"""A folder with manifests and shards, pinned by the manifest's hash. A source never leads out of its folder."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, SourceNotFound
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Archives, Description
from checkpoints_zoo.formats.selection import keys_of
from checkpoints_zoo.formats.shard_files import Location, prefix
from checkpoints_zoo.sources import fetching, hub
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import Opened
from checkpoints_zoo.sources.source import Source, not_there, read_checked

EMBEDDED = "embedded"
EMBEDDED_ROOT = Path(__file__).parents[1] / "embedded"


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
                raise not_there(self, path, name) from None
        return digest.hexdigest()[:40]

    def read(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both."""
        paths = self.manifest_path(name), self.description_path(name)
        for path in paths:
            if not path.is_file():
                raise not_there(self, path, name)
        return read_checked(name, *paths)

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
