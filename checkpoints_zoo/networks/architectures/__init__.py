"""Architectures by name: functions that build a module from arguments that are plain JSON values.

"transformers/CLASS" names a class of transformers, whose arguments are those of its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class _Place(NamedTuple):
    """Where an architecture is: its file in this folder, and the function in the file that builds it. `image_shape` is
    (channel, height, width) of images that it takes with the function's defaults."""

    file: str
    function: str
    image_shape: tuple[int, int, int]


_PLACE_OF_NAME = {
    "convnet": _Place("convnet", "convnet", (1, 8, 8)),
    "resnet8": _Place("resnet8", "resnet8", (1, 8, 8)),
    "resnet18": _Place("resnet18", "resnet18", (3, 32, 32)),
    "resnet20-frn-silu": _Place("resnet20", "resnet20_frn_silu", (3, 32, 32)),
    "resnet20-frn-swish": _Place("resnet20", "resnet20_frn_swish", (3, 32, 32)),
    "optunet": _Place("optunet", "optunet", (1, 28, 28)),
    "mlp": _Place("mlp", "mlp", (1, 8, 8)),
    "vit": _Place("vit", "vit", (1, 8, 8)),
}
# Architecture -> (channel, height, width) of images that it takes.
IMAGE_SHAPES = {name: place.image_shape for name, place in _PLACE_OF_NAME.items()}

_FROM_CONFIG = "transformers/"


def from_config_name(class_name: str) -> str:
    """Return the name of the architecture that is a class of transformers."""
    return f"{_FROM_CONFIG}{class_name}"


def is_from_config(name: object) -> bool:
    """Say whether an architecture is a class of transformers."""
    return isinstance(name, str) and name.startswith(_FROM_CONFIG)


class _Architectures(Mapping[str, "Callable[..., nn.Module]"]):
    """The architectures by name. Names are known without torch; a look-up imports the architecture's file. The names
    of the package are listed; those of transformers are found."""

    def __getitem__(self, name: str) -> Callable[..., nn.Module]:
        if is_from_config(name):
            from checkpoints_zoo.networks.architectures.from_config import build_from_config

            return partial(build_from_config, name.removeprefix(_FROM_CONFIG))
        place = _PLACE_OF_NAME[name]
        build: Callable[..., nn.Module] = getattr(import_module(f"{__name__}.{place.file}"), place.function)
        return build

    def __contains__(self, name: object) -> bool:
        return name in _PLACE_OF_NAME or is_from_config(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACE_OF_NAME)

    def __len__(self) -> int:
        return len(_PLACE_OF_NAME)


ARCHITECTURES = _Architectures()
