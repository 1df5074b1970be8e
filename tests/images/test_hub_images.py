"""Data sets on the Hub: what is read, what is fetched, and what happens without an answer."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from checkpoints_zoo import images
from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError, SourceNotFound, UsageError, ZooError
from checkpoints_zoo.images import CLASSES, ImageData, data_sets
from checkpoints_zoo.images.data_sets import HUB_SETS
from tests.hub import WRITER, Hub
from tests.hub.faults import HTML
from tests.support.image_sets import (  # noqa: F401 (a fixture)
    SETS,
    TINY_RIGHT,
    cards,
    forgotten,
    parquet,
    path_of,
    png,
    published_images,
    put,
    refusal,
)


def same(got: ImageData, made: ImageData) -> bool:
    assert got.labels is not None
    assert made.labels is not None
    assert (got.images.dtype, got.labels.dtype) == (torch.uint8, torch.int64)
    return torch.equal(got.images, made.images) and torch.equal(got.labels, made.labels)


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


# ---- what is read ----
@pytest.mark.parametrize("name", SETS)
def test_a_set_is_read_as_it_was_made(hub: Hub, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = published_images(hub, name, inputs=21)
    for split in ("test", "train"):
        hub.log.clear()
        got = images.load(name, split)
        assert same(got, made[split])
        assert (got.name, got.split, got.classes) == (name, split, CLASSES[name])
        assert got.revision == made[split].revision == hub.repo(SETS[name].repo).at("main").id
        assert got.fingerprint == made[split].fingerprint
        fetched = {row.path.rpartition("/")[2] for row in hub.log.select("/_cdn/")}
        assert len(fetched) == 1  # this split, and no other
        assert hub.log.leaks(WRITER) == []
    assert len(hub.log) <= 7
    assert capfd.readouterr().out == ""


def test_pixels_and_names_are_those_that_datasets_reads(hub: Hub, oracle: Callable[[str], ModuleType]) -> None:
    published_images(hub, "cifar100", inputs=20)
    hub.commit(SETS["cifar100"].repo, {"cifar100/extra-00000-of-00001.parquet": None})
    datasets = oracle("datasets")
    datasets.disable_progress_bars()
    there = datasets.load_dataset("uoft-cs/cifar100", "cifar100", split="test")
    got = images.load("cifar100")
    assert got.labels is not None
    for row, pixels, label in zip(there, got.images, got.labels.tolist(), strict=True):
        assert np.array_equal(np.asarray(row["img"]), pixels.movedim(0, -1).numpy())
        name = there.features["fine_label"].int2str(row["fine_label"])
        assert {"cra": "crab"}.get(name, name) == got.classes[label]


def test_a_set_in_several_files_is_read_in_order(hub: Hub) -> None:
    made = published_images(hub, "mnist", inputs=25)["test"]
    assert made.labels is not None
    files: dict[str, bytes | None] = {path_of("mnist"): None}
    for i, (pixels, labels) in enumerate(zip(made.images.split(10), made.labels.split(10), strict=True)):
        files[path_of("mnist", i, 3)] = parquet(SETS["mnist"], [png(p) for p in pixels.numpy()], labels.tolist())
    hub.commit(SETS["mnist"].repo, files)
    assert same(images.load("mnist"), made)


def test_jpegs_are_decoded_as_pillow_does(hub: Hub) -> None:
    encoded = []
    for i in range(4):
        pixels = np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels if i % 2 else pixels[:, :, 0]).save(out, "JPEG")
        encoded.append(out.getvalue())
    put(hub, "tiny-imagenet", encoded, [0, 1, 2, 3])
    got = images.load("tiny-imagenet").images
    for code, pixels in zip(encoded, got, strict=True):
        with Image.open(io.BytesIO(code)) as image:
            assert np.array_equal(np.asarray(image.convert("RGB")), pixels.movedim(0, -1).numpy())


def test_columns_are_described_by_the_card_where_the_files_say_nothing(hub: Hub) -> None:
    made = published_images(hub, "svhn", bare=True)["test"]
    assert same(images.load("svhn"), made)
    hub.commit(SETS["svhn"].repo, {"dataset_infos.json": None, **cards(SETS["svhn"])})
    data_sets.read_from_hub.cache_clear()
    assert same(images.load("svhn"), made)


# ---- what is fetched ----
def test_a_set_is_fetched_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    made = published_images(hub, "cifar10")
    first = images.load("cifar10")
    hub.log.clear()
    assert images.load("cifar10") is first
    assert len(hub.log) == 0
    data_sets.read_from_hub.cache_clear()  # as in another process
    assert same(images.load("cifar10"), made["test"])
    assert hub.log.requests("resolve") == 0
    hub.log.clear()
    data_sets.read_from_hub.cache_clear()
    offline(monkeypatch)
    again = images.load("cifar10")
    assert same(again, made["test"])
    assert again.revision == first.revision
    assert len(hub.log) == 0


def test_offline_the_card_is_not_missed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    made = published_images(hub, "tiny-imagenet")
    images.load("tiny-imagenet")
    data_sets.read_from_hub.cache_clear()
    offline(monkeypatch)
    hub.log.clear()
    assert same(images.load("tiny-imagenet"), made["test"])
    assert len(hub.log) == 0


def test_offline_without_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = published_images(hub, "cifar10")["test"].revision
    images.load("cifar10", "train")
    offline(monkeypatch)
    assert refusal("svhn") == (
        "revision 'main' of hf://datasets/ufldl-stanford/svhn: expected a commit of it in the cache, since"
        " HF_HUB_OFFLINE is set; found none. Load it once online."
    )
    assert refusal("cifar10") == (
        f"data set 'cifar10' of hf://datasets/uoft-cs/cifar10@{commit[:8]}: expected files"
        " plain_text/test-00000-of-00001.parquet in the cache, since HF_HUB_OFFLINE is set; found none of them."
        " Load it once online."
    )


def test_offline_with_a_part_of_it(hub: Hub, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    where = put(hub, "mnist", [png(np.zeros((1, 28, 28), np.uint8))], [0])
    one = hub.read(SETS["mnist"].repo, path_of("mnist"))
    parts = {path_of("mnist"): None, path_of("mnist", 0, 2): one, path_of("mnist", 1, 2): one}
    where = where[:-8] + hub.commit(SETS["mnist"].repo, parts)[:8]
    hub.faults.add("00001-of-00002", status=500, times=math.inf)
    with pytest.raises(NetworkError):
        images.load("mnist")
    offline(monkeypatch)
    assert refusal("mnist") == (
        f"{where}: expected files mnist/test-00000-of-00002.parquet and so on in the cache, since HF_HUB_OFFLINE is"
        " set; found 1 of 2. Load it once online."
    )


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"hangup": True}, NetworkError),
        ({"status": 503}, NetworkError),
        ({"status": 403}, AccessError),
        ({"status": 401, "code": "GatedRepo"}, AccessError),
        ({"body": HTML}, NetworkError),
        ({"body": HTML, "path": "/tree/"}, NetworkError),
        ({"body": HTML, "path": "/_cdn/"}, NetworkError),
        ({"wrong": 100, "path": "/_cdn/"}, DamagedError),
    ],
    ids=str,
)
def test_a_hub_that_gives_no_answer(hub: Hub, waits: list[float], fault: dict[str, Any], kind: type[ZooError]) -> None:
    made = published_images(hub, "svhn")["test"]
    hub.faults.append({"times": math.inf, **fault})
    with pytest.raises(kind, match="hf://datasets/ufldl-stanford/svhn"):
        images.load("svhn")
    hub.faults.clear()
    assert same(images.load("svhn"), made)  # a failure is not remembered


def test_a_repo_that_is_not_there(hub: Hub) -> None:
    with pytest.raises(SourceNotFound) as error:
        images.load("mnist")
    assert str(error.value) == (
        "revision 'main' of hf://datasets/ylecun/mnist: expected a data set repo; found none that this login may see."
        " Check its name; if it is private, log in with `hf auth login` or set HF_TOKEN."
    )


# ---- Tiny-ImageNet's names ----
def test_tiny_imagenet_of_right_names_is_read_as_well(hub: Hub) -> None:
    ours = CLASSES["tiny-imagenet"]
    right = tuple(TINY_RIGHT.get(name, name) for name in SETS["tiny-imagenet"].names)
    for names in (right, tuple(sorted(ours))):
        made = published_images(hub, "tiny-imagenet", names=names)["test"]
        assert same(images.load("tiny-imagenet"), made)
    published_images(hub, "tiny-imagenet", names=ours)
    assert "expected class 0 to be 'n01443537'; found 'n02124075', and " in refusal("tiny-imagenet")


@pytest.mark.slow
def test_tiny_imagenets_ids_mean_what_the_repo_calls_them(oracle: Callable[[str], ModuleType]) -> None:
    """A repo's id and ours for one class have their first word in common, as far as timm knows the words for both."""
    words = {}
    for subset in ("imagenet22k", "imagenet1k"):
        known = oracle("timm.data").ImageNetInfo(subset)
        words.update({name: known.label_name_to_description(name) for name in known.label_names()})
    assert set(CLASSES["tiny-imagenet"]) <= set(words)
    both = [(theirs, ours) for theirs, ours in TINY_RIGHT.items() if theirs in words]
    first = [[words[name].split(",")[0] for name in pair] for pair in both]
    # The other meanings of the other words are not in ImageNet.
    assert first == [[word, word] for word in ("fly", "tractor", "apron", "mushroom")]
    assert HUB_SETS["tiny-imagenet"].repo_class_names == {ours: theirs for theirs, ours in TINY_RIGHT.items()}


# ---- the table ----
def test_class_names_are_torchvisions(oracle: Callable[[str], ModuleType]) -> None:
    sets = oracle("torchvision.datasets")
    assert CLASSES["fashion-mnist"] == tuple(sets.FashionMNIST.classes)
    assert CLASSES["mnist"] == tuple(name[0] for name in sets.MNIST.classes)
    assert list(CLASSES["cifar100"]) == sorted(set(CLASSES["cifar100"]))
    counts = {name: len(set(classes)) for name, classes in CLASSES.items()}
    tens = dict.fromkeys(("digits", "mnist", "fashion-mnist", "cifar10", "svhn"), 10)
    assert counts == {**tens, "cifar100": 100, "tiny-imagenet": 200}
    # Egyptian cat, reel, ... binoculars, cauliflower, African elephant: wnids.txt, line by line.
    assert CLASSES["tiny-imagenet"][:2] == ("n02124075", "n04067472")
    assert CLASSES["tiny-imagenet"][-2:] == ("n07715103", "n02504458")


def test_unknown_split() -> None:
    with pytest.raises(UsageError) as error:
        images.load("cifar10", "valid")
    assert str(error.value) == "split of data set 'cifar10': expected one of test, train; found 'valid'."
