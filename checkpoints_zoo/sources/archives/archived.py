"""Collections that lie in archives, as their producers left them: an index of each archive stands in for a manifest.

What was predicted of an archive from a few of its headers is proved as members are read; where it is wrong, all of
its headers are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description, Listing
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.selection import Key
from checkpoints_zoo.formats.shard_files import Location, prefix
from checkpoints_zoo.sources import archives, fetching, hub
from checkpoints_zoo.sources.archives import Index
from checkpoints_zoo.sources.archives.indexing import Opened

_described: dict[tuple[str, tuple[tuple[str, int], ...]], Described] = {}


class Irregular(DamagedError):
    """A member is not the one that was predicted: its archive has to be walked."""


@dataclass(frozen=True)
class Described:
    """What archives hold, written down as a source would.

    Args:
        opened: the archives.
        description, rows: of the collection that lies in them.
        places: of each snapshot, (path, offset).
    """

    opened: tuple[Opened, ...]
    description: Description
    rows: pa.Table
    places: Mapping[Key, tuple[str, int]]

    @property
    def pin(self) -> str:
        """Hash where members lie; return 40 hex digits, in place of a manifest's hash."""
        places = [[*key, *place] for key, place in self.places.items()]
        return hashlib.sha256(json.dumps(places).encode()).hexdigest()[:40]

    def renewed(self, rows: pa.Table) -> pa.Table:
        """Find rows that were selected before an archive had to be walked; return them as they are now.

        Raises:
            DamagedError: one of them is no member after all.
        """
        keys = manifest.keys_of(rows)
        then = zip(rows.column("path").to_pylist(), rows.column("offset").to_pylist(), strict=True)
        if all(self.places.get(key) == place for key, place in zip(keys, then, strict=True)):
            return rows
        positions = {key: at for at, key in enumerate(manifest.keys_of(self.rows))}
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


def describe(listing: Listing, opened: Sequence[Opened], label: str) -> Described:
    """Write down what archives hold as a source would; return that.

    Args:
        listing: the catalog's line on the collection, with its archives.
        opened: these archives.
        label: of the source, for errors.

    Raises:
        DamagedError, LayoutError: no members, or of no net that is known.
        FormatError: a net with another number of classes than the catalog says.
    """
    key = (listing.name, tuple((x.inside, id(x.index)) for x in opened))
    if key in _described:  # which keeps these indexes alive, and their ids with them
        return _described[key]
    rows, layouts, net = archives.rows_of({x.inside: x.index for x in opened})
    known = listing.archives
    if known is None or len(known.classes) != net["arguments"].get("classes", len(known.classes)):
        raise FormatError(
            f"archives of {listing.name} in {label}",
            expected=f"a net for {len(known.classes) if known else 0} classes",
            found=f"{net['architecture']} with {net['arguments']}",
        )
    description = Description(
        listing.name, listing.title, net["architecture"], net["arguments"], listing.dataset, known.classes,
        known.preprocessing, layouts, listing.licence, known.citation,
    )  # fmt: skip
    table = manifest.table(rows)
    manifest.validate(table, description, Path(f"of {listing.name} in {label}"))
    places = zip(table.column("path").to_pylist(), table.column("offset").to_pylist(), strict=True)
    _described[key] = Described(
        tuple(opened), description, table, dict(zip(manifest.keys_of(table), places, strict=True))
    )
    return _described[key]


def locate(root: Path, repo: hub.Repo | None, rows: pa.Table, described: Described) -> list[Location]:
    """Find members in archives, bringing those here that are not; return where they lie.

    Args:
        root: folder of the source.
        repo: that it is, if it is one of the Hub.
        rows: of the members, renewed.
        described: what the archives hold.

    Raises:
        Irregular: an archive has to be walked, and then the rows to be renewed.
        NetworkError, AccessError, DamagedError, SourceNotFound, StorageError: see `fetching.local`.
    """
    opened = {x.inside: x for x in described.opened}
    layouts = described.description.layouts
    columns = (rows.column(c).to_pylist() for c in ("member", "path", "offset", "layout"))
    found: list[Location | fetching.Wanted] = []
    for key, member, inside, offset, layout in zip(manifest.keys_of(rows), *columns, strict=True):
        one = opened[inside]
        if repo is None or one.unpacked:
            place = one.unpacked or root / inside
            found.append(Location(member, prefix(*key), place, offset, layouts[layout]))
        else:
            found.append(_wanted(key, inside, offset, layouts[layout], one.index))
    wanted = [x for x in found if isinstance(x, fetching.Wanted)]
    brought = iter(fetching.local(repo, described.description.name, wanted) if repo and wanted else [])
    return [next(brought) if isinstance(x, fetching.Wanted) else x for x in found]


def _wanted(key: Key, inside: str, offset: int, layout: Layout, index: Index) -> fetching.Wanted:
    """Say which bytes of an archive on the Hub are a member's, and what proves it."""
    entry = index.at(offset)

    def prove(window: bytes) -> None:
        try:
            archives.verify_entry(window, entry, index)
        except DamagedError as error:
            raise Irregular(
                error.thing, expected=error.expected, found=error.found, do=error.do, member=key[0], path=inside
            ) from error

    before, proof = (0, None) if entry.verified else (entry.data - entry.start, prove)
    return fetching.Wanted(key, prefix(*key), inside, offset, layout, None, entry.name, before, proof)
