"""Data sets on the Hub: everything that a repo may hold instead of what is expected."""

from __future__ import annotations

import io
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from checkpoints_zoo import images
from checkpoints_zoo.images import CLASSES, data_sets
from checkpoints_zoo.images.data_sets import HUB_SETS
from tests.hub import Hub
from tests.support.image_sets import CHANGED, SETS, cards, forgotten, path_of, png, published_images, put, refusal  # noqa: F401


def test_other_files(hub: Hub) -> None:
    published_images(hub, "cifar10")
    one = hub.read("uoft-cs/cifar10", path_of("cifar10"))
    commit = hub.commit("uoft-cs/cifar10", {path_of("cifar10"): None, path_of("cifar10", 1, 2): one})
    assert refusal("cifar10") == (
        f"data set 'cifar10' of hf://datasets/uoft-cs/cifar10@{commit[:8]}: expected files"
        " plain_text/test-00000-of-00002.parquet and so on; found plain_text/extra-00000-of-00001.parquet,"
        f" plain_text/test-00001-of-00002.parquet, plain_text/train-00000-of-00001.parquet.{CHANGED}"
    )
    paths = hub.files("uoft-cs/cifar10")
    commit = hub.commit("uoft-cs/cifar10", {path: None for path in paths if path != "README.md"})
    assert refusal("cifar10").endswith(
        f"expected files plain_text/test-00000-of-00001.parquet; found no such folder.{CHANGED}"
    )


def test_a_file_that_is_no_parquet(hub: Hub) -> None:
    published_images(hub, "cifar10")
    hub.commit("uoft-cs/cifar10", {path_of("cifar10"): b"\0" * 500})
    text = refusal("cifar10")
    assert text.startswith(f"{FILE} of data set 'cifar10' of hf://datasets/uoft-cs/cifar10@")
    assert ": expected a Parquet file; found ArrowInvalid" in text
    assert text.endswith(CHANGED)


FIRST = CLASSES["cifar10"]
FILE = "test-00000-of-00001.parquet"
GREY, RED = (np.full((channels, 32, 32), 7, np.uint8) for channels in (1, 3))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (FIRST[::-1], "expected class 0 to be 'airplane'; found 'truck', and 9 other classes differ."),
        ((*FIRST[:4], "stag", *FIRST[5:]), "expected class 4 to be 'deer'; found 'stag'."),
        (FIRST[:9], "expected 10 classes; found 9."),
        ((*FIRST, "lorry"), "expected 10 classes; found 11."),
    ],
)
def test_other_classes(hub: Hub, names: tuple[str, ...], text: str) -> None:
    commit = published_images(hub, "cifar10", names=names)["test"].revision
    assert refusal("cifar10") == f"data set 'cifar10' of hf://datasets/uoft-cs/cifar10@{commit[:8]}: {text}{CHANGED}"


def test_other_columns(hub: Hub) -> None:
    commit = published_images(hub, "cifar10", image="image")["test"].revision
    where = f"data set 'cifar10' of hf://datasets/uoft-cs/cifar10@{commit[:8]}"
    assert refusal("cifar10") == (
        f"{where}: expected column img of kind Image, column label of kind ClassLabel;"
        f" found image of kind Image, label of kind ClassLabel.{CHANGED}"
    )
    published_images(hub, "cifar10", bare=True)
    hub.commit("uoft-cs/cifar10", {"dataset_infos.json": None, "README.md": "---\nlicense: mit\n---\n"})
    assert refusal("cifar10").endswith(
        "expected column img of kind Image, column label of kind ClassLabel;"
        f" found img of kind dict, label of kind Value.{CHANGED}"
    )
    # A card may say what it likes: the files have to have it.
    published_images(hub, "cifar10", bare=True, label="class")
    hub.commit("uoft-cs/cifar10", cards(SETS["cifar10"]))
    assert refusal("cifar10").endswith(f"expected a column 'label'; found img, class.{CHANGED}")
    hub.commit("uoft-cs/cifar10", {"README.md": "---\ndataset_info: {features: 3}\n---\n"})
    assert "expected a card README.md; found TypeError" in refusal("cifar10")


