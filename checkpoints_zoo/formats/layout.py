"""Names, dtypes, shapes and offsets of one member's bytes, and the content hash.

A member can be read if its layout and its location (file, offset, nbytes) are known. The tensors of a member follow
each other without holes. The tensors are ordered by element size, the largest first; tensors of one element size keep
the order of the module. Every tensor is therefore aligned in memory if the member starts at a multiple of eight bytes.
Zero bytes under the name `_pad` fill the member up to the next multiple of eight bytes.

This is one file, because half of it is one class, `Layout`.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.formats.text import did_you_mean, first_few

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
PAD_NAME = "_pad"
ALIGNMENT = 8
LARGEST_AXIS_COUNT = 32
LARGEST_SHOWN_COUNT = 12  # names of tensors in an error
LARGEST_TENSOR_NBYTES = 2**60

Shape = tuple[int, ...]

_NUMPY_DTYPES = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2",
    "BF16": "<u2", "I16": "<i2", "U16": "<u2", "I8": "i1", "U8": "u1", "BOOL": "u1",
}  # fmt: skip


def is_counter(tensor_name: str) -> bool:
    """Say whether a tensor is an integer counter of batches, which is never stored, hashed or averaged."""
    return tensor_name.rpartition(".")[2] == "num_batches_tracked"


def is_statistic(tensor_name: str) -> bool:
    """Say whether a tensor is a normalisation statistic, which is always stored in float32."""
    return tensor_name.rpartition(".")[2] in ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a member.

    Args:
        name, dtype, shape: name, dtype (spelled as in safetensors, "F32") and shape of the tensor.
        offset: position of the tensor's first byte within the member.
        stored, stored_shape: name and shape of the tensor in the file's header; None where they equal `name` and
            `shape`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    stored: str | None = None
    stored_shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def is_statistic(self) -> bool:
        return is_statistic(self.name)


@dataclass(frozen=True)
class Layout:
    """The order, names, dtypes and shapes of the tensors in a member's bytes.

    Args:
        tensors: descriptions of the tensors, in the order of their bytes.
        counters: names of integer counters (`num_batches_tracked`) that are not stored but rebuilt as zero.
        pad: number of zero bytes after the last tensor.
        header_nbytes: number of bytes of the safetensors header in front of a member in an archive; 0 in a shard, where
            all members share one header.
    """

    tensors: tuple[TensorSpec, ...]
    counters: tuple[str, ...] = ()
    pad: int = 0
    header_nbytes: int = 0

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, str, tuple[int, ...]]], counters: Iterable[str] = ()) -> Layout:
        """Order tensors as this package orders them in shards; return the layout.

        Args:
            tensors: (name, dtype, shape) of each tensor, in the order of the module.
            counters: names of integer counters, which are not stored but rebuilt as zero.

        Raises:
            UsageError: there are no tensors, a tensor is called `_pad`, a name occurs twice, or safetensors lacks a
                dtype.

        >>> layout = Layout.of([("bn.weight", "F16", (3,)), ("bn.running_var", "F32", (3,))])
        >>> [(t.name, t.offset) for t in layout.tensors], layout.nbytes
        ([('bn.running_var', 0), ('bn.weight', 12)], 24)
        """
        ordered_tensors = sorted(tensors, key=lambda t: -ELEMENT_BYTES.get(t[1], 0))
        return cls._pack_tensors(ordered_tensors, tuple(counters), None)

    @classmethod
    def of_stored(
        cls, tensors: Iterable[tuple[str, str, Shape, str, Shape]], counters: Iterable[str], header_nbytes: int
    ) -> Layout:
        """Describe a member that is a separate safetensors file, in the order of that file; return the layout.

        Args:
            tensors: (name, dtype, shape, name in the file, shape in the file) of each tensor, in the order of their
                bytes.
            counters: names of integer counters that the file lacks; the counters are rebuilt as zero.
            header_nbytes: size of the file's header in bytes.

        Raises:
            UsageError: for the same reasons as in `Layout.of`.
        """
        return cls._pack_tensors(tensors, tuple(counters), 0, header_nbytes)

    @classmethod
    def _pack_tensors(
        cls,
        ordered_tensors: Iterable[tuple[Any, ...]],
        counters: tuple[str, ...],
        pad: int | None,
        header_nbytes: int = 0,
    ) -> Layout:
        specs, offset = [], 0
        for name, dtype, shape, *stored in ordered_tensors:
            if name == PAD_NAME:
                raise UsageError(f"tensor {name!r}", expected="another name: '_pad' is the format's own", tensor=name)
            if dtype not in ELEMENT_BYTES:
                raise UsageError(
                    f"tensor {name!r}",
                    expected=f"a dtype among {', '.join(ELEMENT_BYTES)}",
                    found=dtype,
                    tensor=name,
                )
            stored_name, stored_shape = stored or (name, shape)
            stored_name_and_shape = (
                None if stored_name == name else stored_name,
                None if stored_shape == shape else tuple(stored_shape),
            )
            specs.append(TensorSpec(name, dtype, tuple(shape), offset, *stored_name_and_shape))
            offset += specs[-1].nbytes
        if not specs or len({s.name for s in specs} | set(counters)) < len(specs) + len(counters):
            found = "a name twice" if specs else "no tensors"
            raise UsageError("layout", expected="one tensor or more, every name once", found=found)
        return cls(tuple(specs), counters, -offset % ALIGNMENT if pad is None else pad, header_nbytes)

    @cached_property
    def payload_nbytes(self) -> int:
        """Number of bytes of a member's tensors, without the padding."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Number of bytes from the start of one member to the start of the next, padding included."""
        return self.payload_nbytes + self.pad

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each weight and statistic; integer counters are left out, even if the file stores some."""
        return {t.name: t.shape for t in self.tensors if not is_counter(t.name)}

    @cached_property
    def rebuilt_counters(self) -> tuple[str, ...]:
        """Names of all integer counters, stored or not; stored values, which may be rounded or infinite, are
        ignored."""
        return (*(t.name for t in self.tensors if is_counter(t.name)), *self.counters)

    @cached_property
    def dtype(self) -> str:
        """The dtype that most elements of the member have."""
        element_count_of_dtype: dict[str, int] = {}
        for t in self.tensors:
            element_count_of_dtype[t.dtype] = element_count_of_dtype.get(t.dtype, 0) + math.prod(t.shape)
        return max(element_count_of_dtype, key=lambda d: element_count_of_dtype[d])

    @cached_property
    def _spec_of_name(self) -> dict[str, TensorSpec]:
        return {t.name: t for t in self.tensors if not is_counter(t.name)}

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a weight or statistic.

        Raises:
            UsageError: there is no tensor of this name; the error names some that there are.
        """
        if name not in self._spec_of_name:
            names = first_few(list(self._spec_of_name), LARGEST_SHOWN_COUNT)
            advice = did_you_mean(str(name), self._spec_of_name)
            raise UsageError(f"tensor {name!r}", expected=f"a name among {names}", do=advice, tensor=str(name))
        return self._spec_of_name[name]

    def to_json(self) -> dict[str, Any]:
        """Return the layout as JSON values."""
        tensors: list[list[Any]] = []
        for t in self.tensors:
            tensors.append([t.name, t.dtype, list(t.shape)])
            if t.stored is not None or t.stored_shape is not None:
                stored_shape = t.shape if t.stored_shape is None else t.stored_shape
                tensors[-1] += [t.stored or t.name, list(stored_shape)]
        values = {"tensors": tensors, "counters": list(self.counters), "pad": self.pad}
        return values | ({"lead": self.header_nbytes} if self.header_nbytes else {})

    @classmethod
    def from_json(cls, values: Any) -> Layout:
        """Read and check JSON values of the form that `to_json` writes; return the layout.

        Raises:
            FormatError: the JSON values are not names, known dtypes, shapes of whole numbers, and a padding of 0 to 7
                bytes.
        """
        try:
            tensors = [_check_tensor(*tensor) for tensor in values["tensors"]]
            counters, pad, header_nbytes = values["counters"], values["pad"], values.get("lead", 0)
            is_valid = (
                None not in tensors
                and type(header_nbytes) is int
                and 0 <= header_nbytes < LARGEST_TENSOR_NBYTES
                and type(counters) is list
                and all(type(c) is str and is_counter(c) for c in counters)
                and type(pad) is int
                and 0 <= pad < ALIGNMENT
            )
            layout = (
                cls._pack_tensors((t for t in tensors if t), tuple(counters), pad, header_nbytes) if is_valid else None
            )
        except UsageError as error:
            raise FormatError(error.thing, expected=error.expected, found=error.found, tensor=error.tensor) from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FormatError("layout", expected="tensors, counters and a pad", found=repr(error)) from error
        if layout is None or layout.nbytes >= LARGEST_TENSOR_NBYTES:
            expected = "names, dtypes, shapes of whole numbers, counters, a pad of 0..7"
            raise FormatError("layout", expected=expected, found=reprlib.repr(values))
        return layout


