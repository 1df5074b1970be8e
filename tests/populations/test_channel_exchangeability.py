"""The test that channels are alike: p uniform where they are, against scipy and counts by hand, and its power."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.populations import channel_exchangeability
from checkpoints_zoo.populations.channel_exchangeability import adjust_p_values_by_holm, check_layers, largest_weights
from checkpoints_zoo.symmetry import Table, permute, random_element, symmetries
from tests.support.scenarios import build
from tests.support.symmetry_nets import NETS, table_of


@pytest.fixture(scope="module")
def table() -> Table:
    """Layers of 4, 9 and 60 units."""
    net = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 60), nn.ReLU(), nn.Linear(60, 2)
    )
    return symmetries(net, torch.zeros(1, 3))


def population(table: Table, members: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Parameters of members whose units are alike: all entries independent."""
    rng = np.random.default_rng([members, seed])
    return {n: torch.from_numpy(rng.normal(size=(members, *a.shape))).to(dtype) for n, a in table.tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("members", "dtype"), [(24, torch.float32), (3, torch.float32), (24, torch.float16)])
def test_p_is_uniform_where_units_are_alike(table: Table, members: int, dtype: torch.dtype) -> None:
    """For few members and many units too, where the statistic takes only a handful of values."""
    found = [
        check_layers(table, population(table, members, seed, dtype), seed=seed, simulations=99) for seed in range(400)
    ]
    for i in range(3):
        values = [one.layers[i].p for one in found]
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
    # The smallest adjusted one errs on the safe side.
    assert np.mean([one.p <= 0.05 for one in found]) <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


@pytest.mark.slow
def test_ties_of_coarse_weights_do_not_favour_a_unit(table: Table) -> None:
    params = {n: t.round() for n, t in population(table, 3000, 0).items()}
    top = largest_weights(table, params)["4"]
    assert ((top == top.amax(1, keepdim=True)).sum(1) > 1).double().mean() > 0.5
    assert check_layers(table, params).p > 0.001


@pytest.mark.slow
def test_the_statistic_is_pearsons_and_p_is_near_chi_squareds_for_many_members(table: Table) -> None:
    params = population(table, 4000, 1)
    params["0.weight"][:300, 2] += 3  # a little too often the third
    found = check_layers(table, params, simulations=5000)
    for layer, name in zip(found.layers, ("0", "2", "4"), strict=True):
        tops = params[f"{name}.weight"].numpy().max(2).argmax(1)
        counts = np.bincount(tops, minlength=len(layer.counts))
        assert layer.units[:, 0].tolist() == tops.tolist()
        assert layer.counts.tolist() == counts.tolist()
        pearson = scipy.stats.chisquare(counts)
        assert layer.chi_squared == pytest.approx(pearson.statistic, rel=1e-9)
        assert layer.freedom == len(counts) - 1
        assert layer.p == pytest.approx(pearson.pvalue, abs=4 * (0.25 / 5000) ** 0.5 + 0.01)
    assert found.layers[0].p < 0.01


def test_p_is_exact_for_few_members() -> None:
    """Three members and three units: all 27 outcomes are counted, and the share of each statistic is known."""
    draws = [np.bincount(draw, minlength=3) for draw in itertools.product(range(3), repeat=3)]
    values = [int((counts**2).sum()) for counts in draws]
    shares = {value: Fraction(values.count(value), 27) for value in set(values)}
    assert shares == {3: Fraction(6, 27), 5: Fraction(18, 27), 9: Fraction(3, 27)}
    net = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1))
    table = symmetries(net, torch.zeros(1, 1))
    for tops, value in (((0, 1, 2), 3), ((2, 0, 2), 5), ((1, 1, 1), 9)):
        params = {"0.weight": torch.eye(3)[list(tops)][:, :, None]}
        above = float(sum(share for other, share in shares.items() if other > value))
        found = [check_layers(table, params, seed=seed, simulations=2000).layers[0].p for seed in range(40)]
        # Uniform between the chance of more and the chance of as much or more.
        width = float(shares[value])
        scaled = (np.array(found) - above) / width
        assert scaled.min() > -0.05 / width
        assert scaled.max() < 1 + 0.05 / width
        assert scipy.stats.kstest(scaled, "uniform").pvalue > 1e-3


def test_what_is_sorted_fails() -> None:
    members = zoo.load("convnet-digits")
    table, params = members.symmetry_table, members.stack()
    assert zoo.corollary(members).p > 0.05
    keys: list[tuple[Callable[[Tensor], Tensor], float]] = [
        (lambda w: w.flatten(2).amax(2), 3 / 10_001),  # always the first unit: no simulation is as extreme
        (lambda w: w.flatten(2)[:, :, 0], 0.01),
        (lambda w: w.flatten(2).norm(dim=2), 0.01),
    ]
    for key, bound in keys:
        orders = {n: key(params[g.writers[0][0]]).argsort(1, descending=True) for n, g in table.groups.items()}
        assert check_layers(table, permute(table, params, orders)).p <= bound


def test_a_permutation_drawn_for_each_member_makes_units_alike() -> None:
    members = zoo.load("convnet-digits")
    table, one = members.symmetry_table, members[:1].stack()
    same = {n: t.expand(64, *t.shape[1:]).clone() for n, t in one.items()}  # one network, 64 times
    assert check_layers(table, same).p < 1e-3
    drawn = random_element(table, torch.Generator().manual_seed(0), members=64)
    assert check_layers(table, permute(table, same, drawn.permutations)).p > 0.01


