"""A source that is a folder at an https:// or gs:// address; its collections have to be named."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import CollectionNotFound, SourceNotFound
from checkpoints_zoo.formats import catalog, layout
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.sources import fetching, hub_addresses, hub_cache, web_members
from checkpoints_zoo.sources.member_requests import MemberRequest, requests_of_rows
from checkpoints_zoo.sources.source import ManifestSource
from checkpoints_zoo.sources.web import WebFolder


@dataclass(frozen=True)
class WebSource(ManifestSource):
    """A source that is a folder on the web. Such a folder can't be listed, so that its collections have to be named.

    Args:
        folder: the folder.
    """

    folder: WebFolder

    @classmethod
    def of(cls, folder: WebFolder) -> WebSource:
        """Return the source in a folder on the web."""
        return cls(hub_cache.cache_root() / hub_cache.folder_name(folder.cache_name), folder.label, None, folder)

    @property
    def uses_cache(self) -> bool:
        """Whether members' bytes pass through the member cache."""
        return True

    def collections(self) -> list[str]:
        """Raise an error, because a folder on the web can't be listed."""
        raise SourceNotFound(
            f"collections of {self.label}",
            expected="the name of one",
            found="a folder on the web, which can't be listed",
            do="Give the name that the folder's producer gave it",
        )

    def collection_paths(self, name: str) -> tuple[Path, Path]:
        """Return the paths of the fetched manifest and description, which are asked for once by each source object."""
        paths = self._fetched_paths
        if name not in paths:
            manifest_path = f"manifests/{catalog.check_name(name)}.parquet"
            try:
                paths[name] = self.local_path(manifest_path), self.local_path(manifest_path[:-8] + ".json")
            except SourceNotFound as error:
                raise CollectionNotFound(
                    f"collection {name!r} of {self.label}", expected=f"{manifest_path} and .json there",
                    found=error.found, do="Check the address and the name: a folder on the web can't be listed",
                    collection=name,
                ) from error  # fmt: skip
        return paths[name]

    @cached_property
    def _fetched_paths(self) -> dict[str, tuple[Path, Path]]:
        return {}

    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        """Fetch the missing bytes of manifest rows together; return the locations of all rows."""
        requests = self._requests(described, rows)
        on_hub, on_web = _split_by_place(requests)
        from_web = web_members.fetch_members(self.folder, described.name, on_web, self.check)
        from_hub = fetching.fetch_members(self.label, described.name, on_hub, check=self.check)
        locations = dict(zip([*on_web, *on_hub], [*from_web, *from_hub], strict=True))
        return [locations[request] for request in requests]

    def locate_tensors(
        self, described: layout.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        """Fetch the missing bytes of manifest rows, of rows in repos on the Hub those of some tensors only; return for
        each name the locations of the tensor, or of its member."""
        on_hub, on_web = _split_by_place(self._requests(described, rows))
        if on_web:
            return super().locate_tensors(described, rows, names)
        return fetching.fetch_tensors(self.label, described.name, on_hub, names, self.check)

    def _requests(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[MemberRequest]:
        place = self.repo_of_bytes(described) or self.folder
        return [request for request in requests_of_rows(place, described, rows) if request is not None]

    def count_local(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> int:
        """Count the rows whose bytes are on this machine; nothing is fetched."""
        on_hub, on_web = _split_by_place(self._requests(described, rows))
        return web_members.count_cached(self.folder, on_web) + fetching.count_cached(on_hub)

    def list_files(self, folder: str) -> list[str]:
        """Return [], because a folder on the web can't be listed."""
        return []

    def local_path(self, source_path: str) -> Path:
        """Fetch a whole file; return its path on this machine."""
        return web_members.fetch_file(self.folder, source_path)


def _split_by_place(
    requests: Iterable[MemberRequest],
) -> tuple[list[MemberRequest], list[MemberRequest]]:
    """Return the requests for bytes on the Hub, and those for bytes in a folder on the web."""
    on_hub, on_web = list[MemberRequest](), list[MemberRequest]()
    for request in requests:
        (on_hub if isinstance(request.first.file[0], hub_addresses.Repo) else on_web).append(request)
    return on_hub, on_web
