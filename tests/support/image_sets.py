"""Small image sets of the true schemas, published on the loopback Hub: what `images.load` reads there."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from checkpoints_zoo import images
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.images import CLASSES, ImageData, data_sets
from tests.hub import Hub

CHANGED = " The repo may have changed since this version was released: try a newer version of checkpoints_zoo."
DIGITS = tuple("0123456789")

# The repo's ids that mean something else than the class, and what they stand for.
TINY_RIGHT = {
    "n02666347": "n02666196", "n03373237": "n02190166", "n04465666": "n04465501", "n04598010": "n04597913",
    "n07056680": "n04067472", "n07646821": "n01855672", "n07647870": "n03250847", "n07657664": "n07579787",
    "n07975909": "n02206856", "n08496334": "n02730930", "n08620881": "n03976657", "n08742578": "n02085620",
    "n12520864": "n02906734", "n13001041": "n07734744", "n13652335": "n03804744", "n13652994": "n02999410",
    "n13719102": "n01945685", "n14991210": "n07747607",
}  # fmt: skip
TINY_NAMES = """
n01443537 n01629819 n01641577 n01644900 n01698640 n01742172 n01768244 n01770393 n01774384 n01774750 n01784675
n01882714 n01910747 n01917289 n01944390 n01950731 n01983481 n01984695 n02002724 n02056570 n02058221 n02074367
n02094433 n02099601 n02099712 n02106662 n02113799 n02123045 n02123394 n02124075 n02125311 n02129165 n02132136
n02165456 n02226429 n02231487 n02233338 n02236044 n02268443 n02279972 n02281406 n02321529 n02364673 n02395406
n02403003 n02410509 n02415577 n02423022 n02437312 n02480495 n02481823 n02486410 n02504458 n02509815 n02666347
n02669723 n02699494 n02769748 n02788148 n02791270 n02793495 n02795169 n02802426 n02808440 n02814533 n02814860
n02815834 n02823428 n02837789 n02841315 n02843684 n02883205 n02892201 n02909870 n02917067 n02927161 n02948072
n02950826 n02963159 n02977058 n02988304 n03014705 n03026506 n03042490 n03085013 n03089624 n03100240 n03126707
n03160309 n03179701 n03201208 n03255030 n03355925 n03373237 n03388043 n03393912 n03400231 n03404251 n03424325
n03444034 n03447447 n03544143 n03584254 n03599486 n03617480 n03637318 n03649909 n03662601 n03670208 n03706229
n03733131 n03763968 n03770439 n03796401 n03814639 n03837869 n03838899 n03854065 n03891332 n03902125 n03930313
n03937543 n03970156 n03977966 n03980874 n03983396 n03992509 n04008634 n04023962 n04070727 n04074963 n04099969
n04118538 n04133789 n04146614 n04149813 n04179913 n04251144 n04254777 n04259630 n04265275 n04275548 n04285008
n04311004 n04328186 n04356056 n04366367 n04371430 n04376876 n04398044 n04399382 n04417672 n04456115 n04465666
n04486054 n04487081 n04501370 n04507155 n04532106 n04532670 n04540053 n04560804 n04562935 n04596742 n04598010
n06596364 n07056680 n07583066 n07614500 n07615774 n07646821 n07647870 n07657664 n07695742 n07711569 n07715103
n07720875 n07749582 n07753592 n07768694 n07871810 n07873807 n07875152 n07920052 n07975909 n08496334 n08620881
n08742578 n09193705 n09246464 n09256479 n09332890 n09428293 n12267677 n12520864 n13001041 n13652335 n13652994
n13719102 n14991210
"""


@dataclass(frozen=True)
class ImageSet:
    """What a repo of images on the Hub looks like.

    Args:
        repo, config: its names.
        stem: of its files, by our split: "cifar100/test".
        size, mode: of each image; mode as Pillow names it.
        names: of the classes, in the order of the repo's labels.
        right: our name for each of them that the repo calls otherwise.
        image, label: columns.
        others: columns of classes besides, with their names.
        suffix: of the files' names.
        some_grey: whether every fifth image is stored in grey.
        bare: Parquet files as `datasets` wrote them until 2022, without features; a card that is a JSON file.
    """

    repo: str
    config: str
    stems: Mapping[str, str]
    size: tuple[int, int]
    mode: str
    names: tuple[str, ...]
    right: Mapping[str, str] = field(default_factory=dict)
    image: str = "image"
    label: str = "label"
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    suffix: str = ""
    some_grey: bool = False
    bare: bool = False


def _stems(folder: str, test: str = "test") -> dict[str, str]:
    return {"test": f"{folder}/{test}", "train": f"{folder}/train"}


SETS = {
    "mnist": ImageSet("ylecun/mnist", "mnist", _stems("mnist"), (28, 28), "L", DIGITS),
    "fashion-mnist": ImageSet(
        "zalando-datasets/fashion_mnist",
        "fashion_mnist",
        _stems("fashion_mnist"),
        (28, 28),
        "L",
        ("T - shirt / top", *CLASSES["fashion-mnist"][1:]),
        {"T - shirt / top": "T-shirt/top"},
    ),
    "cifar10": ImageSet(
        "uoft-cs/cifar10", "plain_text", _stems("plain_text"), (32, 32), "RGB", CLASSES["cifar10"], image="img"
    ),
    "cifar100": ImageSet(
        "uoft-cs/cifar100",
        "cifar100",
        _stems("cifar100"),
        (32, 32),
        "RGB",
        tuple("cra" if name == "crab" else name for name in CLASSES["cifar100"]),
        {"cra": "crab"},
        image="img",
        label="fine_label",
        others={"coarse_label": tuple(f"coarse{i}" for i in range(20))},
    ),
    "tiny-imagenet": ImageSet(
        "zh-plus/tiny-imagenet",
        "Maysee--tiny-imagenet",
        _stems("data", "valid"),
        (64, 64),
        "RGB",
        tuple(TINY_NAMES.split()),
        TINY_RIGHT,
        suffix="-70d52db3c749a935",
        some_grey=True,
        bare=True,
    ),
    "svhn": ImageSet("ufldl-stanford/svhn", "cropped_digits", _stems("cropped_digits"), (32, 32), "RGB", DIGITS),
}


def published_images(hub: Hub, name: str, inputs: int = 20, seed: int = 0, **changes: Any) -> dict[str, ImageData]:
    """Publish a small image set in place of the true one; return what was generated: "test" and "train".

    Args:
        hub: the loopback Hub.
        name: a key of `SETS`.
        inputs: of each split.
        seed: of pixels and labels; "train" has others than "test".
        changes: fields of `ImageSet`, to publish something else than `images.load` expects.
    """
    there = replace(SETS[name], **changes)
    ours = [
        CLASSES[name].index(right) if (right := there.right.get(n, n)) in CLASSES[name] else -1 for n in there.names
    ]
    files: dict[str, bytes | str] = dict(cards(there))
    generated = {}
    for split, stem in there.stems.items():
        salt = int.from_bytes(hashlib.sha256(f"{name}/{split}/{seed}".encode()).digest()[:8])
        rng = np.random.default_rng(salt)
        channels = 1 if there.mode == "L" else 3
        pixels = rng.integers(0, 256, (inputs, channels, *there.size), np.uint8)
        if there.some_grey:  # one channel in the file, three equal ones in memory
            pixels[::5] = pixels[::5, :1]
        labels = rng.integers(0, len(there.names), inputs)
        encoded = [png(p[:1] if there.some_grey and i % 5 == 0 else p) for i, p in enumerate(pixels)]
        files[f"{stem}-00000-of-00001{there.suffix}.parquet"] = parquet(there, encoded, labels.tolist())
        generated[split] = ImageData(
            name, split, torch.from_numpy(pixels), torch.tensor([ours[h] for h in labels]), CLASSES[name]
        )
    files[f"{there.stems['test'].rpartition('/')[0]}/extra-00000-of-00001.parquet"] = b"PAR1 of another split"
    commit = hub.commit(there.repo, files)
    data_sets.read_from_hub.cache_clear()
    return {split: replace(made, revision=commit) for split, made in generated.items()}


def png(pixels: np.ndarray) -> bytes:
    """Encode pixels (channel, height, width), without loss."""
    out = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)).save(out, "PNG")
    return out.getvalue()


def features(there: ImageSet) -> Any:
    """Return the columns of a set as `datasets` describes them."""
    import datasets

    classes = {there.label: there.names, **there.others}
    kinds = {column: datasets.ClassLabel(names=list(names)) for column, names in classes.items()}
    return datasets.Features({there.image: datasets.Image(), **kinds})


def parquet(there: ImageSet, encoded: Sequence[bytes | None], labels: Sequence[int | None]) -> bytes:
    """Write a Parquet file of encoded images as `datasets` does; return its bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = features(there).arrow_schema
    columns: dict[str, list[Any]] = {
        there.image: [each and {"bytes": each, "path": f"{i}.png"} for i, each in enumerate(encoded)],
        there.label: list(labels),
        **{column: [0] * len(labels) for column in there.others},
    }
    out = io.BytesIO()
    table = pa.table(columns, schema=schema.remove_metadata() if there.bare else schema)
    pq.write_table(table, out, row_group_size=8)
    return out.getvalue()


