"""Do two sets of parameters compute the same function? Both are run in float64 on the same inputs, and compared.

>>> import torch
>>> import checkpoints_zoo as zoo
>>> from checkpoints_zoo.symmetry import apply, random_element
>>> members = zoo.load("convnet-digits", n=2)
>>> table, generator = zoo.symmetries("convnet-digits"), torch.Generator().manual_seed(0)
>>> params = members.stack()
>>> moved = apply(table, params, random_element(table, generator, members=2, spread=0))
>>> inputs = members.preprocess(zoo.images.load("digits").images[:8])
>>> bool(check_equivalence(params, moved, members[0].model(), inputs))
True
"""

from __future__ import annotations

import copy
import math
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints_zoo.collection.collection import Collection, Member
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError, ZooError
from checkpoints_zoo.formats.layout import differences, is_counter
from checkpoints_zoo.formats.text import few
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import first_names, input_dtype

Parameters = Mapping[str, Tensor] | nn.Module | Member | Collection
State = dict[str, Tensor]
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
_TOGETHER = 1 << 28  # bytes of a collection's members that are read at once


@dataclass(frozen=True)
class Equivalence:
    """How far two sets of parameters are from computing the same outputs; true if they are within the tolerance.

    Args:
        ids: of the members; numbers from 0 where they have none.
        relative: (member, input), the largest difference of an input's outputs, as a share of the largest output that
            the member has for any input. Several outputs each have their own share, of which the largest counts.
        absolute: (member, input), the largest difference.
        tolerance: of `relative`.
        eps: that the norms were given; None: their own.
        changed: names of the layers whose eps that concerns.
        change: (member, input), `relative` with the norms' own eps; None where that is what was compared.
        narrow: layers that compute in less than float64, whose rounding is in the differences too.
    """

    ids: tuple[int, ...]
    relative: Tensor
    absolute: Tensor
    tolerance: float
    eps: float | None
    changed: tuple[str, ...]
    change: Tensor | None
    narrow: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def largest(self) -> float:
        """The largest relative difference of all members and inputs."""
        return float(self.relative.max())

    @property
    def worst(self) -> tuple[int, int]:
        """The member's id and the position of the input whose relative difference is the largest."""
        member, position = divmod(int(self.relative.argmax()), self.relative.shape[1])
        return self.ids[member], position

    def __str__(self) -> str:
        members, inputs = self.relative.shape
        verdict = "The same function" if self else "Not the same function"
        lines = [
            f"{verdict} within {self.tolerance:g}: relative difference at most {self.largest:.2g}, "
            f"absolute {float(self.absolute.max()):.2g}",
            f"Compared in float64 for {_counted(members, 'member')} and {_counted(inputs, 'input')}; "
            f"the worst is member {self.worst[0]}, input {self.worst[1]}",
        ]
        if self.change is not None:
            lines.append(
                f"With eps = {self.eps:g} in {_counted(len(self.changed), 'norm')}; with their own, outputs change by "
                f"at most {float(self.change.max()):.2g} of the largest"
            )
        if self.narrow:
            lines.append(
                f"Rounded to less than float64 in {_named(self.narrow)}: differences of about 1e-6 mean little"
            )
        return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _named(layers: tuple[str, ...]) -> str:
    return few([repr(layer) for layer in layers], 3)


def check_equivalence(
    a: Parameters,
    b: Parameters,
    module: nn.Module | None,
    inputs: Tensor | tuple[Tensor, ...],
    *,
    tolerance: float = 1e-10,
    eps: float | None = None,
    device: str | torch.device = "cpu",
) -> Equivalence:
    """Run two sets of parameters on the same inputs in float64 and eval mode; return how far their outputs differ.

    A symmetry that is exact leaves differences of rounding, about 1e-15. One that is approximate (a scale before a norm
    without running statistics) is exact where the norms' eps is 0: ask for `eps=0`, and the result also says what it
    changes with their own eps. Nothing that is given is changed: all happens on copies.

    Args:
        a, b: each a state dict, a stacked one (member, *shape), a Member, a Collection, or a module, of which only
            the tensors count; both of one member, or of as many members. Counters may be missing.
        module: that computes the function; None if `a` is a Member, a Collection or a module: then its own.
        inputs: one batch, a tuple if the module takes several; floating ones become float64.
        tolerance: of the differences, relative to the largest output.
        eps: of all norms without running statistics; None for their own.
        device: where to compute.

    Raises:
        LayoutError: tensors that are missing, extra or misshapen, by name; two values for tensors that are tied.
        UsageError: inputs that are not finite, or that the module doesn't take; a module that computes something else
            each time, in a dtype of its own, or with tensors that its state dict doesn't reach; no such eps or device.
        DamagedError: weights or outputs that are not finite.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> swapped = {n: t.flip(1 if n == "2.weight" else 0) for n, t in net.state_dict().items()}
    >>> check_equivalence(net, swapped, None, torch.tensor([[-1.0], [2.0]])).largest < 1e-15
    True
    """
    for thing, value in (("tolerance", tolerance), ("eps", 0.0 if eps is None else eps)):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(thing, expected="a number from 0", found=repr(value))
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    _check_inputs(given)
    one = side_of(a, "a", module)
    other = side_of(b, "b", one.module)
    if one.count != other.count or one.stacked != other.stacked:
        found = " and ".join(_counted(s.count, "member") if s.stacked else "one member alone" for s in (one, other))
        raise UsageError("a and b", expected="one member each, or as many stacked ones", found=found)
    running = Running(one.module, given, check_device(device), None)
    other_eps = None if eps is None else Running(one.module, given, check_device(device), float(eps))
    return _compared(one, other, running, other_eps, tolerance)


