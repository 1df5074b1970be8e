"""Data sets by name: two come with scikit-learn, the others are on the Hub and are read through the cache of the Hub's
client.

The content of a repo is checked before and during decoding: files, columns, the order of class names, image sizes and
modes, labels.

This is one file, because the table of names needs a reader for each kind of data set.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats.text import did_you_mean, first_few
from checkpoints_zoo.images import parquet
from checkpoints_zoo.images.classes import CLASSES
from checkpoints_zoo.images.image_data import ImageData
from checkpoints_zoo.images.reading import ImageBuffer, PixelFormat
from checkpoints_zoo.sources import hub, hub_addresses

DIGITS_TEST_COUNT = 540

REPO_CARD_FILES = ("README.md", "dataset_infos.json")

REPO_CHANGED = "The repo may have changed since this version was released: try a newer version of checkpoints_zoo"


@dataclass(frozen=True)
class HubSet:
    """A data set on the Hub: its repo, and the content that the repo must have.

    Args:
        name: name of the data set in this package ("cifar100").
        repo: "org/name".
        config: name of the data set's configuration in the repo's card.
        folder: folder of the repo with the Parquet files `<split>-00000-of-00001.parquet` and so on.
        size: height and width of every image, pixels.
        channels: number of channels of the pixels, 1 (grey) or 3 (red, green, blue).
        inputs: the number of inputs of "test" and "train"; a repo with fewer inputs is read, a repo with more is
            refused.
        image, label: columns.
        splits: "test" and "train" -> name of this split in the repo.
        some_grey: whether some images are stored in grey although the data set has three channels.
        repo_class_names: class name in this package -> class name in the repo, for names that differ.
        names_sorted: whether the repo's labels number the sorted class names, not the names in this package's order.
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
    repo_class_names: Mapping[str, str] = field(default_factory=dict)
    names_sorted: bool = False

    @property
    def allowed_modes(self) -> tuple[str, ...]:
        """Pillow's modes that the images may have."""
        return ("L",) if self.channels == 1 else ("RGB", "L") if self.some_grey else ("RGB",)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in this package, in the order of this package's labels."""
        return CLASSES[self.name]

    def possible_orders(self) -> list[tuple[str, ...]]:
        """Return the orders of class names that the repo's labels may have, the likeliest first.

        >>> HUB_SETS["cifar10"].possible_orders() == [CLASSES["cifar10"]]
        True
        """
        if not self.names_sorted:
            return [self.classes]
        classes_by_repo_name = sorted(self.classes, key=lambda name: self.repo_class_names.get(name, name))
        return [tuple(classes_by_repo_name), tuple(sorted(self.classes))]


