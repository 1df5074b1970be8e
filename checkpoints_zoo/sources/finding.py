"""Find the source that has a collection, and the members that a selection or citation names."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints_zoo.errors import CollectionNotFound, MemberNotFound, SelectionError, SourceNotFound
from checkpoints_zoo.formats import catalog, selection
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.sources import hub, hub_addresses, revisions, web
from checkpoints_zoo.sources.archive_source import ArchiveSource
from checkpoints_zoo.sources.draws_source import DrawsSource
from checkpoints_zoo.sources.folder_source import EMBEDDED, EMBEDDED_ROOT, FolderSource
from checkpoints_zoo.sources.hub_source import HubSource
from checkpoints_zoo.sources.source import Source
from checkpoints_zoo.sources.web import WebFolder
from checkpoints_zoo.sources.web_source import WebSource

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def open_source(source: str | Path | None, collection: str, check: bool = False) -> Source:
    """Open the source that contains a collection; return it.

    Args:
        source: a folder, a file URI, an address on the Hub or the web, "embedded", or None for the first source that
            the catalog names.
        collection: name of the collection; "" for the whole folder or repo.
        check: whether each member is hashed when its location is found.

    Raises:
        CollectionNotFound: no source is given, and the catalog has no such name.
        SourceNotFound: the folder does not exist or has no manifests, or the repo or revision does not exist.
        AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
    """
    folder_or_repo = _open_folder_or_repo(_source_in_catalog(collection) if source is None else source, collection)
    return collection_source(collection, replace(folder_or_repo, check=check))


def _source_in_catalog(collection: str) -> str:
    """Return the first source that the catalog names for a collection.

    Raises:
        CollectionNotFound: the catalog has no such name; if a folder with collections has it, the error says so.
    """
    try:
        return catalog.find_listing(collection).sources[0]
    except CollectionNotFound as error:
        folder = str(collection)
        if folder and "://" not in folder:
            with suppress(SourceNotFound):
                if names := _open_folder_or_repo(folder).collections():
                    load_text = f"zoo.load({names[0]!r}, source={folder!r}), or --source {folder} {names[0]}"
                    error.do = f"{folder} is a folder with {first_few(names, 3)}: {load_text}"
        raise


def collection_source(collection: str, base_source: Source) -> Source:
    """Choose whether a collection is read by its manifest, from archives or from pickled draws; return the source.

    Args:
        collection: name of the collection.
        base_source: the folder or repo; it is returned unchanged if it has a manifest of the collection, or no
            archives.
    """
    listing = catalog.listing_of(collection)
    if listing is not None and listing.draws is not None and isinstance(base_source, FolderSource | WebSource):
        has_manifest = isinstance(base_source, FolderSource) and base_source.has_manifest(collection)
        return base_source if has_manifest else DrawsSource.of(base_source, listing, listing.draws)
    if listing is None or listing.archives is None or not isinstance(base_source, FolderSource | HubSource):
        return base_source
    if base_source.has_manifest(collection) or not base_source.list_archives(listing.archives):
        return base_source
    return ArchiveSource.of(base_source, listing, listing.archives)


def _open_folder_or_repo(source: str | Path, collection: str = "") -> FolderSource | HubSource | WebSource:
    """Return the folder or repo that an address or path names, as a source; `collection` is wanted from it."""
    if str(source) == EMBEDDED:
        return FolderSource(EMBEDDED_ROOT, EMBEDDED)
    address_or_path = str(source)
    if address_or_path.startswith("file:///"):
        address_or_path = unquote(urlsplit(address_or_path).path, sys.getfilesystemencoding(), "surrogateescape")
    elif "://" in address_or_path:
        return _open_address(address_or_path, collection)
    return _open_folder(address_or_path, collection)


def _open_address(address: str, collection: str) -> HubSource | WebSource:
    """Return the source at an address on the Hub or the web."""
    if address.startswith(hub_addresses.ADDRESS_SCHEME):
        if revisions.parse_model_address(revisions.expand_braces(address)[0]):
            name = collection if collection in catalog.collections() else "NAME"
            command = f"zoo-cli import '{address}' --revisions 'step*' --collection {name} --out index/"
            raise SourceNotFound(
                f"source {address}", expected="a folder or data set repo with manifests/",
                found="model repos, which have none",
                do=f"Index them once: `{command}`; then give source='index/'",
            )  # fmt: skip
        return HubSource.of(hub.resolve_address(address))
    if web.is_web_address(address):
        return WebSource.of(WebFolder.of(address))
    raise SourceNotFound(
        f"source {address}",
        expected="a folder, hf://datasets/ORG/NAME[@REVISION], https://HOST/PATH or gs://BUCKET/PATH",
        found="another address",
    )


def _open_folder(path: str, collection: str) -> FolderSource:
    """Return the source in a folder, which has manifests, archives of the catalog, or draws of the collection."""
    root, problem = Path(path), ""
    try:
        root = root.expanduser()
        has_archives = any((root / archive_facts.folder).is_dir() for _, archive_facts in catalog.archived_listings())
        listing = catalog.listing_of(collection)
        draws_paths = listing.draws.paths if listing is not None and listing.draws is not None else ()
        has_draws = any((root / path).is_file() for path in draws_paths)
        if not (root / "manifests").is_dir() and not has_archives and not has_draws:
            problem_of_kind = {root.is_dir(): "a folder without manifests/", root.is_file(): "a file"}
            problem = problem_of_kind.get(True, "nothing there")
    except (OSError, RuntimeError) as error:  # The path is too long, or refers to the home folder of an unknown user.
        problem = str(error)
    if problem:
        is_repo_id = problem == "nothing there" and _REPO_ID.fullmatch(path)
        hub_advice = f", or for a repo of the Hub {hub_addresses.ADDRESS_SCHEME}datasets/{path}" if is_repo_id else ""
        raise SourceNotFound(
            f"source {path}",
            expected="a folder with manifests/NAME.parquet in it",
            found=problem,
            do=f"Give the folder that holds manifests/ and shards/{hub_advice}",
            path=root,
        )
    return FolderSource(root.absolute(), root.absolute().as_uri())


@dataclass(frozen=True)
class SelectedMembers:
    """Selected members of a collection: their manifest rows, the description, and the source of the members.

    Args:
        source, commit: the source, and the commit or hash that identifies its version.
        description: description of the collection.
        rows: the manifest rows of the selected members.
    """

    source: Source
    commit: str
    description: Description
    rows: pa.Table

    @cached_property
    def of(self) -> int:
        """Number of members in the whole collection."""
        rows = self.source.open_collection(self.description.name)[1].read(["member"])
        return int(pc.count_distinct(rows.column("member")).as_py())

    @property
    def citation(self) -> str:
        return selection.cite(self.source.label, self.commit, self.description.name, self.rows)


def select_members(
    collection: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
    check: bool = False,
) -> SelectedMembers:
    """Select members of a collection by its manifest, without importing torch or pandas; return them.

    The arguments and errors are those of `zoo.load`.
    """
    citation = selection.parse_citation(str(collection))
    if citation:
        if any(x is not None for x in (n, where, members, sample)) or snapshots:
            raise SelectionError("selection", expected="a citation alone", found="a citation with another selection")
        collection, members = citation.name, citation.ids
        source = citation.source if source is None else source
    opened_source = open_source(source, collection, check)
    description, manifest_rows = opened_source.open_collection(collection)
    commit = opened_source.commit(collection)
    try:
        selected_rows = selection.select_rows(
            manifest_rows, collection, n=n, where=where, members=members, sample=sample, snapshots=snapshots
        )
    except (MemberNotFound, SelectionError) as error:
        if citation and citation.commit != commit:
            raise selection.source_changed(citation, commit, str(error).rstrip(".")) from error
        raise
    if citation:
        selection.verify_citation(citation, commit, selected_rows)
    return SelectedMembers(opened_source, commit, description, selected_rows)
