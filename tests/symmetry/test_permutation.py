"""Sorted units: against a plain oracle, the authors' own walk, and cases with known answers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.symmetry import Table, applying, permute, symmetries
from checkpoints_zoo.symmetry.canonical import permutation, refining, ties
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from checkpoints_zoo.symmetry.canonical.permutation import sort_units
from tests.support.canonical_cases import (
    NETS,
    identical,
    mlp,
    random_members,
    random_symmetry,
    small_resnet,
    sort_by_oracle,
    sorted_groups,
    table_of,
)

SMALL = [name for name in NETS if not name.startswith(("resnet", "convnet"))]
KEYS = ("first", "max", "norm")


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(identical(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_sorting_equals_an_oracle_that_sorts_tuples(name: str) -> None:
    """float16 and float32; keys without ties and keys that are nearly all tied."""
    table = table_of(name)
    slow = name in ("group_normed", "small_resnet", "grouped")  # for the oracle
    cases = [(key, tied) for key in KEYS for tied in (True, False)]
    for seed, (key, tied) in enumerate([cases[i] for i in (0, 3, 4)] if slow else cases):
        streams = seed % 2 == 0
        dtype = (torch.float16, torch.float32)[seed % 2]
        params = random_members(table, torch.Generator().manual_seed(seed), 1 if slow else 2, dtype, tied)
        found, permutations = sort_units(table, params, key, streams)
        assert set(permutations) == sorted_groups(table, streams)
        assert are_equal(permute(table, params, permutations), found)
        for i in range(1 if slow else 2):
            wanted, told_apart = sort_by_oracle(table, {n: t[i] for n, t in params.items()}, key, streams)
            assert not told_apart or are_equal({n: t[i] for n, t in found.items()}, wanted), (key, tied, i)


def resnet18_members(members: int) -> tuple[Table, dict[str, Tensor]]:
    nets = [small_resnet() for _ in range(members)]
    for net in nets:
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                for tensor in (layer.weight.data, layer.bias.data, layer.running_mean, layer.running_var):
                    assert tensor is not None
                    tensor.uniform_(0.5, 2)
    states = [net.state_dict() for net in nets]
    return symmetries(nets[0], torch.zeros(1, 2, 4, 4)), {n: torch.stack([s[n] for s in states]) for n in states[0]}


def test_the_default_equals_the_algorithm_of_the_authors() -> None:
    """Their code: rows of each block's first convolution by their first weight, falling; no stream moves."""
    torch.manual_seed(0)
    table, params = resnet18_members(5)
    found, _ = sort_units(table, params)
    for i in range(5):
        state = {name: tensor[i].clone() for name, tensor in params.items()}
        for block in ("3", "4", "5", "6"):
            order = state[f"{block}.conv1.weight"][:, 0, 0, 0].argsort(descending=True)
            for part in ("conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"):
                state[f"{block}.{part}"] = state[f"{block}.{part}"][order]
            state[f"{block}.conv2.weight"] = state[f"{block}.conv2.weight"][:, order]
        assert are_equal({name: tensor[i] for name, tensor in found.items()}, state)
    assert found["0.weight"] is params["0.weight"]


def test_keys_differ() -> None:
    table, params = mlp(2, 3, 1)
    rows = torch.tensor([[2.0, -9], [1, 6], [3, 4]])
    stacked = {n: t[None] for n, t in (params | {"0.weight": rows}).items()}
    for key, order in (("first", [2, 0, 1]), ("max", [1, 2, 0]), ("norm", [0, 1, 2])):
        assert sort_units(table, stacked, key)[1]["0"].tolist() == [order]


def test_equal_norms_are_tied_whatever_their_order() -> None:
    """Sums of the same squares in another order differ in the last bits; rows that are the same must not."""
    table, params = mlp(67, 40, 2)
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(67, generator=generator)
    params["0.weight"] = row.expand(40, 67).contiguous()
    params["2.weight"] = torch.randn(2, 40, generator=generator)
    wanted = params["2.weight"][0].sort(descending=True)[0]
    for _ in range(20):
        order = torch.randperm(40, generator=generator)
        moved = permute(table, {n: t[None] for n, t in params.items()}, {"0": order})
        assert torch.equal(sort_units(table, moved, "norm")[0]["2.weight"][0, 0], wanted)
    # Norms closer than float32 can tell: in the order of float64.
    params["0.weight"] = row.double() * (1 + 1e-12 * torch.randperm(40, generator=generator)[:, None])
    found = sort_units(table, {n: t.double()[None] for n, t in params.items()}, "norm")[0]["0.weight"][0]
    assert torch.equal(found.square().sum(1).argsort(descending=True, stable=True), torch.arange(40))


