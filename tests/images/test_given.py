"""Images of the user's own in memory: tensors, Datasets, DataLoaders, and what is refused of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import FormatError, TooLargeError, UsageError, ZooError
from checkpoints_zoo.images import ImageData, Prepared, in_order, of, prepared
from checkpoints_zoo.networks import device
from checkpoints_zoo.predictions import logits

DIGITS = tuple("0123456789")
COLOURED = np.random.default_rng(0).integers(0, 256, (7, 3, 5, 4), np.uint8)
LABELS = [1, 0, 2, 2, 1, 0, 0]
NAMES = ("cat", "dog", "owl")


def pictures(images: np.ndarray = COLOURED) -> list[Image.Image]:
    return [Image.fromarray(image.transpose(1, 2, 0)) for image in images]


class Own(Dataset[Any]):
    """Pairs of Pillow's images and labels, with names of classes as torchvision's sets have them."""

    classes = NAMES

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, at: int) -> Any:
        return pictures()[at], LABELS[at]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for image, label in zip(COLOURED, LABELS, strict=True):
            yield {"pixels": torch.from_numpy(image), "kind": label}


def same(found: ImageData, labelled: bool = True) -> None:
    assert found.images.dtype == torch.uint8
    assert found.images.tolist() == COLOURED.tolist()
    assert found.classes == (NAMES if labelled else ())
    assert (found.labels.tolist() if found.labels is not None else None) == (LABELS if labelled else None)
    assert found.images.is_contiguous()


TENSOR, NUMBERS = torch.from_numpy(COLOURED), torch.tensor(LABELS)
LAST = np.moveaxis(COLOURED, 1, -1)
SOURCES: dict[str, Callable[[], ImageData]] = {
    "tensors": lambda: of((TENSOR, NUMBERS), classes=NAMES),
    "arrays": lambda: of((COLOURED, np.array(LABELS, np.uint8)), classes=NAMES),
    "labels in a list": lambda: of((COLOURED, LABELS), classes=list(NAMES)),
    "names in a list": lambda: of((COLOURED, [NAMES[at] for at in LABELS])),
    "channels last": lambda: of((LAST, LABELS), classes=NAMES, channels_last=True),
    "a strided view": lambda: of((TENSOR.flip(0).flip(0), NUMBERS), classes=NAMES),
    "a Dataset": lambda: of(Own()),
    "a part of a Dataset": lambda: of(Subset(Subset(Own(), list(range(7))), list(range(7)))),
    "a TensorDataset": lambda: of(TensorDataset(TENSOR, NUMBERS), classes=NAMES),
    "a DataLoader": lambda: of(DataLoader(TensorDataset(TENSOR, NUMBERS), batch_size=3), classes=NAMES),
    "a DataLoader of a Dataset": lambda: of(DataLoader(Own(), batch_size=None)),
    "a list of pairs": lambda: of(list(zip(pictures(), LABELS, strict=True)), classes=NAMES),
    "a list of batches": lambda: of([(TENSOR[:4], NUMBERS[:4]), (TENSOR[4:], NUMBERS[4:])], classes=NAMES),
    "an iterator": lambda: of(iter(list(zip(COLOURED, LABELS, strict=True))), classes=NAMES),
    "a stream of mappings": lambda: of(Stream(), classes=NAMES, image="pixels", label="kind"),
    "a DataLoader of mappings": lambda: of(
        DataLoader(Stream(), batch_size=2), classes=NAMES, image="pixels", label="kind"
    ),
    "ImageData": lambda: of(ImageData("x", "test", TENSOR, NUMBERS, NAMES)),
    "ImageData, renamed": lambda: of(
        ImageData("x", "test", TENSOR, NUMBERS, ("a", "b", "owl")), renamed={"a": "cat", "b": "dog"}
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_data_gives_the_same_images(source: str) -> None:
    found = SOURCES[source]()
    same(found)
    assert found.fingerprint == ImageData("y", "z", TENSOR, NUMBERS, NAMES).fingerprint


def test_images_without_labels() -> None:
    loader: DataLoader[Any] = DataLoader(list(TENSOR), batch_size=2)  # type: ignore[arg-type]
    kinds: list[Any] = [TENSOR, COLOURED, pictures(), loader, TensorDataset(TENSOR), list(TENSOR)]
    for given in kinds:
        same(of(given), labelled=False)
    assert of((TENSOR, [-1] * 7)).labels is None
    assert of((TENSOR, [-1] * 7)).fingerprint == of(TENSOR).fingerprint


def test_sets_of_datasets(oracle: Callable[[str], ModuleType]) -> None:
    datasets = oracle("datasets")
    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=list(NAMES))})
    there = datasets.Dataset.from_dict({"img": pictures(), "fine": LABELS}, features=features)
    same(of(there))
    same(of(there.with_format("torch")))
    same(of(DataLoader(there.with_format("torch"), batch_size=4)))
    changed = there.with_transform(lambda rows: {"pixel_values": rows["img"], "labels": rows["fine"]})
    with pytest.raises(UsageError, match="expected a column of kind Image, or one called 'image'; found pixel_values"):
        of(changed)
    same(of(changed, image="pixel_values", label="labels", classes=NAMES))


def test_torchvisions_sets_name_their_classes(oracle: Callable[[str], ModuleType]) -> None:
    sets = oracle("torchvision.datasets")
    fake = sets.FakeData(4, (1, 8, 8), 10)
    fake.classes = sets.MNIST.classes
    found = in_order(of(fake), DIGITS)
    assert found.classes == DIGITS
    assert found.labels is not None
    assert found.labels.tolist() == [int(label) for _, label in fake]


# ---- modes, sizes, channels ----
def test_pillows_modes() -> None:
    rgb = pictures()[0]
    grey = rgb.convert("L")
    few = rgb.quantize(4)
    for image, wanted in (
        (few, np.asarray(few.convert("RGB"))),
        (rgb.convert("RGBA"), np.asarray(rgb)),
        (grey.convert("LA"), np.asarray(grey)[..., None]),
        (grey.convert("1"), np.asarray(grey.convert("1")).astype(np.uint8)[..., None] * 255),
    ):
        assert of([image]).images[0].tolist() == np.moveaxis(wanted, -1, 0).tolist()
    see_through = rgb.convert("RGBA")
    see_through.putpixel((1, 1), (0, 0, 0, 254))
    with pytest.raises(FormatError) as error:
        of([rgb, see_through])
    assert str(error.value) == (
        "input 1 of images (list): expected 8-bit grey or RGB pixels; found mode RGBA, some of it transparent."
        " Convert it to RGB first, on a background of your choice."
    )
    with pytest.raises(FormatError, match=r"found mode I;16\. Convert it to RGB first\."):
        of([Image.new("I;16", (3, 3))])


def test_grey_images_among_coloured_ones() -> None:
    rgb = pictures()
    grey = rgb[1].convert("L")
    for order in ([grey, *rgb[:2]], [*rgb[:2], grey], [rgb[0], grey, rgb[1]]):
        found = of(order).images
        at = order.index(grey)
        assert found.shape == (3, 3, 5, 4)
        assert found[at].tolist() == [np.asarray(grey).tolist()] * 3
        assert [x.tolist() for i, x in enumerate(found) if i != at] == COLOURED[:2].tolist()


def test_resizing_is_torchvisions(oracle: Callable[[str], ModuleType]) -> None:
    v2 = oracle("torchvision.transforms.v2")
    big = np.random.default_rng(1).integers(0, 256, (3, 3, 40, 31), np.uint8)
    for size in ((8, 9), (50, 31)):
        wanted = [np.asarray(v2.Resize(size, antialias=True)(image)) for image in pictures(big)]
        for given in (big, pictures(big), ImageData("x", "test", torch.from_numpy(big))):
            assert of(given, size=size).images.tolist() == np.moveaxis(np.stack(wanted), -1, 1).tolist()
    sizes = [image.resize((w, 20)) for image, w in zip(pictures(big), (10, 20, 30), strict=True)]
    assert of(sizes, size=(6, 6)).images.shape == (3, 3, 6, 6)
    grey = of(big, channels=1)
    assert grey.images[:, 0].tolist() == [np.asarray(image.convert("L")).tolist() for image in pictures(big)]
    again = of(grey, channels=3, size=(40, 31))
    assert again.images.tolist() == grey.images.repeat(1, 3, 1, 1).tolist()


def test_a_changed_set_has_another_name() -> None:
    assert of("digits", size=(16, 16), channels=3, split="train").name == "digits-3x16x16"
    assert of("digits", size=(8, 8)).name == "digits"
    assert of(of("digits"), name="mine").name == "mine"


def test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    members = zoo.load("convnet-digits", n=2)
    wrong = of(np.zeros((2, 3, 16, 16), np.uint8))
    for use in (lambda: members.predict(wrong, tmp_path), lambda: zoo.pairwise(members, wrong)):
        with pytest.raises(ZooError) as error:
            use()
    assert str(error.value) == (
        "images 'images': expected shape (input, 1, 8, 8), axes (input, channel, height, width); found shape"
        " (input, 3, 16, 16). `zoo.images.of(…, size=(8, 8), channels=1)` makes them fit."
    )
    assert zoo.pairwise(members, of(wrong, size=(8, 8), channels=1))["mi_id"].value >= 0
    with pytest.raises(UsageError, match=r"found shape \(input, 8, 8, 1\)\. `zoo.images.of\(…, channels_last=True\)`"):
        logits(members, ImageData("mine", "test", torch.zeros(2, 8, 8, 1, dtype=torch.uint8)))
    images = [Image.new("L", (8, 8)), Image.new("L", (9, 8))]
    with pytest.raises(FormatError) as mixed:
        of(images)
    assert str(mixed.value) == (
        "input 1 of images (list): expected 8 x 8 pixels (height x width), as the images before it; found 8 x 9."
        " Give images of one size, or `size=(height, width)` to `zoo.images.of`, which resizes them."
    )


# ---- inputs that are preprocessed already ----
def test_prepared_inputs_are_used_as_they_are(oracle: Callable[[str], ModuleType]) -> None:
    v2 = oracle("torchvision.transforms.v2")
    members, digits = zoo.load("convnet-digits", n=3), zoo.images.load("digits")
    assert digits.labels is not None
    mean, std = members.preprocess.mean, members.preprocess.std
    transform = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    loader = DataLoader(TensorDataset(transform(digits.images), digits.labels), batch_size=100)
    mine = prepared(loader, classes=digits.classes, name="mine")
    assert isinstance(mine, Prepared)
    assert (mine.images.dtype, mine.name, mine.split) == (torch.float32, "mine", "test")
    torch.testing.assert_close(logits(members, mine), logits(members, digits), rtol=1e-5, atol=1e-5)
    report = zoo.evaluate(members, mine, ood="photos", sizes=[3])
    known = zoo.evaluate(members, digits, ood="photos", sizes=[3])
    for figure in known.ensemble:
        assert report[figure].value == pytest.approx(known[figure].value, rel=1e-4, abs=1e-6)
    assert report.data == f"mine/test {mine.fingerprint}"
    assert mine.fingerprint != digits.fingerprint
    changed = mine.images.clone()
    changed[0, 0, 0, 0] = torch.nextafter(changed[0, 0, 0, 0], torch.tensor(9.0))
    assert prepared((changed, digits.labels), classes=DIGITS).fingerprint != mine.fingerprint


def test_prepared_inputs_of_narrow_types_are_widened() -> None:
    x = torch.randn(4, 1, 8, 8)
    assert torch.equal(prepared(x.half()).images, x.half().float())
    assert torch.equal(prepared(x.half().numpy()).images, x.half().float())
    assert torch.equal(prepared(x.bfloat16()).images, x.bfloat16().float())
    assert torch.equal(prepared(x.requires_grad_()).images, x.detach())


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            lambda: of(torch.zeros(2, 1, 8, 8)),
            "input 0 of images (Tensor): expected uint8 pixels in 0..255; found float32. Give pixels, as torchvision's"
            " PILToTensor returns them. If the inputs are preprocessed already, use `zoo.images.prepared(…)`.",
        ),
        (
            lambda: prepared(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)),
            "input 0 of images (Tensor): expected float32 inputs; found uint8. Give float32 inputs of the members. For"
            " pixels, use `zoo.images.of`: the members preprocess them.",
        ),
        (lambda: prepared(torch.zeros(2, 1, 8, 8).double()), "expected float32 inputs; found float64."),
        (lambda: prepared(torch.full((2, 1, 8, 8), torch.nan)), "expected finite inputs; found infinite ones or NaN."),
        (lambda: prepared(pictures()), "expected float32 inputs; found an image of Pillow."),
        (
            lambda: prepared("digits"),
            "prepared inputs: expected tensors, a Dataset or a DataLoader; found 'digits'. Use `zoo.images.of`: the"
            " members preprocess its pixels.",
        ),
        (
            lambda: logits(zoo.load("convnet-digits", n=1), prepared(torch.zeros(2, 3, 8, 8))),
            "inputs 'inputs': expected shape (input, 1, 8, 8), axes (input, channel, height, width); found shape"
            " (input, 3, 8, 8). Prepare them as the members want them.",
        ),
        (
            lambda: of(prepared(torch.zeros(2, 1, 8, 8)), size=(4, 4)),
            "expected no size and no channels; found one of them.",
        ),
    ],
)  # fmt: skip
def test_inputs_and_pixels_are_not_mixed_up(use: Callable[[], object], text: str) -> None:
    with pytest.raises(ZooError) as error:
        use()
    assert text in str(error.value)


# ---- what is refused ----
GREY = np.zeros((2, 1, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (3, {}, "images (int): expected tensors, arrays, a Dataset, a DataLoader, or what gives images one by one;"
         " found int."),
        ({"images": GREY}, {}, "or what gives images one by one; found dict. Give one of its values."),
        ([], {}, "images (list): expected one image or more; found none."),
        (GREY[:0], {}, "images (ndarray): expected one image or more; found none."),
        (GREY[0, 0], {}, "expected axes (channel, height, width), or (input, channel, height, width); found shape"
         " (8, 8)."),
        ((GREY, [0, 1], 2), {}, "images (tuple): expected (images, labels); found 3 values."),
        ([(GREY[0], 0, {})], {}, "input 0 of images (list): expected an image, or (image, label); found tuple of 3."),
        (["a.png"], {}, "expected an image, or (image, label); found str."),
        ((GREY, [0]), {}, "expected 2 labels, one for each image; found 1."),
        ((GREY, [0.0, 1.0]), {}, "expected labels that are whole numbers or names; found 0.0."),
        ((GREY, [True, False]), {}, "expected labels that are whole numbers or names; found True."),
        ((GREY, torch.eye(2)), {}, "expected a whole number for each image, its label; found float32, shape (2, 2)."),
        ([(GREY[0], 0), GREY[1]], {}, "images (list): expected a label for every image, or for none; found"
         " 1 images without a label."),
        ((GREY, [0, 2]), {"classes": "ab"}, "classes of images 'images': expected names, in the order of the labels;"
         " found 'ab'."),
        ((GREY, [0, 2]), {"classes": ["a", "b"]}, "labels of images 'images': expected numbers from 0 to 1, of 2"
         " classes; found 2 for input 1."),
        ((GREY, [0, -1]), {"classes": ["a", "b"]}, "found -1 for input 1."),
        ((GREY, ["a", "c"]), {"classes": ["a", "b"]}, "expected 'a' to 'b', of 2 classes; found 'c' for input 1."),
        ((GREY, [0, 1]), {"classes": ["a", "a"]}, "expected each name once; found 'a' more than once."),
        (GREY, {"classes": ["a", "b"]}, "classes of images 'images': expected no such argument, since these images"
         " have no labels; found one."),
        ((GREY, [0, 1]), {"renamed": {"a": "b"}}, "renamed classes of images 'images': expected class names of the"
         " data (none); found 'a'."),
        (Own(), {"classes": ["dog", "cat", "owl"]}, "classes of images 'images': expected the data's own class names,"
         " cat, dog, owl; found dog, cat, owl. Give `renamed={name in the data: new name, …}`: it can't mix up the"
         " order."),
        (GREY, {"name": "My images"}, "name of images: expected at most 80 lower-case letters, digits, '.', '_' and"
         " '-', and not the name of a data set; found 'My images'."),
        (GREY, {"name": 3}, "and not the name of a data set; found 3."),
        (GREY, {"split": 3}, "split of images: expected lower-case letters, digits, '.', '_' and '-'; found 3."),
        ((GREY, [0, 1]), {"classes": ["a", "b"], "renamed": {"a": 2}}, "renamed classes of images 'images': expected"
         " names; found 2."),
        (GREY, {"name": "cifar10"}, "not the name of a data set; found 'cifar10'."),
        (GREY, {"split": "a/b"}, "split of images: expected lower-case letters, digits, '.', '_' and '-'; found"
         " 'a/b'."),
        (GREY, {"size": 8}, "size of images: expected (height, width) in pixels; found 8."),
        (GREY, {"size": (10**9, 10**9)}, "size of images: expected (height, width) in pixels; found (1000000000,"
         " 1000000000)."),
        (GREY, {"channels": 2}, "channels of images: expected 1 (grey) or 3 (colour); found 2."),
        (np.zeros((2, 4, 8, 8), np.uint8), {"channels": 3}, "expected 1 or 3 channels, to be resized or recoloured;"
         " found 4."),
        (GREY, {"image": "img"}, "expected mappings, since columns are named; found ndarray."),
        ([{"x": GREY[0]}], {}, "expected a column of kind Image, or one called 'image'; found x. Name the columns:"
         ' `zoo.images.of(…, image="…", label="…")`.'),
        ([{"image": GREY[0]}], {"label": "y"}, "expected a column 'y'; found image."),
        ("digits", {"image": "img"}, "columns of images: expected Parquet files or mappings; found 'digits'."),
        ("digits", {"channels_last": True}, "argument channels_last: expected tensors or arrays to go with it; found"
         " 'digits'."),
        ("digits/train", {"split": "test"}, "split of 'digits/train': expected 'train'; found 'test'."),
        ("photos", {"classes": ["a"]}, "classes of images 'photos': expected no such argument, since these images"
         " have no labels; found one."),
        (np.zeros((2, 1, 0, 8), np.uint8), {}, "expected a pixel or more; found shape (1, 0, 8)."),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8).to_sparse(), {}, "expected a dense tensor; found torch.sparse_coo"
         " on cpu."),
        ((GREY, [0, 2**70]), {}, "labels of images 'images': expected numbers from 0; found 1180591620717411303424 for"
         " input 1."),
        ("", {}, "found ''. Give another name, or a path that exists or contains a slash."),
        ([GREY[0], np.zeros((2, 8, 8), np.uint8)], {}, "input 1 of images (list): expected 1 channels; found 2."),
    ],
)  # fmt: skip
def test_what_is_refused(given: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ZooError) as error:
        of(given, **options)
    assert str(error.value).endswith(text)


def test_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda device: 1000)
    assert len(of(np.zeros((15, 1, 8, 8), np.uint8))) == 15
    with pytest.raises(TooLargeError) as error:
        of(np.zeros((16, 1, 8, 8), np.uint8))
    assert str(error.value) == (
        "16 images of images (ndarray): expected at most 1,000 bytes, the memory that is free; found 1,024."
        " Give fewer of them, or a smaller `size` to `zoo.images.of`."
    )


def test_what_is_given_is_not_changed_later() -> None:
    given = COLOURED.copy()
    found = of(given)
    given[:] = 0
    assert found.images.tolist() == COLOURED.tolist()


def test_fields_and_fingerprints_of_named_sets_stay() -> None:
    assert of("digits").fingerprint == "5118a1d447d9d867"
    assert of("digits/train").fingerprint == "a018715d0b6d3e79"
    assert list(ImageData.__dataclass_fields__) == ["name", "split", "images", "labels", "classes", "revision"]
    assert isinstance(of("digits").labels, Tensor)
