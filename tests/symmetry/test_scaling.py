"""Unit-norm scaling: against a loop over units, and cases with known answers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry import Table, rescale, symmetries
from checkpoints_zoo.symmetry.canonical import scaling
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from checkpoints_zoo.symmetry.canonical.scaling import unit_norm
from tests.support.canonical_cases import NETS, mlp, table_of
from tests.support.symmetry_nets import randomised


def params_of(name: str, members: int, seed: int = 0) -> dict[str, Tensor]:
    states = [
        {n: t.clone() for n, t in randomised(NETS[name][0](), seed + i).state_dict().items()} for i in range(members)
    ]
    return {n: torch.stack([state[n] for state in states]) for n in states[0]}


def rows_of(table: Table, name: str, tensor: Tensor) -> list[Tensor]:
    """Return one member's rows of a scale's first writer, all entries that one value multiplies."""
    scale = table.scales[name]
    writer, axis = scale.writers[0]
    entries = tensor.movedim(axis, 0)
    found: list[list[Tensor]] = [[] for _ in range(scale.size)]
    for power in table.tensors[writer].powers:
        if power.scale == name and power.axis == axis:
            for e in range(power.length):
                found[e * scale.size // power.length].append(entries[power.offset + e].flatten())
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("approximate", [False, True])
def test_rows_have_norm_1(name: str, approximate: bool) -> None:
    table, params = table_of(name), params_of(name, 2)
    tensors, scales, unscaled = unit_norm(table, params, approximate=approximate)
    assert set(scales) == set(unscaled) == {n for n, s in table.scales.items() if s.exact or approximate}
    for scale, values in scales.items():
        assert values.dtype == torch.float64
        assert values.shape == unscaled[scale].shape == (2, table.scales[scale].size)
        writer, _ = table.scales[scale].writers[0]
        for i in range(2):
            before, after = (rows_of(table, scale, own[writer][i]) for own in (params, tensors))
            for unit, (old, new) in enumerate(zip(before, after, strict=True)):
                zero = not bool(old.any())
                assert bool(unscaled[scale][i, unit]) == zero
                assert float(new.norm()) == (0 if zero else pytest.approx(1, abs=1e-12))
                assert not zero or float(values[i, unit]) == 1
    for n, t in rescale(table, params, scales).items():
        torch.testing.assert_close(tensors[n], t, rtol=1e-14, atol=0)


def test_a_small_network_by_hand() -> None:
    """As the authors do: columns are divided first, a bias is multiplied, but is no part of the norm."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    params = {n: t.detach()[None] for n, t in net.state_dict().items()}
    found = unit_norm(symmetries(net, torch.zeros(1, 3)), params)
    first, second, last = (params[f"{i}.weight"][0].clone() for i in (0, 2, 4))
    one = 1 / first.square().sum(1).sqrt()
    second = second / one
    two = 1 / second.square().sum(1).sqrt()
    wanted = {
        "0.weight": first * one[:, None], "0.bias": params["0.bias"][0] * one, "2.weight": second * two[:, None],
        "2.bias": params["2.bias"][0] * two, "4.weight": last / two, "4.bias": params["4.bias"][0],
    }  # fmt: skip
    for n, t in wanted.items():
        torch.testing.assert_close(found.tensors[n][0], t, rtol=1e-13, atol=0)
    torch.testing.assert_close(found.scales["2"][0], two, rtol=1e-13, atol=0)


def test_norms_and_the_rows_before_them() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 1, 1))
    table = symmetries(net, torch.zeros(2, 1, 2, 2))
    params = {n: t[None].double() for n, t in net.state_dict().items() if t.is_floating_point()}
    params["0.weight"] = torch.tensor([-4.0, 0.5, 0]).reshape(1, 3, 1, 1, 1).double()
    params["1.weight"] = torch.tensor([[-2.0, 0, 3]]).double()
    params["1.bias"] = torch.tensor([[2.0, 5, 6]]).double()
    params["1.running_mean"] = torch.tensor([[8.0, 1, 1]]).double()
    params["1.running_var"] = torch.tensor([[16.0, 1, 1]]).double()
    params["3.weight"] = torch.ones(1, 1, 3, 1, 1).double()
    tensors, scales, unscaled = unit_norm(table, params)
    assert scales["0"].tolist() == [[0.25, 2, 1]]
    assert scales["1"].tolist() == [[0.5, 1, 1 / 3]]
    assert {n: m.tolist() for n, m in unscaled.items()} == {"0": [[False, False, True]], "1": [[False, True, False]]}
    assert tensors["0.weight"].flatten().tolist() == [-1, 1, 0]
    assert tensors["1.weight"].tolist() == [[-1, 0, 1]]
    assert tensors["1.bias"].tolist() == [[1, 5, 2]]
    assert tensors["1.running_mean"].tolist() == [[2, 2, 1]]
    eps = 1e-5
    wanted = [(16 + eps) / 16 - eps, (1 + eps) * 4 - eps, 1]
    assert tensors["1.running_var"][0].tolist() == pytest.approx(wanted, rel=1e-14)
    assert tensors["3.weight"].flatten().tolist() == pytest.approx([2, 1, 3], rel=1e-15)


