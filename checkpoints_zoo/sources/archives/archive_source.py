"""A collection that lies in archives, as its producer left them. An index of each archive stands in for a manifest.

The index of an archive on the Hub is predicted from a few of its headers, and proved as members are read. If a member
lies elsewhere than predicted, all headers of its archive are read, and its row is renewed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Archives, Description, Listing
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.manifest import keys_of
from checkpoints_zoo.formats.selection import Key
from checkpoints_zoo.formats.shard_files import Location, prefix
from checkpoints_zoo.sources import archives, fetching
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import Opened
from checkpoints_zoo.sources.source import FolderSource, HubSource, Source

_known: dict[tuple[str, tuple[tuple[str, int], ...]], Holdings] = {}


@dataclass(frozen=True)
class ArchiveSource(Source):
    """Archives of one collection, in a folder or a repo. All but that collection is as the folder or repo has it.

    Args:
        place: the folder or repo.
        listing: the catalog's line on the collection.
        archives: of the listing: where the archives lie, and what they can't tell themselves.
    """

    place: FolderSource | HubSource
    listing: Listing
    archives: Archives

    @classmethod
    def of(cls, place: FolderSource | HubSource, listing: Listing, known: Archives) -> ArchiveSource:
        """Return the source that a collection's archives at a place are."""
        return cls(place.root, place.label, place.repo, place, listing, known)

    @property
    def shown(self) -> str:
        """What to call it to a reader."""
        return self.place.shown

    def collections(self) -> list[str]:
        """Return the names of the collections at the place."""
        return self.place.collections()

    def commit(self, name: str) -> str:
        """Return the repo's commit; in a folder hash where the members lie, in place of a manifest's hash."""
        if self.repo is not None:
            return self.repo.commit
        places = [[*key, *place] for key, place in self._holdings().places.items()]
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:40]

    def read(self, name: str) -> tuple[Description, pa.Table]:
        """Index the archives, and write down what they hold as a manifest would; return description and rows."""
        found = self._holdings()
        return found.description, found.rows

    def locate(self, described: manifest.Described, rows: pa.Table) -> list[Location]:
        """Find members in the archives, bringing those here that are not; return where they lie."""
        if described.name != self.listing.name:  # predictions, which lie beside the archives
            return self.place.locate(described, rows)
        while True:
            found = self._holdings()
            wanted = found.wanted(found.renewed(rows))
            far = [x for x in wanted if isinstance(x, fetching.Wanted)]
            if self.repo is None or not far:
                return [x for x in wanted if isinstance(x, Location)]
            brought, irregular = fetching.predicted(self.repo, described.name, far)
            if not irregular:
                return [brought[x] if isinstance(x, fetching.Wanted) else x for x in wanted]
            for inside in irregular:
                indexing.walk_remote(self.repo, inside)

    def renewed(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows as they are now that members were read: an archive may have been found irregular."""
        return self._holdings().renewed(rows)

    def files(self, folder: str) -> list[str]:
        """List the files below a folder of the place; return their paths in it."""
        return self.place.files(folder)

    def file(self, inside: str) -> Path:
        """Find a file of the place; return its path."""
        return self.place.file(inside)

    def _holdings(self) -> Holdings:
        opened = self.place.opened(self.place.archives(self.archives))
        key = (self.listing.name, tuple((x.inside, id(x.index)) for x in opened))
        if key not in _known:  # which keeps these indexes alive, and their ids with them
            _known[key] = Holdings.of(self.listing, self.archives, opened, self.label)
        return _known[key]


@dataclass(frozen=True)
class Holdings:
    """What archives hold, written down as a source with a manifest would.

    Args:
        opened: the archives.
        description, rows: of the collection that lies in them.
        places: of each snapshot, (path, offset).
    """

    opened: tuple[Opened, ...]
    description: Description
    rows: pa.Table
    places: Mapping[Key, tuple[str, int]]

    @classmethod
    def of(cls, listing: Listing, known: Archives, opened: Sequence[Opened], label: str) -> Holdings:
        """Write down what archives hold; return that.

        Args:
            listing, known: the catalog's line on the collection, and what it says of the archives.
            opened: these archives.
            label: of the source, for errors.

        Raises:
            DamagedError, LayoutError: no members, or of no net that is known.
            FormatError: a net with another number of classes than the catalog says.
        """
        rows, layouts, net = archives.rows_of({x.inside: x.index for x in opened})
        if len(known.classes) != net["arguments"].get("classes", len(known.classes)):
            raise FormatError(
                f"archives of {listing.name} in {label}",
                expected=f"a net for {len(known.classes)} classes",
                found=f"{net['architecture']} with {net['arguments']}",
            )
        description = Description(
            listing.name, listing.title, net["architecture"], net["arguments"], listing.dataset, known.classes,
            known.preprocessing, layouts, listing.licence, known.citation,
        )  # fmt: skip
        table = manifest.table(rows)
        manifest.validate(table, description, Path(f"of {listing.name} in {label}"))
        places = zip(table.column("path").to_pylist(), table.column("offset").to_pylist(), strict=True)
        return cls(tuple(opened), description, table, dict(zip(keys_of(table), places, strict=True)))

    def renewed(self, rows: pa.Table) -> pa.Table:
        """Find rows that were selected before an archive had to be walked; return them as they are now.

        Raises:
            DamagedError: one of them is no member after all.
        """
        keys = keys_of(rows)
        then = zip(rows.column("path").to_pylist(), rows.column("offset").to_pylist(), strict=True)
        if all(self.places.get(key) == place for key, place in zip(keys, then, strict=True)):
            return rows
        positions = {key: at for at, key in enumerate(keys_of(self.rows))}
        missing = [key for key in keys if key not in positions]
        if missing:
            raise DamagedError(
                f"member {missing[0][0]} of {self.description.name}", found="no such file once all headers were read",
                expected="it in the archive, as its regular names say", do="Load the collection again",
                member=missing[0][0],
            )  # fmt: skip
        now = manifest.take(self.rows, [positions[key] for key in keys])
        manifest.check_located(now, self.description.name)
        return now

    def wanted(self, rows: pa.Table) -> list[Location | fetching.Wanted]:
        """Say where each member lies on this disk, or which bytes of an archive on the Hub are the member's."""
        opened = {x.inside: x for x in self.opened}
        columns = (rows.column(c).to_pylist() for c in ("path", "offset", "layout"))
        return [
            _place(opened[inside], key, offset, self.description.layouts[layout])
            for key, inside, offset, layout in zip(keys_of(rows), *columns, strict=True)
        ]


def _place(archive: Opened, key: Key, offset: int, layout: Layout) -> Location | fetching.Wanted:
    """Return where a member lies, given the byte of its archive at which its tensors begin."""
    if archive.path is not None:
        return Location(key[0], prefix(*key), archive.path, offset, layout)
    index, entry = archive.index, archive.index.at(offset)
    doubt = not entry.verified
    before = entry.data - entry.start if doubt else 0
    prove = partial(archives.is_as_predicted, entry=entry, of=index) if doubt else None
    return fetching.Wanted(key, prefix(*key), archive.inside, offset, layout, None, entry.name, before, prove)
