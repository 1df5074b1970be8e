"""A copy of a module, in float64 and eval mode, that runs with any state dict and is watched while it does."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints_zoo.errors import DamagedError, UsageError, ZooError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.networks.modules import input_dtype

_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)


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
