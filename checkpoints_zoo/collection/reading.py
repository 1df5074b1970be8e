"""Read members from their files straight into stacked tensors, by offset.

Members that are evenly spaced in one file become strided views of one memory map of the file. All other members are
read in large pieces into one reused buffer, and converted in the buffer.

Axes of stacked tensors are (member, …), where … stands for the axes of one member's tensor.
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
    check_against_files,
    group_adjacent,
    read_at,
    read_into,
    reused_buffer,
)
from checkpoints_zoo.networks.device import check_device, check_memory
from checkpoints_zoo.networks.modules import TORCH_DTYPES, check_tensors

GROUP_BYTES = 2**24  # Number of bytes of members that are read into one buffer and converted together.
READER_THREADS = 2  # Number of threads that read large members; more threads are not faster.


def stack(
    locations: Sequence[Location],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    tensor_names: Iterable[str] | None = None,
    *,
    check: bool = False,
) -> dict[str, Tensor]:
    """Read members into stacked tensors; return name -> (member, …), statistics never narrower than stored.

    The tensors are views of the file (private to this process: writing to them changes no file) if the members are
    evenly spaced in one file, the device is the CPU and no dtype changes. In all other cases the tensors are copies,
    and the values are checked.

    Args:
        locations: locations of the members' bytes, all with tensors of the same names and shapes.
        device: device of the tensors.
        dtype: dtype of floating-point tensors; None to keep the stored dtype.
        tensor_names: names of the tensors to read; None for all tensors.
        check: whether to check that values are finite also if the tensors are views of a file.

    Raises:
        DamagedError: a file is cut short, its header or an offset is wrong, or a value is not finite.
        LayoutError: members have different tensors.
        TooLargeError: the tensors need more memory than is free.
    """
    device = check_device(device)
    specs = _common_specs(locations, tensor_names)
    check_against_files(locations)
    stacked_dtype_of_name = _dtypes(specs, locations, dtype)
    member_distance = even_spacing(locations)
    dtypes_are_stored = all(
        stacked_dtype_of_name[spec.name] == TORCH_DTYPES[spec.dtype]
        and not spec.offset % TORCH_DTYPES[spec.dtype].itemsize
        for spec in specs
    )
    if (
        member_distance
        and dtypes_are_stored
        and device.type == "cpu"
        and not (member_distance % 8 or locations[0].offset % 8)
    ):
        views = mapped_tensors(locations[0], specs, len(locations), member_distance)
        if views is not None:
            if check:
                check_finite(views, locations)
            return views
    is_large = locations[0].layout.nbytes > BUFFER_BYTES and len({id(x.layout) for x in locations}) == 1
    if is_large and dtypes_are_stored and tensor_names is None and device.type == "cpu":
        check_memory({spec.name: (len(locations), *spec.shape) for spec in specs}, stacked_dtype_of_name, device)
        return _read_large_members(locations, specs)
    if device.type == "cuda" and tensor_names is None:
        with transfer.allocation_stream(device):
            stacked = empty_stack(locations, stacked_dtype_of_name, device)
        if not transfer.copy_to_device(locations, specs, stacked):
            check_finite(stacked, locations)
        return stacked
    stacked = empty_stack(locations, stacked_dtype_of_name, device)
    first_row = 0
    for group in _group_by_layout(locations):
        stacked_rows = {n: tensor[first_row : first_row + len(group)] for n, tensor in stacked.items()}
        if group[0].layout.nbytes <= BUFFER_BYTES:
            _copy_members(group, specs, stacked_rows)
        else:
            _copy_tensors(group[0], specs, stacked_rows)
        first_row += len(group)
    return stacked


def read_ahead(read_result: Callable[[int], dict[str, Tensor]], result_count: int) -> Iterator[dict[str, Tensor]]:
    """Yield read(0), read(1), … up to `result_count` results; the next result is read while the caller uses the present
    result."""
    with ThreadPoolExecutor(1, thread_name_prefix="zoo-read") as read_executor:
        future = read_executor.submit(read_result, 0)
        for result_number in range(result_count):
            result = future.result()
            if result_number + 1 < result_count:
                future = read_executor.submit(read_result, result_number + 1)
            yield result


def stacked_dtypes(
    locations: Sequence[Location], dtype: torch.dtype | None, tensor_names: Iterable[str] | None = None
) -> dict[str, torch.dtype]:
    """Return the dtype of each stacked tensor; the arguments and errors are those of `stack`."""
    return _dtypes(_common_specs(locations, tensor_names), locations, dtype)


def empty_stack(
    locations: Sequence[Location], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> dict[str, Tensor]:
    """Allocate tensors for the members' weights, without values yet; return name -> (member, …).

    Raises:
        TooLargeError: the tensors need more memory than is free.
    """
    shapes = {name: (len(locations), *locations[0].layout.shapes[name]) for name in dtypes}
    check_memory(shapes, dtypes, device)
    return {name: torch.empty(shape, dtype=dtypes[name], device=device) for name, shape in shapes.items()}


def even_spacing(locations: Sequence[Location]) -> int:
    """Return the distance in bytes between members that are evenly spaced in one file and have one layout, else 0."""
    first = locations[0]
    if len(locations) == 1:
        return first.layout.nbytes
    distance = locations[1].offset - first.offset
    is_even = all(
        location.path == first.path
        and location.layout is first.layout
        and location.offset == first.offset + i * distance
        for i, location in enumerate(locations)
    )
    return distance if is_even and distance > 0 else 0


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    return torch.empty(spec.shape, device="meta").stride()


def mapped_tensors(
    first_member: Location, specs: Sequence[TensorSpec], member_count: int, distance: int
) -> dict[str, Tensor] | None:
    """Map a file into memory; return views of its members' tensors, name -> (member, …), or None if the file can't be
    mapped."""
    # The map is private: writing to it changes no file. Python's own mmap would hold a file open for each map, and
    # a process may not open a thousand files. Each view owns only its part of the map, so that saving a view
    # saves no more than this part.
    file_nbytes = first_member.path.stat().st_size
    try:
        mapped_file: Any = torch.UntypedStorage.from_file(str(first_member.path), shared=False, nbytes=file_nbytes)
    except (RuntimeError, UnicodeError):  # The file is larger than the memory, or its name is no valid text.
        return None
    return tensor_views(mapped_file, first_member.offset, specs, member_count, distance)


def tensor_views(
    storage: Any, first_offset: int, specs: Sequence[TensorSpec], member_count: int, distance: int
) -> dict[str, Tensor]:
    """Return views of the tensors of members that are evenly spaced in memory, name -> (member, …)."""
    view_of_name = {}
    for spec in specs:
        dtype, tensor_start = TORCH_DTYPES[spec.dtype], first_offset + spec.offset
        tensor_storage = storage[tensor_start : tensor_start + (member_count - 1) * distance + spec.nbytes]
        shape, strides = (member_count, *spec.shape), (distance // dtype.itemsize, *_strides(spec))
        view_of_name[spec.name] = torch.empty(0, dtype=dtype).set_(tensor_storage, 0, shape, strides)
    return view_of_name


def _read_large_members(locations: Sequence[Location], specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Read large members of one layout into one block of memory, and check the values; return views of it, name ->
    (member, …)."""
    member_nbytes = locations[0].layout.nbytes
    distance = -(-member_nbytes // 8) * 8
    # numpy requests large memory pages, whose first use is faster.
    memory = np.empty(distance * len(locations), np.uint8)
    float_runs = _float_runs(specs)
    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="zoo-read") as read_executor:
        member_buffers = [memory[i * distance : i * distance + member_nbytes].data for i in range(len(locations))]
        for i, raw in enumerate(
            read_executor.map(
                lambda location, part: read_into(location, location.offset, part), locations, member_buffers
            )
        ):
            for run_dtype, run_start, element_count in float_runs:
                values = torch.frombuffer(raw, dtype=run_dtype, count=element_count, offset=run_start)
                if not torch.isfinite(torch.stack(torch.aminmax(values))).all():
                    storage = torch.from_numpy(memory).untyped_storage()
                    check_finite(tensor_views(storage, i * distance, specs, 1, distance), [locations[i]])
    return tensor_views(torch.from_numpy(memory).untyped_storage(), 0, specs, len(locations), distance)


