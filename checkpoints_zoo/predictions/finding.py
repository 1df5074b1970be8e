"""`predictions_of`: from members and the name of a set to its Predictions."""

from __future__ import annotations

from pathlib import Path

from checkpoints_zoo import images
from checkpoints_zoo.images import Given
from checkpoints_zoo.predictions import prediction_sets as sets
from checkpoints_zoo.predictions.matching import check_data, check_members, rows_of
from checkpoints_zoo.predictions.running import Members
from checkpoints_zoo.predictions.stored import Predictions


def predictions_of(
    members: Members,
    name: str,
    *,
    source: str | Path | None = None,
    data: Given | None = None,
) -> Predictions:
    """Find stored predictions of members, reading no logits yet; return them.

    Args:
        members: a collection.
        name: of the set ("digits-test").
        source: a folder or an address on the Hub that has it; None for where the members' manifest lies.
        data: the images that they should be on, as in `predict`, checked by their fingerprint.

    Raises:
        SourceNotFound: no such set there.
        MemberNotFound: it lacks some of the members.
        UsageError: it was made with other weights, classes or preprocessing, or on other images.
        FormatError, DamagedError: a set that breaks the format.
        NetworkError, AccessError: a source on the Hub that can't be read.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> from checkpoints_zoo.predictions import predict
    >>> members, folder = zoo.load("convnet-digits", n=3), tempfile.mkdtemp()
    >>> _ = predict(members, "digits", folder)
    >>> predictions_of(members, "digits-test", source=folder).logits([2]).shape
    torch.Size([1, 540, 10])
    """
    stored = sets.read(members.source if source is None else sets.place(source), members.name, name)
    check_members(stored.facts, members)
    if data is not None:
        check_data(stored.facts, images.of(data))
    return Predictions(stored, rows_of(stored, members), (members.source.label, members.commit))
