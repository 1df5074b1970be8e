"""Networks as torch modules: build them by name, fill them with a member's tensors, pack them as bytes, trace them.

`build_skeleton` builds a collection's module once, without memory for parameters (a skeleton), and checks it against
the layout of the stored tensors. `fill_skeleton` copies the skeleton for each member and puts the member's tensors into
the copy.

This is one file, because all of these functions treat a module as tensors with names.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from threading import Lock, get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats.layout import Layout, compare_shapes, is_counter, is_statistic, tensors_not_finite
from checkpoints_zoo.formats.text import nearest_name
from checkpoints_zoo.networks.architectures import ARCHITECTURES, is_from_config

TORCH_DTYPES = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# Errors that tracing may raise: errors of torch.fx, of code that can't handle its proxies, and of objects that can't be
# copied.
TRACE_ERRORS = (
    fx.proxy.TraceError, TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, NameError,
    AssertionError, LookupError,
)  # fmt: skip

# Descriptions may come from anyone: these bounds keep a damaged description from taking all memory.
_MAX_ARGUMENT_VALUE = 65_536
_MAX_LIST_LENGTH = 1_024

Build = Callable[[], nn.Module]
T = TypeVar("T")


def _is_whole_number(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_ARGUMENT_VALUE


_ARGUMENT_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": (f"a whole number in 1-{_MAX_ARGUMENT_VALUE}", _is_whole_number),
    "int | None": (
        f"a whole number in 1-{_MAX_ARGUMENT_VALUE}, or none",
        lambda value: value is None or _is_whole_number(value),
    ),
    "bool": ("true or false", lambda value: type(value) is bool),
    "tuple[int, ...]": (
        f"a list of at most {_MAX_LIST_LENGTH:,} whole numbers in 1-{_MAX_ARGUMENT_VALUE}",
        lambda value: (
            isinstance(value, (list, tuple))
            and len(value) <= _MAX_LIST_LENGTH
            and all(_is_whole_number(v) for v in value)
        ),
    ),
}


def build_architecture(name: str, /, **arguments: Any) -> nn.Module:
    """Build the named architecture, and return the module with its random initial parameters.

    Args:
        name: a key of `ARCHITECTURES`, or "transformers/CLASS".
        arguments: the function's arguments; a list, as in JSON, becomes a tuple. Of a class of transformers, the values
            of its config.json.

    Raises:
        UsageError: no architecture has this name, or an argument is unknown or wrong.

    >>> build_architecture("convnet", classes=10).fc2
    Linear(in_features=32, out_features=10, bias=True)
    """
    if name not in ARCHITECTURES:
        raise UsageError(
            f"architecture {name!r}",
            expected=f"one of {', '.join(ARCHITECTURES)}",
            found=repr(name),
            do=f"Use the nearest name, {nearest_name(name, ARCHITECTURES)!r}",
        )
    if is_from_config(name):
        return ARCHITECTURES[name](**arguments)
    known_arguments = inspect.signature(ARCHITECTURES[name]).parameters
    for argument, value in arguments.items():
        if argument not in known_arguments:
            raise UsageError(
                f"architecture {name!r}",
                expected=f"arguments among {', '.join(known_arguments)}",
                found=f"{argument!r}",
            )
        expected, fits = _ARGUMENT_TYPES[str(known_arguments[argument].annotation)]
        if not fits(value):
            raise UsageError(
                f"argument {argument!r} of architecture {name!r}", expected=expected, found=repr(value)[:80]
            )
    return ARCHITECTURES[name](
        **{argument: tuple(v) if isinstance(v, list) else v for argument, v in arguments.items()}
    )


def build_described(name: str, arguments: Mapping[str, Any], layout: Layout) -> nn.Module:
    """Build the architecture that a description names; return the module, which has the names of a layout's tensors
    even if its package has renamed them.

    Raises:
        UsageError: for the same reasons as in `build_architecture`.
    """
    module = build_architecture(name, **arguments)
    if not is_from_config(name):
        return module
    from checkpoints_zoo.networks.architectures.from_config import add_stored_names

    return add_stored_names(module, layout.shapes)


def build_skeleton(build: Build, layout: Layout, collection_name: str) -> nn.Module:
    """Build a module in eval mode whose parameters have shapes but no memory; return it.

    Args:
        build: function that builds the module.
        layout: layout of the members' tensors.
        collection_name: name of the collection, for errors.

    Raises:
        LayoutError: the module's tensors differ in name or shape from the tensors of the layout.
        UsageError: `build` is not a function, or does not return a module.
    """
    module = build_module(build, collection_name)
    state_dict = module.state_dict(keep_vars=True)
    # A tensor with several names may be stored under one of them.
    stored = with_shared_names(module, dict.fromkeys(layout.shapes))
    unstored_names = stored.keys() - layout.shapes.keys()
    shapes = {n: tuple(t.shape) for n, t in state_dict.items() if n not in unstored_names}
    try:
        check_tensors(shapes, layout, f"architecture for {collection_name}")
    except LayoutError as error:
        error.do = "Give the architecture with which these members were trained"
        raise
    # Tensors outside the state dict, such as position tables, need their values, so build the module with memory.
    if unsaved_tensors(module):
        module = build()
    return module.eval().requires_grad_(False)


def build_module(build: Build, collection_name: str) -> nn.Module:
    """Build a module, if possible without memory for its parameters; return it.

    Args:
        build: function that builds the module.
        collection_name: name of the collection, for errors.

    Raises:
        UsageError: `build` is not a function, or does not return a module.
    """
    module: object = build
    if not isinstance(module, nn.Module) and callable(module):
        try:
            with torch.device("meta"):
                module = build()
        except RuntimeError:  # The constructor of the module reads values of tensors, so build it with memory.
            module = build()
    if not isinstance(module, nn.Module) or module is build:
        raise UsageError(
            f"architecture for {collection_name}",
            expected="a function that returns a torch.nn.Module",
            found=repr(module).partition("\n")[0][:80],
        )
    check_module(module, f"architecture for {collection_name}")
    return module


def check_module(module: nn.Module, name_in_errors: str) -> None:
    """Check that a module is a network whose state dict contains only dense tensors.

    Args:
        module: any.
        name_in_errors: name of the module in error texts.

    Raises:
        UsageError: the module is a wrapper for several devices, a tensor has no shape or is not dense, or there is
            extra state.
    """
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        found = type(module).__name__
        raise UsageError(name_in_errors, expected="the network itself", found=found, do="Give its `.module`")
    check_state(module.state_dict(keep_vars=True), name_in_errors)


def check_state(state_dict: Mapping[str, Any], name_in_errors: str) -> None:
    """Check that a state dict contains only dense tensors.

    Raises:
        UsageError: a tensor has no shape (in a lazy layer) or is not dense, or a value is no tensor (extra state).
    """
    for name, tensor in state_dict.items():
        if nn.parameter.is_lazy(tensor):
            found, do = f"{name!r} without a shape", "Run the module once, so that its lazy layers get their sizes"
        elif not isinstance(tensor, Tensor):
            found, do = f"{type(tensor).__name__} under {name!r}", "Take it out: a member has tensors alone"
            if name.rpartition(".")[2] == "_extra_state":
                do = "Give a module without `get_extra_state`: a member has tensors alone"
        elif tensor.layout != torch.strided or tensor.is_quantized:
            found, do = (
                f"{name!r} of layout {tensor.layout}, {tensor.dtype}",
                "Give `.to_dense()` or `.dequantize()` of it",
            )
        else:
            continue
        raise UsageError(name_in_errors, expected="a state dict of dense tensors", found=found, do=do, tensor=name)


def unsaved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers that are not in its state dict."""
    saved_tensors = module.state_dict(keep_vars=True)
    return {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if n not in saved_tensors}


