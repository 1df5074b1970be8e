"""Checks of members that need nothing but their bytes and rows: what `verify` and `publish` share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from checkpoints_zoo.formats import member_bytes
from checkpoints_zoo.formats.layout import content_hash, finite_problems
from checkpoints_zoo.formats.member_bytes import Location

# Draws of one run of these may repeat: a proposal that is refused leaves a chain where it was, and dropout of few units
# may drop the same again.
REPEATING = ("dropout", "hmc", "sghmc", "sgld")


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


def check_bytes(location: Location, claimed: str | None, finite: bool = True) -> tuple[list[tuple[str, str]], str]:
    """Check one member's place, hash and values; return (kind, text) of what is wrong, and its hash.

    Args:
        location: of its bytes.
        claimed: the manifest's sha256.
        finite: whether its values are to be finite.

    Raises:
        DamagedError: the file does not have the member's tensors there.
    """
    member_bytes.check_against_files([location])
    _, raw = next(iter(member_bytes.read([location])))
    digest = content_hash(location.layout, raw)
    found = []
    if claimed is not None and digest != claimed:
        found.append(("hash", f"expected sha256 {claimed[:16]}…; found {digest[:16]}…: the bytes have changed."))
    if finite and (names := finite_problems(location.layout, raw)):
        found.append(("finite", f"expected finite weights; found others in {', '.join(names[:3])}."))
    return found, digest


def duplicates(collections: Iterable[tuple[str, pa.Table, Sequence[str | None]]]) -> list[Problem]:
    """Find members that hold the same weights, draws of one run that may repeat aside; return the problems.

    Args:
        collections: name, rows, and the content hash of each row, None for one that does not count.
    """
    first: dict[str, tuple[int, tuple[str, str | None, int | None]]] = {}
    problems = []
    for name, rows, hashes in collections:
        columns = (rows.column(c).to_pylist() for c in ("member", "method", "run"))
        for member, method, run, digest in zip(*columns, hashes, strict=True):
            source = (name, method, run)
            if digest is None:
                continue
            if digest not in first:
                first[digest] = member, source
            elif method not in REPEATING or first[digest][1] != source:
                other, (collection, *_) = first[digest]
                whose = f"member {other}{'' if collection == name else f' of {collection}'}"
                text = f"expected weights of its own; found those of {whose}."
                problems.append(Problem(name, member, "duplicate", text))
    return problems
