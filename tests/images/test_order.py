"""The order of classes: labels go to the members' own order where names tell how, and are refused where not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import CLASSES, ImageData, in_order, of
from checkpoints_zoo.images.image_data import class_positions
from checkpoints_zoo.predictions import predict, predictions_of
from tests.support.commands import run
from tests.support.few_digits import some
from tests.support.scenarios import build, load

DIGITS = tuple("0123456789")
TWO = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)


def shuffled(data: ImageData, seed: int = 0) -> ImageData:
    """Number the classes of images otherwise: the same images of the same classes."""
    order = list(range(len(data.classes)))
    random.Random(seed).shuffle(order)
    assert data.labels is not None
    labels = torch.tensor([order.index(int(label)) for label in data.labels])
    return replace(data, labels=labels, classes=tuple(data.classes[at] for at in order))


# ---- names ----
@pytest.mark.slow
@given(st.lists(st.text("abc xyz", min_size=1), min_size=1, max_size=8, unique=True), st.data())
def test_labels_keep_their_names(names: list[str], data: st.DataObject) -> None:
    theirs = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    labels = data.draw(st.lists(st.integers(0, len(theirs) - 1), min_size=1, max_size=9))
    images = ImageData("x", "test", TWO[:1].expand(len(labels), 1, 8, 8), torch.tensor(labels), tuple(theirs))
    moved = in_order(images, names)
    assert moved.labels is not None
    assert moved.classes == tuple(names)
    assert [moved.classes[x] for x in moved.labels] == [theirs[x] for x in labels]


@pytest.mark.parametrize(
    ("theirs", "ours", "found"),
    [
        (("pickup truck", "Oak-Tree"), ("oak_tree", "pickup_truck"), [1, 0]),
        (("T - shirt / top",), ("Bag", "T-shirt/top"), [1]),
        (("cra", "apple"), ("apple", "crab"), [1, 0]),
        (("cra", "crab"), ("apple", "crab"), None),
        (("cra",), ("cra", "crab"), [0]),
        (("0 - zero", "9 - nine"), DIGITS, [0, 9]),
        (("A", "a"), ("a", "A", "b"), [1, 0]),
        (("B", "a"), ("a", "A", "b"), None),
        (("a", "A"), ("a", "b"), None),
        (("a", "a"), ("a", "b"), None),
        (("cafe\u0301",), ("caf\u00e9",), [0]),
        (("ca fe", "cafe"), ("cafe", "x"), None),
        ((), ("a",), None),
        (("a", "c"), ("a", "b"), None),
    ],
)
def test_names_that_tell(theirs: Sequence[str], ours: Sequence[str], found: list[int] | None) -> None:
    assert class_positions(theirs, ours) == found


def test_names_of_other_sources(tmp_path: Path) -> None:
    """CIFAR-100's classes with spaces and capitals, and Tiny-ImageNet's in the order of its folders."""
    spaced = [name.replace("_", " ").title() for name in CLASSES["cifar100"]]
    assert class_positions(sorted(spaced, reverse=True), CLASSES["cifar100"]) == list(range(99, -1, -1))
    tiny = CLASSES["tiny-imagenet"]
    at = class_positions(sorted(tiny), tiny)
    assert at is not None
    assert [tiny[i] for i in at] == sorted(tiny)


def test_what_is_in_order_stays_the_same_object() -> None:
    digits = zoo.images.load("digits")
    photos = zoo.images.load("photos")
    assert in_order(digits, DIGITS) is digits
    assert in_order(digits, ("a", "b")) is digits
    assert in_order(photos, DIGITS) is photos


# ---- figures ----
@pytest.mark.slow
def test_figures_are_those_of_the_images_in_order() -> None:
    members = zoo.load("convnet-digits", n=4)
    digits = some("test", 200)
    others = shuffled(digits)
    assert others.classes != digits.classes
    known = zoo.evaluate(members, digits, "photos", sizes=[2])
    found = zoo.evaluate(members, others, "photos", sizes=[2])
    assert found.to_json() == known.to_json()
    assert found.data == f"digits/test {digits.fingerprint}"
    assert (
        zoo.barrier(members[0], members[1], others).to_json() == zoo.barrier(members[0], members[1], digits).to_json()
    )
    renamed = replace(others, classes=tuple(f"Digit {name}" for name in others.classes))
    with pytest.raises(UsageError, match=r"found 'Digit [0-9]', 'Digit [0-9]', 'Digit [0-9]' and 7 more among the 10"):
        zoo.evaluate(members, renamed)
    mine = of(renamed, renamed={f"Digit {name}": name for name in DIGITS})
    assert zoo.evaluate(members, mine, "photos", sizes=[2]).to_json() == known.to_json()


def test_some_of_the_classes_are_enough() -> None:
    members = zoo.load("convnet-digits", n=2)
    digits = some("test", 200)
    assert digits.labels is not None
    chosen = (digits.labels == 3) | (digits.labels == 7)
    kept, labels = digits.images[chosen], digits.labels[chosen]
    two = ImageData("two", "test", kept, (labels == 3).long(), ("7", "3"))
    inside = replace(digits, name="two", images=kept, labels=labels)
    assert zoo.evaluate(members, two, sizes=[2]).to_json() == zoo.evaluate(members, inside, sizes=[2]).to_json()


def test_stored_predictions_are_those_of_the_images_in_order(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=3)
    digits = some("test", 60)
    others = shuffled(digits)
    one, two = predict(members, digits, tmp_path / "one"), predict(members, others, tmp_path / "two")
    assert two.facts == one.facts
    assert torch.equal(two.logits(), one.logits())
    assert two.labels is not None
    assert torch.equal(two.labels, digits.labels)  # type: ignore[arg-type]
    assert [p.read_bytes() for p in sorted((tmp_path / "two").rglob("*.safetensors"))] == [
        p.read_bytes() for p in sorted((tmp_path / "one").rglob("*.safetensors"))
    ]
    for images in (digits, others, shuffled(digits, 1)):
        assert len(predictions_of(members, "digits-test", source=tmp_path / "two", data=images)) == 3
        assert zoo.evaluate(two, images, sizes=[3]).to_json() == zoo.evaluate(one, sizes=[3]).to_json()
    assert len(predict(members, others, tmp_path / "one")) == 3  # there already
    wrong = replace(others, labels=others.labels.flip(0))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="The set is on other images"):
        predictions_of(members, "digits-test", source=tmp_path / "one", data=wrong)


def test_images_of_other_classes_are_stored_without_labels(tmp_path: Path) -> None:
    other = of((TWO, [0, 1]), classes=["cat", "dog"], name="pets")
    found = predict(zoo.load("convnet-digits", n=2), other, tmp_path)
    assert found.labels is None
    assert found.facts.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (of(TWO), "found no labels. Give the test set of the collection, or other images of its classes."),
        (of((TWO, [0, 1])), "found labels that are numbers of classes without names. Name them in the order of the"
         " numbers: `zoo.images.of(…, classes=…)`, which may be `members.classes`."),
        (of((TWO, [0, 1]), classes=["3", "cat"]), "found 'cat' among the 2 classes of the images. If they are the same"
         " under other names, say so: `zoo.images.of(…, renamed={…})`."),
        (of((TWO, [0, 1]), classes=[*DIGITS, "ten"]), "found 'ten' among the 11 classes of the images."),
    ],
)  # fmt: skip
def test_images_of_other_classes_are_refused(images: ImageData, text: str) -> None:
    members = zoo.load("convnet-digits", n=2)
    for use in (zoo.evaluate, zoo.barrier, zoo.compact):
        with pytest.raises(UsageError) as error:
            use(members, data=images)
        start = "images 'images' for convnet-digits: expected labels of the classes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9; "
        assert str(error.value).startswith(start + text)


# ---- every function, every kind ----
@pytest.mark.slow
def test_all_functions_take_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image
    from torch.utils.data import DataLoader, TensorDataset

    members, digits = zoo.load("convnet-digits", n=2), some("test", 40)
    assert digits.labels is not None
    for i, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        (tmp_path / "mine" / str(int(label))).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(tmp_path / "mine" / str(int(label)) / f"{i}.png")
    loader = DataLoader(TensorDataset(digits.images, digits.labels), batch_size=7)
    known = of(loader, classes=digits.classes)
    path = str(tmp_path / "mine")
    accuracy = zoo.evaluate(members, digits, sizes=[2])["accuracy"].value
    information = zoo.pairwise(members, digits)["mi_id"].value
    for data, ood in ((path, loader), (tmp_path / "mine", digits.images), (known, tmp_path / "mine")):
        report = zoo.evaluate(members, data, ood, sizes=[2])
        assert (report["accuracy"].value, report.ood_inputs) == (accuracy, 40)
        assert zoo.pairwise(members, data, ood)["mi_ood"].value == pytest.approx(information, rel=1e-5, abs=1e-9)
        assert zoo.barrier(members, data=data, points=2).inputs == 40
    assert predict(members, path, tmp_path / "out", name="mine").shape == (2, 40, 10)
    assert len(members.predictions("mine", source=tmp_path / "out", data=path)) == 2
    norms = zoo.load("resnet8-digits", n=2)
    assert zoo.barrier(norms, data=path, points=2, statistics=loader).statistics_images == 40
    assert zoo.barrier(norms, data=path, points=2, statistics="digits").statistics.startswith("digits/train ")
    monkeypatch.chdir(tmp_path)
    for given_path in ("mine", path):
        result = run("evaluate", "convnet-digits", "-n", "2", "--data", given_path, "--ood", "photos")
        assert result.exit_code == 0, result.output
        assert "Measured now on mine/test, 40 inputs; OOD: photos/test, 2,000 inputs." in result.stdout
    result = run("predict", "convnet-digits", "-n", "2", "--data", "mine", "-o", tmp_path / "cli")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "cli" / "predictions" / "convnet-digits" / "mine-test").is_dir()
    result = run("evaluate", "convnet-digits", "-n", "2", "--data", "ours")
    assert result.exit_code == 2
    assert "data set 'ours': expected one of digits, photos, " in result.stderr
    assert "; or a place: a folder of images or of Parquet files" in result.stderr
    result = run("evaluate", "convnet-digits", "-n", "2", "--data", "./ours")
    assert result.exit_code == 3
    assert "; or a name: digits, photos, " in result.stderr


# ---- verify ----
def test_claims_on_images_of_ones_own_are_measured_again(tmp_path: Path) -> None:
    from tests.support.scenarios import hand_made

    few = some("test", 30)
    assert few.labels is not None
    built = build(tmp_path, members=range(2))
    x = load(built).preprocess(few.images)
    shares = {m: float((hand_made(built, m)(x).argmax(-1) == few.labels).double().mean()) for m in (0, 1)}
    mine = of(shuffled(few), name="mine")
    rewrite(built.manifest, {0: shares[0], 1: abs(shares[1] - 0.5)})
    members = load(built)
    assert zoo.verify(members) == []  # the package has no such images
    (found,) = zoo.verify(members, data=mine)
    assert (found.member, found.kind) == (1, "accuracy")
    assert f"on mine/test; found {shares[1]:.4f}." in str(found)
    with pytest.raises(UsageError) as error:
        zoo.verify(members, data=of(few, name="other"))
    assert str(error.value) == (
        "images 'other/test' to verify tiny on: expected one of the names in its manifest: mine/test; found"
        " another. If they are the manifest's images, name them so: `zoo.images.of(…, name=…, split=…)`."
    )


def rewrite(manifest: Path, accuracies: dict[int, float]) -> None:
    """Let a manifest claim accuracies on "mine/test"."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(manifest)
    claims = pa.array([accuracies[m] for m in table.column("member").to_pylist()], pa.float64())
    table = table.set_column(table.schema.get_field_index("test_accuracy"), "test_accuracy", claims)
    names = pa.array(["mine/test"] * len(table))
    if "eval_data" in table.column_names:
        table = table.drop_columns(["eval_data"])
    pq.write_table(table.append_column("eval_data", names).replace_schema_metadata(table.schema.metadata), manifest)
