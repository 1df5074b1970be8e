"""Data sets by name: two that come with scikit-learn, and those on the Hub, read through the client's cache.

What a repo on the Hub holds is checked before and while it is decoded: files, columns and their kinds, class names in
order, sizes and modes of the images, labels.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from PIL import Image

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats.text import first_few, nearest_name
from checkpoints_zoo.images.classes import CLASSES
from checkpoints_zoo.images.image_data import ImageData
from checkpoints_zoo.images.reading import FORMATS, UNREADABLE, batches
from checkpoints_zoo.sources import hub

DIGITS_TEST = 540

CARDS = ("README.md", "dataset_infos.json")

CHANGED = "The repo may have changed since this version was made: look for a newer one of checkpoints_zoo"


@dataclass(frozen=True)
class HubSet:
    """A data set on the Hub, as its repo has it.

    Args:
        name: ours ("cifar100").
        repo: "org/name".
        config: its name in the repo's card.
        folder: of the repo, with the Parquet files `<split>-00000-of-00001.parquet` and so on.
        size: height and width of every image, pixels.
        channels: of the pixels, 1 (grey) or 3 (red, green, blue).
        inputs: how many "test" and "train" have; a repo with fewer is read all the same, one with more is not.
        image, label: columns.
        splits: the repo's name of our "test" and "train".
        some_grey: whether some images of a set with three channels are stored in grey.
        spelled: what the repo calls a class, where that is not our name.
        names_sorted: whether the repo's labels number the sorted names, and not the names in our order.
    """

    name: str
    repo: str
    config: str
    folder: str
    size: tuple[int, int]
    channels: int
    inputs: Mapping[str, int]
    image: str = "image"
    label: str = "label"
    splits: Mapping[str, str] = field(default_factory=lambda: {"test": "test", "train": "train"})
    some_grey: bool = False
    spelled: Mapping[str, str] = field(default_factory=dict)
    names_sorted: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """Our class names, in our order."""
        return CLASSES[self.name]

    def orders(self) -> list[tuple[str, ...]]:
        """Return the orders of our class names that the repo's labels may follow, the likeliest first.

        >>> HUB_SETS["cifar10"].orders() == [CLASSES["cifar10"]]
        True
        """
        if not self.names_sorted:
            return [self.classes]
        by_their_names = sorted(self.classes, key=lambda name: self.spelled.get(name, name))
        return [tuple(by_their_names), tuple(sorted(self.classes))]


# The repo's ids were looked up by the words for each class, so that another meaning of a word took the place of the
# right one: its "Chihuahua" is the Mexican state, its "goose" the meat.
_OF_ANOTHER_MEANING = MappingProxyType(
    {
        "n01855672": "n07646821", "n01945685": "n13719102", "n02085620": "n08742578",
        "n02190166": "n03373237", "n02206856": "n07975909", "n02666196": "n02666347",
        "n02730930": "n08496334", "n02906734": "n12520864", "n02999410": "n13652994",
        "n03250847": "n07647870", "n03804744": "n13652335", "n03976657": "n08620881",
        "n04067472": "n07056680", "n04465501": "n04465666", "n04597913": "n04598010",
        "n07579787": "n07657664", "n07734744": "n13001041", "n07747607": "n14991210",
    }
)  # fmt: skip

HUB_SETS: Mapping[str, HubSet] = MappingProxyType(
    {
        each.name: each
        for each in (
            HubSet(
                "mnist",
                repo="ylecun/mnist",
                config="mnist",
                folder="mnist",
                size=(28, 28),
                channels=1,
                inputs={"test": 10_000, "train": 60_000},
            ),
            HubSet(
                "fashion-mnist",
                repo="zalando-datasets/fashion_mnist",
                config="fashion_mnist",
                folder="fashion_mnist",
                size=(28, 28),
                channels=1,
                inputs={"test": 10_000, "train": 60_000},
                spelled={"T-shirt/top": "T - shirt / top"},
            ),
            HubSet(
                "cifar10",
                repo="uoft-cs/cifar10",
                config="plain_text",
                folder="plain_text",
                size=(32, 32),
                channels=3,
                inputs={"test": 10_000, "train": 50_000},
                image="img",
            ),
            HubSet(
                "cifar100",
                repo="uoft-cs/cifar100",
                config="cifar100",
                folder="cifar100",
                size=(32, 32),
                channels=3,
                inputs={"test": 10_000, "train": 50_000},
                image="img",
                label="fine_label",
                spelled={"crab": "cra"},
            ),
            HubSet(
                "tiny-imagenet",
                repo="zh-plus/tiny-imagenet",
                config="default",
                folder="data",
                size=(64, 64),
                channels=3,
                inputs={"test": 10_000, "train": 100_000},
                splits={"test": "valid", "train": "train"},
                some_grey=True,
                spelled=_OF_ANOTHER_MEANING,
                names_sorted=True,
            ),
            HubSet(
                "svhn",
                repo="ufldl-stanford/svhn",
                config="cropped_digits",
                folder="cropped_digits",
                size=(32, 32),
                channels=3,
                inputs={"test": 26_032, "train": 73_257},
            ),
        )
    }
)
"""Data sets on the Hub by our name for them."""


def load(name: str, split: str = "test") -> ImageData:
    """Load one split of a named data set; return it.

    What is on the Hub is fetched once, the files of this split alone, and read from the client's cache after that.

    Args:
        name: a key of `DATASETS`.
        split: "test" or "train" ("photos" has only "test"). Tiny-ImageNet's "test" is its validation set, since its
            own test set has no labels.

    Raises:
        UsageError: no data set, or no split, of that name.
        SourceNotFound, AccessError, NetworkError, DamagedError: what is on the Hub can't be had.
        FormatError: the repo on the Hub holds something else than expected.

    >>> load("digits").images.shape
    torch.Size([540, 1, 8, 8])
    """
    if name not in DATASETS:
        raise UsageError(
            f"data set {name!r}",
            expected=f"one of {', '.join(DATASETS)}",
            found=repr(name),
            do=f"Use the nearest name, {nearest_name(name, DATASETS)!r}",
        )
    splits = DATASETS[name]
    if split not in splits:
        raise UsageError(f"split of data set {name!r}", expected=f"one of {', '.join(splits)}", found=repr(split))
    return splits[split]()


def digits(split: str) -> ImageData:
    """Read scikit-learn's handwritten digits, split by the rule "digits-sha256-540"; return one of its two splits.

    The rule: images ranked by the sha256 of "digits-test|<index>"; the first 540 are the test set and the
    rest, in rank order too, the training set. It was fixed before anything was trained.

    Args:
        split: "test" or "train".
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = _rank("digits-test", len(bunch.target))
    chosen = order[:DIGITS_TEST] if split == "test" else order[DIGITS_TEST:]
    # Pixels are 0..16; in integers, round(k * 255 / 16).
    pixels = torch.from_numpy((bunch.images[chosen].astype(np.int64) * 255 + 8) // 16).to(torch.uint8)[:, None]
    labels = torch.from_numpy(bunch.target[chosen].astype(np.int64))
    return ImageData("digits", split, pixels, labels, CLASSES["digits"])


def photos() -> ImageData:
    """Cut scikit-learn's two photographs into 8x8 grey patches; return 1,000 of each, without labels.

    The patches of a photograph are numbered row by row and ranked by the sha256 of "photos|<file>|<index>".
    """
    from sklearn.datasets import load_sample_image

    patches = []
    for file in ("china.jpg", "flower.jpg"):
        red, green, blue = np.moveaxis(load_sample_image(file).astype(np.int64), -1, 0)
        # ITU-R 601 luma in 16-bit fixed point, as Pillow's mode "L".
        grey = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
        rows, columns = grey.shape[0] // 8, grey.shape[1] // 8
        tiles = grey[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).swapaxes(1, 2).reshape(-1, 1, 8, 8)
        patches.append(tiles[_rank(f"photos|{file}", len(tiles))[:1000]].astype(np.uint8))
    return ImageData("photos", "test", torch.from_numpy(np.concatenate(patches)))


def _rank(rule: str, count: int) -> list[int]:
    """Return the positions 0..count-1 in the order of the sha256 of "<rule>|<position>"."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"{rule}|{index}".encode()).hexdigest())


@lru_cache(maxsize=2)
def read_from_hub(name: str, split: str) -> ImageData:
    """Read one split of a data set on the Hub; return it, the same object while it is among the last two asked for.

    Args:
        name: a key of `HUB_SETS`.
        split: "test" or "train".

    Raises:
        SourceNotFound: no such repo, or not the files that it should have.
        AccessError: a repo that this login may not read.
        NetworkError: no answer; or offline, and the split is not in the cache.
        DamagedError: other bytes came than were announced; they are not kept.
        FormatError: the repo holds something else than expected.
    """
    hub_set = HUB_SETS[name]
    repo = hub.resolve_address(f"{hub.SCHEME}datasets/{hub_set.repo}")
    where = f"data set {name!r} of {repo.label}@{repo.commit[:8]}"
    paths = [hub.fetch_file(repo, inside) for inside in _files(repo, hub_set, split, where)]
    total = _rows(paths, hub_set.inputs[split], where)
    ours = _positions(_class_names(repo, hub_set, paths[0], where), hub_set, where)
    pixels, labels = _decode(paths, hub_set, total, where)
    return ImageData(
        name, split, torch.from_numpy(pixels), torch.from_numpy(ours[labels]), hub_set.classes, repo.commit
    )


def _files(repo: hub.Repo, hub_set: HubSet, split: str, where: str) -> list[str]:
    """Return the paths of a split's files in the repo, in order; all of them, or an error."""
    from huggingface_hub import is_offline_mode

    stem = f"{hub_set.folder}/{hub_set.splits[split]}"
    numbered = re.compile(rf"{re.escape(stem)}-(\d{{5}})-of-(\d{{5}})(?:-[0-9a-f]+)?\.parquet")
    listed = hub.list_files(repo, hub_set.folder)
    found = [(int(match[1]), int(match[2]), path) for path in listed if (match := numbered.fullmatch(path))]
    if found and [number for number, _, _ in sorted(found)] == list(range(found[0][1])):
        return [path for _, _, path in sorted(found)]
    expected = f"files {stem}-00000-of-{found[0][1] if found else 1:05}.parquet"
    expected += " and so on" if found else ""
    if is_offline_mode():
        here = f"{len(found)} of {found[0][1]}" if found else "none of them"
        expected += " in the cache, since HF_HUB_OFFLINE is set"
        raise NetworkError(where, expected=expected, found=here, do="Load it once online")
    raise SourceNotFound(where, expected=expected, found=first_few(listed, 6) or "no such folder", do=CHANGED)


def _class_names(repo: hub.Repo, hub_set: HubSet, path: Path, where: str) -> Sequence[str]:
    """Return the names of the classes in the order of the repo's labels, from the Parquet file or from the card.

    The files of the oldest repos do not say themselves what their columns are.
    """
    import datasets
    import yaml

    features = datasets.Features.from_arrow_schema(pq.read_schema(path))
    if not _fits(features, hub_set):
        for card in CARDS:
            if not hub.has_file(repo, card):
                continue
            try:
                described = datasets.info.DatasetInfosDict.from_directory(hub.fetch_file(repo, card).parent)
            except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
                found = f"{type(error).__name__}: {error}"[:200]
                raise FormatError(where, expected=f"a card {card}", found=found, do=CHANGED) from error
            alone = next(iter(described.values())) if len(described) == 1 else None
            chosen = described.get(hub_set.config, alone)
            if chosen is not None and chosen.features is not None:
                features = chosen.features
                break
    if not _fits(features, hub_set):
        expected = f"column {hub_set.image} of kind Image, column {hub_set.label} of kind ClassLabel"
        kinds = ", ".join(f"{column} of kind {type(kind).__name__}" for column, kind in features.items())
        raise FormatError(where, expected=expected, found=kinds[:300] or "no columns", do=CHANGED)
    names: Sequence[str] = features[hub_set.label].names
    return names


def _fits(features: object, hub_set: HubSet) -> bool:
    """Say whether a repo's features have our columns as an image and a class."""
    import datasets

    return (
        isinstance(features, dict)
        and isinstance(features.get(hub_set.image), datasets.Image)
        and isinstance(features.get(hub_set.label), datasets.ClassLabel)
    )


def _positions(names: Sequence[str], hub_set: HubSet, where: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Compare the repo's class names with ours; return our position of each of them, (class,)."""
    right = {theirs: ours for ours, theirs in hub_set.spelled.items()}
    corrected = tuple(right.get(name, name) for name in names)
    if corrected in hub_set.orders():
        return np.array([hub_set.classes.index(name) for name in corrected], np.int64)
    expected = hub_set.orders()[0]
    if len(names) != len(expected):
        raise FormatError(where, expected=f"{len(expected)} classes", found=str(len(names)), do=CHANGED)
    differing = [at for at, name in enumerate(corrected) if name != expected[at]]
    first = differing[0]
    others = f", and {len(differing) - 1} more that differ" if len(differing) > 1 else ""
    raise FormatError(
        where,
        expected=f"class {first} to be {expected[first]!r}",
        found=f"{names[first]!r}{others}",
        do=CHANGED,
    )


def _rows(paths: Sequence[Path], most: int, where: str) -> int:
    """Count the rows of Parquet files by their footers; return the sum.

    Args:
        paths: of the files.
        most: rows that the split can have.
        where: what to call the data in errors.

    Raises:
        FormatError: a file that is no Parquet, no rows at all, or more than there can be.
    """
    total = 0
    for path in paths:
        try:
            total += pq.read_metadata(path).num_rows
        except (pa.ArrowInvalid, OSError) as error:
            found = f"{type(error).__name__}: {error}"[:200]
            raise FormatError(where, expected=f"{path.name} to be a Parquet file", found=found, do=CHANGED) from error
    if not 0 < total <= most:
        raise FormatError(where, expected=f"from 1 to {most:,} inputs", found=f"{total:,}", do=CHANGED)
    return total


def _decode(
    paths: Sequence[Path], hub_set: HubSet, total: int, where: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Decode all images of Parquet files; return uint8 pixels (input, channel, height, width) and labels (input,).

    Memory: the pixels, and a row group of the encoded images.

    Args:
        paths: of the files, in order.
        hub_set: what they should hold.
        total: rows in all of them.
        where: what to call the data in errors.

    Raises:
        FormatError: columns, images or labels of another kind than expected.
    """
    pixels = np.empty((total, hub_set.channels, *hub_set.size), np.uint8)
    labels = np.empty(total, np.int64)
    at = 0
    for images, numbers in _batches(paths, hub_set, where):
        if numbers.null_count:
            _refuse(where, "a label for every input", f"{numbers.null_count:,} without one")
        labels[at : at + len(numbers)] = numbers.to_numpy(zero_copy_only=False)
        for encoded in images.to_pylist():
            pixels[at] = _pixels(encoded, hub_set, f"image {at:,} of {where}")
            at += 1
    wrong = np.flatnonzero((labels < 0) | (labels >= len(hub_set.classes)))
    if len(wrong):
        last, first = len(hub_set.classes) - 1, wrong[0]
        _refuse(where, f"labels from 0 to {last}", f"{labels[first]} for input {first:,}, {len(wrong):,} such in all")
    return pixels, labels


def _batches(paths: Sequence[Path], hub_set: HubSet, where: str) -> Iterable[tuple[pa.Array, pa.Array]]:
    """Yield the encoded images and the labels of some rows at a time."""
    for path in paths:
        schema = pq.read_schema(path)
        for column in (hub_set.image, hub_set.label):
            if column not in schema.names:
                expected = f"columns {hub_set.image} and {hub_set.label}"
                _refuse(where, expected, f"{', '.join(schema.names)} in {path.name}")
        image, label = (schema.field(column).type for column in (hub_set.image, hub_set.label))
        inside = image.field("bytes").type if pa.types.is_struct(image) and "bytes" in image.names else image
        if not (pa.types.is_binary(inside) or pa.types.is_large_binary(inside)) or inside is image:
            _refuse(where, f"encoded images in column {hub_set.image}", f"{image} in {path.name}")
        if not pa.types.is_integer(label):
            _refuse(where, f"whole numbers in column {hub_set.label}", f"{label} in {path.name}")
        try:
            for batch in batches(path, [f"{hub_set.image}.bytes", hub_set.label]):
                yield pc.struct_field(batch.column(hub_set.image), "bytes"), batch.column(hub_set.label)
        except (pa.ArrowException, OSError) as error:
            found = f"{type(error).__name__}: {error}"[:200]
            raise FormatError(where, expected=f"rows in {path.name}", found=found, do=CHANGED) from error


def _pixels(encoded: bytes | None, hub_set: HubSet, where: str) -> npt.NDArray[np.uint8]:
    """Decode one image; return its pixels, (channel, height, width)."""
    if encoded is None:
        _refuse(where, "an image", "none")
    height, width = hub_set.size
    mode = "L" if hub_set.channels == 1 else "RGB"
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            # Before it is decoded: a header may announce any size.
            if image.size != (width, height):
                _refuse(where, f"{width} x {height} pixels", f"{image.width} x {image.height}")
            if image.mode != mode and not (hub_set.some_grey and image.mode == "L"):
                _refuse(where, f"mode {mode}{' or L' if hub_set.some_grey else ''}", image.mode)
            pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    except FormatError:
        raise
    except UNREADABLE as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(where, expected="a PNG or JPEG image", found=found, do=CHANGED) from error
    return pixels[None] if hub_set.channels == 1 else np.moveaxis(pixels, -1, 0)


def _refuse(thing: str, expected: str, found: Any) -> Never:
    raise FormatError(thing, expected=expected, found=str(found), do=CHANGED)


DATASETS: Mapping[str, Mapping[str, Callable[[], ImageData]]] = MappingProxyType(
    {
        "digits": {split: partial(digits, split) for split in ("test", "train")},
        "photos": {"test": photos},
        **{name: {split: partial(read_from_hub, name, split) for split in ("test", "train")} for name in HUB_SETS},
    }
)
"""What reads each split of each data set; the first two come with the package, the others are on the Hub."""
