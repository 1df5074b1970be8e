"""Minimal mass: units that have no best scale, scales that stay, ids, refusals and pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.populations import mass
from checkpoints_zoo.populations.mass import mass_figure
from checkpoints_zoo.symmetry import symmetries
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass, minimal_mass
from tests.support import scenarios
from tests.support.mass_oracles import mass_of, member_of, minimum_by_scipy, random_members


@pytest.fixture(scope="module")
def found() -> MinimalMass:
    return zoo.minimal_mass(zoo.load("convnet-digits"))


def test_dead_units_are_named_and_keep_their_scale() -> None:
    table, params, *_ = random_members("mlp", 3, spread=0.3)
    params["0.weight"][1, 2] = 0  # nothing comes in
    params["2.weight"][1, :, 4] = 0  # nothing goes out
    params["0.weight"][2, 6] = 0  # neither
    params["2.weight"][2, :, 6] = 0
    result = minimal_mass(table, params)
    assert result.dead == ({}, {"0": (2, 4)}, {"0": (6,)})
    assert result.degenerate == {}
    assert result.scales["0"][1, [2, 4]].tolist() == [1, 1]
    assert result.scales["0"][2, 6] == 1
    left_out = params["2.weight"][1, 0, 2].square() + params["0.weight"][1, 4].square().sum()
    torch.testing.assert_close(
        result.unbounded, torch.stack([0 * left_out, left_out, 0 * left_out]), rtol=1e-12, atol=0
    )
    # What is left is the net without these units.
    for i in range(3):
        assert float(result.after[i]) == pytest.approx(minimum_by_scipy(table, member_of(params, i)), rel=1e-5)


def test_units_that_only_dead_ones_balance_are_dead_as_well() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    params = {n: t[None].clone() for n, t in net.state_dict().items()}
    params["2.weight"][0, 0] = 0
    params["2.weight"][0, 1] = 0
    params["4.weight"][0, :, 2] = 0
    result = minimal_mass(symmetries(net, torch.zeros(1, 2, dtype=torch.float64)), params)
    assert result.dead == ({"0": (0, 1, 2), "2": (0, 1, 2)},)
    assert (float(result.before), float(result.after), float(result.excess)) == (0, 0, 0)
    assert all((values == 1).all() for values in result.scales.values())


def test_small_weights_are_not_dead() -> None:
    table, params, *_ = random_members("mlp", 1)
    params["0.weight"][0, 3] *= 1e-60
    result = minimal_mass(table, params)
    assert result.dead == ({},)
    assert result.converged.all()
    assert float(result.residual) < 1e-3
    assert float(result.scales["0"][0, 3]) > 1e29


def test_rows_before_a_batch_norm_are_degenerate() -> None:
    table, params, *_ = random_members("two_readers", 2, spread=0.5)
    result = minimal_mass(table, params)
    # The kernel that these rows read stays, since another one reads it too; so do the gains behind the norm.
    assert result.degenerate == {"two": (0, 1, 2, 3)}
    assert (result.scales["two"] == 1).all()
    rows, columns = params["one.weight"].square().sum(2), params["last.weight"].square().sum(1)
    gains, ends = params["norm.weight"].square(), params["end.weight"].square().sum(1)
    expected = 2 * (rows * columns).sqrt().sum(1) + 2 * (gains * ends).sqrt().sum(1)
    torch.testing.assert_close(result.after, expected, rtol=1e-12, atol=0)
    # A gain of zero is a dead unit of its member: the column that reads it can shrink.
    assert result.dead == tuple({"norm": tuple((g == 0).nonzero()[:, 0].tolist())} for g in gains)
    left_out = params["two.weight"].square().sum((1, 2)) + (ends * (gains == 0)).sum(1)
    torch.testing.assert_close(result.unbounded, left_out, rtol=1e-12, atol=0)


def test_of_a_network_of_batch_norms_only_the_last_gains_have_a_best_scale() -> None:
    members = zoo.load("resnet8-digits", n=3)
    result = zoo.minimal_mass(members)
    weights = members.stack()
    gains = weights["layer3.0.bn2.weight"].double().square() + weights["layer3.0.downsample.1.weight"].double().square()
    expected = 2 * (gains * weights["fc.weight"].double().square().sum(1)).sqrt().sum(1)
    torch.testing.assert_close(result.after, expected, rtol=1e-12, atol=0)
    assert sum(map(len, result.degenerate.values())) == 280 - 32
    assert "layer3.0.bn2" not in result.degenerate
    assert (result.excess > 0.1).all()
    assert "248 in every member" in str(result)


def test_scales_can_be_held() -> None:
    table, params, *_ = random_members("two_readers", 2, spread=0.5)
    result = minimal_mass(table, params, hold=["two"])
    assert result.held == ("two",)
    assert "two" not in result.scales
    assert result.degenerate == {}
    torch.testing.assert_close(result.before + result.unbounded, mass_of(table, params), rtol=1e-12, atol=0)
    assert (result.after > minimal_mass(table, params).after).all()
    everything = minimal_mass(table, params, hold=list(table.scales))
    torch.testing.assert_close(everything.after, everything.before, rtol=0, atol=0)
    assert everything.scales == {}


def test_approximate_scales_change_only_if_asked_for() -> None:
    table, params, *_ = random_members("group_normed", 2)
    result = minimal_mass(table, params)
    assert "0" in result.held
    assert result.degenerate == {}
    asked = minimal_mass(table, params, approximate=True)
    assert asked.held == ()
    assert len(asked.degenerate["0"]) == 3  # one scale a block of channels
    assert (asked.after < result.after).all()


def test_a_tensor_of_two_names_counts_once() -> None:
    table, params, *_ = random_members("shared", 1)
    twice = minimal_mass(table, params)
    once = minimal_mass(table, params, same=["two.weight"])
    torch.testing.assert_close(twice.before - once.before, params["two.weight"].square().sum((1, 2)), rtol=1e-9, atol=0)


def test_snapshots_and_selections_keep_their_ids(tmp_path: Any) -> None:
    built = scenarios.build(tmp_path, "convnet", (4, 9), snapshots=(1, 20))
    members = zoo.load("tiny", source=built.root, snapshots=True)
    result = zoo.minimal_mass(members)
    assert result.ids == tuple(members.ids) == (4, 4, 4, 9, 9, 9)
    alone = zoo.minimal_mass(zoo.load("tiny", source=built.root)[1:])
    torch.testing.assert_close(alone.after[0], result.after[5], rtol=1e-12, atol=0)


def test_no_members_give_no_masses() -> None:
    table, params, *_ = random_members("mlp", 1)
    result = minimal_mass(table, {n: t[:0] for n, t in params.items()})
    assert len(result) == 0
    assert result.after.shape == (0,)
    assert str(result).startswith("Mass of 0 members: none")


@pytest.mark.slow
def test_the_picture_shows_masses_and_their_excess(found: MinimalMass, tmp_path: Path) -> None:
    path = mass_figure(found, tmp_path / "new" / "mass.png", collection_name="convnet-digits")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (
        mass_figure(found, tmp_path / "again.png", collection_name="convnet-digits").read_bytes() == path.read_bytes()
    )
    mass_axes, excess_axes = mass.draw_mass(found, "convnet-digits", None).axes
    points = mass_axes.lines[1].get_xydata()
    np.testing.assert_array_equal(points, np.stack([found.before, found.after], 1))
    heights = [bar.get_height() for bar in excess_axes.patches]
    assert sum(heights) == 64


def test_the_picture_along_training_shows_the_last_snapshots(found: MinimalMass) -> None:
    snapshots = dataclasses.replace(found, ids=tuple(i // 2 for i in range(64)))
    mass_axes, _, training = mass.draw_mass(snapshots, "", [10 * (i % 2) for i in range(64)]).axes
    np.testing.assert_array_equal(mass_axes.lines[1].get_xdata(), found.before[1::2])
    (mean,) = [line for line in training.lines if line.get_label() == "its minimum"]
    np.testing.assert_allclose(mean.get_ydata(), [found.after[::2].mean(), found.after[1::2].mean()], rtol=1e-12)


def test_a_picture_that_can_not_be_drawn_is_refused(found: MinimalMass, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a name that ends in \.png or \.pdf or \.svg; found 'mass\.jpg'"):
        mass_figure(found, tmp_path / "mass.jpg")
    with pytest.raises(UsageError, match="an epoch of each or none; found 64 members and 2 epochs"):
        mass_figure(found, tmp_path / "mass.png", epochs=[1, 2])
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="expected a place that can be written to"):
        mass_figure(found, tmp_path / "file" / "mass.png")


def refused(kind: type[Exception], **changed: Any) -> str:
    table, params, *_ = random_members("mlp", 2)
    options = {"params": params, **changed}
    with pytest.raises(kind) as caught:
        minimal_mass(table, **options)
    return str(caught.value)


def test_what_it_can_not_take_is_named() -> None:
    _, params, *_ = random_members("mlp", 2)
    assert refused(LayoutError, params={n: t for n, t in params.items() if n != "2.weight"}) == (
        "tensor '2.weight': expected it, as Sequential has it; found none."
    )
    assert refused(UsageError, params={n: t[0] for n, t in params.items()}) == (
        "tensors: expected (member, *shape); found no member axis. Stack them: tensor[None] of one."
    )
    assert refused(UsageError, hold=["1"]) == "scale '1': expected one among 0, 2; found another."
    assert refused(UsageError, tolerance=0.0) == (
        "tolerance: expected a share of the mass above 0 and below 1; found 0.0."
    )
    broken = {n: t.clone() for n, t in params.items()}
    broken["4.weight"][1, 0, 0] = torch.nan
    assert refused(DamagedError, params=broken) == (
        "tensor '4.weight': expected finite weights; found others in the member at position 1."
    )