def _check_inputs(inputs: tuple[Tensor, ...]) -> None:
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise UsageError("inputs", expected="a tensor, or a tuple of tensors", found=repr(inputs)[:80])
    for x in inputs:
        if not x.numel():
            raise UsageError("inputs", expected="one or more", found=f"none: a tensor of shape {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise UsageError("inputs", expected="finite numbers", found="infinite ones or NaN")


def _compared(one: Side, other: Side, own: Running, changed: Running | None, tolerance: float) -> Equivalence:
    """Run all members of both sides; return the comparison."""
    relative, absolute, change = [], [], []
    for number, (first, second) in enumerate(zip(one.states(), other.states(), strict=True)):
        states = (one.checked(first, number), other.checked(second, number))
        if number == 0:
            own.watch(states[0])
        results = []
        for running in (own, changed) if changed is not None else (own,):
            left, right = (running.outputs(s, x.thing(number)) for s, x in zip(states, (one, other), strict=True))
            results.append(_differences(left, right, own.batch))
        if changed is not None:
            change.append(results[0][0])
        relative.append(results[-1][0])
        absolute.append(results[-1][1])
    return Equivalence(
        ids=one.ids,
        relative=torch.stack(relative),
        absolute=torch.stack(absolute),
        tolerance=tolerance,
        eps=None if changed is None else changed.eps,
        changed=() if changed is None else changed.changed,
        change=torch.stack(change) if change else None,
        narrow=own.narrow,
    )


def _differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor], batch: int) -> tuple[Tensor, Tensor]:
    """Return the largest difference of each input's outputs, relative and absolute, (input) each."""
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in other.items()}:
        raise UsageError("outputs of a and b", expected="the same shapes", found="others: they depend on the values")
    # Outputs that aren't a row an input count as those of one.
    rows = batch if all(t.ndim and len(t) == batch for t in one.values()) else 1
    relative, absolute = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    if not any(bool(t.any()) for t in (*one.values(), *other.values())):
        raise UsageError("inputs", expected="some that tell functions apart", found="ones whose outputs are all 0")
    for name, first in one.items():
        second = other[name]
        if not first.numel():
            continue
        apart = (first - second).abs().reshape(rows, -1).amax(1).cpu()
        scale = float(torch.maximum(first.abs().max(), second.abs().max()))
        absolute = torch.maximum(absolute, apart)
        relative = torch.maximum(relative, apart / scale if scale else apart)
    return relative, absolute


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
        first = {name: known for name, known in first_names(self.module).items() if name in state}
        for name, known in first.items():
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
    size = members._held_by(_TOGETHER)
    own = module or members._skeleton()

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


