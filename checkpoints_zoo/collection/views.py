"""Views: steps that change members' weights as they are read (canonical maps, alignment, symmetries from a caller).

A step changes stacked parameters, name -> (member, …), and returns them together with the symmetry that it applied to
each member. The attribute `changes_values` of a step is true if values change, and false if they only move.
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
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.symmetry import Element, Table, apply, compose
from checkpoints_zoo.symmetry.canonical import alignment, maps
from checkpoints_zoo.symmetry.elements import identity_element

Key = tuple[int, int]  # (member id, epoch) of a snapshot
Params = dict[str, Tensor]

_BYTES_AT_ONCE = 1 << 25  # Number of bytes of members that are read and changed at once; two such chunks are in memory.


@dataclass(frozen=True)
class Canonical:
    """A step that applies a canonical map; the arguments are those of `canonical.maps.canonicalize`."""

    scale: str | None
    permute: str | None
    streams: bool
    approximate: bool
    heads: str | None = None

    @property
    def changes_values(self) -> bool:
        return self.scale is not None or self.heads is not None

    def __call__(self, table: Table, member_keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        return maps.canonicalize(
            table, params, scale=self.scale, permute=self.permute, streams=self.streams,
            approximate=self.approximate, heads=self.heads,
        )  # fmt: skip

    def __str__(self) -> str:
        option_texts = [f"scale={self.scale}" if self.scale else "", f"permute={self.permute}" if self.permute else ""]
        option_texts += ["streams" if self.streams else "", "approximate" if self.approximate else ""]
        option_texts += [f"heads={self.heads}" if self.heads else ""]
        return f"canonical({', '.join(option_text for option_text in option_texts if option_text)})"


@dataclass(eq=False)
class Aligned:
    """A step that aligns members to a reference. A member is matched when it is first read, and its symmetry is kept
    for later reads.

    Args:
        to: name of the reference in the description of the view.
        load_reference: function that reads the reference's tensors, name -> (*shape).
        reference_keys: (member id, epoch) of members that are the reference itself, which stay as they are.
        using: which symmetries of a network with attention are used, see `alignment.restrict`.
        changes_values: whether the symmetries have more than permutations.
    """

    to: str
    load_reference: Callable[[], Mapping[str, Tensor]]
    reference_keys: frozenset[Key] = frozenset()
    using: str | None = None
    changes_values: bool = False
    _reference: Mapping[str, Tensor] | None = None
    _elements: dict[Key, Element] = field(default_factory=dict)

    def __call__(self, table: Table, member_keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        params, table = _widened(params) if self.changes_values else params, alignment.restrict(table, self.using)
        identity = identity_element(table, 1).select(0)
        unchanged = identity if table.is_continuous else Element(identity.permutations)
        self._elements |= dict.fromkeys(self.reference_keys.intersection(member_keys), unchanged)
        positions = [position for position, key in enumerate(member_keys) if key not in self._elements]
        if positions:
            device = next(iter(params.values())).device
            reference = {name: tensor.to(device) for name, tensor in self.read_reference().items()}
            unmatched = (
                params if len(positions) == len(member_keys) else {name: t[positions] for name, t in params.items()}
            )
            element = alignment.match_weights(table, unmatched, reference).element.cpu()
            self._elements |= {member_keys[position]: element.select(row) for row, position in enumerate(positions)}
        return _apply_elements(table, params, [self._elements[key] for key in member_keys])

    def __getstate__(self) -> dict[str, Any]:
        # Pickle the reference's tensors, and not the function that reads them, for other processes.
        return self.__dict__ | {"_reference": self.read_reference(), "load_reference": dict}

    def read_reference(self) -> Mapping[str, Tensor]:
        """Return the reference's tensors, name -> (*shape); they are read only once."""
        self._reference = self._reference or self.load_reference()
        return self._reference

    def __str__(self) -> str:
        return f"aligned to {self.to}" + (f" using {self.using}" if self.using else "")