def test_columns_of_other_kinds(hub: Hub) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    published_images(hub, "cifar10", bare=True)
    for columns, text in (
        ({"img": ["a"], "label": [1]}, ": expected encoded images; found string."),
        ({"img": [b"a"], "label": [1]}, "expected a PNG or JPEG image; found another file."),
        ({"img": [{"path": "a"}], "label": [1]}, ": expected encoded images; found struct<path: string>."),
        ({"img": [{"bytes": png(RED)}], "label": ["1"]}, "expected labels from 0 to 9; found '1' for input 0, 1 such"),
        ({"img": [{"bytes": png(RED)}], "label": [0.5]}, ": expected whole numbers or names; found double."),
    ):
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out)
        hub.commit("uoft-cs/cifar10", {path_of("cifar10"): out.getvalue()})
        assert text in refusal("cifar10")


SMALL = np.zeros((3, 32, 28), np.uint8)


def coded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (png(GREY), "expected mode RGB; found L."),
        (png(SMALL), "expected 32 x 32 pixels (height x width), as the images before it; found 32 x 28."),
        (coded(Image.new("RGBA", (32, 32))), "expected mode RGB; found RGBA."),
        (coded(Image.new("P", (32, 32))), "expected mode RGB; found P."),
        (coded(Image.new("CMYK", (32, 32)), "JPEG"), "expected mode RGB; found CMYK."),
        (coded(Image.new("RGB", (32, 32)), "BMP"), "expected a PNG or JPEG image; found another file."),
        (b"no image", "expected a PNG or JPEG image; found another file."),
        (png(RED)[:60], "expected a PNG or JPEG image; found "),
        (None, "expected an image in the file; found none."),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_other_images(hub: Hub, encoded: bytes | None, text: str) -> None:
    where = put(hub, "cifar10", [png(RED), encoded], [0, 1])
    found = refusal("cifar10")
    assert found.startswith(f"row 1 of {FILE} of {where}: {text}")
    assert found.endswith(CHANGED)


def test_colour_in_a_grey_set(hub: Hub) -> None:
    where = put(hub, "mnist", [png(np.zeros((3, 28, 28), np.uint8))], [0])
    assert refusal("mnist") == f"row 0 of {FILE} of {where}: expected mode L; found RGB.{CHANGED}"
    where = put(hub, "tiny-imagenet", [coded(Image.new("RGBA", (64, 64)))], [0])
    file = path_of("tiny-imagenet").rpartition("/")[2]
    assert refusal("tiny-imagenet") == f"row 0 of {file} of {where}: expected mode RGB or L; found RGBA.{CHANGED}"


def test_an_image_that_announces_a_huge_size_is_not_decoded(hub: Hub) -> None:
    bomb = bytearray(png(RED))
    bomb[16:24] = (60_000).to_bytes(4) * 2  # width and height, in the header
    bomb[29:33] = zlib.crc32(bytes(bomb[12:29])).to_bytes(4)
    where = put(hub, "cifar10", [bytes(bomb)], [0])
    assert refusal("cifar10").startswith(f"row 0 of {FILE} of {where}: expected a PNG or JPEG image; found ")


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ([0, -1, -1], "expected labels from 0 to 9; found -1 for input 1, 2 such labels in all."),
        ([0, 1, 10], "expected labels from 0 to 9; found 10 for input 2, 1 such labels in all."),
        ([0, None, 1], "expected a label for every input; found 1 without one."),
        ([], "expected from 1 to 10,000 inputs; found 0."),
    ],
)
def test_other_labels(hub: Hub, labels: list[int | None], text: str) -> None:
    where = put(hub, "cifar10", [png(RED)] * len(labels), labels)
    assert refusal("cifar10") == f"{where}: {text}{CHANGED}"


def test_more_inputs_than_the_set_has(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(HUB_SETS["svhn"], inputs={"test": 19, "train": 20})
    monkeypatch.setattr(data_sets, "HUB_SETS", {"svhn": few})
    published_images(hub, "svhn", inputs=20)
    assert "expected from 1 to 19 inputs; found 20." in refusal("svhn")
    assert len(images.load("svhn", "train")) == 20
