"""Survey of an origin before any weights are read: its members, their net, and their rows.

This is one file, because the plan of an import is what the survey found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats import catalog, manifest, row_checks
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.interop.ingest import checkpoint_members, measuring, torch_files
from checkpoints_zoo.interop.ingest.measuring import Row, batch_rows
from checkpoints_zoo.interop.ingest.networks import Build, NetSpec, make_recogniser, recogniser_of_user_net
from checkpoints_zoo.interop.ingest.origin import Origin, Say
from checkpoints_zoo.interop.ingest.selection import NetTensors
from checkpoints_zoo.interop.ingest.torch_files import StateDictPlace
from checkpoints_zoo.interop.ingest.user_columns import ColumnReader
from checkpoints_zoo.interop.ingest.user_facts import check_net, make_description, with_earlier_facts
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.archives import MemberGroup
from checkpoints_zoo.sources.fetching import LARGEST_RANGE_NBYTES, LARGEST_READ_GAP_NBYTES
from checkpoints_zoo.sources.folder_source import FolderSource


@dataclass(frozen=True)
class ImportOptions:
    """The user's options: net, function that builds the net, columns, and whether every file must fit.

    `earlier_ids`: path -> member of the files that an earlier import of the same folder has.
    """

    net: NetSpec
    build: Build | None
    columns: ColumnReader | None
    strict: bool
    earlier_ids: Mapping[str, int] = field(default_factory=dict)

    def state_dict_place(self, origin: Origin) -> StateDictPlace | None:
        """Return the place of the state dict in files of torch.save; None for other files."""
        if not origin.pickles:
            return None
        recogniser = recogniser_of_user_net(self.net, self.build)
        return StateDictPlace(self.net.key, recogniser, NetTensors.of(self.net, self.build))


def survey_origin(
    origin: Origin,
    collection: str,
    staged_indexes: Mapping[str, archives.Index],
    may_predict: bool,
    user_facts: Mapping[str, Any],
    like: str | None,
    options: ImportOptions,
    copy_root: Path | None,
    say: Say,
) -> Survey:
    """Find the members of an origin and their net; return the survey, merged with an existing manifest.

    Args:
        origin: the origin.
        collection: name of the collection.
        staged_indexes: indexes of the origin's gzipped archives.
        may_predict: whether the index of a repo's archive may be predicted.
        user_facts, like: the same arguments as in `make_description`.
        options: the user's options for the members.
        copy_root: folder that members are copied into, which has the manifest of the copies; None without copies.
        say: function called with a line of text on files that are left out.

    Raises:
        DamagedError, LayoutError: there are no members, or their net is unknown.
        UsageError, CollectionNotFound, FormatError: the same cases as in `make_description`; or a manifest of other
            members.
        NetworkError, AccessError: the repo can't be read.
    """
    if options.columns is not None and origin.archives:
        raise UsageError("columns by file", expected="members that are files of their own", found="archives")
    member_groups: list[MemberGroup] = (
        checkpoint_members.members_of_archives(origin, staged_indexes, may_predict) if origin.archives else []
    )
    if origin.files:
        file_members = checkpoint_members.number_members(
            checkpoint_members.members_of_files(origin, say), origin.files, options.earlier_ids
        )
        if copy_root is not None and origin.repo is None and _needs_selection(file_members, options):
            origin = replace(
                origin, files=(), pickles=origin.files
            )  # files with further tensors are read as state dicts, from which the net's tensors are selected
        else:
            member_groups.append(file_members)
    if state_dict_place := options.state_dict_place(origin):
        member_groups.append(
            checkpoint_members.number_members(
                torch_files.members_of_pickles(origin, state_dict_place), origin.pickles, options.earlier_ids
            )
        )
    recogniser = make_recogniser(options.net, member_groups, options.build)
    if options.strict:
        checkpoint_members.check_all_fit(origin.label, member_groups, recogniser)
    broken = [why for group in member_groups for _, why in group.damaged]
    if not any(group.members for group in member_groups):
        found = f"none in {len(broken):,} files, the first: {broken[0]}" if broken else "none"
        raise DamagedError(f"source {origin.label}", expected="members", found=found)
    try:
        rows, layouts, net = archives.rows_of_groups(member_groups, recogniser)
    except LayoutError as error:
        if options.net == NetSpec():
            error.do = "Give --architecture NAME for a net of the package, or --architecture-name TEXT for your own"
        raise
    description = make_description(collection, net, layouts, user_facts, like)
    check_net(description, options.build)
    if origin.repo is not None:
        description = replace(description, base=str(origin.repo))
    files = checkpoint_members.member_id_by_path(member_groups)
    columns = {} if options.columns is None else options.columns(files)
    table = manifest.build_manifest(row | columns.get(row["member"], {}) for row in rows)
    survey = Survey(origin, description, table, user_facts, like, files, columns)
    if origin.repo is not None or copy_root == origin.root:
        return survey
    return survey.with_existing_manifest(FolderSource(origin.root, origin.root.as_uri()))


def _needs_selection(members: MemberGroup, options: ImportOptions) -> bool:
    """Return whether files of a known net hold other tensors than the net's."""
    recogniser = recogniser_of_user_net(options.net, options.build)
    if recogniser is None:
        return False
    for head in {id(member.header): member.header for member in members.members}.values():
        try:
            recogniser(head)
        except LayoutError:
            return True
    return False


