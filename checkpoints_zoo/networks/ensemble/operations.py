"""Rules of operations: the steps that a call of a function or method adds to a program.

This is one file, because `add_call` chooses among the rules.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from checkpoints_zoo.networks.ensemble import batch_layout, program
from checkpoints_zoo.networks.ensemble.program import Compute
from checkpoints_zoo.networks.ensemble.program_builder import ProgramBuilder, are_constants, flatten_nested
from checkpoints_zoo.networks.ensemble.traced import Narrow, TracedValue, UnknownOperation, keep_axes, require

_FUNCTION_NAMESPACES: tuple[Any, ...] = (torch, F, operator, builtins)
_COMPARISONS = (operator.eq, operator.ne, operator.ge, operator.gt, operator.le, operator.lt)
_IN_PLACE_OPERATORS = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}


def add_call(builder: ProgramBuilder, node: fx.Node) -> Any:
    """Add the steps for a call of a function or method; return the TracedValue of its result, or a constant.

    Raises:
        UnknownOperation: the function has no known step.
    """
    function_name = _function_name(node)
    args, options = builder.replace_nodes(node.args), {k: builder.replace_nodes(v) for k, v in node.kwargs.items()}
    first_argument = args[0] if args else None
    if not any(isinstance(a, TracedValue) for a in flatten_nested((args, *options.values()))):
        return _evaluate_constant(node, function_name, args)
    base_name = _IN_PLACE_OPERATORS.get(function_name, function_name.removesuffix("_"))
    overwritten_value = first_argument if base_name != function_name else None
    if base_name in program.IN_PLACE_FUNCTIONS and options.pop("inplace", False):
        overwritten_value = first_argument
    if base_name in program.BINARY_FUNCTIONS and len(args) == 2 and not options:
        return _add_binary(builder, base_name, args, overwritten_value)
    if function_name in ("cat", "concat") and isinstance(first_argument, list | tuple):
        return _add_concatenation(builder, first_argument, _arguments_by_name(("dim",), args[1:]) | options)
    if function_name in batch_layout.FUNCTIONS_OF_ACTIVATIONS:
        require(are_constants(options.values()) and not options.get("dropout_p"))
        operands = [builder.in_batch_layout(_require_activation(v)) for v in args]
        require(len({v.rank for v in operands}) == 1 and operands[0].rank > 2)
        compute = batch_layout.call_on_activations(function_name, options)
        rank = operands[0].rank
        # Each row of the first matrix, or query, is computed on its own; but a mask has an axis of queries too.
        separate_axes = (rank - 2,) if not any(options.values()) else ()
        return builder.add_step(compute, tuple(operands), rank, batch_axis=0, operand_axes=keep_axes(separate_axes))
    if not isinstance(first_argument, TracedValue):
        raise UnknownOperation
    if first_argument.kind == "shape" and function_name == "getitem":
        require(type(args[1]) is int)
        return TracedValue("extent", source_value=first_argument.source_value, dim=args[1])
    if first_argument.kind == "extent" and node.target in _COMPARISONS:
        # Before a program runs inputs of a new shape, the module runs them too, and checks such conditions itself.
        source = _require_activation(first_argument.source_value)
        require(type(args[1]) is int and first_argument.dim % source.rank != (source.batch_axis or 0))
        return TracedValue("condition")
    if first_argument.kind == "condition":
        require(function_name == "_assert")
        return None
    if function_name == "layer_norm":
        return _add_layer_norm(builder, _require_activation(first_argument), args[1:], options)
    if first_argument.kind == "parts" and function_name == "getitem":
        return _add_part(builder, first_argument, args[1])
    if first_argument.kind == "parameter" and function_name == "expand" and not options:
        return _expand_parameter(builder, first_argument, _sizes(args[1:]))
    if first_argument.kind == "parameter":
        return _reshape_parameter(function_name, first_argument, args[1:], options)
    return _add_activation(
        builder, node, base_name, _require_activation(first_argument), args[1:], options, overwritten_value
    )


def _function_name(node: fx.Node) -> str:
    """Return the name of a function or method; refuse functions that are not torch's or Python's."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    if any(node.target is pool for pool in program.POOL_RANKS):
        return "pool"
    require(any(getattr(namespace, name, None) is node.target for namespace in _FUNCTION_NAMESPACES))
    return str(name)


