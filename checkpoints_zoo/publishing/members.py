"""Whether the members of a folder, and stored predictions, are what its manifests say, by their bytes alone."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats import checks, manifest, member_bytes
from checkpoints_zoo.formats.checks import Problem
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.predictions import sets
from checkpoints_zoo.predictions.sets import PredictionSet
from checkpoints_zoo.publishing.folder import Folder, Say

SHOWN = 3  # problems that an error names


def check_ranges(folder: Folder) -> None:
    """Check that rows' bytes lie inside their files, and that no two of them overlap but are not the same.

    Raises:
        DamagedError: naming the member whose bytes don't.
    """
    ranges: dict[str, list[tuple[int, int, int, str]]] = {}
    for held in folder.held:
        if not held.base:
            columns = (held.rows.column(c).to_pylist() for c in ("path", "offset", "nbytes", "member"))
            for path, offset, nbytes, member in zip(*columns, strict=True):
                if path is not None:
                    ranges.setdefault(path, []).append((offset, offset + nbytes, member, held.name))
    for path, found in ranges.items():
        size = folder.shards[path].stat().st_size
        reached = (0, 0, -1, "")
        for one in sorted(found):
            problem = f"a file of {size:,} bytes" if one[1] > size else ""
            if one[0] < reached[1] and one[:2] != reached[:2]:
                problem = f"member {reached[2]} of {reached[3]} at {reached[0]:,} to {reached[1]:,}"
            if problem:
                raise DamagedError(
                    f"member {one[2]} of {one[3]} in file {path}",
                    expected=f"bytes {one[0]:,} to {one[1]:,} of its own",
                    found=problem,
                    collection=one[3],
                    member=one[2],
                    path=path,
                )
            reached = max(reached, one, key=lambda r: r[1])


def check(folder: Folder, say: Say, finite: bool) -> None:
    """Check every member's place and hash, that no two hold the same weights, and the same of stored predictions.

    Args:
        folder: what is to be published.
        say: told of each collection.
        finite: whether the values of members whose status is ok are to be finite too.

    Raises:
        DamagedError: naming the first members that are not as they should be.
    """
    problems: list[checks.Problem] = []
    hashes: list[tuple[str, pa.Table, list[str | None]]] = []
    for held in folder.held:
        ok = [status == "ok" for status in held.rows.column("status").to_pylist()]
        claimed = held.rows.column("sha256").to_pylist()
        counted = [digest if good else None for digest, good in zip(claimed, ok, strict=True)]
        if held.base:
            problems += checks.duplicates([(held.name, held.rows, counted)])
            continue
        hashes.append((held.name, held.rows, counted))
        at = [i for i, path in enumerate(held.rows.column("path").to_pylist()) if path is not None]
        say(f"{held.name}: checking {len(at):,} members' bytes …")
        locations = folder.source.locate(held.description, manifest.take(held.rows, at))
        member_bytes.check_against_files(locations)
        for i, location in zip(at, locations, strict=True):
            problems += _of_member(held.name, location, claimed[i], finite and ok[i])
    refuse(folder.source.shown, problems + checks.duplicates(hashes))
    refuse(folder.source.shown, [p for stored in folder.sets for p in _of_predictions(folder, stored, say, finite)])


def _of_predictions(folder: Folder, stored: PredictionSet, say: Say, finite: bool) -> list[checks.Problem]:
    """Check a set of predictions; where the folder has their collection, that they are of the weights that it has."""
    say(f"{stored.facts.name}: checking the predictions of {stored.rows.num_rows:,} members …")
    rows = next((held.rows for held in folder.held if held.name == stored.facts.collection), None)
    return sets.problems(stored, None if rows is None else sets.weights_of(rows), finite)


def _of_member(name: str, location: Location, claimed: str, finite: bool) -> list[checks.Problem]:
    found, _ = checks.check_bytes(location, claimed, finite)
    return [checks.Problem(name, location.member, kind, text) for kind, text in found]


def refuse(shown: str, problems: Sequence[checks.Problem]) -> None:
    """Raise what is wrong with members, if anything is.

    Args:
        shown: how the folder is called.
        problems: what was found.

    Raises:
        DamagedError: naming the first few.
    """
    if not problems:
        return
    few = " ".join(str(p) for p in problems[:SHOWN])
    more = f" And {len(problems) - SHOWN:,} more." if len(problems) > SHOWN else ""
    raise DamagedError(
        f"members of source {shown}",
        expected="what their manifest says",
        found=f"{few}{more}".rstrip("."),
        do=f"Nothing was published. `zoo-cli verify {shown}` lists them all",
        collection=problems[0].collection,
        member=problems[0].member,
    )


# The checks that run networks: claimed accuracies, measured again. Needs torch, so a dry run leaves it out.


def to_come(folder: Folder, sample: int) -> tuple[str, ...]:
    """Return what a dry run leaves out, a line a check."""
    members = sum(held.rows.num_rows for held in folder.held if not held.base)
    lines = [f"finite values of {members:,} members' weights"] if members else []
    return (*lines, *([f"test accuracy of at most {sample} members a collection, measured again"] if sample else []))


def measure(folder: Folder, sample: int, say: Say) -> list[Problem]:
    """Measure the accuracy of some members of each collection again; return the problems found.

    Members whose weights lie in another repo are fetched, and their bytes are checked as well.

    Args:
        folder: whose members' bytes are right, as far as they lie in it.
        sample: members a collection, spread evenly over it.
        say: told of each collection, and of those whose nets the package can't build.
    """
    from checkpoints_zoo.collection.loading import load
    from checkpoints_zoo.networks.architectures import ARCHITECTURES
    from checkpoints_zoo.publishing.verification import accuracies, verify

    problems: list[Problem] = []
    for held in folder.held:
        members = load(held.name, source=folder.source.root)
        net, count = held.description.architecture, min(sample, len(members))
        known = net in ARCHITECTURES
        if not known:
            say(f"{held.name}: accuracies are not measured again, since the package can't build {net!r}")
        if held.base:
            say(f"{held.name}: fetching and checking {count} of {len(members):,} members …")
            for at in (i * len(members) // count for i in range(count)):
                problems += verify(members[at : at + 1], sample=int(known))
        elif known:
            say(f"{held.name}: measuring the accuracy of at most {count} of {len(members):,} members …")
            problems += accuracies(members, range(len(members)), sample)
    return problems
