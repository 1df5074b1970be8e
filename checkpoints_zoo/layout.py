"""Names, dtypes, shapes and offsets of one member's bytes, and the content hash.

A layout and a location (file, offset, nbytes) are all that is needed to read a member. Within a member the
tensors follow each other without holes: by falling size of their elements, in the order of the module within a
size, so that every tensor is aligned wherever the member starts at a multiple of eight bytes. What is left to
such a multiple is filled by `_pad`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from checkpoints_zoo.errors import FormatError, UsageError

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
PAD = "_pad"
ALIGNMENT = 8

_NUMPY = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2",
    "BF16": "<u2", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a member: its name, dtype (as safetensors spells it), shape, and offset within the member."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def is_statistic(self) -> bool:
        """Whether this is a normalisation statistic: always stored in float32, never narrowed."""
        return self.name.rpartition(".")[2] in ("running_mean", "running_var")


@dataclass(frozen=True)
class Layout:
    """How a member's bytes become named tensors.

    Args:
        tensors: in the order of their bytes.
        counters: names of integer counters (`num_batches_tracked`) that are not stored but rebuilt as zero.
        pad: zero bytes after the last tensor.
    """

    tensors: tuple[TensorSpec, ...]
    counters: tuple[str, ...] = ()
    pad: int = 0

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]], counters: Iterable[str] = ()) -> Layout:
        """Lay tensors out in our order; return the layout.

        Args:
            tensors: (name, dtype, shape) in the order of the module.
            counters: names that are rebuilt, not stored.

        Raises:
            UsageError: a tensor is called `_pad`, or a dtype is none of safetensors'.

        >>> layout = Layout.of([("bn.weight", "F16", (3,)), ("bn.running_var", "F32", (3,))])
        >>> [(t.name, t.offset) for t in layout.tensors], layout.nbytes
        ([('bn.running_var', 0), ('bn.weight', 12)], 24)
        """
        ordered = sorted(tensors, key=lambda t: -ELEMENT_BYTES.get(t[1], 0))
        return cls._packed(ordered, tuple(counters), None)

    @classmethod
    def _packed(
        cls, ordered: Iterable[tuple[str, str, tuple[int, ...]]], counters: tuple[str, ...], pad: int | None
    ) -> Layout:
        specs, offset = [], 0
        for name, dtype, shape in ordered:
            if name == PAD:
                raise UsageError(
                    f"tensor {name!r}", expected="another name: '_pad' is the format's own", tensor=name
                )
            if dtype not in ELEMENT_BYTES:
                raise UsageError(
                    f"tensor {name!r}",
                    expected=f"a dtype among {', '.join(ELEMENT_BYTES)}",
                    found=dtype,
                    tensor=name,
                )
            specs.append(TensorSpec(name, dtype, tuple(shape), offset))
            offset += specs[-1].nbytes
        if len({s.name for s in specs}) < len(specs):
            raise UsageError("layout", expected="every tensor's name once", found="a name twice")
        return cls(tuple(specs), counters, -offset % ALIGNMENT if pad is None else pad)

    @cached_property
    def payload(self) -> int:
        """Bytes of a member's tensors, without the pad."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes from one member's start to the next one's, pad included."""
        return self.payload + self.pad

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {t.name: t.shape for t in self.tensors}

    @property
    def dtype(self) -> str:
        """The dtype of the weights: the one that most elements have."""
        elements: dict[str, int] = {}
        for t in self.tensors:
            elements[t.dtype] = elements.get(t.dtype, 0) + math.prod(t.shape)
        return max(elements, key=lambda d: elements[d])

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        return {
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "counters": list(self.counters),
            "pad": self.pad,
        }

    @classmethod
    def from_json(cls, values: Any) -> Layout:
        """Read what `to_json` wrote, trusting nothing; return the layout.

        Raises:
            FormatError: anything but names, known dtypes, shapes of whole numbers and a pad of 0..7.
        """
        try:
            tensors = [(name, dtype, tuple(shape)) for name, dtype, shape in values["tensors"]]
            counters, pad = tuple(values["counters"]), values["pad"]
            good = (
                tensors
                and all(type(n) is str and type(d) is str for n, d, _ in tensors)
                and all(type(s) is int and 0 <= s < 2**40 for _, _, shape in tensors for s in shape)
                and all(type(c) is str for c in counters)
                and type(pad) is int
                and 0 <= pad < ALIGNMENT
            )
            layout = cls._packed(tensors, counters, pad) if good else None
        except (TypeError, ValueError, KeyError, UsageError) as error:
            raise FormatError("layout", expected="tensors, counters and a pad", found=repr(error)) from error
        if layout is None or layout.nbytes >= 2**60:
            raise FormatError(
                "layout",
                expected="names, dtypes, shapes of whole numbers, a pad of 0..7",
                found=str(values)[:200],
            )
        return layout


def content_hash(layout: Layout, member: bytes | bytearray | memoryview) -> str:
    """Hash a member's names, shapes and values; return 64 hex digits.

    The same wherever and however the member is stored: tensors in the order of their names, counters left out,
    float16 and bfloat16 widened to float32 (which loses nothing), little-endian. For each tensor the hash takes
    the line `["name","DTYPE",[shape]]` and its values.

    Args:
        layout: of the member.
        member: its bytes, pad or no pad.
    """
    digest = hashlib.sha256()
    for t in sorted(layout.tensors, key=lambda t: t.name):
        if t.name.rpartition(".")[2] == "num_batches_tracked":
            continue
        raw = np.frombuffer(member, np.uint8, count=t.nbytes, offset=t.offset)
        dtype = t.dtype
        if dtype == "F16":
            raw, dtype = raw.view("<f2").astype("<f4").view(np.uint8), "F32"
        elif dtype == "BF16":
            raw, dtype = (raw.view("<u2").astype("<u4") << np.uint32(16)).view(np.uint8), "F32"
        digest.update(json.dumps([t.name, dtype, list(t.shape)], separators=(",", ":")).encode() + b"\n")
        digest.update(raw.data)
    return digest.hexdigest()


def finite_problems(layout: Layout, member: bytes | bytearray | memoryview) -> list[str]:
    """Look for values that are not finite; return the names of the tensors that have one.

    Args:
        layout: of the member.
        member: its bytes.
    """
    bad = []
    for t in layout.tensors:
        if t.dtype not in FLOATS:
            continue
        values = np.frombuffer(member, _NUMPY[t.dtype], count=math.prod(t.shape), offset=t.offset)
        if t.dtype == "BF16":
            values = (values.astype("<u4") << np.uint32(16)).view("<f4")
        if not np.isfinite(values).all():
            bad.append(t.name)
    return bad