def fill_skeleton(module: nn.Module, state: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """Copy a skeleton and put a member's tensors into the copy without copying them; return it.

    Args:
        module: the skeleton from `build_skeleton`.
        state: tensors of one member by name, whose names and shapes were checked already. Counters become zero.
        device: device of the module's tensors outside the state dict.
    """
    state, replacement_of_id = widen_norms(with_shared_names(module, state)), {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if is_counter(name):
            replacement_of_id[id(tensor)] = torch.zeros((), dtype=torch.int64, device=device)
        else:
            replacement_of_id[id(tensor)] = (
                nn.Parameter(state[name]) if isinstance(tensor, nn.Parameter) else state[name]
            )
    dtype = input_dtype(state)
    for tensor in unsaved_tensors(module).values():
        copy_of_tensor = tensor.detach().clone().to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        replacement_of_id[id(tensor)] = (
            nn.Parameter(copy_of_tensor) if isinstance(tensor, nn.Parameter) else copy_of_tensor
        )
    member = _copy_module(module, replacement_of_id)
    return member if device.type == "cpu" else member.to(device)


_IMMUTABLE_TYPES = (
    bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type(torch.relu), type(build_skeleton),
)  # fmt: skip


def _copy_module(module: nn.Module, replacement_of_id: dict[int, Any]) -> nn.Module:
    """Copy a module like copy.deepcopy, in a fifth of its time; `replacement_of_id` maps the ids of objects to their
    replacements."""
    if id(module) in replacement_of_id or hasattr(module, "__deepcopy__"):
        deep_copy: nn.Module = copy.deepcopy(module, replacement_of_id)
        return deep_copy
    module_copy = replacement_of_id[id(module)] = object.__new__(type(module))
    for name, value in module.__dict__.items():
        if name == "_modules":
            value = {
                key: child if child is None else _copy_module(child, replacement_of_id) for key, child in value.items()
            }
        elif name in ("_parameters", "_buffers"):
            value = {
                key: replacement_of_id[id(t)] if id(t) in replacement_of_id else copy.deepcopy(t, replacement_of_id)
                for key, t in value.items()
            }
        elif type(value) in (dict, OrderedDict) and not value:
            value = type(value)()
        elif not (
            isinstance(value, _IMMUTABLE_TYPES)
            or (type(value) is tuple and all(isinstance(v, _IMMUTABLE_TYPES) for v in value))
        ):
            value = copy.deepcopy(value, replacement_of_id)
        module_copy.__dict__[name] = value
    return module_copy


def first_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a state dict to the first name of the same tensor, which is the name in `named_parameters()`;
    return the map.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> net[1].weight = net[0].weight
    >>> first_names(net)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in module.state_dict(keep_vars=True).items()}


def last_names(module: nn.Module) -> dict[str, str]:
    """Map each name of a state dict to the last name of the same tensor; return the map.

    If several names share one tensor, the last one wins, as in `load_state_dict(strict=True)`.
    """
    states = module.state_dict(keep_vars=True)
    last = {id(tensor): name for name, tensor in states.items()}
    return {name: last[id(tensor)] for name, tensor in states.items()}


def with_shared_names(module: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """Give the other names of a tensor that has several names, such as a tied output layer, the value of the name that
    has one; return name -> value.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> net[1].weight = net[0].weight
    >>> with_shared_names(net, {"0.weight": 5})
    {'0.weight': 5, '1.weight': 5}
    """
    first_name_of = first_names(module)
    value_of_first = {first_name_of[name]: value for name, value in values.items() if name in first_name_of}
    missing = (name for name, first in first_name_of.items() if name not in values and first in value_of_first)
    return {**values, **{name: value_of_first[first_name_of[name]] for name in missing}}


def superseded_names(module: nn.Module) -> set[str]:
    """Return the names of a state dict whose tensor has a later name too; values stored under these names have no
    effect."""
    return {name for name, last in last_names(module).items() if name != last}


def shared_names(module: nn.Module) -> set[str]:
    """Return the names of a state dict whose tensor has more than one name."""
    first_name_of = first_names(module)
    use_counts = Counter(first_name_of.values())
    return {name for name in first_name_of if use_counts[first_name_of[name]] > 1}


def layout_of(state: Mapping[str, Tensor], dtype: torch.dtype) -> Layout:
    """Lay out a state dict for storage: weights in `dtype`, statistics in float32, other tensors as they are.

    Args:
        state: tensors of one member by name, in the order of its module; `num_batches_tracked` becomes a counter.
        dtype: dtype of the stored weights.

    Raises:
        UsageError: the format can't hold the dtype of a tensor.
    """
    check_state(state, "state dict")
    stored_tensors, counters = [], []
    for name, tensor in state.items():
        stored_dtype = tensor.dtype
        if tensor.is_floating_point():
            stored_dtype = torch.float32 if is_statistic(name) else dtype
        if stored_dtype not in DTYPE_NAMES:
            raise UsageError(f"tensor {name!r}", expected=f"a dtype among {', '.join(DTYPE_NAMES.values())}",
                             found=str(stored_dtype), tensor=name)  # fmt: skip
        if is_counter(name):
            counters.append(name)
        else:
            stored_tensors.append((name, DTYPE_NAMES[stored_dtype], tuple(tensor.shape)))
    return Layout.of(stored_tensors, counters)


def pack_member(state: Mapping[str, Tensor], layout: Layout) -> bytearray:
    """Pack a member's tensors into bytes as a layout says, rounded to its dtypes; return the bytes, padding included.

    Args:
        state: tensors of one member by name, in any memory format.
        layout: layout of the resulting bytes.

    Raises:
        LayoutError: tensors are missing, extra, or have another shape.
        DamagedError: a value is not finite, or is not finite after rounding.
    """
    check_tensors({n: tuple(t.shape) for n, t in state.items()}, layout, "state dict")
    member = bytearray(layout.nbytes)
    for t in layout.tensors:
        if t.nbytes:
            target = torch.frombuffer(member, dtype=TORCH_DTYPES[t.dtype], count=state[t.name].numel(), offset=t.offset)
            target.copy_(state[t.name].detach().reshape(-1))
    if nonfinite_names := tensors_not_finite(layout, member):
        name = nonfinite_names[0]
        raise DamagedError(
            f"tensor {name!r}",
            expected=f"values that are finite as {next(t.dtype for t in layout.tensors if t.name == name)}",
            found="infinite ones or NaN",
            do="Leave the member out, or store it in a wider dtype",
            tensor=name,
        )
    return member


def check_tensors(shapes_by_name: Mapping[str, tuple[int, ...]], layout: Layout, name_in_errors: str) -> None:
    """Check that tensors have the names and shapes of a layout; counters are ignored.

    Raises:
        LayoutError: some tensors are missing, extra or have another shape; the error names them.
    """
    expected_shapes = {n: s for n, s in layout.shapes.items() if not is_counter(n)}
    shapes_by_name = {n: s for n, s in shapes_by_name.items() if not is_counter(n)}
    differing_names, phrase = compare_shapes(shapes_by_name, expected_shapes)
    if differing_names:
        raise LayoutError(
            name_in_errors,
            expected=f"the layout's {len(expected_shapes)} tensors by name and shape",
            found=phrase,
            tensor=differing_names[0],
        )


def norm_tensor_names(tensor_names: Iterable[str]) -> set[str]:
    """Return the names of the tensors of all layers with running statistics; these layers compute in float32 or
    wider."""
    tensor_names = list(tensor_names)
    layers = {name.rpartition(".")[0] for name in tensor_names if is_statistic(name)}
    return {name for name in tensor_names if name.rpartition(".")[0] in layers}


def input_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype that inputs of a module with the given tensors must have: the dtype of its weights outside
    norms."""
    norm_names = norm_tensor_names(tensors)
    float_names = [n for n, t in tensors.items() if t.is_floating_point()]
    return (
        tensors[next((n for n in float_names if n not in norm_names), float_names[0])].dtype
        if float_names
        else torch.float32
    )


def widen_norms(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors of layers with running statistics to the dtype in which these layers compute; return all
    tensors.

    These layers compute in the dtype of the inputs, or in float32 if the inputs are in half precision: torch allows no
        other combination.
    """
    norm_names, dtype = norm_tensor_names(tensors), norm_dtype(input_dtype(tensors))
    return {n: t.to(dtype) if n in norm_names and t.is_floating_point() else t for n, t in tensors.items()}


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which layers with running statistics compute, given the dtype of the inputs."""
    return dtype if dtype.itemsize >= 4 else torch.float32


_trace_lock = Lock()


class Tracer(fx.Tracer):
    """A torch.fx tracer that records the operations of a module, with its parameters and buffers by name."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()

    def record_graph(self, module: nn.Module) -> fx.Graph:
        """Trace a module and return the graph of its operations.

        Raises:
            One of the errors in TRACE_ERRORS: the module can't be traced.
        """
        with _trace_lock:
            return self.trace(module)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        return self.record_call(m, forward, args, kwargs)

    def record_call(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record the call of a layer of the traced module; return the proxy of its result."""
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, parameter_proxy_cache) if get_ident() == self.thread else attr_val