def test_norms_of_any_size() -> None:
    table, params = mlp(3, 4, 1)
    for dtype, sizes in ((torch.float32, [1e30, 3e-30, 1e-40, 0]), (torch.float64, [1e200, 1e-200, 1e-250, 0])):
        params["0.weight"] = (torch.tensor(sizes, dtype=torch.float64)[[2, 0, 3, 1], None] * torch.ones(3)).to(dtype)
        stacked = {n: t.to(dtype)[None] for n, t in params.items()}
        found = sort_units(table, stacked, "norm")[0]["0.weight"][0, :, 0]
        assert found.tolist() == torch.tensor(sizes, dtype=dtype).tolist()


def test_zeros_of_both_signs() -> None:
    table, params = mlp(2, 3, 1)
    params["0.weight"] = torch.tensor([[-0.0, 1], [0.0, 1], [-0.0, 2]])
    for key, wanted in (("first", [[0.0, 1], [-0.0, 2], [-0.0, 1]]), ("max", [[-0.0, 2], [0.0, 1], [-0.0, 1]])):
        for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):
            found = sort_units(
                table, {n: t[None] for n, t in (params | {"0.weight": params["0.weight"][order]}).items()}, key
            )
            assert identical(found[0]["0.weight"][0], torch.tensor(wanted))


def test_blocks_of_the_grouped_optunet() -> None:
    """Two channels swap with the two blocks of five that they feed; inside a block rows go by their own keys."""
    table = table_of("optunet")
    params = random_members(table, torch.Generator().manual_seed(0), 1, torch.float32, False)
    params["conv1.weight"][0, :, 0, 0, 0] = torch.tensor([1.0, 2])
    params["conv2.weight"][0, :, 0, 0, 0] = torch.tensor([1.0, 4, 2, 3, 5, 9, 8, 6, 7, 0])
    permutations = sort_units(table, params)[1]
    assert permutations["conv1"].tolist() == [[1, 0]]
    assert permutations["conv2"].tolist() == [[5, 6, 8, 7, 9, 4, 1, 3, 2, 0]]


def test_blocks_without_a_writer_are_sorted_by_their_units() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1, groups=2), nn.ReLU(), nn.Conv2d(2, 1, 1))
    table = symmetries(net, torch.zeros(1, 1, 2, 2))
    params = {n: torch.zeros(1, *t.shape) for n, t in net.state_dict().items()}
    params["0.weight"][0, :, 0, 0, 0] = torch.tensor([1.0, 4, 4, 3])
    permutations = sort_units(table, params)[1]
    assert {n: p.tolist()[0] for n, p in permutations.items()} == {"0 blocks": [1, 0], "0": [2, 3, 1, 0]}


CYCLES = {"pair": (2, 2), "one": (6,), "equal": (3, 3), "unequal": (2, 4)}


def units_with_cyclic_connections(*lengths: int) -> tuple[Table, dict[str, Tensor]]:
    """Two layers of units that differ in nothing but which feeds which: in cycles."""
    size, start = sum(lengths), 0
    table, params = mlp(2, size, size, 2)
    params["2.weight"] = torch.zeros(size, size)
    for length in lengths:
        for i in range(length):
            params["2.weight"][start + i, [start + i, start + (i + 1) % length]] = 1
        start += length
    return table, {name: tensor[None] for name, tensor in params.items()}


