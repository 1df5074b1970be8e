"""Trace a recorded network with labels: one rule for each operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.attention.frames import FIXED, ONE, ZERO, Frames, Limit
from checkpoints_zoo.symmetry.attention.graph import Graph
from checkpoints_zoo.symmetry.attention.labels import Core, Gain, Label, Parameter, Record, fixed, varies

Rule = Callable[..., Any]


class Trace:
    """The labels of a recorded network, with the frames of its coordinates.

    Attributes:
        frames: all coordinates.
        records: the axes of parameters that coordinates act on.
        cores: the attentions, in order.
        labels: operation -> its label, a parameter, or the value of a constant.
        roles: name of a vector -> "gain" if it multiplies an activation, "offset" if a norm adds it.
    """

    def __init__(self, graph: Graph, shapes: dict[str, tuple[int, ...]]) -> None:
        self.graph, self.shapes = graph, shapes
        self.frames = Frames()
        self.records: list[Record] = []
        self.cores: list[Core] = []
        self.labels: dict[fx.Node, Any] = {}
        self.roles: dict[str, str] = {}
        self._axes: dict[tuple[Any, ...], list[Record]] = {}  # Part of a parameter -> the records of its axes.
        self._value_records: dict[str, Record] = {}  # Name of a parameter -> its record as an activation.
        self._values: dict[str, Label] = {}  # Name of a parameter -> its label as an activation.
        self._outputs: dict[int, list[Record]] = {}  # Source -> the records of the layer that wrote it, if unused.
        self._gained: dict[tuple[int, ...], int] = {}  # (coordinate, gain) -> coordinate of their product.
        self.node: fx.Node = graph.nodes[0]
        for self.node in graph.nodes:
            self.labels[self.node] = self._run(self.node)

    # What every rule uses.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result of the present operation."""
        return tuple(self.node.meta["val"].shape)

    @property
    def layer(self) -> str:
        """The path of the layer that runs the present operation."""
        stack = self.node.meta.get("nn_module_stack") or {"": ("", None)}
        return str(list(stack.values())[-1][0])

    def refuse(self, reason: str) -> NoReturn:
        """Raise an error that names the present operation."""
        where = f" in layer {self.layer!r}" if self.layer else ""
        raise SymmetryError(
            f"operation {operation_name(self.node)}{where}",
            expected="one whose effect on symmetries is known",
            found=reason,
            do="Give a network without it; its symmetries can't be derived",
        )

    def axes(self, part: Parameter, name: str = "") -> list[Record]:
        """Return the records of all axes of a part of a parameter; the first use opens them."""
        key = (part.tensor, tuple(part.view.shape), part.view.stride(), part.view.storage_offset())
        if key not in self._axes:
            label = self._values.get(part.tensor)
            clash = [k for k in self._axes if k[0] == part.tensor and _overlap(k, key)]
            if clash or label is not None:
                self.refuse(f"parameter {part.tensor!r} in several parts that overlap")
            self._axes[key] = [self._record(part, axis) for axis in range(part.view.ndim)]
        return self._axes[key]

    def _record(self, part: Parameter, axis: int) -> Record:
        view = part.view
        layer = part.tensor.rpartition(".")[0] or part.tensor
        record = Record(
            part.tensor, tuple(view.shape), view.stride(), int(view.storage_offset()), axis,
            self.frames.new(view.shape[axis], layer),
        )  # fmt: skip
        self.records.append(record)
        return record

    def value(self, operand: Any) -> Label:
        """Return an operand as a label; a parameter becomes an activation with coordinates on its last long axis."""
        if isinstance(operand, Label):
            return operand
        if isinstance(operand, Tensor):
            is_zero = operand.numel() > 0 and not bool(operand.any())
            return Label(torch.full((), ZERO if is_zero else FIXED).expand(operand.shape))
        if isinstance(operand, Parameter):
            if operand.tensor not in self._values:
                if any(key[0] == operand.tensor for key in self._axes):
                    self.refuse(f"parameter {operand.tensor!r}, which is a kernel elsewhere")
                shape = self.shapes[operand.tensor]
                whole = Parameter(operand.tensor, torch.empty(shape, device="meta"))
                axis = max((i for i, size in enumerate(shape) if size > 1), default=len(shape) - 1)
                if not shape:
                    return fixed(())
                record = self._record(whole, axis)
                back = [1] * (len(shape) - 1 - axis)
                coordinates = record.coordinates.reshape(-1, *back).expand(shape).contiguous()
                self._values[operand.tensor] = Label(coordinates)
                self._value_records[operand.tensor] = record
            view = operand.view
            whole_coordinates = self._values[operand.tensor].coordinates
            return Label(whole_coordinates.as_strided(view.shape, view.stride(), view.storage_offset()).clone())
        return fixed(())

    # Uses that limit frames.

    def one(self, label: Label) -> Label:
        """Let only permutations act on an activation; return its plain label."""
        if label.squares or label.factor is not None or label.more:
            for coordinates in (label.coordinates, *(term[0] for term in label.more)):
                self.frames.claim_units(coordinates, ONE)
            if label.more:
                self.frames.limit(label.coordinates, Limit.PINNED)
                for coordinates, _ in label.more:
                    self.frames.limit(coordinates, Limit.PINNED)
        label = self.without_gain(replace(label, factor=None, more=(), squares=False))
        self.frames.claim_units(label.coordinates, ONE)
        return label

    def plain(self, label: Label) -> Label:
        """Return a label without factors, mixtures and gain: what these leave of the symmetries stays."""
        if label.squares or label.more:
            return self.one(label)
        if label.factor is not None:
            axes = [i for i in range(label.coordinates.ndim) if varies(label.coordinates, i)]
            factor = label.factor.expand(label.coordinates.shape)
            if any(bool((factor != factor.narrow(i, 0, 1)).any()) for i in axes):
                return self.one(label)
            label = replace(label, factor=None)
        return self.without_gain(label)

    def without_gain(self, label: Label) -> Label:
        """Let a gain be part of the frame: only permutations and scales act on the activation."""
        if label.gain is None:
            return label
        self.frames.claim_units(label.coordinates, ONE)
        self.frames.claim_units(label.gain.coordinates, Limit.NONE)
        self.frames.tie(label.coordinates, label.gain.coordinates)
        # Each entry stays a coordinate of its own, also where one gain multiplies several heads.
        pairs = torch.stack([label.coordinates, label.gain.coordinates.expand(label.coordinates.shape)])
        pairs, entries = pairs.flatten(1).unique(dim=1, return_inverse=True)
        new = [pair for pair in map(tuple, pairs.T.tolist()) if pair not in self._gained]
        if new:
            before, gains = torch.tensor(new).T
            after = self.frames.new(len(new), self.frames.names[self.frames.source[int(gains[-1])]])
            self.frames.join(after, gains, place=False)
            self.frames.join_places(after, before)
            self._gained |= dict(zip(new, after.tolist(), strict=True))
        after = torch.tensor([self._gained[pair] for pair in map(tuple, pairs.T.tolist())])
        return replace(label, coordinates=after[entries].reshape(label.coordinates.shape), gain=None)

    def rows(self, coordinates: Tensor, axes: int = 1) -> Tensor:
        """Let the coordinates of the last axes be the same at all positions; return them, without positions."""
        flat = coordinates.reshape(-1, *coordinates.shape[coordinates.ndim - axes :])
        first = flat[0]
        for row in flat.flatten(1).unique(dim=0):
            self.frames.join(first.flatten(), row)
        return first

    # The walk.

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            if node in self.graph.parameters:
                name = self.graph.parameters[node]
                return Parameter(name, torch.empty(self.shapes[name], device="meta"))
            if node in self.graph.constants:
                return self.graph.constants[node]
            value = node.meta.get("val")
            return fixed(tuple(value.shape)) if isinstance(value, Tensor) else value
        if node.op == "get_attr":
            return fixed(self.shape)
        arguments: Any = fx.map_arg(node.args, lambda n: self.labels[n])
        options: Any = fx.map_arg(node.kwargs, lambda n: self.labels[n])
        operands = list(_operands((arguments, options)))
        if node.op == "output":
            for operand in operands:
                label = self.plain(self.value(operand))
                self.frames.limit(label.coordinates, Limit.PINNED)
            return None
        if node.target is operator.getitem:
            return arguments[0][arguments[1]]
        if not operands:
            return _run_node(node, arguments, options)  # A constant: its value is known.
        name = operation_name(node).removeprefix("aten.")
        stem = _stem(node)
        is_in_place = name.partition(".")[0].endswith("_") and len(node.all_input_nodes[0].users) > 1
        if is_in_place and not self.value(arguments[0]).is_fixed:
            self.refuse("a change in place of a tensor that other operations read")
        if stem in _VIEWS and all(isinstance(operand, Parameter) for operand in operands) and len(operands) == 1:
            (part,) = operands
            moved = _run_node(node, (part.view, *arguments[1:]), options)
            if isinstance(moved, Tensor):
                return Parameter(part.tensor, moved)
            return tuple(Parameter(part.tensor, view) for view in moved)
        if stem in MOVES:
            return self._move(node, arguments, options)
        rule = _RULES.get(name) or _RULES.get(stem)
        values = [self.value(operand) for operand in operands] if stem not in _TAKE_PARAMETERS else []
        if values and all(value.is_fixed and value.core is None for value in values) and stem not in _NEEDED:
            return self._fixed_result()
        if rule is None:
            self.refuse("no rule for it")
        return rule(self, *arguments, **options)

    def _fixed_result(self) -> Any:
        result = self.node.meta.get("val")
        if isinstance(result, Tensor):
            return fixed(tuple(result.shape))
        if isinstance(result, tuple | list):
            return tuple(fixed(tuple(value.shape)) for value in result)
        return None

    def _move(self, node: fx.Node, arguments: Any, options: Any) -> Any:
        """Rule of operations that only move entries: they move the coordinates alike."""
        if isinstance(arguments[0], tuple | list):
            arguments = ([self.value(operand) for operand in arguments[0]], *arguments[1:])
        operands = list(_operands((arguments, options)))
        labels = [self.value(operand) for operand in operands]
        if any(label.squares for label in labels):
            labels = [self.one(label) if label.squares else label for label in labels]
        if operation_name(node).startswith("aten.index.Tensor") and any(
            isinstance(index, Label | Parameter) for index in (arguments[1] or ())
        ):
            if all(label.is_fixed for label in labels):
                return self._fixed_result()
            self.refuse("an index that is computed from inputs")
        with_gain = [label for label in labels if label.gain is not None]
        if with_gain and (len({id(label.gain.record) for label in with_gain if label.gain}) > 1 or len(labels) > 1):
            labels, with_gain = [self.without_gain(label) for label in labels], []
        cores = {id(label.core): label.core for label in labels if label.core is not None}
        terms = max(len(label.more) for label in labels)
        has_factor = any(label.factor is not None for label in labels)

        def moved(parts: Sequence[Tensor]) -> Any:
            remaining = iter(parts)
            swapped = replace_operands((arguments, options), lambda operand: next(remaining))
            return _run_node(node, *swapped)

        def each(parts: Sequence[Tensor]) -> list[Tensor]:
            result = moved(parts)
            return [result] if isinstance(result, Tensor) else list(result)

        coordinates = each([label.coordinates.contiguous() for label in labels])
        factors = each([_factor(label).contiguous() for label in labels]) if has_factor or terms else None
        more = []
        for i in range(terms):
            pair = [label.more[i] if i < len(label.more) else _no_term(label) for label in labels]
            more.append(
                (each([c.contiguous() for c, _ in pair]), each([f.expand(c.shape).contiguous() for c, f in pair]))
            )
        gains = each([with_gain[0].gain.coordinates.contiguous()]) if with_gain and with_gain[0].gain else None
        core = next(iter(cores.values()), None) if len(cores) == 1 else None
        if core is not None and (len(labels) > 1 or _stem(node) not in _KEEP_HEADS):
            # The matrices of scores may be in another order, or beside scores of another kind.
            core.pinned = True
            for label in labels:
                self.frames.limit(label.coordinates, Limit.PINNED)
        result = tuple(
            Label(
                coordinates[j],
                factors[j] if factors else None,
                tuple((c[j], f[j]) for c, f in more),
                Gain(with_gain[0].gain.record, gains[j]) if gains and with_gain[0].gain else None,
                core=core,
            )
            for j in range(len(coordinates))
        )
        return result[0] if isinstance(node.meta["val"], Tensor) else result

    # Rules of layers.

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Label:
        """Contract the last axis with a kernel (out, in)."""
        label = self.value(x)
        if not isinstance(weight, Parameter):
            self.refuse("a kernel that is computed from other tensors")
        is_known = any(key[0] == weight.tensor for key in self._axes)
        if weight.tensor in self._values and not is_known:
            self.refuse(f"kernel {weight.tensor!r}, which is added elsewhere")
        if label.core is not None:
            label.core.pinned = True  # A product over heads tells them apart.
            for operand in (weight, bias):
                for record in self.axes(operand) if isinstance(operand, Parameter) else ():
                    self.frames.limit(record.coordinates, Limit.PINNED)
            return replace(fixed(self.shape), core=label.core)
        rows, columns = self.axes(weight)
        if rows.gain is not None or columns.gain is not None:
            self.refuse(f"kernel {weight.tensor!r}, which is used beside a gain and again")
        label = self._contracted(label, columns, is_known)
        if not label.is_fixed:
            row = self.rows(label.coordinates)
            self.frames.claim([row])
            self.frames.join(row, columns.coordinates, dual=True)
        else:
            self.frames.limit(columns.coordinates, Limit.PINNED)
        written = [rows]
        if bias is not None:
            written += self._add_bias(rows.coordinates, bias)
        if not is_known:
            self._outputs[self.frames.source[int(rows.coordinates[0])]] = written
        return Label(rows.coordinates.expand(*label.coordinates.shape[:-1], -1))

    def _contracted(self, label: Label, columns: Record, is_known: bool) -> Label:
        """Prepare an activation for its product with a kernel; return its label without a gain."""
        if label.gain is not None and not label.more and label.factor is None and not is_known:
            columns.gain = label.gain.record
            return replace(label, gain=None)
        return self.plain(label)

    def _add_bias(self, output: Tensor, bias: Any) -> list[Record]:
        """Let a bias have the coordinates of the output of a layer; return the records of the bias."""
        if isinstance(bias, Parameter) and bias.tensor not in self._values:
            (record,) = self.axes(bias)
            self.frames.join(output, record.coordinates)
            return [record]
        value = self.value(bias)
        self.frames.join(output, self.plain(value).coordinates)
        return []

    def addmm(self, bias: Any, x: Any, weight: Any) -> Label:
        """Contract the last axis with a kernel (in, out), and add a bias."""
        if not isinstance(weight, Parameter):
            return self.baddbmm(bias, x, weight)
        return self.linear(x, Parameter(weight.tensor, weight.view.T), bias)

    def embedding(self, weight: Any, indices: Any, *options: Any) -> Label:
        """Look up rows of a table: rows keep their order, and their entries are coordinates."""
        rows, columns = self.axes(weight)
        self.frames.limit(rows.coordinates, Limit.PINNED)
        return Label(columns.coordinates.expand(self.shape))

    def conv2d(
        self, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> Label:  # fmt: skip
        """Contract the axis of channels, after the batch, with a kernel (out, in, *window)."""
        if groups != 1 or not isinstance(weight, Parameter):
            self.refuse(f"{groups} groups")
        label = self.plain(self.value(x))
        rows, columns, *window = self.axes(weight)
        for record in window:
            self.frames.limit(record.coordinates, Limit.PINNED)
        if label.is_fixed:
            self.frames.limit(columns.coordinates, Limit.PINNED)
        else:
            row = self.rows(label.coordinates.movedim(1, -1))
            self.frames.claim([row])
            self.frames.join(row, columns.coordinates, dual=True)
        if bias is not None:
            self._add_bias(rows.coordinates, bias)
        back = [1] * (len(self.shape) - 2)
        return Label(rows.coordinates.reshape(-1, *back).expand(self.shape))

    def layer_norm(self, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, *options: Any) -> Label:
        """Normalise over the last axis: matrices keep the norm, and the vector of ones."""
        if len(shape) != 1:
            self.refuse("a norm over several axes")
        label = self.plain(self.value(x))
        self._claim_norm(label.coordinates, Limit.NORM | Limit.MEAN)
        return self._affine(label, weight, bias)

    def rms_norm(self, x: Any, shape: Sequence[int], weight: Any = None, *options: Any) -> Label:
        """Divide by the root of the mean square over the last axis: matrices keep the norm."""
        if len(shape) != 1:
            self.refuse("a norm over several axes")
        label = self.plain(self.value(x))
        self._claim_norm(label.coordinates, Limit.NORM)
        return self._affine(label, weight, None)

    def _claim_norm(self, coordinates: Tensor, limit: Limit) -> None:
        self.frames.limit(coordinates, limit)
        self.frames.claim(coordinates.reshape(-1, coordinates.shape[-1]).unique(dim=0).unbind())

    def _affine(self, label: Label, weight: Any, bias: Any) -> Label:
        if weight is not None:
            label = self._multiply_by_parameter(label, weight)
        if bias is not None:
            offset = self.value(bias).coordinates.expand(label.coordinates.shape)
            self.frames.join(label.coordinates, offset)
            record = self._record_of(offset)
            if record is not None:
                self.roles[record.tensor] = "offset"
                if label.gain is not None:
                    record.gain, record.is_divided = label.gain.record, True
        return label

    def _multiply_by_parameter(self, label: Label, weight: Any) -> Label:
        """Multiply an activation by a vector: the vector stays beside the coordinates as long as it can."""
        label = self.without_gain(label)
        value = self.value(weight)
        coordinates = value.coordinates.expand(label.coordinates.shape)
        record = self._record_of(coordinates)
        if record is None or label.more or label.factor is not None:
            return self.multiply_labels(self.plain(label), Label(coordinates))
        self.frames.claim_units(coordinates, Limit.NONE)
        self.frames.tie(label.coordinates, coordinates)
        self.roles[record.tensor] = "gain"
        return replace(label, gain=Gain(record, coordinates))

    def _record_of(self, coordinates: Tensor) -> Record | None:
        first = int(coordinates.max())
        sources = {self.frames.source[c] for c in coordinates.unique().tolist() if c >= 0}
        if len(sources) != 1:
            return None
        return next((r for r in self.records if first in r.coordinates.tolist()), None)

    # Rules of arithmetic.

    def add(self, x: Any, y: Any, alpha: float = 1) -> Label:
        """Add two activations: they have one frame."""
        if not _is_tensor(x) or not _is_tensor(y):
            operand, number = (x, y) if _is_tensor(x) else (y, x)
            return self._add_number(operand, number)
        a, b = self.value(x), self.value(y)
        if a.core is not None or b.core is not None:
            return self._add_to_scores(a, b, x, y)
        if _mixes(a) or _mixes(b):
            return self._add_mixed(a, b)
        a, b = self._joinable(a), self._joinable(b)
        first, second = torch.broadcast_tensors(a.coordinates, b.coordinates)
        self.frames.join(first, second)
        return Label(torch.where(first >= 0, first, torch.where((first == ZERO) | (second >= 0), second, first)))

    def _add_number(self, operand: Any, number: Any) -> Label:
        if isinstance(operand, Parameter) and isinstance(number, int | float):
            label = self.value(operand)
            record = self._value_records[operand.tensor]
            if len(self.node.all_input_nodes[0].users) == 1 and operand.view.numel() == record.coordinates.numel():
                record.shift += number
                return label
        label = self.value(operand)
        if label.core is not None or not number:
            return label
        return self.one(label)

    def _joinable(self, label: Label) -> Label:
        """Prepare an activation for a sum. The gain of a layer that only this sum reads becomes part of the layer."""
        if label.gain is not None and not _mixes(label):
            sources = {self.frames.source[c] for c in label.coordinates.unique().tolist() if c >= 0}
            source = next(iter(sources))
            if len(sources) == 1 and source in self._outputs and self._is_only_read_here(label):
                return Label(self._take_gain_into_layer(label, source))
        return self.plain(label)

    def _is_only_read_here(self, label: Label) -> bool:
        node = next((n for n in self.node.all_input_nodes if self.labels[n] is label), None)
        while node is not None and len(node.users) == 1:
            label_of_node = self.labels[node]
            if isinstance(label_of_node, Label) and label_of_node.gain is None:
                return True
            node = next((n for n in node.all_input_nodes if isinstance(self.labels[n], Label)), None)
        return False

    def _take_gain_into_layer(self, label: Label, source: int) -> Tensor:
        assert label.gain is not None
        records = self._outputs.pop(source)
        old = records[0].coordinates
        new = self.frames.new(len(old), self.frames.names[source])
        for record in records:
            record.coordinates, record.gain = new, label.gain.record
        self.frames.tie(new, label.gain.record.coordinates)
        lookup = torch.full((int(old.max()) + 1,), FIXED)
        lookup[old] = new
        return lookup[label.coordinates.clamp(min=0)]

    def _add_mixed(self, a: Label, b: Label) -> Label:
        a, b = self.without_gain(a), self.without_gain(b)
        a, b = (replace(v, coordinates=v.coordinates.expand(self.shape)) for v in (a, b))
        terms = [(a.coordinates, _factor(a)), *a.more, (b.coordinates, _factor(b)), *b.more]
        (first, factor), *more = terms
        return Label(first, factor, tuple((c.expand(self.shape), f) for c, f in more))

    def _add_to_scores(self, a: Label, b: Label, x: Any, y: Any) -> Label:
        """Add a mask, a learned bias or fixed slopes to the scores of an attention."""
        label, other, operand = (a, b, y) if a.core is not None else (b, a, x)
        if other.core is not None:
            label.core.pinned = other.core.pinned = True  # type: ignore[union-attr]
            return label
        assert label.core is not None
        self._bias_heads(label.core, other, operand, self.shape)
        return replace(label, coordinates=label.coordinates.expand(self.shape))

    def _bias_heads(self, core: Core, bias: Label, operand: Any, shape: tuple[int, ...]) -> None:
        """Record what is added to the scores (*heads, query, key) of an attention."""
        heads = self._heads_of(core, shape)
        coordinates = self.plain(bias).coordinates.expand(shape)
        if bool((coordinates >= 0).any()):
            flat = coordinates.reshape(-1, shape[-2] * shape[-1])
            column = torch.stack([self.rows(row[:, None])[0] for row in flat])
            self.frames.claim_units(column, ONE)
            core.biases.append(self._one_a_head(core, column, heads))
        else:
            self._mask_heads(core, operand, shape)

    def _mask_heads(self, core: Core, mask: Any, shape: tuple[int, ...]) -> None:
        """Record a mask or fixed numbers of the scores (*heads, query, key): heads with other ones do not change
        places, nor do heads whose masks are computed from inputs."""
        if isinstance(mask, Tensor):
            numbers = mask.expand(shape).reshape(-1, shape[-2] * shape[-1])
            core.slopes.append(self._one_a_head(core, numbers.double(), self._heads_of(core, shape)))
        elif _padded(mask.coordinates.shape, len(shape))[-3] > 1:
            core.pinned = True

    def _heads_of(self, core: Core, shape: tuple[int, ...]) -> Tensor:
        """Return the number of the head of each matrix of scores, (matrix)."""
        count = 1
        for size in shape[:-2]:
            count *= size
        return torch.arange(count) % len(core.queries)

    def _one_a_head(self, core: Core, values: Tensor, heads: Tensor) -> Tensor:
        """Return the value of each head, (head, …); heads whose values differ from one position to another are
        pinned."""
        first = values[: len(core.queries)]
        if values.dtype is torch.int64:
            self.frames.join(first[heads], values)
        elif bool((first[heads] != values).any()):
            core.pinned = True
        return first

    def subtract(self, x: Any, y: Any, alpha: float = 1) -> Label:
        """Subtract two activations: they have one frame."""
        return self.add(x, self.negate(y) if _is_tensor(y) else -y)

    def negate(self, x: Any) -> Any:
        """Multiply by -1."""
        return -x if isinstance(x, Tensor) else self.multiply(x, -1.0)

    def multiply(self, x: Any, y: Any) -> Label:
        """Multiply two activations, or an activation by numbers."""
        if not _is_tensor(x) or not _is_tensor(y):
            operand, number = (x, y) if _is_tensor(x) else (y, x)
            label = self.value(operand)
            if label.core is not None or isinstance(number, Tensor) or not isinstance(number, int | float):
                return label
            return self._scale(label, torch.full([1] * label.coordinates.ndim, float(number), dtype=torch.float64))
        for operand, other in ((x, y), (y, x)):
            if isinstance(other, Parameter) and not isinstance(operand, Parameter):
                label = self.value(operand)
                if not label.is_fixed and label.core is None:
                    label = replace(label, coordinates=label.coordinates.expand(self.shape))
                    return self._multiply_by_parameter(label, other)
        a, b = self.value(x), self.value(y)
        if a.core is not None or b.core is not None:
            label, other = (a, b) if a.core is not None else (b, a)
            if not other.is_fixed or any(size > 1 for size in other.coordinates.shape):
                label.core.pinned = True  # type: ignore[union-attr]
            return replace(label, coordinates=label.coordinates.expand(self.shape))
        if a.is_fixed or b.is_fixed:
            label, other, operand = (b, a, x) if a.is_fixed else (a, b, y)
            label = replace(label, coordinates=label.coordinates.expand(self.shape))
            if isinstance(operand, Tensor):
                return self._scale(label, operand.double())
            is_same = [
                size == 1
                for i, size in enumerate(_padded(other.coordinates.shape, len(self.shape)))
                if varies(label.coordinates, i)
            ]
            return label if all(is_same) else self.one(label)
        if self._is_gain(b) or self._is_gain(a):
            gain, label = (b, a) if self._is_gain(b) else (a, b)
            label = replace(label, coordinates=label.coordinates.expand(self.shape))
            return self._multiply_by_parameter(label, gain)
        return self.multiply_labels(self.plain(a), self.plain(b))

    def _is_gain(self, label: Label) -> bool:
        """Return whether an activation is a parameter, to which a number was added at most."""
        sources = {self.frames.source[c] for c in label.coordinates.unique().tolist() if c >= 0}
        records = {self.frames.source[int(r.coordinates[0])] for r in self._value_records.values()}
        return len(sources) == 1 and sources <= records and label.gain is None and not _mixes(label)

    def multiply_labels(self, a: Label, b: Label) -> Label:
        """Multiply two activations entry by entry: they move together, and one of them keeps its scales."""
        first, second = torch.broadcast_tensors(a.coordinates, b.coordinates)
        self.frames.claim_units(first, Limit.NONE)
        self.frames.claim_units(second, Limit.NONE)
        if not all(self.frames.limit_of(c) & ONE == ONE for c in first.unique().tolist() if c >= 0):
            first, second = second, first
        self.frames.claim_units(first, ONE)
        self.frames.tie(first, second)
        return Label(torch.where(second >= 0, second, first))

    def _scale(self, label: Label, numbers: Tensor) -> Label:
        """Multiply an activation by numbers that are known."""
        if label.is_fixed:
            return fixed(self.shape)
        factor = numbers.expand(label.coordinates.shape) * _factor(label)
        more = tuple((c, f * numbers) for c, f in label.more)
        return replace(label, factor=factor, more=more)

    def divide(self, x: Any, y: Any, **options: Any) -> Label:
        """Divide an activation by numbers."""
        if _is_tensor(y) and not (isinstance(y, Tensor) or self.value(y).is_fixed):
            return self.multiply_labels(self.one(self.value(x)), self.one(self.value(y)))
        return self.multiply(
            x, y.reciprocal() if isinstance(y, Tensor) else (1 / y if isinstance(y, int | float) else y)
        )

    def power(self, x: Any, exponent: Any) -> Label:
        """Raise to a power. The mean of squares over an axis keeps the orthogonal matrices."""
        label = self.value(x)
        if exponent == 2 and label.gain is None and not _mixes(label):
            return replace(label, squares=True)
        return self.one(label)

    def mean(self, x: Any, dims: Any = None, keepdim: bool = False, **options: Any) -> Label:
        """Average over axes: of positions, or of the squares of all coordinates of an axis."""
        label = self.value(x)
        rank = label.coordinates.ndim
        axes = sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank)))
        if label.squares and axes == [rank - 1]:
            self._claim_norm(label.coordinates, Limit.NORM)
            return fixed(self.shape)
        label = self.plain(label)
        if label.core is not None:
            return fixed(self.shape)  # An average of attention weights over heads does not tell them apart.
        if any(varies(label.coordinates, axis) for axis in axes):
            kept = label.coordinates
            for axis in axes:
                if not varies(label.coordinates, axis):
                    continue
                if all(bool((kept.select(axis, i) == kept.select(axis, 0)).all()) for i in range(kept.shape[axis])):
                    continue
                first = kept.narrow(axis, 0, 1).expand_as(kept)
                if self._is_feature_axis(kept, axis):
                    self.one(label)
                    return fixed(self.shape)
                self.frames.join(first, kept)
        coordinates = label.coordinates
        for axis in axes:
            coordinates = coordinates.narrow(axis, 0, 1)
        return Label(coordinates.reshape(self.shape))

    def _is_feature_axis(self, coordinates: Tensor, axis: int) -> bool:
        """Return whether one layer's coordinates differ along an axis, as opposed to positions of several layers."""
        row = coordinates.movedim(axis, -1).reshape(-1, coordinates.shape[axis])[0]
        sources = [self.frames.source[c] for c in row.unique().tolist() if c >= 0]
        return len(sources) > len(set(sources))

    def unit_function(self, x: Any, *options: Any, **named: Any) -> Label:
        """Apply a function to single entries: only permutations stay."""
        label = self.value(x)
        return label if label.is_fixed else self.one(label)

    def relu(self, x: Any) -> Label:
        """Apply relu: permutations and positive scales stay."""
        label = self.plain(self.value(x))
        self.frames.claim_units(label.coordinates, Limit.POSITIVE)
        return label

    def odd_function(self, x: Any) -> Label:
        """Apply an odd function to single entries: permutations and signs stay."""
        label = self.plain(self.value(x))
        self.frames.claim_units(label.coordinates, Limit.NORM)
        return label

    def same(self, x: Any, *options: Any, **named: Any) -> Label:
        """Rule of dropout and of casts, which change nothing."""
        return self.value(x)

    # Rules of attention.

    def attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Label:  # fmt: skip
        """Attend: softmax(query · key) · value, with heads before the last two axes."""
        q, k, v = self.value(query), self.value(key), self.value(value)
        heads = self.node.args[0].meta["val"].shape[:-2]  # type: ignore[union-attr]
        if enable_gqa:
            times = heads[-1] // k.coordinates.shape[-3]
            k, v = (_repeat_heads(label, times) for label in (k, v))
        core, rows = self._score(q, k, heads)
        if attn_mask is not None:
            scores = (*heads, q.coordinates.shape[-2], k.coordinates.shape[-2])
            self._bias_heads(core, self.value(attn_mask), attn_mask, scores)
        return self._attend(core, v, heads, rows)

    def _score(self, q: Label, k: Label, heads: Sequence[int]) -> tuple[Core, Tensor]:
        """Contract queries and keys (*heads, token, unit); return the heads, and the head of each matrix."""
        q, k = self._unmixed(q), self._unmixed(k)
        if q.gain is not None and k.gain is not None:
            q, k = self.without_gain(q), self.without_gain(k)
        q, k = self.plain(q), self.plain(k)
        queries, keys = (self._heads(label.coordinates, heads) for label in (q, k))
        pairs, rows = torch.cat([queries, keys], 1).unique(dim=0, return_inverse=True)
        order = torch.stack([(rows == i).nonzero()[0, 0] for i in range(len(pairs))]).argsort()
        rank = order.argsort()
        pairs, rows = pairs[order], rank[rows]
        queries, keys = pairs[:, : queries.shape[1]], pairs[:, queries.shape[1] :]
        for part in (queries, keys):
            self.frames.claim(part.unbind())
        self.frames.join(queries, keys, dual=True, place=False)
        core = Core(self.layer, queries, keys)
        self.cores.append(core)
        return core, rows

    def _heads(self, coordinates: Tensor, heads: Sequence[int]) -> Tensor:
        """Return the coordinates of each matrix (*heads), (matrix, unit), the same at all tokens."""
        expanded = coordinates.expand(*heads, *coordinates.shape[-2:])
        flat = expanded.reshape(-1, *expanded.shape[-2:])
        for token in range(1, flat.shape[1]):
            if bool((flat[:, token] != flat[:, 0]).any()):
                self.frames.join(flat[:, 0], flat[:, token])
        return flat[:, 0]

    def _attend(self, core: Core, v: Label, heads: Sequence[int], rows: Tensor) -> Label:
        v = self.plain(v)
        values = self._heads(v.coordinates, heads)
        core.values = torch.full((len(core.queries), values.shape[1]), FIXED)
        for head, row in zip(rows.tolist(), values, strict=True):
            if int(core.values[head, 0]) == FIXED:
                core.values[head] = row
            else:
                self.frames.join(core.values[head], row)
        self.frames.claim(core.values.unbind())
        core.outputs = self.frames.new(core.values.numel(), core.name).reshape(core.values.shape)
        self.frames.join(core.outputs, core.values, place=False)
        result = core.outputs[rows].reshape(*heads, 1, -1)
        return Label(result.expand(self.shape))

    def _unmixed(self, label: Label) -> Label:
        """Limit the frames of queries or keys that positions have turned; return the label before the turn."""
        if not _mixes(label):
            return label
        label = self.without_gain(label)
        terms = [(label.coordinates, _factor(label)), *label.more]
        head = [(c.reshape(-1, *c.shape[-2:]), f.expand(c.shape).reshape(-1, *c.shape[-2:])) for c, f in terms]
        first = head[0][0][:, 0]
        pairs: list[Tensor] = []
        for row in range(len(first)):
            turned = _rotations([(c[row], f[row]) for c, f in head])
            if turned is None:
                return self.one(label)
            pairs += turned
        self.frames.claim([*pairs, *_others(first, pairs)])
        for pair in pairs:
            self.frames.limit(pair, Limit.ROTATION)
        self.frames.rotations += pairs
        return Label(label.coordinates)

    def matmul(self, x: Any, y: Any) -> Label:
        """Multiply stacks of matrices: queries by keys, attention weights by values, or an activation by a kernel."""
        if isinstance(y, Parameter) and y.view.ndim == 2 and not isinstance(x, Parameter):
            return self.linear(x, Parameter(y.tensor, y.view.T))
        a, b = self.value(x), self.value(y)
        if a.is_fixed and b.is_fixed:
            return fixed(self.shape)
        heads = self.shape[:-2]
        if a.core is not None:
            rows = self._heads_of(a.core, self.shape)
            return self._attend(a.core, b, heads, rows)
        moves_inside = varies(a.coordinates, a.coordinates.ndim - 1), varies(b.coordinates, b.coordinates.ndim - 2)
        if any(moves_inside) and not b.is_fixed and not a.is_fixed:
            b = _transposed(b)
            core, rows = self._score(a, b, heads)
            if bool((rows != self._heads_of(core, self.shape)).any()):
                core.pinned = True
            return replace(fixed(self.shape), core=core)
        if a.is_fixed and not moves_inside[1]:
            # Positions are mixed by fixed numbers.
            b = self.plain(b)
            self.frames.join(b.coordinates.narrow(-2, 0, 1).expand_as(b.coordinates), b.coordinates)
            return Label(b.coordinates.narrow(-2, 0, 1).expand(self.shape))
        self.refuse("a product of these activations")

    def baddbmm(self, bias: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Label:
        """Multiply stacks of matrices, and add."""
        result = self.matmul(x, y)
        a, b = result, self.value(bias)
        return self._add_to_scores(a, b, result, bias) if a.core is not None else self.add(result, bias)

    def softmax(self, x: Any, *options: Any, **named: Any) -> Label:
        """Apply softmax: to the scores of an attention over the keys, or to an activation."""
        label = self.value(x)
        return label if label.core is not None else self.one(label)

    def where(self, condition: Any, x: Any, y: Any) -> Label:
        """Choose between two activations, or between scores and a number."""
        for operand, other in ((x, y), (y, x)):
            if isinstance(operand, Label | Parameter) and _hides(other):
                return self._hidden(self.value(operand), condition)
        self.refuse("a choice between activations, or scores replaced by a number that softmax does not ignore")

    def _hidden(self, label: Label, mask: Any) -> Label:
        """Hide some scores, or some learned biases of scores, from a softmax."""
        if label.core is not None:
            self._mask_heads(label.core, mask, self.shape)
        elif not isinstance(mask, Tensor) and not _is_one_for_all_heads(mask):
            self.refuse("a mask of learned biases that is computed from inputs")
        return replace(label, coordinates=label.coordinates.expand(self.shape))

    def masked_fill(self, x: Any, mask: Any, value: Any) -> Label:
        """Replace scores that a mask hides."""
        if not _hides(value):
            self.refuse("a number in the place of activations that softmax does not ignore")
        return self._hidden(self.value(x), mask)


def _rotations(terms: list[tuple[Tensor, Tensor]]) -> list[Tensor] | None:
    """Return the pairs of coordinates that positions turn, or None if the positions do something else.

    Args:
        terms: (coordinates, factors), each (token, unit): the sum of factors times coordinates.
    """
    units = terms[0][0][0]
    position = {c: i for i, c in enumerate(units.tolist())}
    tokens, count = terms[0][0].shape
    matrices = torch.zeros(tokens, count, count, dtype=torch.float64)
    for coordinates, factors in terms:
        for u in range(count):
            for t in range(tokens):
                c = int(coordinates[t, u])
                if c == ZERO or not float(factors[t, u]):
                    continue
                if c not in position:
                    return None
                matrices[t, u, position[c]] += factors[t, u]
    pairs, seen = [], set()
    for u in range(count):
        partners = [v for v in range(count) if bool((matrices[:, u, v] != 0).any()) and v != u]
        if len(partners) > 1:
            return None
        if not partners:
            if bool((matrices[:, u, u] != matrices[0, u, u]).any()):
                return None
            continue
        v = partners[0]
        block = matrices[:, [[u, u], [v, v]], [[u, v], [u, v]]]
        if not torch.allclose(block[:, 0, 0], block[:, 1, 1]) or not torch.allclose(block[:, 0, 1], -block[:, 1, 0]):
            return None
        if u not in seen:
            pairs.append(units[[u, v]])
            seen |= {u, v}
    return pairs


def _others(rows: Tensor, pairs: list[Tensor]) -> list[Tensor]:
    """Return the coordinates of each row that are in no pair."""
    paired = {c for pair in pairs for c in pair.tolist()}
    others = [
        torch.tensor([c for c in row if c not in paired], dtype=torch.int64) for row in rows.unique(dim=0).tolist()
    ]
    return [row for row in others if len(row)]


def _repeat_heads(label: Label, times: int) -> Label:
    coordinates = label.coordinates.repeat_interleave(times, -3)
    factor = None if label.factor is None else _factor(label).repeat_interleave(times, -3)
    more = tuple(
        (c.repeat_interleave(times, -3), f.expand(c.shape).repeat_interleave(times, -3)) for c, f in label.more
    )
    gain = label.gain and Gain(label.gain.record, label.gain.coordinates.repeat_interleave(times, -3))
    return Label(coordinates, factor, more, gain)


def _transposed(label: Label) -> Label:
    gain = label.gain and Gain(label.gain.record, label.gain.coordinates.mT)
    more = tuple((c.mT, f.expand(c.shape).mT) for c, f in label.more)
    return Label(label.coordinates.mT, None if label.factor is None else _factor(label).mT, more, gain)


def _hides(number: Any) -> bool:
    """Return whether a softmax ignores an entry that has this number."""
    if isinstance(number, Tensor):
        return bool((number < -1e4).all())
    return isinstance(number, int | float) and number < -1e4


def _is_one_for_all_heads(mask: Label) -> bool:
    return mask.coordinates.ndim < 3 or mask.coordinates.shape[-3] == 1


def _mixes(label: Label) -> bool:
    return label.factor is not None or bool(label.more)


def _factor(label: Label) -> Tensor:
    """Return the factors of an activation in its full shape."""
    if label.factor is None:
        return torch.ones((), dtype=torch.float64).expand(label.coordinates.shape)
    return label.factor.expand(label.coordinates.shape)


def _no_term(label: Label) -> tuple[Tensor, Tensor]:
    shape = label.coordinates.shape
    return torch.full((), ZERO).expand(shape), torch.zeros((), dtype=torch.float64).expand(shape)


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, Label | Parameter | Tensor)


