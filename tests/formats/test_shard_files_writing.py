"""Shards of members that come one by one, and members brought from another layout into ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.shard_files import repack, shard_layout, stream_shard, write_shard

STORED = Layout.of_stored(
    [
        ("fc.weight", "F16", (2, 3), "linear.weight", (2, 3)),
        ("bn.num_batches_tracked", "F16", (), "bn.num_batches_tracked", ()),
        ("bn.running_var", "F16", (2,), "bn.running_var", (2,)),
        ("bn.bias", "BF16", (2,), "bn.beta", (1, 2, 1, 1)),
        ("bn.running_mean", "BF16", (2,), "bn.running_mean", (2,)),
        ("seen", "I64", (1,), "seen", (1,)),
    ],
    ["bn2.num_batches_tracked"],
    64,
)


def member() -> tuple[bytes, dict[str, Tensor]]:
    torch.manual_seed(0)
    values = {
        "fc.weight": torch.randn(2, 3).half(),
        "bn.num_batches_tracked": torch.tensor(torch.inf).half(),
        "bn.running_var": torch.rand(2).half(),
        "bn.bias": torch.randn(2).bfloat16(),
        "bn.running_mean": torch.randn(2).bfloat16(),
        "seen": torch.tensor([2**40]),
    }
    return b"".join(v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in values.values()), values


def test_repacked_members_hold_the_same_values(tmp_path: Path) -> None:
    raw, values = member()
    target = shard_layout(STORED)
    assert target.rebuilt_counters == ("bn.num_batches_tracked", "bn2.num_batches_tracked")
    assert {t.name: t.dtype for t in target.tensors} == {
        "seen": "I64", "bn.running_var": "F32", "bn.running_mean": "F32", "fc.weight": "F16", "bn.bias": "BF16",
    }  # fmt: skip
    packed = repack(STORED, raw, target)
    assert content_hash(target, packed) == content_hash(STORED, raw)
    path = write_shard(tmp_path, 0, target, [("000004/", packed)])
    values.pop("bn.num_batches_tracked")
    found = load_file(path)
    found.pop("000004/_pad", None)
    assert {n.removeprefix("000004/") for n in found} == set(values)
    for name, value in values.items():
        assert torch.equal(found[f"000004/{name}"].double(), value.double())
    assert shard_layout(target) == target
    assert repack(target, packed, target) == packed


def test_members_are_asked_for_one_by_one(tmp_path: Path) -> None:
    layout, alive = Layout.of([("a", "F32", (2,))]), []

    def members() -> Iterator[bytes]:
        for at in range(3):
            alive.append(at)
            yield bytes([at]) * 8

    streamed = stream_shard(tmp_path / "a", 7, layout, ["0/", "1/", "2/"], members())
    assert alive == [0, 1, 2]
    at_once = write_shard(tmp_path / "b", 7, layout, [(f"{i}/", bytes([i]) * 8) for i in range(3)])
    assert streamed.read_bytes() == at_once.read_bytes()
    assert streamed.name == at_once.name


@pytest.mark.parametrize("lengths", [[8, 8], [8, 8, 8, 8], [8, 7, 8]])
def test_other_members_than_prefixes(tmp_path: Path, lengths: list[int]) -> None:
    layout = Layout.of([("a", "F32", (2,))])
    with pytest.raises(UsageError, match="members of shard 0: expected "):
        stream_shard(tmp_path, 0, layout, ["0/", "1/", "2/"], (bytes(n) for n in lengths))
    assert list(tmp_path.iterdir()) == []
