"""Run members on images, some members at a time.

Axes: logits are (member, input, class).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import TooLargeError, UsageError
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.images import ImageData, Preprocess
from checkpoints_zoo.networks.device import free_if_short
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.sources.source import Source

GROUP_BYTES = 2**30
FEW_IMAGES = 8  # Number of images on which a network is run twice to see whether its outputs are random.


class Members(Protocol):
    """The attributes and methods of a `Collection` that predictions use; `checkpoints_zoo.predictions` may not import
    `checkpoints_zoo.collection`."""

    source: Source
    description: Description
    rows: Any
    _commit: str
    _view: Any

    @property
    def name(self) -> str: ...
    @property
    def ids(self) -> list[int]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def citation(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def preprocess(self) -> Preprocess: ...
    @property
    def _snapshot_keys(self) -> list[tuple[int, int]]: ...
    def _skeleton(self) -> nn.Module: ...
    def _locations(self) -> list[Location]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, position: slice) -> Self: ...
    def batches(
        self, size: int, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]: ...


def logits(
    members: Members,
    data: ImageData,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    execution: str | None = None,
) -> Tensor:
    """Run members on images, as many members at a time as 1 GiB holds; return logits (member, input, class).

    Args:
        members: a collection of any size; the next group of members is read while the present group computes.
        data: the images that the members run on, before preprocessing.
        device, dtype: device and dtype of the computation; the returned logits are on the CPU.
        batch: number of images in each forward pass.
        execution: the same argument as in `logits_by_group`.

    Raises:
        UsageError: the images have a size that the members can't take.
        DamagedError: weights or logits of a member are not finite.
        TooLargeError: the logits need more memory than is free.
    """
    logits, first_position = torch.empty(0), 0
    for ids, group_logits in logits_by_group(members, data, device, dtype, batch, execution=execution):
        if first_position == 0:
            logits = _empty_logits(members, data, group_logits)
        logits[first_position : first_position + len(ids)] = group_logits
        first_position += len(ids)
    return logits


def _empty_logits(members: Members, data: ImageData, group_logits: Tensor) -> Tensor:
    """Allocate memory for the logits of all members, in the dtype of one group's logits; return (member, input, class).

    Raises:
        TooLargeError: the logits need more memory than is free.
    """
    shape = (len(members), *group_logits.shape[1:])
    needed_nbytes = math.prod(shape) * group_logits.dtype.itemsize
    if (free_nbytes := free_if_short(needed_nbytes)) is not None:
        raise TooLargeError(
            f"logits of {shape[0]:,} members of {members.name} on {shape[1]:,} inputs",
            expected=f"at most {free_nbytes:,} bytes, the memory that is free",
            found=f"{needed_nbytes:,}",
            do=f"Store them with `members.predict({data.name!r}, folder)`, and give these predictions instead of the "
            "members: they are read in blocks",
            collection=members.name,
        )
    return torch.empty(shape, dtype=group_logits.dtype)


def group_size(members: Members, most_members: int | None = None) -> int:
    """Return how many members `logits_by_group` runs at a time: as many as 1 GiB holds, but at most `most_members`."""
    return max(
        1, min(len(members), most_members or len(members), GROUP_BYTES * len(members) // max(1, 2 * members.nbytes))
    )


def logits_by_group(
    members: Members,
    data: ImageData,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    most_members: int | None = None,
    execution: str | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Run members on images, group after group; yield the ids of each group and its logits (member, input, class).

    Args:
        members, data, device, dtype, batch: the same arguments as in `logits`.
        most_members: largest number of members in a group; None for as many as 1 GiB holds.
        execution: name of the way in which the ensemble runs members; None for a loop on the CPU, where a member's
            logits depend on no other member, and for the ensemble's own choice on other devices.

    Raises:
        UsageError: the batch is no number from 1, the images have a size that the members can't take, or the network is
            random in eval mode.
        DamagedError: for the same reasons as in `logits`.
    """
    batch_size = whole_number(batch)
    if batch_size is None or batch_size < 1:
        raise UsageError("batch", expected="a number of images from 1", found=repr(batch)[:80])
    skeleton = members._skeleton()
    members_at_once = group_size(members, most_members)
    default_execution = "loop" if torch.device(device).type == "cpu" else None
    ensemble: Ensemble | None = None
    groups = members.batches(members_at_once, device, dtype)
    title = f"{members.name} on {data.name}"
    for member_ids, stacked in progress(groups, len(members), title, size=lambda group: len(group[0])):
        with torch.inference_mode():
            if ensemble is None:
                _check_first_member(members, skeleton, member_ids[0], stacked, data, dtype)
                ensemble = Ensemble(skeleton, stacked, member_ids, execution=execution or default_execution)
            else:
                ensemble = ensemble._with_members(stacked, member_ids)
            input_batches = (
                data.inputs(image_batch, members.preprocess) for image_batch in torch.split(data.images, batch_size)
            )
            logits = torch.cat([ensemble(image_batch.to(device, dtype)).cpu() for image_batch in input_batches], dim=1)
        yield member_ids, logits


def _check_first_member(
    members: Members,
    skeleton: nn.Module,
    first_id: int,
    stacked: Mapping[str, Tensor],
    data: ImageData,
    dtype: torch.dtype,
) -> None:
    """Check that the network is not random in eval mode: run the first member twice on a few images, and compare.

    Raises:
        UsageError: the network is random in eval mode, so that accuracies and other measurements can't be repeated.
    """
    first_member = {name: tensor[:1] for name, tensor in stacked.items()}
    ensemble = Ensemble(skeleton, first_member, [first_id], execution="module")
    device = next(iter(first_member.values())).device
    inputs = data.inputs(data.images[:FEW_IMAGES], members.preprocess).to(device, dtype)
    first_logits, second_logits = ensemble(inputs), ensemble(inputs)
    check_same_outputs(skeleton, {"": first_logits}, {"": second_logits}, 10 * torch.finfo(first_logits.dtype).eps)


def check_same_outputs(
    module: nn.Module, first_outputs: Mapping[str, Tensor], second_outputs: Mapping[str, Tensor], tolerance: float
) -> None:
    """Compare the outputs of two runs of a module on the same inputs.

    Args:
        module: the module that was run, in eval mode.
        first_outputs, second_outputs: outputs of the two runs, name -> tensor.
        tolerance: largest difference, relative to the largest output.

    Raises:
        UsageError: the outputs differ, so the module is random.
    """
    differences = [float((second_outputs[name] - t).abs().max()) for name, t in first_outputs.items() if t.numel()]
    largest_output = max((float(t.abs().max()) for t in first_outputs.values() if t.numel()), default=0.0)
    if max(differences, default=0.0) > tolerance * largest_output:
        raise UsageError(
            f"module {type(module).__name__} in eval mode",
            expected="the same outputs each time",
            found="others in a second run",
            do="Dropout and sampling have to stop in eval mode, as `F.dropout(x, p, self.training)` does",
        )
