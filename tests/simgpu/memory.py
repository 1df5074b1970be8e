"""The bytes of the simulated cards, which lie in host memory: tensors of a CPU over them, and their size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CPU = torch.device("cpu")


# Views by address, shape, strides and dtype; the allocator gives the same addresses again and again.
_views: dict[tuple[object, ...], Tensor] = {}
_MOST_VIEWS = 50_000


def host_view(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU over the same bytes as a card's tensor; it does not keep them from being freed."""
    address, size, stride, dtype = tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype
    if address == 0:  # It has no elements.
        return torch.empty_strided(size, stride, dtype=dtype)
    key = address, size, stride, dtype, torch.is_inference_mode_enabled()
    view = _views.get(key)
    if view is None:
        storage, construct = tensor.untyped_storage(), torch._C._construct_storage_from_data_pointer
        shared = construct(storage.data_ptr(), CPU, storage.nbytes())
        view = torch.empty(0, dtype=dtype).set_(shared, tensor.storage_offset(), size, stride)
        if len(_views) >= _MOST_VIEWS:
            _views.clear()
        _views[key] = view
    return view


def copy_onto(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU's tensor to a simulated card, with its strides unless elements share memory; return the copy."""
    stride = tensor.stride()
    if 0 in stride:
        tensor = tensor.contiguous()
        stride = tensor.stride()
    copy = torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=device)
    if tensor.numel():
        host_view(copy).copy_(tensor)
    return copy


def distinct_nbytes(tensor: Tensor) -> int:
    """Return the number of bytes that a tensor's elements lie in; expanded axes count once."""
    sizes = (n for n, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0
