"""Architectures by name: functions that build a module from arguments that are plain JSON values.

"transformers/CLASS" names a class of transformers, whose arguments are those of its config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# Architecture -> its file in this folder, and the function in the file that builds it.
_PLACE_OF_NAME = {
    "convnet": ("convnet", "convnet"),
    "resnet8": ("resnet8", "resnet8"),
    "resnet18": ("resnet18", "resnet18"),
    "resnet20-frn-silu": ("resnet20", "resnet20_frn_silu"),
    "resnet20-frn-swish": ("resnet20", "resnet20_frn_swish"),
    "optunet": ("optunet", "optunet"),
    "mlp": ("mlp", "mlp"),
    "vit": ("vit", "vit"),
}


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
        file, function = _PLACE_OF_NAME[name]
        build: Callable[..., nn.Module] = getattr(import_module(f"{__name__}.{file}"), function)
        return build

    def __contains__(self, name: object) -> bool:
        return name in _PLACE_OF_NAME or is_from_config(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACE_OF_NAME)

    def __len__(self) -> int:
        return len(_PLACE_OF_NAME)


ARCHITECTURES = _Architectures()