def _padded(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    return (*[1] * (rank - len(shape)), *shape)


def _operands(arguments: Any) -> Iterator[Any]:
    """Yield the labels and parameters within nested arguments."""
    if isinstance(arguments, Label | Parameter):
        yield arguments
    elif isinstance(arguments, dict):
        yield from _operands(tuple(arguments.values()))
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _operands(argument)


def replace_operands(arguments: Any, replacement: Callable[[Any], Any], kinds: Any = Label | Parameter) -> Any:
    """Replace the labels and parameters, or objects of other kinds, within nested arguments."""
    if isinstance(arguments, kinds):
        return replacement(arguments)
    if isinstance(arguments, dict):
        return {key: replace_operands(value, replacement, kinds) for key, value in arguments.items()}
    if isinstance(arguments, tuple | list):
        replaced = [replace_operands(value, replacement, kinds) for value in arguments]
        return tuple(replaced) if isinstance(arguments, tuple) else replaced
    return arguments


def _overlap(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Return whether two parts of one parameter, (name, sizes, strides, offset), share entries."""
    entries = []
    for _, size, stride, offset in (first, second):
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        entries.append(torch.arange(last + 1).as_strided(size, stride, offset).flatten())
    return bool(torch.isin(*entries).any())


def _run_node(node: fx.Node, arguments: Any, options: Any) -> Any:
    """Run an operation on values."""
    operation: Any = node.target
    return operation(*arguments, **options)


def _stem(node: fx.Node) -> str:
    """Return the name of an operation without its overload, and without the ending of operations in place."""
    return operation_name(node).removeprefix("aten.").partition(".")[0].removesuffix("_")


def operation_name(node: fx.Node) -> str:
    """Return the name of an operation, as error texts give it."""
    return str(node.target)


# Operations that only move entries; the first ones are views, which a parameter may pass before its first use.
_VIEWS = frozenset(
    [
        "view",
        "transpose",
        "permute",
        "t",
        "mT",
        "slice",
        "select",
        "chunk",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
        "alias",
    ]
)
MOVES = _VIEWS | frozenset(
    [
        "reshape",
        "_unsafe_view",
        "expand",
        "narrow",
        "cat",
        "stack",
        "unbind",
        "roll",
        "flatten",
        "unflatten",
        "contiguous",
        "clone",
        "index",
        "repeat",
        "repeat_interleave",
        "movedim",
        "numpy_T",
        "pad",
        "constant_pad_nd",
        "index_select",
    ]
)
# Operations that change nothing.
SAME = ("dropout", "to", "type_as", "_to_copy", "detach", "lift_fresh_copy")
# Moves that leave the matrices of scores in their order.
_KEEP_HEADS = frozenset(["view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "contiguous", "clone", "alias"])
_TAKE_PARAMETERS = frozenset(["linear", "addmm", "embedding", "conv2d", "matmul"])
_NEEDED = frozenset(["layer_norm", "rms_norm", "mul", "add", "scaled_dot_product_attention"])
_NAMES_BY_RULE: dict[Rule, str] = {
    Trace.linear: "linear",
    Trace.addmm: "addmm",
    Trace.embedding: "embedding",
    Trace.conv2d: "conv2d",
    Trace.layer_norm: "layer_norm",
    Trace.rms_norm: "rms_norm",
    Trace.add: "add",
    Trace.subtract: "sub",
    Trace.multiply: "mul",
    Trace.divide: "div",
    Trace.negate: "neg",
    Trace.power: "pow",
    Trace.mean: "mean sum",
    Trace.relu: "relu",
    Trace.odd_function: "tanh sin erf",
    Trace.unit_function: "gelu silu sigmoid elu selu softplus mish exp log cos hardswish relu6 leaky_relu",
    Trace.same: " ".join(SAME),
    Trace.attention: "scaled_dot_product_attention",
    Trace.matmul: "matmul bmm mm",
    Trace.baddbmm: "baddbmm",
    Trace.softmax: "softmax _softmax",
    Trace.where: "where",
    Trace.masked_fill: "masked_fill",
    lambda trace, *arguments, **options: None: "_assert_tensor_metadata",
}
_RULES: dict[str, Rule] = {name: rule for rule, names in _NAMES_BY_RULE.items() for name in names.split()}