@pytest.mark.parametrize("name", NETS)
def test_every_units_largest_weight_by_hand(name: str) -> None:
    table = table_of(name)
    params = population(table, 3, 5)
    found = largest_weights(table, params)
    assert list(found) == [n for n, group in table.groups.items() if group.writers]
    for n, values in found.items():
        tensor, axis = table.groups[n].writers[0]
        own = np.moveaxis(params[tensor].numpy(), axis + 1, 1)
        for member, unit in itertools.product(range(3), range(table.groups[n].size)):
            rows = [
                move.offset + unit * move.span + e
                for move in table.tensors[tensor].moves
                if (move.group, move.axis) == (n, axis)
                for e in range(move.span)
            ]
            assert float(values[member, unit]) == own[member, rows].max()
    drawn = random_element(table, torch.Generator().manual_seed(0), members=3).permutations
    moved = largest_weights(table, permute(table, params, drawn))
    assert all(torch.equal(moved[n], values.gather(1, drawn[n])) for n, values in found.items())


def test_blocks_that_stay_are_tested_each_for_itself() -> None:
    table = table_of("grouped_input")  # a kernel of two groups on the input: three units each that never change sides
    params = population(table, 40, 0)
    params["0.weight"][:, 3:] += 10  # the second block's weights are larger: of no concern
    found = check_layers(table, params)
    layer = found.layers[0]
    assert (layer.units.shape, layer.freedom, int(layer.counts.sum())) == ((40, 2), 4, 80)
    assert bool((layer.units // 3 == torch.tensor([0, 1])).all())
    own = [np.bincount(layer.units[:, i] - 3 * i, minlength=3) for i in range(2)]
    assert layer.chi_squared == pytest.approx(sum(scipy.stats.chisquare(c).statistic for c in own), rel=1e-9)
    assert layer.p > 0.001
    params["0.weight"][:, 4] += 10
    assert check_layers(table, params).layers[0].p < 1e-3
    moving = check_layers(table_of("grouped"), population(table_of("grouped"), 40, 0))
    assert [layer.units.shape[1] for layer in moving.layers] == [1] * len(moving.layers)


def test_holm_by_hand() -> None:
    assert adjust_p_values_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_p_values_by_holm([0.9, 0.8]) == [1.0, 1.0]
    assert adjust_p_values_by_holm([]) == []


def test_equal_seeds_give_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    members = zoo.load("resnet8-digits", n=8)
    one, other = (zoo.corollary(members, seed=3, simulations=500) for _ in range(2))
    assert str(one) == str(other)
    assert (one.ids, one.seed, one.simulations, len(one)) == (tuple(members.ids), 3, 500, 6)
    assert [layer.p for layer in one.layers] != [layer.p for layer in zoo.corollary(members, simulations=500).layers]
    monkeypatch.setattr(channel_exchangeability, "_BYTES_AT_ONCE", 1)  # members read one by one
    assert str(zoo.corollary(members, seed=3, simulations=500)) == str(one)
    params = {n: t for n, t in members.stack().items() if n.endswith("weight")}
    alone = check_layers(members.symmetry_table, params, seed=3, simulations=500)
    assert [layer.p for layer in alone.layers] == [layer.p for layer in one.layers]


def test_the_result_as_text() -> None:
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    params = {"0.weight": torch.tensor([1.0, 2.0]).reshape(1, 2, 1).expand(20, 2, 1)}
    found = check_layers(symmetries(net, torch.zeros(1, 1)), params, simulations=50)
    p = f"{found.p:.2g}"
    assert found.p < 1 / 51
    assert str(found) == (
        f"Which unit holds a layer's largest weight, over 20 members: p = {p} for all layers\n\n"
        f"layer  units  most often        chi²  freedom  {'p'.ljust(len(p))}  p (Holm)\n"
        f"0      2      unit 1: 20 of 20  20    1        {p}  {p}"
    )


def test_what_is_refused(table: Table, tmp_path: Path) -> None:
    params = population(table, 4, 0)
    with pytest.raises(UsageError, match=r"^tensors: expected \(member, \*shape\); found no member axis\. Stack"):
        check_layers(table, {n: t[0] for n, t in params.items()})
    with pytest.raises(UsageError, match=r"^members: expected 2 or more; found 1\.$"):
        check_layers(table, {n: t[:1] for n, t in params.items()})
    with pytest.raises(UsageError, match=r"^simulations: expected 1 or more; found 0\.$"):
        check_layers(table, params, simulations=0)
    with pytest.raises(LayoutError, match=r"^tensor '2\.weight': expected it, as Sequential has it; found none\.$"):
        check_layers(table, {"0.weight": params["0.weight"]})
    with pytest.raises(DamagedError, match=r"^tensor '2\.weight': expected finite weights; found others\.$"):
        check_layers(table, params | {"2.weight": torch.full((4, 9, 4), torch.nan)})
    built = build(tmp_path, members=range(3), snapshots=[10])
    members = zoo.load(built.name, source=built.root, snapshots=True)
    with pytest.raises(
        UsageError, match=r"^members of tiny: expected one snapshot of each; found several\. Leave snap"
    ):
        zoo.corollary(members)
    assert len(zoo.corollary(zoo.load(built.name, source=built.root))) == 3
