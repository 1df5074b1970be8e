"""Which execution runs: a small table a device, by the size of the members and of the batch.

The CPU's rows were measured with `benchmarks/ensemble.py`; a GPU's are what launch times and bandwidths of an H100
let one expect, to be measured with `benchmarks/gpu_ensemble.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpoints_zoo.errors import UsageError

# "module" is a loop through the module's own code: slower, and bit for bit what a member's module gives.
EXECUTIONS = ("loop", "grouped", "vmap", "graph", "module")
ANY = 2**62


@dataclass(frozen=True)
class Row:
    """What runs on a device, up to a size.

    Args:
        device: its type; "" for all others.
        execution: one of EXECUTIONS.
        weights: elements of a member, at most.
        batch: bytes that the widest activation of a member has on the batch, at most.
        at_once: bytes that it may have of all members that are side by side.
        least: members; fewer take the next row.
    """

    device: str
    execution: str
    weights: int = ANY
    batch: int = ANY
    at_once: int = 2**22
    least: int = 1


@dataclass(frozen=True)
class Choice:
    """What runs.

    Args:
        execution: one of EXECUTIONS.
        members: how many side by side.
    """

    execution: str
    members: int = 1


# The first that fits counts. Where a network has no program, vmap takes the place of grouped convolutions.
TABLE = (
    Row("cpu", "grouped", weights=2**19, batch=2**18, least=8),
    Row("cpu", "loop"),
    Row("cuda", "grouped", weights=2**21, batch=2**24, at_once=2**27),
    Row("cuda", "grouped", batch=2**20, at_once=2**23),
    Row("cuda", "graph"),
    Row("", "loop"),
)
VMAP_BATCH = {"cpu": 2**16}  # bytes, as `batch` above: beyond them it is slower than a loop


def choose(device: str, weights: int, members: int, batch: int, asked: str | None = None) -> Choice:
    """Choose an execution from the table, or take the one that is asked for; return it.

    Args:
        device: type of the device.
        weights: elements of a member.
        members: how many there are.
        batch: bytes that the widest activation of a member has on the batch.
        asked: one of EXECUTIONS, or None.

    >>> choose("cpu", 273_258, members=64, batch=65_536)  # ResNet-20, one image
    Choice(execution='grouped', members=64)
    >>> choose("cpu", 11_220_132, members=64, batch=128 * 262_144)  # ResNet-18, 128 images
    Choice(execution='loop', members=1)
    """
    rows = [row for row in TABLE if row.device in (device, "")]
    row = next(r for r in rows if weights <= r.weights and batch <= r.batch and members >= r.least)
    execution = asked or row.execution
    side_by_side = execution in ("grouped", "vmap")
    return Choice(execution, max(1, min(members, row.at_once // max(1, batch))) if side_by_side else 1)


_SMALL_MEMBER = 2**18  # elements
_PIECE, _LEAST = 2**21, 16  # bytes of a piece's widest activation, inputs of a piece


def memory_format(device: str, batch: int) -> bool:
    """Say whether convolutions of one member at a time are quicker on channels_last activations."""
    return device == "cuda" or (device == "cpu" and batch >= 8)


def single_thread(device: str, weights: int) -> bool:
    """Say whether members are so small that waking a second thread costs more than it gives."""
    return device == "cpu" and weights < _SMALL_MEMBER


def pieces(device: str, batch: int, widest: int) -> int:
    """Return into how many pieces a batch is cut for one member: a CPU's cache holds what a layer gives the next.

    Args:
        device: its type.
        batch: inputs of the batch.
        widest: bytes of the widest activation, an input.
    """
    most = max(_LEAST, _PIECE // max(1, widest))
    return -(-batch // most) if device == "cpu" and batch >= 2 * most else 1


def check_execution(asked: str | None, device: torch.device, compiled: bool) -> None:
    """Check that an execution is one, and can be had on a device.

    Raises:
        UsageError: it is not.
    """
    if asked is not None and asked not in EXECUTIONS:
        expected = f"{', '.join(EXECUTIONS)} or None"
        raise UsageError("execution of an ensemble", expected=expected, found=repr(asked)[:80])
    if asked == "graph" and device.type != "cuda":
        raise UsageError("execution 'graph'", expected="a CUDA device", found=str(device), do="Take None")
    if compiled and asked in ("vmap", "graph"):
        raise UsageError(f"execution {asked!r} with compile=True", expected="'loop', 'grouped' or None", do="Take None")
