"""Images in folders and Parquet files: what is read, in which order, and what is refused."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from checkpoints_zoo.errors import FormatError, SourceNotFound, TooLargeError, UsageError, ZooError
from checkpoints_zoo.images import ImageData, of
from checkpoints_zoo.networks import device

NAMES = ("cat", "dog", "owl")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0"


def made(inputs: int, seed: int = 0, size: tuple[int, int] = (6, 5)) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (inputs, 3, *size), np.uint8), rng.integers(0, 3, inputs).tolist()


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(out, kind)
    return out.getvalue()


def same(found: ImageData, pixels: np.ndarray, labels: Sequence[int] | None) -> None:
    assert found.images.tolist() == pixels.tolist()
    assert (None if found.labels is None else found.labels.tolist()) == labels
    assert found.classes == (() if labels is None else NAMES)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def refusal(given: Path | str, **options: Any) -> str:
    with pytest.raises(ZooError) as error:
        of(given, **options)
    return str(error.value).replace(str(given), "GIVEN") if "/" in str(given) else str(error.value)


# ---- folders ----
def class_folders(root: Path) -> tuple[np.ndarray, list[int]]:
    """Write a folder a class, nested and with odd names; return pixels and labels in the order of their paths."""
    pixels, _ = made(8)
    files = (
        "cat/b.png",
        "cat/c.PNG",
        "cat/sub/a.jpg",
        "dog/10.png",
        "dog/9.png",
        "owl/x y.jpeg",
        "owl/z.png",
        "owl/ü.png",
    )
    for file, image in zip(files, pixels, strict=True):
        kind = "PNG" if file.lower().endswith("png") else "JPEG"
        content = put(root / file, encoded(image, kind)).read_bytes()
        pixels[files.index(file)] = np.asarray(Image.open(io.BytesIO(content))).transpose(2, 0, 1)
    for beside in ("cat/Thumbs.db", "cat/.hidden.png", ".git/x.png", "notes.txt", "cat/boxes.txt"):
        put(root / beside, b"no image")
    return pixels, [0, 0, 0, 1, 1, 2, 2, 2]


def test_class_folders_are_torchvisions(tmp_path: Path, oracle: Callable[[str], ModuleType]) -> None:
    root = tmp_path / "My Pets"
    pixels, labels = class_folders(root)
    found = of(root)
    same(found, pixels, labels)
    assert (found.name, found.split, found.revision) == ("my-pets", "test", "")
    for hidden in (".git/x.png", "cat/.hidden.png"):  # that torchvision would take
        (root / hidden).unlink()
    (root / ".git").rmdir()
    theirs = oracle("torchvision.datasets").ImageFolder(root)
    assert [label for _, label in theirs] == labels
    assert theirs.classes == list(NAMES)
    assert of(theirs).fingerprint == found.fingerprint == of(str(root)).fingerprint


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    pixels, _ = made(4)
    for i, image in enumerate(pixels):
        put(tmp_path / f"{i}.png", encoded(image))
    same(of(tmp_path), pixels, None)
    assert (
        refusal(tmp_path, image="img")
        == "folder GIVEN: expected no arguments for columns, since it has image files; found image='img'."
    )


def test_a_folder_of_splits(tmp_path: Path) -> None:
    pixels, _ = made(4)
    for i, split in enumerate(("test", "test", "train", "val")):
        put(tmp_path / split / NAMES[i % 3] / f"{i}.png", encoded(pixels[i]))
    assert (of(tmp_path).split, of(tmp_path).classes) == ("test", ("cat", "dog"))
    found = of(tmp_path, split="train")
    assert (found.split, found.classes, found.images.tolist()) == ("train", ("owl",), pixels[2:3].tolist())
    assert of(tmp_path / "train", split="mine").split == "mine"
    assert (
        refusal(tmp_path, split="dev")
        == "split 'dev' of folder GIVEN: expected one of test, train, val; found none such."
    )


def test_links_are_followed_once(tmp_path: Path) -> None:
    pixels, labels = class_folders(tmp_path / "true")
    (tmp_path / "linked").mkdir()
    for name in NAMES:
        (tmp_path / "linked" / name).symlink_to(tmp_path / "true" / name)
    same(of(tmp_path / "linked"), pixels, labels)
    (tmp_path / "true" / "cat" / "sub" / "around").symlink_to(tmp_path / "true" / "cat")
    same(of(tmp_path / "linked"), pixels, labels)


def test_names_win_over_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, _ = made(2)
    for name in ("digits/a.png", "digits/train/a.png", "mine/a.png"):
        put(tmp_path / name, encoded(pixels[0]))
    monkeypatch.chdir(tmp_path)
    assert of("digits").name == of("digits/test").name == "digits"
    assert of("mine").name == "mine"
    assert of("./digits/train").name == "train"
    (tmp_path / "digits" / "train" / "a.png").unlink()
    (tmp_path / "digits" / "train").rmdir()
    assert of("./digits").name == of(Path("digits")).name == "own-digits"
    assert refusal("digits/valid") == (
        "split of data set 'digits': expected one of test, train; found 'valid'. A folder of that name is ./GIVEN."
    )
    places = "a folder of images or of Parquet files, a Parquet file, or hf://datasets/ORG/NAME[@REVISION][/PATH]"
    names = "digits, photos, mnist, fashion-mnist, cifar10, cifar100, tiny-imagenet, svhn"
    assert refusal("cifar") == (
        f"data set 'cifar': expected one of {names}; or a place: {places}; found 'cifar'. Did you mean 'cifar10'? Give"
        " a path that exists or contains a slash."
    )
    for path in ("./digit", Path("nowhere"), "a/b", "~/nothing-there", "a" * 300 + "/", "a/\0"):
        assert f"expected {places}; or a name: {names}; found no such file or folder." in refusal(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"<!DOCTYPE html><html>", "expected a PNG or JPEG image; found a web page."),
        (LFS, "found a Git LFS pointer, not the file it points to."),
        (b"", "found an empty file."),
        (b"BM" + bytes(100), "found another file."),
        (encoded(made(1)[0][0])[:60], "found image file is truncated."),
        (encoded(made(1, size=(6, 6))[0][0]), "expected 6 x 5 pixels (height x width), as the images before it; found"
         " 6 x 6. Give images of one size, or `size=(height, width)` to `zoo.images.of`, which resizes them."),
    ],
)  # fmt: skip
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    put(tmp_path / "cat" / "a.png", encoded(made(1)[0][0]))
    put(tmp_path / "cat" / "b.png", content)
    found = refusal(tmp_path)
    assert found.startswith("image GIVEN/cat/b.png: expected ")
    assert found.endswith(text)


def png_of(side: int) -> bytes:
    """A PNG that says it is so large."""
    header = bytearray(encoded(made(1)[0][0]))
    header[16:24] = side.to_bytes(4) * 2
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4)
    return bytes(header)


def test_bombs_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    for side in (9_000, 12_000, 30_000):  # the last two are what Pillow warns of, and refuses
        put(tmp_path / "a.png", png_of(side))
        text = refusal(tmp_path, size=(6, 5))
        assert text.startswith("image GIVEN/a.png: expected ")
        assert f"{side} x {side}" in text or f"({side**2} pixels) exceeds limit" in text


def test_folders_that_are_no_images(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "folder GIVEN: expected PNG or JPEG images, or Parquet files; found an empty folder."
    put(tmp_path / "a.txt", b"x")
    assert refusal(tmp_path).endswith("found none of them among 1 files.")
    image = put(tmp_path / "cat" / "a.png", encoded(made(1)[0][0]))
    (tmp_path / "dog").mkdir()
    assert refusal(tmp_path) == "folder GIVEN: expected images in the folder of every class; found none in 'dog'."
    put(tmp_path / "b.png", image.read_bytes())
    assert (
        refusal(tmp_path)
        == "folder GIVEN: expected a folder for each class, or images alone; found folders (cat, dog) beside b.png."
    )
    assert refusal(image).startswith("images GIVEN: expected a folder of images")
    assert refusal(image).endswith(f"found one image. Give the folder that it lies in, {tmp_path / 'cat'}.")
    put(tmp_path / "cat" / "b.webp", b"RIFF")
    assert refusal(tmp_path / "cat") == (
        "image GIVEN/b.webp: expected PNG or JPEG; found .webp. Convert it to PNG, which loses nothing, or remove it."
    )
    (tmp_path / "cat" / "b.webp").unlink()
    put(tmp_path / "cat" / "c.parquet", b"PAR1")
    assert (
        refusal(tmp_path / "cat")
        == "folder GIVEN: expected images or Parquet files; found both, c.parquet beside images."
    )


# ---- Parquet ----
def features(names: Sequence[str] = NAMES) -> dict[bytes, bytes]:
    """What `datasets` writes into a Parquet file's metadata."""
    columns = {"img": {"_type": "Image"}, "kind": {"names": list(names), "_type": "ClassLabel"}}
    return {b"huggingface": json.dumps({"info": {"features": columns}}).encode()}


