"""Members sent to a device in pieces, here to the CPU: against tensors stacked one by one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints_zoo.collection import reading, transfer
from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location
from tests.collection.test_reading import COPIES, FULL, HALF, assert_same, located, looped
from tests.support.scenarios import Built, State, build, file_bytes, raw

CPU = torch.device("cpu")


def sent(locations: list[Location], dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], bool]:
    kinds = reading.stacked_dtypes(locations, dtype)
    with transfer.allocation_stream(CPU):
        out = reading.empty_stack(locations, kinds, CPU)
    specs = [t for t in locations[0].layout.tensors if t.name in kinds]
    return out, transfer.copy_to_device(locations, specs, out)


@pytest.fixture(params=[(1, 4_001), (40_000, 7_777), (2**26, 2**23)], ids=str)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of one member and of many, pieces smaller and larger than a tensor."""
    for name, value in zip(("GROUP_BYTES", "PIECE_BYTES"), request.param, strict=True):
        monkeypatch.setattr(transfer, name, value)


@pytest.mark.slow
@pytest.mark.parametrize("net", ["resnet8", "mlp"])
@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("dtype", [None, FULL])
@pytest.mark.usefixtures("sizes")
def test_members_at_any_offset(tmp_path: Path, net: str, case: str, dtype: torch.dtype | None) -> None:
    members, per_shard = COPIES[case]
    built = build(tmp_path, net, range(5), weights=HALF, per_shard=per_shard)
    found, finite = sent(located(built, members), dtype)
    assert finite
    assert_same(found, looped(built, members, dtype))


@pytest.mark.usefixtures("sizes")
def test_tensors_at_any_byte(tmp_path: Path) -> None:
    """As in an archive: an odd order, no pad, members at odd bytes."""
    tensors: State = {
        "m": torch.tensor([True]), "w": torch.tensor([1.5, 2.5]), "h": torch.tensor([1.0, 2.0, 3.0]).half(),
    }  # fmt: skip
    rows = [{n: t * k if t.is_floating_point() else t for n, t in tensors.items()} for k in (1, 2, 3)]
    kinds = {"m": "BOOL", "w": "F32", "h": "F16"}
    content = file_bytes(
        {f"{i:06d}/{n}": (kinds[n], t.shape, raw(t)) for i, r in enumerate(rows) for n, t in r.items()}
    )
    (tmp_path / "f").write_bytes(content)
    layout = Layout.from_json(
        {"tensors": [[n, kinds[n], list(t.shape)] for n, t in tensors.items()], "counters": [], "pad": 0}
    )
    locations = [Location(i, f"{i:06d}/", tmp_path / "f", 4096 + 15 * i, layout) for i in range(3)]
    for chosen in (locations, locations[:1], locations[::-1]):
        assert_same(sent(chosen)[0], {n: torch.stack([rows[x.member][n] for x in chosen]) for n in tensors})


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_noticed(tmp_path: Path, value: float) -> None:
    def spoil(member: int, state: State) -> None:
        if member == 3:
            state["fc.bias"][-1] = value

    built: Built = build(tmp_path, "resnet8", range(5), change=spoil)
    assert not sent(located(built))[1]
    assert sent(located(built, [0, 1, 2, 4]))[1]


@pytest.mark.usefixtures("sizes")
def test_a_file_that_was_cut(tmp_path: Path) -> None:
    built = build(tmp_path, "resnet8", range(5))
    locations = located(built)
    content = built.shard.read_bytes()
    built.shard.write_bytes(content[:-100])
    with pytest.raises(DamagedError, match=r"bytes or more; found"):
        sent(locations)


def test_members_without_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(file_bytes({"000000/n": ("F32", [0, 3], b"")}))
    layout = dataclasses.replace(Layout.of([("n", "F32", (0, 3))]), pad=0)
    found, finite = sent([Location(0, "000000/", tmp_path / "f", 4096, layout)])
    assert (finite, found["n"].shape) == (True, (1, 0, 3))
