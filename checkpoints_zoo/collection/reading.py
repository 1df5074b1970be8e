"""Read members from their files straight into stacked tensors, by offset.

Members that are evenly spaced in one file become strided views of one memory map of the file. All other members are
read in large pieces into one reused buffer, and converted in the buffer.

Axes of stacked tensors are (member, …), where … stands for the axes of one member's tensor.

This is one file, because both ways of reading fill the same stacked tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoints_zoo.collection import transfer
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats.layout import Layout, TensorSpec, is_counter
from checkpoints_zoo.formats.shard_files import (
    BUFFER_BYTES,
    Location,
    check_against_files,
    group_adjacent,
    read_at,
    read_into,
    reused_buffer,
)
from checkpoints_zoo.networks.device import (
    SMALL_MEMBER_BYTES,
    check_device,
    check_memory,
    on_current_stream,
    one_thread,
)
from checkpoints_zoo.networks.modules import TORCH_DTYPES, check_tensors

GROUP_BYTES = 2**24  # Number of bytes of members that are read into one buffer and converted together.
NUMPY_LARGE_PAGES_BYTES = 2**22  # Number of bytes from which numpy requests large pages for an array.
READER_THREADS = 2  # Number of threads that read large members; more threads are not faster.


@dataclass(frozen=True)
class LocatedTensors:
    """Some tensors of members, and where they are.

    Args:
        names: names of the tensors; None for all tensors of the members.
        locations: locations of the members' bytes, or of the tensors' if there is one name.
    """

    names: tuple[str, ...] | None
    locations: Sequence[Location]

    @classmethod
    def group(cls, locations_of_name: Mapping[str, Sequence[Location]]) -> list[LocatedTensors]:
        """Group successive tensors that have the same list of locations; return the groups."""
        groups: list[LocatedTensors] = []
        for name, locations in locations_of_name.items():
            last = groups.pop() if groups and groups[-1].locations is locations else None
            groups.append(cls((*(last.names or () if last else ()), name), locations))
        return groups

    def at(self, positions: Iterable[int]) -> LocatedTensors:
        """Return the same tensors of the members at some positions."""
        return LocatedTensors(self.names, [self.locations[position] for position in positions])


def stack_located(
    located: Iterable[LocatedTensors],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    check: bool = False,
) -> dict[str, Tensor]:
    """Read located tensors into stacked tensors; return name -> (member, …). Arguments and errors are those of
    `stack`."""
    stacked: dict[str, Tensor] = {}
    for tensors in located:
        stacked |= stack(tensors.locations, device, dtype, tensors.names, check=check)
    return stacked


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
    for group, rows in _groups_with_rows(locations):
        stacked_rows = {name: tensor[rows] for name, tensor in stacked.items()}
        if not _copy_group(group, [(spec, stacked_rows[spec.name]) for spec in _stored_specs(group[0].layout, specs)]):
            check_finite(stacked_rows, group)
    return stacked


def read_vectors(
    locations: Sequence[Location], dtype: torch.dtype, tensor_names: Iterable[str] | None = None
) -> Tensor:
    """Read members into flat vectors, in the order of the names or of the first member's layout, and check the values;
    return the vectors (member, weight).

    Tensors that follow each other in a file are converted together.

    Args:
        locations, dtype, tensor_names: the same arguments as in `stack`; running statistics have this dtype too.

    Raises:
        DamagedError, LayoutError, TooLargeError: for the same reasons as in `stack`.
    """
    specs = _common_specs(locations, tensor_names)
    check_against_files(locations)
    _dtypes(specs, locations, dtype)
    widths = [math.prod(spec.shape) for spec in specs]
    shape = len(locations), sum(widths)
    check_memory({"": shape}, {"": dtype}, torch.device("cpu"))
    vectors = _empty(shape, dtype, torch.device("cpu"))
    for group, rows in _groups_with_rows(locations):
        joined_specs = transfer.join_adjacent(_stored_specs(group[0].layout, specs))
        columns = torch.split(vectors[rows], [spec.shape[0] for spec in joined_specs], dim=1)
        if not _copy_group(group, list(zip(joined_specs, columns, strict=True))):
            tensors = torch.split(vectors[rows], widths, dim=1)
            check_finite({spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}, group)
    return vectors


def read_ahead(
    read_result: Callable[[int], dict[str, Tensor]], result_count: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield read(0), read(1), … up to `result_count` results; the next result is read onto the device while the caller
    uses the present result."""
    read_result = on_current_stream(read_result, device)
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
    return {name: _empty(shape, dtypes[name], device) for name, shape in shapes.items()}


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor without values. numpy requests large memory pages, whose first use takes a third of the
    time."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < NUMPY_LARGE_PAGES_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(nbytes, np.uint8)).view(dtype).view(shape)


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
    joined_specs = transfer.join_adjacent(specs)
    with ThreadPoolExecutor(READER_THREADS, thread_name_prefix="zoo-read") as read_executor:
        member_buffers = [memory[i * distance : i * distance + member_nbytes].data for i in range(len(locations))]
        for i, raw in enumerate(
            read_executor.map(
                lambda location, part: read_into(location, location.offset, part), locations, member_buffers
            )
        ):
            values = (
                torch.frombuffer(raw, dtype=TORCH_DTYPES[spec.dtype], count=spec.shape[0], offset=spec.offset)
                for spec in joined_specs
            )
            if not _are_finite(values, locations[i].layout):
                storage = torch.from_numpy(memory).untyped_storage()
                check_finite(tensor_views(storage, i * distance, specs, 1, distance), [locations[i]])
    return tensor_views(torch.from_numpy(memory).untyped_storage(), 0, specs, len(locations), distance)


