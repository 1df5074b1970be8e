"""Tensors of members that lie evenly spaced, in a map of a file or in other memory, viewed where they lie.

Axes: m member, … the tensor's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.formats.layout import TensorSpec
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.networks.tensors import TORCH


def strided(buffer: memoryview, t: TensorSpec, begin: int, count: int, step: int) -> Tensor:
    """View one tensor of evenly spaced members in a buffer; return it, (member, …)."""
    dtype = TORCH[t.dtype]
    if begin % dtype.itemsize or step % dtype.itemsize:  # archives hold tensors at any byte
        size = t.nbytes
        rows = [torch.frombuffer(bytearray(buffer[begin + i * step :][:size]), dtype=dtype) for i in range(count)]
        return torch.stack(rows).view(count, *t.shape)
    stride = step // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=(count - 1) * stride + t.nbytes // dtype.itemsize, offset=begin)
    return flat.as_strided((count, *t.shape), (stride, *_strides(t)))


def _strides(t: TensorSpec) -> tuple[int, ...]:
    return torch.empty(t.shape, device="meta").stride()


def views_of(first: Location, specs: Sequence[TensorSpec], count: int, step: int) -> dict[str, Tensor] | None:
    """Map a file and view its members' tensors; return name -> (member, …), or None where it can't be mapped."""
    # A private map: writing to it changes no file. Python's own mmap would hold a file open for each map, and
    # a thousand models are more than a process may have. Each view owns its part of the map alone, so that
    # saving it saves no more.
    size = first.path.stat().st_size
    try:
        mapped: Any = torch.UntypedStorage.from_file(str(first.path), shared=False, nbytes=size)
    except (RuntimeError, UnicodeError):  # larger than the memory, or a name that is no text
        return None
    return cut(mapped, first.offset, specs, count, step)


def cut(memory: Any, start: int, specs: Sequence[TensorSpec], count: int, step: int) -> dict[str, Tensor]:
    """View the tensors of members that lie evenly spaced in memory; return name -> (member, …)."""
    views = {}
    for t in specs:
        dtype, begin = TORCH[t.dtype], start + t.offset
        part = memory[begin : begin + (count - 1) * step + t.nbytes]
        shape, strides = (count, *t.shape), (step // dtype.itemsize, *_strides(t))
        views[t.name] = torch.empty(0, dtype=dtype).set_(part, 0, shape, strides)
    return views


def spacing(locations: Sequence[Location]) -> int:
    """Return the even distance between members of one file and layout, 0 where there is none."""
    first = locations[0]
    if len(locations) == 1:
        return first.layout.nbytes
    step = locations[1].offset - first.offset
    even = all(
        x.path == first.path and x.layout is first.layout and x.offset == first.offset + i * step
        for i, x in enumerate(locations)
    )
    return step if even and step > 0 else 0
