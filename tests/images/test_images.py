"""Image data: the split rules, fingerprints, preprocessing, and the errors."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.images import ImageData, Preprocess, load

GREY = Preprocess(size=(8, 8), channels=1, mean=(0.3,), std=(0.4,))


def test_digits_follow_the_named_rule() -> None:
    test, train = load("digits", "test"), load("digits", "train")
    assert (len(test), len(train)) == (540, 1257)
    assert test.images.dtype == torch.uint8
    assert test.images.shape[1:] == (1, 8, 8)
    assert test.classes == train.classes == tuple("0123456789")
    digits = load_digits()
    keys = [hashlib.sha256(f"digits-test|{i}".encode()).hexdigest() for i in range(1797)]
    threshold = sorted(keys)[540]
    chosen = {i for i in range(1797) if keys[i] < threshold}
    order = sorted(chosen, key=lambda i: keys[i])
    assert test.labels is not None
    assert test.labels.tolist() == digits.target[order].tolist()
    expected = [[[round(pixel * 255 / 16) for pixel in row] for row in digits.images[i]] for i in order]
    assert test.images[:, 0].tolist() == expected


def test_digits_splits_are_disjoint_and_complete() -> None:
    both = torch.cat([load("digits", split).images for split in ("test", "train")]).flatten(1).tolist()
    scaled = np.floor(load_digits().images.reshape(1797, 64) * 255 / 16 + 0.5).astype(int).tolist()
    assert sorted(both) == sorted(scaled)


def test_photos_are_patches_as_pillow_makes_them_grey() -> None:
    photos = load("photos")
    assert photos.images.shape == (2000, 1, 8, 8)
    assert photos.labels is None
    assert photos.classes == ()
    china = np.asarray(Image.fromarray(load_sample_image("china.jpg")).convert("L"))
    columns = china.shape[1] // 8
    count = (china.shape[0] // 8) * columns
    first = min(range(count), key=lambda i: hashlib.sha256(f"photos|china.jpg|{i}".encode()).hexdigest())
    row, column = divmod(first, columns)
    assert photos.images[0, 0].tolist() == china[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8].tolist()


def test_fingerprint_is_pinned() -> None:
    assert load("digits", "test").fingerprint == "5118a1d447d9d867"
    assert load("digits", "train").fingerprint == "a018715d0b6d3e79"


@pytest.mark.parametrize("name", ["digits", "digits/train", "photos"])
def test_changed_pixels_change_no_later_load(name: str) -> None:
    name, _, split = name.partition("/")
    first = load(name, split or "test")
    kept = first.images.clone()
    first.images.zero_()
    assert kept.any()
    assert torch.equal(load(name, split or "test").images, kept)


def test_fingerprint_covers_pixels_labels_and_classes() -> None:
    images = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    variants = [
        ImageData("x", "test", images, labels, ("a", "b")),
        ImageData("x", "test", images + 1, labels, ("a", "b")),
        ImageData("x", "test", images, labels.flip(0), ("a", "b")),
        ImageData("x", "test", images, labels, ("b", "a")),
        ImageData("x", "test", images, None, ("a", "b")),
        ImageData("x", "test", images.reshape(2, 1, 1, 4), labels, ("a", "b")),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)
    assert ImageData("y", "train", images, labels, ("a", "b")).fingerprint == variants[0].fingerprint


def test_unknown_names() -> None:
    with pytest.raises(UsageError) as error:
        load("digit")
    names = "digits, photos, mnist, fashion-mnist, cifar10, cifar100, tiny-imagenet, svhn"
    text = f"data set 'digit': expected one of {names}; found 'digit'. Did you mean 'digits'?"
    assert str(error.value) == text
    with pytest.raises(UsageError) as error:
        load("photos", "train")
    assert str(error.value) == "split of data set 'photos': expected one of test; found 'train'."


def test_preprocess_equals_a_sum_by_hand() -> None:
    rgb = Preprocess(size=(1, 2), channels=2, mean=(0.5, 0.25), std=(0.5, 0.125))
    pixels = np.array([[[[0, 51]], [[255, 102]]]], dtype=np.uint8)
    expected = torch.tensor([[[[-1.0, -0.6]], [[6.0, 1.2]]]])
    for images in (pixels, torch.from_numpy(pixels)):
        result = rgb(images)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    assert pixels.max() == 255  # the input is left alone
    frozen = pixels.copy()
    frozen.flags.writeable = False
    torch.testing.assert_close(rgb(frozen), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (
            torch.zeros(2, 1, 8, 8),
            "images: expected uint8 pixels in 0..255; found torch.Tensor of torch.float32."
            " Give the pixels unchanged; preprocess scales and normalises them.",
        ),
        (
            np.zeros((2, 1, 8, 8)),
            "images: expected uint8 pixels in 0..255; found numpy.ndarray of float64."
            " Give the pixels unchanged; preprocess scales and normalises them.",
        ),
        *(
            (
                torch.zeros(shape, dtype=torch.uint8),
                "images: expected shape (batch, 1, 8, 8), axes (batch, channel, height, width);"
                f" found shape {shape}."
                " Resize or crop the images, and add a batch axis to a single one.",
            )
            for shape in ((1, 8, 8), (2, 3, 8, 8), (2, 1, 8, 9))
        ),
    ],
)
def test_preprocess_refuses_other_images(images: Any, text: str) -> None:
    with pytest.raises(UsageError) as error:
        GREY(images)
    assert str(error.value) == text


@given(
    size=st.tuples(st.integers(1, 1024), st.integers(1, 1024)),
    statistics=st.lists(st.tuples(st.floats(-1, 2), st.floats(1e-3, 2)), min_size=1, max_size=4),
)
def test_preprocess_survives_json(size: tuple[int, int], statistics: list[tuple[float, float]]) -> None:
    mean, std = (tuple(numbers) for numbers in zip(*statistics, strict=True))
    preprocess = Preprocess(size=size, channels=len(statistics), mean=mean, std=std)
    assert Preprocess.from_json(json.loads(json.dumps(preprocess.to_json()))) == preprocess


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"crop": 0.9},
            "preprocess: expected the fields size, channels, mean, std; found channels, crop, mean, size, std.",
        ),
        ({"size": 8}, "preprocess size: expected a list; found 8."),
        ({"size": [8]}, "preprocess size: expected a height and a width of at least 1; found (8,)."),
        (
            {"size": [8, True]},
            "preprocess size: expected a height and a width of at least 1; found (8, True).",
        ),
        ({"channels": "1"}, "preprocess channels: expected a number of at least 1; found '1'."),
        ({"mean": [0.1, 0.2]}, "preprocess mean: expected a finite number for each channel; found (0.1, 0.2)."),
        ({"mean": ["x"]}, "preprocess mean: expected a finite number for each channel; found ('x',)."),
        ({"mean": [float("nan")]}, "preprocess mean: expected a finite number for each channel; found (nan,)."),
        ({"std": [0.0]}, "preprocess std: expected a finite number above 0 for each channel; found (0.0,)."),
    ],
)
def test_preprocess_from_json_is_strict(change: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatError) as error:
        Preprocess.from_json({**GREY.to_json(), **change})
    assert str(error.value) == text


def test_preprocess_from_json_needs_every_field() -> None:
    with pytest.raises(FormatError) as error:
        Preprocess.from_json({"size": [8, 8]})
    assert str(error.value) == "preprocess: expected the fields size, channels, mean, std; found size."
    with pytest.raises(FormatError):
        Preprocess.from_json([1])


def test_preprocess_checks_itself() -> None:
    with pytest.raises(UsageError):
        Preprocess(size=(8, 8), channels=3, mean=(0.3,), std=(0.4,))
    fields: dict[str, Any] = {"size": (8, 8), "channels": 1, "mean": (0.3,), "std": (0.4,)}
    for name, value in (("size", 8), ("channels", (1,)), ("mean", 0.3), ("std", 0.4)):
        with pytest.raises(UsageError, match=rf"^preprocess {name}: expected .*; found {re.escape(repr(value))}\.$"):
            Preprocess(**fields | {name: value})
