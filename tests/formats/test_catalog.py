"""Damaged descriptions (`manifests/NAME.json`), kind by kind: an error of ours that says what came."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_zoo import images
from checkpoints_zoo.errors import FormatError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.sources.archives import keymaps
from tests.support.refusals import HTML, POINTER, refused
from tests.support.scenarios import Built, build, load

NESTED = b"[" * 100_000
DESCRIPTION = "description ROOT/manifests/tiny.json: expected "
LAYOUT = "layout 'only' in description ROOT/manifests/tiny.json: expected "


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A source of four members that a test may damage."""
    return build(tmp_path, weights=torch.float16)


@pytest.mark.parametrize(
    "content", [b"", b"{", HTML, POINTER, NESTED, b'{"a":' * 100_000, b"\xff\xfe", b'"\xff"', b'{"format_version": 1']
)
def test_a_description_that_is_no_json(built: Built, content: bytes) -> None:
    built.json.write_bytes(content)
    assert type(refused(built, lambda: load(built), DESCRIPTION + "JSON; found …")) is FormatError


@pytest.mark.parametrize("text", [rb"a\ud800", rb"\udfff", b"\xed\xa0\x80"])
def test_half_a_surrogate_pair(built: Built, text: bytes) -> None:
    content = built.json.read_bytes()
    for old in (b'"title"', built.description["title"].encode()):  # a key and a value
        assert old.strip(b'"') in content
        built.json.write_bytes(content.replace(old.strip(b'"'), text, 1))
        refused(built, lambda: load(built), DESCRIPTION + "texts of whole characters; found half a surrogate pair, …")


def test_nesting_of_any_depth(built: Built) -> None:
    for depth in range(1, 1100, 9):
        built.json.write_bytes(b'{"format_version": 1, "name": ' + b"[" * depth + b"]" * depth + b"}")
        with pytest.raises(FormatError, match=r"^description .*tiny.json: expected ('name' to be a str|JSON); found "):
            load(built)


VERSION = "a JSON object with a format_version; found "
DESCRIPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"format_version": 2}, DESCRIPTION + "format version 1 or older; found version 2. Install a newer"
                                          " checkpoints-zoo."),
    *(({"format_version": v}, DESCRIPTION + VERSION + "…") for v in ("1", 1.0, True, None, [1])),
    ({"name": "other"}, DESCRIPTION + "the name 'tiny', as in the file's name; found 'other'."),
    ({"name": None}, DESCRIPTION + "'name' to be a str; found None."),
    ({"classes": "0123456789"}, DESCRIPTION + "'classes' to be a list; found '0123456789'."),
    ({"classes": [0, 1]}, DESCRIPTION + "class names, and one layout or more; found other values."),
    ({"arguments": []}, DESCRIPTION + "'arguments' to be a dict; found []."),
    ({"layouts": {}}, DESCRIPTION + "class names, and one layout or more; found other values."),
    ({"layouts": {"only": []}}, LAYOUT + "tensors, counters and a pad; found …"),
    ({"layouts": {"only": {"tensors": [["a", "F32", [-1]]], "counters": [], "pad": 0}}}, LAYOUT + "names, dtypes,"
        " shapes of whole numbers, counters, a pad of 0..7; found {'counters': [], 'pad': 0, 'tensors': [['a',"
        " 'F32', [-1]]]}."),
    ({"layouts": {"only": {"tensors": [["a", "F31", [1]]], "counters": [], "pad": 0}}},
     "tensor 'a' of " + LAYOUT + "a dtype among F64, I64, …"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), DESCRIPTIONS, ids=lambda v: str(v)[:50])
def test_a_description_that_cannot_be(built: Built, change: dict[str, Any], text: str) -> None:
    built.description |= change
    built.write()
    refused(built, lambda: load(built), text)


def test_a_key_that_is_missing(built: Built) -> None:
    whole = dict(built.description)
    for key, value in whole.items():
        built.description = {k: v for k, v in whole.items() if k != key}
        built.write()
        text = f"{key!r} to be a {type(value).__name__}; found no such key."
        refused(built, lambda: load(built), DESCRIPTION + (VERSION + "…" if key == "format_version" else text))


def test_one_listing_is_the_one_of_all() -> None:
    listings = catalog.collections()
    assert {name: catalog.listing_of(name) for name in listings} == listings
    assert [catalog.listing_of(name) for name in ("convnet", "../catalog/convnet-digits", "", None, 3)] == [None] * 5


@pytest.mark.parametrize("name", [n for n, x in catalog.collections().items() if x.archives])
def test_what_the_catalog_says_of_archives(name: str) -> None:
    listing = catalog.find_listing(name)
    assert listing.archives is not None
    preprocess = images.Preprocess.from_json(dict(listing.archives.preprocessing))
    classes = {"mnist": 10, "cifar10": 10, "cifar100": 100, "tiny-imagenet": 200}[listing.dataset]
    assert len(set(listing.archives.classes)) == classes
    assert listing.archives.classes == images.CLASSES[listing.dataset]
    pixels = {"mnist": (28, 28), "tiny-imagenet": (64, 64)}.get(listing.dataset, (32, 32))
    assert preprocess.size == pixels
    arguments = {"hidden": None} if listing.architecture == "optunet" else {}
    if listing.architecture == "resnet20-frn-silu":
        arguments = {"conv_bias": False}
    shapes = keymaps.tensor_shapes(listing.architecture, classes=classes, **arguments)
    elements = sum(math.prod(s) for n, s in shapes.items() if n.rpartition(".")[2] != "num_batches_tracked")
    counters = sum(n.endswith("num_batches_tracked") for n in shapes)
    assert listing.bytes == listing.members * 2 * (elements + counters)  # upstream's counters are float16 as well


def test_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    def write(number: int) -> None:
        catalog.write_json({"number": number, "long": ["x"] * 2000}, tmp_path / "a.json")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(200)))
    assert catalog.read_json(tmp_path / "a.json")["number"] in range(200)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