class Running:
    """A module's function in float64.

    Args:
        module: it is not changed.
        inputs: that it is run on.
        device: where to compute.
        eps: of its norms without running statistics; None for their own.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], device: torch.device, eps: float | None) -> None:
        self.original = module
        self.device = device
        self.eps = eps
        self.inputs = tuple(_wide(x.to(device)) for x in inputs)
        self.batch = len(inputs[0]) if inputs[0].ndim else 1
        self.module = _copied(module, device)
        self.module._apply(_wide)  # type: ignore[no-untyped-call]
        self.changed = () if eps is None else self._with_eps(eps)
        self.narrow: tuple[str, ...] = ()

    def _with_eps(self, eps: float) -> tuple[str, ...]:
        """Set eps where no buffer moves along with it; return the layers' names."""
        found = []
        for name, layer in self.module.named_modules():
            own = layer.__dict__.get("eps", "")
            if (own is None or isinstance(own, int | float)) and getattr(layer, "running_var", None) is None:
                layer.__dict__["eps"] = eps
                found.append(name)
        if not found:
            raise UsageError(
                "eps",
                expected=f"norms without running statistics in {_kind(self.module)}, each with an `eps`",
                found="no such layer",
                do="Leave eps out: the module's scalings are exact",
            )
        return tuple(found)

    def watch(self, state: Mapping[str, Tensor]) -> None:
        """Run once and look at every operation; note the layers that narrow what they compute.

        Raises:
            UsageError: outputs that differ from run to run, tensors that a state dict doesn't reach, a module that
                doesn't take the inputs, or not in float64.
        """
        watcher = _Watcher(self.original, self.module)
        try:
            with watcher.layers(self.module), watcher:
                first = self._run(state)
        except ZooError:
            raise
        except _FAILURES as error:
            self._explain(error, state, watcher.at)
        self.narrow = tuple(dict.fromkeys(name or _kind(self.module) for name in watcher.narrow))
        second = self._run(state)
        apart = [float((second[n] - t).abs().max()) for n, t in first.items() if t.numel()]
        scale = max((float(t.abs().max()) for t in first.values() if t.numel()), default=0.0)
        if max(apart, default=0.0) > 1e-10 * scale:
            raise UsageError(
                f"module {_kind(self.module)} in eval mode",
                expected="the same outputs each time",
                found="others in a second run",
                do="Dropout and sampling have to stop in eval mode, as `F.dropout(x, p, self.training)` does",
            )

    def outputs(self, state: Mapping[str, Tensor], thing: str) -> dict[str, Tensor]:
        """Run with a member's tensors; return the outputs by name, in float64.

        Raises:
            DamagedError: they are not finite.
        """
        try:
            outputs = self._run(state)
        except ZooError:
            raise
        except _FAILURES as error:
            self._explain(error, state, "")
        for tensor in outputs.values():
            if not bool(tensor.isfinite().all()):
                do = "At eps = 0 what is all zeros is divided by zero: give a small eps, such as 1e-20"
                raise DamagedError(
                    f"outputs of {thing}", expected="finite numbers", found="infinite ones or NaN",
                    do=do if self.eps == 0 else "",
                )  # fmt: skip
        return outputs

    def _run(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {n: _wide(t.to(self.device, copy=True)) for n, t in state.items()}
        return dict(_tensors(_called(self.module, own, self.inputs)))

    def _explain(self, error: Exception, state: Mapping[str, Tensor], layer: str) -> NoReturn:
        """Say whether the inputs are at fault or the module's own dtypes: it may well run in what it was made in."""
        said = str(error).partition("\n")[0]
        where = f"in layer {layer!r}: " if layer else ""
        dtype = input_dtype(dict(state))
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in self.inputs)
        try:
            _called(_copied(self.original, self.device), {n: t.to(self.device) for n, t in state.items()}, inputs)
        except _FAILURES:
            kind = _kind(self.module)
            raise UsageError("inputs", expected=f"one batch that {kind} takes", found=where + said) from error
        raise UsageError(
            f"module {_kind(self.module)}",
            expected="one that computes in the dtype of its inputs, here float64",
            found=where + said,
            do="Make tensors inside it like its inputs, as `torch.zeros_like(x)` does",
        ) from error


def _called(module: nn.Module, state: Mapping[str, Tensor], inputs: tuple[Tensor, ...]) -> Any:
    kind = inputs[0].device.type
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        return functional_call(module, dict(state), tuple(x.clone() for x in inputs))


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _copied(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module in eval mode to a device; return the copy, whose tensors without memory stay so."""
    try:
        twin = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"module {_kind(module)}", expected="one that can be copied", found=str(error).partition("\n")[0]
        ) from error
    twin.eval()
    twin._apply(lambda t: t if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    for name, layer in twin.named_modules():
        if layer.training:
            raise UsageError(
                f"module {_kind(module)}",
                expected="eval mode, without dropout and batch statistics",
                found=f"layer {name!r} still in training mode after .eval()",
            )
    return twin


def _tensors(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's result by name; of nested ones, by their path."""
    if isinstance(result, Tensor):
        yield name, result.double() if not result.is_complex() else torch.view_as_real(_wide(result))
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _tensors(value, f"{name}.{key}")
    elif isinstance(result, tuple | list):
        for i, value in enumerate(result):
            yield from _tensors(value, f"{name}.{i}")
    elif result is not None:
        raise UsageError("outputs", expected="tensors, or tuples, lists and dicts of them", found=type(result).__name__)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a run: what it narrows, and whether it reads tensors that no state dict replaces.

    Args:
        original, copied: the module as it was given, and its copy. With functions that hold on to either, a run with
            another state dict would go on reading these: two of them would look equal though they are not.
    """

    def __init__(self, original: nn.Module, copied: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow: list[str] = []
        self.path: list[str] = []
        self._held = {
            id(t): n for m in (original, copied) for n, t in m.state_dict(keep_vars=True).items() if not is_counter(n)
        }

    @property
    def at(self) -> str:
        """The layer that is running; after a failure, where it was."""
        return self.path[-1] if self.path else ""

    @contextmanager
    def layers(self, module: nn.Module) -> Iterator[None]:
        """Follow which layer of a module is running."""
        hooks = []
        for name, layer in module.named_modules():
            hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: self.path.append(name)))
            hooks.append(layer.register_forward_hook(lambda *_: (self.path.pop(), None)[1]))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in given:
            if id(tensor) in self._held:
                raise _refuse(self._held[id(tensor)])
        result = func(*args, **(kwargs or {}))
        if any(t.dtype == torch.float64 for t in given):
            made = torch.utils._pytree.tree_leaves(result)
            if any(isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 for t in made):
                self.narrow.append(self.at)
        return result


def _refuse(name: str) -> UsageError:
    return UsageError(
        f"tensor {name!r} of the module",
        expected="a tensor that the module looks up where its state dict keeps it",
        found="one that a function or list of its own holds on to",
        do="Read it as an attribute (`self.weight`) when forward runs",
    )