@dataclass(eq=False)
class AlignedToMean:
    """A step that aligns members to the mean of all members, which is computed when the first member is read.

    Args:
        match_to_mean: function that matches all members to their mean, and returns key -> symmetry.
        using, changes_values: as in `Aligned`.
    """

    match_to_mean: Callable[[], dict[Key, Element]]
    using: str | None = None
    changes_values: bool = False
    _elements: dict[Key, Element] = field(default_factory=dict)

    def __call__(self, table: Table, member_keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        self._elements = self._elements or self.match_to_mean()
        params = _widened(params) if self.changes_values else params
        return _apply_elements(table, params, [self._elements[key] for key in member_keys])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_elements": self._elements or self.match_to_mean(), "match_to_mean": dict}

    def __str__(self) -> str:
        return "aligned to the mean" + (f" using {self.using}" if self.using else "")


@dataclass(eq=False)
class Transformed:
    """A step that applies symmetries from the caller or a file, one for each member.

    Args:
        row_of_key: (member id, epoch) -> the member's row in `element`.
        element: the symmetries, one row for each member.
        origin: name of the symmetries' source, for the description of the view and error texts.
    """

    row_of_key: Mapping[Key, int]
    element: Element
    origin: str

    @property
    def changes_values(self) -> bool:
        return self.element.changes_values

    def __call__(self, table: Table, member_keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        for member, epoch in member_keys:
            if (member, epoch) not in self.row_of_key:
                raise MemberNotFound(
                    f"symmetry of member {member} at epoch {epoch}",
                    expected=f"one of the {len(self.row_of_key)} members of {self.origin}",
                    found="none",
                    member=member,
                )
        element_rows = torch.tensor([self.row_of_key[key] for key in member_keys])
        element = self.element.select(element_rows)
        return apply(table, _widened(params) if self.changes_values else params, element), element

    def __str__(self) -> str:
        return f"symmetries of {self.origin}"


def _widened(params: Params) -> Params:
    """Return tensors in float32 or wider."""
    return {n: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for n, t in params.items()}


def _apply_elements(table: Table, params: Params, elements: Sequence[Element]) -> tuple[Params, Element]:
    element = Element.stack(elements)
    return apply(table, params, element), element


Step = Canonical | Aligned | AlignedToMean | Transformed


@dataclass(frozen=True)
class View:
    """A view: a sequence of steps that are applied one after another."""

    steps: tuple[Step, ...] = ()

    @property
    def changes_values(self) -> bool:
        return any(step.changes_values for step in self.steps)

    def __call__(self, table: Table, member_keys: Sequence[Key], params: Params) -> tuple[Params, Element]:
        """Apply all steps to stacked members; return the changed members, and the symmetry that was applied to each
        member."""
        applied_element = Element()
        for step in self.steps:
            params, element = step(table, member_keys, params)
            applied_element = compose(table, applied_element, element.cpu())
        return params, applied_element

    def stack(
        self,
        table: Table,
        member_keys: Sequence[Key],
        locations: Sequence[Location],
        device: torch.device,
        dtype: torch.dtype | None,
        tensor_names: Sequence[str] | None = None,
    ) -> Params:
        """Read members, some at a time, check their values and apply the steps; return stacked tensors, name ->
        (member, …).

        Args:
            table: symmetry table of the members' network.
            member_keys, locations: keys of the members, and locations of their bytes.
            device, dtype, tensor_names: the same arguments as in `reading.stack`; if a step scales values, None for the
                dtype means float32 or wider.
        """
        dtypes = reading.stacked_dtypes(locations, dtype, tensor_names)
        if dtype is None and self.changes_values:
            dtypes = {n: torch.promote_types(k, torch.float32) if k.is_floating_point else k for n, k in dtypes.items()}
        stacked = reading.empty_stack(locations, dtypes, device)
        first_row = 0
        for chunk_member_count, params in self._transformed_chunks(table, member_keys, locations, device):
            for name, tensor in stacked.items():
                tensor[first_row : first_row + chunk_member_count] = params[name]
            first_row += chunk_member_count
        reading.check_finite(stacked, locations)
        return stacked

    def _transformed_chunks(
        self, table: Table, member_keys: Sequence[Key], locations: Sequence[Location], device: torch.device
    ) -> Iterator[tuple[int, Params]]:
        for chunk_keys, params in self._read_chunks(member_keys, locations, device):
            yield len(chunk_keys), self(table, chunk_keys, params)[0]

    def elements(self, table: Table, member_keys: Sequence[Key], locations: Sequence[Location]) -> Element:
        """Read members and return the symmetry that this view applies to each of them."""
        cpu_device = torch.device("cpu")
        chunk_elements = [
            self(table, chunk_keys, params)[1]
            for chunk_keys, params in self._read_chunks(member_keys, locations, cpu_device)
        ]
        return Element.concatenate(chunk_elements)

    def _read_chunks(
        self, member_keys: Sequence[Key], locations: Sequence[Location], device: torch.device
    ) -> Iterator[tuple[Sequence[Key], Params]]:
        member_nbytes = locations[0].layout.nbytes
        chunk_member_count = max(1, _BYTES_AT_ONCE // max(1, member_nbytes))
        for chunk_start in range(0, len(member_keys), chunk_member_count):
            with one_thread(member_nbytes < SMALL_MEMBER_BYTES and device.type == "cpu"):
                yield (
                    member_keys[chunk_start : chunk_start + chunk_member_count],
                    reading.stack(locations[chunk_start : chunk_start + chunk_member_count], device, check=True),
                )
