"""What an origin holds, before any weights are read: its members, of what net they are, and the rows they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.interop.ingest import checkpoint_members, pickles
from checkpoints_zoo.interop.ingest.given_columns import Tells, check_net, described, renewed
from checkpoints_zoo.interop.ingest.measuring import Row, batches
from checkpoints_zoo.interop.ingest.networks import Build, Net, knower, teller
from checkpoints_zoo.interop.ingest.origin import Origin, Say
from checkpoints_zoo.interop.ingest.pickles import Within
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.archives import Lot
from checkpoints_zoo.sources.fetching import GAP, LARGEST_RUN
from checkpoints_zoo.sources.source import FolderSource


@dataclass(frozen=True)
class How:
    """What a user says of the members: their net, what builds it, columns, and whether all must fit."""

    net: Net
    build: Build | None
    columns: Tells | None
    strict: bool

    def within(self, origin: Origin) -> Within | None:
        """Say where in files of torch.save the state dicts lie, None for other files."""
        return Within(self.net.key, knower(self.net, self.build)) if origin.pickles else None


def survey(
    found: Origin,
    name: str,
    staged: Mapping[str, archives.Index],
    predicted: bool,
    given: Mapping[str, Any],
    like: str | None,
    how: How,
    copied: Path | None,
    say: Say,
) -> Survey:
    """Find out what members an origin holds, and of what net; return it, with what its own manifest says already.

    Args:
        found: the origin.
        name: of the collection.
        staged: what its gzipped archives hold.
        predicted: whether the index of a repo's archive may be predicted.
        given, like: as in `described`.
        how: what the user says of the members.
        copied: folder that they are copied into, whose manifest is that of the copies; None where they stay.
        say: told of files that are left out.

    Raises:
        DamagedError, LayoutError: no members, or of no net that is known.
        UsageError, CollectionNotFound, FormatError: as in `described`; a manifest of other members.
        NetworkError, AccessError: a repo that can't be read.
    """
    if how.columns is not None and found.archives:
        raise UsageError("columns by file", expected="members that are files of their own", found="archives")
    there: list[Lot] = checkpoint_members.of_archives(found, staged, predicted) if found.archives else []
    if found.files:
        there.append(checkpoint_members.numbered(checkpoint_members.of_files(found, say), found.files))
    if within := how.within(found):
        there.append(checkpoint_members.numbered(pickles.lot_of_pickles(found, within), found.pickles))
    tell = teller(how.net, there, how.build)
    if how.strict:
        checkpoint_members.check_all(found.label, there, tell)
    broken = [why for lot in there for _, why in lot.broken]
    if not any(lot.members for lot in there):
        first = f"{len(broken):,} damaged ones, the first: {broken[0]}".rstrip(".") if broken else "none"
        raise DamagedError(f"source {found.label}", expected="members", found=first)
    try:
        rows, layouts, told = archives.rows_of_lots(there, tell)
    except LayoutError as error:
        if how.net == Net():
            error.do = "Give --architecture NAME for a net of the package, or --architecture-name TEXT for your own"
        raise
    description = described(name, told, layouts, given, like)
    check_net(description, how.build)
    if found.repo is not None:
        description = replace(description, base=str(found.repo))
    files = checkpoint_members.members_of(there)
    columns = {} if how.columns is None else how.columns(files)
    table = manifest.table(row | columns.get(row["member"], {}) for row in rows)
    surveyed = Survey(found, description, table, given, like, files, columns)
    if found.repo is not None or copied == found.root:
        return surveyed
    return surveyed.known(FolderSource(found.root, found.root.as_uri()))


@dataclass(frozen=True)
class Survey:
    """What an origin holds, written down as a source would: its description, and its rows with their places.

    `files`: path of each member's file, where it has one of its own; `told`: columns that the user gives.
    """

    origin: Origin
    description: Description
    rows: pa.Table
    given: Mapping[str, Any]
    like: str | None
    files: Mapping[str, int]
    told: Mapping[int, Mapping[str, Any]]

    def plan(self, target: str, reads: bool) -> Plan:
        headers = checkpoint_members.unverified(self.origin)
        return planned(self.description, self.origin, target, self.rows.to_pylist(), headers, reads)

    def known(self, source: FolderSource) -> Survey:
        """Take over what a manifest of these same members says already; return that.

        Raises:
            UsageError: there is a manifest of that name, of other members.
        """
        path = source.manifest_path(self.description.name)
        if not path.is_file():
            return self
        old, rows = source.read(self.description.name)
        if difference := _difference(self, old, rows):
            raise UsageError(
                f"manifest {path}",
                expected=f"the members of {self.origin.label}, or no manifest of that name",
                found=difference,
                do="Give the collection another name or folder, or delete the manifest",
                collection=self.description.name,
                path=path,
            )
        description = renewed(self.description, self.given, self.like, old)
        return replace(self, description=replace(description, layouts=old.layouts), rows=rows)

    def write(self, target: FolderSource) -> None:
        """Write description and manifest, or go on with those of the same members that are there."""
        now, name = self.known(target), self.description.name
        manifest.validate(now.rows, now.description, target.manifest_path(name))
        catalog.write_json(now.description.to_json(), target.description_path(name))
        if now is self:
            manifest.write(now.rows, target.manifest_path(name))


def _difference(new: Survey, old: Description, rows: pa.Table) -> str:
    """Say in what a manifest that is there differs from that of these members; return "" if in nothing that counts."""
    if old.base != new.description.base:
        return f"members in {old.base or 'this folder'}, not in {new.description.base or 'this folder'}"
    if (old.architecture, dict(old.arguments)) != (new.description.architecture, dict(new.description.arguments)):
        return f"members of {old.architecture} with {dict(old.arguments)}"
    columns = ("member", "epoch", "path", "offset", "nbytes")
    mine, theirs = (list(zip(*(t.column(c).to_pylist() for c in columns), strict=True)) for t in (new.rows, rows))
    if len(mine) != len(theirs):
        return f"{len(theirs):,} members, not {len(mine):,}"
    lain = zip(new.rows.column("layout").to_pylist(), rows.column("layout").to_pylist(), strict=True)
    for one, other, (key, was) in zip(mine, theirs, lain, strict=True):
        if one != other or (key and new.description.layouts[key] != old.layouts[was]):
            return f"member {other[0]} elsewhere or of other tensors"
    return ""


@dataclass(frozen=True)
class Plan:
    """What an import would do.

    Args:
        collection, source, target: names of what is imported, from where, and the folder that is written to.
        files: of the source.
        members, ok, failed, excluded: rows of the manifest, and how many of them are what; None where only reading
            a gzipped archive tells.
        bytes: of the members that have some; of gzipped archives, their own.
        read: bytes of members that are to be read.
        requests: to the Hub, about.
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