def _check_tensor(tensor_name: Any, dtype: Any, shape: Any, *stored_name_and_shape: Any) -> tuple[Any, ...] | None:
    """Check the JSON values of one tensor; return the values with the tensor's name and shape in the file, None if a
    value is invalid."""
    stored_name, stored_shape = stored_name_and_shape or (tensor_name, shape)
    is_valid = (
        type(tensor_name) is type(dtype) is type(stored_name) is str
        and is_possible_shape(tuple(shape))
        and is_possible_shape(tuple(stored_shape))
    )
    return (tensor_name, dtype, tuple(shape), stored_name, tuple(stored_shape)) if is_valid else None


def is_possible_shape(shape: tuple[Any, ...]) -> bool:
    """Say whether an array can have a shape that was read from a file: all sizes are valid, and the number of bytes is
    not too large."""
    return (
        len(shape) <= LARGEST_AXIS_COUNT
        and all(type(s) is int and 0 <= s < LARGEST_TENSOR_NBYTES for s in shape)
        and math.prod(max(s, 1) for s in shape) < LARGEST_TENSOR_NBYTES
    )


def compare_shapes(
    actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], str]:
    """Compare tensors by name and shape; return the names that differ, and a phrase that describes the differences.

    >>> compare_shapes({"fc.weight": (10, 4), "head": (1,)}, {"fc.weight": (10, 3), "fc.bias": (10,)})[1]
    'missing fc.bias; extra head; misshapen fc.weight [10, 4] for [10, 3]'
    """
    missing_names = [n for n in expected if n not in actual]
    extra_names = [n for n in actual if n not in expected]
    misshapen_names = [n for n, s in expected.items() if n in actual and actual[n] != s]
    misshapen_texts = [f"{n} {list(actual[n])} for {list(expected[n])}" for n in misshapen_names]
    difference_phrases = [
        f"{kind} {first_few(names, 5)}"
        for kind, names in (("missing", missing_names), ("extra", extra_names), ("misshapen", misshapen_texts))
        if names
    ]
    return missing_names + extra_names + misshapen_names, "; ".join(difference_phrases)


