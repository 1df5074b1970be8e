"""Counts on a simulated card, so that a slower engine is seen without one: launches, waits and bytes.

A ResNet-18 has more than a hundred tensors, whatever its width; narrow ones keep the tests short.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.networks.architectures.resnet18 import small_resnet
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.modules import build_architecture
from tests.simgpu.counts import Counts, counting
from tests.support import scenarios

pytestmark = pytest.mark.simgpu


def narrow() -> nn.Module:
    """Build a ResNet-18 whose stages have 2 to 16 channels."""
    return small_resnet((2, 2, 2, 2), nn.Conv2d(1, 64, 3, padding=1, bias=False), 10, channels=(2, 4, 8, 16))


def ensemble_of(build: nn.Module, members: int, dtype: torch.dtype = torch.float32) -> Ensemble:
    """Stack members that differ from a network by noise; their norms have statistics of their own."""
    torch.manual_seed(0)
    stacked = {}
    for name, tensor in build.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        noise = torch.rand(members, *tensor.shape) * 0.1
        is_norm = "running" in name
        stacked[name] = (tensor + noise).to("cuda", torch.float32 if is_norm else dtype)
    return Ensemble(build.eval().requires_grad_(False).to("meta"), stacked, range(members), execution="graph")


def launches_beside_convolutions(operations: Counter[str], net: nn.Module) -> int:
    """Return how many launches of a captured forward pass are more than the network's convolutions."""
    return operations.total() - sum(isinstance(layer, nn.Conv2d) for layer in net.modules())


def calls(ensemble: Ensemble, inputs: Tensor, count: int = 2) -> list[Counts]:
    """Call an ensemble; return the counts of each call."""
    found = []
    for _ in range(count):
        with torch.inference_mode(), counting() as counts:
            ensemble(inputs)
        found.append(counts)
    return found


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float32 convolutions from TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def test_a_member_costs_a_copy_and_a_replay() -> None:
    """The first call folds all members together, the second nothing; waits do not grow with the members."""
    few, many = (calls(ensemble_of(narrow(), n), torch.randn(2, 1, 8, 8, device="cuda")) for n in (4, 16))
    [captured] = many[0].captures
    assert launches_beside_convolutions(captured, narrow()) <= 12, captured
    assert many[1].captures == []
    assert many[1].replays == 16
    assert many[1].launches - few[1].launches <= 2 * 12, many[1].operations  # its weights, its logits
    assert few[1].launches <= 2 * 4 + 8, few[1].operations
    assert many[1].host_waits <= 2, many[1].waits
    # Folding: as many launches for 16 members as for 4, but for the copies and replays.
    assert many[0].launches - few[0].launches <= 2 * 12
    assert many[0].host_waits == few[0].host_waits


def test_bytes_of_a_forward_pass_at_true_width() -> None:
    """Without what a member's weights cost, an image of 32 × 32 reads and writes at most 3.6 MB in bfloat16."""
    batch = 2
    ensemble = ensemble_of(build_architecture("resnet18"), 1, torch.bfloat16)
    counts = calls(ensemble, torch.randn(batch, 3, 32, 32, device="cuda", dtype=torch.bfloat16))[1]
    weights = sum(t[0].numel() for t in ensemble.stacked.values()) * 2
    # Weights are read in the convolutions; copied to where the graph reads them, they are read and written once more.
    assert (counts.read + counts.written - 3 * weights) / batch <= 3.6e6


def test_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 20 launches a member; each stored byte crosses the bus once; the host waits a few times."""
    monkeypatch.setitem(scenarios.NETS, "narrow", narrow)
    built = scenarios.build(tmp_path, "narrow", range(12), weights=torch.float16)
    members = zoo.load(built.name, source=built.root, architecture=narrow)
    members.stack("cuda", torch.float32)  # the streams are made
    with counting() as counts:
        members.stack("cuda", torch.float32)
    assert counts.to_card == members.nbytes
    assert counts.from_card <= 8
    assert counts.launches <= 20 * len(members), counts.operations
    assert counts.host_waits <= 4 + len(members), (counts.waits, counts.synchronisations)
