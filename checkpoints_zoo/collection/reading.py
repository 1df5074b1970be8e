"""Members read from their files straight into stacked tensors, by offset.

Members that lie evenly spaced in one file become strided views of one map of the file; all others are read in large
pieces through one reused buffer and converted from there. Nothing is read member by member through modules.

Axes: m member, … the tensor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.collection import transfer
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats.layout import TensorSpec, is_counter
from checkpoints_zoo.formats.shard_files import (
    BUFFER_BYTES,
    Location,
    buffer,
    check_against_files,
    fill,
    groups,
    read_at,
)
from checkpoints_zoo.networks.device import check_device, check_memory
from checkpoints_zoo.networks.modules import TORCH_DTYPES, check_tensors

READERS = 2  # of large members: more of them find no more work


def stack(
    locations: Sequence[Location],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    names: Iterable[str] | None = None,
    *,
    check: bool = False,
) -> dict[str, Tensor]:
    """Read members into stacked tensors; return name -> (member, …), statistics never narrower than stored.

    A view of the file (private to this process: writing to it changes no file) where the members lie evenly
    spaced in one file, the device is the CPU and no dtype changes. Otherwise a copy, whose values are checked.

    Args:
        locations: of the members, all with tensors of the same names and shapes.
        device: where the tensors are to be.
        dtype: of floating tensors; None keeps the stored one.
        names: which tensors; None for all.
        check: whether the values of a view are looked at too.

    Raises:
        DamagedError: a file is cut, its header or the offsets are wrong, or a value is not finite.
        LayoutError: members with different tensors.
        TooLargeError: more memory than there is.
    """
    device = check_device(device)
    specs = _common(locations, names)
    check_against_files(locations)
    kinds = _kinds(specs, locations, dtype)
    step = spacing(locations)
    kept = all(kinds[t.name] == TORCH_DTYPES[t.dtype] and not t.offset % TORCH_DTYPES[t.dtype].itemsize for t in specs)
    if step and kept and device.type == "cpu" and not (step % 8 or locations[0].offset % 8):
        views = views_of(locations[0], specs, len(locations), step)
        if views is not None:
            if check:
                check_finite(views, locations)
            return views
    large = locations[0].layout.nbytes > BUFFER_BYTES and len({id(x.layout) for x in locations}) == 1
    if large and kept and names is None and device.type == "cpu":
        check_memory({t.name: (len(locations), *t.shape) for t in specs}, kinds, device)
        return _gathered(locations, specs)
    if device.type == "cuda" and names is None:
        with transfer.allocating(device):
            out = room_for(locations, kinds, device)
        if not transfer.onto(locations, specs, out):
            check_finite(out, locations)
        return out
    out = room_for(locations, kinds, device)
    at = 0
    for group in groups(locations, BUFFER_BYTES):
        rows = {n: tensor[at : at + len(group)] for n, tensor in out.items()}
        if group[0].layout.nbytes <= BUFFER_BYTES:
            _copy_members(group, specs, rows)
        else:
            _copy_tensors(group[0], specs, rows)
        at += len(group)
    return out


def ahead(read: Callable[[int], dict[str, Tensor]], count: int) -> Iterator[dict[str, Tensor]]:
    """Read batch after batch, the next while one is used; yield what `read` gives for each number below `count`."""
    with ThreadPoolExecutor(1, thread_name_prefix="zoo-read") as reader:
        coming = reader.submit(read, 0)
        for at in range(count):
            stacked = coming.result()
            if at + 1 < count:
                coming = reader.submit(read, at + 1)
            yield stacked


def kinds_of(
    locations: Sequence[Location], dtype: torch.dtype | None, names: Iterable[str] | None = None
) -> dict[str, torch.dtype]:
    """Return the dtype that each tensor has once stacked; the arguments and errors are those of `stack`."""
    return _kinds(_common(locations, names), locations, dtype)


def room_for(
    locations: Sequence[Location], kinds: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, Tensor]:
    """Make tensors for the members' weights, their values whatever they are; return name -> (member, …).

    Raises:
        TooLargeError: more memory than there is.
    """
    shapes = {name: (len(locations), *locations[0].layout.shapes[name]) for name in kinds}
    check_memory(shapes, kinds, device)
    return {name: torch.empty(shape, dtype=kinds[name], device=device) for name, shape in shapes.items()}


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
        dtype, begin = TORCH_DTYPES[t.dtype], start + t.offset
        part = memory[begin : begin + (count - 1) * step + t.nbytes]
        shape, strides = (count, *t.shape), (step // dtype.itemsize, *_strides(t))
        views[t.name] = torch.empty(0, dtype=dtype).set_(part, 0, shape, strides)
    return views


def _gathered(locations: Sequence[Location], specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Read large members of one layout as they are; return name -> (member, …), views of all that, values checked."""
    size = locations[0].layout.nbytes
    step = -(-size // 8) * 8
    memory = np.empty(step * len(locations), np.uint8)  # numpy asks for large pages: faster to touch for the first time
    runs = _runs(specs)
    with ThreadPoolExecutor(READERS, thread_name_prefix="zoo-read") as readers:
        parts = [memory[i * step : i * step + size].data for i in range(len(locations))]
        for i, raw in enumerate(readers.map(lambda x, part: fill(x, x.offset, part), locations, parts)):
            for kind, begin, count in runs:
                values = torch.frombuffer(raw, dtype=kind, count=count, offset=begin)
                if not torch.isfinite(torch.stack(torch.aminmax(values))).all():
                    whole = torch.from_numpy(memory).untyped_storage()
                    check_finite(cut(whole, i * step, specs, 1, step), [locations[i]])
    return cut(torch.from_numpy(memory).untyped_storage(), 0, specs, len(locations), step)


def _runs(specs: Sequence[TensorSpec]) -> list[tuple[torch.dtype, int, int]]:
    """Join floating tensors that follow each other with one dtype; return (dtype, offset in the member, elements)."""
    runs: list[tuple[torch.dtype, int, int]] = []
    for t in specs:
        kind = TORCH_DTYPES[t.dtype]
        if not kind.is_floating_point or not t.nbytes:
            continue
        if runs and runs[-1][0] == kind and runs[-1][1] + runs[-1][2] * kind.itemsize == t.offset:
            kind, begin, count = runs.pop()
        else:
            begin, count = t.offset, 0
        runs.append((kind, begin, count + t.nbytes // kind.itemsize))
    return runs


def _copy_members(group: Sequence[Location], specs: Sequence[TensorSpec], rows: Mapping[str, Tensor]) -> None:
    """Read a group of neighbours in one piece and convert it into the stacked tensors."""
    layout = group[0].layout
    if not layout.nbytes:
        return
    raw = torch.frombuffer(fill(group[0], group[0].offset, buffer(layout.nbytes * len(group))), dtype=torch.uint8)
    stored = {t.name: t for t in layout.tensors}
    for spec in specs:
        t = stored[spec.name]
        if t.nbytes:
            _convert(transfer.strided(raw, t, len(group), layout.nbytes), rows[t.name])
            check_finite({t.name: rows[t.name]}, group)


def _copy_tensors(location: Location, specs: Sequence[TensorSpec], rows: Mapping[str, Tensor]) -> None:
    """Read a large member piece by piece and convert each piece into the stacked tensors."""
    stored = {t.name: t for t in location.layout.tensors}
    with location.path.open("rb", buffering=0) as file:
        for spec in specs:
            t = stored[spec.name]
            kind = TORCH_DTYPES[t.dtype]
            most = BUFFER_BYTES // kind.itemsize
            for piece in torch.split(rows[t.name].view(-1), most) if t.nbytes else ():
                start = int(piece.storage_offset() - rows[t.name].storage_offset())
                raw = buffer(piece.numel() * kind.itemsize)
                read_at(file, location, location.offset + t.offset + start * kind.itemsize, raw)
                _convert(torch.frombuffer(raw, dtype=kind), piece)
                check_finite({t.name: piece[None]}, [location])


def _convert(source: Tensor, target: Tensor) -> None:
    if source.dtype == torch.float16 and target.dtype == torch.bfloat16:
        source = source.float()  # the direct cast is several times slower than through float32
    # Over a bus the stored dtype is the smaller one: cast on the device.
    target.copy_(source if target.device.type == "cpu" else source.to(target.device))


def _common(locations: Sequence[Location], names: Iterable[str] | None) -> list[TensorSpec]:
    """Check that all members have the same tensors; return the specs of those asked for."""
    layout = locations[0].layout
    for other in {id(x.layout): x for x in locations}.values():
        if other.layout is not layout and other.layout.shapes != layout.shapes:
            check_tensors(other.layout.shapes, layout, f"member {other.member} beside member {locations[0].member}")
    if names is None:
        return [t for t in layout.tensors if not is_counter(t.name)]
    known = {t.name: t for t in layout.tensors if not is_counter(t.name)}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise UsageError(f"tensor {name!r}", expected=f"a name among {', '.join(known)}", tensor=name)
    return [known[name] for name in wanted]


def _kinds(
    specs: Sequence[TensorSpec], locations: Sequence[Location], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype that each tensor is to have in memory."""
    if dtype is not None and dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        expected = "torch.float64, float32, float16 or bfloat16"
        raise UsageError("dtype of stacked weights", expected=expected, found=repr(dtype)[:80])
    kinds = {t.name: TORCH_DTYPES[t.dtype] for t in specs}
    for layout in {id(x.layout): x.layout for x in locations}.values():
        for t in layout.tensors:
            if t.name in kinds and kinds[t.name] != TORCH_DTYPES[t.dtype]:
                kinds[t.name] = _wider(t.name, kinds[t.name], TORCH_DTYPES[t.dtype])
    if dtype is not None:
        for t in specs:
            if kinds[t.name].is_floating_point:
                kinds[t.name] = torch.promote_types(kinds[t.name], dtype) if t.is_statistic else dtype
    return kinds


def _wider(name: str, one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that holds the values of two floating ones."""
    if not (one.is_floating_point and other.is_floating_point):
        raise LayoutError(
            f"tensor {name!r}", expected="one dtype in all members", found=f"{one} and {other}", tensor=name
        )
    return torch.promote_types(one, other)


def check_finite(stacked: Mapping[str, Tensor], locations: Sequence[Location]) -> None:
    """Check that all values are finite.

    Raises:
        DamagedError: naming the first member and tensor.
    """
    for name, tensor in stacked.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if torch.isfinite(torch.stack(torch.aminmax(tensor))).all():  # one pass; NaN comes through both
            continue
        flat = tensor.reshape(len(tensor), -1)
        bad = ~torch.isfinite(flat)
        if bad.any():
            at = int(bad.any(1).nonzero()[0])
            raise DamagedError(
                f"tensor {name!r} of member {locations[at].member}",
                expected="finite weights",
                found=f"{int(bad[at].sum())} that are not, as {tensor.dtype}",
                do="Leave the member out, or ask its producer",
                member=locations[at].member,
                tensor=name,
                path=locations[at].path,
            )
