"""Whether stored predictions are of given members and on given images; what does not match is refused."""

from __future__ import annotations

import pyarrow as pa

from checkpoints_zoo.errors import MemberNotFound, UsageError
from checkpoints_zoo.formats import manifest, selection
from checkpoints_zoo.images import ImageData, in_order
from checkpoints_zoo.predictions.prediction_sets import Facts, PredictionSet
from checkpoints_zoo.predictions.running import Members


def check_members(facts: Facts, members: Members) -> None:
    """Check that a set is of the members' classes, in the order of their logits, and of their inputs.

    Raises:
        UsageError: it is of others.
    """
    if facts.classes != members.classes:
        raise UsageError(
            f"predictions {facts.name}",
            expected=f"classes {', '.join(members.classes[:12])}, in this order",
            found=f"classes {', '.join(facts.classes[:12])}",
            do="Predict again: they are of another state of the collection",
            collection=facts.collection,
        )
    if dict(facts.preprocessing) != dict(members.description.preprocessing):
        raise UsageError(
            f"predictions {facts.name}",
            expected=f"inputs preprocessed as {dict(members.description.preprocessing)}",
            found=f"{dict(facts.preprocessing)}",
            do="Predict again: they are of another state of the collection",
            collection=facts.collection,
        )


def check_data(facts: Facts, data: ImageData) -> None:
    """Check that a set was made on given images, down to pixels, labels and classes.

    Classes in another order than the set's are put into its order where their names tell how, as `predict` did.

    Raises:
        UsageError: on others.
    """
    data = in_order(data, facts.classes)
    wanted = (f"{len(data):,} inputs", f"fingerprint {data.fingerprint}")
    found = (f"{facts.inputs:,} inputs", f"fingerprint {facts.fingerprint}")
    if wanted != found:
        raise UsageError(
            f"predictions {facts.name}",
            expected=f"{', '.join(wanted)}, as images {data.name}/{data.split} have",
            found=f"{', '.join(found)}, of {facts.data}/{facts.split}",
            do="They are on other images, or on these in another order; predict on these",
            collection=facts.collection,
        )


def rows_of(stored: PredictionSet, members: Members) -> pa.Table:
    """Find the rows of members, made with the weights they have; return them in the members' order.

    Raises:
        MemberNotFound: there are none of some members.
        UsageError: some were made with other weights.
    """
    columns = (stored.rows.column(c).to_pylist() for c in ("member", "epoch"))
    at = {key: i for i, key in enumerate(zip(*columns, strict=True))}
    lacking = [id for id, epoch in members.keys if (id, epoch) not in at]
    name = stored.facts.name
    if lacking:
        raise MemberNotFound(
            f"predictions {name}",
            expected=f"a row for each of the {len(members)} selected members",
            found=f"none for members {selection.format_ids([(id, None) for id in lacking[:100]])}",
            do="`zoo-cli predict` adds what is missing; or select members that it has",
            collection=stored.facts.collection,
            member=lacking[0],
        )
    rows = manifest.take(stored.rows, [at[key] for key in members.keys])
    made_from = rows.column("weights_sha256").to_pylist()
    for (id, _), known, made in zip(members.keys, members.rows.column("sha256").to_pylist(), made_from, strict=True):
        if known != made:
            raise other_weights(name, id, known, made)
    return rows


def other_weights(name: str, member: int, known: str | None, made: str) -> UsageError:
    """Return the error for predictions that were made with other weights than a member's."""
    fill = "`zoo-cli import --hash` fills the hashes of a collection that has none"
    return UsageError(
        f"predictions {name} of member {member}",
        expected=f"made with weights of sha256 {known[:16]}…" if known else "the hash of its weights in its manifest",
        found=f"made with {made[:16]}…" if known else "null, so that nothing says whether they are its own",
        do="Predict again, under another name or after deleting the set" if known else fill,
        collection=name.partition("/")[0],
        member=member,
    )