@dataclass(frozen=True)
class Survey:
    """An origin read as a source: description and manifest rows of its members, with byte locations.

    `files`: path -> id of the member that has this file to itself. `user_columns`: member -> columns from the user.
    """

    origin: Origin
    description: Description
    rows: pa.Table
    user_facts: Mapping[str, Any]
    like: str | None
    files: Mapping[str, int]
    user_columns: Mapping[int, Mapping[str, Any]]

    def plan(self, target: str, reads_weights: bool) -> ImportPlan:
        header_count = checkpoint_members.count_predicted_headers(self.origin)
        return make_plan(self.description, self.origin, target, self.rows.to_pylist(), header_count, reads_weights)

    def with_existing_manifest(self, source: FolderSource) -> Survey:
        """Merge the survey into an existing manifest, whose rows and facts stay, but for figures of other facts; return
        the merged survey.

        Raises:
            UsageError: the collection has a manifest with members that are not in the survey.
        """
        path = source.manifest_path(self.description.name)
        if not path.is_file():
            return self
        old_description, rows = source.read_collection(self.description.name)
        if difference := _manifest_difference(self, old_description, rows):
            raise UsageError(
                f"manifest {path}",
                expected=f"the members of {self.origin.label}, or no manifest of that name",
                found=difference,
                do="Give the collection another name or folder, or delete the manifest",
                collection=self.description.name,
                path=path,
            )
        description = with_earlier_facts(self.description, self.user_facts, self.like, old_description)
        layouts = {**self.description.layouts, **old_description.layouts}
        earlier_rows = rows.to_pylist()
        measuring.drop_stale_figures(earlier_rows, old_description, description)
        all_rows = _with_new_rows(manifest.build_manifest(earlier_rows), self.rows)
        return replace(self, description=replace(description, layouts=layouts), rows=all_rows)

    def write(self, target: FolderSource) -> None:
        """Write description and manifest; rows of an existing manifest stay."""
        current, name = self.with_existing_manifest(target), self.description.name
        path = target.manifest_path(name)
        is_changed = not path.is_file() or not target.read_collection(name)[1].equals(current.rows)
        row_checks.check_rows(current.rows, current.description, target.manifest_path(name))
        catalog.write_json(current.description.to_json(), target.description_path(name))
        if is_changed:
            manifest.write_manifest(current.rows, target.manifest_path(name))


def _manifest_difference(survey: Survey, old_description: Description, old_rows: pa.Table) -> str:
    """Return how an existing manifest differs from a survey; "" if all its members are in the survey unchanged."""
    if old_description.base != survey.description.base:
        return f"members in {old_description.base or 'this folder'}, not in {survey.description.base or 'this folder'}"
    if (old_description.architecture, dict(old_description.arguments)) != (
        survey.description.architecture,
        dict(survey.description.arguments),
    ):
        return f"members of {old_description.architecture} with {dict(old_description.arguments)}"
    columns = ("member", "epoch", "path", "offset", "nbytes")
    surveyed_places, old_places = (
        list(zip(*(t.column(c).to_pylist() for c in columns), strict=True)) for t in (survey.rows, old_rows)
    )
    added_count = len(surveyed_places) - len(old_places)
    if added_count < 0 or (added_count and any("!" in (path or "") for _, _, path, *_ in surveyed_places)):
        return f"{len(old_places):,} members, not {len(surveyed_places):,}"
    layout_key_of_place = dict(zip(surveyed_places, survey.rows.column("layout").to_pylist(), strict=True))
    for row, old_layout_key in zip(old_places, old_rows.column("layout").to_pylist(), strict=True):
        key = layout_key_of_place.get(row)
        if row not in layout_key_of_place or (
            key and survey.description.layouts[key] != old_description.layouts[old_layout_key]
        ):
            return f"member {row[0]} elsewhere or of other tensors"
    return ""