def test_the_first_writer_of_a_stream_is_normalised() -> None:
    table, params = table_of("small_resnet"), params_of("small_resnet", 1)
    tensors = unit_norm(table, params).tensors
    first, *others = (name for name, _ in table.groups["0"].writers)
    assert first == "0.weight"
    torch.testing.assert_close(tensors[first][0].flatten(1).norm(dim=1), torch.ones(6).double(), rtol=1e-12, atol=0)
    for other in others:  # rows before other norms of the stream have scales of their own
        torch.testing.assert_close(tensors[other][0].flatten(1).norm(dim=1), torch.ones(6).double(), rtol=1e-12, atol=0)


def test_gains_are_exactly_1() -> None:
    table, params = table_of("small_resnet"), params_of("small_resnet", 8)
    for dtype in (torch.float32, torch.float64):
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in params.items()}
        tensors = unit_norm(table, cast).tensors
        assert torch.equal(tensors["3.bn1.weight"], cast["3.bn1.weight"].sign())


@pytest.mark.parametrize(
    ("stored", "returned"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_dtypes(stored: torch.dtype, returned: torch.dtype) -> None:
    """Narrow tensors come back in float32: rounding scaled weights to float16 would change the function."""
    table, params = table_of("small_resnet"), params_of("small_resnet", 2)
    cast = {n: t.to(stored) if t.is_floating_point() else t for n, t in params.items()}
    before = {n: t.clone() for n, t in cast.items()}
    found, used = canonicalize(table, cast, scale="unit-norm", permute="first")
    for n, t in found.items():
        assert t.dtype == (returned if params[n].is_floating_point() else torch.int64)
    assert all(torch.equal(t, before[n]) for n, t in cast.items())
    exact = canonicalize(table, {n: t.double() for n, t in cast.items()}, scale="unit-norm", permute="first")
    bound = 1e-6 if returned == torch.float32 else 1e-14
    assert all(torch.equal(p, exact[1].permutations[n]) for n, p in used.permutations.items())
    for n, t in used.scales.items():
        torch.testing.assert_close(t, exact[1].scales[n], rtol=1e-14, atol=0)
    for n, t in found.items():
        torch.testing.assert_close(t.double(), exact[0][n], rtol=bound, atol=bound)


def test_rows_too_small_for_the_dtype_stay() -> None:
    table, params = mlp(2, 3, 1)
    params["0.weight"] = torch.tensor([[1e-18, 0], [1e-20, 0], [1e-40, 0]])
    stacked = {n: t[None] for n, t in params.items()}
    found = unit_norm(table, stacked)
    assert found.unscaled["0"].tolist() == [[False, True, True]]
    assert all(bool(t.isfinite().all()) for t in found.tensors.values())
    wide = unit_norm(table, {n: t.double() for n, t in stacked.items()})
    assert wide.unscaled["0"].tolist() == [[False, False, False]]
    assert wide.tensors["0.weight"][0].tolist() == [[pytest.approx(1, rel=1e-12), 0]] * 3


@pytest.mark.parametrize("name", ["small_resnet", "dense", "gated", "functional"])
def test_scales_that_depend_on_others_come_after_them(name: str) -> None:
    table, params = table_of(name), params_of(name, 2)
    turned = dataclasses.replace(table, scales=dict(reversed(list(table.scales.items()))))
    found, again = unit_norm(table, params), unit_norm(turned, params)
    for n, t in found.scales.items():
        torch.testing.assert_close(again.scales[n], t, rtol=1e-12, atol=0)


def test_results_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    table, params = table_of("flattened"), params_of("flattened", 5)
    found = unit_norm(table, params)
    monkeypatch.setattr(scaling, "_SQUARES_AT_ONCE", 1)
    again = unit_norm(table, params)
    assert all(torch.equal(again.tensors[n], t) for n, t in found.tensors.items())


def test_bad_arguments_are_refused() -> None:
    table, params = table_of("mlp"), params_of("mlp", 2)
    with pytest.raises(UsageError) as caught:
        unit_norm(table, {n: t[0] for n, t in params.items()})
    assert str(caught.value) == (
        "tensors: expected (member, *shape); found no member axis. Stack them: tensor[None] of one."
    )
    with pytest.raises(LayoutError) as missing:
        unit_norm(table, {n: t for n, t in params.items() if n != "2.bias"})
    assert str(missing.value) == "tensor '2.bias': expected it, as Sequential has it; found none."
    empty = {n: t[:0] for n, t in params.items()}
    assert {n: t.shape for n, t in unit_norm(table, empty).tensors.items()} == {n: t.shape for n, t in empty.items()}