def planned(
    description: Description, origin: Origin, target: str, rows: Sequence[Mapping[str, Any]], headers: int, reads: bool
) -> Plan:
    """Plan an import of members that are known; return the plan.

    Args:
        description, origin, target: what is imported, from where, and to which folder.
        rows: as they would be.
        headers: that are still to be read, a request each.
        reads: whether weights are read, to be hashed, measured or copied.
    """
    located = [dict(row) for row in rows if row["path"] is not None]
    size = sum(row["nbytes"] for row in located)
    requests = 0
    if origin.repo is not None:
        requests = headers + (_ranges(located) + len(origin.paths) if reads else 0)
    return Plan(
        description.name, origin.label, target, len(origin.paths), len(rows), **counted(rows), bytes=size,
        read=size if reads else 0, requests=requests,
    )  # fmt: skip


def unseen(name: str, origin: Origin, target: str) -> Plan:
    """Plan an import of archives that are gzipped, and whose members nobody knows yet; return the plan."""
    size = sum(origin.size(p) for p in origin.archives)
    requests = -(-size // 2**23) + len(origin.archives) if origin.repo else 0
    return Plan(name, origin.label, target, len(origin.paths), None, None, None, None, size, size, requests)


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count rows by their status; return the three counts."""
    counts = Counter(row["status"] for row in rows)
    return {status: counts[status] for status in ("ok", "failed", "excluded")}


def _ranges(rows: Sequence[Row]) -> int:
    """Count the ranges that bring members: neighbours of a batch together, long ones cut."""
    count = 0
    for batch in batches(sorted(rows, key=lambda r: (r["path"], r["offset"]))):
        begin, end, inside = 0, 0, None
        for row in batch:
            start, stop = row["offset"], row["offset"] + row["nbytes"]
            if row["path"] != inside or start > end + GAP:
                count += -(-(end - begin) // LARGEST_RUN)
                begin, inside = start, row["path"]
            end = stop
        count += -(-(end - begin) // LARGEST_RUN)
    return count
