"""Symmetries of networks with attention: what is derived leaves the function as it is, and nothing larger does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from checkpoints_zoo.errors import SymmetryError, UsageError
from checkpoints_zoo.symmetry import (
    Element,
    Table,
    apply,
    compose,
    files,
    inverse,
    random_element,
    random_shifts,
    shift,
    symmetries,
    turn,
)
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from tests.support.attention_nets import HEADS, INDICES, TOKENS, WIDTH, WORDS, Attention, Decoder, LearnedScale, drawn

pytestmark = pytest.mark.slow


def change(network: nn.Module, before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Return the largest change of an output, relative to the largest output."""
    network = network.double().eval()
    with torch.no_grad():
        outputs = [functional_call(network, weights, (INDICES,)) for weights in (before, after)]
    return float((outputs[1] - outputs[0]).abs().max() / outputs[0].abs().max())


@pytest.fixture(scope="module")
def decoder() -> Table:
    return symmetries(Decoder(), INDICES)


def test_the_table_names_the_groups(decoder: Table) -> None:
    assert {(m.kind, m.count, m.size) for m in decoder.matrices.values()} == {
        ("invertible", HEADS, WIDTH // HEADS), ("centred orthogonal", 1, WIDTH)
    }  # fmt: skip
    assert [group.size for group in decoder.groups.values()] == [HEADS, 6]
    # By hand: QK and VO of two heads, rotations that keep the ones; the gains of three norms.
    assert sum(m.dimension for m in decoder.matrices.values()) == 2 * 2 * 16 + 7 * 6 // 2
    assert decoder.scaling_freedom == 3 * WIDTH
    # Free key biases, value biases, offsets of norms, one of words and positions less its mean; readers; writers.
    constants, readers = 2 * WIDTH + 3 * WIDTH + (WIDTH - 1), 3 * WIDTH + 6
    writers = WORDS + TOKENS + (WIDTH + 1) + (6 + 1)
    assert sum(s.dimension for s in decoder.shifts.values()) == constants + readers + writers
    text = str(decoder)
    assert f"{decoder.dimension} continuous dimensions" in text
    assert "attention.q" in text


def test_random_elements_keep_the_function(decoder: Table) -> None:
    network, generator = Decoder(), torch.Generator().manual_seed(5)
    weights = drawn(network)
    for _ in range(3):
        element = random_element(decoder, generator)
        moved = apply(decoder, weights, element)
        assert all(not torch.equal(moved[name], weights[name]) for name in weights if name != "head.bias")
        assert change(network, weights, moved) < 1e-12
        assert change(network, weights, shift(decoder, moved, random_shifts(decoder, generator))) < 1e-11


def test_elements_compose_and_invert(decoder: Table) -> None:
    generator = torch.Generator().manual_seed(6)
    weights = drawn(Decoder())
    first, second = (random_element(decoder, generator) for _ in range(2))
    one_by_one = apply(decoder, apply(decoder, weights, first), second)
    at_once = apply(decoder, weights, compose(decoder, first, second))
    back = apply(decoder, apply(decoder, weights, first), inverse(decoder, first))
    for name in weights:
        torch.testing.assert_close(at_once[name], one_by_one[name], rtol=0, atol=1e-11)
        torch.testing.assert_close(back[name], weights[name], rtol=0, atol=1e-11)


def test_members_are_mapped_as_one_by_one(decoder: Table) -> None:
    members = [drawn(Decoder(), seed) for seed in (1, 2)]
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    element = random_element(decoder, torch.Generator().manual_seed(7), members=2)
    together = apply(decoder, stacked, element)
    for i, member in enumerate(members):
        alone = apply(decoder, member, element.select(i))
        for name in member:
            torch.testing.assert_close(together[name][i], alone[name], rtol=0, atol=1e-13)


def test_elements_are_written_and_read(decoder: Table, tmp_path: Path) -> None:
    element = random_element(decoder, torch.Generator().manual_seed(8), members=2)
    rows = pa.table({"member": [0, 1], "epoch": [1, 1], "sha256": ["a" * 64, "b" * 64]})
    files.write_symmetries(tmp_path / "symmetries.parquet", rows, element, "all")
    _, read = files.read_symmetries(tmp_path / "symmetries.parquet", rows)
    for written, found in zip(element.parts(), read.parts(), strict=True):
        assert written.keys() == found.keys()
        assert all(torch.equal(written[name], found[name]) for name in written)


def test_matrices_outside_their_group_are_refused(decoder: Table) -> None:
    weights = drawn(Decoder())
    (stream,) = (m for m in decoder.matrices.values() if m.kind == "centred orthogonal")
    (first, *_) = (m for m in decoder.matrices.values() if m.kind == "invertible")
    for name, values, found in (
        ("elsewhere", torch.eye(2)[None], "'elsewhere'"),
        (stream.name, torch.diag(torch.tensor([-1.0] + [1.0] * (WIDTH - 1)))[None], "vector of ones"),
        (stream.name, 2 * torch.eye(WIDTH)[None], "not orthogonal"),
        (first.name, torch.zeros(HEADS, 4, 4), "no inverse"),
        (first.name, torch.eye(3)[None], r"\(1, 3, 3\)"),
    ):
        with pytest.raises(UsageError, match=found):
            turn(decoder, weights, {name: values})


def smaller(build: Callable[[], nn.Module], larger: Table, names: str) -> tuple[Table, float]:
    """Return the table of a network, and its change under elements of a larger group: its matrices of some layers."""
    network = build()
    table, weights = symmetries(network, INDICES), drawn(network)
    element = random_element(larger, torch.Generator().manual_seed(9))
    part = {name: values for name, values in element.matrices.items() if names in name}
    known = {name: tensor for name, tensor in weights.items() if name in larger.tensors}
    assert part
    own = random_element(table, torch.Generator().manual_seed(10))
    assert change(network, weights, apply(table, weights, own)) < 1e-12
    return table, change(network, weights, weights | turn(larger, known, part))


def kinds(table: Table, layer: str) -> set[str]:
    return {m.kind for m in table.matrices.values() if m.name.startswith(layer)}


def test_rotary_positions_leave_one_complex_number_a_pair(decoder: Table) -> None:
    table, difference = smaller(lambda: Decoder(rotary=True), decoder, "attention.q")
    assert kinds(table, "attention.q") == {"complex"}
    assert kinds(table, "attention.v") == {"invertible"}
    assert difference > 1e-3
    assert not any("attention.k.bias" in name for name in table.shifts)  # The key bias is no longer free.


def test_norms_of_queries_and_keys_leave_their_gains(decoder: Table) -> None:
    table, difference = smaller(lambda: Decoder(normed=True), decoder, "attention.q")
    assert not kinds(table, "attention.q")
    assert kinds(table, "attention.v") == {"invertible"}
    assert table.scaling_freedom == 3 * WIDTH + WIDTH // HEADS
    assert difference > 1e-3


def test_a_tied_head_pins_the_stream(decoder: Table) -> None:
    table, difference = smaller(lambda: Decoder(tied=True), decoder, "words")
    assert {m.kind for m in table.matrices.values()} == {"invertible"}
    assert table.scaling_freedom == 2 * WIDTH  # The gain of the last norm cannot change.
    assert difference > 1e-3


def test_buffers_without_values_are_refused() -> None:
    """Parameters need no memory, slopes do: without values, heads with different slopes would change places."""
    with torch.device("meta"):
        network, sloped = Decoder(), Decoder(slopes=(0.5, 0.25))
    assert [group.size for group in symmetries(network, INDICES).groups.values()] == [HEADS, 6]
    with pytest.raises(SymmetryError, match=r"buffer 'attention\.slopes'.*expected values.*found none"):
        symmetries(sloped, INDICES)


def test_slopes_that_differ_pin_the_heads(decoder: Table) -> None:
    network = Decoder(slopes=(0.5, 0.25))
    table, weights = symmetries(network, INDICES), drawn(network)
    equal = symmetries(Decoder(slopes=(0.5, 0.5)), INDICES)
    heads = next(name for name in decoder.groups if "heads" in name)
    assert heads in equal.groups
    assert heads not in table.groups
    swapped = apply(equal, weights, Element({heads: torch.tensor([1, 0])}))
    assert change(network, weights, swapped) > 1e-3


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = Attention(), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cumsum(self.attention(x), -1))


