"""State dicts as members' bytes: the layout that a net is stored in, and its tensors brought into it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats.layout import Layout, differences, finite_problems, is_counter, is_statistic
from checkpoints_zoo.formats.safetensors import prefix as prefix

TORCH = {
    "F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
    "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH.items()}


def layout_of(state: Mapping[str, Tensor], dtype: torch.dtype) -> Layout:
    """Lay out a state dict for storage: weights in `dtype`, statistics in float32, other tensors as they are.

    Args:
        state: of one member, in the order of its module; `num_batches_tracked` becomes a counter.
        dtype: of the stored weights.

    Raises:
        UsageError: a tensor of a dtype that the format can't hold.
    """
    tensors, counters = [], []
    for name, tensor in state.items():
        wanted = tensor.dtype
        if tensor.is_floating_point():
            wanted = torch.float32 if is_statistic(name) else dtype
        if wanted not in NAMES:
            raise UsageError(f"tensor {name!r}", expected=f"a dtype among {', '.join(NAMES.values())}",
                             found=str(wanted), tensor=name)  # fmt: skip
        if is_counter(name):
            counters.append(name)
        else:
            tensors.append((name, NAMES[wanted], tuple(tensor.shape)))
    return Layout.of(tensors, counters)


def pack(state: Mapping[str, Tensor], layout: Layout) -> bytearray:
    """Bring a member's tensors into the layout's bytes, rounding to its dtypes; return them, pad included.

    Args:
        state: of one member, in any memory format.
        layout: to bring it into.

    Raises:
        LayoutError: tensors missing, extra or misshapen.
        DamagedError: a value that is not finite, or not any more once rounded.
    """
    check_tensors({n: tuple(t.shape) for n, t in state.items()}, layout, "state dict")
    member = bytearray(layout.nbytes)
    for t in layout.tensors:
        if t.nbytes:
            target = torch.frombuffer(member, dtype=TORCH[t.dtype], count=state[t.name].numel(), offset=t.offset)
            target.copy_(state[t.name].detach().reshape(-1))
    if bad := finite_problems(layout, member):
        raise DamagedError(
            f"tensor {bad[0]!r}",
            expected=f"values that are finite as {next(t.dtype for t in layout.tensors if t.name == bad[0])}",
            found="infinite ones or NaN",
            do="Leave the member out, or store it in a wider dtype",
            tensor=bad[0],
        )
    return member


def check_tensors(found: Mapping[str, tuple[int, ...]], layout: Layout, thing: str) -> None:
    """Compare names and shapes with a layout's, counters aside.

    Raises:
        LayoutError: naming what is missing, extra and misshapen.
    """
    wanted = {n: s for n, s in layout.shapes.items() if not is_counter(n)}
    found = {n: s for n, s in found.items() if not is_counter(n)}
    names, phrase = differences(found, wanted)
    if names:
        raise LayoutError(
            thing,
            expected=f"the layout's {len(wanted)} tensors by name and shape",
            found=phrase,
            tensor=names[0],
        )