def _with_new_rows(old_rows: pa.Table, surveyed_rows: pa.Table) -> pa.Table:
    """Add the surveyed rows of members that a manifest lacks; return all rows, in the order of their ids."""
    old_members = set(old_rows.column("member").to_pylist())
    new_rows = [row for row in surveyed_rows.to_pylist() if row["member"] not in old_members]
    return manifest.build_manifest([*old_rows.to_pylist(), *new_rows]) if new_rows else old_rows


@dataclass(frozen=True)
class ImportPlan:
    """The plan of an import.

    Args:
        collection, source, target: name of the collection, label of the origin, and folder that is written to.
        files: number of files of the origin.
        members, ok, failed, excluded: number of rows, and of rows with each status; None for gzipped archives, which
            must be read first.
        bytes: total size of the members in bytes; for gzipped archives, the size of the archives.
        read: number of bytes that the import will read of members.
        requests: approximate number of requests to the Hub.
    """

    collection: str
    source: str
    target: str
    files: int
    members: int | None
    ok: int | None
    failed: int | None
    excluded: int | None
    bytes: int
    read: int
    requests: int


def make_plan(
    description: Description,
    origin: Origin,
    target: str,
    rows: Sequence[Mapping[str, Any]],
    header_count: int,
    reads_weights: bool,
) -> ImportPlan:
    """Return the plan of an import of surveyed members.

    Args:
        description, origin, target: description of the collection, its origin, and the folder that is written to.
        rows: rows of the manifest.
        header_count: number of headers that must still be read, one request each.
        reads_weights: whether weights are read, to hash, measure or copy them.
    """
    located_rows = [dict(row) for row in rows if row["path"] is not None]
    members_nbytes = sum(row["nbytes"] for row in located_rows)
    requests = 0
    if origin.repo is not None:
        requests = header_count + (_count_range_requests(located_rows) + len(origin.paths) if reads_weights else 0)
    return ImportPlan(
        description.name, origin.label, target, len(origin.paths), len(rows), **status_counts(rows),
        bytes=members_nbytes, read=members_nbytes if reads_weights else 0, requests=requests,
    )  # fmt: skip


def plan_of_gzips(collection: str, origin: Origin, target: str) -> ImportPlan:
    """Return the plan of an import of gzipped archives, whose members are unknown until the archives are read."""
    archives_nbytes = sum(origin.size(p) for p in origin.archives)
    requests = -(-archives_nbytes // 2**23) + len(origin.archives) if origin.repo else 0
    return ImportPlan(
        collection,
        origin.label,
        target,
        len(origin.paths),
        None,
        None,
        None,
        None,
        archives_nbytes,
        archives_nbytes,
        requests,
    )


def status_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of rows with each status."""
    counts = Counter(row["status"] for row in rows)
    return {status: counts[status] for status in ("ok", "failed", "excluded")}


def _count_range_requests(rows: Sequence[Row]) -> int:
    """Return the number of range requests for members: neighbouring members share a request, long ranges are split."""
    request_count = 0
    for batch in batch_rows(sorted(rows, key=lambda r: (r["path"], r["offset"]))):
        range_start, end, path = 0, 0, None
        for row in batch:
            start, stop = row["offset"], row["offset"] + row["nbytes"]
            if row["path"] != path or start > end + LARGEST_READ_GAP_NBYTES:
                request_count += -(-(end - range_start) // LARGEST_RANGE_NBYTES)
                range_start, path = start, row["path"]
            end = stop
        request_count += -(-(end - range_start) // LARGEST_RANGE_NBYTES)
    return request_count
