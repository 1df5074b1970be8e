"""Test whether two sets of parameters compute the same function. The network is run in float64 with each of the two
sets on the same inputs, and the outputs are compared.
This is one file, because all of it is one test.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints_zoo.collection.collection import Collection, Member
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError, ZooError
from checkpoints_zoo.formats.layout import compare_shapes, is_counter
from checkpoints_zoo.formats.text import count_with_noun, first_few
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import check_module, first_names, input_dtype
from checkpoints_zoo.predictions.running import check_same_outputs

Parameters = Mapping[str, Tensor] | nn.Module | Member | Collection
TensorDict = dict[str, Tensor]
_RUN_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)
_BATCH_BYTES = 1 << 28  # Number of bytes of a collection's members that are read at once.


@dataclass(frozen=True)
class Equivalence:
    """How far two sets of parameters are from computing the same outputs; true if the difference is within the
    tolerance.

    Args:
        ids: ids of the members; numbers from 0 if members have no ids.
        relative: (member, input), the largest difference between both outputs for an input, divided by the member's
            largest output on any input. If a module has several outputs, each output has a ratio, and the largest ratio
            counts.
        absolute: (member, input), the largest absolute difference between both outputs for an input.
        tolerance: the largest `relative` that counts as equal.
        eps: eps of the norms in this comparison; None if each norm kept its own eps.
        changed: names of the layers whose eps was replaced.
        change: (member, input), `relative` with the norms' own eps; None if no eps was replaced.
        narrow: names of layers that compute in a narrower dtype than float64, so that their rounding errors are part of
            the differences.
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
            f"Compared in float64 for {count_with_noun(members, 'member')} and {count_with_noun(inputs, 'input')}; "
            f"the worst is member {self.worst[0]}, input {self.worst[1]}",
        ]
        if self.change is not None:
            lines.append(
                f"With eps = {self.eps:g} in {count_with_noun(len(self.changed), 'norm')}; with "
                "their own, outputs change by "
                f"at most {float(self.change.max()):.2g} of the largest"
            )
        if self.narrow:
            layers = first_few([repr(layer) for layer in self.narrow], 3)
            lines.append(f"Rounded to less than float64 in {layers}: differences of about 1e-6 mean little")
        return "\n".join(lines)


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

    For an exact symmetry, the outputs differ only by rounding errors of about 1e-15. An approximate symmetry (a scale
    before a norm without running statistics) is exact if the norms' eps is 0: `eps=0` tests the symmetry, and the
    result also says how much the symmetry changes the outputs with the norms' own eps. The arguments are never changed:
    everything happens on copies.

    Args:
        a, b: the two sets of parameters: each a state dict, a stacked state dict `(member, *shape)`, a Member, a
            Collection, or a module, of which only the tensors are used; both sets have equally many members. Counters
            may be missing.
        module: module that computes the function; None to use the module of `a`, if `a` is a Member, a Collection or a
            module.
        inputs: one batch of inputs, or a tuple of batches if the module takes several inputs; floating tensors become
            float64.
        tolerance: largest difference of outputs, relative to the largest output, that counts as equal.
        eps: eps that all norms without running statistics get; None to keep their own eps.
        device: device to compute on.

    Raises:
        LayoutError: tensors are missing, extra or have another shape, or two names of one tensor have different values;
            the error names them.
        UsageError: inputs are not finite, or the module can't process them; the module's outputs differ from run to
            run, or it computes in a fixed dtype or with tensors outside its state dict; or the eps or device is not
            possible.
        DamagedError: weights or outputs are not finite.

    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> swapped = {n: t.flip(1 if n == "2.weight" else 0) for n, t in net.state_dict().items()}
    >>> check_equivalence(net, swapped, None, torch.tensor([[-1.0], [2.0]])).largest < 1e-15
    True
    """
    for argument_name, value in (("tolerance", tolerance), ("eps", 0.0 if eps is None else eps)):
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(argument_name, expected="a number from 0", found=repr(value))
    batch = inputs if isinstance(inputs, tuple) else (inputs,)
    _check_inputs(batch)
    first_set = _to_parameter_set(a, "a", module)
    second_set = _to_parameter_set(b, "b", first_set.module)
    if (len(first_set.ids), first_set.stacked) != (len(second_set.ids), second_set.stacked):
        counts = [
            count_with_noun(len(compared_set.ids), "member") if compared_set.stacked else "one member alone"
            for compared_set in (first_set, second_set)
        ]
        raise UsageError("a and b", expected="one member each, or as many stacked ones", found=" and ".join(counts))
    torch_device = check_device(device)
    unchanged_eps_run = _ModuleRun(first_set.module, batch, torch_device, None)
    module_runs = (
        [unchanged_eps_run]
        if eps is None
        else [unchanged_eps_run, _ModuleRun(first_set.module, batch, torch_device, float(eps))]
    )
    # For each member and each run, the relative and the absolute differences between both outputs.
    differences: list[list[tuple[Tensor, Tensor]]] = []
    for member_position, member_states in enumerate(zip(first_set.states(), second_set.states(), strict=True)):
        if member_position == 0:
            unchanged_eps_run.check_module(member_states[0])
        member_names = [parameter_set.member_name(member_position) for parameter_set in (first_set, second_set)]
        outputs = [
            [module_run.outputs(state, name) for state, name in zip(member_states, member_names, strict=True)]
            for module_run in module_runs
        ]
        differences.append(
            [
                _differences(first_outputs, second_outputs, unchanged_eps_run.input_count)
                for first_outputs, second_outputs in outputs
            ]
        )
    relative, absolute = (
        torch.stack(member_differences)
        for member_differences in zip(*(run_differences[-1] for run_differences in differences), strict=True)
    )
    change = None if eps is None else torch.stack([run_differences[0][0] for run_differences in differences])
    return Equivalence(
        first_set.ids,
        relative,
        absolute,
        tolerance,
        module_runs[-1].eps,
        module_runs[-1].changed,
        change,
        unchanged_eps_run.narrow_layers,
    )


def _check_inputs(inputs: tuple[Tensor, ...]) -> None:
    if not inputs or not all(isinstance(x, Tensor) for x in inputs):
        raise UsageError("inputs", expected="a tensor, or a tuple of tensors", found=repr(inputs)[:80])
    for x in inputs:
        if not x.numel():
            raise UsageError("inputs", expected="one or more", found=f"none: a tensor of shape {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise UsageError("inputs", expected="finite numbers", found="infinite ones or NaN")


def _differences(
    outputs: Mapping[str, Tensor], other_outputs: Mapping[str, Tensor], input_count: int
) -> tuple[Tensor, Tensor]:
    """Compare the outputs of two sets of parameters; return the largest relative and the largest absolute difference
    for each input, (input,) each."""
    if {n: t.shape for n, t in outputs.items()} != {n: t.shape for n, t in other_outputs.items()}:
        raise UsageError("outputs of a and b", expected="the same shapes", found="others: they depend on the values")
    if not any(bool(t.any()) for t in (*outputs.values(), *other_outputs.values())):
        raise UsageError("inputs", expected="some that tell functions apart", found="ones whose outputs are all 0")
    # Outputs that do not have one row for each input are treated as the output for one input.
    row_count = input_count if all(t.ndim and len(t) == input_count for t in outputs.values()) else 1
    relative_differences, absolute_differences = (
        torch.zeros(row_count, dtype=torch.float64),
        torch.zeros(row_count, dtype=torch.float64),
    )
    for first_output, second_output in ((t, other_outputs[name]) for name, t in outputs.items() if t.numel()):
        row_differences = (first_output - second_output).abs().reshape(row_count, -1).amax(1).cpu()
        largest_output = float(torch.maximum(first_output.abs().max(), second_output.abs().max()))
        absolute_differences = torch.maximum(absolute_differences, row_differences)
        relative_differences = torch.maximum(
            relative_differences, row_differences / largest_output if largest_output else row_differences
        )
    return relative_differences, absolute_differences


class _ParameterSet(NamedTuple):
    """One of the two compared sets of parameters, prepared for the comparison.

    Args:
        name: name of the argument, "a" or "b", for error texts.
        module: module that computes the function.
        ids: ids of the members.
        stacked: whether the tensors have a member axis.
        batches: function that yields the members' tensors (member, *shape), some members at a time, without counters.
    """

    name: str
    module: nn.Module
    ids: tuple[int, ...]
    stacked: bool
    batches: Callable[[], Iterator[TensorDict]]

    def member_name(self, position: int) -> str:
        """Return a name for a member in error texts."""
        return f"{self.name}, member {self.ids[position]}" if self.stacked else self.name

    def states(self) -> Iterator[TensorDict]:
        """Yield each member's tensors by name; a tensor with several names is yielded under one of them.

        Raises:
            DamagedError, LayoutError: values are not finite, or differ between two names of one tensor.
        """
        member_position = 0
        for stacked_tensors in self.batches():
            for i in range(_count_members(stacked_tensors, self.module, self.name) or 0):
                yield self._check_tensors(
                    {n: t[i] for n, t in stacked_tensors.items()}, self.member_name(member_position)
                )
                member_position += 1

    def _check_tensors(self, member_tensors: TensorDict, name_in_errors: str) -> TensorDict:
        for name, tensor in member_tensors.items():
            if not bool(tensor.isfinite().all()):
                expected, found = "finite weights", "infinite ones or NaN"
                raise DamagedError(f"tensor {name!r} of {name_in_errors}", expected=expected, found=found, tensor=name)
        first_name_of = {
            name: first_name for name, first_name in first_names(self.module).items() if name in member_tensors
        }
        for name, first_name in first_name_of.items():
            if first_name != name and not torch.equal(member_tensors[first_name], member_tensors[name]):
                raise LayoutError(
                    f"tensors {first_name!r} and {name!r} of {name_in_errors}",
                    expected="one value: they are one tensor of the module",
                    found="two",
                    tensor=name,
                )
        return {name: member_tensors[name] for name in first_name_of.values()}


def _to_parameter_set(parameters: Parameters, argument_name: str, module: nn.Module | None) -> _ParameterSet:
    """Convert parameters of any form for the comparison; return them with the module that computes their function.

    Args:
        parameters: a state dict, a stacked state dict, a Member, a Collection, or a module.
        argument_name: name of the argument, "a" or "b", for error texts.
        module: module that computes the function; None for the module of the parameters themselves.

    Raises:
        UsageError: there is no module, or the parameters have an unknown form.
        LayoutError: tensors are missing, extra or have another shape; the error names them.
    """
    if isinstance(parameters, Collection):
        batch_size, module = parameters._member_count_within(_BATCH_BYTES), module or parameters._skeleton()
        return _ParameterSet(
            argument_name, module, tuple(parameters.ids), True, lambda: (p for _, p in parameters.batches(batch_size))
        )
    tensors: Any = parameters
    if isinstance(parameters, Member):
        tensors, module = parameters.state_dict(), module or parameters.model()
    elif isinstance(parameters, nn.Module):
        check_module(parameters, argument_name)
        tensors, module = parameters.state_dict(), module or parameters
    if not isinstance(tensors, Mapping) or not all(isinstance(t, Tensor) for t in tensors.values()):
        found = f"{type(tensors).__name__} of other things" if isinstance(tensors, Mapping) else type(tensors).__name__
        raise UsageError(argument_name, expected="a state dict, a Member, a Collection, or a module", found=found)
    if module is None:
        expected, found = "the module that computes the function", "None, and a dict of tensors"
        raise UsageError("module", expected=expected, found=found)
    weights = {n: t.detach() for n, t in tensors.items() if not is_counter(n)}
    member_count = _count_members(weights, module, argument_name)
    ids = tuple(range(member_count)) if member_count else (parameters.id if isinstance(parameters, Member) else 0,)
    stacked_tensors = weights if member_count else {n: t[None] for n, t in weights.items()}
    return _ParameterSet(argument_name, module, ids, bool(member_count), lambda: iter([stacked_tensors]))


def _count_members(tensors: Mapping[str, Tensor], module: nn.Module, argument_name: str) -> int | None:
    """Check the tensors' names and shapes against a module; return the number of stacked members, None without a member
    axis.

    Raises:
        LayoutError: tensors are missing, extra or have another shape; the error names them.
        UsageError: no members.
    """
    expected_shapes = {n: tuple(t.shape) for n, t in module.state_dict(keep_vars=True).items() if not is_counter(n)}
    shapes = {n: tuple(t.shape) for n, t in tensors.items() if not is_counter(n)}
    shared_names = [n for n in expected_shapes if n in shapes]
    is_stacked = bool(shared_names) and all(len(shapes[n]) == len(expected_shapes[n]) + 1 for n in shared_names)
    name_of_count = {shapes[n][0]: n for n in shared_names} if is_stacked else {}
    wrong_names, problem_text = compare_shapes(
        {n: s[1:] for n, s in shapes.items()} if is_stacked else shapes, expected_shapes
    )
    if wrong_names:
        raise LayoutError(
            f"tensors of {argument_name}",
            expected=f"the {len(expected_shapes)} tensors of {type(module).__name__} by name and shape",
            found=problem_text,
            tensor=wrong_names[0],
        )
    if len(name_of_count) > 1:
        (first_count, first_name), (second_count, second_name) = list(name_of_count.items())[:2]
        raise LayoutError(
            f"tensors of {argument_name}",
            expected="one number of members",
            found=f"{first_count} of {first_name!r} and {second_count} of {second_name!r}",
            tensor=second_name,
        )
    if name_of_count and not next(iter(name_of_count)):
        raise UsageError(f"tensors of {argument_name}", expected="one member or more", found="none")
    return next(iter(name_of_count), None)


class _ModuleRun:
    """A copy of a module that computes in float64, with the inputs that it is run on.

    Args:
        module: the module to copy, which is not changed.
        inputs: one batch.
        device: device to compute on.
        eps: eps that all norms without running statistics get; None to keep their own eps.
    """

    def __init__(self, module: nn.Module, inputs: tuple[Tensor, ...], device: torch.device, eps: float | None) -> None:
        self.original_module = module
        self.class_name = type(module).__name__
        self.device = device
        self.eps = eps
        self.inputs = tuple(_to_float64(x.to(device)) for x in inputs)
        self.input_count = len(inputs[0]) if inputs[0].ndim else 1
        self.module = _eval_copy(module, device)
        self.module._apply(_to_float64)  # type: ignore[no-untyped-call]
        self.changed = () if eps is None else self._replace_eps(eps)
        self.narrow_layers: tuple[str, ...] = ()

    def _replace_eps(self, eps: float) -> tuple[str, ...]:
        """Set the eps of norms without running statistics; return the names of the changed layers."""
        changed_layers = []
        for name, layer in self.module.named_modules():
            layer_eps = layer.__dict__.get("eps", "")
            if (layer_eps is None or isinstance(layer_eps, int | float)) and getattr(
                layer, "running_var", None
            ) is None:
                layer.__dict__["eps"] = eps
                changed_layers.append(name)
        if not changed_layers:
            raise UsageError(
                "eps",
                expected=f"norms without running statistics in {self.class_name}, each with an `eps`",
                found="no such layer",
                do="Leave eps out: the module's scalings are exact",
            )
        return tuple(changed_layers)

    def check_module(self, member_tensors: TensorDict) -> None:
        """Run the module twice and watch every operation; record the layers that compute in a narrower dtype.

        Raises:
            UsageError: the outputs differ from run to run, the module uses tensors outside its state dict, or it can't
                process the inputs in float64.
        """
        watcher = _OperationWatcher(self.original_module, self.module)
        first_outputs = self._run_module(member_tensors, watcher)
        self.narrow_layers = tuple(dict.fromkeys(name or self.class_name for name in watcher.narrow_layers))
        check_same_outputs(self.module, first_outputs, self._run_module(member_tensors), 1e-10)

    def outputs(self, member_tensors: TensorDict, name_in_errors: str) -> TensorDict:
        """Run the module with a member's tensors; return the outputs by name, in float64.

        Raises:
            DamagedError: the outputs are not finite.
        """
        outputs = self._run_module(member_tensors)
        if not all(bool(tensor.isfinite().all()) for tensor in outputs.values()):
            advice = "At eps = 0 what is all zeros is divided by zero: give a small eps, such as 1e-20"
            expected, found = "finite numbers", "infinite ones or NaN"
            raise DamagedError(
                f"outputs of {name_in_errors}", expected=expected, found=found, do=advice if self.eps == 0 else ""
            )
        return outputs

    def _run_module(self, member_tensors: TensorDict, watcher: _OperationWatcher | None = None) -> TensorDict:
        tensors = {n: _to_float64(t.to(self.device, copy=True)) for n, t in member_tensors.items()}
        try:
            if watcher is None:
                return dict(_named_tensors(_call_module(self.module, tensors, self.inputs)))
            with watcher:
                return dict(_named_tensors(_call_module(self.module, tensors, self.inputs)))
        except ZooError:
            raise
        except _RUN_ERRORS as error:
            self._explain_failure(error, member_tensors, watcher.layer if watcher is not None else "")

    def _explain_failure(self, error: Exception, member_tensors: TensorDict, layer_name: str) -> NoReturn:
        """Explain a failed run: run the original module in its own dtypes, and raise an error about the inputs if that
        fails as well."""
        found = (f"in layer {layer_name!r}: " if layer_name else "") + str(error).partition("\n")[0]
        dtype = input_dtype(dict(member_tensors))
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in self.inputs)
        try:
            _call_module(
                _eval_copy(self.original_module, self.device),
                {n: t.to(self.device) for n, t in member_tensors.items()},
                inputs,
            )
        except _RUN_ERRORS:
            raise UsageError("inputs", expected=f"one batch that {self.class_name} takes", found=found) from error
        raise UsageError(
            f"module {self.class_name}",
            expected="one that computes in the dtype of its inputs, here float64",
            found=found,
            do="Make tensors inside it like its inputs, as `torch.zeros_like(x)` does",
        ) from error


def _call_module(module: nn.Module, member_tensors: TensorDict, inputs: tuple[Tensor, ...]) -> Any:
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        return functional_call(module, dict(member_tensors), tuple(x.clone() for x in inputs))


def _to_float64(tensor: Tensor) -> Tensor:
    """Convert floating and complex tensors to double precision; return all other tensors unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _eval_copy(module: nn.Module, device: torch.device) -> nn.Module:
    """Copy a module in eval mode to a device; return the copy. Tensors without memory (on the device "meta") stay
    without memory."""
    class_name = type(module).__name__
    try:
        module_copy = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        found = str(error).partition("\n")[0]
        raise UsageError(f"module {class_name}", expected="one that can be copied", found=found) from error
    module_copy.eval()
    module_copy._apply(lambda t: t if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    for name, layer in module_copy.named_modules():
        if layer.training:
            expected = "eval mode, without dropout and batch statistics"
            found = f"layer {name!r} still in training mode after .eval()"
            raise UsageError(f"module {class_name}", expected=expected, found=found)
    return module_copy


def _named_tensors(output: Any, path_in_output: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's output, with the path to each tensor in nested outputs as its name."""
    if isinstance(output, Tensor):
        yield path_in_output, output.double() if not output.is_complex() else torch.view_as_real(_to_float64(output))
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from _named_tensors(value, f"{path_in_output}.{key}")
    elif isinstance(output, tuple | list):
        for i, value in enumerate(output):
            yield from _named_tensors(value, f"{path_in_output}.{i}")
    elif output is not None:
        raise UsageError("outputs", expected="tensors, or tuples, lists and dicts of them", found=type(output).__name__)


class _OperationWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation of a run: whether it narrows the dtype, and whether it reads a tensor outside the state
    dict.

    A function that stores a reference to a parameter reads the same values whichever state dict is used, so any two
    state dicts would seem equal.

    Args:
        original, module: the caller's module, and the copy of it that is run.
    """

    def __init__(self, original: nn.Module, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = module
        self.narrow_layers: list[str] = []
        # Names of the layers that contain the current operation, from outer to inner.
        self.running_layers: list[str] = []
        self._hooks: list[Any] = []
        self._parameters = {
            id(t): n for m in (original, module) for n, t in m.state_dict(keep_vars=True).items() if not is_counter(n)
        }

    @property
    def layer(self) -> str:
        """Name of the layer that is running, or that failed."""
        return self.running_layers[-1] if self.running_layers else ""

    def __enter__(self) -> Any:
        for name, layer in self.module.named_modules():
            self._hooks.append(layer.register_forward_pre_hook(lambda *_, name=name: self.running_layers.append(name)))
            self._hooks.append(layer.register_forward_hook(lambda *_: (self.running_layers.pop(), None)[1]))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        argument_tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for name in (self._parameters[id(t)] for t in argument_tensors if id(t) in self._parameters):
            raise UsageError(
                f"tensor {name!r} of the module",
                expected="a tensor that the module looks up where its state dict keeps it",
                found="one that a function or list of its own holds on to",
                do="Read it as an attribute (`self.weight`) when forward runs",
            )
        result = func(*args, **(kwargs or {}))
        if any(t.dtype == torch.float64 for t in argument_tensors):
            result_tensors = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
            if any(t.is_floating_point() and t.dtype != torch.float64 for t in result_tensors):
                self.narrow_layers.append(self.layer)
        return result