def table(pixels: np.ndarray, labels: Sequence[Any] | None, **options: Any) -> bytes:
    """Write a Parquet file; `metadata`, `nested`, `image` and `label` change what it looks like."""
    nested, image, label = (options.get(k, v) for k, v in (("nested", True), ("image", "img"), ("label", "kind")))
    cells = [None if p is None else p if isinstance(p, bytes) else encoded(p) for p in pixels]
    columns: dict[str, Any] = {image: [c and {"bytes": c, "path": None} for c in cells] if nested else cells}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if nested else pa.binary()
    fields = [pa.field(image, kind)]
    if labels is not None:
        columns[label] = labels
        fields.append(pa.field(label, options.get("of", pa.int64())))
    schema = pa.schema(fields, metadata=options.get("metadata", features()))
    out = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), out, row_group_size=3)
    return out.getvalue()


def test_a_parquet_file_of_datasets(tmp_path: Path, oracle: Callable[[str], ModuleType]) -> None:
    datasets = oracle("datasets")
    pixels, labels = made(10)
    columns = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=list(NAMES))})
    images = [Image.fromarray(p.transpose(1, 2, 0)) for p in pixels]
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"img": images, "kind": labels}, features=columns).to_parquet(tmp_path / "mine.parquet")
    found = of(tmp_path / "mine.parquet")
    same(found, pixels, labels)
    assert (found.name, found.split) == ("mine", "test")


