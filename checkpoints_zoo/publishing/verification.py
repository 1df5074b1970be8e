"""Check members against their manifest: bytes, hashes, values, duplicates, and the accuracy that the manifest
states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from checkpoints_zoo import images, predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError, ZooError
from checkpoints_zoo.evaluation import arguments, metrics
from checkpoints_zoo.formats.shard_files import Problem
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.publishing.byte_checks import Verification, check_stored_members, check_stored_predictions
from checkpoints_zoo.sources.finding import SelectedMembers

# Largest number of images whose predicted class may differ, since rounding differs between processors.
LARGEST_DIFFERING_IMAGE_COUNT = 2
# Tolerance of recomputed logits, relative to the largest logit. Rounding to float16 alone changes a logit by 2**-11;
# members that compute in float16, or from rescaled weights, change it more.
LOGITS_TOLERANCE = 2**-7
KEY_COLUMNS = ("member", "epoch")


def verify(members: Collection, sample: int = 8, data: ImageInput | None = None) -> list[Problem]:
    """Check members against their manifest; return the problems, [] if there are none.

    Each member's tensors must lie at the offset in the manifest, have the sha256 in the manifest and be finite. No two
    members may hold the same weights, except draws of one run of dropout or of one Markov chain. The claimed accuracy
    of some members is measured again. Members on the Hub are downloaded first if they are not in the cache.

    Args:
        members: collection whose members are checked.
        sample: number of members whose accuracy is measured again, spread evenly; 0 for none.
        data: images that the claimed accuracies were measured on, if the package can't load them by name, in any form
            that `images.of` takes. The images need the manifest's name and split (`images.of(…, name="mine")` for
            "mine/test").

    Raises:
        UsageError: no accuracy is claimed on these images, or they have no labels of the members' classes.
        FormatError, DamagedError: a row of the manifest, selected or not, does not follow the format.
        NetworkError, AccessError, StorageError: the members can't be downloaded or stored.

    >>> import checkpoints_zoo as zoo
    >>> zoo.verify(zoo.load("convnet-digits", n=4))
    []
    """
    arguments.check_collection(members)
    verification = check_members(members, sample, data)
    if verification.error is not None:
        if verification.problems:
            listed = "".join(f"\n{problem}" for problem in verification.problems)
            verification.error.add_note(f"problems of the members that were checked before:{listed}")
        raise verification.error
    return verification.problems


def check_members(members: Collection, sample: int = 8, data: ImageInput | None = None) -> Verification:
    """Check members as `verify` does; return the problems and the numbers of checked members.

    If members can't be downloaded, the error is stored in the result and not raised.

    Args:
        members, sample, data: the same arguments as in `verify`.

    Raises:
        UsageError, FormatError, DamagedError: for the same reasons as in `verify`.
    """
    custom_data = None if data is None else _match_claims(members, images.of(data))
    selected = SelectedMembers(members.source, members._commit, members.description, members.rows)
    result, intact_positions = check_stored_members(selected)
    measure_again(members, intact_positions, sample, result, custom_data)
    return result


def _match_claims(members: Collection, data: ImageData) -> ImageData:
    """Check that the manifest states accuracies on these images; return the images, with labels in the order of the
    members' classes."""
    claimed_names = sorted({str(name) for name in members.rows.column("eval_data").to_pylist() if name})
    if arguments.manifest_image_name(data) not in claimed_names:
        raise UsageError(
            f"images {arguments.manifest_image_name(data)!r} to verify {members.name} on",
            expected=f"one of the names in its manifest: {', '.join(claimed_names[:6]) or 'it has none'}",
            found="another",
            do="If they are the manifest's images, name them so: `zoo.images.of(…, name=…, split=…)`",
        )
    return arguments.require_labels(data, members.description)[0]


def claimed_images(members: Collection, images_name: str) -> ImageData:
    """Load images that were named on the command line; return the images, renamed to the image set on which the
    manifest claims accuracies.

    Args:
        members: collection whose manifest claims accuracies.
        images_name: name of an image set, or a folder, file or address with images.

    Raises:
        UsageError: there are no such images; or the manifest names no image set that the package lacks, or several.
    """
    data = images.of(images_name)
    claimed_names = {str(name) for name in members.rows.column("eval_data").to_pylist() if name}
    if arguments.manifest_image_name(data) in claimed_names:
        return data
    unknown_names = sorted(name for name in claimed_names if name.split("/")[0] not in images.DATASETS)
    if len(unknown_names) != 1 or unknown_names[0].count("/") != 1:
        raise UsageError(
            f"images {images_name} to verify {members.name} on",
            expected="one set of images in the manifest's claims that the package does not have",
            found=first_few([repr(name) for name in unknown_names], 3) or "none",
        )
    name, split = unknown_names[0].split("/")
    return replace(data, name=name, split=split)


