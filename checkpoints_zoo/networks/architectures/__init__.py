"""Architectures by name: functions that build a module from arguments that are plain JSON values."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.architectures.convnet import convnet
from checkpoints_zoo.networks.architectures.mlp import mlp
from checkpoints_zoo.networks.architectures.optunet import optunet
from checkpoints_zoo.networks.architectures.resnet8 import resnet8
from checkpoints_zoo.networks.architectures.resnet18 import resnet18
from checkpoints_zoo.networks.architectures.resnet20 import resnet20_frn_silu

ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "convnet": convnet,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet20-frn-silu": resnet20_frn_silu,
    "optunet": optunet,
    "mlp": mlp,
}

# Arguments come from files that may be anybody's: a bound keeps a damaged one from asking for all memory.
_LARGEST = 65_536


def _whole(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": (f"a whole number in 1-{_LARGEST}", _whole),
    "int | None": (
        f"a whole number in 1-{_LARGEST}, or none",
        lambda value: value is None or _whole(value),
    ),
    "bool": ("true or false", lambda value: type(value) is bool),
    "tuple[int, ...]": (
        f"a list of whole numbers in 1-{_LARGEST}",
        lambda value: isinstance(value, (list, tuple)) and all(_whole(v) for v in value),
    ),
}


def build(name: str, /, **arguments: Any) -> nn.Module:
    """Build the named architecture, and return the module with its random initial parameters.

    Args:
        name: a key of `ARCHITECTURES`.
        arguments: the function's arguments; lists stand for tuples, as JSON has none.

    Raises:
        UsageError: no architecture of that name, or an argument that it can't take.

    >>> build("convnet", classes=10).fc2
    Linear(in_features=32, out_features=10, bias=True)
    """
    if name not in ARCHITECTURES:
        nearest = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"architecture {name!r}",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            found=repr(name),
            do=f"Use the nearest name, {nearest!r}",
        )
    known = inspect.signature(ARCHITECTURES[name]).parameters
    for argument, value in arguments.items():
        if argument not in known:
            raise UsageError(
                f"architecture {name!r}",
                expected=f"arguments among {', '.join(known)}",
                found=f"{argument!r}",
            )
        expected, fits = _KINDS[str(known[argument].annotation)]
        if not fits(value):
            raise UsageError(f"argument {argument!r} of architecture {name!r}", expected=expected, found=repr(value))
    return ARCHITECTURES[name](
        **{argument: tuple(v) if isinstance(v, list) else v for argument, v in arguments.items()}
    )
