"""Sources: the interface, its three kinds, and the selection of members by name or citation.

| kind | its manifest | its members |
|---|---|---|
| `FolderSource` | a file, pinned by its hash | files inside the folder |
| `HubSource` | a file at a commit | byte ranges, stored in the cache |
| `ArchiveSource` | made from an index of archives in a folder or repo | byte ranges of the archives |

`open_source` chooses the kind. A manifest is checked before a byte of a shard is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, MemberNotFound, SelectionError, SourceNotFound, ZooError
from checkpoints_zoo.formats import catalog, manifest, selection
from checkpoints_zoo.formats.catalog import Archives, Description, Listing
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.selection import Key
from checkpoints_zoo.formats.shard_files import Location, check_hashes, file_stamp, tensor_prefix
from checkpoints_zoo.formats.text import first_few, one_line
from checkpoints_zoo.sources import archives, fetching, hub
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import OpenedArchive

EMBEDDED = "embedded"
EMBEDDED_ROOT = Path(__file__).parents[1] / "embedded"

# By name of the collection and its indexes: each is built once in a process.
_archived_collections: dict[tuple[str, tuple[tuple[str, int], ...]], ArchivedCollection] = {}


@dataclass(frozen=True)
class Source(ABC):
    """A place with collections: manifests, members' bytes, and predictions beside them.

    Args:
        root: the folder; of a repo, the one of its commit in the client's cache.
        label: how a citation names it: "embedded", a file URI, or an address on the Hub.
        repo: the repo of the Hub at its commit; None for a local source.
        check: whether each member is hashed when it is located.
    """

    root: Path
    label: str
    repo: hub.Repo | None
    check: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def display_name(self) -> str:
        """Its name in texts for people."""

    @abstractmethod
    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""

    @abstractmethod
    def commit(self, name: str) -> str:
        """Return 40 hex digits that pin the manifest and description of a collection."""

    @abstractmethod
    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both.

        Raises:
            CollectionNotFound: the source has no such manifest.
            SourceNotFound: the description is missing.
            FormatError, DamagedError: either breaks the format, or a path leads out of the source.
            LayoutError, StorageError, NetworkError, AccessError: archives, or a repo, that can't be read.
        """

    @abstractmethod
    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows; return their locations on this machine. Missing bytes are fetched together.

        Args:
            described: the description of the collection, or of stored predictions.
            rows: of its manifest.

        Raises:
            DamagedError, SourceNotFound: see `local_path`.
            NetworkError, AccessError, StorageError: see `fetching.fetch_members`.
        """

    def updated_rows(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows with their current locations, which reading an archive may have corrected.

        Raises:
            DamagedError: one of the rows turned out to be no member.
        """
        return rows

    def count_local(self, described: manifest.Described, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        repo = hub.resolve_address(described.base) if described.base else self.repo
        return rows.num_rows if repo is None else fetching.count_cached(repo, fetching.wanted_rows(described, rows))

    @abstractmethod
    def list_files(self, folder: str) -> list[str]:
        """List all files below a folder of the source; return their paths in the source, [] for no such folder."""

    @abstractmethod
    def local_path(self, source_path: str) -> Path:
        """Find a file that a manifest names, and fetch it if it is not on this machine; return its path.

        Raises:
            DamagedError: the path, or a link on it, leads out of the source; or other bytes than announced arrived.
            SourceNotFound: there is no such file.
            NetworkError, AccessError: a repo that can't be read.
        """


@dataclass(frozen=True)
class FolderSource(Source):
    """A folder with `manifests/` and the files that they name."""

    repo: None = field(default=None, init=False, repr=False)

    @property
    def display_name(self) -> str:
        """Its name in texts for people."""
        return EMBEDDED if self.label == EMBEDDED else str(self.root)

    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""
        manifests = [p.stem for p in (self.root / "manifests").glob("*.parquet")]
        return sorted(
            {*manifests, *(x.name for x, archives in catalog.archived_listings() if self.list_archives(archives))}
        )

    def has_manifest(self, name: str) -> bool:
        """Say whether a collection has a manifest here."""
        return self.manifest_path(name).is_file()

    def list_archives(self, archives: Archives) -> list[str]:
        """List the archives of a collection of the catalog; return their paths."""
        return indexing.list_in_folder(self.root, archives)

    def open_archives(self, archives: list[str]) -> list[OpenedArchive]:
        """Index archives; return them."""
        for path in archives:  # none may be a link that leads out of the source
            self.local_path(path)
        return indexing.open_local(self.root, archives)

    def manifest_path(self, name: str) -> Path:
        """Return where a collection's manifest lies, or is to be written."""
        return self.root / "manifests" / f"{catalog.check_name(name)}.parquet"

    def description_path(self, name: str) -> Path:
        """Return where a collection's description lies, or is to be written."""
        return self.manifest_path(name).with_suffix(".json")

    def commit(self, name: str) -> str:
        """Hash a collection's manifest and description; return 40 hex digits."""
        digest = hashlib.sha256()
        for path in (self.manifest_path(name), self.description_path(name)):
            try:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
            except FileNotFoundError:
                raise _missing_file_error(self, path, name) from None
        return digest.hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Read and check a collection's description and manifest; return both."""
        paths = self.manifest_path(name), self.description_path(name)
        for path in paths:
            if not path.is_file():
                raise _missing_file_error(self, path, name)
        return _read_checked(name, *paths)

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows; return their locations. Those in a repo of the Hub (`base`) are fetched."""
        if described.base:
            return fetching.fetch_rows(hub.resolve_address(described.base), described, rows, check=self.check)
        columns = (rows.column(c).to_pylist() for c in ("path", "offset", "layout"))
        paths, offsets, layout_keys = columns
        files = {path: self.local_path(path) for path in set(paths)}
        locations = [
            Location(key[0], tensor_prefix(*key), files[path], offset, described.layouts[layout_key])
            for key, path, offset, layout_key in zip(snapshot_keys(rows), paths, offsets, layout_keys, strict=True)
        ]
        if self.check:
            check_hashes(locations, rows.column("sha256").to_pylist())
        return locations

    def list_files(self, folder: str) -> list[str]:
        """List all files below a folder, also behind links but each folder once; return their paths in the source."""
        paths, seen = list[str](), set[tuple[int, int]]()
        for folder_path, folders, names in os.walk(self.root / folder, followlinks=True):
            stat = Path(folder_path).stat()
            if (stat.st_dev, stat.st_ino) in seen:
                folders[:] = []
                continue
            seen.add((stat.st_dev, stat.st_ino))
            paths += [Path(folder_path, name).relative_to(self.root).as_posix() for name in names]
        return sorted(paths)

    def local_path(self, source_path: str) -> Path:
        """Find a file that a manifest names; return its path.

        Raises:
            DamagedError: the path, or a link on it, leads out of the source.
            SourceNotFound: there is no such file.
        """
        path = self.root / source_path
        problem, missing = manifest.path_problem(source_path), ""
        try:
            if not problem and not any(path.resolve().is_relative_to(x.resolve()) for x in self.allowed_folders()):
                problem = f"a link to {path.resolve()}"
            elif not problem and not path.is_file():
                missing = "no such file"
        except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
            missing = str(error)
        if problem:
            raise DamagedError(
                f"path {source_path!r} in a manifest of {self.label}",
                expected="a file inside the source",
                found=problem,
                path=source_path,
            )
        if missing:
            raise SourceNotFound(
                f"file {source_path} of source {self.label}",
                expected="a file, since the manifest names it",
                found=missing,
                do="Get the source again, or select members of other files",
                path=path,
            )
        return path

    def allowed_folders(self) -> list[Path]:
        """Return the folders that a link inside the source may lead into."""
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
        """Return the source of a repo at a commit."""
        return cls(hub.snapshot(repo), repo.label, repo)

    @property
    def display_name(self) -> str:
        """Its name in texts for people."""
        return str(self.repo)

    def collections(self) -> list[str]:
        """Return the names of the collections here: those with a manifest, and those of the catalog in archives."""
        manifests = [Path(p).stem for p in hub.list_files(self.repo, "manifests") if p.endswith(".parquet")]
        return sorted(
            {*manifests, *(x.name for x, archives in catalog.archived_listings() if self.list_archives(archives))}
        )

    def has_manifest(self, name: str) -> bool:
        """Say whether a collection has a manifest here."""
        return hub.has_file(self.repo, f"manifests/{catalog.check_name(name)}.parquet")

    def list_archives(self, archives: Archives) -> list[str]:
        """List the archives of a collection of the catalog; return their paths."""
        return indexing.list_on_hub(self.repo, archives)

    def open_archives(self, archives: list[str]) -> list[OpenedArchive]:
        """Index archives; return them."""
        return indexing.open_remote(self.repo, archives)

    def commit(self, name: str) -> str:
        """Return the commit, which pins every collection."""
        return self.repo.commit

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Fetch and check a collection's description and manifest; return both.

        Where the client's cache does not say which hash a file should have, a file that can't be read is fetched again.
        """
        source_paths = [f"manifests/{catalog.check_name(name)}.{x}" for x in ("parquet", "json")]
        paths = [self._fetched(source_path, name) for source_path in source_paths]
        try:
            return _read_checked(name, paths[0], paths[1])
        except (FormatError, DamagedError):
            unchecked = [path for path in paths if not hub.has_announced_hash(path)]
            if not unchecked or hub.is_offline():
                raise
        for path in unchecked:
            hub.drop_whole_file(self.repo, path)
        paths = [self._fetched(source_path, name) for source_path in source_paths]
        return _read_checked(name, paths[0], paths[1])

    def _fetched(self, source_path: str, name: str) -> Path:
        try:
            return self.local_path(source_path)
        except SourceNotFound as error:
            if error.path != source_path:  # the repo or the commit is missing, not the file
                raise
            raise _missing_file_error(self, self.root / source_path, name) from error

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Fetch the missing bytes of rows together; return all locations."""
        return fetching.fetch_rows(
            hub.resolve_address(described.base) if described.base else self.repo, described, rows, check=self.check
        )

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder of the repo; return their paths, [] where there is no such folder."""
        return hub.list_files(self.repo, folder, below=True)

    def local_path(self, source_path: str) -> Path:
        """Fetch a whole file; return its path."""
        return hub.fetch_file(self.repo, source_path, self.check)


def _missing_file_error(source: Source, path: Path, name: str) -> ZooError:
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


def _read_checked(name: str, manifest_path: Path, description_path: Path) -> tuple[Description, pa.Table]:
    """Read and check a manifest and the description beside it, once for each state of the two files; return both.

    Args:
        name: of the collection.
        manifest_path, description_path: the files.

    Raises:
        FormatError, DamagedError: either breaks the format.
    """
    return _read_checked_once(
        name, manifest_path, description_path, (file_stamp(manifest_path), file_stamp(description_path))
    )


@lru_cache(maxsize=32)
def _read_checked_once(
    name: str, manifest_path: Path, description_path: Path, stamp: tuple[tuple[int, ...], ...]
) -> tuple[Description, pa.Table]:
    description = Description.from_json(catalog.read_json(description_path), description_path)
    if description.name != name:
        raise FormatError(
            f"description {description_path}",
            expected=f"the name {name!r}, as the file's",
            found=repr(description.name[:80]),
            path=description_path,
        )
    rows = manifest.read_manifest(manifest_path)
    manifest.check_rows(rows, description, manifest_path)
    return description, rows


@dataclass(frozen=True)
class ArchiveSource(Source):
    """Archives of one collection in a folder or a repo. Other files are read from that folder or repo as usual.

    Args:
        place: the folder or repo.
        listing: the catalog's line on the collection.
        archives: the listing's facts on the archives.
    """

    place: FolderSource | HubSource
    listing: Listing
    archives: Archives

    @classmethod
    def of(cls, place: FolderSource | HubSource, listing: Listing, archives: Archives) -> ArchiveSource:
        """Return the source of a collection's archives at a place."""
        return cls(place.root, place.label, place.repo, place, listing, archives, check=place.check)

    @property
    def display_name(self) -> str:
        """Its name in texts for people."""
        return self.place.display_name

    def collections(self) -> list[str]:
        """Return the names of the collections at the place."""
        return self.place.collections()

    def commit(self, name: str) -> str:
        """Return the repo's commit; for a folder, a hash of the members' locations."""
        if self.repo is not None:
            return self.repo.commit
        places = [[*key, *place] for key, place in self._holdings().places.items()]
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Index the archives; return a description and rows like a manifest's."""
        collection = self._holdings()
        return collection.description, collection.rows

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Find members in the archives, and fetch the missing ones; return their locations."""
        if described.name != self.listing.name:  # predictions, which lie beside the archives
            return self.place.locate(described, rows)
        while True:
            collection = self._holdings()
            wanted = collection.wanted(collection.updated_rows(rows))
            on_hub = [x for x in wanted if isinstance(x, fetching.WantedMember)]
            if self.repo is None or not on_hub:
                return [x for x in wanted if isinstance(x, Location)]
            locations, irregular = fetching.fetch_predicted(self.repo, described.name, on_hub, check=self.check)
            if not irregular:
                return [locations[x] if isinstance(x, fetching.WantedMember) else x for x in wanted]
            for source_path in irregular:
                indexing.walk_remote(self.repo, source_path)

    def count_local(self, described: manifest.Described, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        if self.repo is None or described.name != self.listing.name:
            return self.place.count_local(described, rows)
        collection = self._holdings()
        wanted = collection.wanted(collection.updated_rows(rows))
        on_hub = [x for x in wanted if isinstance(x, fetching.WantedMember)]
        return len(wanted) - len(on_hub) + fetching.count_cached(self.repo, on_hub)

    def updated_rows(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows with their current locations: reading may have shown that an archive is irregular."""
        return self._holdings().updated_rows(rows)

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder of the place; return their paths in it."""
        return self.place.list_files(folder)

    def local_path(self, source_path: str) -> Path:
        """Find a file of the place; return its path."""
        return self.place.local_path(source_path)

    def _holdings(self) -> ArchivedCollection:
        opened = self.place.open_archives(self.place.list_archives(self.archives))
        key = (self.listing.name, tuple((x.source_path, id(x.index)) for x in opened))
        if key not in _archived_collections:  # which keeps these indexes alive, and their ids with them
            _archived_collections[key] = ArchivedCollection.of(self.listing, self.archives, opened, self.label)
        return _archived_collections[key]


@dataclass(frozen=True)
class ArchivedCollection:
    """A collection in archives: description and rows as a source with a manifest has them.

    Args:
        opened: the archives.
        description, rows: of the collection that lies in them.
        places: of each snapshot, (path, offset).
    """

    opened: tuple[OpenedArchive, ...]
    description: Description
    rows: pa.Table
    places: Mapping[Key, tuple[str, int]]

    @classmethod
    def of(cls, listing: Listing, facts: Archives, opened: Sequence[OpenedArchive], label: str) -> ArchivedCollection:
        """Make description and rows from the indexes of archives; return the collection.

        Args:
            listing, facts: of the collection in the catalog, and of its archives.
            opened: these archives.
            label: of the source, for errors.

        Raises:
            DamagedError, LayoutError: no members, or members of an unknown network.
            FormatError: a net with another number of classes than the catalog says.
        """
        rows, layouts, net = archives.rows_of_archives({x.source_path: x.index for x in opened})
        links = [f"{o.name} ({o.why})" for x in opened for o in x.index.others if o.why in archives.LINKS]
        if links:
            warnings.warn(
                f"{len(links)} {'link' if len(links) == 1 else 'links'} in the archives of {listing.name} in {label} "
                f"left out: {first_few([one_line(link) for link in links], 3)}. "
                "Their bytes are in the tar under another name.",
                stacklevel=2,
            )
        if len(facts.classes) != net["arguments"].get("classes", len(facts.classes)):
            raise FormatError(
                f"archives of {listing.name} in {label}",
                expected=f"a net for {len(facts.classes)} classes",
                found=f"{net['architecture']} with {net['arguments']}",
            )
        description = Description(
            listing.name, listing.title, net["architecture"], net["arguments"], listing.dataset, facts.classes,
            facts.preprocessing, layouts, listing.licence, facts.citation,
        )  # fmt: skip
        table = manifest.build_manifest(rows)
        manifest.check_rows(table, description, Path(f"of {listing.name} in {label}"))
        places = zip(table.column("path").to_pylist(), table.column("offset").to_pylist(), strict=True)
        return cls(tuple(opened), description, table, dict(zip(snapshot_keys(table), places, strict=True)))

    def updated_rows(self, rows: pa.Table) -> pa.Table:
        """Find rows that were selected by a predicted index; return them with their current locations.

        Raises:
            DamagedError: one of the rows turned out to be no member.
        """
        keys = snapshot_keys(rows)
        old_places = zip(rows.column("path").to_pylist(), rows.column("offset").to_pylist(), strict=True)
        if all(self.places.get(key) == place for key, place in zip(keys, old_places, strict=True)):
            return rows
        positions = {key: position for position, key in enumerate(snapshot_keys(self.rows))}
        lost = [key for key in keys if key not in positions]
        if lost:
            raise DamagedError(
                f"member {lost[0][0]} of {self.description.name}", found="no such file once all headers were read",
                expected="it in the archive, as its regular names say", do="Load the collection again",
                member=lost[0][0],
            )  # fmt: skip
        updated = manifest.take_rows(self.rows, [positions[key] for key in keys])
        manifest.check_located(updated, self.description.name)
        return updated

    def wanted(self, rows: pa.Table) -> list[Location | fetching.WantedMember]:
        """Return the location of each local member, or the request for the bytes of one on the Hub."""
        opened = {x.source_path: x for x in self.opened}
        columns = (rows.column(c).to_pylist() for c in ("path", "offset", "layout"))
        return [
            _locate_member(opened[source_path], key, offset, self.description.layouts[layout])
            for key, source_path, offset, layout in zip(snapshot_keys(rows), *columns, strict=True)
        ]


def _locate_member(archive: OpenedArchive, key: Key, offset: int, layout: Layout) -> Location | fetching.WantedMember:
    """Return the location, or the request, of the member whose tensors begin at an offset of an archive."""
    if archive.path is not None:
        return Location(key[0], tensor_prefix(*key), archive.path, offset, layout)
    index, entry = archive.index, archive.index.at(offset)
    is_predicted = not entry.verified
    bytes_before = entry.data - entry.start if is_predicted else 0
    prove = partial(archives.is_as_predicted, entry=entry, index=index) if is_predicted else None
    return fetching.WantedMember(
        key, tensor_prefix(*key), archive.source_path, offset, layout, None, entry.name, bytes_before, prove
    )


def open_source(source: str | Path | None, name: str, check: bool = False) -> Source:
    """Open the source of a collection; return it.

    Args:
        source: a folder, a file URI, an address on the Hub, "embedded", or None for the catalog's first source.
        name: of the collection; "" for the whole folder or repo.
        check: whether each member is hashed when it is located.

    Raises:
        CollectionNotFound: no source given, and the name is not in the catalog.
        SourceNotFound: no such folder, a folder without manifests, or no such repo or revision.
        AccessError, NetworkError: see `hub.resolve_address`.
    """
    place = _open_place(catalog.find_listing(name).sources[0] if source is None else source)
    return collection_source(name, replace(place, check=check))


def collection_source(name: str, place: Source) -> Source:
    """Choose between the manifest and the archives of a collection at a place; return the source to read.

    Args:
        name: of the collection.
        place: a folder or repo; returned itself if it has a manifest, or no archives.
    """
    listing = catalog.collections().get(name)
    if listing is None or listing.archives is None or not isinstance(place, FolderSource | HubSource):
        return place
    if place.has_manifest(name) or not place.list_archives(listing.archives):
        return place
    return ArchiveSource.of(place, listing, listing.archives)


def _open_place(source: str | Path) -> FolderSource | HubSource:
    """Return the folder or repo that an address names."""
    if str(source) == EMBEDDED:
        return FolderSource(EMBEDDED_ROOT, EMBEDDED)
    text = str(source)
    if text.startswith(hub.SCHEME):
        return HubSource.of(hub.resolve_address(text))
    if text.startswith("file:///"):
        text = os.fsdecode(unquote_to_bytes(urlsplit(text).path))
    elif "://" in text:
        raise SourceNotFound(
            f"source {text}", expected="a folder, or hf://datasets/ORG/NAME[@REVISION]", found="another address"
        )
    root, problem = Path(text), ""
    try:
        root = root.expanduser()
        archives = any((root / known.folder).is_dir() for _, known in catalog.archived_listings())
        if not (root / "manifests").is_dir() and not archives:
            kinds = {root.is_dir(): "a folder without manifests/", root.is_file(): "a file"}
            problem = kinds.get(True, "nothing there")
    except (OSError, RuntimeError) as error:  # a name that is too long, the home folder of an unknown user
        problem = str(error)
    if problem:
        raise SourceNotFound(
            f"source {text}",
            expected="a folder with manifests/NAME.parquet in it",
            found=problem,
            do="Give the folder that holds manifests/ and shards/",
            path=root,
        )
    return FolderSource(root.absolute(), root.absolute().as_uri())


@dataclass(frozen=True)
class SelectedMembers:
    """Selected members of a collection: the rows, the description, and the source that they come from.

    Args:
        source, commit: the source, and the commit (or hash) that pins it.
        description: of the collection.
        rows: the selected ones.
        of: number of members of the whole collection.
    """

    source: Source
    commit: str
    description: Description
    rows: pa.Table
    of: int

    @property
    def citation(self) -> str:
        return selection.cite(self.source.label, self.commit, self.description.name, self.rows)


def select_members(
    name: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
    check: bool = False,
) -> SelectedMembers:
    """Select members of a collection by its manifest, without torch and pandas; return them.

    Args, Raises: as of `loading.load`.
    """
    cited = selection.parse_citation(str(name))
    if cited:
        if any(x is not None for x in (n, where, members, sample)) or snapshots:
            raise SelectionError("selection", expected="a citation alone", found="a citation with another selection")
        name, members = cited.name, cited.ids
        source = cited.source if source is None else source
    place = open_source(source, name, check)
    description, rows = place.read_collection(name)
    commit = place.commit(name)
    try:
        chosen = selection.select_rows(
            rows, name, n=n, where=where, members=members, sample=sample, snapshots=snapshots
        )
    except (MemberNotFound, SelectionError) as error:
        if cited and cited.commit != commit:
            raise selection.source_changed(cited, commit, str(error).rstrip(".")) from error
        raise
    if cited:
        selection.verify_citation(cited, commit, chosen)
    return SelectedMembers(place, commit, description, chosen, len(set(rows.column("member").to_pylist())))
