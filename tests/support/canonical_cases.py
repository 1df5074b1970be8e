"""Networks, draws and a plain oracle for canonical maps.

The oracle sorts one member in Python, unit by unit, by tuples of everything that may count. It reads the symmetry
table and shares no code with the package beyond that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.symmetry import Element, Move, Table, random_element, symmetries
from tests.support import symmetry_nets
from tests.support.symmetry_nets import Shaped, conv

Arrays = dict[str, np.ndarray]
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def basic_block(channels: int, width: int) -> nn.Module:
    """A basic block, with a 1x1 shortcut where the width changes."""

    def forward(net: Any, x: Tensor) -> Any:
        y = net.bn2(net.conv2(F.relu(net.bn1(net.conv1(x)))))
        return F.relu(y + net.short(x))

    change = nn.Sequential(conv(channels, width, 1, bias=False), nn.BatchNorm2d(width))
    return Shaped(
        forward, conv1=conv(channels, width, bias=False), bn1=nn.BatchNorm2d(width),
        conv2=conv(width, width, bias=False), bn2=nn.BatchNorm2d(width),
        short=nn.Identity() if channels == width else change,
    )  # fmt: skip


def small_resnet() -> nn.Module:
    """ResNet-18's shape: a stem, two stages of two basic blocks."""
    blocks = [basic_block(*widths) for widths in ((6, 6), (6, 6), (6, 9), (9, 9))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 3)]
    return nn.Sequential(conv(2, 6, bias=False), nn.BatchNorm2d(6), nn.ReLU(), *blocks, *head)


def inverted_block() -> nn.Module:
    """MobileNetV2's block: expand, depthwise, project, behind and before a stream."""

    def forward(net: Any, x: Tensor) -> Any:
        x = net.stem(x)
        y = F.relu6(net.bn2(net.depthwise(F.relu6(net.bn1(net.expand(x))))))
        return net.last((x + net.bn3(net.project(y))).mean((2, 3)))

    return Shaped(
        forward, stem=conv(2, 5), expand=conv(5, 8, 1, bias=False), bn1=nn.BatchNorm2d(8),
        depthwise=conv(8, 8, groups=8, bias=False), bn2=nn.BatchNorm2d(8), project=conv(8, 5, 1, bias=False),
        bn3=nn.BatchNorm2d(5), last=nn.Linear(5, 3),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{n: net for n, net in symmetry_nets.EVERY.items() if n not in ("resnet20", "resnet20-bias")},
    "small_resnet": (small_resnet, (2, 4, 4)),
    "inverted": (inverted_block, (2, 4, 4)),
    "resnet20": symmetry_nets.EVERY["resnet20"],
}


@cache
def table_of(name: str) -> Table:
    build, shape = NETS[name]
    return symmetries(build(), torch.zeros(2, *shape))


def mlp(*widths: int) -> tuple[Table, dict[str, Tensor]]:
    """Return the table of an MLP with ReLU, and a member whose tensors are all ones."""
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    return symmetries(net, torch.zeros(1, widths[0])), {n: torch.ones_like(t) for n, t in net.state_dict().items()}


def identical(one: Tensor, other: Tensor) -> bool:
    """Say whether tensors are the same bit for bit: -0.0 is not 0.0."""
    if one.dtype != other.dtype or not one.is_floating_point():
        return one.dtype == other.dtype and torch.equal(one, other)
    whole = WHOLE[one.itemsize]
    return torch.equal(one.contiguous().view(whole), other.contiguous().view(whole))


KINDS = ("normal", "few", "few", "signs", "sparse", "constant", "zeros", "rows", "columns", "twins")


def random_members(
    table: Table, generator: torch.Generator, members: int, dtype: torch.dtype, tied: bool
) -> dict[str, Tensor]:
    """Draw tensors; if tied, ones with few values, equal rows or columns, duplicated units, zeros of both signs."""
    result = {}
    for name, axes in table.tensors.items():
        x = torch.randn(members, *axes.shape, generator=generator)
        kind = KINDS[int(torch.randint(len(KINDS), (), generator=generator))] if tied else "normal"
        if kind == "few":
            x = x.round() / 2
        elif kind == "signs":
            x = x.sign() * (x.abs() > 0.5)  # -0.0 among them
        elif kind == "sparse":
            x = (x > 1.2).float()
        elif kind in ("constant", "zeros"):
            x = torch.full_like(x, 0.5 * (kind == "constant"))
        elif kind == "rows" and len(axes.shape) > 1:
            x = x[:, :1].expand_as(x).round()
        elif kind == "columns" and len(axes.shape) > 1:
            x = x[:, :, :1].expand_as(x).round()
        elif kind == "twins" and axes.shape:
            x[:, -1] = x[:, 0]
        result[name] = x.to(dtype).contiguous()
    return result