def _require_activation(value: Any) -> TracedValue:
    if not isinstance(value, TracedValue) or not value.is_activation:
        raise UnknownOperation
    return value


def _evaluate_constant(node: fx.Node, function_name: str, args: tuple[Any, ...]) -> Any:
    """Evaluate a call without tensors, such as a comparison of ranks; return its result."""
    if node.target in _COMPARISONS and are_constants(args):
        return node.target(*args)
    require(function_name == "_assert" and args[0] is True)
    return None


def _add_activation(
    builder: ProgramBuilder,
    node: fx.Node,
    function_name: str,
    x: TracedValue,
    args: tuple[Any, ...],
    options: dict[str, Any],
    overwritten_value: TracedValue | None,
) -> Any:
    is_constant = are_constants((args, *options.values()))
    if function_name in program.POINTWISE_FUNCTIONS and is_constant:
        can_overwrite = function_name in program.IN_PLACE_FUNCTIONS
        require(
            not can_overwrite or not any(isinstance(a, bool) for a in args)
        )  # A boolean might be the argument `inplace`.
        shares = x if function_name in program.MAY_RETURN_INPUT else None
        return builder.add_step(
            program.Pointwise(function_name, args, options),
            (x,),
            x.rank,
            batch_axis=x.batch_axis,
            shares_memory_with=shares,
            can_overwrite=can_overwrite,
            overwritten_value=overwritten_value,
            operand_axes=keep_axes(range(x.rank)),
        )
    require(overwritten_value is None)
    if function_name in program.REDUCTION_FUNCTIONS and is_constant:
        return _add_reduction(builder, function_name, x, args, options)
    if function_name in ("flatten", "view", "reshape") and _flattens_inputs(function_name, x, args, options):
        return _add_flatten(builder, function_name, x, args, options)
    if function_name in ("view", "reshape"):
        require(not options)
        return _add_reshape(builder, builder.in_batch_layout(x), _sizes(args))
    if function_name in batch_layout.MOVES and is_constant:
        names = batch_layout.MOVES[function_name]
        arguments = _arguments_by_name(names, (_sizes(args),) if function_name == "permute" else args) | options
        # torch.nn.functional.softmax is recorded with _stacklevel=3 and dtype=None.
        arguments = {n: v for n, v in arguments.items() if n != "_stacklevel" and v is not None}
        return _add_move(builder, function_name, x, arguments)
    if function_name == "getattr" and args == ("mT",):
        return _add_move(builder, "transpose", x, {"dim0": -2, "dim1": -1})
    if function_name == "getitem":
        return _add_selection(builder, builder.in_batch_layout(x), args[0])
    if function_name in ("getattr", "size", "dim", "ndimension"):
        require(not options)
        return _shape_rank_or_dtype(function_name, x, args)
    if function_name == "to":
        return _add_cast(builder, x, args, options)
    if function_name == "expand":
        require(len(args) == 1 and isinstance(args[0], TracedValue) and args[0].kind == "shape" and not options)
        target = _require_activation(args[0].source_value)
        require((target.rank, target.kind, target.batch_axis) == (x.rank, x.kind, x.batch_axis))
        value = builder.add_step(
            program.expand_like, (x, target), x.rank, batch_axis=x.batch_axis, shares_memory_with=x
        )
        value.shares_addresses = True
        return value
    if function_name == "dropout":
        require(is_constant and (args[1] if len(args) > 1 else options.get("training", True)) is False)
        return builder.add_step(program.return_input, (x,), x.rank, batch_axis=x.batch_axis, shares_memory_with=x)
    require(function_name == "pool" and is_constant and program.POOL_RANKS[node.target] == x.rank)  # type: ignore[index]
    require(not options.get("return_indices", False) and len(args) < 6 and x.batch_axis in (None, 0))
    compute = program.call_function(node.target, args, options)  # type: ignore[arg-type]
    return builder.add_step(compute, (x,), x.rank, batch_axis=x.batch_axis)


