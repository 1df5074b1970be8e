"""Whether stored predictions are what their rows say: places, hashes, values, and the weights they were made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, LayoutError, SourceNotFound
from checkpoints_zoo.formats import checks
from checkpoints_zoo.formats.checks import Problem
from checkpoints_zoo.predictions.sets import PredictionSet

Key = tuple[int, int]


def weights_of(rows: pa.Table) -> dict[Key, str | None]:
    """Return (member, epoch) -> content hash of the weights by a collection's manifest."""
    columns = (rows.column(c).to_pylist() for c in ("member", "epoch", "sha256"))
    return {(member, epoch): digest for member, epoch, digest in zip(*columns, strict=True)}


def problems(stored: PredictionSet, weights: Mapping[Key, str | None] | None, finite: bool = True) -> list[Problem]:
    """Check a set's bytes against its rows, and these against the members' manifest; return what is wrong.

    Args:
        stored: the set; on the Hub, what is missing is fetched in one go.
        weights: as `weights_of` gives them; None to leave that out.
        finite: whether its values are to be finite.

    Raises:
        NetworkError, AccessError, StorageError: the bytes can't be had, or not be kept.
    """
    name, rows = stored.facts.name, stored.rows
    found = []
    if weights is not None:
        found = [Problem(name, member, "weights", text) for member, text in other_weights(stored, weights)]
    try:
        locations = stored.locate(rows)
    except (DamagedError, SourceNotFound) as error:
        return [*found, Problem(name, None, "bytes", str(error))]
    for location, claimed in zip(locations, rows.column("sha256").to_pylist(), strict=True):
        try:
            wrong, _ = checks.check_bytes(location, claimed, finite)
        except (DamagedError, LayoutError, OSError) as error:
            wrong = [("bytes", str(error))]
        found += [Problem(name, location.member, kind, text) for kind, text in wrong]
    return found


def other_weights(stored: PredictionSet, weights: Mapping[Key, str | None]) -> Iterator[tuple[int, str]]:
    """Compare a set's rows with the members' manifest; yield (member, what is wrong with its weights)."""
    columns = [stored.rows.column(c).to_pylist() for c in ("member", "epoch", "weights_sha256")]
    for member, epoch, made_from in zip(*columns, strict=True):
        if problem := _of_weights(weights, (member, epoch), made_from):
            yield member, problem


def _of_weights(weights: Mapping[Key, str | None], key: Key, made_from: str) -> str:
    """Say what is wrong with the weights that a row names; return "" for nothing."""
    if key not in weights:
        return f"expected a row of the collection's manifest for epoch {key[1]}; found none."
    known = weights[key]
    if known is None or known == made_from:
        return ""
    return f"expected predictions of weights with sha256 {known[:16]}…; found them made from {made_from[:16]}…."
