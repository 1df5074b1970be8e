"""Selection of manifest rows by count, condition, ids or a seeded random draw; and citations of selections.

A citation is `LABEL@COMMIT/NAME#IDS~CHECK`: the source, its commit, the collection, the ids in their order, and the
first eight hex digits of a hash over the rows. In the ids `0-99,205,7@40`, a plain id means the member's final
snapshot, and `7@40` means its snapshot after epoch 40.
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

_PART = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?(?:@([0-9]{1,10}))?")
_CITATION = re.compile(
    r"(?P<label>.+)@(?P<commit>[0-9a-f]{40})/(?P<name>[^/#~@]+)#(?P<ids>[^#~]+)~(?P<check>[0-9a-f]{8})"
)

LONGEST_RANGE = 1_000_000

Key = tuple[int, int | None]


def select_rows(
    rows: pa.Table,
    name: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
) -> pa.Table:
    """Select rows of a manifest; return them in the order of `members`, or in the manifest's order without `members`.

    By default, final rows with status "ok" can be selected. If the condition `where` uses the column `status`, rows of
    any status can be selected. If `snapshots` is true, or `where` uses the columns `epoch` or `final`, rows that are
    not final can be selected too.

    Args:
        rows: the manifest.
        name: name of the collection, for errors.
        n: number of rows to select: the first n, or with `sample` n rows drawn without replacement.
        where: an SQL condition on the manifest's columns that selected rows must meet.
        members: ids of the members to select, or a text of ids ("0-99,205,7@40").
        sample: seed of the random draw, which takes the n rows with the smallest sha256("sample|SEED|MEMBER|EPOCH").
        snapshots: whether rows that are not final can be selected too.

    Raises:
        SelectionError: no rows meet the arguments, or the arguments exclude each other.
        MemberNotFound: no row has one of the ids.
    """
    if members is not None:
        if where is not None or sample is not None or snapshots:
            raise SelectionError(
                f"selection of {name}",
                expected="`members` alone or with `n`",
                found="`where`, `sample` or `snapshots`",
            )
        chosen = manifest.take_rows(rows, _find_positions(rows, name, parse_ids(members)))
    else:
        chosen = _matching_rows(rows, name, where, snapshots)
    if n is None and sample is None:
        return chosen
    requested, n = n, whole_number(n)
    if n is None or not 1 <= n <= chosen.num_rows:
        found = "no n beside `sample`" if requested is None else f"n={requested!r}"
        condition_text = f" {'with ' + where if where else ''}".rstrip()
        raise SelectionError(
            f"number of members of {name}",
            expected=f"n from 1 to {chosen.num_rows:,}, as many as there are{condition_text}",
            found=found,
            collection=name,
        )
    if sample is None:
        return chosen.slice(0, n)
    seed = whole_number(sample)
    if seed is None:
        raise SelectionError(f"sample of {name}", expected="a whole number as seed", found=repr(sample))
    keys = zip(chosen.column("member").to_pylist(), chosen.column("epoch").to_pylist(), strict=True)
    ranks = [hashlib.sha256(f"sample|{seed}|{m}|{e}".encode()).digest() for m, e in keys]
    draws = sorted(range(len(ranks)), key=ranks.__getitem__)[:n]
    return manifest.take_rows(chosen, sorted(draws))


def _matching_rows(rows: pa.Table, name: str, where: str | None, snapshots: bool) -> pa.Table:
    used_columns = columns_in(where) if where is not None else ()
    status, final = rows.column("status").to_pylist(), rows.column("final").to_pylist()
    positions = [
        at
        for at in range(rows.num_rows)
        if (status[at] == "ok" or "status" in used_columns)
        and (final[at] or snapshots or "epoch" in used_columns or "final" in used_columns)
    ]
    candidates = manifest.take_rows(rows, positions)
    if not candidates.num_rows:
        raise SelectionError(
            f"selection of {name}",
            expected="rows that are final with status ok",
            found=f"none of {rows.num_rows}",
        )
    return candidates if where is None else manifest.take_rows(candidates, rows_where(candidates, where).tolist())


def _find_positions(rows: pa.Table, name: str, keys: Sequence[Key]) -> list[int]:
    columns = {c: rows.column(c).to_pylist() for c in ("member", "epoch", "final", "status", "reason")}
    position_of: dict[Key, int] = {}
    for place, final in enumerate(columns["final"]):
        position_of[columns["member"][place], columns["epoch"][place]] = place
        if final:
            position_of[columns["member"][place], None] = place
    positions: list[int] = []
    for member, epoch in keys:
        position = position_of.get((member, epoch))
        if position is None:
            raise member_not_found(rows, name, member, epoch)
        if (status := columns["status"][position]) != "ok":
            found = f"{status} ({columns['reason'][position] or 'no reason given'})"
            raise SelectionError(
                f"member {member} of {name}",
                expected="status ok",
                found=found,
                do=f"""`where="member = {member} and status = '{status}'"` selects it all the same""",
                collection=name,
                member=member,
            )
        positions.append(position)
    if len(set(positions)) < len(positions):
        repeated_key = keys[next(i for i, position_of in enumerate(positions) if position_of in positions[:i])]
        raise SelectionError(
            f"selection of {name}", expected="each member once", found=f"member {format_ids([repeated_key])} twice"
        )
    return positions


def member_not_found(rows: pa.Table, name: str, member: Any, epoch: int | None = None) -> MemberNotFound:
    """Return the error for an id that no row has."""
    present_ids = sorted(set(rows.column("member").to_pylist()))
    expected = f"an id among {format_ids([(m, None) for m in present_ids])}"
    found = repr(member)
    if epoch is not None and member in present_ids:
        pairs = zip(rows.column("member").to_pylist(), rows.column("epoch").to_pylist(), strict=True)
        expected = f"an epoch among {', '.join(str(e) for m, e in pairs if m == member)}"
        found = str(epoch)
    return MemberNotFound(
        f"member {member!r} of {name}", expected=expected, found=found, collection=name,
        member=member if type(member) is int else None,
    )  # fmt: skip


def parse_ids(members: str | Iterable[int]) -> list[Key]:
    """Read ids from a text or a list; return (member, epoch) pairs, where epoch None means the final snapshot.

    >>> parse_ids("0-2,7@40")
    [(0, None), (1, None), (2, None), (7, 40)]

    Raises:
        SelectionError: there are no ids, or the text is not a list of ids.
    """
    keys: list[Key] = []
    if isinstance(members, str):
        for part in members.split(","):
            match = _PART.fullmatch(part.strip())
            if not match or (match[2] and not 0 <= int(match[2]) - int(match[1]) < LONGEST_RANGE):
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


def format_ids(keys: Sequence[Key]) -> str:
    """Write (member, epoch) pairs as text that `parse_ids` reads; return it.

    >>> format_ids([(0, None), (1, None), (2, None), (9, None), (7, 40)])
    '0-2,9,7@40'
    """
    runs: list[list[Any]] = []
    for member, epoch in keys:
        if runs and runs[-1][2] == epoch and runs[-1][1] + 1 == member:
            runs[-1][1] = member
        else:
            runs.append([member, member, epoch])
    return ",".join((f"{a}" if a == b else f"{a}-{b}") + ("" if epoch is None else f"@{epoch}") for a, b, epoch in runs)


def check_digits(rows: pa.Table) -> str:
    """Hash (member, epoch, sha256) of all rows, with the location where sha256 is null; return the first 8 hex
    digits."""
    digest = hashlib.sha256()
    names = ("member", "epoch", "sha256", "path", "offset", "nbytes")
    for m, e, sha, path, offset, nbytes in zip(*(rows.column(c).to_pylist() for c in names), strict=True):
        digest.update(f"{m}|{e}|{sha or f'{path}|{offset}|{nbytes}'}\n".encode())
    return digest.hexdigest()[:8]


def cite(label: str, commit: str, name: str, rows: pa.Table) -> str:
    """Return the citation text of selected rows."""
    return f"{label}@{commit}/{name}#{format_ids(manifest.snapshot_keys(rows))}~{check_digits(rows)}"


@dataclass(frozen=True)
class Citation:
    """The parts of a citation."""

    label: str
    commit: str
    name: str
    ids: str
    check: str

    @property
    def source(self) -> str:
        """Address of the source to load from; for a Hub repo, at the cited commit."""
        return f"{self.label}@{self.commit}" if self.label.startswith("hf://") else self.label


def parse_citation(text: str) -> Citation | None:
    """Parse a citation; return its parts, or None if the text is a collection's plain name.

    Raises:
        SelectionError: the text contains `#` or `@` but is no citation.
    """
    if match := _CITATION.fullmatch(text):
        return Citation(**match.groupdict())
    if "#" in text or "@" in text:
        raise SelectionError(
            f"citation {text[:120]!r}", expected="SOURCE@COMMIT/NAME#IDS~CHECK", found="another form",
            do="Copy it whole, from `#` to the eight digits after `~`",
        )  # fmt: skip
    return None


def verify_citation(citation: Citation, present_commit: str, rows: pa.Table) -> None:
    """Check that the cited rows are still the same.

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
