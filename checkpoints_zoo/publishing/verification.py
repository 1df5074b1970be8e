"""Whether members are what their manifest says: bytes, hashes, values, duplicates, claimed accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import (
    DamagedError,
    FormatError,
    LayoutError,
    SelectionError,
    SourceNotFound,
    UsageError,
    ZooError,
)
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.formats.shard_files import Location, Problem, check_bytes, find_duplicates
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.predictions import prediction_sets

# Another processor may round a borderline image over; more than this many is no rounding.
IMAGES_ASTRAY = 2
# Float16 rounds by 2**-11 of a logit; the rest is for members that computed in float16, or scaled views.
LOGITS_ASTRAY = 2**-7
KEY = ("member", "epoch")
# What members are to blame for, not the network or this machine.
THEIRS = (DamagedError, FormatError, LayoutError, SelectionError, SourceNotFound)


def verify(members: Collection, sample: int = 8, data: ImageInput | None = None) -> list[Problem]:
    """Check members against their manifest; return the problems found, [] for none.

    Every member's tensors are where the manifest says, hash to its sha256 and are finite; no two members hold the
    same weights (two draws of one run of dropout or of a Markov chain may); the claimed accuracy of some of them is
    measured again. Members on the Hub are brought here for it, all that are missing in one go.

    Args:
        members: a collection.
        sample: members whose accuracy is measured again, spread evenly; 0 for none.
        data: images that accuracies are claimed on and that the package can't load by name, as `images.of` takes them,
            of the name and split that the manifest has (`images.of(…, name="mine")` for "mine/test").

    Raises:
        UsageError: no accuracy is claimed on these images, or they have no labels of the members' classes.
        NetworkError, AccessError, StorageError: the members can't be had, or not be kept.

    >>> import checkpoints_zoo as zoo
    >>> zoo.verify(zoo.load("convnet-digits", n=4))
    []
    """
    problems, sound = [], []
    own = None if data is None else _claimed(members, images.of(data))
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
    problems += find_duplicates([(members.name, members.rows, known)])
    return problems + accuracies(members, sound, sample, own)


def _claimed(members: Collection, given: ImageData) -> ImageData:
    """Check that accuracies are claimed on images; return these in the order of the members' classes."""
    names = sorted({str(name) for name in members.rows.column("eval_data").to_pylist() if name})
    if arguments.eval_data(given) not in names:
        raise UsageError(
            f"images {arguments.eval_data(given)!r} to verify {members.name} on",
            expected=f"the name of those that its manifest names: {', '.join(names[:6]) or 'it names none'}",
            found="another",
            do="Give them that name, if they are these images: `zoo.images.of(…, name=…, split=…)`",
        )
    return arguments.require_labels(given, members.description)[0]


def _brought(members: Collection) -> Iterator[Location | ZooError]:
    """Bring members here, and halve them where that fails, down to those to blame; yield a place or an error each."""
    try:
        yield from members._locations()
    except THEIRS as error:
        half = len(members) // 2
        if not half:
            yield error
        else:
            yield from _brought(members[:half])
            yield from _brought(members[half:])


def accuracies(members: Collection, sound: Sequence[int], sample: int, own: ImageData | None = None) -> list[Problem]:
    """Measure the claimed accuracy of some members again, where the package has the images; return the problems.

    Args:
        members: a collection.
        sound: positions of those whose bytes are right.
        sample: how many of them, spread evenly; 0 for none.
        own: images of the caller's, by the name and split that claims have.
    """
    known = {} if own is None else {arguments.eval_data(own): own}
    claimed, claimed_on = (members.rows.column(n).to_pylist() for n in ("test_accuracy", "eval_data"))
    able = [
        at
        for at in sound
        if claimed[at] is not None and (claimed_on[at] in known or str(claimed_on[at]).split("/")[0] in images.DATASETS)
    ]
    chosen = [able[i * len(able) // min(sample, len(able))] for i in range(min(sample, len(able)))]
    problems = []
    for name in sorted({claimed_on[at] for at in chosen}):
        some = [at for at in chosen if claimed_on[at] == name]
        data, _, split = name.partition("/")
        if name not in known and split not in images.DATASETS[data]:
            splits = " or ".join(f"{data}/{known_split}" for known_split in images.DATASETS[data])
            text = f"expected an accuracy on {splits}; found {name!r}."
            problems += [Problem(members.name, members.ids[at], "accuracy", text) for at in some]
            continue
        inside = known.get(name) or images.in_order(images.load(data, split), members.classes)
        for at in some:
            try:
                logits = predictions.logits(members[at : at + 1], inside, execution="module")[0]
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


def verify_predictions(members: Collection, name: str, sample: int = 8) -> list[Problem]:
    """Check stored predictions against their rows, and these against the members' manifest; return the problems.

    Every member's logits are where the rows say, hash to their sha256, are finite, and were made with the weights that
    the collection has; the logits of some selected members are computed again, where the package has the images.

    Args:
        members: a collection.
        name: of the set, in the members' source.
        sample: members whose logits are computed again, spread evenly; 0 for none.

    Raises:
        SourceNotFound, FormatError: no such set, or one that can't be read.
        NetworkError, AccessError, StorageError: the bytes can't be had, or not be kept.
    """
    stored = prediction_sets.read_set(members.source, members.name, name)
    found = prediction_sets.find_problems(
        stored, prediction_sets.weights_of(members.source.read_collection(members.name)[1])
    )
    facts, wrong = stored.facts, {problem.member for problem in found}
    at = {key: row for row, key in enumerate(zip(*(stored.rows.column(c).to_pylist() for c in KEY), strict=True))}
    able = [i for i, key in enumerate(members._keys) if key in at and key[0] not in wrong]
    if None in wrong or facts.split not in images.DATASETS.get(facts.data, ()) or not able or sample < 1:
        return found
    inside = images.load(facts.data, facts.split)
    chosen = [able[i * len(able) // min(sample, len(able))] for i in range(min(sample, len(able)))]
    for i in chosen:
        one = members[i : i + 1]
        try:
            kept = predictions.predictions_of(one, name, data=inside).logits()
            again = predictions.logits(one, inside)
        except ZooError as error:
            found.append(Problem(facts.name, one.ids[0], "logits", str(error)))
            continue
        apart = float((kept - again).abs().max() / again.abs().max().clamp(min=1))
        if apart > LOGITS_ASTRAY:
            text = f"expected what the members give now, within {LOGITS_ASTRAY:g} of the largest; found {apart:.2g}."
            found.append(Problem(facts.name, one.ids[0], "logits", text))
    return found
