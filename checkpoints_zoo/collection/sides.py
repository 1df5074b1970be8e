"""What is compared: one or many members' tensors, whatever form they come in, checked against the module's."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.collection.member import Member
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats.layout import differences, is_counter

Parameters = Mapping[str, Tensor] | nn.Module | Member | Collection
State = dict[str, Tensor]

_TOGETHER = 1 << 28  # bytes of a collection's members that are read at once


@dataclass(frozen=True)
class Side:
    """One of two things to compare.

    Args:
        name: "a" or "b", for errors.
        module: that computes its function.
        ids: of its members.
        stacked: whether it has a member axis.
        states: reads the members' tensors, one after the other, counters left out.
    """

    name: str
    module: nn.Module
    ids: tuple[int, ...]
    stacked: bool
    states: Callable[[], Iterator[State]]

    @property
    def count(self) -> int:
        return len(self.ids)

    def thing(self, number: int) -> str:
        """Name a member, for errors."""
        return f"{self.name}, member {self.ids[number]}" if self.stacked else self.name

    def checked(self, state: State, number: int) -> State:
        """Check that a member's values are finite, and the same under names that are tied; return those to run with.

        Raises:
            DamagedError, LayoutError: they aren't.
        """
        for name, tensor in state.items():
            if not bool(tensor.isfinite().all()):
                raise DamagedError(
                    f"tensor {name!r} of {self.thing(number)}",
                    expected="finite weights",
                    found="infinite ones or NaN",
                    tensor=name,
                )
        first: dict[int, str] = {}
        for name, own in self.module.state_dict(keep_vars=True).items():
            if name not in state:
                continue
            known = first.setdefault(id(own), name)
            if known != name and not torch.equal(state[known], state[name]):
                raise LayoutError(
                    f"tensors {known!r} and {name!r} of {self.thing(number)}",
                    expected="one value: they are one tensor of the module",
                    found="two",
                    tensor=name,
                )
        return {name: state[name] for name in first.values()}


def side_of(given: Parameters, name: str, module: nn.Module | None) -> Side:
    """Take parameters of any form; return them with the module that they are for.

    Args:
        given: a state dict, a stacked one, a Member, a Collection, or a module.
        name: "a" or "b", for errors.
        module: that computes; None for the given one's own.

    Raises:
        UsageError: no module, or parameters of no known form.
        LayoutError: tensors that are missing, extra or misshapen, by name.
    """
    if isinstance(given, Collection):
        return _of_collection(given, name, module)
    if isinstance(given, Member):
        state: Mapping[str, Tensor] = given.state_dict()
        side = _of_tensors(state, name, module or given.model())
        return Side(name, side.module, (given.id,), False, side.states)
    if isinstance(given, nn.Module):
        return _of_tensors(given.state_dict(), name, module or given)
    tensors: object = given
    if not isinstance(tensors, dict | Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        found = f"{type(given).__name__} of other things" if isinstance(tensors, Mapping) else type(given).__name__
        raise UsageError(name, expected="a state dict, a Member, a Collection, or a module", found=found)
    if module is None:
        raise UsageError(
            "module", expected="the module that computes the function", found="None, and a dict of tensors"
        )
    return _of_tensors(given, name, module)


def _of_collection(members: Collection, name: str, module: nn.Module | None) -> Side:
    size = members.held_by(_TOGETHER)
    own = module or members.skeleton()

    def states() -> Iterator[State]:
        for ids, params in members.batches(size):
            _check(params, own, name)
            yield from ({n: t[i] for n, t in params.items()} for i in range(len(ids)))

    return Side(name, own, tuple(members.ids), True, states)


def _of_tensors(state: Mapping[str, Tensor], name: str, module: nn.Module) -> Side:
    kept = {n: t.detach() for n, t in state.items() if not is_counter(n)}
    members = _check(kept, module, name)
    if members is None:
        return Side(name, module, (0,), False, lambda: iter([kept]))
    ids = tuple(range(members))
    return Side(name, module, ids, True, lambda: ({n: t[i] for n, t in kept.items()} for i in ids))


def _check(state: abc.Mapping[str, Tensor], module: nn.Module, side: str) -> int | None:
    """Compare names and shapes with a module's; return how many members are stacked, None if there is no such axis.

    Raises:
        LayoutError: naming what is missing, extra and misshapen.
        UsageError: no members.
    """
    wanted = {n: tuple(t.shape) for n, t in module.state_dict(keep_vars=True).items() if not is_counter(n)}
    found = {n: tuple(t.shape) for n, t in state.items() if not is_counter(n)}
    both = [n for n in wanted if n in found]
    stacked = bool(both) and all(len(found[n]) == len(wanted[n]) + 1 for n in both)
    counts = {found[n][0]: n for n in both} if stacked else {}
    names, phrase = differences({n: s[1:] for n, s in found.items()} if stacked else found, wanted)
    if names:
        raise LayoutError(
            f"tensors of {side}",
            expected=f"the {len(wanted)} tensors of {type(module).__name__} by name and shape",
            found=phrase,
            tensor=names[0],
        )
    if len(counts) > 1:
        (one, first), (other, second) = list(counts.items())[:2]
        raise LayoutError(
            f"tensors of {side}",
            expected="one number of members",
            found=f"{one} of {first!r} and {other} of {second!r}",
            tensor=second,
        )
    if counts and not next(iter(counts)):
        raise UsageError(f"tensors of {side}", expected="one member or more", found="none")
    return next(iter(counts), None)