def sorted_groups(table: Table, streams: bool) -> set[str]:
    """Return the groups that are sorted: no streams, and nothing that moves a stream's units."""
    still = set() if streams else {name for name, group in table.groups.items() if group.stream}
    while (wider := still | {str(table.groups[name].mover) for name in still} & table.groups.keys()) != still:
        still = wider
    return set(table.groups) - still


def random_symmetry(table: Table, generator: torch.Generator, members: int, streams: bool, **options: Any) -> Element:
    """Draw a symmetry a member, its permutations of the groups that are sorted alone."""
    random_members = random_element(table, generator, members=members, **options)
    chosen, permutations = sorted_groups(table, streams), {}
    for name, group in table.groups.items():
        if name in chosen:
            p, step = random_members.permutations[name], group.size // group.blocks
            stays = group.blocks > 1 and group.mover is not None and group.mover not in chosen
            permutations[name] = torch.arange(group.size) // step * step + p % step if stays else p
    return Element(permutations, random_members.scales)


class Oracle:
    """Sort one member.

    Args:
        table: of its network.
        state: its tensors.
        key: "first", "max" or "norm".
        streams: whether streams are sorted.
    """

    def __init__(self, table: Table, state: Mapping[str, Tensor], key: str, streams: bool) -> None:
        self.table, self.key = table, key
        self.arrays: Arrays = {n: state[n].double().numpy().copy() for n, axes in table.tensors.items() if axes.moves}
        self.waiting = sorted_groups(table, streams)
        self.inside: set[str] = set()  # groups in order inside their blocks, before these are
        self.told_apart = True
        for name in table.groups:
            if name in self.waiting:
                turn = self.chain(name)
                for own in reversed(turn):
                    self.sort(own, turn[-1])
                    self.inside.add(own)
                self.waiting -= set(turn)

    def chain(self, name: str) -> list[str]:
        """Return a group without writers and what it holds, down to a group that has some."""
        if not self.table.groups[name].writers:
            for other in self.table.groups.values():
                if other.mover == name and self.table.groups[(below := self.chain(other.name))[-1]].writers:
                    return [name, *below]
        return [name]

    def held(self, name: str) -> dict[str, int]:
        """Return a group and those whose blocks it moves, with how many units one of its own holds."""
        found = {name: 1}
        for other in self.table.groups.values():
            if other.mover in found:
                found[other.name] = other.size // self.table.groups[name].size
        return found

    def sort(self, name: str, keyed: str) -> None:
        group = self.table.groups[name]
        step = group.size // group.blocks
        lines = [self.line(name, unit, keyed) for unit in range(group.size)]
        order = []
        for block in range(group.blocks):
            units = range(block * step, (block + 1) * step)
            order += sorted(units, key=lambda unit: lines[unit])
        for one, other in itertools.pairwise(order):
            if one // step == other // step and lines[one] == lines[other] and not self.twins(name, one, other):
                self.told_apart = False
        self.move(name, order)

    def twins(self, name: str, one: int, other: int) -> bool:
        before = {n: a.copy() for n, a in self.arrays.items()}
        swapped = list(range(self.table.groups[name].size))
        swapped[one], swapped[other] = other, one
        self.move(name, swapped)
        after, self.arrays = self.arrays, before
        return all(bool((a == before[n]).all()) for n, a in after.items())

    def move(self, name: str, order: list[int]) -> None:
        """Let position u have what position order[u] had, in all tensors."""
        for own, parts in self.held(name).items():
            places = [unit * parts + part for unit in order for part in range(parts)]
            for tensor, axes in self.table.tensors.items():
                for move in axes.moves:
                    if move.group == own and not move.within:
                        array = self.arrays[tensor]
                        entries = list(range(array.shape[move.axis]))
                        entries[move.offset : move.offset + len(places) * move.span] = [
                            move.offset + unit * move.span + e for unit in places for e in range(move.span)
                        ]
                        self.arrays[tensor] = array.take(entries, move.axis)
        # Rows are where they belong now, and see their new block's columns.
        for own, parts in self.held(name).items():
            places = [unit * parts + part for unit in order for part in range(parts)]
            for tensor, axes in self.table.tensors.items():
                for move in axes.moves:
                    if move.group == own and move.within:
                        array = self.arrays[tensor]
                        rows, columns = array.shape[:2]
                        for row in range(rows):
                            block = row // (rows // move.within)
                            own_places = places[block * columns : (block + 1) * columns]
                            array[row] = array[row][[place % columns for place in own_places]]

    def line(self, name: str, unit: int, keyed: str) -> list[Any]:
        """Return everything that counts of a unit, in the order in which it does."""
        held = self.held(name)
        keys = [self.measure(keyed, unit * held.get(keyed, 1) + i) for i in range(held.get(keyed, 1))]
        known: list[Any] = []
        loose: list[Any] = []
        first = next(iter(self.table.groups[name].writers), None)
        for tensor, axes in self.table.tensors.items():
            for move in axes.moves:
                parts = held.get(move.group, 0)
                if not parts or (move.within and parts >= axes.shape[1]):
                    continue
                entries = sorted(self.entries(tensor, move, unit * parts, parts))
                in_order = all(kind == 0 for place, _ in entries for kind, *_ in place)
                (known if in_order else loose).append(((tensor, move.axis) != first, entries))
        known.sort(key=lambda row: row[0])
        loose.sort(key=lambda row: row[0])
        return [keys, [row for _, row in known], [row for _, row in loose]]

    def measure(self, name: str, unit: int) -> Any:
        group = self.table.groups[name]
        if not group.writers:
            return 0
        tensor, axis = group.writers[0]
        move = next(m for m in self.table.tensors[tensor].moves if m.group == name and m.axis == axis)
        row = [falling for _, falling in sorted(self.entries(tensor, move, unit, 1))]
        if self.key == "first":
            return row[0]
        if self.key == "max":
            return min(value for value, _ in row)
        return -math.fsum(value * value for value, _ in row)

    def entries(
        self, tensor: str, move: Move, start: int, count: int
    ) -> Iterator[tuple[tuple[Any, ...], tuple[float, int]]]:
        """Yield a unit's entries in a tensor: what is known of the place of each, and its value, falling."""
        array = self.arrays[tensor]
        rows, columns = array.shape[0], array.shape[1] if array.ndim > 1 else 1
        for index in np.ndindex(array.shape):
            at = index[move.axis]
            if move.within:
                unit = index[0] // (rows // move.within) * columns + at
                place = (0, unit - start)
            else:
                unit = (at - move.offset) // move.span
                place = (0, at - move.offset - start * move.span)
            if not start <= unit < start + count:
                continue
            if count > 1 and move.group not in self.inside:
                place = (1, (at - move.offset) % move.span)
            label = [place if axis == move.axis else self.label(tensor, axis, index) for axis in range(array.ndim)]
            if move.within and label[0][0] == 0:
                label[0] = (0, index[0] % (rows // move.within))
            value = float(array[index])
            yield tuple(label), (-value, int(value == 0 and math.copysign(1, value) < 0))

    def label(self, tensor: str, axis: int, index: tuple[int, ...]) -> tuple[int, ...]:
        for move in self.table.tensors[tensor].moves:
            if move.axis == axis and move.group in self.waiting:
                size = self.table.groups[move.group].size * move.span
                if move.within or move.offset <= index[axis] < move.offset + size:
                    return 1, move.offset, 0 if move.within else (index[axis] - move.offset) % move.span
        return 0, index[axis]


def sort_by_oracle(
    table: Table, state: Mapping[str, Tensor], key: str, streams: bool
) -> tuple[dict[str, Tensor], bool]:
    """Sort one member; return its tensors, and whether all its units could be told apart, or may change places."""
    found = Oracle(table, state, key, streams)
    tensors = {n: torch.from_numpy(found.arrays[n]).to(t.dtype) if n in found.arrays else t for n, t in state.items()}
    return tensors, found.told_apart
