"""Data sets of the user's own on the Hub: which files of a repo are read, and what happens without an answer."""

from __future__ import annotations

import math
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import NetworkError, SourceNotFound, UsageError, ZooError
from checkpoints_zoo.images import of
from tests.hub import Hub
from tests.hub.faults import HTML
from tests.images.test_folders import made, same, table
from tests.support.image_sets import SETS, forgotten, path_of, published_images  # noqa: F401 (a fixture)


def refusal(address: str, **options: Any) -> str:
    with pytest.raises(ZooError) as error:
        of(address, **options)
    return str(error.value)


def test_the_repo_of_a_named_set_is_read_by_its_address_too(hub: Hub) -> None:
    published = published_images(hub, "svhn")
    known = zoo.images.load("svhn", "train")
    hub.commit(SETS["svhn"].repo, {"cropped_digits/extra-00000-of-00001.parquet": None})
    found = of("hf://datasets/ufldl-stanford/svhn", split="train")
    assert (found.name, found.split, found.classes) == ("own-svhn", "train", known.classes)
    assert found.fingerprint == known.fingerprint == published["train"].fingerprint
    assert found.revision == hub.repo(SETS["svhn"].repo).at("main").id != known.revision


def test_the_hubs_misspelled_class_is_ours(hub: Hub) -> None:
    made_up = published_images(hub, "cifar100")["test"]
    file = f"hf://datasets/uoft-cs/cifar100@{made_up.revision}/{path_of('cifar100')}"
    found = of(file, label="fine_label")
    assert "cra" in found.classes
    moved = zoo.images.in_order(found, zoo.images.CLASSES["cifar100"])
    assert moved.fingerprint == made_up.fingerprint
    assert "Choose one: `zoo.images.of(…, label=" in refusal(file)


def test_folders_files_and_revisions_of_a_repo(hub: Hub) -> None:
    pixels, labels = made(8)
    hub.commit("me/pets", {
        "a/test-00000-of-00002.parquet": table(pixels[:4], labels[:4]),
        "a/test-00001-of-00002.parquet": table(pixels[4:], labels[4:]),
        "b/train.parquet": table(pixels[:2], labels[:2]),
        "README.md": "# pets",
    })  # fmt: skip
    first = hub.repo("me/pets").at("main").id
    address = "hf://datasets/me/pets"
    same(of(f"{address}/a"), pixels, labels)
    found = of(f"{address}@{first}/b/train.parquet", name="two")
    same(found, pixels[:2], labels[:2])
    assert (found.name, found.split, found.revision) == ("two", "test", first)
    assert of(f"{address}/b").split == "train"
    assert f"{address}@{first[:8]}: expected Parquet files of one data set; found some in a, b." in refusal(address)
    assert refusal(f"{address}/c") == (
        f"{address}@{first[:8]}/c: expected Parquet files; found no such folder, or an empty one."
    )
    assert "expected one of train; found none such" in refusal(f"{address}/b", split="test")
    hub.commit("me/pets", {"a/test-00000-of-00002.parquet": None, "c/images.zip": b"PK\x03\x04"})
    assert "expected files test-00000-of-00002.parquet and so on, all of them" in refusal(f"{address}/a")
    assert "/c: expected Parquet files; found 1 files (.zip)." in refusal(f"{address}/c")
    same(of(f"{address}@{first}/a"), pixels, labels)
    with pytest.raises(SourceNotFound, match="expected a path inside the repo"):
        of(f"{address}/a/../../b")
    with pytest.raises(SourceNotFound, match="expected hf://datasets/ORG/NAME"):
        of("hf://me/pets")


def test_members_are_measured_on_an_address(hub: Hub) -> None:
    members, digits = zoo.load("convnet-digits", n=2), zoo.images.load("digits")
    assert digits.labels is not None
    few, labels = digits.images[:50].numpy(), digits.labels[:50].tolist()
    hub.commit("me/few", {"test.parquet": table(few, labels, metadata=names("0123456789"))})
    report = zoo.evaluate(members, "hf://datasets/me/few", sizes=[2])
    assert report.data.startswith("few/test ")
    assert report["accuracy"].value > 0.9


def names(of_classes: str) -> dict[bytes, bytes]:
    from tests.images.test_folders import features

    return features(tuple(of_classes))


def test_without_an_answer(hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    pixels, labels = made(4)
    hub.commit("me/pets", {"test.parquet": table(pixels, labels)})
    hub.faults.append({"times": math.inf, "body": HTML, "path": "/_cdn/"})
    with pytest.raises(NetworkError, match="hf://datasets/me/pets"):
        of("hf://datasets/me/pets")
    hub.faults.clear()
    assert refusal("hf://datasets/me/dogs").startswith(
        "revision 'main' of hf://datasets/me/dogs: expected a data set repo"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (
        "expected Parquet files in the cache, since HF_HUB_OFFLINE is set; found none. Load it once online."
        in refusal("hf://datasets/me/pets")
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    same(of("hf://datasets/me/pets"), pixels, labels)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    same(of("hf://datasets/me/pets"), pixels, labels)


def test_a_collections_description_names_sets_alone(hub: Hub) -> None:
    """What a source calls its data set is no place to read from: it is not the user who said it."""
    from dataclasses import replace

    members = zoo.load("convnet-digits", n=2)
    members.description = replace(members.description, dataset="hf://datasets/me/pets")
    for use in (zoo.evaluate, zoo.pairwise, zoo.barrier):
        with pytest.raises(
            UsageError, match=r"by name \(digits, .*; found 'hf://datasets/me/pets': images of the collection"
        ):
            use(members)
    assert len(hub.log) == 0
