"""Turn the frames of a trace into a symmetry table: permutations, scales, signs and matrices.

This is one file, because it is one class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoints_zoo.errors import SymmetryError
from checkpoints_zoo.symmetry.attention.frames import Limit
from checkpoints_zoo.symmetry.attention.labels import Core, Record
from checkpoints_zoo.symmetry.attention.trace import Trace
from checkpoints_zoo.symmetry.table import Axes, Group, Matrix, Move, Power, Scale, Sign, Table, Turn


@dataclass(frozen=True)
class _Family:
    """Parts of one kind that the same layers have: each part is a list of frames, in order."""

    name: str
    kind: str
    parts: tuple[tuple[int, ...], ...]


def build_table(network: str, trace: Trace) -> Table:
    """Collect the symmetries of a traced network; return the table."""
    return _Builder(network, trace).table()


class _Builder:
    def __init__(self, network: str, trace: Trace) -> None:
        self.network, self.trace, self.frames = network, trace, trace.frames
        self.names: set[str] = set()
        self.moves: dict[str, list[Move]] = defaultdict(list)
        self.powers: dict[str, list[Power]] = defaultdict(list)
        self.sign_powers: dict[str, list[Power]] = defaultdict(list)
        self.turns: dict[str, list[Turn]] = defaultdict(list)
        self.groups: dict[str, Group] = {}
        self.scales: dict[str, Scale] = {}
        self.signs: dict[str, Sign] = {}
        self.matrices: dict[str, Matrix] = {}
        self.entries: dict[int, list[tuple[Record, int]]] = defaultdict(list)  # Place -> entries of records.
        self.records_of_frame: dict[int, list[tuple[Record, int]]] = defaultdict(list)
        for record in trace.records:
            for entry, coordinate in enumerate(record.coordinates.tolist()):
                self.entries[self.frames.place(coordinate)].append((record, entry))
                self.records_of_frame[self.frames.frame(coordinate)[0]].append((record, entry))
        self.group_of_frame: dict[int, str] = {}
        self.unit_of_frame: dict[int, int] = {}  # Frame of a unit that moves on its own -> number of the unit.

    def table(self) -> Table:
        """Return the table."""
        families = self._families()
        self._add_heads()
        self._add_scales_of_scores()
        self._add_units()
        for family in families:
            for one in self._by_unit(family):
                self._add_family(one)
        tensors = {
            name: Axes(
                shape, self._role(name), 0.0, tuple(self.moves[name]), tuple(self.powers[name]),
                tuple(self.sign_powers[name]), tuple(self.turns[name]),
            )
            for name, shape in self.trace.shapes.items()
        }  # fmt: skip
        return Table(self.network, tensors, self.groups, self.scales, self.signs, self.matrices)

    def _role(self, name: str) -> str:
        return self.trace.roles.get(name, "weight" if len(self.trace.shapes[name]) > 1 else "bias")

    def _name(self, base: str) -> str:
        name, number = base or "input", 1
        while name in self.names:
            number += 1
            name = f"{base or 'input'} #{number}"
        self.names.add(name)
        return name

    # Frames that matrices, scales and signs act on.

    def _families(self) -> list[_Family]:
        """Divide the frames into parts, which no claim divides, and join parts of one kind."""
        memberships: dict[int, set[tuple[int, int]]] = defaultdict(set)
        sources: dict[int, set[int]] = defaultdict(set)
        for claim, parts in enumerate(self.frames.parts):
            for number, part in enumerate(parts):
                for coordinate in part.tolist():
                    frame, _ = self.frames.frame(coordinate)
                    memberships[frame].add((claim, number))
                    sources[frame].add(self.frames.source[coordinate])
        parts_by_signature: dict[Hashable, list[int]] = defaultdict(list)
        for frame in sorted(memberships):
            if frame in self.records_of_frame:
                parts_by_signature[frozenset(memberships[frame])].append(frame)
        families: dict[Hashable, list[tuple[int, ...]]] = defaultdict(list)
        for frames in self._with_pairs(parts_by_signature.values()):
            kind = self._kind(frames)
            if kind:
                families[kind, len(frames), frozenset(sources[frames[0]])].append(frames)
        return [
            _Family(self.frames.names[min(key[2])], key[0], tuple(parts))  # type: ignore[index]
            for key, parts in families.items()
        ]

    def _with_pairs(self, parts: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
        """Join the two units of each pair that positions turn: they have one scale."""
        partner: dict[int, int] = {}
        for pair in self.frames.rotations:
            first, second = sorted(self.frames.frame(c)[0] for c in pair.tolist())
            if first != second and all(self.frames.limit_of(c) & Limit.UNITS for c in pair.tolist()):
                partner[second] = first
        joined: dict[int, list[int]] = {}
        for part in parts:
            key = partner.get(part[0], part[0]) if len(part) == 1 else part[0]
            joined.setdefault(key, []).extend(part)
        return [tuple(part) for part in joined.values()]

    def _kind(self, part: tuple[int, ...]) -> str:
        """Return the kind of group that acts on a part; "" if none does."""
        limit = Limit.NONE
        for frame in part:
            limit |= self.frames.limit_of(frame)
        if limit & Limit.PINNED:
            return ""
        if limit & Limit.UNITS or len(part) == 1:
            if limit & Limit.NORM:
                return "" if limit & (Limit.POSITIVE | Limit.MEAN) else "sign"
            return "positive scale" if limit & Limit.POSITIVE else "scale"
        if limit & Limit.ROTATION:
            return "turn" if limit & Limit.NORM else "complex"
        if limit & Limit.NORM:
            return "centred orthogonal" if limit & Limit.MEAN else "orthogonal"
        return "invertible"

    def _by_unit(self, family: _Family) -> list[_Family]:
        """Divide a family of scales or signs whose values of one unit do not lie together; return the families."""
        units = [self.unit_of_frame.get(part[0], -1) for part in family.parts]
        if min(units) < 0 or units == sorted(units):
            return [family]
        seen: dict[int, int] = defaultdict(int)
        split: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for unit, part in zip(units, family.parts, strict=True):
            split[seen[unit]].append(part)
            seen[unit] += 1
        return [replace(family, parts=tuple(parts)) for parts in split.values()]

    def _add_family(self, family: _Family) -> None:
        name = self._name(family.name)
        writers = self._writers(family.parts[0][0])
        groups = {self.group_of_frame.get(part[0]) for part in family.parts}
        group = next(iter(groups)) if len(groups) == 1 else None
        if group is not None and len(family.parts) % self.groups[group].size:
            group = None
        if family.kind in ("sign", "scale", "positive scale"):
            count, powers = len(family.parts), self._find_powers(name, family)
            if any((p.axis, group) not in [(m.axis, m.group) for m in self.moves[tensor]] for tensor, p in powers):
                group = None  # A gain that all heads share stays in place.
            if family.kind != "sign":
                self.scales[name] = Scale(name, count, group, True, (), self._gains(family) or writers)
            if family.kind != "positive scale":
                self.signs[name] = Sign(name, count, group)
            for tensor, power in powers:
                if family.kind != "sign":
                    self.powers[tensor].append(power)
                if family.kind != "positive scale":
                    self.sign_powers[tensor].append(power)
            return
        self.matrices[name] = Matrix(name, family.kind, len(family.parts[0]), len(family.parts), group, writers)
        place = {frame: (copy, i) for copy, part in enumerate(family.parts) for i, frame in enumerate(part)}
        records = {id(record): record for frame in place for record, _ in self.records_of_frame[frame]}
        for record in records.values():
            self._add_turn(name, record, place)

    def _gains(self, family: _Family) -> tuple[tuple[str, int], ...]:
        """Return the gains that a scale multiplies, in order."""
        records = [record for part in family.parts for frame in part for record, _ in self.records_of_frame[frame]]
        names = dict.fromkeys(record.tensor for record in records if len(record.part.size) == 1)
        return tuple((name, 0) for name in names if self.trace.roles.get(name) == "gain")

    def _writers(self, frame: int) -> tuple[tuple[str, int], ...]:
        found = [
            (record.tensor, self._parameter_axis(record))
            for record, entry in self.records_of_frame[frame]
            if self.frames.frame(int(record.coordinates[entry]))[1] == 0 and len(record.part.size) > 1
        ]
        return tuple(dict.fromkeys(found))

    def _add_turn(self, name: str, record: Record, place: Mapping[int, tuple[int, int]]) -> None:
        size = self.matrices[name].size
        seen: dict[tuple[int, ...], int] = defaultdict(int)
        blocks: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)  # (parity, number, copy) -> unit -> entry
        for entry, coordinate in enumerate(record.coordinates.tolist()):
            frame, parity = self.frames.frame(coordinate)
            if frame in place:
                copy, i = place[frame]
                blocks[parity, seen[parity, copy, i], copy][i] = entry
                seen[parity, copy, i] += 1
        if any(len(block) != size for block in blocks.values()):
            raise SymmetryError(
                f"axis {record.axis} of {record.tensor}", expected="whole frames", found="parts of them",
                do="Give a network without such a layer",
            )  # fmt: skip
        gain = None if record.gain is None else record.gain
        for parity in (0, 1):
            of_parity = {key: block for key, block in blocks.items() if key[0] == parity}
            if of_parity:
                entries = tuple(tuple(block[i] for i in range(size)) for block in of_parity.values())
                self.turns[record.tensor].append(
                    Turn(
                        name,
                        record.part,
                        record.axis,
                        entries,
                        tuple(key[2] for key in of_parity),
                        bool(parity),
                        None if gain is None else gain.tensor,
                        0.0 if gain is None else gain.shift,
                        record.is_divided,
                    )
                )

    def _parameter_axis(self, record: Record) -> int:
        """Return the axis of the parameter that an axis of a part of it lies on."""
        shape = self.trace.shapes[record.tensor]
        strides = torch.empty(shape, device="meta").stride()
        step = record.part.stride[record.axis]
        axes = [i for i, (n, s) in enumerate(zip(shape, strides, strict=True)) if s == step and n > 1]
        if not axes:
            if record.part.size[record.axis] == 1:
                return 0
            raise SymmetryError(
                f"parameter {record.tensor}", expected="parts along its axes", found="another view of it",
                do="Give a network without such a layer",
            )  # fmt: skip
        return axes[0]

    def _position(self, record: Record, entry: int) -> int:
        """Return the position on the parameter's axis of an entry of a part's axis."""
        axis = self._parameter_axis(record)
        shape = self.trace.shapes[record.tensor]
        stride = torch.empty(shape, device="meta").stride()[axis] if shape else 1
        start = (record.part.offset // max(stride, 1)) % shape[axis] if shape else 0
        return start + entry

    def _runs(self, units: Sequence[Sequence[tuple[Record, int]]]) -> list[tuple[str, int, int, int, Record]]:
        """Return the runs (tensor, axis, first position, entries a unit, record) that a list of units takes."""
        positions: dict[tuple[str, int], list[dict[int, Record]]] = {}
        for i, unit in enumerate(units):
            for record, entry in unit:
                key = record.tensor, self._parameter_axis(record)
                if key not in positions:
                    positions[key] = [{} for _ in units]
                positions[key][i][self._position(record, entry)] = record
        runs = []
        for (tensor, axis), places in positions.items():
            for start, span in self._stretches(places):
                runs.append((tensor, axis, start, span, places[0][start]))
            covered = {
                s + i * n + e for _, a, s, n, _ in runs if a == axis for i in range(len(units)) for e in range(n)
            }
            if any(set(place) - covered for place in places):
                raise SymmetryError(
                    f"axis {axis} of {tensor}", expected="units in equal runs", found="another order",
                    do="Give a network without such a layer",
                )  # fmt: skip
        return runs

    def _stretches(self, places: list[dict[int, Record]]) -> list[tuple[int, int]]:
        """Return (first position, entries a unit) of each run: unit i has entries first + i * span + (0 to span)."""
        stretches: list[tuple[int, int]] = []
        for position in sorted(places[0]):
            if stretches and position < sum(stretches[-1]):
                continue
            longest = next(n for n in range(1, len(places[0]) + 2) if position + n not in places[0])
            fitting = [span for span in range(longest, 0, -1) if self._fits(places, position, span)]
            stretches += [(position, fitting[0])] if fitting else []
        return stretches

    @staticmethod
    def _fits(places: list[dict[int, Record]], start: int, span: int) -> bool:
        return all(start + i * span + e in place for i, place in enumerate(places) for e in range(span))

    def _find_powers(self, name: str, family: _Family) -> list[tuple[str, Power]]:
        """Return the powers of a scale or sign, with the tensors that they multiply."""
        units = []
        for part in family.parts:
            units.append([(r, e) for frame in part for r, e in self.records_of_frame[frame]])
        powers = []
        for tensor, axis, start, span, record in self._runs(units):
            coordinate = int(record.coordinates[start - self._position(record, 0)])
            power = -1.0 if self.frames.frame(coordinate)[1] else 1.0
            powers.append((tensor, Power(axis, name, power, start, span * len(units))))
        # A gain between an axis and its frame also divides, or multiplies, the axis.
        number_of_frame = {frame: i for i, part in enumerate(family.parts) for frame in part}
        count = len(family.parts)
        for record in self.trace.records:
            if record.gain is None:
                continue
            numbers = [number_of_frame.get(self.frames.frame(c)[0]) for c in record.gain.coordinates.tolist()]
            for start in range(len(numbers) - count + 1):
                if numbers[start : start + count] == list(range(count)):
                    place, power = self._position(record, start), 1.0 if record.is_divided else -1.0
                    axis = self._parameter_axis(record)
                    powers.append((record.tensor, Power(axis, name, power, place, count)))
        return powers

    # Permutations of units and of heads.

    def _add_units(self) -> None:
        """Add the groups of units that permutations alone move."""
        slots: dict[int, set[int]] = defaultdict(set)
        places: dict[int, set[int]] = defaultdict(set)
        for record in self.trace.records:
            for coordinate in record.coordinates.tolist():
                slot = self.frames.slot(coordinate)
                slots[slot].add(self.frames.frame(coordinate)[0])
                places[slot].add(self.frames.place(coordinate))
        signature: dict[int, set[Hashable]] = defaultdict(set)
        for claim, parts in enumerate(self.frames.parts):
            single = all(len(part) == 1 for part in parts)
            for number, part in enumerate(parts):
                for coordinate in part.tolist():
                    signature[self.frames.slot(coordinate)] |= {
                        (claim, -1 if single else number), ("source", self.frames.source[coordinate])
                    }  # fmt: skip
        in_heads = {
            self.frames.slot(c)
            for core in self.trace.cores
            for part in (*((core.queries, core.keys) if len(core.queries) > 1 else ()), *core.biases)
            for c in part.flatten().tolist()
        }
        families: dict[Hashable, list[int]] = defaultdict(list)
        for slot in sorted(slots):
            limits = [self.frames.limit_of(frame) for frame in slots[slot]]
            free = all(limit & Limit.UNITS and not limit & (Limit.PINNED | Limit.ROTATION) for limit in limits)
            if free and slot not in in_heads:
                families[frozenset(signature[slot])].append(slot)
        for units in families.values():
            if len(units) > 1:
                self._add_group(units, slots)

    def _add_group(self, units: list[int], frames_of_slot: Mapping[int, set[int]]) -> None:
        entries = [[e for frame in frames_of_slot[slot] for e in self.records_of_frame[frame]] for slot in units]
        name = self._name(self.frames.names[self.frames.source[units[0]]])
        for tensor, axis, start, span, _ in self._runs(entries):
            self.moves[tensor].append(Move(axis, name, start, span))
        writers = tuple(w for frame in sorted(frames_of_slot[units[0]]) for w in self._writers(frame))
        writers = tuple(dict.fromkeys(writers))
        # Layers whose outputs are added write one frame; the two layers of a gated unit write a frame each.
        stream = any(len(self._writers(frame)) > 1 for frame in frames_of_slot[units[0]])
        self.groups[name] = Group(name, len(units), 1, None, stream, writers)
        for number, slot in enumerate(units):
            for frame in frames_of_slot[slot]:
                self.group_of_frame[frame], self.unit_of_frame[frame] = name, number

    def _add_heads(self) -> None:
        """Add the groups of heads: one group an attention, or one for all that share a learned bias of the scores."""
        together: dict[int, list[Core]] = {}
        for number, core in enumerate(self.trace.cores):
            places = {self.frames.place(c) for bias in self._biases_of_heads(core) for c in bias.tolist()}
            shared = [
                key
                for key, cores in together.items()
                if places & {self.frames.place(c) for o in cores for b in o.biases for c in b.tolist()}
            ]
            together[number] = [*(one for key in shared for one in together.pop(key)), core]
        for cores in together.values():
            if all(self._can_permute(core) for core in cores) and len({len(core.queries) for core in cores}) == 1:
                self._add_head_group(cores)

    def _biases_of_heads(self, core: Core) -> list[Tensor]:
        """Return the learned biases and scales of scores of which each head has its own."""
        return [b for b in core.biases if len({self.frames.place(c) for c in b.tolist()}) == len(b) > 1]

    def _can_permute(self, core: Core) -> bool:
        shared = [{self.frames.place(c) for c in bias.tolist()} for bias in core.biases]
        if any(1 < len(places) < len(core.queries) for places in shared):
            return False
        if core.pinned or core.values is None or core.outputs is None or len(core.queries) == 1:
            return False
        if any(bool((slope != slope[0]).any()) for slope in core.slopes):
            return False
        frames = [self.frames.frame(c)[0] for part in (core.outputs, core.queries) for c in part.flatten().tolist()]
        return not any(self.frames.limit_of(frame) & Limit.PINNED for frame in frames)

    def _add_head_group(self, cores: list[Core]) -> None:
        heads = len(cores[0].queries)
        groups: list[list[int]] = []
        for core in cores:
            rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for head in range(heads):
                rows[tuple(self.frames.place(c) for c in core.keys[head].tolist())].append(head)
            groups = list(rows.values())
        size = heads // len(groups)
        if any(group != list(range(i * size, (i + 1) * size)) for i, group in enumerate(groups)):
            return
        name = self._name(f"{cores[0].name} heads".strip())
        own = [
            part
            for core in cores
            for part in (core.queries, core.outputs, *(bias[:, None] for bias in self._biases_of_heads(core)))
        ]
        common = [part for core in cores for part in (core.keys, core.values)]
        if size == 1:
            self._add_moves(name, self._units_of([*own, *common], groups))
            self.groups[name] = Group(name, heads, 1, None, False, self._head_writers(cores, name))
        elif len(groups) > 1 and self._lie_apart(self._units_of(common, groups)):
            # As in Falcon, queries lie between the keys and values of groups: they move as a whole, in their order.
            own_units = self._units_of(own, groups)
            units = [a + b for a, b in zip(own_units, self._units_of(common, groups), strict=True)]
            self._add_moves(name, units)
            self.groups[name] = Group(name, len(groups), 1, None, False, self._head_writers(cores, name))
        else:
            if len(groups) > 1:
                self._add_moves(name, self._units_of(common, groups))
                self.groups[name] = Group(name, len(groups), 1, None, False, self._head_writers(cores, name))
            inner = self._name(f"{cores[0].name} queries".strip())
            self._add_moves(inner, self._units_of(own, [[head] for head in range(heads)]))
            mover = name if len(groups) > 1 else None
            self.groups[inner] = Group(inner, heads, len(groups), mover, False, self._head_writers(cores, inner))
        if len(groups) > 1:
            for core in cores:
                for part in (core.keys, core.values):
                    for c in part.flatten().tolist() if part is not None else ():
                        self.group_of_frame[self.frames.frame(c)[0]] = name

    def _add_scales_of_scores(self) -> None:
        """Add a scale and a sign for each learned number that multiplies scores: the queries take up its inverse."""
        uses: dict[int, int] = defaultdict(int)  # Place -> in how many attentions it has a part.
        for core in self.trace.cores:
            parts = (core.queries, core.keys, core.values, *core.scales)
            places = [{self.frames.place(c) for c in part.flatten().tolist()} for part in parts if part is not None]
            for place in [place for of_part in places for place in of_part]:
                uses[place] += 1
        barred = Limit.UNITS | Limit.NORM | Limit.MEAN | Limit.POSITIVE | Limit.PINNED
        for core in self.trace.cores:
            queries = core.queries.flatten().tolist()
            if any(self.frames.limit_of(c) & barred or uses[self.frames.place(c)] > 1 for c in queries):
                continue
            for scale in core.scales[:1]:
                heads: dict[int, list[int]] = defaultdict(list)
                for head, c in enumerate(scale.tolist()):
                    heads[self.frames.place(c)].append(head)
                if all(uses[place] == 1 for place in heads):
                    self._add_scale_of_scores(core, list(heads), list(heads.values()))

    def _add_scale_of_scores(self, core: Core, places: list[int], heads: list[list[int]]) -> None:
        name, count = self._name(f"{core.name} scores".strip()), len(places)
        numbers = self._runs([self.entries[place] for place in places])
        queries = self._runs(self._units_of([core.queries], heads))
        for runs, power in ((numbers, 1.0), (queries, -1.0)):
            for tensor, axis, start, span, _ in runs:
                for powers in (self.powers, self.sign_powers):
                    powers[tensor].append(Power(axis, name, power, start, span * count))
        moved = [(m.axis, m.group) for m in self.moves[numbers[0][0]]]
        group = next((group for axis, group in moved if axis == numbers[0][1]), None)
        writers = tuple((tensor, axis) for tensor, axis, *_ in numbers)
        self.trace.roles |= {tensor: "gain" for tensor, _ in writers}
        self.scales[name] = Scale(name, count, group, True, (), writers)
        self.signs[name] = Sign(name, count, group)

    def _head_writers(self, cores: list[Core], group: str) -> tuple[tuple[str, int], ...]:
        found = []
        for core in cores:
            for part in (core.queries, core.keys, core.values):
                if part is not None:
                    for record, _ in self.entries[self.frames.place(int(part[0, 0]))]:
                        if len(record.part.size) > 1:
                            found.append((record.tensor, self._parameter_axis(record)))
        return tuple(
            (t, a) for t, a in dict.fromkeys(found) if (group, a) in [(m.group, m.axis) for m in self.moves[t]]
        )

    def _units_of(
        self, parts: Sequence[Tensor | None], groups: Sequence[Sequence[int]]
    ) -> list[list[tuple[Record, int]]]:
        """Return the entries of records that each group of heads has in some parts."""
        units = []
        for heads in groups:
            coordinates = [c for part in parts if part is not None for head in heads for c in part[head].tolist()]
            places = dict.fromkeys(self.frames.place(c) for c in coordinates)
            units.append([entry for place in places for entry in self.entries[place]])
        return units

    def _lie_apart(self, units: Sequence[Sequence[tuple[Record, int]]]) -> bool:
        """Return whether other entries lie between the entries of units."""
        try:
            self._runs(units)
        except SymmetryError:
            return True
        return False

    def _add_moves(self, name: str, units: Sequence[Sequence[tuple[Record, int]]]) -> None:
        for tensor, axis, start, span, _ in self._runs(units):
            self.moves[tensor].append(Move(axis, name, start, span))
