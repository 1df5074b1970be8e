"""Whether members are what their manifest says: bytes, hashes, values, duplicates, claimed accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkpoints_zoo import images, metrics, predictions
from checkpoints_zoo.checks import Problem as Problem
from checkpoints_zoo.checks import check_bytes, duplicates
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, SelectionError, SourceNotFound, ZooError
from checkpoints_zoo.pieces import Location

# Another processor may round a borderline image over; more than this many is no rounding.
IMAGES_ASTRAY = 2
# What members are to blame for, not the network or this machine.
THEIRS = (DamagedError, FormatError, LayoutError, SelectionError, SourceNotFound)


def verify(members: Collection, sample: int = 8) -> list[Problem]:
    """Check members against their manifest; return the problems found, [] for none.

    Every member's tensors are where the manifest says, hash to its sha256 and are finite; no two members hold the
    same weights (two draws of one Markov chain may); the claimed accuracy of some of them is measured again. Members
    on the Hub are brought here for it, all that are missing in one go.

    Args:
        members: a collection.
        sample: members whose accuracy is measured again, spread evenly; 0 for none.

    Raises:
        NetworkError, AccessError, StorageError: the members can't be had, or not be kept.

    >>> import checkpoints_zoo as zoo
    >>> zoo.verify(zoo.load("convnet-digits", n=4))
    []
    """
    problems, sound = [], []
    hashes = members.rows.column("sha256").to_pylist()
    actual: list[str | None] = [None] * len(members)
    for at, location in enumerate(_brought(members) if len(members) else ()):
        try:
            if isinstance(location, ZooError):
                raise location
            found, actual[at] = check_bytes(location, hashes[at])
        except THEIRS as error:
            found = [("bytes", str(error))]
        problems += [Problem(members.name, members.ids[at], kind, text) for kind, text in found]
        if not found:
            sound.append(at)
    known = [h or claimed for h, claimed in zip(actual, hashes, strict=True)]
    problems += duplicates([(members.name, members.rows, known)])
    return problems + accuracies(members, sound, sample)


def _brought(members: Collection) -> Iterator[Location | ZooError]:
    """Bring members here, and halve them where that fails, down to those to blame; yield a place or an error each."""
    try:
        yield from members.locations()
    except THEIRS as error:
        half = len(members) // 2
        if not half:
            yield error
        else:
            yield from _brought(members[:half])
            yield from _brought(members[half:])


def accuracies(members: Collection, sound: Sequence[int], sample: int) -> list[Problem]:
    """Measure the claimed accuracy of some members again, where the package has the images; return the problems.

    Args:
        members: a collection.
        sound: positions of those whose bytes are right.
        sample: how many of them, spread evenly; 0 for none.
    """
    claimed, sets = (members.rows.column(n).to_pylist() for n in ("test_accuracy", "eval_data"))
    able = [at for at in sound if claimed[at] is not None and str(sets[at]).split("/")[0] in images.DATASETS]
    chosen = [able[i * len(able) // min(sample, len(able))] for i in range(min(sample, len(able)))]
    problems = []
    for name in sorted({sets[at] for at in chosen}):
        some = [at for at in chosen if sets[at] == name]
        inside = images.load(*name.split("/"))
        for at in some:
            try:
                logits = predictions.logits(members[at : at + 1], inside)[0]
            except ZooError as error:
                problems.append(Problem(members.name, members.ids[at], "accuracy", str(error)))
                continue
            if inside.labels is None:
                continue
            accuracy = metrics.accuracy(logits.softmax(-1), inside.labels).item()
            if abs(accuracy - claimed[at]) * len(inside) > IMAGES_ASTRAY + 0.5:
                text = f"expected test accuracy {claimed[at]:.4f} on {name}; found {accuracy:.4f}."
                problems.append(Problem(members.name, members.ids[at], "accuracy", text))
    return problems
