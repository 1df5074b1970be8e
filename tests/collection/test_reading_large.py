"""Members larger than a buffer, read whole into one piece of memory: against tensors stacked one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints_zoo.collection import reading
from checkpoints_zoo.errors import DamagedError
from tests.collection.test_reading import BRAIN, COPIES, FULL, HALF, assert_same, located, looped
from tests.support.scenarios import State, build


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small members count as large."""
    monkeypatch.setattr(reading, "BUFFER_BYTES", 64)


@pytest.mark.slow
@pytest.mark.parametrize("net", ["convnet", "resnet8", "mlp"])
@pytest.mark.parametrize("weights", [HALF, FULL, BRAIN])
@pytest.mark.parametrize("case", COPIES)
def test_members_at_any_offset(tmp_path: Path, net: str, weights: torch.dtype, case: str) -> None:
    members, per_shard = COPIES[case]
    built = build(tmp_path, net, range(5), weights=weights, per_shard=per_shard)
    stacked = reading.stack(located(built, members))
    assert_same(stacked, looped(built, members))
    assert all(row.is_contiguous() for tensor in stacked.values() for row in tensor)
    assert len({t[1].data_ptr() - t[0].data_ptr() for t in stacked.values() if t.numel()}) == 1  # whole members
    some = reading.stack(located(built, members), tensor_names=list(stacked)[1:3])
    assert_same(some, {n: t for n, t in looped(built, members).items() if n in some})
    next(iter(stacked.values())).zero_()  # of this process alone
    assert_same(reading.stack(located(built, members)), looped(built, members))


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["conv1.weight", "bn1.running_var", "fc.bias"])
def test_a_value_that_is_not_finite(tmp_path: Path, value: float, tensor: str) -> None:
    def spoil(member: int, state: State) -> None:
        if member == 3:
            state[tensor].view(-1)[-1] = value

    built = build(tmp_path, "resnet8", range(5), weights=HALF, per_shard=2, change=spoil)
    kind = "torch.float32" if "running" in tensor else "torch.float16"
    with pytest.raises(DamagedError) as caught:
        reading.stack(located(built))
    assert str(caught.value) == (
        f"tensor {tensor!r} of member 3: expected finite weights; found 1 that are not, as {kind}. Leave the member"
        " out, or ask its producer."
    )
    (row,) = (r for r in built.rows if r["member"] == 3)
    assert caught.value.path == str(built.root / row["path"])
    assert len(reading.stack(located(built, [0, 2, 4]))[tensor]) == 3
