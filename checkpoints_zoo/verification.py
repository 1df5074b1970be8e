"""Whether members are what their manifest says: bytes, hashes, values, duplicates, claimed accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpoints_zoo import images, metrics, pieces, placement, predictions
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.layout import content_hash, finite_problems
from checkpoints_zoo.pieces import Location

# Another processor may round a borderline image over; more than this many is no rounding.
IMAGES_ASTRAY = 2
# Draws of one run of these may repeat: a proposal that is refused leaves the chain where it was.
CHAINS = ("hmc", "sghmc", "sgld")


@dataclass(frozen=True)
class Problem:
    """Something about a member that is not as it should be.

    Args:
        collection: its name.
        member: its id, None for the collection as a whole.
        kind: "bytes", "hash", "finite", "duplicate" or "accuracy".
        text: what was expected and found.
    """

    collection: str
    member: int | None
    kind: str
    text: str

    def __str__(self) -> str:
        who = self.collection if self.member is None else f"member {self.member} of {self.collection}"
        return f"{who}: {self.kind}: {self.text}"


def verify(members: Collection, sample: int = 8) -> list[Problem]:
    """Check members against their manifest; return the problems found, [] for none.

    Every member's tensors are where the manifest says, hash to its sha256 and are finite; no two members hold the
    same weights (two draws of one Markov chain may); the claimed accuracy of some of them is measured again.

    Args:
        members: a collection.
        sample: members whose accuracy is measured again, spread evenly; 0 for none.

    >>> import checkpoints_zoo as zoo
    >>> zoo.verify(zoo.load("convnet-digits", n=4))
    []
    """
    problems, sound = [], []
    hashes = members.rows.column("sha256").to_pylist()
    actual: list[str | None] = [None] * len(members)
    for at in range(len(members)):
        try:
            location = members[at : at + 1].locations()[0]
            found, actual[at] = _check_bytes(location, hashes[at])
        except ZooError as error:
            found = [("bytes", str(error))]
        problems += [Problem(members.name, members.ids[at], kind, text) for kind, text in found]
        if not found:
            sound.append(at)
    problems += _duplicates(members, [h or claimed for h, claimed in zip(actual, hashes, strict=True)])
    return problems + _accuracies(members, sound, sample)


def _check_bytes(location: Location, claimed: str | None) -> tuple[list[tuple[str, str]], str]:
    """Check one member's place, hash and values; return (kind, text) of what is wrong, and its hash."""
    placement.check_against_files([location])
    _, raw = next(iter(pieces.read([location])))
    digest = content_hash(location.layout, raw)
    found = []
    if claimed is not None and digest != claimed:
        found.append(("hash", f"expected sha256 {claimed[:16]}…; found {digest[:16]}…: the bytes have changed."))
    if names := finite_problems(location.layout, raw):
        found.append(("finite", f"expected finite weights; found others in {', '.join(names[:3])}."))
    return found, digest


def _duplicates(members: Collection, hashes: Sequence[str | None]) -> list[Problem]:
    """Find members that hold the same weights, draws of one run of a Markov chain aside."""
    methods, runs = (members.rows.column(n).to_pylist() for n in ("method", "run"))
    first: dict[str, int] = {}
    problems = []
    for at, digest in enumerate(hashes):
        if digest is None:
            continue
        other = first.setdefault(digest, at)
        chain = methods[at] in CHAINS and (methods[at], runs[at]) == (methods[other], runs[other])
        if other != at and not chain:
            text = f"expected weights of its own; found those of member {members.ids[other]}."
            problems.append(Problem(members.name, members.ids[at], "duplicate", text))
    return problems


def _accuracies(members: Collection, sound: Sequence[int], sample: int) -> list[Problem]:
    """Measure the claimed accuracy of some members again, where the package has the images."""
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
