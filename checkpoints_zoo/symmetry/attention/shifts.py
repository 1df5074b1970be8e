"""Find the shifts of a recorded network: vectors that can be added to parameters without a change of the function.

A constant that a bias adds to an activation is redundant if everything that reads the activation takes it up: a layer
behind it by its own bias, another bias or table that is added to the same sum, a softmax over keys, or a norm that
subtracts the mean.

This is one file, because most of it is one class, which follows constants through the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from checkpoints_zoo.symmetry.attention.labels import Label, Parameter
from checkpoints_zoo.symmetry.attention.rules.moves import MOVES, SAME
from checkpoints_zoo.symmetry.attention.trace import Trace, operation_name, replace_operands
from checkpoints_zoo.symmetry.table import Outer, Product, Shift, StridedView, Sum

_SCALED = frozenset(["mul", "div"])
_KERNELS = frozenset(["linear", "addmm", "conv2d"])


@dataclass
class _Taken:
    """Which entries of a constant everything behind takes up, and what changes with it.

    Args:
        entries: whether each entry is taken up, bool (entry).
        mean_only: whether only constants whose entries are all equal are taken up.
        sums: what else changes.
    """

    entries: Tensor
    mean_only: bool = False
    sums: list[Sum | Outer] = field(default_factory=list)


@dataclass(frozen=True)
class _Constant:
    """A constant that an operation adds to its result.

    Args:
        carrier: for each entry of the result, the entry of the constant that is added to it; -1: none.
        owner: number of the parameter that has the constant; only later parameters may balance it.
        factor: the number that multiplies the constant.
        products: the kernels that the constant has passed.
        is_score: whether the result is a score of attention, where the constant is the same for all keys.
    """

    carrier: Tensor
    owner: int
    factor: float = 1.0
    products: tuple[Product, ...] = ()
    is_score: bool = False


def find_shifts(trace: Trace) -> dict[str, Shift]:
    """Return the shifts of a traced network, by name."""
    return _Finder(trace).shifts()


class _Finder:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        # Parameters in the order of their first use.
        first = {n: i for i, user in reversed(list(enumerate(trace.graph.nodes))) for n in user.all_input_nodes}
        self.order = {node: first.get(node, -1) for node in trace.graph.parameters}
        self.size = 0  # Entries of the constant that is followed.
        self.centring: dict[str, Outer] = {}  # Tensor -> how its mean may be changed.

    def shifts(self) -> dict[str, Shift]:
        """Return all shifts."""
        writers = list(self._writers())
        self.centring = {
            term.part.tensor: term for writer in writers for term in writer.terms if isinstance(term, Outer)
        }
        found: dict[str, Shift] = {}
        for shift in (*self._constants(), *self._readers(), *writers):
            name, number = shift.name, 1
            while name in found:
                number += 1
                name = f"{shift.name} #{number}"
            found[name] = replace(shift, name=name)
        return found

    # Constants that biases, tables and offsets add.

    def _constants(self) -> Iterator[Shift]:
        for node in sorted(self.order, key=lambda node: self.order[node]):
            name = self.trace.graph.parameters[node]
            shape = self.trace.shapes[name]
            if not shape or not node.users:
                continue
            axis = max((i for i, size in enumerate(shape) if size > 1), default=len(shape) - 1)
            back = [1] * (len(shape) - 1 - axis)
            carrier = torch.arange(shape[axis]).reshape(-1, *back).expand(shape).contiguous()
            self.size = shape[axis]
            taken = self._followed(node, _Constant(carrier, self.order[node]))
            if taken is None or not bool(taken.entries.any()):
                continue
            part = _whole(name, shape)
            own = Sum(part, axis, tuple(torch.where(taken.entries, torch.arange(self.size), -1).tolist()))
            overlap = all(
                not s.products and isinstance(s, Sum) and s.part.tensor in self.centring for s in (own, *taken.sums)
            )
            count = int(taken.entries.sum())
            dimension = (1 if taken.mean_only else count) - overlap
            if (taken.mean_only and count < self.size) or dimension <= 0:
                continue
            kind = "mean" if taken.mean_only else "constant"
            gain = None if taken.mean_only else self._gain_of_offset(node)
            yield Shift(f"constant of {name}", kind, self.size, dimension, (own, *taken.sums), part, axis, gain)

    def _followed(self, node: fx.Node, constant: _Constant) -> _Taken | None:
        """Follow a constant through all readers of a result; return what they take up."""
        taken = _Taken(torch.ones(self.size, dtype=torch.bool))
        for user in node.users:
            one = self._taken_by(user, node, constant)
            if one is None:
                if constant.products or constant.is_score:
                    return None
                present = constant.carrier[constant.carrier >= 0].unique()
                taken.entries[present] = False
                continue
            taken.entries &= one.entries
            taken.mean_only |= one.mean_only
            taken.sums += one.sums
        return taken

    def _taken_by(self, user: fx.Node, node: fx.Node, constant: _Constant) -> _Taken | None:
        """Follow a constant into one operation; return what everything behind takes up, or None if nothing."""
        roles = [i for i, argument in enumerate(user.args) if argument is node]
        stem = _stem(user)
        if user.op == "output" or any(node in _nodes(value) for value in user.kwargs.values()):
            return None
        if stem in MOVES or stem == "getitem":
            return self._moved(user, node, constant, stem)
        if len(roles) != 1:
            return None
        (role,) = roles
        if stem in SAME:
            return self._followed(user, constant)
        shape = tuple(user.meta["val"].shape) if isinstance(user.meta.get("val"), Tensor) else ()
        if constant.is_score:
            return self._scored(user, role, stem, constant, shape)
        if stem in _SCALED:
            other = user.args[1 - role]
            if role == 0 and isinstance(other, int | float):
                factor = other if stem == "mul" else 1 / other
                return self._followed(user, replace(constant, factor=constant.factor * factor))
            return None
        if stem in _KERNELS:
            return self._through_kernel(user, role, stem, constant, shape)
        if stem == "layer_norm":
            if role == 3:
                return self._followed(user, replace(constant, carrier=constant.carrier.expand(shape)))
            is_whole = bool((constant.carrier == torch.arange(self.size)).all()) if (
                role == 0 and constant.carrier.shape[-1:] == (self.size,)) else False  # fmt: skip
            return _Taken(torch.ones(self.size, dtype=torch.bool), mean_only=True) if (
                is_whole and not constant.products) else None  # fmt: skip
        if stem == "embedding":
            row = constant.carrier[0]
            return self._followed(user, replace(constant, carrier=row.expand(shape))) if role == 0 else None
        if stem == "add":
            return self._added(user, role, constant, shape)
        if stem == "scaled_dot_product_attention":
            return self._attended(user, role, constant, shape)
        if stem in ("matmul", "bmm", "baddbmm"):
            return self._multiplied(user, role, stem, constant, shape)
        if stem == "mean":
            carrier = constant.carrier
            dims: Any = user.args[1]
            for dim in sorted(dims if isinstance(dims, list | tuple) else [dims], reverse=True):
                if not _same_along(carrier, int(dim)):
                    return None
                carrier = carrier.narrow(int(dim), 0, 1)
            return self._followed(user, replace(constant, carrier=carrier.reshape(shape)))
        if stem == "where":
            return self._followed(user, replace(constant, carrier=constant.carrier.expand(shape)))
        return None

    def _moved(self, user: fx.Node, node: fx.Node, constant: _Constant, stem: str) -> _Taken | None:
        if stem == "getitem":
            raise AssertionError("results of several tensors are followed where they are made")

        def carried(argument: fx.Node) -> Any:
            if argument is node:
                return _Carrier(constant.carrier)
            value = self.trace.labels[argument]
            if isinstance(value, Label | Parameter):
                return _Carrier(torch.full((), -1).expand(argument.meta["val"].shape))
            is_index = stem in ("index", "index_select")
            return value if is_index or not isinstance(value, Tensor) else _Carrier(torch.full_like(value, -1).long())

        arguments = fx.map_arg(user.args, carried)
        options = fx.map_arg(user.kwargs, carried)
        plain = replace_operands((arguments, options), lambda c: c.entries.contiguous(), _Carrier)
        result = user.target(*plain[0], **plain[1])  # type: ignore[operator]
        if isinstance(result, Tensor):
            return self._followed(user, replace(constant, carrier=result))
        taken = _Taken(torch.ones(self.size, dtype=torch.bool))
        for part in user.users:
            carrier = result[part.args[1]]
            one = self._followed(part, replace(constant, carrier=carrier))
            if one is None:
                return None
            taken.entries &= one.entries
            taken.mean_only |= one.mean_only
            taken.sums += one.sums
        return taken

    def _through_kernel(
        self, user: fx.Node, role: int, stem: str, constant: _Constant, shape: tuple[int, ...]
    ) -> _Taken | None:
        places = {"linear": (0, 1, 2), "addmm": (1, 2, 0), "conv2d": (0, 1, 2)}[stem]
        x, weight, bias = places
        if role == bias:
            carrier = constant.carrier
            if stem == "conv2d":
                carrier = carrier.reshape(-1, *[1] * (len(shape) - 2))
            return self._followed(user, replace(constant, carrier=carrier.expand(shape)))
        if role != x or stem == "conv2d":
            return None
        label = self.trace.labels[user.args[weight]]  # type: ignore[index]
        row = _row(constant.carrier)
        if row is None or not isinstance(label, Parameter):
            return None
        view = label.view if stem == "linear" else label.view.T
        product = self._product(StridedView.from_view(label.tensor, view), tuple(row.tolist()))
        bias_node = user.args[bias] if len(user.args) > bias else None
        if isinstance(bias_node, fx.Node):
            target = self.trace.labels[bias_node]
            if isinstance(target, Parameter) and len(bias_node.users) == 1:
                part = target.part
                entries = tuple(range(view.shape[0]))
                balance = Sum(part, 0, entries, -constant.factor, (*constant.products, product))
                return _Taken(torch.ones(self.size, dtype=torch.bool), sums=[balance])
        carrier = torch.arange(view.shape[0]).expand(shape)
        passed = self._followed(user, replace(constant, carrier=carrier, products=(*constant.products, product)))
        if passed is None or passed.mean_only:
            return self._taken_by_mean(user, x, product, constant)
        return _Taken(torch.ones(self.size, dtype=torch.bool), sums=passed.sums)

    def _product(self, kernel: StridedView, entries: tuple[int, ...]) -> Product:
        mean = self.centring.get(kernel.tensor)
        if (
            mean is None
            or mean.part.size[mean.axis] != kernel.size[0]
            or mean.part.stride[mean.axis] != kernel.stride[0]
        ):
            return Product(kernel, entries)
        return Product(kernel, entries, True, mean.gain)

    def _taken_by_mean(self, user: fx.Node, x: int, product: Product, constant: _Constant) -> _Taken | None:
        """Let a kernel without a bias take up the offset of the norm before it, along the norm's gain."""
        norm = self._norm_before(user.args[x])
        weight: Any = user.args[{"linear": 1, "addmm": 2}[_stem(user)]]
        if norm is None or constant.products or constant.factor != 1 or len(weight.users) != 1:
            return None
        gain, offset = (self._name_of(norm, i) for i in (2, 3))
        node = norm.args[3] if len(norm.args) > 3 else None
        if offset is None or not isinstance(node, fx.Node) or self.order[node] != constant.owner:
            return None
        if product.entries != tuple(range(self.size)):
            return None
        outer = Outer(product.kernel, 1, gain, (product,), offset)
        return _Taken(torch.ones(self.size, dtype=torch.bool), sums=[outer])

    def _added(self, user: fx.Node, role: int, constant: _Constant, shape: tuple[int, ...]) -> _Taken | None:
        other = user.args[1 - role]
        carrier = constant.carrier.expand(shape)
        if isinstance(other, fx.Node):
            balance = self._balance(other, replace(constant, carrier=carrier))
            if balance is not None:
                return _Taken(torch.ones(self.size, dtype=torch.bool), sums=[balance])
        return self._followed(user, replace(constant, carrier=carrier))

    def _balance(self, node: fx.Node, constant: _Constant) -> Sum | None:
        """Return how a later parameter that only this sum reads takes a constant up; None if there is none."""
        if len(node.users) != 1:
            return None
        stem = _stem(node)
        if node in self.trace.graph.parameters:
            return self._balance_by_rows(node, constant)
        if stem in SAME or stem in ("unsqueeze", "expand", "slice"):
            return self._balance(node.args[0], constant) if isinstance(node.args[0], fx.Node) else None
        if stem == "add":
            for argument in node.args:
                if isinstance(argument, fx.Node) and (balance := self._balance(argument, constant)):
                    return balance
            return None
        row = _row(constant.carrier)
        if row is None:
            return None
        if stem in MOVES and self._keeps_last_axis(node):
            return self._balance(node.args[0], constant)  # type: ignore[arg-type]
        if stem not in ("linear", "addmm", "embedding"):
            return None
        index = {"linear": 2, "addmm": 0, "embedding": 0}[stem]
        source = node.args[index] if len(node.args) > index else None
        if not isinstance(source, fx.Node) or len(source.users) != 1 or self.order[source] <= constant.owner:
            return None
        label = self.trace.labels[source]
        if not isinstance(label, Parameter):
            return None
        axis = label.view.ndim - 1
        return Sum(label.part, axis, tuple(row.tolist()), -constant.factor, constant.products)

    def _keeps_last_axis(self, node: fx.Node) -> bool:
        """Return whether an operation moves positions alone: the last axis has the same coordinates before it."""
        if not isinstance(node.args[0], fx.Node):
            return False
        before, after = self.trace.labels[node.args[0]], self.trace.labels[node]
        if not isinstance(before, Label) or not isinstance(after, Label):
            return False
        rows = [_row(label.coordinates) for label in (before, after)]
        return rows[0] is not None and rows[1] is not None and torch.equal(rows[0], rows[1])

    def _balance_by_rows(self, node: fx.Node, constant: _Constant) -> Sum | None:
        """Return how the rows of a table take a constant up at those positions that it is added to."""
        if self.order[node] <= constant.owner:
            return None
        name = self.trace.graph.parameters[node]
        shape = self.trace.shapes[name]
        carrier = constant.carrier
        while carrier.ndim > len(shape):
            if not _same_along(carrier, 0):
                return None
            carrier = carrier[0]
        for axis, size in enumerate(shape):
            if size == 1 and carrier.shape[axis] > 1:
                if not _same_along(carrier, axis):
                    return None
                carrier = carrier.narrow(axis, 0, 1)
        if tuple(carrier.shape) != tuple(shape) or len(shape) < 1:
            return None
        rows = carrier.reshape(-1, shape[-1])
        present = (rows >= 0).any(1).nonzero()[:, 0]
        if not len(present) or int(present[-1] - present[0]) + 1 != len(present):
            return None
        if bool((rows[present] != rows[present[0]]).any()):
            return None
        part = StridedView(name, (len(present), shape[-1]), (shape[-1], 1), int(present[0]) * shape[-1])
        return Sum(part, 1, tuple(rows[present[0]].tolist()), -constant.factor, constant.products)

    def _attended(self, user: fx.Node, role: int, constant: _Constant, shape: tuple[int, ...]) -> _Taken | None:
        everything = _Taken(torch.ones(self.size, dtype=torch.bool))
        if role == 1:
            return everything if _same_along(constant.carrier, -2) else None
        if role == 2 and _same_along(constant.carrier, -2):
            carrier = constant.carrier.narrow(-2, 0, 1)
            times = shape[-3] // carrier.shape[-3] if len(shape) > 3 else 1
            carrier = carrier.repeat_interleave(times, -3) if times > 1 else carrier
            return self._followed(user, replace(constant, carrier=carrier.expand(shape)))
        if role == 3:
            return everything if _same_along(constant.carrier, -1) else None
        return None

    def _multiplied(
        self, user: fx.Node, role: int, stem: str, constant: _Constant, shape: tuple[int, ...]
    ) -> _Taken | None:
        x = user.args[1] if stem == "baddbmm" else user.args[0]
        key_role = 2 if stem == "baddbmm" else 1
        if role != key_role or not isinstance(x, fx.Node):
            return None
        label = self.trace.labels[x]
        if isinstance(label, Label) and label.core is not None:
            if not _same_along(constant.carrier, -2) or not self._is_softmax(x):
                return None
            carrier = constant.carrier.narrow(-2, 0, 1).expand(shape)
            return self._followed(user, replace(constant, carrier=carrier))
        result = self.trace.labels[user]
        if isinstance(result, Label) and result.core is not None and _same_along(constant.carrier, -1):
            scores = torch.zeros(shape, dtype=torch.int64)
            passed = self._followed(user, replace(constant, carrier=scores, is_score=True))
            return None if passed is None else _Taken(torch.ones(self.size, dtype=torch.bool))
        return None

    def _is_softmax(self, node: fx.Node) -> bool:
        """Return whether the rows of attention weights sum to 1: they come from a softmax over the keys."""
        keys = node.meta["val"].shape[-1]
        while _stem(node) in SAME or _stem(node) in MOVES:
            if not isinstance(node.args[0], fx.Node) or node.args[0].meta["val"].shape[-1] != keys:
                return False
            node = node.args[0]
        return _stem(node) == "softmax" and node.args[1] in (-1, node.meta["val"].ndim - 1)

    def _is_same_for_keys(self, operand: Any) -> bool:
        """Return whether numbers that multiply scores are the same for all keys."""
        value = self.trace.labels[operand] if isinstance(operand, fx.Node) else operand
        if isinstance(value, Tensor):
            return value.ndim == 0 or _same_along(value, -1)
        if isinstance(value, Label | Parameter):
            return tuple(operand.meta["val"].shape)[-1:] in ((), (1,))
        return isinstance(value, int | float)

    def _scored(
        self, user: fx.Node, role: int, stem: str, constant: _Constant, shape: tuple[int, ...]
    ) -> _Taken | None:
        if stem == "softmax":
            dim = user.args[1]
            if not _same_along(constant.carrier, -1):
                return None
            return _Taken(torch.ones(self.size, dtype=torch.bool)) if dim in (-1, len(shape) - 1) else None
        if stem in _SCALED and not self._is_same_for_keys(user.args[1 - role]):
            return None
        if stem in ("mul", "div", "add", "where", "masked_fill"):
            return self._followed(user, replace(constant, carrier=constant.carrier.expand(shape)))
        return None

    # Readers of centred activations, and writers of activations that only norms read.

    def _readers(self) -> Iterator[Shift]:
        """Yield what may be added to the kernels that read a norm: its result without gain and offset has mean zero."""
        for node in self.trace.graph.nodes:
            stem = _stem(node)
            if stem not in ("linear", "addmm"):
                continue
            x, weight, bias = {"linear": (0, 1, 2), "addmm": (1, 2, 0)}[stem]
            norm = self._norm_before(node.args[x])
            weight_node = node.args[weight]
            if norm is None or not isinstance(weight_node, fx.Node) or len(weight_node.users) != 1:
                continue
            kernel = self.trace.labels[weight_node]
            if not isinstance(kernel, Parameter):
                continue
            view = kernel.view if stem == "linear" else kernel.view.T
            gain, offset = (self._name_of(norm, i) for i in (2, 3))
            size = view.shape[0]
            outer = Outer(StridedView.from_view(kernel.tensor, view), 1, gain)
            name = f"reader {kernel.tensor}"
            written = StridedView(kernel.tensor, (size,), (view.stride()[0],), int(view.storage_offset()))
            if offset is None:
                yield Shift(name, "reader", size, size, (outer,), written, 0)
                continue
            bias_node = node.args[bias] if len(node.args) > bias else None
            if isinstance(bias_node, fx.Node):
                target = self.trace.labels[bias_node]
                if isinstance(target, Parameter) and len(bias_node.users) == 1:
                    balance = Sum(target.part, 0, tuple(range(size)), -1.0, (), (offset, gain))
                    yield Shift(name, "reader", size, size, (outer, balance), written, 0)
                    continue
            self.size = size
            carrier = torch.arange(size).expand(tuple(node.meta["val"].shape))
            taken = self._followed(node, _Constant(carrier, -1))
            if taken is not None and bool(taken.entries.all()) and not taken.mean_only:
                sums = tuple(replace(s, ratio=(offset, gain)) for s in taken.sums if isinstance(s, Sum))
                yield Shift(name, "reader", size, size, (outer, *sums), written, 0)

    def _norm_before(self, node: Any) -> fx.Node | None:
        """Return the layer norm whose result an operation reads, at some or all positions."""
        while isinstance(node, fx.Node):
            stem = _stem(node)
            if stem == "layer_norm":
                return node
            before = node.args[0] if node.args else None
            if not isinstance(before, fx.Node) or not (stem in SAME or stem in MOVES):
                return None
            here, there = node.meta.get("val"), before.meta.get("val")
            if not isinstance(here, Tensor) or not isinstance(there, Tensor) or here.shape[-1:] != there.shape[-1:]:
                return None
            if stem in ("cat", "stack"):
                return None
            node = before
        return None

    def _gain_of_offset(self, node: fx.Node) -> str | None:
        """Return the name of the gain of the norm that a parameter is the offset of; None if it is none."""
        (user,) = node.users if len(node.users) == 1 else (None,)
        if user is None or _stem(user) != "layer_norm" or len(user.args) < 4 or user.args[3] is not node:
            return None
        return self._name_of(user, 2)

    def _name_of(self, norm: fx.Node, index: int) -> str | None:
        node = norm.args[index] if len(norm.args) > index else None
        return self.trace.graph.parameters.get(node) if isinstance(node, fx.Node) else None

    def _writers(self) -> Iterator[Shift]:
        """Yield what may be added to all units at once of an activation that only norms read: they subtract means."""
        for node, name in self.trace.graph.parameters.items():
            shape = self.trace.shapes[name]
            if not shape or len(node.users) != 1:
                continue
            (user,) = node.users
            stem, roles = _stem(user), [i for i, a in enumerate(user.args) if a is node]
            label = self.trace.labels[node]
            if not isinstance(label, Parameter):
                continue
            if (stem, roles) in (("linear", [1]), ("conv2d", [1])):
                axis = 0
            elif (stem, roles) == ("addmm", [2]):
                axis = 1
            elif stem in ("linear", "addmm", "conv2d") and len(shape) == 1:
                axis = 0
            elif stem == "embedding":
                axis = 1
            elif stem in MOVES or stem == "add":
                axis = len(shape) - 1
            else:
                continue
            written = user if axis == 0 or stem not in MOVES else node
            gain = self._gain_behind(user) if stem in _KERNELS else None
            while gain is not None and _stem(written) != "mul":
                (written,) = written.users
            if shape[axis] < 2 or not self._only_norms_read(written, shape[axis]):
                continue
            count = 1
            for i, size in enumerate(shape):
                count *= 1 if i == axis else size
            part = _whole(name, shape)
            yield Shift(f"mean of {name}", "writer", count, count, (Outer(part, axis, gain),), part, -1 - axis)

    def _gain_behind(self, node: fx.Node) -> str | None:
        """Return the name of a vector that multiplies the result of a kernel, which nothing else reads."""
        user = node
        while _stem(user) in _KERNELS or _stem(user) in SAME:
            if len(user.users) != 1:
                return None
            node, (user,) = user, user.users
        if _stem(user) != "mul" or user.args[0] is not node or not isinstance(user.args[1], fx.Node):
            return None
        name = self.trace.graph.parameters.get(user.args[1])
        return name if name is not None and len(self.trace.shapes[name]) == 1 else None

    def _only_norms_read(self, node: fx.Node, size: int) -> bool:
        for user in node.users:
            stem = _stem(user)
            if user.op == "output":
                return False
            if stem == "layer_norm":
                if user.args[0] is not node or list(user.args[1]) != [size]:  # type: ignore[arg-type]
                    return False
            elif stem in SAME or stem in MOVES or stem == "add" or stem == "getitem":
                if (
                    stem not in ("permute", "transpose", "flatten", "view", "reshape")
                    and isinstance(user.meta.get("val"), Tensor)
                    and size not in user.meta["val"].shape
                ):
                    return False
                if not self._only_norms_read(user, size):
                    return False
            else:
                return False
        return bool(node.users)


@dataclass(frozen=True, eq=False)
class _Carrier:
    """The carrier of one operand of an operation that moves entries."""

    entries: Tensor


def _stem(node: fx.Node) -> str:
    name = operation_name(node).removeprefix("aten.")
    return "getitem" if "getitem" in name else name.partition(".")[0].removesuffix("_")


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _row(carrier: Tensor) -> Tensor | None:
    """Return the last axis of a carrier if it is the same at all positions, and nowhere empty."""
    flat = carrier.reshape(-1, carrier.shape[-1])
    return flat[0] if bool((flat == flat[0]).all()) and bool((flat[0] >= 0).any()) else None


def _same_along(carrier: Tensor, axis: int) -> bool:
    return bool((carrier == carrier.narrow(axis, 0, 1)).all())


def _whole(tensor: str, shape: tuple[int, ...]) -> StridedView:
    return StridedView.from_view(tensor, torch.empty(shape, device="meta"))