def measure_again(
    members: Collection,
    intact_positions: Sequence[int],
    sample: int,
    verification: Verification,
    custom_data: ImageData | None = None,
) -> None:
    """Measure the claimed accuracy of some members again, and add the outcome to a verification.

    Args:
        members: collection with the claimed accuracies.
        intact_positions: positions of the members whose bytes are right.
        sample: number of members that are measured, spread evenly over the intact ones; 0 for none.
        verification: gets the problems, the number of measured members, and the impossible measurements.
        custom_data: the user's images, with the name and split that the manifest states; None without such images.
    """
    if sample < 1:
        return
    custom_images = {} if custom_data is None else {arguments.manifest_image_name(custom_data): custom_data}
    claimed_accuracies, claimed_image_names = (
        members.rows.column(n).to_pylist() for n in ("test_accuracy", "eval_data")
    )
    network = members.description.architecture
    has_network = members._architecture is not None or network in ARCHITECTURES
    measurable_positions = []
    for position in intact_positions:
        image_name = claimed_image_names[position]
        if claimed_accuracies[position] is None:
            verification.impossible["accuracy, since the rows have none"] += 1
        elif not image_name:
            verification.impossible["accuracy, since the rows do not name the images"] += 1
        elif image_name not in custom_images and str(image_name).split("/")[0] not in images.DATASETS:
            verification.impossible[
                f"accuracy, since the package does not have the images {image_name!r} (give them as data)"
            ] += 1
        elif not has_network:
            verification.impossible[
                f"accuracy, since the package does not have the network {network!r} (give it as architecture)"
            ] += 1
        else:
            measurable_positions.append(position)
    sampled_positions = [
        measurable_positions[i * len(measurable_positions) // min(sample, len(measurable_positions))]
        for i in range(min(sample, len(measurable_positions)))
    ]
    problems = verification.problems
    for image_name in sorted({claimed_image_names[position] for position in sampled_positions}):
        positions = [position for position in sampled_positions if claimed_image_names[position] == image_name]
        set_name, _, split = image_name.partition("/")
        if image_name not in custom_images and split not in images.DATASETS[set_name]:
            splits_text = " or ".join(f"{set_name}/{known_split}" for known_split in images.DATASETS[set_name])
            text = f"expected an accuracy on {splits_text}; found {image_name!r}."
            problems += [Problem(members.name, members.ids[position], "accuracy", text) for position in positions]
            continue
        image_data = custom_images.get(image_name) or images.in_order(images.load(set_name, split), members.classes)
        for position in positions:
            try:
                logits = predictions.logits(members[position : position + 1], image_data, execution="module")[0]
            except ZooError as error:
                problems.append(Problem(members.name, members.ids[position], "accuracy", str(error)))
                continue
            if image_data.labels is None:
                continue
            verification.measured += 1
            accuracy = metrics.accuracy(logits.softmax(-1), image_data.labels).item()
            if abs(accuracy - claimed_accuracies[position]) * len(image_data) > LARGEST_DIFFERING_IMAGE_COUNT + 0.5:
                text = (
                    f"expected test accuracy {claimed_accuracies[position]:.4f} on {image_name}; found {accuracy:.4f}."
                )
                problems.append(Problem(members.name, members.ids[position], "accuracy", text))


def verify_predictions(members: Collection, name: str, sample: int = 8) -> list[Problem]:
    """Check stored predictions against their manifest rows, and the rows against the members' manifest; return the
    problems.

    Each member's logits must lie at the offset in their row, have its sha256, be finite, and come from the weights that
    the collection has. The logits of some selected members are computed again if the package has the images.

    Args:
        members: collection whose predictions are stored.
        name: name of the set of stored predictions in the members' source.
        sample: number of members whose logits are computed again, spread evenly; 0 for none.

    Raises:
        SourceNotFound, FormatError: there is no such set, or it can't be read.
        NetworkError, AccessError, StorageError: the bytes can't be downloaded or stored.
    """
    prediction_set, problems = check_stored_predictions(members.source, members.name, name)
    facts, faulty_members = prediction_set.facts, {problem.member for problem in problems}
    row_position_of_key = {
        key: row_position
        for row_position, key in enumerate(
            zip(*(prediction_set.rows.column(c).to_pylist() for c in KEY_COLUMNS), strict=True)
        )
    }
    checkable_positions = [
        position
        for position, key in enumerate(members._snapshot_keys)
        if key in row_position_of_key and key[0] not in faulty_members
    ]
    if (
        None in faulty_members
        or facts.split not in images.DATASETS.get(facts.data, ())
        or not checkable_positions
        or sample < 1
    ):
        return problems
    image_data = images.load(facts.data, facts.split)
    sampled_positions = [
        checkable_positions[i * len(checkable_positions) // min(sample, len(checkable_positions))]
        for i in range(min(sample, len(checkable_positions)))
    ]
    for position in sampled_positions:
        one_member_collection = members[position : position + 1]
        try:
            stored_logits = predictions.predictions_of(one_member_collection, name, data=image_data).logits()
            new_logits = predictions.logits(one_member_collection, image_data)
        except ZooError as error:
            problems.append(Problem(facts.name, one_member_collection.ids[0], "logits", str(error)))
            continue
        relative_difference = float((stored_logits - new_logits).abs().max() / new_logits.abs().max().clamp(min=1))
        if relative_difference > LOGITS_TOLERANCE:
            expected = f"what the members give now, within {LOGITS_TOLERANCE:g} of the largest"
            text = f"expected {expected}; found {relative_difference:.2g}."
            problems.append(Problem(facts.name, one_member_collection.ids[0], "logits", text))
    return problems
