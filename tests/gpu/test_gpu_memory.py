"""Memory of a card: what torch keeps for later is free, and an error that means too little of it is known as one."""

from __future__ import annotations

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.collection import transfer
from checkpoints_zoo.networks.device import check_device, free_bytes

pytestmark = pytest.mark.gpu
GPU = "cuda"


def test_what_the_allocator_keeps_is_free() -> None:
    device = torch.device(GPU, 0)
    torch.cuda.empty_cache()
    before = free_bytes(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before is not None
    assert before - (free_bytes(device) or 0) == 2**28
    del held
    assert free_bytes(device) == before


def test_a_device_has_a_number() -> None:
    """ "cuda" and "cuda:0" are one device, with one pair of streams."""
    transfer._streams_of_device.clear()
    members = zoo.load("convnet-digits", n=2)
    members.stack("cuda")
    members.stack("cuda:0")
    assert check_device("cuda") == torch.device("cuda:0")
    assert len([d for d in transfer._streams_of_device if d.type == "cuda" and d.index in (None, 0)]) == 1
