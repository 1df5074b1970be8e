"""The symmetry table: against counts and memberships by hand."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest
import torch
from torch import nn

import checkpoints_zoo as zoo
from checkpoints_zoo import symmetry
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.symmetry import symmetries
from tests.support.symmetry_nets import table_of


def test_counts_of_the_published_nets() -> None:
    # log10 of (64! 128! 256! 512!)^2 for inner channels, and of a stream of each width more.
    table = symmetries("resnet18")
    assert table.log10_permutations(streams=False) == pytest.approx(3956.3, abs=0.05)
    assert table.log10_permutations() == pytest.approx(5934.5, abs=0.05)
    table = symmetries("resnet20-frn-silu")
    assert table.log10_permutations(streams=False) == pytest.approx(413.5, abs=0.05)
    assert table.log10_permutations() == pytest.approx(551.4, abs=0.05)
    assert symmetries("optunet").log10_permutations() == pytest.approx(math.log10(2 * math.factorial(5) ** 2), abs=1e-9)


# Groups, exact factors and approximate ones, counted by hand.
WREATH = 2 * 2**2 * 2**4 * 6**4 * 24**2  # of `grouped`: 2 blocks of 2 blocks; units inside of conv 1, 2 and 3
COUNTS = {
    "mlp": (math.factorial(7) * math.factorial(4), 7 + 1, 0),
    "functional": (math.factorial(6) * math.factorial(5) * 6, 6 + 5 + 3, 0),
    "flattened": (6 * 24, 3 + 12 + 4, 0),
    "shared": (math.factorial(6), 0, 0),
    "grouped": (WREATH * math.factorial(6) * math.factorial(6) // math.factorial(6) * 2**6, 8 + 12 + 16 + 6 + 24, 0),
    "grouped_input": (6**2 * 24, 6 + 4, 0),
    "residual": (math.factorial(6) * math.factorial(5) * 24, 6 + 6 + 5 + 5 + 6 + 4 + 6, 0),
    "group_normed": (6 * 24**3 * (2**6 * 2**3 * 6) * 24**3 * 24, 12 + 12 + 12 + 4, 3 + 6 + 1 + 4),
    "layer_normed": (math.factorial(6) * math.factorial(8), 6 + 6 + 6, 1),
    "gated": (math.factorial(6) * 2 * math.factorial(5) * 24, 6 + 6 + 5 + 5 + 8, 0),
    "residual_group_normed": (math.factorial(6) * math.factorial(5) * 24, 6 + 5 + 6 + 4 + 6, 1 + 1),
    "dense": (24 * 6 * 6, 4 + 3 + 3 + 4 + 7 + 10, 0),
    "mixer": (math.factorial(6) * math.factorial(5) * math.factorial(7), 5 + 6 + 7, 0),
    "upsampled": (24 * math.factorial(5), 4 + 5, 0),
    "owned": (2 * 2**2 * 6**2 * 2 * 2**2, 4 + 4 + 6 + 4, 2),
    "convnet": (math.factorial(8) * math.factorial(16) * math.factorial(32), 8 + 16 + 32, 0),
    "optunet-355": (2 * math.factorial(5) ** 2 * 6, 2 + 10 + 3, 0),
    "perceptron": (math.factorial(32) ** 2, 32 + 32, 0),
    "resnet20": (None, 0, 784),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_by_hand(name: str) -> None:
    permutations, exact, approximate = COUNTS[name]
    table = table_of(name)
    assert (table.scaling_freedom, table.approximate_scaling_freedom) == (exact, approximate)
    if permutations is not None:
        assert table.log10_permutations() == pytest.approx(math.log10(permutations), abs=1e-9)


def test_groups_of_resnet18_are_the_known_ones() -> None:
    table = symmetries("resnet18")
    rows = {name: {m.axis: m.group for m in axes.moves} for name, axes in table.tensors.items()}
    for stage, width in ((1, 64), (2, 128), (3, 256), (4, 512)):
        stream = rows[f"layer{stage}.0.conv2.weight"][0]
        assert table.groups[stream].stream
        assert table.groups[stream].size == width
        tied = [f"layer{stage}.{b}.{t}" for b in (0, 1) for t in ("conv2.weight", "bn2.weight", "bn2.running_var")]
        if stage == 1:
            tied += ["conv1.weight", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"]
        else:
            tied += [f"layer{stage}.0.downsample.0.weight", f"layer{stage}.0.downsample.1.bias"]
        assert {rows[name][0] for name in tied} == {stream}
        readers = [f"layer{stage}.1.conv1.weight"]
        readers += [f"layer{stage + 1}.0.conv1.weight", f"layer{stage + 1}.0.downsample.0.weight"] * (stage < 4)
        readers += ["fc.weight"] * (stage == 4)
        assert {rows[name][1] for name in readers} == {stream}
        for block in (0, 1):
            inner = f"layer{stage}.{block}.conv1"
            assert rows[f"{inner}.weight"][0] == rows[f"layer{stage}.{block}.conv2.weight"][1] == inner
            assert not table.groups[inner].stream
            assert table.groups[inner].writers == ((f"{inner}.weight", 0),)
    assert len(table.groups) == 12
    assert rows["fc.bias"] == {}
    assert set(rows["fc.weight"]) == {1}


def test_writers_come_in_topological_order() -> None:
    table = symmetries("resnet8")
    assert table.groups["conv1"].writers == (("conv1.weight", 0), ("layer1.0.conv2.weight", 0))
    assert table.scales["bn1"].writers == (("bn1.weight", 0), ("layer1.0.bn2.weight", 0))
    assert table.scales["conv1"].norms == ("bn1",)
    assert table.scales["conv1"].exact
    assert list(table.groups) == [
        "conv1", "layer1.0.conv1", "layer2.0.conv1", "layer2.0.conv2", "layer3.0.conv1", "layer3.0.conv2"
    ]  # fmt: skip


def test_a_collection_an_architecture_and_a_module_agree() -> None:
    for architecture, names in (("resnet8", ("resnet8", "resnet8-digits")), ("vit", ("vit", "vit-digits"))):
        by_module = symmetries(build_architecture(architecture), torch.zeros(1, 1, 8, 8))
        for name in names:
            table = zoo.symmetries(name)
            assert table.network == name
            assert dataclasses.replace(table, network=by_module.network) == by_module
    assert pickle.loads(pickle.dumps(by_module)) == by_module  # noqa: S301


def test_the_shipped_transformers_have_the_dimension_of_their_groups() -> None:
    """Counted by hand, and a random element and random shifts leave the logits of a member as they were."""
    table = zoo.symmetries("vit-digits")
    units, tokens, heads, hidden = 32, 17, 4, 64
    matrices = (units - 1) * (units - 2) // 2 + 2 * 2 * heads * (units // heads) ** 2
    constants = 2 * (units - 1) + 5 * units + 2 * 2 * units
    readers = 2 * (3 * units + hidden) + 10
    writers = 1 + tokens + (4 + 1) + 2 * (units + 1 + hidden + 1)
    assert table.dimension == matrices + 5 * units + constants + readers + writers == 2548
    member, generator = zoo.load("vit-digits")[0], torch.Generator().manual_seed(0)
    weights = {name: tensor.double() for name, tensor in member.state_dict().items()}
    moved = symmetry.apply(table, weights, symmetry.random_element(table, generator))
    moved = symmetry.shift(table, moved, symmetry.random_shifts(table, generator))
    module, images = member.model(dtype=torch.float64), torch.randn(8, 1, 8, 8, dtype=torch.float64)
    assert zoo.check_equivalence(weights, moved, module, images).largest < 1e-9


def test_the_module_stays_as_it_was() -> None:
    net = nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(3, 1)
    ).train()
    before = {n: t.clone() for n, t in net.state_dict().items()}
    tensors = list(net.parameters())
    symmetries(net, torch.randn(4, 2))
    with pytest.raises(UsageError):
        symmetries(net, torch.randn(4, 3))
    assert all(layer.training for layer in net.modules())
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert all(a is b for a, b in zip(tensors, net.parameters(), strict=True))


def test_print() -> None:
    assert str(table_of("optunet")) == (
        "Symmetries of OptuNet\n\n"
        "10^4.5 permutations in 2 groups; 10^4.5 without those of streams\n"
        "12 exact scale factors, 0 approximate ones\n\n"
        "group  units  kind                     written by\n"
        "conv1  2      free                     conv1.weight\n"
        "conv2  10     2 blocks moved by conv1  conv2.weight\n\n"
        "scale  values  kind   opened by\n"
        "conv1  2       exact  conv1.weight\n"
        "conv2  10      exact  conv2.weight\n\n"
        "tensor        shape           moved by  scaled by\n"
        "conv1.weight  2 × 1 × 4 × 4   conv1     conv1\n"
        "conv2.weight  10 × 1 × 5 × 5  conv2     conv2, conv1^-1\n"
        "fc.weight     10 × 10         ·, conv2  conv2^-1\n"
        "fc.bias       10"
    )


@pytest.mark.slow
def test_networks_are_traced_in_several_threads_while_others_run() -> None:
    """torch.fx changes all modules of the process while it traces: nothing may meet that, and nothing may stay."""
    from concurrent.futures import ThreadPoolExecutor

    wanted = str(symmetries("resnet8"))
    runs, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)), torch.ones(1, 3)
    own = runs(x)

    def work(i: int) -> bool:
        if i % 2:
            return all(torch.equal(runs(x), own) for _ in range(400))
        return str(symmetries("resnet8")) == wanted

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))
    assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"
