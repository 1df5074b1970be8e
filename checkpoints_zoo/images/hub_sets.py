"""Which data sets are on the Hub, and what their repos look like: files, columns, sizes, class names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from checkpoints_zoo.images.classes import CLASSES


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