def test_an_operation_without_a_rule_is_named() -> None:
    with pytest.raises(SymmetryError, match=r"operation aten\.cumsum"):
        symmetries(Odd(), torch.zeros(2, TOKENS, WIDTH))


def test_a_wrong_example_is_named() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    with pytest.raises(UsageError, match="example: expected inputs that TransformerEncoderLayer takes"):
        symmetries(layer, torch.zeros(2, TOKENS, WIDTH + 1))


class Scores(nn.Module):
    """Attention whose scores a function changes, between two linear layers."""

    def __init__(self, change: Callable[[Tensor], Tensor], sinks: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.change = change
        self.sinks = nn.Parameter(torch.zeros(HEADS, 1, 1)) if sinks else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = self.change(q @ k.transpose(-1, -2))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.expand(len(x), -1, scores.shape[-2], -1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[-2]]
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def checked(network: nn.Module) -> Table:
    """Derive a network's table; check that random elements and shifts keep its function."""
    network, x = network.double().eval(), torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    table, weights, generator = symmetries(network, x), drawn(network), torch.Generator().manual_seed(2)
    with torch.no_grad():
        before = functional_call(network, weights, (x,))
        element = random_element(table, generator)
        for name in element.permutations:
            element.permutations[name].copy_(torch.arange(len(element.permutations[name])).flip(0))  # type: ignore[attr-defined]
        for moved in (apply(table, weights, element), shift(table, weights, random_shifts(table, generator))):
            after = functional_call(network, moved, (x,))
            assert float((after - before).abs().max()) < 1e-11 * float(before.abs().max())
    return table


def test_heads_with_masks_of_their_own_are_pinned() -> None:
    hidden = torch.zeros(HEADS, TOKENS, TOKENS, dtype=torch.bool)
    assert "heads" in str(checked(Scores(lambda s: s.masked_fill(hidden, float("-inf")))))
    hidden[1, :, 2] = True
    assert not checked(Scores(lambda s: s.masked_fill(hidden, float("-inf")))).groups
    assert not checked(Scores(lambda s: torch.where(hidden, float("-inf"), s))).groups
    assert not checked(Scores(lambda s: s.roll(1, 1))).groups  # The heads read each other's values.


def test_learned_scales_of_scores_are_one_more_scale_of_queries() -> None:
    table = checked(LearnedScale())
    assert [group.size for group in table.groups.values()] == [HEADS]
    assert "scale" in {name for name, axes in table.tensors.items() if axes.moves}
    assert {(m.kind, m.count, m.size) for m in table.matrices.values()} == {("invertible", HEADS, 4)}
    assert {shift.name for shift in table.shifts.values()} == {"constant of k.bias", "constant of v.bias"}
    assert table.scaling_freedom == sum(sign.size for sign in table.signs.values()) == HEADS
    assert checked(LearnedScale(1)).scaling_freedom == 1
    # A number a key: keys are told apart, so that their bias is not free.
    table = checked(LearnedScale(TOKENS))
    assert table.scaling_freedom == 1
    assert {shift.name for shift in table.shifts.values()} == {"constant of v.bias"}


def test_learned_scales_are_removed_and_aligned() -> None:
    network, x = LearnedScale().double(), torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    table, weights = symmetries(network, x), drawn(network)
    element = random_element(table, torch.Generator().manual_seed(4))
    moved, options = apply(table, weights, element), {"heads": "balanced", "scale": "unit-norm", "permute": "max"}
    first, second = (canonicalize(table, tensors, **options)[0] for tensors in (weights, moved))  # type: ignore[arg-type]
    back = apply(table, moved, match_weights(table, {n: t[None] for n, t in moved.items()}, weights).element.select(0))
    for name in weights:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-8)
        torch.testing.assert_close(back[name], weights[name], rtol=0, atol=1e-8)


