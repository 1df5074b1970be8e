"""From a name, a place or a citation to a source and the rows that are meant. No weights are read.

`resolve` chooses the kind of source; `find` is what `zoo.load` and `zoo-cli show` share.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import pyarrow as pa

from checkpoints_zoo.errors import MemberNotFound, SelectionError, SourceNotFound
from checkpoints_zoo.formats import catalog, selection
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.archives.archive_source import ArchiveSource
from checkpoints_zoo.sources.source import EMBEDDED, EMBEDDED_ROOT, FolderSource, HubSource, Source


def resolve(source: str | Path | None, name: str) -> Source:
    """Find the source that a name is to be read from; return it.

    Args:
        source: a folder, a file URI, an address on the Hub, "embedded", or None for the catalog's first source.
        name: of the collection; "" for a folder or repo as a whole.

    Raises:
        CollectionNotFound: no source given, and the name is not in the catalog.
        SourceNotFound: the folder is none, or has no manifests; there is no such repo or revision.
        AccessError, NetworkError: see `hub.resolve`.
    """
    return source_of(name, _place(catalog.listing(name).sources[0] if source is None else source))


def source_of(name: str, place: Source) -> Source:
    """Choose between the manifest and the archives that a place has of a collection; return the source to read it from.

    Args:
        name: of the collection.
        place: a folder or repo, which is returned where it has a manifest, or neither.
    """
    listing = catalog.collections().get(name)
    if listing is None or listing.archives is None or not isinstance(place, FolderSource | HubSource):
        return place
    if place.has(name) or not place.archives(listing.archives):
        return place
    return ArchiveSource.of(place, listing, listing.archives)


def _place(source: str | Path) -> FolderSource | HubSource:
    """Return the folder or repo that a text means."""
    if str(source) == EMBEDDED:
        return FolderSource(EMBEDDED_ROOT, EMBEDDED)
    text = str(source)
    if text.startswith(hub.SCHEME):
        return HubSource.of(hub.resolve(text))
    if text.startswith("file:///"):
        text = os.fsdecode(unquote_to_bytes(urlsplit(text).path))
    elif "://" in text:
        raise SourceNotFound(
            f"source {text}", expected="a folder, or hf://datasets/ORG/NAME[@REVISION]", found="another address"
        )
    root, found = Path(text), ""
    try:
        root = root.expanduser()
        archives = any((root / known.folder).is_dir() for _, known in catalog.in_archives())
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
    return FolderSource(root.absolute(), root.absolute().as_uri())


@dataclass(frozen=True)
class Found:
    """What a source says of selected members.

    Args:
        source, commit: where, and what pins it.
        description: the source's JSON on the collection.
        rows: the selected ones.
        of: members of the whole collection.
    """

    source: Source
    commit: str
    description: Description
    rows: pa.Table
    of: int

    @property
    def citation(self) -> str:
        return selection.cite(self.source.label, self.commit, self.description.name, self.rows)


def find(
    name: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
) -> Found:
    """Select members of a collection by its manifest, importing neither torch nor pandas; return what it says of them.

    Args, Raises: as of `loading.load`.
    """
    cited = selection.parse_citation(str(name))
    if cited:
        if any(x is not None for x in (n, where, members, sample)) or snapshots:
            raise SelectionError("selection", expected="a citation alone", found="a citation with another selection")
        name, members = cited.name, cited.ids
        source = cited.source if source is None else source
    place = resolve(source, name)
    description, rows = place.read(name)
    commit = place.commit(name)
    try:
        chosen = selection.select(rows, name, n=n, where=where, members=members, sample=sample, snapshots=snapshots)
    except (MemberNotFound, SelectionError) as error:
        if cited and cited.commit != commit:
            raise selection.changed(cited, commit, str(error).rstrip(".")) from error
        raise
    if cited:
        selection.verify_citation(cited, commit, chosen)
    return Found(place, commit, description, chosen, len(set(rows.column("member").to_pylist())))
