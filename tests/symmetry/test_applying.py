"""Permutations and scales on stacked parameters, against loops over members and entries; and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry import Element, Table, apply, applying, inverse, permute, random_element, rescale
from tests.support.symmetry_nets import NETS, table_of

MEMBERS = 5


def stacked(table: Table, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tensors of all names, with a member axis."""
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(MEMBERS, *a.shape, generator=generator).to(dtype) for n, a in table.tensors.items()}


def by_hand(table: Table, name: str, tensor: Tensor, permutations: Mapping[str, Tensor]) -> Tensor:
    """Permute one member's tensor entry by entry."""
    result = tensor.clone()
    for move in table.tensors[name].moves:
        p, before = permutations[move.group].tolist(), result.clone()
        if move.within:
            rows, columns = tensor.shape[:2]
            for row in range(rows):
                block = row // (rows // move.within)
                for column in range(columns):
                    result[row, column] = before[row, p[block * columns + column] % columns]
            continue
        for unit, old in enumerate(p):
            for e in range(move.span):
                new, was = (move.offset + u * move.span + e for u in (unit, old))
                result.select(move.axis, new).copy_(before.select(move.axis, was))
    return result


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_stacked_members_are_permuted_like_single_ones(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(name)
    params = stacked(table, dtype)
    drawn = random_element(table, torch.Generator().manual_seed(1), members=MEMBERS)
    moved = permute(table, params, drawn.permutations)
    for i in range(MEMBERS):
        own = {n: p[i] for n, p in drawn.permutations.items()}
        alone = permute(table, {n: t[i] for n, t in params.items()}, own)
        for n, t in params.items():
            assert moved[n].dtype == alone[n].dtype == dtype
            assert torch.equal(moved[n][i], alone[n])
            assert torch.equal(alone[n], by_hand(table, n, t[i], own))
        together = permute(table, params, own)  # one permutation for all members
        assert all(torch.equal(together[n][i], t) for n, t in alone.items())
    monkeypatch.setattr(applying, "_INDICES_AT_ONCE", 1)
    assert all(torch.equal(t, moved[n]) for n, t in permute(table, params, drawn.permutations).items())
    tracked = permute(table, {n: t.requires_grad_() for n, t in params.items()}, drawn.permutations)
    assert all(torch.equal(t, moved[n]) for n, t in tracked.items())


@pytest.mark.parametrize("name", NETS)
def test_stacked_members_are_scaled_like_single_ones(name: str) -> None:
    table = table_of(name)
    params = stacked(table, torch.float64)
    drawn = random_element(table, torch.Generator().manual_seed(1), members=MEMBERS, approximate=True)
    scaled = rescale(table, params, drawn.scales)
    for i in range(MEMBERS):
        own = {n: s[i] for n, s in drawn.scales.items()}
        alone = rescale(table, {n: t[i] for n, t in params.items()}, own)
        assert all(torch.equal(scaled[n][i], t) for n, t in alone.items())
        for n, axes in table.tensors.items():
            wanted = params[n][i] + axes.shift
            for power in axes.powers:
                values = own[power.scale].tolist()
                for e in range(power.length):
                    factor = values[e * len(values) // power.length] ** power.power
                    if not power.within:
                        wanted.select(power.axis, power.offset + e).mul_(factor)
                        continue
                    rows, columns = axes.shape[0] // power.within, axes.shape[1]
                    block = e // columns
                    wanted[block * rows : (block + 1) * rows, e % columns] *= factor
            torch.testing.assert_close(alone[n], wanted - axes.shift, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_stay(dtype: torch.dtype) -> None:
    table = table_of("residual")
    params = stacked(table, dtype) | {"norm1.num_batches_tracked": torch.zeros(MEMBERS, dtype=torch.int64)}
    before = {n: t.clone() for n, t in params.items()}
    element = random_element(table, torch.Generator().manual_seed(1), members=MEMBERS)
    moved = apply(table, params, element)
    back = apply(table, moved, inverse(table, element))
    assert {n: t.dtype for n, t in moved.items()} == {n: t.dtype for n, t in params.items()}
    assert all(torch.equal(t, before[n]) for n, t in params.items())
    bound = 8 * torch.finfo(dtype).eps
    for n, t in params.items():
        torch.testing.assert_close(back[n], t, rtol=bound, atol=bound)


def test_names_may_be_missing() -> None:
    table = table_of("residual")
    weight = torch.randn(5, 6, 3, 3)
    element = random_element(table, torch.Generator().manual_seed(0))
    moved = permute(table, {"conv1.weight": weight}, {"conv1": element.permutations["conv1"]})
    assert torch.equal(moved["conv1.weight"], weight[element.permutations["conv1"]])
    assert permute(table, {}, element.permutations) == {}
    same = rescale(table, {"conv1.weight": weight}, {})["conv1.weight"]
    assert same is weight


ORDER = torch.arange(6)
BAD_TENSORS = [
    ({"conv9.weight": torch.zeros(2)}, "tensor 'conv9.weight': expected a tensor of Shaped; found another."),
    (
        {"norm1.weight": torch.zeros(7)},
        "tensor 'norm1.weight': expected (6,), or (member, *(6,)); found (7,).",
    ),
    (
        {"norm1.weight": torch.zeros(6), "norm1.bias": torch.zeros(2, 6)},
        "tensors: expected one number of members; found 'norm1.weight' of one member and 'norm1.bias' of 2 stacked.",
    ),
]


@pytest.mark.parametrize(("params", "text"), BAD_TENSORS)
def test_bad_tensors(params: dict[str, Tensor], text: str) -> None:
    for function in (permute, rescale):
        with pytest.raises(LayoutError) as caught:
            function(table_of("residual"), params, {})
        assert str(caught.value) == text


BAD_PERMUTATIONS = [
    ({"conv9": ORDER}, "permutation 'conv9': expected a group among stem, conv1, conv3; found 'conv9'."),
    (
        {"stem": torch.zeros(6, dtype=torch.int64)},
        "permutation 'stem': expected each of 0-5 once, int64, or a row of them a member; "
        "found int64 (6,): [0, 0, 0, 0, 0, 0].",
    ),
    (
        {"stem": ORDER.int()},
        "permutation 'stem': expected each of 0-5 once, int64, or a row of them a member; "
        "found int32 (6,): [0, 1, 2, 3, 4, 5].",
    ),
    ({"stem": ORDER.expand(3, 6)}, "values of 'stem': expected as many rows as members; found 3 for 2."),
]


@pytest.mark.parametrize(("permutations", "text"), BAD_PERMUTATIONS)
def test_bad_permutations(permutations: dict[str, Tensor], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        permute(table_of("residual"), {"norm1.weight": torch.zeros(2, 6)}, permutations)
    assert str(caught.value) == text


def test_blocks_stay_together() -> None:
    table, params = table_of("owned"), {"conv2.bias": torch.zeros(6)}
    swapped = torch.tensor([1, 0])
    with pytest.raises(UsageError) as caught:
        permute(table, params, {"conv2": torch.tensor([0, 1, 3, 2, 4, 5])})
    assert str(caught.value) == (
        "permutation 'conv2': expected 2 blocks that stay together, in the order that 'conv1 blocks' gives; "
        "found int64 (6,): [0, 1, 3, 2, 4, 5]."
    )
    with pytest.raises(UsageError, match="permutation 'conv1'"):  # it stays, while its blocks are swapped
        permute(table, params, {"conv1 blocks": swapped, "conv2": torch.tensor([3, 4, 5, 0, 1, 2])})
    with pytest.raises(UsageError) as caught:
        permute(table_of("grouped_input"), {}, {"0": torch.tensor([3, 4, 5, 0, 1, 2])})
    assert str(caught.value).startswith("permutation '0': expected 2 blocks that stay together, in place; found ")


BAD_SCALES = [
    (
        {"conv9": ORDER},
        "scale 'conv9': expected one among stem, norm1, conv1, norm2, norm3, conv3, norm4; found 'conv9'.",
    ),
    (
        {"conv1": torch.tensor([1.0, 2, 0, 1, 1])},
        "scale 'conv1': expected 5 positive values, or (member, 5); found float32 (5,): [1.0, 2.0, 0.0, 1.0, 1.0].",
    ),
    (
        {"conv1": torch.ones(4)},
        "scale 'conv1': expected 5 positive values, or (member, 5); found float32 (4,): [1.0, 1.0, 1.0, 1.0].",
    ),
    ({"conv1": torch.ones(3, 5)}, "values of 'conv1': expected as many rows as members; found 3 for 2."),
]  # fmt: skip


@pytest.mark.parametrize(("scales", "text"), BAD_SCALES)
def test_bad_scales(scales: dict[str, Tensor], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        rescale(table_of("residual"), {"norm1.weight": torch.zeros(2, 6)}, scales)
    assert str(caught.value) == text


def test_an_empty_element_changes_nothing() -> None:
    params = stacked(table_of("gated"), torch.float32)
    assert all(apply(table_of("gated"), params, Element())[n] is t for n, t in params.items())