def _float_runs(specs: Sequence[TensorSpec]) -> list[tuple[torch.dtype, int, int]]:
    """Join floating tensors of one dtype that follow each other into runs; return (dtype, offset in the member, number
    of elements) of each run."""
    runs: list[tuple[torch.dtype, int, int]] = []
    for spec in specs:
        run_dtype = TORCH_DTYPES[spec.dtype]
        if not run_dtype.is_floating_point or not spec.nbytes:
            continue
        if runs and runs[-1][0] == run_dtype and runs[-1][1] + runs[-1][2] * run_dtype.itemsize == spec.offset:
            run_dtype, run_start, element_count = runs.pop()
        else:
            run_start, element_count = spec.offset, 0
        runs.append((run_dtype, run_start, element_count + spec.nbytes // run_dtype.itemsize))
    return runs


def _group_by_layout(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Group successive members of one layout; yield groups of at most GROUP_BYTES, or of one large member."""
    group: list[Location] = []
    for location in locations:
        layout = location.layout
        largest_nbytes = GROUP_BYTES if layout.nbytes <= BUFFER_BYTES else 0
        if group and (layout is not group[0].layout or (len(group) + 1) * layout.nbytes > largest_nbytes):
            yield group
            group = []
        group.append(location)
    if group:
        yield group


def _copy_members(group: Sequence[Location], specs: Sequence[TensorSpec], stacked_rows: Mapping[str, Tensor]) -> None:
    """Read members of one layout into one buffer, and convert each tensor for all these members at once."""
    layout = group[0].layout
    if not layout.nbytes:
        return
    distance = -(-layout.nbytes // 8) * 8  # a multiple of every dtype's size
    buffer = reused_buffer(distance * len(group))
    first_row = 0
    for adjacent_members in group_adjacent(group, GROUP_BYTES if distance == layout.nbytes else 0):
        buffer_start = first_row * distance
        read_into(
            adjacent_members[0],
            adjacent_members[0].offset,
            buffer[buffer_start : buffer_start + layout.nbytes * len(adjacent_members)],
        )
        first_row += len(adjacent_members)
    raw_bytes = torch.frombuffer(buffer, dtype=torch.uint8)
    stored_spec_of_name = {stored_spec.name: stored_spec for stored_spec in layout.tensors}
    for spec in specs:
        stored_spec = stored_spec_of_name[spec.name]
        if stored_spec.nbytes:
            _copy_converted(
                transfer.strided_view(raw_bytes, stored_spec, len(group), distance), stacked_rows[stored_spec.name]
            )
            check_finite({stored_spec.name: stacked_rows[stored_spec.name]}, group)


def _copy_tensors(location: Location, specs: Sequence[TensorSpec], stacked_rows: Mapping[str, Tensor]) -> None:
    """Read a large member piece by piece and convert each piece into the stacked tensors."""
    stored_spec_of_name = {stored_spec.name: stored_spec for stored_spec in location.layout.tensors}
    with location.path.open("rb", buffering=0) as file:
        for spec in specs:
            stored_spec = stored_spec_of_name[spec.name]
            dtype = TORCH_DTYPES[stored_spec.dtype]
            piece_length = BUFFER_BYTES // dtype.itemsize
            for target_piece in (
                torch.split(stacked_rows[stored_spec.name].view(-1), piece_length) if stored_spec.nbytes else ()
            ):
                element_start = int(target_piece.storage_offset() - stacked_rows[stored_spec.name].storage_offset())
                raw_bytes = reused_buffer(target_piece.numel() * dtype.itemsize)
                read_at(
                    file, location, location.offset + stored_spec.offset + element_start * dtype.itemsize, raw_bytes
                )
                _copy_converted(torch.frombuffer(raw_bytes, dtype=dtype), target_piece)
                check_finite({stored_spec.name: target_piece[None]}, [location])


def _copy_converted(stored_values: Tensor, target_values: Tensor) -> None:
    if stored_values.dtype == torch.float16 and target_values.dtype == torch.bfloat16:
        stored_values = stored_values.float()  # A direct cast is several times slower than a cast through float32.
    # The cast happens on the device, because the stored dtype has fewer bytes to send.
    target_values.copy_(stored_values if target_values.device.type == "cpu" else stored_values.to(target_values.device))


def _common_specs(locations: Sequence[Location], tensor_names: Iterable[str] | None) -> list[TensorSpec]:
    """Check that all members have the same tensors; return the specs of the selected tensors."""
    layout = locations[0].layout
    for other in {id(x.layout): x for x in locations}.values():
        if other.layout is not layout and other.layout.shapes != layout.shapes:
            check_tensors(other.layout.shapes, layout, f"member {other.member} beside member {locations[0].member}")
    if tensor_names is None:
        return [t for t in layout.tensors if not is_counter(t.name)]
    spec_of_name = {t.name: t for t in layout.tensors if not is_counter(t.name)}
    selected = list(tensor_names)
    for name in selected:
        if name not in spec_of_name:
            raise UsageError(f"tensor {name!r}", expected=f"a name among {', '.join(spec_of_name)}", tensor=name)
    return [spec_of_name[name] for name in selected]


def _dtypes(
    specs: Sequence[TensorSpec], locations: Sequence[Location], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Return the dtype that each stacked tensor will have in memory."""
    if dtype is not None and dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        expected = "torch.float64, float32, float16 or bfloat16"
        raise UsageError("dtype of stacked weights", expected=expected, found=repr(dtype)[:80])
    dtypes = {t.name: TORCH_DTYPES[t.dtype] for t in specs}
    for layout in {id(x.layout): x.layout for x in locations}.values():
        for t in layout.tensors:
            if t.name in dtypes and dtypes[t.name] != TORCH_DTYPES[t.dtype]:
                dtypes[t.name] = _wider_dtype(t.name, dtypes[t.name], TORCH_DTYPES[t.dtype])
    if dtype is not None:
        for t in specs:
            if dtypes[t.name].is_floating_point:
                dtypes[t.name] = torch.promote_types(dtypes[t.name], dtype) if t.is_statistic else dtype
    return dtypes


def _wider_dtype(tensor_name: str, dtype: torch.dtype, other_dtype: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype that holds all values of two floating dtypes."""
    if not (dtype.is_floating_point and other_dtype.is_floating_point):
        raise LayoutError(
            f"tensor {tensor_name!r}",
            expected="one dtype in all members",
            found=f"{dtype} and {other_dtype}",
            tensor=tensor_name,
        )
    return torch.promote_types(dtype, other_dtype)


def check_finite(stacked: Mapping[str, Tensor], locations: Sequence[Location]) -> None:
    """Check that all values are finite.

    Raises:
        DamagedError: a value is not finite; the error names the first member and tensor with this value.
    """
    for name, tensor in stacked.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        # One pass over the values finds infinities and NaN: the minimum and maximum of values with a NaN are NaN.
        if torch.isfinite(torch.stack(torch.aminmax(tensor))).all():
            continue
        flat_values = tensor.reshape(len(tensor), -1)
        is_not_finite = ~torch.isfinite(flat_values)
        if is_not_finite.any():
            position = int(is_not_finite.any(1).nonzero()[0])
            raise DamagedError(
                f"tensor {name!r} of member {locations[position].member}",
                expected="finite weights",
                found=f"{int(is_not_finite[position].sum())} that are not, as {tensor.dtype}",
                do="Leave the member out, or ask its producer",
                member=locations[position].member,
                tensor=name,
                path=locations[position].path,
            )
