"""Shards: safetensors files of many members, one contiguous range of bytes each.

The safetensors library orders tensors by dtype, which would tear a member with float32 statistics in two; a short
writer of our own keeps it together. Any reader opens the file and sees named tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.header import prefix as prefix
from checkpoints_zoo.header import shard_header
from checkpoints_zoo.layout import Layout, differences, finite_problems, is_counter, is_statistic

LARGEST_SHARD = 2_000_000_000
MOST_TENSORS = 32_000

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


def members_per_shard(layout: Layout, snapshots: int = 1) -> int:
    """Return how many consecutive member ids a shard holds: the fewer of 2 GB and about 32,000 tensors."""
    tensors = len(layout.tensors) + bool(layout.pad)
    nbytes = max(1, layout.nbytes)  # a net may have nothing but empty tensors
    return max(1, min(LARGEST_SHARD // (nbytes * snapshots), MOST_TENSORS // (tensors * snapshots)))


def write_shard(folder: Path, number: int, layout: Layout, members: Sequence[tuple[str, bytes | bytearray]]) -> Path:
    """Write a shard under a name that holds its number and content hash, by rename; return its path.

    The same members give the same bytes and so the same name; other bytes never take a name that was used.

    Args:
        folder: where to; it is made.
        number: of the shard.
        layout: of every member.
        members: (prefix, bytes) in the order they are to lie in.

    Raises:
        UsageError: a prefix twice, or bytes that are not as many as the layout's.
    """
    if len({key for key, _ in members}) < len(members) or {len(b) for _, b in members} - {layout.nbytes}:
        raise UsageError(
            f"members of shard {number}", expected=f"each once, with {layout.nbytes:,} bytes", found="others"
        )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{number:05d}.{os.getpid()}.tmp"
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as file:
            for piece in (
                shard_header(layout, [key for key, _ in members]),
                *(member for _, member in members),
            ):
                file.write(piece)
                digest.update(piece)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"{number:05d}-{digest.hexdigest()[:8]}.safetensors"
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def first_offset(layout: Layout, prefixes: Sequence[str]) -> int:
    """Return where the first member begins in a shard of these members."""
    return len(shard_header(layout, prefixes))