def content_hash(layout: Layout, member_bytes: bytes | bytearray | memoryview) -> str:
    """Hash a member's names, shapes and values; return 64 hex digits.

    The hash does not depend on how the member is stored. Tensors are hashed in the order of their names, without
    integer counters, in little-endian order; float16 and bfloat16 are converted to float32, which is exact. For each
    tensor, the line `["name","DTYPE",[shape]]` and the values are hashed.

    Args:
        layout: layout of the member's bytes.
        member_bytes: the member's bytes, with or without padding.
    """
    digest = hashlib.sha256()
    for t in sorted(layout.tensors, key=lambda t: t.name):
        if is_counter(t.name):
            continue
        raw = np.frombuffer(member_bytes, np.uint8, count=t.nbytes, offset=t.offset)
        dtype = t.dtype
        if dtype == "F16":
            raw, dtype = raw.view("<f2").astype("<f4").view(np.uint8), "F32"
        elif dtype == "BF16":
            raw, dtype = (raw.view("<u2").astype("<u4") << np.uint32(16)).view(np.uint8), "F32"
        digest.update(json.dumps([t.name, dtype, list(t.shape)], separators=(",", ":")).encode() + b"\n")
        digest.update(raw.data)
    return digest.hexdigest()


def tensors_not_finite(layout: Layout, member_bytes: bytes | bytearray | memoryview) -> list[str]:
    """Return the names of the tensors that contain a value which is not finite.

    Args:
        layout: layout of the member's bytes.
        member_bytes: the member's bytes.
    """
    infinite_names = []
    for t in layout.tensors:
        if t.dtype not in FLOAT_DTYPES or is_counter(t.name):
            continue
        values = np.frombuffer(member_bytes, _NUMPY_DTYPES[t.dtype], count=math.prod(t.shape), offset=t.offset)
        if t.dtype == "BF16":
            values = (values.astype("<u4") << np.uint32(16)).view("<f4")
        if not np.isfinite(values).all():
            infinite_names.append(t.name)
    return infinite_names


class DescriptionWithLayouts(Protocol):
    """The description of a table whose rows have layouts: of a collection's manifest, or of a set of stored
    predictions."""

    @property
    def name(self) -> str:
        """The name of the collection or prediction set in error texts."""

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Key of a layout -> the layout."""

    @property
    def base(self) -> str:
        """Address of the Hub repo, at a commit, that holds the members' bytes; "" if the source itself holds the
        bytes."""
