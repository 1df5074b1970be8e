"""Check members' bytes against their manifest: places, hashes, values, duplicates. Torch is not needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter

from checkpoints_zoo.collection.joining import JoinedSource
from checkpoints_zoo.errors import (
    AccessError,
    DamagedError,
    FormatError,
    LayoutError,
    NetworkError,
    SelectionError,
    SourceNotFound,
    StorageError,
    ZooError,
)
from checkpoints_zoo.formats import arrow_tables, row_checks
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.formats.shard_files import Location, Problem, check_bytes, find_duplicates
from checkpoints_zoo.formats.text import count_with_noun
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import PredictionSet
from checkpoints_zoo.sources.finding import SelectedMembers
from checkpoints_zoo.sources.source import Source

# Errors whose cause is the network or this machine.
CONNECTION_ERRORS = (NetworkError, AccessError, StorageError)
FETCHED_TOGETHER_COUNT = 256  # members that are fetched together
# Errors whose cause is a member's bytes or rows.
MEMBER_ERRORS = (DamagedError, FormatError, LayoutError, SelectionError, SourceNotFound)


@dataclass
class Verification:
    """The problems that a check of members found, the number of checked members, and the checks that were impossible.

    Args:
        collection: name of the collection.
        members: number of members selected for the check.
        nbytes: total size of the selected members in bytes.
        read: number of members whose bytes and values were read.
        hashed: number of members whose hash was compared with the hash in their row.
        measured: number of members whose accuracy was measured again.
        problems: differences from the manifest.
        impossible: name of a check that could not be made, with the reason -> number of members.
        error: first error by which members could not be read; None if all members were read.
    """

    collection: str
    members: int
    nbytes: int
    read: int = 0
    hashed: int = 0
    measured: int = 0
    problems: list[Problem] = field(default_factory=list)
    impossible: Counter[str] = field(default_factory=Counter)
    error: ZooError | None = None

    def lines(self) -> list[str]:
        """Return lines of text: the number of members for each check, and for each check that was impossible."""
        of_all_text = f"of {self.members:,}"
        check_texts = [
            f"bytes and values {self.read:,} {of_all_text}",
            f"hash {self.hashed:,} {of_all_text}",
            f"accuracy {self.measured:,} {of_all_text}",
        ]
        unchecked_texts = [
            f"not checked: {check}: {count_with_noun(count, 'member')}" for check, count in self.impossible.items()
        ]
        return [
            f"{self.collection}: checked {', '.join(check_texts)}",
            *(f"{self.collection}: {unchecked_text}" for unchecked_text in unchecked_texts),
        ]


def check_stored_members(members: SelectedMembers) -> tuple[Verification, list[int]]:
    """Check the bytes of members as `verify` does; return the problems and the numbers of checked members, and the
    positions of the members whose bytes are right.

    If members can't be downloaded, the error is stored in the result and not raised.

    Args:
        members: members whose bytes are checked.

    Raises:
        FormatError, DamagedError: a row of the manifest, selected or not, does not follow the format.
    """
    name, rows = members.description.name, members.rows
    if not isinstance(members.source, JoinedSource):
        members.source.read_collection(name)  # This checks all rows of a large manifest.
    result, intact_positions = Verification(name, rows.num_rows, arrow_tables.sum_of(rows, "nbytes")), list[int]()
    ids, claimed_hashes = (rows.column(column).to_pylist() for column in ("member", "sha256"))
    actual_hashes: list[str | None] = [None] * len(ids)
    problems_with_position: list[tuple[int, Problem]] = []
    positions_of_error_text: dict[str, list[int]] = {}
    for position, location in enumerate(progress(_locate_in_groups(members), len(ids), f"{name}: checking")):
        try:
            if isinstance(location, ZooError):
                raise location
            member_problems, actual_hashes[position] = check_bytes(location, claimed_hashes[position])
        except MEMBER_ERRORS as error:
            positions_of_error_text.setdefault(str(error), []).append(position)
            continue
        except CONNECTION_ERRORS as error:
            result.error = result.error or error
            result.impossible["bytes, since they could not be fetched"] += 1
            continue
        result.read += 1
        result.hashed += claimed_hashes[position] is not None
        if claimed_hashes[position] is None:
            result.impossible["hash, since the rows have none"] += 1
        problems_with_position += [
            (position, Problem(name, ids[position], kind, text)) for kind, text in member_problems
        ]
        if not member_problems:
            intact_positions.append(position)
    for text, positions in positions_of_error_text.items():  # one problem per file, with all its members
        faulty_ids = sorted({ids[position] for position in positions})
        members_text = (
            "" if len(faulty_ids) == 1 else f"members {format_ids([(member, None) for member in faulty_ids])}: "
        )
        problem = Problem(name, None if members_text else faulty_ids[0], "bytes", f"{members_text}{text}")
        problems_with_position.append((positions[0], problem))
    result.problems += [problem for _, problem in sorted(problems_with_position, key=itemgetter(0))]
    hash_of_each_member = [
        actual_hash or claimed_hash for actual_hash, claimed_hash in zip(actual_hashes, claimed_hashes, strict=True)
    ]
    result.problems += find_duplicates([(name, rows, hash_of_each_member)])
    return result, intact_positions


def _locate_in_groups(members: SelectedMembers) -> Iterator[Location | ZooError]:
    """Fetch members in groups; yield the location of each member, or the error by which the member can't be read."""
    for group_start in range(0, members.rows.num_rows, FETCHED_TOGETHER_COUNT):
        try:
            yield from _locate(replace(members, rows=members.rows.slice(group_start, FETCHED_TOGETHER_COUNT)))
        except CONNECTION_ERRORS as error:
            for _ in range(group_start, members.rows.num_rows):
                yield error
            return


def _locate(members: SelectedMembers, first_error: ZooError | None = None) -> Iterator[Location | ZooError]:
    """Yield the location of each member, or the error by which the member can't be read.

    Args:
        members: members to locate; after an error each half of the members is tried alone, down to the members that
            cause the error.
        first_error: error that is yielded for each missing member in offline mode; None to use the first error that
            occurs.
    """
    from huggingface_hub import is_offline_mode

    try:
        row_checks.check_located(members.rows, members.description.name)
        yield from members.source.locate(members.description, members.rows)
    except (*MEMBER_ERRORS, *CONNECTION_ERRORS) as error:
        # In offline mode each half is searched at no cost; with a broken network each attempt would wait for a timeout.
        if isinstance(error, CONNECTION_ERRORS):
            if not is_offline_mode():
                raise
            first_error = first_error or error
        half_count = members.rows.num_rows // 2
        if not half_count:
            yield first_error if first_error is not None and isinstance(error, CONNECTION_ERRORS) else error
        else:
            yield from _locate(replace(members, rows=members.rows.slice(0, half_count)), first_error)
            yield from _locate(replace(members, rows=members.rows.slice(half_count)), first_error)


def check_stored_predictions(source: Source, collection: str, set_name: str) -> tuple[PredictionSet, list[Problem]]:
    """Check a set of stored predictions against its rows, and the rows against the members' manifest; return the set
    and the problems.

    Args:
        source: source that has the set and the members' collection.
        collection: name of the members' collection.
        set_name: name of the set.

    Raises:
        SourceNotFound, FormatError: there is no such set, or it can't be read.
        NetworkError, AccessError, StorageError: the bytes can't be downloaded or stored.
    """
    prediction_set = prediction_sets.read_set(source, collection, set_name)
    known_hashes = prediction_sets.weight_hashes(source.read_collection(collection)[1])
    return prediction_set, prediction_sets.find_set_problems(prediction_set, known_hashes)
