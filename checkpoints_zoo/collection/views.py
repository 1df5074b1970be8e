"""Views: what is done to members' weights as they are read — canonical maps, alignment, given symmetries.

A step changes stacked parameters, name -> (member, …), and returns them with the symmetry that was applied, one row a
member; its `scales` says whether values change, and do not only move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.collection import reading
from checkpoints_zoo.errors import MemberNotFound
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.symmetry import Element, Table, apply, compose, permute
from checkpoints_zoo.symmetry.canonical import alignment, maps

Key = tuple[int, int]  # member, epoch
Params = dict[str, Tensor]

_CHUNK = 1 << 25  # bytes of members that are read and changed at once: two of them are held


@dataclass(frozen=True)
class Canonical:
    """A canonical map; the arguments are those of `canonical.maps.canonicalize`."""

    scale: str | None
    permute: str | None
    streams: bool
    approximate: bool

    @property
    def scales(self) -> bool:
        return self.scale is not None

    def __call__(self, table: Table, keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        return maps.canonicalize(
            table, params, scale=self.scale, permute=self.permute, streams=self.streams, approximate=self.approximate
        )

    def __str__(self) -> str:
        words = [f"scale={self.scale}" if self.scale else "", f"permute={self.permute}" if self.permute else ""]
        words += ["streams" if self.streams else "", "approximate" if self.approximate else ""]
        return f"canonical({', '.join(w for w in words if w)})"


@dataclass(eq=False)
class Aligned:
    """Members matched to one of them, each when it is first read; what was found is kept.

    Args:
        to: words for what they are matched to.
        reference: reads it, name -> (*shape).
        same: keys of members that are the reference itself: nothing moves.
    """

    to: str
    reference: Callable[[], Mapping[str, Tensor]]
    same: frozenset[Key] = frozenset()
    scales: bool = False
    _reference: Mapping[str, Tensor] | None = None
    _found: dict[Key, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self, table: Table, keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        missing = [i for i, key in enumerate(keys) if key not in self._found]
        for i in [i for i in missing if keys[i] in self.same]:
            self._found[keys[i]] = {name: torch.arange(group.size) for name, group in table.groups.items()}
            missing.remove(i)
        if missing:
            device = next(iter(params.values())).device
            reference = {name: tensor.to(device) for name, tensor in self.target().items()}
            some = params if len(missing) == len(keys) else {name: t[missing] for name, t in params.items()}
            found = alignment.match_weights(table, some, reference).permutations
            for row, i in enumerate(missing):
                self._found[keys[i]] = {name: p[row].cpu() for name, p in found.items()}
        return _permuted(table, params, [self._found[key] for key in keys])

    def __getstate__(self) -> dict[str, Any]:
        # The reference goes along, and not how it is read.
        return self.__dict__ | {"_reference": self.target(), "reference": dict}

    def target(self) -> Mapping[str, Tensor]:
        """Return what members are matched to, name -> (*shape), read once."""
        self._reference = self._reference or self.reference()
        return self._reference

    def __str__(self) -> str:
        return f"aligned to {self.to}"


@dataclass(eq=False)
class AlignedToMean:
    """Members matched to the mean of all, which is found when one is first read.

    Args:
        find: matches all members to their mean; returns key -> group -> (unit).
    """

    find: Callable[[], dict[Key, dict[str, Tensor]]]
    scales: bool = False
    _found: dict[Key, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self, table: Table, keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        self._found = self._found or self.find()
        return _permuted(table, params, [self._found[key] for key in keys])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_found": self._found or self.find(), "find": dict}

    def __str__(self) -> str:
        return "aligned to the mean"


@dataclass(eq=False)
class Transformed:
    """Symmetries that somebody has, one a member.

    Args:
        rows: key -> the member's row of `element`.
        element: one symmetry a member.
        origin: words for where they are from.
    """

    rows: Mapping[Key, int]
    element: Element
    origin: str

    @property
    def scales(self) -> bool:
        return bool(self.element.scales)

    def __call__(self, table: Table, keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        for member, epoch in keys:
            if (member, epoch) not in self.rows:
                raise MemberNotFound(
                    f"symmetry of member {member} at epoch {epoch}",
                    expected=f"one of the {len(self.rows)} members of {self.origin}",
                    found="none",
                    member=member,
                )
        rows = torch.tensor([self.rows[key] for key in keys])
        permutations = {name: p[rows] for name, p in self.element.permutations.items()}
        scales = {name: s[rows] for name, s in self.element.scales.items()}
        wide = {n: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for n, t in params.items()}
        element = Element(permutations, scales)
        return apply(table, wide if self.scales else params, element), element

    def __str__(self) -> str:
        return f"symmetries of {self.origin}"


def _permuted(table: Table, params: Params, rows: Sequence[Mapping[str, Tensor]]) -> tuple[Params, Element]:
    permutations = {name: torch.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}
    return permute(table, params, permutations), Element(permutations)


Step = Canonical | Aligned | AlignedToMean | Transformed


@dataclass(frozen=True)
class View:
    """Steps, one after another."""

    steps: tuple[Step, ...] = ()

    @property
    def scales(self) -> bool:
        return any(step.scales for step in self.steps)

    def __call__(self, table: Table, keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        """Change stacked members; return them, and the symmetry that was applied, one row a member."""
        done = Element()
        for step in self.steps:
            params, more = step(table, keys, params)
            done = compose(table, done, more)
        return params, done

    def stack(
        self,
        table: Table,
        keys: Sequence[Key],
        locations: Sequence[Location],
        device: torch.device,
        dtype: torch.dtype | None,
        names: Sequence[str] | None = None,
    ) -> Params:
        """Read members, some at a time, and change them; return name -> (member, …), values checked.

        Args:
            table: of their network.
            keys, locations: of the members.
            device, dtype, names: as in `reading.stack`; with scales, None for the dtype is float32 or wider.
        """
        kinds = reading.kinds_of(locations, dtype, names)
        if dtype is None and self.scales:
            kinds = {n: torch.promote_types(k, torch.float32) if k.is_floating_point else k for n, k in kinds.items()}
        out = reading.room_for(locations, kinds, device)
        at = 0
        for some, params in self._changed(table, keys, locations, device):
            for name, tensor in out.items():
                tensor[at : at + some] = params[name]
            at += some
        reading.check_finite(out, locations)
        return out

    def _changed(
        self, table: Table, keys: Sequence[Key], locations: Sequence[Location], device: torch.device
    ) -> Iterator[tuple[int, Params]]:
        for some, params in self._pieces(keys, locations, device):
            yield len(some), self(table, some, params)[0]

    def elements(self, table: Table, keys: Sequence[Key], locations: Sequence[Location]) -> Element:
        """Read members and return the symmetries that this view applies to them, one row a member."""
        cpu = torch.device("cpu")
        parts = [self(table, some, params)[1] for some, params in self._pieces(keys, locations, cpu)]
        return Element(
            {n: torch.cat([p.permutations[n] for p in parts]) for n in parts[0].permutations},
            {n: torch.cat([p.scales[n] for p in parts]) for n in parts[0].scales},
        )

    def _pieces(
        self, keys: Sequence[Key], locations: Sequence[Location], device: torch.device
    ) -> Iterator[tuple[Sequence[Key], Params]]:
        each = locations[0].layout.nbytes
        step = max(1, _CHUNK // max(1, each))
        for at in range(0, len(keys), step):
            with one_thread(each < SMALL_MEMBER and device.type == "cpu"):
                yield keys[at : at + step], reading.stack(locations[at : at + step], device, check=True)
