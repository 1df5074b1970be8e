"""The checks that run networks: claimed accuracies, measured again. Needs torch, so a dry run leaves it out."""

from __future__ import annotations

from checkpoints_zoo.formats.checks import Problem
from checkpoints_zoo.publishing.folder import Folder, Say


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