# This package's WordNet id of a class -> the WordNet id in the repo, for classes with two different ids. The repo's
# authors looked up ids by word, and chose another meaning of some words: in the repo, "Chihuahua" is the Mexican state,
# and "goose" the meat.
_REPO_ID_OF_WRONG_MEANING = MappingProxyType(
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
                repo_class_names={"T-shirt/top": "T - shirt / top"},
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
                repo_class_names={"crab": "cra"},
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
                repo_class_names=_REPO_ID_OF_WRONG_MEANING,
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
"""Data sets on the Hub by name."""


def load(name: str, split: str = "test") -> ImageData:
    """Load one split of a named data set; return the split.

    Data on the Hub is fetched once, only the files of this split, and then read from the client's cache.

    Args:
        name: a key of `DATASETS`.
        split: name of the split, "test" or "train" ("photos" has only "test"). Tiny-ImageNet's "test" is its validation
            set, since its own test set has no labels.

    Raises:
        UsageError: there is no data set or no split of this name.
        SourceNotFound, AccessError, NetworkError, DamagedError: the files on the Hub can't be fetched.
        FormatError: the repo on the Hub has other content than expected.

    >>> load("digits").images.shape
    torch.Size([540, 1, 8, 8])
    """
    if name not in DATASETS:
        raise UsageError(
            f"data set {name!r}",
            expected=f"one of {', '.join(DATASETS)}",
            found=repr(name),
            do=did_you_mean(name, DATASETS, text_of_name=repr),
        )
    splits = DATASETS[name]
    if split not in splits:
        raise UsageError(f"split of data set {name!r}", expected=f"one of {', '.join(splits)}", found=repr(split))
    return splits[split]()


def digits(split: str) -> ImageData:
    """Read scikit-learn's handwritten digits, split by the rule "digits-sha256-540"; return one of its two splits.

    The rule: images are ranked by the sha256 of "digits-test|<index>"; the first 540 are the test set, the others, in
    rank order too, the training set. The rule was fixed before any network was trained.

    Args:
        split: name of the split, "test" or "train".
    """
    return deepcopy(_read_digits(split))  # The caller may change the pixels.


@cache
def _read_digits(split: str) -> ImageData:
    from sklearn.datasets import load_digits

    sklearn_digits = load_digits()
    order = _positions_by_hash("digits-test", len(sklearn_digits.target))
    chosen = order[:DIGITS_TEST_COUNT] if split == "test" else order[DIGITS_TEST_COUNT:]
    # scikit-learn's pixels k are 0..16; this computes round(k * 255 / 16) in integers.
    pixels = torch.from_numpy((sklearn_digits.images[chosen].astype(np.int64) * 255 + 8) // 16).to(torch.uint8)[:, None]
    labels = torch.from_numpy(sklearn_digits.target[chosen].astype(np.int64))
    return ImageData("digits", split, pixels, labels, CLASSES["digits"])


def photo_patches() -> ImageData:
    """Cut scikit-learn's two photographs into 8x8 grey patches; return 1,000 patches of each photograph, without
    labels.

    The patches of a photograph are numbered row by row and ranked by the sha256 of "photos|<file>|<index>".
    """
    return deepcopy(_read_photo_patches())


@cache
def _read_photo_patches() -> ImageData:
    from sklearn.datasets import load_sample_image

    patches = []
    for file in ("china.jpg", "flower.jpg"):
        red, green, blue = np.moveaxis(load_sample_image(file).astype(np.int64), -1, 0)
        # Grey is the ITU-R 601 luma in 16-bit fixed point, as in Pillow's mode "L".
        grey = (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16
        rows, columns = grey.shape[0] // 8, grey.shape[1] // 8
        tiles = grey[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8).swapaxes(1, 2).reshape(-1, 1, 8, 8)
        patches.append(tiles[_positions_by_hash(f"photos|{file}", len(tiles))[:1000]].astype(np.uint8))
    return ImageData("photos", "test", torch.from_numpy(np.concatenate(patches)))


def _positions_by_hash(rule_name: str, image_count: int) -> list[int]:
    """Return the positions 0 to image_count - 1 in the order of the sha256 of "<rule_name>|<position>"."""
    return sorted(range(image_count), key=lambda index: hashlib.sha256(f"{rule_name}|{index}".encode()).hexdigest())


@lru_cache(maxsize=2)
def read_from_hub(set_name: str, split: str) -> ImageData:
    """Read one split of a data set on the Hub; return the split. The two splits read last stay in memory.

    Args:
        set_name: a key of `HUB_SETS`.
        split: name of the split, "test" or "train".

    Raises:
        SourceNotFound: the repo does not exist, or has other files than expected.
        AccessError: the user's login may not read the repo.
        NetworkError: the Hub gave no answer; or offline mode is on, and the split is not in the cache.
        DamagedError: the bytes that arrived do not have the announced hash; the bytes are deleted.
        FormatError: the repo has other content than expected.
    """
    hub_set = HUB_SETS[set_name]
    repo = hub.resolve_address(f"{hub_addresses.ADDRESS_SCHEME}datasets/{hub_set.repo}")
    data_name = f"data set {set_name!r} of {repo.label}@{repo.commit[:8]}"
    paths = [hub.fetch_file(repo, path_in_repo) for path_in_repo in _split_files(repo, hub_set, split, data_name)]
    try:
        rows = sum(parquet.read_footer(path, data_name)[1] for path in paths)
        if not 0 < rows <= hub_set.inputs[split]:
            raise FormatError(data_name, expected=f"from 1 to {hub_set.inputs[split]:,} inputs", found=f"{rows:,}")
        position_of_repo_label = _positions_of_repo_classes(
            _class_names(repo, hub_set, paths[0], data_name), hub_set, data_name
        )
        buffer = ImageBuffer(PixelFormat(), rows, data_name, (hub_set.channels, *hub_set.size), hub_set.allowed_modes)
        labels = parquet.read_rows(paths, hub_set.image, hub_set.label, buffer)
        label_numbers = position_of_repo_label[_read_labels(labels, hub_set, data_name)]
    except FormatError as error:
        error.do = REPO_CHANGED
        raise
    return ImageData(set_name, split, buffer.finish(), torch.from_numpy(label_numbers), hub_set.classes, repo.commit)


def _split_files(repo: hub_addresses.Repo, hub_set: HubSet, split: str, data_name: str) -> list[str]:
    """Return the paths of all files of a split in the repo, in order."""
    from huggingface_hub import is_offline_mode

    path_stem = f"{hub_set.folder}/{hub_set.splits[split]}"
    file_name_pattern = re.compile(rf"{re.escape(path_stem)}-(\d{{5}})-of-(\d{{5}})(?:-[0-9a-f]+)?\.parquet")
    paths = hub.list_files(repo, hub_set.folder)
    numbered_paths = [
        (int(match[1]), int(match[2]), path) for path in paths if (match := file_name_pattern.fullmatch(path))
    ]
    if numbered_paths and [number for number, _, _ in sorted(numbered_paths)] == list(range(numbered_paths[0][1])):
        return [path for _, _, path in sorted(numbered_paths)]
    expected = f"files {path_stem}-00000-of-{numbered_paths[0][1] if numbered_paths else 1:05}.parquet"
    expected += " and so on" if numbered_paths else ""
    if is_offline_mode():
        found_text = f"{len(numbered_paths)} of {numbered_paths[0][1]}" if numbered_paths else "none of them"
        expected += " in the cache, since HF_HUB_OFFLINE is set"
        raise NetworkError(data_name, expected=expected, found=found_text, do="Load it once online")
    raise SourceNotFound(data_name, expected=expected, found=first_few(paths, 6) or "no such folder", do=REPO_CHANGED)


def _class_names(repo: hub_addresses.Repo, hub_set: HubSet, parquet_path: Path, data_name: str) -> Sequence[str]:
    """Return the class names in the order of the repo's labels, from the Parquet file or from the repo's card.

    The files of the oldest repos do not describe their columns.
    """
    import datasets
    import yaml

    features = datasets.Features.from_arrow_schema(pq.read_schema(parquet_path))
    if not _has_columns(features, hub_set):
        for card_file in REPO_CARD_FILES:
            if not hub.has_file(repo, card_file):
                continue
            try:
                info_by_config = datasets.info.DatasetInfosDict.from_directory(hub.fetch_file(repo, card_file).parent)
            except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
                found = f"{type(error).__name__}: {error}"[:200]
                raise FormatError(data_name, expected=f"a card {card_file}", found=found) from error
            only_info = next(iter(info_by_config.values())) if len(info_by_config) == 1 else None
            repo_info = info_by_config.get(hub_set.config, only_info)
            if repo_info is not None and repo_info.features is not None:
                features = repo_info.features
                break
    if not _has_columns(features, hub_set):
        expected = f"column {hub_set.image} of kind Image, column {hub_set.label} of kind ClassLabel"
        kinds = ", ".join(f"{column} of kind {type(kind).__name__}" for column, kind in features.items())
        raise FormatError(data_name, expected=expected, found=kinds[:300] or "no columns")
    names: Sequence[str] = features[hub_set.label].names
    return names


def _has_columns(features: object, hub_set: HubSet) -> bool:
    """Say whether the features of a file include the expected columns of images and labels."""
    import datasets

    return (
        isinstance(features, dict)
        and isinstance(features.get(hub_set.image), datasets.Image)
        and isinstance(features.get(hub_set.label), datasets.ClassLabel)
    )


def _positions_of_repo_classes(
    repo_class_names: Sequence[str], hub_set: HubSet, data_name: str
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Look up the repo's class names in this package; return the position of each name in this package's order,
    (class,)."""
    corrections = {repo_class_name: name for name, repo_class_name in hub_set.repo_class_names.items()}
    corrected_names = tuple(corrections.get(name, name) for name in repo_class_names)
    if corrected_names in hub_set.possible_orders():
        return np.array([hub_set.classes.index(name) for name in corrected_names], np.int64)
    expected = hub_set.possible_orders()[0]
    if len(repo_class_names) != len(expected):
        raise FormatError(data_name, expected=f"{len(expected)} classes", found=str(len(repo_class_names)))
    differing_positions = [at for at, name in enumerate(corrected_names) if name != expected[at]]
    first = differing_positions[0]
    others = f", and {len(differing_positions) - 1} other classes differ" if len(differing_positions) > 1 else ""
    raise FormatError(
        data_name,
        expected=f"class {first} to be {expected[first]!r}",
        found=f"{repo_class_names[first]!r}{others}",
    )


def _read_labels(label_column: Sequence[Any] | None, hub_set: HubSet, data_name: str) -> npt.NDArray[np.int64]:
    """Check the labels of a repo; return them as numbers, (input,).

    Raises:
        FormatError: labels are missing, or exceed the number of classes.
    """
    missing_count = sum(value is None for value in label_column or ())
    if label_column is None or missing_count:
        raise FormatError(data_name, expected="a label for every input", found=f"{missing_count:,} without one")
    largest_label = len(hub_set.classes) - 1
    wrong_inputs = [
        at for at, value in enumerate(label_column) if type(value) is not int or not 0 <= value <= largest_label
    ]
    if wrong_inputs:
        found = (
            f"{label_column[wrong_inputs[0]]!r} for input {wrong_inputs[0]:,}, {len(wrong_inputs):,} such labels in all"
        )
        raise FormatError(data_name, expected=f"labels from 0 to {largest_label}", found=found)
    return np.array(label_column, np.int64)


DATASETS: Mapping[str, Mapping[str, Callable[[], ImageData]]] = MappingProxyType(
    {
        "digits": {split: partial(digits, split) for split in ("test", "train")},
        "photos": {"test": photo_patches},
        **{name: {split: partial(read_from_hub, name, split) for split in ("test", "train")} for name in HUB_SETS},
    }
)
"""Data set -> split -> function that reads it. The first two come with the package, the others are on the Hub."""
