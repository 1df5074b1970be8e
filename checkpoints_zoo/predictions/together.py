"""Whether predictions go together: those of one selection of members, made with the same weights."""

from __future__ import annotations

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import selection
from checkpoints_zoo.predictions.running import Members
from checkpoints_zoo.predictions.stored import Predictions


def check_same(others: Predictions, members: Predictions | Members) -> Predictions:
    """Check that predictions are of given members, with the same weights and in the same order; return them.

    Weights are told apart by their content hashes; where a manifest has none, by the names of the collections.

    Raises:
        UsageError: they are of others.
    """
    found, wanted = others.keys, _keys(members)
    named = members.facts.collection if isinstance(members, Predictions) else members.name
    wrong = ""
    if [key[0] for key in found] != [key[0] for key in wanted]:
        wrong = f"members {selection.format_ids([(id, None) for id, *_ in found[:100]])}"
    elif [key[1] for key in found] != [key[1] for key in wanted]:
        wrong = f"snapshots {selection.format_ids([key[:2] for key in found[:100]])}"
    else:
        for (id, _, one), (_, _, other) in zip(found, wanted, strict=True):
            if one != other if one and other else others.facts.collection != named:
                wrong = f"other weights of member {id}"
                break
    if wrong:
        raise UsageError(
            f"predictions {others.name} for {members.name}",
            expected="those of the same members with the same weights, in the same order",
            found=wrong,
            do="Take both with `members.predictions(…)` from one selection of members",
        )
    return others


def _keys(members: Predictions | Members) -> list[tuple[int, int, str]]:
    """Return member, epoch and content hash of the weights of each, "" where the manifest has none."""
    if isinstance(members, Predictions):
        return members.keys
    hashes = members.rows.column("sha256").to_pylist()
    return [(*key, known or "") for key, known in zip(members.keys, hashes, strict=True)]