@pytest.mark.parametrize("lengths", CYCLES.values(), ids=CYCLES)
def test_units_that_differ_only_in_their_connections(lengths: tuple[int, ...]) -> None:
    table, params = units_with_cyclic_connections(*lengths)
    found = sort_units(table, params)[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        moved = permute(table, params, random_symmetry(table, generator, 1, True).permutations)
        assert are_equal(sort_units(table, moved)[0], found)


def test_a_search_that_is_cut_short_keeps_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    table, params = units_with_cyclic_connections(2, 3, 3)
    monkeypatch.setattr(refining, "MOST_ORDERS", 0)
    found, permutations = sort_units(table, params)
    assert are_equal(permute(table, params, permutations), found)


@pytest.mark.slow
def test_members_are_sorted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other members nor the size of chunks matter; some members need a search, most don't."""
    for name in ("mlp", "dense"):
        table = table_of(name)
        for key in KEYS:
            params = random_members(table, torch.Generator().manual_seed(3), 4, torch.float16, True)
            found = sort_units(table, params, key, True)[0]
            with monkeypatch.context() as patch:
                for room, chunk in (
                    (ties, "_CODES_AT_ONCE"),
                    (permutation, "_SQUARES_AT_ONCE"),
                    (permutation, "_GATHERED_AT_ONCE"),
                    (applying, "_INDICES_AT_ONCE"),
                ):
                    patch.setattr(room, chunk, 5)
                assert are_equal(sort_units(table, params, key, True)[0], found)
            for i in range(4):
                alone = sort_units(table, {n: t[i : i + 1] for n, t in params.items()}, key, True)[0]
                assert are_equal(alone, {n: t[i : i + 1] for n, t in found.items()})
    both = {n: torch.cat([t, torch.zeros_like(t), t]) for n, t in units_with_cyclic_connections(2, 4)[1].items()}
    together = sort_units(units_with_cyclic_connections(2, 4)[0], both)[0]
    assert are_equal({n: t[:1] for n, t in together.items()}, {n: t[2:] for n, t in together.items()})


def test_arguments_are_not_changed() -> None:
    table = table_of("small_resnet")
    params = random_members(table, torch.Generator().manual_seed(0), 2, torch.bfloat16, False)
    counter = next(name for name in params if name.endswith("num_batches_tracked"))
    params[counter] = torch.zeros(2, dtype=torch.int64)
    before = {n: t.clone() for n, t in params.items()}
    found = sort_units(table, params, streams=True)[0]
    assert are_equal(params, before)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in params.items()}
    assert found[counter] is params[counter]
    learned = {n: t.float().requires_grad_() for n, t in params.items() if t.is_floating_point()}
    assert all(t.requires_grad for t in sort_units(table, learned)[0].values())


def test_one_tensor_under_two_names() -> None:
    table = table_of("shared")
    params = random_members(table, torch.Generator().manual_seed(0), 2, torch.float32, False)
    params["two.weight"] = params["one.weight"]
    found = sort_units(table, params, streams=True)[0]
    assert identical(found["one.weight"], found["two.weight"])


def test_no_members_and_nothing_to_sort() -> None:
    table = table_of("mlp")
    none = {n: torch.zeros(0, *axes.shape) for n, axes in table.tensors.items()}
    found, permutations = sort_units(table, none)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in none.items()}
    assert {n: tuple(p.shape) for n, p in permutations.items()} == {"0": (0, 7), "4": (0, 4)}
    still, params = mlp(2, 1)
    stacked = {n: t[None] for n, t in params.items()}
    assert sort_units(still, stacked) == (stacked, {})


def test_bad_arguments_are_refused() -> None:
    table = table_of("mlp")
    params = random_members(table, torch.Generator().manual_seed(0), 2, torch.float32, False)
    with pytest.raises(UsageError) as caught:
        sort_units(table, params, "mean")
    assert str(caught.value) == "key: expected 'first' or 'max' or 'norm'; found 'mean'."
    with pytest.raises(UsageError) as caught:
        sort_units(table, {n: t[0] for n, t in params.items()})
    assert str(caught.value) == (
        "tensors: expected (member, *shape); found no member axis. Stack them: tensor[None] of one."
    )
    with pytest.raises(LayoutError) as missing:
        sort_units(table, {n: t for n, t in params.items() if n != "0.bias"})
    assert str(missing.value) == "tensor '0.bias': expected it, as Sequential has it; found none."
    for word, text in (
        ({"permute": "mean"}, "permute: expected 'first', 'max', 'norm', or None; found 'mean'."),
        ({"scale": "unit-var"}, "scale: expected 'unit-norm', or None; found 'unit-var'."),
    ):
        with pytest.raises(UsageError) as caught:
            canonicalize(table, params, **word)  # type: ignore[arg-type]
        assert str(caught.value) == text
    with pytest.raises(UsageError) as caught:
        canonicalize(table, params, scale="unit-norm", permute="norm")
    assert str(caught.value) == (
        "permute: expected 'first' or 'max': the rows of 0.weight all have norm 1 once they are scaled; found 'norm'."
    )
    frn = table_of("resnet20")  # nothing there scales exactly, and only signs change
    stacked = random_members(frn, torch.Generator().manual_seed(0), 1, torch.float32, False)
    forms = canonicalize(frn, stacked, scale="unit-norm", permute="norm")[0], sort_units(frn, stacked, "norm")[0]
    assert are_equal(*({n: t.abs() for n, t in form.items()} for form in forms))