def _flattens_inputs(function_name: str, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Say whether a call flattens each input whole, while the members lie along the channels."""
    if x.batch_axis is not None:
        return False
    if function_name == "flatten":
        arguments = {"start_dim": 0, "end_dim": -1} | _arguments_by_name(("start_dim", "end_dim"), args) | options
        return arguments["start_dim"] == 1 and arguments["end_dim"] in (-1, x.rank - 1)
    return len(_sizes(args)) == 2


def _sizes(args: tuple[Any, ...]) -> Sequence[Any]:
    """Return sizes or axes that a method takes one by one, or as one list."""
    return args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args


def _add_move(builder: ProgramBuilder, function_name: str, x: TracedValue, arguments: dict[str, Any]) -> TracedValue:
    """Add a step that moves the values of each input, or a softmax of each input."""
    require(set(arguments) <= set(batch_layout.MOVES[function_name]))
    x = builder.in_batch_layout(x) if x.batch_axis is None else x
    try:
        rank, batch_axis = batch_layout.rank_and_batch_axis(function_name, arguments, x.rank, x.batch_axis or 0)
    except ValueError as error:
        raise UnknownOperation from error
    function = batch_layout.softmax if function_name == "softmax" else getattr(Tensor, function_name)
    compute = program.call_function(function, (), arguments)
    if function_name in batch_layout.SPLITS:
        return TracedValue(
            "parts", rank, batch_axis=batch_axis, source_value=x, arrange=lambda tensor: compute(1, -1, tensor)
        )
    return builder.add_step(
        compute, (x,), rank, batch_axis=batch_axis, shares_memory_with=None if function_name == "softmax" else x,
        operand_axes=batch_layout.axes_before(function_name, arguments, x.rank),
    )  # fmt: skip


def _add_layer_norm(
    builder: ProgramBuilder, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]
) -> TracedValue:
    """Add the layer norm that torch.nn.functional.layer_norm calls."""
    arguments: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5}
    arguments |= _arguments_by_name(("normalized_shape", "weight", "bias", "eps"), args) | options
    affine_values = []
    for parameter in (arguments["weight"], arguments["bias"]):
        require(parameter is None or (parameter.kind == "parameter" and parameter.cast is None))
        affine_values.append(
            builder.add_parameter(None, lambda t: t)
            if parameter is None
            else builder.add_parameter(builder.tensor_of(parameter), parameter.arrange)
        )
    return builder.add_layer_norm(x, arguments["normalized_shape"], affine_values, arguments["eps"])


def _add_part(builder: ProgramBuilder, parts: TracedValue, index: Any) -> TracedValue:
    """Add a step that takes one of the parts of an activation."""
    x = _require_activation(parts.source_value)
    require(type(index) is int)
    return builder.add_step(
        lambda member_count, overwrite_index, tensor: parts.arrange(tensor)[index], (x,), parts.rank,
        batch_axis=parts.batch_axis, shares_memory_with=x,
    )  # fmt: skip


def _add_selection(builder: ProgramBuilder, x: TracedValue, index: Any) -> TracedValue:
    """Add a step that selects the same values of each input, as `x[:, 0]` does."""
    indices = index if isinstance(index, tuple) else (index,)
    require(
        indices
        and indices[0] in (slice(None), ...)
        and all(type(i) is int or isinstance(i, slice) for i in indices[1:])
    )
    require(len(indices) <= x.rank)
    if len(indices) == 2 and type(indices[1]) is int and indices[0] == slice(None):
        x = builder.add_step(Narrow(1, indices[1]), (x,), x.rank, batch_axis=0, shares_memory_with=x)
        index = indices = (slice(None), 0)
    rank = x.rank - sum(type(i) is int for i in indices)
    return builder.add_step(
        program.call_function(operator.getitem, (index,), {}), (x,), rank, batch_axis=0, shares_memory_with=x
    )


def _add_reshape(builder: ProgramBuilder, x: TracedValue, sizes: Sequence[Any]) -> TracedValue:
    """Add a step that reshapes each input: the first size is that of the batch, or -1."""
    operands, lengths = [x], list[int | batch_layout.Length]()
    for axis, size in enumerate(sizes):
        if not isinstance(size, TracedValue):
            require(type(size) is int and (axis > 0 or size == -1))
            lengths.append(size)
            continue
        require(size.kind == "extent")
        source = _require_activation(size.source_value)
        dim = size.dim % source.rank
        is_batch = dim == (source.batch_axis or 0)
        require(is_batch == (axis == 0) and (is_batch or source.batch_axis is not None or source.kind == "shared"))
        lengths.append(batch_layout.Length(len(operands), dim, is_batch and source.batch_axis is None))
        operands.append(source)
    return builder.add_step(
        batch_layout.reshape(lengths), tuple(operands), len(sizes), batch_axis=0, shares_memory_with=x
    )


def _add_concatenation(builder: ProgramBuilder, parts: Sequence[Any], arguments: dict[str, Any]) -> TracedValue:
    values = [_require_activation(v) for v in parts]
    rank, dim = values[0].rank, arguments.get("dim", 0)
    require(set(arguments) <= {"dim"} and type(dim) is int and all(v.rank == rank for v in values) and rank > 1)
    if dim == 1 and all(v.batch_axis is None for v in values):
        return builder.add_step(program.concatenate, tuple(builder.repeat_if_shared(v) for v in values), rank)
    require(dim % rank > 0)
    return builder.add_step(
        batch_layout.concatenate(dim), tuple(builder.in_batch_layout(v) for v in values), rank, batch_axis=0
    )


def _expand_parameter(builder: ProgramBuilder, parameter: TracedValue, sizes: Sequence[Any]) -> TracedValue:
    """Add a step that repeats a parameter (1, …) for each input."""
    require(sizes)
    first, *others = sizes
    require(isinstance(first, TracedValue) and first.kind == "extent" and all(type(n) is int for n in others))
    target = _require_activation(first.source_value)
    require(first.dim % target.rank == (target.batch_axis or 0) and target.batch_axis in (None, 0))
    require(len(sizes) == parameter.rank)
    aligned = _align_in_batch_layout(builder, parameter, parameter.rank)
    value = builder.add_step(
        batch_layout.expand_parameter(others, target.batch_axis is not None), (aligned, target), parameter.rank,
        result_kind="member", batch_axis=0, shares_memory_with=aligned,
    )  # fmt: skip
    value.shares_addresses = True
    return value


def _align_in_batch_layout(builder: ProgramBuilder, parameter: TracedValue, rank: int) -> TracedValue:
    """Reserve a value for a parameter that is the same for all inputs, in the shape (member, 1, …) of activations whose
    batch axis is split; return its TracedValue."""
    arrange, missing = parameter.arrange, rank - parameter.rank

    def align(stack: Tensor) -> Tensor:
        tensor: Tensor = arrange(stack)
        return tensor.reshape(len(tensor), *[1] * missing, *tensor.shape[1:])

    tensor = builder.tensor_of(parameter)
    require(missing > 0 or (missing == 0 and align(tensor[None]).shape[1] == 1))
    require(parameter.cast is None)
    return builder.add_parameter(tensor, align)


def _add_binary(
    builder: ProgramBuilder, function_name: str, operand_pair: Sequence[Any], overwritten_value: TracedValue | None
) -> TracedValue:
    values = [v for v in operand_pair if isinstance(v, TracedValue)]
    activations = [v for v in values if v.is_activation]
    require(activations and all(v.is_activation or v.kind == "parameter" for v in values))
    require(all(isinstance(v, TracedValue) or type(v) in (int, float) for v in operand_pair))
    require(
        function_name not in ("max", "min", "maximum", "minimum") or len(values) == 2
    )  # With a single tensor, max and min are reductions.
    if not isinstance(operand_pair[0], TracedValue):
        require(function_name in ("add", "mul"))
        operand_pair = operand_pair[::-1]
    rank = activations[0].rank
    require(all(v.rank == rank for v in activations) and rank > 1)
    if any(v.batch_axis is not None for v in activations):
        return _add_binary_in_batch_layout(builder, function_name, operand_pair, overwritten_value)
    # Whether all operands are computed from the inputs alone, and so are equal for all members.
    are_same_kind = len({v.kind for v in values}) == 1
    operands = [
        v if are_same_kind else builder.repeat_if_shared(v) if v.is_activation else _align_parameter(builder, v, rank)
        for v in operand_pair
        if isinstance(v, TracedValue)
    ]
    number = None if isinstance(operand_pair[1], TracedValue) else operand_pair[1]
    return builder.add_step(
        program.Binary(function_name, number),
        tuple(operands),
        rank,
        can_overwrite=True,
        overwritten_value=overwritten_value,
    )


def _add_binary_in_batch_layout(
    builder: ProgramBuilder, function_name: str, operand_pair: Sequence[Any], overwritten_value: TracedValue | None
) -> TracedValue:
    first, second = operand_pair
    axis, rank = next((v.batch_axis, v.rank) for v in operand_pair if v.is_activation)
    compute: Compute
    if not isinstance(second, TracedValue):
        compute, operands = program.Binary(function_name, second), [first]
    elif first.is_activation and second.is_activation:
        if first.batch_axis != second.batch_axis:
            first, second = builder.in_batch_layout(first), builder.in_batch_layout(second)
        compute, operands, axis = program.Binary(function_name, None), [first, second], first.batch_axis
    else:
        operands = [
            builder.in_batch_layout(v) if v.is_activation else _align_in_batch_layout(builder, v, rank)
            for v in operand_pair
        ]
        compute = batch_layout.BinaryWithParameter(function_name, 0 if second.is_activation else 1)
    separate_axes = () if isinstance(compute, batch_layout.BinaryWithParameter) else range(rank)
    return builder.add_step(
        compute, tuple(operands), rank, batch_axis=axis, can_overwrite=True, overwritten_value=overwritten_value,
        operand_axes=keep_axes(separate_axes, range(len(operands))),
    )  # fmt: skip


def _align_parameter(builder: ProgramBuilder, parameter: TracedValue, rank: int) -> TracedValue:
    """Reserve a value for a parameter in the shape of activations, (1, member·channel, …); return its TracedValue."""
    arrange = parameter.arrange

    def align(stack: Tensor) -> Tensor:
        tensor: Tensor = arrange(stack)
        tensor = tensor.reshape(len(tensor), *[1] * (rank - tensor.dim() + 1), *tensor.shape[1:])
        return tensor.transpose(0, 1).flatten(1, 2)

    tensor = builder.tensor_of(parameter)
    try:
        trial_result = align(tensor.new_empty((2, *tensor.shape), device="meta"))
    except RuntimeError as error:  # The shape of the parameter does not fit.
        raise UnknownOperation from error
    require(parameter.rank <= rank and trial_result.dim() == rank and trial_result.shape[0] == 1)
    aligned = builder.add_parameter(tensor, align)
    return (
        aligned
        if parameter.cast is None
        else builder.add_step(program.cast_like, (aligned, parameter.cast), rank, result_kind="parameter")
    )


def _reshape_parameter(
    function_name: str, parameter: TracedValue, args: tuple[Any, ...], options: dict[str, Any]
) -> TracedValue:
    """Return a parameter with another shape, or with the dtype of an activation."""
    arrange = parameter.arrange
    if function_name == "to":
        (new_dtype,) = (*args, *options.values()) if len(args) + len(options) == 1 else (None,)
        require(isinstance(new_dtype, TracedValue) and new_dtype.kind == "dtype" and set(options) <= {"dtype"})
        return TracedValue(
            "parameter", parameter.rank, name=parameter.name, arrange=arrange, cast=new_dtype.source_value
        )
    sizes = _sizes(args)
    require(function_name in ("view", "reshape") and not options and all(type(n) is int for n in sizes))
    return TracedValue(
        "parameter",
        len(sizes),
        name=parameter.name,
        arrange=lambda stack: arrange(stack).reshape(len(stack), *sizes),
        cast=parameter.cast,
    )


def _arguments_by_name(parameter_names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the positional arguments of a call as name -> value."""
    require(len(args) <= len(parameter_names))
    return dict(zip(parameter_names[: len(args)], args, strict=True))


def _add_reduction(
    builder: ProgramBuilder, function_name: str, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]
) -> TracedValue:
    arguments = _arguments_by_name(("dim", "keepdim"), args) | options
    require(set(arguments) <= {"dim", "keepdim"} and arguments.get("dim") is not None)
    dims = arguments["dim"] if isinstance(arguments["dim"], list | tuple) else (arguments["dim"],)
    axes = tuple(sorted(d % x.rank for d in dims))
    require(axes and axes[0] > 0)
    if axes[0] == 1 or x.batch_axis is not None:
        x = builder.in_batch_layout(x)
    keep_dims = bool(arguments.get("keepdim", False))
    rank = x.rank if keep_dims else x.rank - len(axes)
    return builder.add_step(program.reduce_axes(function_name, axes, keep_dims), (x,), rank, batch_axis=x.batch_axis)


