"""A source that consists of archives in a folder or repo; their indexes stand for the manifest."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.formats import arrow_tables, layout, manifest, row_checks
from checkpoints_zoo.formats.catalog import Archives, Description, Listing
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.selection import SnapshotKey
from checkpoints_zoo.formats.shard_files import Location, tensor_prefix
from checkpoints_zoo.formats.text import first_few, one_line
from checkpoints_zoo.sources import archives, fetching, hub_addresses
from checkpoints_zoo.sources.archives import indexing
from checkpoints_zoo.sources.archives.indexing import OpenedArchive
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.hub_source import HubSource
from checkpoints_zoo.sources.member_requests import MemberRequest
from checkpoints_zoo.sources.source import Source

# (name of a collection, its indexes) -> collection; each collection is built once in a process.
_archived_collections: dict[tuple[str, tuple[tuple[str, int], ...]], ArchivedCollection] = {}


@dataclass(frozen=True)
class ArchiveSource(Source):
    """A source that consists of the archives of one collection in a folder or repo. Other files than members are read
    from the folder or repo.

    Args:
        base_source: the folder or repo that contains the archives.
        listing: the catalog's name, title and other fields of the collection.
        archives: the catalog's facts on the archives.
    """

    base_source: FolderSource | HubSource
    listing: Listing
    archives: Archives

    @classmethod
    def of(cls, base_source: FolderSource | HubSource, listing: Listing, archives: Archives) -> ArchiveSource:
        """Return the source that reads a collection's archives in a folder or repo."""
        return cls(
            base_source.root,
            base_source.label,
            base_source.repo,
            base_source,
            listing,
            archives,
            check=base_source.check,
        )

    @property
    def display_name(self) -> str:
        """The name of the source in texts for people."""
        return self.base_source.display_name

    def collections(self) -> list[str]:
        """Return the names of the collections in the folder or repo."""
        return self.base_source.collections()

    def commit(self, name: str) -> str:
        """Return the version of the collection: the repo's commit, or for a folder a hash of the members' locations."""
        if self.repo is not None:
            return self.repo.commit
        keys_and_locations = [
            [*key, *location] for key, location in self._archived_collection().location_of_snapshot.items()
        ]
        return hashlib.sha256(json.dumps(keys_and_locations).encode()).hexdigest()[:40]

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        """Index the archives; return a description and manifest rows made from the indexes."""
        collection = self._archived_collection()
        return collection.description, collection.rows

    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Find members in the archives, and fetch the missing ones; return their locations."""
        # Descriptions with another name are of stored predictions, which are ordinary files beside the archives.
        if described.name != self.listing.name:
            return self.base_source.locate(described, rows)
        while True:
            collection = self._archived_collection()
            locations_or_requests = collection.locations_or_requests(collection.updated_rows(rows), self.repo)
            requests = [x for x in locations_or_requests if isinstance(x, MemberRequest)]
            if self.repo is None or not requests:
                return [x for x in locations_or_requests if isinstance(x, Location)]
            locations, irregular_paths = fetching.fetch_as_predicted(
                str(self.repo), described.name, requests, check=self.check
            )
            if not irregular_paths:
                return [locations[x] if isinstance(x, MemberRequest) else x for x in locations_or_requests]
            for source_path in irregular_paths:
                indexing.walk_remote(self.repo, source_path)

    def count_local(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        if self.repo is None or described.name != self.listing.name:
            return self.base_source.count_local(described, rows)
        collection = self._archived_collection()
        locations_or_requests = collection.locations_or_requests(collection.updated_rows(rows), self.repo)
        requests = [x for x in locations_or_requests if isinstance(x, MemberRequest)]
        return len(locations_or_requests) - len(requests) + fetching.count_cached(requests)

    def updated_rows(self, name: str, rows: pa.Table) -> pa.Table:
        """Return selected rows with their present locations, since reading may have shown that an archive is
        irregular."""
        return self._archived_collection().updated_rows(rows)

    def list_files(self, folder: str) -> list[str]:
        """List the files below a folder of the folder or repo; return their paths."""
        return self.base_source.list_files(folder)

    def local_path(self, source_path: str) -> Path:
        """Find a file of the folder or repo; return its path on this machine."""
        return self.base_source.local_path(source_path)

    def _archived_collection(self) -> ArchivedCollection:
        opened_archives = self.base_source.open_archives(self.base_source.list_archives(self.archives))
        collection_key = (self.listing.name, tuple((x.source_path, id(x.index)) for x in opened_archives))
        # The cached collection keeps these indexes alive, so that their ids in the key stay valid.
        if collection_key not in _archived_collections:
            _archived_collections[collection_key] = ArchivedCollection.of(
                self.listing, self.archives, opened_archives, self.label
            )
        return _archived_collections[collection_key]


@dataclass(frozen=True)
class ArchivedCollection:
    """A collection that lies in archives, with a description and rows like those of a manifest.

    Args:
        opened_archives: the indexed archives of the collection.
        description, rows: description and manifest rows of the collection in the archives.
        location_of_snapshot: (member, epoch) -> (path of the archive, offset in it).
    """

    opened_archives: tuple[OpenedArchive, ...]
    description: Description
    rows: pa.Table
    location_of_snapshot: Mapping[SnapshotKey, tuple[str, int]]

    @classmethod
    def of(
        cls, listing: Listing, archive_facts: Archives, opened_archives: Sequence[OpenedArchive], label: str
    ) -> ArchivedCollection:
        """Make description and manifest rows from the indexes of archives; return the collection.

        Args:
            listing, archive_facts: the catalog's fields of the collection, and its facts on the archives.
            opened_archives: the opened archives of the collection.
            label: label of the source, for error texts.

        Raises:
            DamagedError, LayoutError: the archives have no members, or members of an unknown network.
            FormatError: the network has another number of classes than the catalog states.
        """
        rows, layouts, network_fields = archives.rows_of_archives(
            {archive.source_path: archive.index for archive in opened_archives}
        )
        link_texts = [
            f"{other_file.name} ({other_file.reason})"
            for archive in opened_archives
            for other_file in archive.index.others
            if other_file.reason in archives.LINK_KINDS
        ]
        if link_texts:
            warnings.warn(
                f"{len(link_texts)} {'link' if len(link_texts) == 1 else 'links'} in the archives of {listing.name} "
                f"in {label} left out: {first_few([one_line(link) for link in link_texts], 3)}. "
                "Their bytes are in the tar under another name.",
                stacklevel=2,
            )
        if len(archive_facts.classes) != network_fields["arguments"].get("classes", len(archive_facts.classes)):
            raise FormatError(
                f"archives of {listing.name} in {label}",
                expected=f"a net for {len(archive_facts.classes)} classes",
                found=f"{network_fields['architecture']} with {network_fields['arguments']}",
            )
        description = Description(
            listing.name, listing.title, network_fields["architecture"], network_fields["arguments"],
            listing.dataset, archive_facts.classes, archive_facts.preprocessing, layouts, listing.licence,
            archive_facts.citation,
        )  # fmt: skip
        manifest_table = manifest.build_manifest(rows)
        row_checks.check_rows(manifest_table, description, Path(f"of {listing.name} in {label}"))
        paths_and_offsets = zip(
            manifest_table.column("path").to_pylist(), manifest_table.column("offset").to_pylist(), strict=True
        )
        return cls(
            tuple(opened_archives),
            description,
            manifest_table,
            dict(zip(snapshot_keys(manifest_table), paths_and_offsets, strict=True)),
        )

    def updated_rows(self, rows: pa.Table) -> pa.Table:
        """Return rows with the locations of their members in the archives, which were only predicted before.

        Raises:
            DamagedError: the file of a row turned out not to be a member.
        """
        keys = snapshot_keys(rows)
        old_locations = zip(rows.column("path").to_pylist(), rows.column("offset").to_pylist(), strict=True)
        if all(
            self.location_of_snapshot.get(key) == location for key, location in zip(keys, old_locations, strict=True)
        ):
            return rows
        position_of_key = {key: position for position, key in enumerate(snapshot_keys(self.rows))}
        lost_keys = [key for key in keys if key not in position_of_key]
        if lost_keys:
            raise DamagedError(
                f"member {lost_keys[0][0]} of {self.description.name}", found="no such file once all headers were read",
                expected="its file in the archive, as the regular names suggest", do="Load the collection again",
                member=lost_keys[0][0],
            )  # fmt: skip
        new_rows = arrow_tables.take_rows(self.rows, [position_of_key[key] for key in keys])
        row_checks.check_located(new_rows, self.description.name)
        return new_rows

    def locations_or_requests(self, rows: pa.Table, repo: hub_addresses.Repo | None) -> list[Location | MemberRequest]:
        """Return, for each member, its location if it is local, or a request for its bytes if it is in a repo on the
        Hub."""
        archive_of_path = {x.source_path: x for x in self.opened_archives}
        columns = (rows.column(c).to_pylist() for c in ("path", "offset", "layout"))
        return [
            _locate_member(archive_of_path[source_path], repo, key, offset, self.description.layouts[layout_key])
            for key, source_path, offset, layout_key in zip(snapshot_keys(rows), *columns, strict=True)
        ]


def _locate_member(
    archive: OpenedArchive, repo: hub_addresses.Repo | None, key: SnapshotKey, offset: int, layout: Layout
) -> Location | MemberRequest:
    """Return the location of the member whose tensors begin at an offset of an archive; for an archive in a repo on the
    Hub, return a request for its bytes."""
    if archive.path is not None:
        return Location(key[0], tensor_prefix(*key), archive.path, offset, layout)
    if repo is None:
        raise SourceNotFound(f"archive {archive.source_path}", expected="a file in the folder", found="none")
    index, entry = archive.index, archive.index.entry_at(offset)
    is_predicted = not entry.verified
    archive_header_nbytes = entry.data_offset - entry.start if is_predicted else 0
    belongs_to_member = partial(archives.is_as_predicted, entry=entry, index=index) if is_predicted else None
    return MemberRequest.of_range(
        (repo, archive.source_path), key, tensor_prefix(*key), offset, layout, None, archive_header_nbytes,
        name_in_archive=entry.name, belongs_to_member=belongs_to_member,
    )  # fmt: skip
