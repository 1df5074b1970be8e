"""Networks that combine operations in ways that no rule knows as a whole: the table keeps their function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.symmetry import Element, Table, apply, compose, inverse, random_element, symmetries
from checkpoints_zoo.symmetry.attention import confirming
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from checkpoints_zoo.symmetry.canonical.maps import canonicalize
from tests.support.attention_nets import INDICES, Decoder, drawn

pytestmark = pytest.mark.slow
WIDTH, HEADS, TOKENS = 8, 2, 4
Attend = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """A linear layer, a block with norms before attention and MLP, a last norm and a linear layer."""

    def __init__(self, attend: Attend, **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH, eps=0.1) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.attend = attend
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attend(self, self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        result: Tensor = self.head(self.norm3(x))
        return result


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def plain(block: Block, y: Tensor, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    q, k = (heads(block.q(y)) if q is None else q), (heads(block.k(y)) if k is None else k)
    scores = q @ k.transpose(-1, -2) / 2
    result: Tensor = block.o(merged(scores.softmax(-1) @ heads(block.v(y))))
    return result


def by_hand(block: Block, y: Tensor) -> Tensor:
    centred = y - y.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 0.1)
    return plain(block, scaled * block.gain + block.offset)


def decoded(block: Block, y: Tensor) -> Tensor:
    result: Tensor = block.layer(y, block.norm2(y))
    return result


def vector(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (WIDTH,)))


CASES: dict[str, Callable[[], nn.Module]] = {
    "cross attention behind a norm": lambda: Block(
        decoded, layer=nn.TransformerDecoderLayer(WIDTH, HEADS, 6, batch_first=True, norm_first=True)
    ),
    "a norm after a layer, before the sum": lambda: Block(lambda b, y: b.after(plain(b, y)), after=nn.LayerNorm(WIDTH)),
    "values without a bias": lambda: Block(plain, v=nn.Linear(WIDTH, WIDTH, bias=False)),
    "a norm over all queries": lambda: Block(
        lambda b, y: plain(b, y, heads(b.over(b.q(y)))), over=nn.RMSNorm(WIDTH, eps=0.1)
    ),
    "one more than a gain": lambda: Block(
        lambda b, y: plain(b, y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 0.1) * (1 + b.gain)), gain=vector()
    ),
    "a layer norm by hand": lambda: Block(by_hand, gain=vector(), offset=vector()),
    "one tensor as queries and keys": lambda: Block(lambda b, y: (lambda q: plain(b, y, q, q))(heads(b.q(y)))),
    "a factor a head": lambda: Block(
        lambda b, y: plain(b, y, heads(b.q(y)) * b.factor), factor=vector(HEADS, 1, 1)
    ),
    "numbers that units are multiplied by": lambda: Block(
        lambda b, y: plain(b, y, heads(b.q(y)) * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=y.dtype))
    ),
    "twice the positions": lambda: Block(
        lambda b, y: plain(b, torch.add(y, b.places, alpha=2.0)), places=vector(TOKENS, WIDTH)
    ),
    "padding behind a norm": lambda: Block(lambda b, y: plain(b, F.pad(y, (0, 0, 0, 1)))[:, :TOKENS]),
    "clamped queries": lambda: Block(lambda b, y: plain(b, y, heads(b.q(y)).clamp(-1, 1))),
    "one less the queries": lambda: Block(lambda b, y: plain(b, y, heads(1 - b.q(y)))),
    "norms of values": lambda: Block(
        lambda b, y: b.o(merged((heads(b.q(y)) @ heads(b.k(y)).mT).softmax(-1) @ b.over(heads(b.v(y))))),
        over=nn.LayerNorm(WIDTH // HEADS, eps=0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_function_stays(name: str) -> None:
    torch.manual_seed(0)
    network = CASES[name]().double().eval()
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    table, weights, generator = symmetries(network, x), drawn(network), torch.Generator().manual_seed(2)
    first, second = (random_element(table, generator) for _ in range(2))
    moved = apply(table, weights, first)
    with torch.no_grad():
        before, after = (functional_call(network, w, (x,)) for w in (weights, moved))
    assert float((after - before).abs().max()) < 1e-10 * float(before.abs().max())
    at_once, one_by_one = apply(table, weights, compose(table, first, second)), apply(table, moved, second)
    back = apply(table, moved, inverse(table, first))
    for tensor in weights:
        torch.testing.assert_close(at_once[tensor], one_by_one[tensor], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(back[tensor], weights[tensor], rtol=1e-8, atol=1e-9)
    assert table.groups  # The MLP's units move in every case.


def test_a_cache_of_keys_is_no_output() -> None:
    """Models of transformers return the keys and values of all heads, unless they are told not to."""
    from transformers import GPT2Config, GPT2LMHeadModel

    network = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, use_cache=True))
    table = symmetries(network, torch.zeros(1, 4, dtype=torch.int64))
    assert [matrix.kind for matrix in table.matrices.values()] == ["invertible", "invertible"]
    assert network.config.use_cache


def test_parts_that_change_the_function_are_left_out() -> None:
    """A table with a wrong part: the scale of one norm is said to act on the kernel of another."""
    network, x = Decoder().double(), INDICES
    table = symmetries(network, x)
    axes = table.tensors["up.weight"]
    (power,) = axes.powers
    wrong = replace(axes, powers=(replace(power, scale="norms.0"),))
    broken = replace(table, tensors={**table.tensors, "up.weight": wrong})
    confirmed = confirming.confirm(network, (x,), broken)
    assert set(broken.scales) - set(confirmed.scales) == {"norms.0", "norms.1"}
    assert confirmed.groups == broken.groups
    assert confirmed.matrices == broken.matrices
    assert confirming.confirm(network, (x,), table) == table


def test_a_table_that_is_not_confirmed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, TOKENS, WIDTH)
    confirmed = symmetries(Block(plain), x)
    undefined = symmetries(Block(lambda block, y: plain(block, y) * float("inf")), x)
    monkeypatch.setattr(confirming, "LARGEST_NETWORK", 100)
    large = symmetries(Block(plain), x)
    assert confirmed.unconfirmed == ""
    assert replace(large, unconfirmed="") == confirmed
    for table, reason in ((undefined, "on random weights it gives no finite outputs"),
                          (large, "it has more than 100 parameters")):  # fmt: skip
        assert f"\nnot confirmed by running the network: {reason}\n" in str(table)


class Gated(nn.Module):
    """Attention and a gated MLP whose two layers lie in one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.RMSNorm(WIDTH, eps=0.1)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


