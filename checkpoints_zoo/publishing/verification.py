"""Whether members are what their manifest says: bytes, hashes, values, duplicates, claimed accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import (
    AccessError,
    DamagedError,
    FormatError,
    LayoutError,
    NetworkError,
    SelectionError,
    SourceNotFound,
    StorageError,
    UsageError,
    ZooError,
)
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.formats.shard_files import Location, Problem, check_bytes, find_duplicates
from checkpoints_zoo.formats.text import counted, first_few
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.predictions import prediction_sets

# Another processor may round a borderline image over; more than this many is no rounding.
IMAGES_ASTRAY = 2
# Float16 rounds by 2**-11 of a logit; the rest is for members that computed in float16, or scaled views.
LOGITS_ASTRAY = 2**-7
KEY = ("member", "epoch")
# What members are to blame for, not the network or this machine.
UNREACHABLE = (NetworkError, AccessError, StorageError)
FETCHED_TOGETHER = 256
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
    verification = check_members(members, sample, data)
    if verification.error is not None:
        if verification.problems:
            listed = "".join(f"\n{problem}" for problem in verification.problems)
            verification.error.add_note(f"problems of the members that were checked before:{listed}")
        raise verification.error
    return verification.problems


@dataclass
class Verification:
    """The problems that a check of members found, how many members it checked, and the checks that were impossible.

    Args:
        collection: its name.
        members: how many are selected.
        nbytes: their size in bytes.
        read: members whose bytes and values were read.
        hashed: members whose hash was compared with the hash in their row.
        measured: members whose accuracy was measured again.
        problems: what differs from the manifest.
        impossible: a check and the reason against it -> how many members.
        error: the error that kept members from being read, None if all were read.
    """

    collection: str
    members: int
    nbytes: int
    read: int = 0
    hashed: int = 0
    measured: int = 0
    problems: list[Problem] = field(default_factory=list)
    impossible: Counter[str] = field(default_factory=Counter)
    error: ZooError | None = None

    def lines(self) -> list[str]:
        """Return what was checked, of how many members, and what could not be, as lines of text."""
        of = f"of {self.members:,}"
        done = [
            f"bytes and values {self.read:,} {of}",
            f"hash {self.hashed:,} {of}",
            f"accuracy {self.measured:,} {of}",
        ]
        not_checked = [f"not checked: {check}: {counted(n, 'member')}" for check, n in self.impossible.items()]
        return [f"{self.collection}: checked {', '.join(done)}", *(f"{self.collection}: {n}" for n in not_checked)]


def check_members(members: Collection, sample: int = 8, data: ImageInput | None = None) -> Verification:
    """Check members as `verify` does; return the problems, and what was checked. Missing members are no error.

    Args:
        members, sample, data: as of `verify`.

    Raises:
        UsageError: as of `verify`.
    """
    arguments.check_collection(members)
    result, sound = Verification(members.name, len(members), members.nbytes), []
    custom_data = None if data is None else _claimed(members, images.of(data))
    hashes = members.rows.column("sha256").to_pylist()
    actual: list[str | None] = [None] * len(members)
    positioned: list[tuple[int, Problem]] = []
    damaged: dict[str, list[int]] = {}
    for at, location in enumerate(_brought(members) if len(members) else ()):
        try:
            if isinstance(location, ZooError):
                raise location
            found, actual[at] = check_bytes(location, hashes[at])
        except THEIRS as error:
            damaged.setdefault(str(error), []).append(at)
            continue
        except UNREACHABLE as error:
            result.error = result.error or error
            result.impossible["bytes, since they could not be fetched"] += 1
            continue
        result.read += 1
        result.hashed += hashes[at] is not None
        if hashes[at] is None:
            result.impossible["hash, since the rows have none"] += 1
        positioned += [(at, Problem(members.name, members.ids[at], kind, text)) for kind, text in found]
        if not found:
            sound.append(at)
    for text, positions in damaged.items():  # one file of many members is named once
        ids = sorted({members.ids[at] for at in positions})
        named = "" if len(ids) == 1 else f"members {format_ids([(member, None) for member in ids])}: "
        problem = Problem(members.name, None if named else ids[0], "bytes", f"{named}{text}")
        positioned.append((positions[0], problem))
    result.problems += [problem for _, problem in sorted(positioned, key=itemgetter(0))]
    known = [h or claimed for h, claimed in zip(actual, hashes, strict=True)]
    result.problems += find_duplicates([(members.name, members.rows, known)])
    measure_again(members, sound, sample, result, custom_data)
    return result


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


def claimed_images(members: Collection, images_name: str) -> ImageData:
    """Load images by the name that the command line has, and give them the name that the manifest's claims have.

    Args:
        members: a collection.
        images_name: a name, a folder, a file or an address.

    Raises:
        UsageError: no such images, or claims on none or on several sets that the package does not have.
    """
    data = images.of(images_name)
    names = {str(name) for name in members.rows.column("eval_data").to_pylist() if name}
    if arguments.eval_data(data) in names:
        return data
    unknown = sorted(name for name in names if name.split("/")[0] not in images.DATASETS)
    if len(unknown) != 1 or unknown[0].count("/") != 1:
        raise UsageError(
            f"images {images_name} to verify {members.name} on",
            expected="one set of images in the manifest's claims that the package does not have",
            found=first_few([repr(name) for name in unknown], 3) or "none",
        )
    name, split = unknown[0].split("/")
    return replace(data, name=name, split=split)


def _brought(members: Collection) -> Iterator[Location | ZooError]:
    """Fetch members, a group at a time, and find the members to blame for an error; yield a place or an error each."""
    for start in range(0, len(members), FETCHED_TOGETHER):
        group = members[start : start + FETCHED_TOGETHER]
        try:
            yield from _locate(group)
        except UNREACHABLE as error:
            for _ in range(start, len(members)):
                yield error
            return


def _locate(members: Collection, first_error: ZooError | None = None) -> Iterator[Location | ZooError]:
    """Yield the place of each member, or an error.

    Args:
        members: which are halved after an error, down to the members that cause it.
        first_error: of all members, if some are missing offline.
    """
    from huggingface_hub import is_offline_mode

    try:
        yield from members._locations()
    except (*THEIRS, *UNREACHABLE) as error:
        # Offline the cached members are found at no cost; without a network each attempt would take its time.
        if isinstance(error, UNREACHABLE):
            if not is_offline_mode():
                raise
            first_error = first_error or error
        half = len(members) // 2
        if not half:
            yield first_error if first_error is not None and isinstance(error, UNREACHABLE) else error
        else:
            yield from _locate(members[:half], first_error)
            yield from _locate(members[half:], first_error)


def measure_again(
    members: Collection, sound: Sequence[int], sample: int, result: Verification, custom_data: ImageData | None = None
) -> None:
    """Measure the claimed accuracy of some members again, and add to a verification what comes of it.

    Args:
        members: a collection.
        sound: positions of those whose bytes are right.
        sample: how many of them, spread evenly; 0 for none.
        result: gets problems, the number of measured members, and the measurements that were impossible.
        custom_data: images of the caller's, by the name and split that claims have.
    """
    if sample < 1:
        return
    known = {} if custom_data is None else {arguments.eval_data(custom_data): custom_data}
    claimed, claimed_on = (members.rows.column(n).to_pylist() for n in ("test_accuracy", "eval_data"))
    network = members.description.architecture
    has_network = members._architecture is not None or network in ARCHITECTURES
    able = []
    for at in sound:
        name = claimed_on[at]
        if claimed[at] is None:
            result.impossible["accuracy, since the rows have none"] += 1
        elif not name:
            result.impossible["accuracy, since the rows do not name the images"] += 1
        elif name not in known and str(name).split("/")[0] not in images.DATASETS:
            result.impossible[f"accuracy, since the package does not have the images {name!r} (give them as data)"] += 1
        elif not has_network:
            result.impossible[
                f"accuracy, since the package does not have the network {network!r} (give it as architecture)"
            ] += 1
        else:
            able.append(at)
    chosen = [able[i * len(able) // min(sample, len(able))] for i in range(min(sample, len(able)))]
    problems = result.problems
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
            result.measured += 1
            accuracy = metrics.accuracy(logits.softmax(-1), inside.labels).item()
            if abs(accuracy - claimed[at]) * len(inside) > IMAGES_ASTRAY + 0.5:
                text = f"expected test accuracy {claimed[at]:.4f} on {name}; found {accuracy:.4f}."
                problems.append(Problem(members.name, members.ids[at], "accuracy", text))


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