def test_columns_and_classes_that_the_file_does_not_name(tmp_path: Path) -> None:
    pixels, labels = made(7)
    said = {"classes": NAMES}
    for options, given in (
        ({}, {}),
        ({"metadata": None}, {"image": "img", "label": "kind", **said}),
        ({"metadata": None, "nested": False, "image": "image", "label": "label"}, said),
        ({"metadata": {b"huggingface": b"{["}, "image": "image", "label": "label", "of": pa.uint8()}, said),
    ):
        file = put(tmp_path / "a.parquet", table(pixels, labels, **options))
        same(of(file, **given), pixels, labels)
    names = [NAMES[at] for at in labels]
    for of_kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        file = put(tmp_path / "a.parquet", table(pixels, names, metadata=None, of=of_kind))
        same(of(file, image="img", label="kind"), pixels, labels)
    file = put(tmp_path / "a.parquet", table(pixels, None, metadata=None, image="image"))
    same(of(file), pixels, None)
    for without in ([None] * 7, [-1] * 7):
        same(of(put(tmp_path / "a.parquet", table(pixels, without))), pixels, None)


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    pixels, labels = made(9)
    for i in range(3):
        put(
            tmp_path / "data" / f"test-{i:05}-of-00003.parquet",
            table(pixels[3 * i : 3 * i + 3], labels[3 * i : 3 * i + 3]),
        )
    put(tmp_path / "data" / "train-00000-of-00001-0a1b2c.parquet", table(pixels[:2], labels[:2]))
    same(of(tmp_path), pixels, labels)
    assert (of(tmp_path).split, of(tmp_path / "data").name) == ("test", "data")
    train = of(tmp_path, split="train")
    assert (train.split, len(train)) == ("train", 2)
    assert refusal(tmp_path, split="valid").endswith("expected one of test, train; found none such.")
    (tmp_path / "data" / "test-00001-of-00003.parquet").unlink()
    assert refusal(tmp_path) == (
        "folder GIVEN: expected files test-00000-of-00003.parquet and so on, all of them; found"
        " test-00000-of-00003.parquet, test-00002-of-00003.parquet."
    )
    put(tmp_path / "more" / "test.parquet", table(pixels, labels))
    assert refusal(tmp_path) == (
        "folder GIVEN: expected Parquet files of one data set; found some in data, more. Give the path of one"
        " folder, or of one file."
    )
    same(of(tmp_path / "more"), pixels, labels)
    put(tmp_path / "converted" / "validation" / "0000.parquet", table(pixels[:5], labels[:5]))
    put(tmp_path / "converted" / "validation" / "0001.parquet", table(pixels[5:], labels[5:]))
    found = of(tmp_path / "converted")
    same(found, pixels, labels)
    assert found.split == "validation"
    put(tmp_path / "plain" / "a.parquet", table(pixels[:5], labels[:5]))
    put(tmp_path / "plain" / "b.parquet", table(pixels[5:], labels[5:]))
    same(of(tmp_path / "plain"), pixels, labels)


