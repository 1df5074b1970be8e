"""Selection of manifest rows by count, condition, ids or a seeded random draw; and citations of selections.

A citation is `LABEL@COMMIT/NAME#IDS~CHECK`: the source, its commit, the collection, the ids in their order, and the
first eight hex digits of a hash over the rows. In the ids `0-99,205,7@40`, an id without epoch means the member's final
snapshot, and `7@40` means member 7 after epoch 40.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.formats.where import columns_in, rows_where

_ID_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?(?:@([0-9]{1,10}))?")
_CITATION = re.compile(
    r"(?P<label>.+)@(?P<commit>[0-9a-f]{40})/(?P<name>[^/#~@]+)#(?P<ids>[^#~]+)~(?P<check>[0-9a-f]{8})"
)

LARGEST_ID_RANGE = 1_000_000

SnapshotKey = tuple[int, int | None]


def select_rows(
    rows: pa.Table,
    collection: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
) -> pa.Table:
    """Select rows of a manifest; return them in the order of `members`, or in the manifest's order without `members`.

    By default, only final rows with status "ok" can be selected. If the condition `where` uses the column `status`,
    rows of any status can be selected. If `snapshots` is true, or `where` uses the columns `epoch` or `final`, rows
    that are not final can be selected too.

    Args:
        rows: the manifest.
        collection: name of the collection, for errors.
        n: number of rows to select: the first n rows, or with `sample` n rows drawn without replacement.
        where: an SQL condition on the manifest's columns that selected rows must meet.
        members: ids of the members to select, or a text of ids ("0-99,205,7@40").
        sample: seed of the random draw, which takes the n rows with the smallest sha256("sample|SEED|MEMBER|EPOCH").
        snapshots: whether rows of snapshots that are not final can be selected too.

    Raises:
        SelectionError: no row can be selected by these arguments, or the arguments exclude each other.
        MemberNotFound: no row has one of the ids.
    """
    if members is not None:
        if where is not None or sample is not None or snapshots:
            raise SelectionError(
                f"selection of {collection}",
                expected="`members` alone or with `n`",
                found="`where`, `sample` or `snapshots`",
            )
        candidate_rows = manifest.take_rows(rows, _find_positions(rows, collection, parse_ids(members)))
    else:
        candidate_rows = _matching_rows(rows, collection, where, snapshots)
    if n is None and sample is None:
        return candidate_rows
    requested_n, n = n, whole_number(n)
    if n is None or not 1 <= n <= candidate_rows.num_rows:
        found = "no n beside `sample`" if requested_n is None else f"n={requested_n!r}"
        condition_text = f" {'with ' + where if where else ''}".rstrip()
        raise SelectionError(
            f"number of members of {collection}",
            expected=f"n from 1 to {candidate_rows.num_rows:,}, as many as there are{condition_text}",
            found=found,
            collection=collection,
        )
    if sample is None:
        return candidate_rows.slice(0, n)
    seed = whole_number(sample)
    if seed is None:
        raise SelectionError(f"sample of {collection}", expected="a whole number as seed", found=repr(sample))
    keys = zip(candidate_rows.column("member").to_pylist(), candidate_rows.column("epoch").to_pylist(), strict=True)
    rank_digests = [hashlib.sha256(f"sample|{seed}|{m}|{e}".encode()).digest() for m, e in keys]
    drawn_positions = sorted(range(len(rank_digests)), key=rank_digests.__getitem__)[:n]
    return manifest.take_rows(candidate_rows, sorted(drawn_positions))


def _matching_rows(rows: pa.Table, collection: str, where: str | None, snapshots: bool) -> pa.Table:
    used_columns = columns_in(where) if where is not None else ()
    status, final = rows.column("status").to_pylist(), rows.column("final").to_pylist()
    positions = [
        position
        for position in range(rows.num_rows)
        if (status[position] == "ok" or "status" in used_columns)
        and (final[position] or snapshots or "epoch" in used_columns or "final" in used_columns)
    ]
    candidates = manifest.take_rows(rows, positions)
    if not candidates.num_rows:
        raise SelectionError(
            f"selection of {collection}",
            expected="rows that are final with status ok",
            found=f"none of {rows.num_rows}",
        )
    return candidates if where is None else manifest.take_rows(candidates, rows_where(candidates, where).tolist())


def _find_positions(rows: pa.Table, collection: str, snapshot_keys: Sequence[SnapshotKey]) -> list[int]:
    columns = {c: rows.column(c).to_pylist() for c in ("member", "epoch", "final", "status", "reason")}
    position_of: dict[SnapshotKey, int] = {}
    for place, final in enumerate(columns["final"]):
        position_of[columns["member"][place], columns["epoch"][place]] = place
        if final:
            position_of[columns["member"][place], None] = place
    positions: list[int] = []
    for member, epoch in snapshot_keys:
        position = position_of.get((member, epoch))
        if position is None:
            raise member_not_found(rows, collection, member, epoch)
        if (status := columns["status"][position]) != "ok":
            found = f"{status} ({columns['reason'][position] or 'no reason given'})"
            raise SelectionError(
                f"member {member} of {collection}",
                expected="status ok",
                found=found,
                do=f"""`where="member = {member} and status = '{status}'"` selects it nevertheless""",
                collection=collection,
                member=member,
            )
        positions.append(position)
    if len(set(positions)) < len(positions):
        repeated_key = snapshot_keys[next(i for i, position_of in enumerate(positions) if position_of in positions[:i])]
        raise SelectionError(
            f"selection of {collection}",
            expected="each member once",
            found=f"member {format_ids([repeated_key])} twice",
        )
    return positions


def member_not_found(rows: pa.Table, collection: str, member: Any, epoch: int | None = None) -> MemberNotFound:
    """Return the error for an id that no row has."""
    present_ids = sorted(set(rows.column("member").to_pylist()))
    expected = f"an id among {format_ids([(m, None) for m in present_ids])}"
    found = repr(member)
    if epoch is not None and member in present_ids:
        pairs = zip(rows.column("member").to_pylist(), rows.column("epoch").to_pylist(), strict=True)
        expected = f"an epoch among {', '.join(str(e) for m, e in pairs if m == member)}"
        found = str(epoch)
    return MemberNotFound(
        f"member {member!r} of {collection}", expected=expected, found=found, collection=collection,
        member=member if type(member) is int else None,
    )  # fmt: skip


def parse_ids(members: str | Iterable[int]) -> list[SnapshotKey]:
    """Read ids from a text or a list; return (member, epoch) pairs, where epoch None means the final snapshot.

    >>> parse_ids("0-2,7@40")
    [(0, None), (1, None), (2, None), (7, 40)]

    Raises:
        SelectionError: there are no ids, or the text is not a list of ids.
    """
    keys: list[SnapshotKey] = []
    if isinstance(members, str):
        for part in members.split(","):
            match = _ID_RANGE.fullmatch(part.strip())
            if not match or (match[2] and not 0 <= int(match[2]) - int(match[1]) < LARGEST_ID_RANGE):
                raise SelectionError(
                    f"members {members[:80]!r}", expected="ids such as '0-99,205,7@40'", found=repr(part[:40])
                )
            epoch = int(match[3]) if match[3] else None
            keys += [(m, epoch) for m in range(int(match[1]), int(match[2] or match[1]) + 1)]
    else:
        if not isinstance(members, Iterable):
            raise SelectionError("members", expected="ids in a list, or their text", found=repr(members)[:80])
        for member in members:
            id = whole_number(member)
            if id is None:
                raise SelectionError("members", expected="whole numbers", found=repr(member)[:80])
            keys.append((id, None))
    if not keys:
        raise SelectionError("members", expected="one id or more", found="none")
    return keys


def format_ids(snapshot_keys: Sequence[SnapshotKey]) -> str:
    """Write (member, epoch) pairs as text that `parse_ids` reads; return it.

    >>> format_ids([(0, None), (1, None), (2, None), (9, None), (7, 40)])
    '0-2,9,7@40'
    """
    id_ranges: list[list[Any]] = []
    for member, epoch in snapshot_keys:
        if id_ranges and id_ranges[-1][2] == epoch and id_ranges[-1][1] + 1 == member:
            id_ranges[-1][1] = member
        else:
            id_ranges.append([member, member, epoch])
    return ",".join(
        (f"{a}" if a == b else f"{a}-{b}") + ("" if epoch is None else f"@{epoch}") for a, b, epoch in id_ranges
    )


def check_digits(rows: pa.Table) -> str:
    """Hash the values (member, epoch, sha256) of all rows, with the location of a member whose sha256 is null; return
    the first 8 hex digits."""
    digest = hashlib.sha256()
    names = ("member", "epoch", "sha256", "path", "offset", "nbytes")
    for m, e, sha, path, offset, nbytes in zip(*(rows.column(c).to_pylist() for c in names), strict=True):
        digest.update(f"{m}|{e}|{sha or f'{path}|{offset}|{nbytes}'}\n".encode())
    return digest.hexdigest()[:8]


def cite(source_label: str, commit: str, collection: str, rows: pa.Table) -> str:
    """Return the citation text of selected rows."""
    return f"{source_label}@{commit}/{collection}#{format_ids(manifest.snapshot_keys(rows))}~{check_digits(rows)}"


@dataclass(frozen=True)
class Citation:
    """The parts of a citation `LABEL@COMMIT/NAME#IDS~CHECK`."""

    label: str
    commit: str
    name: str
    ids: str
    check: str

    @property
    def source(self) -> str:
        """Address of the cited source; for a Hub repo, the address at the cited commit."""
        return f"{self.label}@{self.commit}" if self.label.startswith("hf://") else self.label


def parse_citation(citation: str) -> Citation | None:
    """Parse a citation; return its parts, or None if the text is a collection's plain name.

    Raises:
        SelectionError: the text contains `#` or `@` but is not a citation.
    """
    if match := _CITATION.fullmatch(citation):
        return Citation(**match.groupdict())
    if "#" in citation or "@" in citation:
        raise SelectionError(
            f"citation {citation[:120]!r}", expected="SOURCE@COMMIT/NAME#IDS~CHECK", found="another form",
            do="Copy the whole citation, up to the eight digits after `~`",
        )  # fmt: skip
    return None


def verify_citation(citation: Citation, present_commit: str, rows: pa.Table) -> None:
    """Check that the rows of a citation have not changed since they were cited.

    Raises:
        DamagedError: the rows of the source have changed since they were cited.
    """
    check = check_digits(rows)
    if (citation.commit, citation.check) == (present_commit, check):
        return
    comparison = "the same weights" if citation.check == check else "other weights"
    raise source_changed(citation, present_commit, f"with check {check}, these ids now name {comparison}")


def source_changed(citation: Citation, present_commit: str, change: str) -> DamagedError:
    """Return the error for a source that has changed since it was cited."""
    return DamagedError(
        f"citation of {citation.name}",
        expected=f"{citation.label} at {citation.commit[:12]} with check {citation.check}",
        found=f"it at {present_commit[:12]}, so it has changed: {change}"
        if present_commit != citation.commit
        else change,
        do=f"Load it anew with source= and members={citation.ids!r}",
        collection=citation.name,
    )
