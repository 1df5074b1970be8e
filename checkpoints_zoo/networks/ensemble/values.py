"""What is known of the values of a network while its program is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Unknown(Exception):
    """An operation that has no step."""


@dataclass(eq=False)
class Value:
    """What is known of a value.

    Args:
        kind: "own" (each member's), "shared" (the inputs, or made of them alone), "parameter"; or "shape", "extent",
            "dtype" of another value.
        rank: of an activation; of a parameter, without the member axis.
        place: where it lies while the program runs.
        shares: the value whose memory it may share.
        fresh: whether its memory is the program's own.
        spread: whether elements may lie in one place.
        of: the value whose shape, extent or dtype it is.
        dim: of an extent.
        name: of a parameter.
        bring: what makes a parameter of the stack of it.
        cast: the activation whose dtype a parameter is to have.
    """

    kind: str
    rank: int = 0
    place: int = -1
    shares: Value | None = None
    fresh: bool = False
    spread: bool = False
    of: Value | None = None
    dim: int = 0
    name: str = ""
    bring: Callable[[Tensor], Tensor] = lambda stack: stack
    cast: Value | None = None

    @property
    def root(self) -> Value:
        """The value whose memory this one shares."""
        return self if self.shares is None else self.shares.root

    @property
    def active(self) -> bool:
        return self.kind in ("own", "shared")


def flat(arguments: Any) -> Iterator[Any]:
    """Yield what stands in nested lists and tuples."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from flat(argument)
        else:
            yield argument


def plain(arguments: Any) -> bool:
    return all(isinstance(a, PLAIN) for a in flat(arguments))


def side_by_side(stack: Tensor) -> Tensor:
    """Lay members' tensors next to each other: (member·first axis, …)."""
    return stack.flatten(0, 1)


def require(condition: object) -> None:
    """Raise Unknown unless a condition holds."""
    if not condition:
        raise Unknown