def test_planted_elements_of_a_gate_in_one_kernel_are_undone() -> None:
    torch.manual_seed(0)
    network = Gated().double().eval()
    table = symmetries(network, torch.randn(3, TOKENS, WIDTH, dtype=torch.float64))
    weights = drawn(network)
    elements = random_element(table, torch.Generator().manual_seed(3), members=10, condition=10.0)
    moved = apply(table, {n: t.expand(10, *t.shape) for n, t in weights.items()}, elements)
    back = apply(table, moved, match_weights(table, moved, weights).element)
    for name in weights:
        assert float((back[name] - weights[name]).abs().max()) < 1e-5


@pytest.fixture(scope="module")
def decoder() -> Table:
    return symmetries(Decoder(), INDICES)


def test_gains_of_zero_are_refused(decoder: Table) -> None:
    weights = drawn(Decoder())
    weights["norms.0.weight"][3] = 0.0
    element = random_element(decoder, torch.Generator().manual_seed(1))
    for move in (
        lambda: canonicalize(decoder, weights, heads="balanced"),
        lambda: match_weights(decoder, {n: t[None] for n, t in weights.items()}, weights),
        lambda: apply(decoder, weights, element),
    ):
        with pytest.raises(UsageError, match=r"gain 'norms\.0\.weight': expected no entry that is 0"):
            move()


def test_wrong_tensors_are_named(decoder: Table) -> None:
    weights, generator = drawn(Decoder()), torch.Generator().manual_seed(1)
    damaged = weights | {"up.weight": weights["up.weight"] * torch.inf}
    with pytest.raises(DamagedError, match=r"up\.weight.*finite"):
        canonicalize(decoder, damaged, heads="balanced")
    missing = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
    with pytest.raises(LayoutError, match=r"head\.weight"):
        canonicalize(decoder, missing, heads="balanced")
    with pytest.raises(LayoutError, match=r"head\.weight"):
        apply(decoder, missing, random_element(decoder, generator))
    two = {name: torch.stack([tensor, tensor]) for name, tensor in weights.items()}
    with pytest.raises(UsageError, match="as many rows as members"):
        apply(decoder, two, random_element(decoder, generator, members=3))
    with pytest.raises(UsageError, match="condition"):
        random_element(decoder, generator, condition=0.5)
    name = next(iter(decoder.shifts))
    with pytest.raises(UsageError, match="finite"):
        apply(decoder, weights, Element(shifts={name: torch.full((decoder.shifts[name].size,), torch.nan)}))