BAD = encoded(made(1)[0][0])[:50]


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        (b"PAR1 or so", {}, "file GIVEN: expected a Parquet file; found ArrowInvalid: "),
        (LFS, {}, "found a Git LFS pointer, not the file it points to."),
        (b"<html>", {}, "file GIVEN: expected a Parquet file; found a web page."),
        (table(made(4)[0], [0, 1, 2, 3]), {}, "labels of images 'a': expected numbers from 0 to 2, of 3 classes; found"
         " 3 for input 3."),
        (table(made(3)[0], [0, 1, None]), {}, "file GIVEN: expected a label in every row, or in none; found none in row"
         " 2."),
        (table([*made(4)[0], None], [0] * 5), {}, "row 4 of file GIVEN: expected an image in the file; found none."),  # type: ignore[arg-type]
        (table([*made(4)[0], BAD], [0] * 5), {}, "row 4 of file GIVEN: expected a PNG or JPEG image; found "),  # type: ignore[arg-type]
        (table(np.zeros((0, 3, 2, 2)), []), {}, "file GIVEN: expected one image or more; found none."),
        (table(made(2)[0], [0, 1]), {"label": "label"}, "file GIVEN: expected a column 'label'; found img, kind."),
        (table(made(2)[0], [0, 1]), {"image": "kind"}, "column 'kind' of file GIVEN: expected encoded images;"
         " found int64."),
        (table(made(2)[0], [0.0, 1.0], of=pa.float32()), {},
         "column 'kind' of file GIVEN: expected whole numbers or names;"
         " found float."),
        (table(made(2)[0], [0, 1], metadata=None), {}, "file GIVEN: expected a column of kind Image, or one called"
         " 'image'; found img, kind. Name the columns: "),
        (table(made(2)[0], [0, 1]), {"classes": ["dog", "cat", "owl"]}, "expected the data's own class names, cat,"
         " dog, owl; found dog, cat, owl."),
        (table(made(2)[0], [0, 1], metadata=features(("a", "a"))), {}, "expected each name once; found 'a' more than"
         " once."),
    ],
)  # fmt: skip
def test_parquet_that_is_refused(tmp_path: Path, content: bytes, options: dict[str, Any], text: str) -> None:
    assert text in refusal(put(tmp_path / "a.parquet", content), **options)


def test_several_columns_could_be_meant(tmp_path: Path) -> None:
    columns = {c: {"names": ["a"], "_type": "ClassLabel"} for c in ("fine", "coarse")} | {"img": {"_type": "Image"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": columns}}).encode()}
    schema = pa.schema({"img": pa.binary(), "fine": pa.int64(), "coarse": pa.int64()}, metadata=metadata)
    rows = {"img": [encoded(made(1)[0][0])], "fine": [0], "coarse": [0]}
    pq.write_table(pa.table(rows, schema=schema), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == (
        "file GIVEN: expected one column of kind ClassLabel; found fine, coarse. Choose one:"
        ' `zoo.images.of(…, label="fine")`.'
    )
    assert of(tmp_path / "a.parquet", label="coarse").classes == ("a",)


def test_files_with_other_classes_are_not_mixed(tmp_path: Path) -> None:
    pixels, labels = made(3)
    put(tmp_path / "a.parquet", table(pixels, labels))
    put(tmp_path / "b.parquet", table(pixels, labels, metadata=features(("cat", "owl", "dog"))))
    assert (
        refusal(tmp_path)
        == "folder GIVEN: expected the classes of a.parquet in every file; found other classes in b.parquet."
    )


def test_a_row_group_that_memory_can_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path / "a.parquet", table(*made(3)))
    monkeypatch.setattr(device, "free_bytes", lambda device: 100)
    with pytest.raises(
        TooLargeError, match=r"a row group of .*a\.parquet: expected at most 100 bytes; found [0-9,]+, by"
    ):
        of(file)


def test_kinds_of_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound):
        of(tmp_path)
    with pytest.raises(UsageError):
        of("digit")
    with pytest.raises(FormatError):
        of(put(tmp_path / "a.parquet", b""))
    assert torch.equal(of("photos").images, of("photos/test").images)
