"""The bytes of the simulated cards, which lie in host memory: tensors of a CPU over them, and their size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def host_view(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU over the same bytes as a card's tensor; it does not keep them from being freed."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    construct: Any = torch._C._construct_storage_from_data_pointer
    shared = construct(storage.data_ptr(), CPU, nbytes)
    return torch.empty(0, dtype=tensor.dtype).set_(shared, tensor.storage_offset(), tensor.size(), tensor.stride())


def copy_onto(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU's tensor to a simulated card, with its strides unless elements share memory; return the copy."""
    if tensor.numel() and any(stride == 0 and n > 1 for stride, n in zip(tensor.stride(), tensor.size(), strict=True)):
        tensor = tensor.contiguous()
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        host_view(copy).copy_(tensor)
    return copy


def distinct_nbytes(tensor: Tensor) -> int:
    """Return the number of bytes that a tensor's elements lie in; expanded axes count once."""
    sizes = (n for n, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0
