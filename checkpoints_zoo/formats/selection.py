"""Selection of manifest rows by count, condition, ids or a seeded random draw; and citations of selections.

A citation is `LABEL@COMMIT/NAME#IDS~CHECK`: the source, its commit, the collection, the ids in their order, and the
first eight hex digits of a hash over the rows. In the ids `0-99,205,7@40`, an id without epoch means the member's final
snapshot, and `7@40` means member 7 after epoch 40.

This is one file, because a citation is a selection by ids with a check.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError
from checkpoints_zoo.formats import arrow_tables, manifest
from checkpoints_zoo.formats.member_parts import parts_of_rows
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.formats.where import Condition

_ID_RANGE_PATTERN = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?(?:@([0-9]{1,10}))?")
_CITATION_PATTERN = re.compile(
    r"(?P<label>.+)@(?P<commit>[0-9a-f]{40})/(?P<name>[^/#~@]+)#(?P<ids>[^#~]+)~(?P<check>[0-9a-f]{8})"
)

LARGEST_ID_RANGE = 1_000_000
LONGEST_LIST_TEXT = 200  # Largest number of characters of a list of ids or epochs in an error.
GROUPS_AT_ONCE = 4  # Number of row groups that a search for a number of rows reads at once.

SnapshotKey = tuple[int, int | None]


class Rows(Protocol):
    """The rows of a manifest, of which columns and row groups are read when they are needed."""

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the columns."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""

    @property
    def row_group_starts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Position of each row group's first row, and at the end the number of rows."""

    def fetch(self, names: Sequence[str], groups: Sequence[int]) -> None:
        """Bring columns of some row groups to this machine, so that `read` need not."""

    def read(self, names: Sequence[str], groups: Sequence[int] | None = None) -> pa.Table:
        """Read columns of some row groups; return a table of them."""

    def take(self, positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Table:
        """Read and check whole rows at some positions; return them in the order of the positions."""

    def row_groups_with(
        self, name: str, lows: np.ndarray[tuple[int], Any], highs: np.ndarray[tuple[int], Any]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Find the row groups that may have a value of a column in one of some ascending intervals."""


@dataclass(frozen=True)
class RowsInMemory:
    """The rows of a manifest in a table, as one row group."""

    table: pa.Table

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def num_rows(self) -> int:
        return int(self.table.num_rows)

    @property
    def row_group_starts(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([0, self.num_rows])

    def fetch(self, names: Sequence[str], groups: Sequence[int]) -> None:
        """Do nothing: the rows are here."""

    def read(self, names: Sequence[str], groups: Sequence[int] | None = None) -> pa.Table:
        return self.table.select(list(names))

    def take(self, positions: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.Table:
        return arrow_tables.take_rows(self.table, positions)

    def row_groups_with(
        self, name: str, lows: np.ndarray[tuple[int], Any], highs: np.ndarray[tuple[int], Any]
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([0])


def select_rows(
    rows: pa.Table | Rows,
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
        rows: the manifest, in memory or in a file.
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
    rows = RowsInMemory(rows) if isinstance(rows, pa.Table) else rows
    if members is not None:
        if where is not None or sample is not None or snapshots:
            raise SelectionError(
                f"selection of {collection}",
                expected="`members` alone or with `n`",
                found="`where`, `sample` or `snapshots`",
            )
        positions = _find_positions(rows, collection, parse_ids(members))
    else:
        needed_row_count = whole_number(n) if sample is None else None
        positions = _matching_positions(rows, collection, where, snapshots, needed_row_count)
    if n is None and sample is None:
        return rows.take(positions)
    requested_n, n = n, whole_number(n)
    if n is None or not 1 <= n <= len(positions):
        found = "no n beside `sample`" if requested_n is None else f"n={requested_n!r}"
        condition_text = f" {'with ' + where if where else ''}".rstrip()
        raise SelectionError(
            f"number of members of {collection}",
            expected=f"n from 1 to {len(positions):,}, as many as there are{condition_text}",
            found=found,
            collection=collection,
        )
    if sample is None:
        return rows.take(positions[:n])
    seed = whole_number(sample)
    if seed is None:
        raise SelectionError(f"sample of {collection}", expected="a whole number as seed", found=repr(sample))
    key_table = rows.read(("member", "epoch"))
    member_ids, row_epochs = (arrow_tables.numpy_values(key_table.column(c))[positions] for c in ("member", "epoch"))
    hashed_positions = (
        (hashlib.sha256(f"sample|{seed}|{member}|{epoch}".encode()).digest(), position)
        for member, epoch, position in zip(member_ids.tolist(), row_epochs.tolist(), positions.tolist(), strict=True)
    )
    return rows.take(np.array(sorted(position for _, position in heapq.nsmallest(n, hashed_positions))))


def _matching_positions(
    rows: Rows, collection: str, where: str | None, snapshots: bool, needed_row_count: int | None
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Find the rows that can be selected and meet a condition; return their positions, ascending.

    Args:
        rows, collection, where, snapshots: the same arguments as in `select_rows`.
        needed_row_count: number of rows after which the search may stop; None to find all.
    """
    condition = None if where is None else Condition.parse(where)
    used_columns = () if condition is None else condition.column_names
    read_columns = [c for c in dict.fromkeys(("status", "final", *used_columns)) if c in rows.schema.names]

    def read_candidates(row_groups: Sequence[int]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], pa.Table]:
        """Read the rows of some row groups that can be selected without the condition; return their positions in the
        manifest, and the columns that are needed."""
        table = rows.read(read_columns, row_groups)
        is_candidate = np.ones(table.num_rows, bool)
        if "status" not in used_columns:
            is_candidate &= _equals(table.column("status"), "ok")
        if not (snapshots or "epoch" in used_columns or "final" in used_columns):
            is_candidate &= arrow_tables.numpy_values(table.column("final"))
        row_starts, row_ends = rows.row_group_starts[:-1][row_groups], rows.row_group_starts[1:][row_groups]
        positions = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(start, end) for start, end in zip(row_starts, row_ends, strict=True))]
        )
        positions_in_table = np.flatnonzero(is_candidate)
        return positions[positions_in_table], arrow_tables.take_rows(table, positions_in_table)

    def find_met(row_groups: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the positions of the rows of some row groups that can be selected and meet the condition."""
        positions, table = read_candidates(row_groups)
        return positions if condition is None or not len(positions) else positions[condition.is_met(table, rows.schema)]

    all_row_groups = list(range(len(rows.row_group_starts) - 1))
    if len(all_row_groups) > 1:
        # If a few row groups can't be computed by themselves, or no row is found, all rows are read below.
        possible_row_groups = all_row_groups
        for column, (low, high) in ({} if condition is None else condition.integer_intervals()).items():
            if column in rows.schema.names:
                groups_in_interval = set(rows.row_groups_with(column, np.array([low]), np.array([high])).tolist())
                possible_row_groups = [group for group in possible_row_groups if group in groups_in_interval]
        with contextlib.suppress(SelectionError):
            met_positions = _search_row_groups(
                possible_row_groups, needed_row_count, partial(rows.fetch, read_columns), find_met
            )
            if len(met_positions):
                return met_positions
    positions, table = read_candidates(all_row_groups)
    if not len(positions):
        raise SelectionError(
            f"selection of {collection}",
            expected="rows that are final with status ok",
            found=f"none of {rows.num_rows}",
        )
    if condition is None:
        return positions
    is_met = condition.is_met(table, rows.schema)
    if not is_met.any():
        raise condition.no_row_error(table)
    return positions[is_met]


def _search_row_groups(
    row_groups: Sequence[int],
    needed_row_count: int | None,
    fetch: Callable[[Sequence[int]], None],
    find_met: Callable[[Sequence[int]], np.ndarray[tuple[int], np.dtype[np.int64]]],
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Search row groups, a few at a time, until enough rows are found; return the positions of the rows.

    Args:
        row_groups: numbers of the row groups.
        needed_row_count: number of rows after which the search may stop; None to search all row groups at once.
        fetch: function that brings row groups to this machine, in parts each as long as all parts before it.
        find_met: function that returns the positions of the rows that are searched for in some row groups.
    """
    step = max(1, len(row_groups)) if needed_row_count is None else GROUPS_AT_ONCE
    parts = [np.zeros(0, np.int64)]
    fetched_end = 0
    for start in range(0, len(row_groups), step):
        if needed_row_count is not None and sum(map(len, parts)) >= needed_row_count:
            break
        if start >= fetched_end:
            fetched_end = max(step, 2 * fetched_end)
            fetch(row_groups[start:fetched_end])
        parts.append(find_met(row_groups[start : start + step]))
    return np.concatenate(parts)


def _equals(column: pa.ChunkedArray, text: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Say for each value of a column of texts whether it equals a text."""
    codes, distinct_texts = arrow_tables.text_codes(column)
    is_equal: np.ndarray[tuple[int], np.dtype[np.bool_]] = codes == (
        distinct_texts.index(text) if text in distinct_texts else -2
    )
    return is_equal


def _find_positions(
    rows: Rows, collection: str, keys: Sequence[SnapshotKey]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Find the rows of (member, epoch) pairs; return their positions in the order of the pairs."""
    # A row is found by one number: its member, and its epoch + 1, or 0 for a final row. No row has the number -1.
    requested_codes = np.array(
        [(m << 32) + (0 if e is None else e + 1) if _fits_columns(m, e) else -1 for m, e in keys]
    )
    requested_ids = np.unique(requested_codes[requested_codes >= 0] >> 32)
    row_groups = rows.row_groups_with("member", requested_ids, requested_ids).tolist()
    table = rows.read(("member", "epoch", "final", "status", "reason"), row_groups)
    member_ids, epochs, is_final = (arrow_tables.numpy_values(table.column(c)) for c in ("member", "epoch", "final"))
    id_codes = member_ids.astype(np.int64) << 32
    snapshot_codes = np.concatenate([id_codes + epochs + 1, id_codes[is_final]])
    row_of_code = np.concatenate([np.arange(table.num_rows), np.flatnonzero(is_final)])
    code_order = np.argsort(snapshot_codes, kind="stable")
    sorted_codes = snapshot_codes[code_order]
    first_places, end_places = (
        np.searchsorted(sorted_codes, requested_codes, side=search_side) for search_side in ("left", "right")
    )
    is_present = first_places < end_places
    positions_in_table = (
        row_of_code[code_order[np.where(is_present, end_places - 1, 0)]]
        if len(code_order)
        else np.zeros(len(keys), np.int64)
    )
    is_ok = is_present.copy()
    is_ok[is_present] = _equals(table.column("status"), "ok")[positions_in_table[is_present]]
    positions_of_groups = [np.arange(*rows.row_group_starts[group : group + 2]) for group in row_groups]
    positions = np.concatenate([np.zeros(0, np.int64), *positions_of_groups])
    if not is_ok.all():
        key_number = int(np.argmin(is_ok))
        member, epoch = keys[key_number]
        if not is_present[key_number]:
            raise member_not_found(rows.read(("member", "epoch")), collection, member, epoch)
        status, reason = (table.column(c)[int(positions_in_table[key_number])].as_py() for c in ("status", "reason"))
        raise SelectionError(
            f"member {member} of {collection}",
            expected="status ok",
            found=f"{status} ({reason or 'no reason given'})",
            do=f"""`where="member = {member} and status = '{status}'"` selects it nevertheless""",
            collection=collection,
            member=member,
        )
    is_twice = end_places - first_places > 1
    if is_twice.any():  # The manifest has two rows of one snapshot: reading both raises the error.
        key_number = int(np.argmax(is_twice))
        rows.take(positions[row_of_code[code_order[first_places[key_number] : end_places[key_number]]]])
    is_repeated = np.ones(len(keys), bool)
    is_repeated[np.unique(positions_in_table, return_index=True)[1]] = False
    if is_repeated.any():
        repeated_key = keys[int(np.argmax(is_repeated))]
        raise SelectionError(
            f"selection of {collection}",
            expected="each member once",
            found=f"member {format_ids([repeated_key])} twice",
        )
    positions_of_keys: np.ndarray[tuple[int], np.dtype[np.int64]] = positions[positions_in_table]
    return positions_of_keys


def _fits_columns(member: int, epoch: int | None) -> bool:
    """Say whether a manifest's columns can hold a member and an epoch."""
    return 0 <= member < 2**31 and (epoch is None or epoch < 2**31)


def member_not_found(rows: pa.Table, collection: str, member: Any, epoch: int | None = None) -> MemberNotFound:
    """Return the error for an id that no row has."""
    ids_of_rows = arrow_tables.numpy_values(rows.column("member"))
    present_ids = np.sort(ids_of_rows)  # An id may occur several times; np.unique would take seconds for a million.
    range_starts = np.flatnonzero(np.append(True, np.diff(present_ids) > 1)[: len(present_ids)])
    range_ends = np.append(range_starts[1:], len(present_ids))[: len(range_starts)] - 1
    range_ids = zip(present_ids[range_starts].tolist(), present_ids[range_ends].tolist(), strict=True)
    id_ranges = [f"{first_id}" if first_id == last_id else f"{first_id}-{last_id}" for first_id, last_id in range_ids]
    expected = f"an id among {_shorten_list(','.join(id_ranges) or 'none', ',')}"
    found = repr(member)
    if epoch is not None and member in present_ids:
        epochs = arrow_tables.numpy_values(rows.column("epoch"))[ids_of_rows == member].tolist()
        expected = f"an epoch among {_shorten_list(', '.join(map(str, epochs)), ', ')}"
        found = str(epoch)
    return MemberNotFound(
        f"member {member!r} of {collection}", expected=expected, found=found, collection=collection,
        member=member if type(member) is int else None,
    )  # fmt: skip


def _shorten_list(list_text: str, separator: str) -> str:
    """Leave out the middle of a long list; return the text of the list."""
    if len(list_text) <= LONGEST_LIST_TEXT:
        return list_text
    list_start = list_text[: LONGEST_LIST_TEXT // 2].rpartition(separator)[0]
    return f"{list_start}{separator}…{separator}{list_text.rpartition(separator)[2]}"


def parse_ids(members: str | Iterable[int]) -> list[SnapshotKey]:
    """Read ids from a text or a list; return (member, epoch) pairs, where epoch None means the final snapshot.

    >>> parse_ids("0-2,7@40")
    [(0, None), (1, None), (2, None), (7, 40)]

    Raises:
        SelectionError: there are no ids, or the text is not a list of ids.
    """
    keys: list[SnapshotKey] = []
    if isinstance(members, str):
        for range_text in members.split(","):
            range_match = _ID_RANGE_PATTERN.fullmatch(range_text.strip())
            if not range_match or (
                range_match[2] and not 0 <= int(range_match[2]) - int(range_match[1]) < LARGEST_ID_RANGE
            ):
                raise SelectionError(
                    f"members {members[:80]!r}", expected="ids such as '0-99,205,7@40'", found=repr(range_text[:40])
                )
            epoch = int(range_match[3]) if range_match[3] else None
            keys += [(m, epoch) for m in range(int(range_match[1]), int(range_match[2] or range_match[1]) + 1)]
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
    columns = (rows.column(c).to_pylist() for c in ("member", "epoch", "sha256"))
    for member, epoch, sha, parts in zip(*columns, parts_of_rows(rows), strict=True):
        digest.update(f"{member}|{epoch}|{sha or '+'.join(map(str, parts)) or 'None|None|None'}\n".encode())
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
    if match := _CITATION_PATTERN.fullmatch(citation):
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
    present_check = check_digits(rows)
    if (citation.commit, citation.check) == (present_commit, present_check):
        return
    weights_text = "other weights"
    if citation.check == present_check:  # Without hashes, the check knows only where the weights are.
        weights_text = "the same places" if rows.column("sha256").null_count else "the same weights"
    raise source_changed(citation, present_commit, f"with check {present_check}, these ids now name {weights_text}")


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