def cards(there: ImageSet) -> dict[str, str]:
    """Return the files of a repo that describe it."""
    import datasets
    import yaml

    described = datasets.DatasetInfo(features=features(there), config_name=there.config)
    if there.bare:
        fields = {"features": described.features.to_dict(), "config_name": "default", "builder_name": "imagefolder"}
        return {"dataset_infos.json": json.dumps({there.config: fields})}
    files = [{"split": split, "path": f"{stem}-*"} for split, stem in there.stems.items()]
    front = {
        "configs": [{"config_name": there.config, "data_files": files}],
        "dataset_info": {"config_name": there.config, **described._to_yaml_dict()},
    }
    return {"README.md": f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n# {there.repo}\n"}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let no test see what another has read."""
    data_sets.read_from_hub.cache_clear()
    yield
    data_sets.read_from_hub.cache_clear()


def path_of(name: str, number: int = 0, of: int = 1) -> str:
    return f"{SETS[name].stems['test']}-{number:05}-of-{of:05}{SETS[name].suffix}.parquet"


def put(hub: Hub, name: str, encoded: Sequence[bytes | None], labels: Sequence[int | None], **changes: Any) -> str:
    """Publish a set, put a test set of these inputs in place of its own, and return how errors call it."""
    published_images(hub, name, inputs=2, **changes)
    there = replace(SETS[name], **changes)
    commit = hub.commit(there.repo, {path_of(name): parquet(there, encoded, labels)})
    return f"data set {name!r} of hf://datasets/{there.repo}@{commit[:8]}"


def refusal(name: str) -> str:
    with pytest.raises(ZooError) as error:
        images.load(name)
    return str(error.value)
