"""Draws of a posterior, whatever form they come in: one state dict after another, all of the net's tensors in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats.layout import Shape, differences, is_counter
from checkpoints_zoo.sources.archives.keymaps import fit

Array = Tensor | npt.NDArray[Any]
Draw = Mapping[str, Array] | Array
Samples = Iterable[Draw] | Mapping[str, Array] | Array
State = dict[str, Tensor]

PARAMETERS = "parameters"


class Whole:
    """Makes a draw whole: names as the module has them, flat vectors cut, buffers that draws share put in.

    Args:
        module: the net, with or without memory.
        order: of flat vectors: "parameters" as torch.nn.utils.parameters_to_vector has it, or names of tensors.
        buffers: what the draws share and lack, a module or state dict of the net.

    Raises:
        UsageError: an order that is none of this net's.
        LayoutError: buffers that are none of this net's.
    """

    def __init__(
        self, module: nn.Module, order: Iterable[str] | None, buffers: nn.Module | Mapping[str, Tensor] | None
    ) -> None:
        state = module.state_dict(keep_vars=True)
        self.wanted: dict[str, Shape] = {n: tuple(t.shape) for n, t in state.items() if not is_counter(n)}
        self.counters = tuple(name for name in state if is_counter(name))
        self.parameters = [name for name, _ in module.named_parameters() if name in state]
        first: dict[int, str] = {}
        # A tensor under several names may come under its first one alone.
        self.twin = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        self.buffers = [n for n, t in state.items() if n in self.wanted and not isinstance(t, nn.Parameter)]
        self.shared = self._shared(buffers)
        self.order = self._order(order)
        self._names: dict[tuple[str, ...], dict[str, str]] = {}

    def _order(self, order: Iterable[str] | None) -> list[str] | None:
        if order is None or order == PARAMETERS:
            return None if order is None else self.parameters
        names = [order] if isinstance(order, str) else list(order)
        if unknown := [name for name in names if name not in self.wanted]:
            raise UsageError(
                "order of flat draws",
                expected=f"'{PARAMETERS}', or names of the net's tensors in order",
                found=", ".join(map(repr, unknown[:5])),
            )
        if len(set(names)) < len(names):
            raise UsageError("order of flat draws", expected="each name once", found="one twice")
        return names

    def _shared(self, given: nn.Module | Mapping[str, Tensor] | None) -> State:
        if given is None:
            return {}
        state = given.state_dict() if isinstance(given, nn.Module) else dict(given)
        found = {name: tuple(state[name].shape) for name in self.buffers if name in state}
        wrong, phrase = differences(found, {name: self.wanted[name] for name in self.buffers})
        if wrong:
            raise LayoutError("buffers of all draws", expected="the net's", found=phrase, tensor=wrong[0])
        return {name: state[name].detach().cpu() for name in self.buffers}

    def __call__(self, draw: Draw, at: int) -> State:
        """Make a draw whole; return its tensors in the order of the module, on the CPU.

        Args:
            draw: tensors by name, or a flat vector (weight,).
            at: its position, for errors.

        Raises:
            LayoutError: tensors missing, extra or misshapen.
            UsageError: something else than tensors, or a vector without an order.
        """
        found = self._named(draw, at) if isinstance(draw, Mapping) else self._cut(draw, at)
        for name in self.wanted:
            if name not in found:
                found[name] = found[self.twin[name]] if self.twin[name] in found else self.shared[name]
        return {name: found[name] for name in self.wanted}

    def _named(self, draw: Mapping[str, Array], at: int) -> State:
        tensors = {name: _tensor(value, f"tensor {name!r} of draw {at}") for name, value in draw.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        key = tuple(shapes)
        if key not in self._names or any(shapes[n] != self.wanted.get(o) for n, o in self._names[key].items()
                                         if not is_counter(o)):  # fmt: skip
            self._names[key] = self._fitted(shapes, at)
        return {ours: tensors[name] for name, ours in self._names[key].items() if not is_counter(ours)}

    def _fitted(self, shapes: Mapping[str, Shape], at: int) -> dict[str, str]:
        """Find the tensors of the net that a draw has: all, or the parameters, of twins perhaps one."""
        errors = []
        for names in self._sets:
            try:
                names_of = fit(shapes, {name: self.wanted[name] for name in names})
            except LayoutError as error:
                errors.append(error)
                continue
            self._check_rest(set(names), at)
            return names_of
        found = min(errors, key=lambda error: len(error.found))
        raise LayoutError(f"draw {at}", expected=f"the net's {len(self.wanted)} tensors by name and shape",
                          found=found.found, tensor=found.tensor)  # fmt: skip

    @cached_property
    def _sets(self) -> list[list[str]]:
        parameters = [name for name in self.wanted if name not in self.buffers]
        firsts = [name for name in self.wanted if self.twin[name] == name]
        return [list(self.wanted), firsts, parameters, [n for n in parameters if n in firsts]]

    def _cut(self, draw: Any, at: int) -> State:
        if isinstance(draw, nn.Module):
            raise UsageError(f"draw {at}", expected="tensors by name, or a flat vector", found="a module",
                             do="Give its state_dict()")  # fmt: skip
        vector = _tensor(draw, f"draw {at}")
        if self.order is None:
            raise UsageError(
                f"draw {at}",
                expected="tensors by name, or a flat vector and its order",
                found=f"one of shape {tuple(vector.shape)} without any",
                do="Give order='parameters' for vectors of torch.nn.utils.parameters_to_vector, or the tensors' names",
            )
        width = sum(math.prod(self.wanted[name]) for name in self.order)
        if vector.shape != (width,):
            raise LayoutError(f"draw {at}", expected=f"a vector of {width:,} weights",
                              found=f"one of shape {tuple(vector.shape)}")  # fmt: skip
        self._check_rest(set(self.order), at)
        state, start = {}, 0
        for name in self.order:
            shape = self.wanted[name]
            state[name] = vector[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        return state

    def _check_rest(self, there: set[str], at: int) -> None:
        """Check that what a draw lacks is shared by all, or has a twin in it."""
        lacking = [n for n in self.wanted if n not in there and self.twin[n] not in there and n not in self.shared]
        if lacking:
            buffers = all(name in self.buffers for name in lacking)
            raise LayoutError(
                f"draw {at}",
                expected=f"the net's {len(self.wanted)} tensors",
                found=differences({}, {name: self.wanted[name] for name in lacking})[1],
                do="Give buffers=module, whose buffers all draws share (statistics of norms are then those of it)"
                if buffers
                else "",
                tensor=lacking[0],
            )


def _tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, np.ndarray | np.generic):
        try:
            return torch.from_numpy(np.array(value))
        except TypeError:
            raise UsageError(what, expected="numbers", found=f"an array of {value.dtype}") from None
    if not isinstance(value, Tensor):
        raise UsageError(what, expected="a tensor", found=f"a {type(value).__name__}")
    return value.detach().cpu()


def count(samples: Samples) -> int | None:
    """Return how many draws there are; None where only reading them tells.

    Raises:
        UsageError: no draws at all, or stacked ones that are not.
    """
    if isinstance(samples, Mapping):
        shapes = {n: tuple(getattr(t, "shape", ())) for n, t in samples.items()}
        firsts = {shape[:1] for shape in shapes.values()}
        if len(firsts) != 1 or firsts == {()}:
            found = ", ".join(f"{n} {list(s)}" for n, s in list(shapes.items())[:5])
            raise UsageError("stacked draws", expected="tensors (draw, …), as many draws in each",
                             found=found or "no tensors", do="Give a list for a single one: [state]")  # fmt: skip
        return int(next(iter(firsts))[0])
    if isinstance(samples, Tensor | np.ndarray):
        if len(samples.shape) != 2:
            raise UsageError("flat draws", expected="shape (draw, weight)", found=f"{tuple(samples.shape)}")
        return int(samples.shape[0])
    if isinstance(samples, str | bytes | nn.Module) or not hasattr(samples, "__iter__"):
        raise UsageError("samples", expected="state dicts, stacked tensors or flat vectors",
                         found=f"a {type(samples).__name__}")  # fmt: skip
    return len(samples) if isinstance(samples, Sized) else None


def each(samples: Samples) -> Iterator[Draw]:
    """Yield the draws, one after another."""
    if isinstance(samples, Mapping):
        for at in range(count(samples) or 0):
            yield {name: stacked[at] for name, stacked in samples.items()}
    else:
        yield from samples