def _add_flatten(
    builder: ProgramBuilder, function_name: str, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]
) -> TracedValue:
    """Flatten all axes after the batch axis; a view must have the sizes (batch, -1), or (-1, a number)."""
    flat_width = 0
    require(x.rank > 1)
    if function_name == "flatten":
        arguments = _arguments_by_name(("start_dim", "end_dim"), args) | options
        require(arguments in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1}))
    else:
        sizes = _sizes(args)
        require(len(sizes) == 2 and not options)
        if isinstance(sizes[0], TracedValue):
            require(sizes[0].kind == "extent" and sizes[0].dim == 0 and sizes[1] == -1)
            require(not _require_activation(sizes[0].source_value).batch_axis)
        else:
            require(sizes[0] == -1 and type(sizes[1]) is int and sizes[1] > 0)
            flat_width = sizes[1]
    return builder.add_step(
        program.flatten_to(flat_width) if flat_width else program.flatten, (x,), 2, shares_memory_with=x
    )


def _shape_rank_or_dtype(function_name: str, x: TracedValue, args: tuple[Any, ...]) -> Any:
    if function_name == "size" and args:
        require(type(args[0]) is int)
        return TracedValue("extent", source_value=x, dim=args[0])
    if function_name in ("dim", "ndimension") or args == ("ndim",):
        return x.rank
    require(function_name == "size" or args in (("shape",), ("dtype",)))
    return TracedValue("dtype" if args == ("dtype",) else "shape", source_value=x)


def _add_cast(builder: ProgramBuilder, x: TracedValue, args: tuple[Any, ...], options: dict[str, Any]) -> TracedValue:
    (new_dtype,) = (*args, *options.values()) if len(args) + len(options) == 1 else (None,)
    require(set(options) <= {"dtype"})
    if isinstance(new_dtype, torch.dtype):
        compute = program.call_function(Tensor.to, (new_dtype,), {})
        return builder.add_step(compute, (x,), x.rank, batch_axis=x.batch_axis, shares_memory_with=x)
    require(isinstance(new_dtype, TracedValue) and new_dtype.kind == "dtype")
    return builder.add_step(
        program.cast_like, (x, _require_activation(new_dtype.source_value)), x.rank,
        batch_axis=x.batch_axis, shares_memory_with=x,
    )  # fmt: skip