class OfTorch(nn.Module):
    """torch's own self-attention."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_further_keys_end_the_shifts_of_biases(option: str) -> None:
    """By hand: the biases of keys and values are free without them, 8 numbers each."""
    assert sum(shift.dimension for shift in checked(OfTorch()).shifts.values()) == 2 * WIDTH
    table = checked(OfTorch(**{option: True}))
    assert not table.shifts
    assert table.dimension == 2 * HEADS * 4**2


class Grouped(nn.Module):
    """Attention in Falcon's layout: two groups, each with two queries, then their key and their value; or one."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.qkv, self.o = nn.Linear(WIDTH, (4 + 2 * groups) * 3, bias=False), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (self.groups, -1, 3))  # (batch, token, group, head, unit)
        heads = parts.shape[-2] - 2
        q, k, v = parts[..., :heads, :], parts[..., -2:-1, :], parts[..., -1:, :]
        k, v = (part.broadcast_to(q.shape) for part in (k, v))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_queries_between_their_keys_and_values_move_with_their_group() -> None:
    table = checked(Grouped(2))
    assert [(group.size, group.mover) for group in table.groups.values()] == [(2, None)]
    assert {(m.kind, m.count, m.size) for m in table.matrices.values()} == {("invertible", 2, 3)}
    table = checked(Grouped(1))
    assert [(group.size, group.mover) for group in table.groups.values()] == [(4, None)]
    assert {(m.kind, m.count, m.size) for m in table.matrices.values()} == {("invertible", 1, 3)}


def test_sinks_end_the_shifts_of_biases() -> None:
    table = checked(Scores(lambda s: s, sinks=True))
    assert not table.shifts
    assert not table.groups
    assert {m.kind for m in table.matrices.values()} == {"invertible"}


def test_scores_that_softmax_reads_in_part() -> None:
    with pytest.raises(SymmetryError, match="softmax does not ignore"):
        symmetries(
            Scores(lambda s: s.masked_fill(torch.eye(TOKENS, dtype=torch.bool), 0.0)), torch.zeros(1, TOKENS, WIDTH)
        )
    table = checked(Scores(lambda s: s * torch.linspace(0, 1, TOKENS).double()))
    assert set(table.shifts) == {"constant of v.bias"}  # The bias of keys is not one number for all keys any more.


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.first(self.norm(x)) + self.first(x))


def test_a_kernel_behind_a_norm_and_elsewhere_is_refused() -> None:
    with pytest.raises(SymmetryError, match=r"kernel 'first\.weight', which is used beside a gain and again"):
        symmetries(Shared(), torch.zeros(1, TOKENS, WIDTH))