def _stored_specs(layout: Layout, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the specs of the same tensors in another layout."""
    spec_of_name = {spec.name: spec for spec in layout.tensors}
    return [spec_of_name[spec.name] for spec in specs]


def _groups_with_rows(locations: Sequence[Location]) -> Iterator[tuple[list[Location], slice]]:
    """Yield groups of members of one layout, and their rows among all members."""
    first_row = 0
    for group in _group_by_layout(locations):
        yield group, slice(first_row, first_row + len(group))
        first_row += len(group)


def _group_by_layout(locations: Sequence[Location]) -> Iterator[list[Location]]:
    """Group successive members of one layout; yield groups of at most GROUP_BYTES, or of one large member."""
    group: list[Location] = []
    for location in locations:
        layout = location.layout
        if group and (layout is not group[0].layout or (len(group) + 1) * layout.nbytes > GROUP_BYTES):
            yield group
            group = []
        group.append(location)
    if group:
        yield group


def _copy_group(group: Sequence[Location], targets: Iterable[tuple[TensorSpec, Tensor]]) -> bool:
    """Read members of one layout and convert their tensors; return whether all values are finite.

    Args:
        group: small members, which are read into one buffer and converted together, or one large member, which is read
            piece by piece.
        targets: description of a stored tensor, and the rows (member, …) that it is converted into.
    """
    copied_tensors = (
        _copy_members(group, targets) if group[0].layout.nbytes <= GROUP_BYTES else _copy_pieces(group[0], targets)
    )
    return _are_finite(copied_tensors, group[0].layout)


def _copy_members(group: Sequence[Location], targets: Iterable[tuple[TensorSpec, Tensor]]) -> Iterator[Tensor]:
    """Read members into one buffer, and convert each tensor for all these members at once; yield the converted
    tensors."""
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
    for spec, rows in targets:
        if spec.nbytes:
            _copy_converted(transfer.strided_view(raw_bytes, spec, len(group), distance), rows)
            yield rows


def _copy_pieces(location: Location, targets: Iterable[tuple[TensorSpec, Tensor]]) -> Iterator[Tensor]:
    """Read a large member piece by piece and convert each piece; yield the converted pieces."""
    with location.path.open("rb", buffering=0) as file:
        for spec, rows in targets:
            dtype = TORCH_DTYPES[spec.dtype]
            piece_length = BUFFER_BYTES // dtype.itemsize
            for i, piece in enumerate(torch.split(rows.view(-1), piece_length) if spec.nbytes else ()):
                raw_bytes = reused_buffer(piece.numel() * dtype.itemsize)
                read_at(file, location, location.offset + spec.offset + i * piece_length * dtype.itemsize, raw_bytes)
                _copy_converted(torch.frombuffer(raw_bytes, dtype=dtype), piece)
                yield piece


def _copy_converted(stored_values: Tensor, target_values: Tensor) -> None:
    if stored_values.dtype == torch.float16 and target_values.dtype == torch.bfloat16:
        stored_values = stored_values.float()  # A direct cast is several times slower than a cast through float32.
    # The cast happens on the device, because the stored dtype has fewer bytes to send.
    target_values.copy_(stored_values if target_values.device.type == "cpu" else stored_values.to(target_values.device))


def _common_specs(locations: Sequence[Location], tensor_names: Iterable[str] | None) -> list[TensorSpec]:
    """Check that all members have the selected tensors in the same shapes; return the specs of these tensors.

    Args:
        locations: locations of the members' bytes.
        tensor_names: names of the tensors; None for all tensors, which all members must have.
    """
    layout = locations[0].layout
    specs = (
        [t for t in layout.tensors if not is_counter(t.name)]
        if tensor_names is None
        else [layout.spec(name) for name in tensor_names]
    )
    for other in {id(x.layout): x for x in locations}.values():
        shapes = (
            other.layout.shapes if tensor_names is None else {t.name: other.layout.spec(t.name).shape for t in specs}
        )
        if shapes != {t.name: t.shape for t in specs}:
            check_tensors(shapes, layout, f"member {other.member} beside member {locations[0].member}")
    return specs


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


def _are_finite(tensors: Iterable[Tensor], layout: Layout) -> bool:
    """Say whether all values of all floating tensors are finite; members of a small layout are checked on one thread.

    One pass over the values finds infinities and NaN: the minimum and maximum of values with a NaN are NaN. If
    `tensors` converts tensor after tensor, each is checked while the processor's cache has it.
    """
    with one_thread(layout.nbytes < SMALL_MEMBER_BYTES):
        extremes = [x for t in tensors if t.is_floating_point() and t.numel() for x in torch.aminmax(t)]
        return not extremes or bool(torch.isfinite(torch.stack(extremes)).all())


def check_finite(stacked: Mapping[str, Tensor], locations: Sequence[Location]) -> None:
    """Check that all values are finite.

    Raises:
        DamagedError: a value is not finite; the error names the first member and tensor with this value.
    """
    layout = locations[0].layout
    if _are_finite(stacked.values(), layout):
        return
    for name, tensor in stacked.items():
        if _are_finite([tensor], layout):
            continue
        is_not_finite = ~torch.isfinite(tensor.reshape(len(tensor), -1))
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
