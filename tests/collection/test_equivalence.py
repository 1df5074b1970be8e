"""Whether two sets of parameters compute one function: against modules loaded and run by hand; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoints_zoo as zoo
from checkpoints_zoo.collection.equivalence import Equivalence, check_equivalence
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.symmetry import apply, random_element, rescale, symmetries
from tests.support.symmetry_nets import EVERY, Shaped, randomised, table_of, without_eps

NAMES = ["mlp", "residual", "grouped", "shared", "upsampled", "owned", "resnet8", "convnet"]


def drawn(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, torch.Generator]:
    """A net of random float64 parameters, inputs for it, and a generator."""
    build, shape = EVERY[name]
    generator = torch.Generator().manual_seed(seed)
    return randomised(build(), seed), torch.randn(5, *shape, generator=generator, dtype=torch.float64), generator


def by_hand(net: nn.Module, state: dict[str, Tensor], x: Tensor) -> list[np.ndarray[Any, Any]]:
    """Outputs of a net into which a state dict is loaded, as any torch user would."""
    before = {n: t.clone() for n, t in net.state_dict().items()}
    net.load_state_dict(state, strict=True)
    with torch.no_grad():
        y = net(x)
    net.load_state_dict(before, strict=True)
    return [t.numpy() for t in (y.values() if isinstance(y, dict) else [y])]


def expected(one: list[np.ndarray[Any, Any]], other: list[np.ndarray[Any, Any]]) -> tuple[Any, Any]:
    """Relative and absolute difference of each input, from plain outputs."""
    relative, absolute = [], []
    for a, b in zip(one, other, strict=True):
        apart = np.abs(a - b).reshape(len(a), -1).max(1)
        absolute.append(apart)
        relative.append(apart / max(np.abs(a).max(), np.abs(b).max()))
    return np.max(relative, 0), np.max(absolute, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_symmetries_are_equivalent_and_others_are_not(name: str) -> None:
    net, x, generator = drawn(name)
    moved = apply(table_of(name), net.state_dict(), random_element(table_of(name), generator))
    found = check_equivalence(net, moved, None, x)
    assert found
    assert found.largest < 1e-12
    other = {n: t * 1.001 if n.endswith("weight") else t for n, t in moved.items()}
    found = check_equivalence(net.state_dict(), other, net, x)
    assert not found
    relative, absolute = expected(by_hand(net, net.state_dict(), x), by_hand(net, other, x))
    np.testing.assert_allclose(found.relative[0], relative, rtol=1e-9)
    np.testing.assert_allclose(found.absolute[0], absolute, rtol=1e-9)
    assert (found.narrow, found.eps, found.change, found.changed) == ((), None, None, ())
    assert found.worst == (0, int(np.argmax(relative)))
    assert found.largest == pytest.approx(float(relative.max()), rel=1e-9)
    assert check_equivalence(net.state_dict(), other, net, x, tolerance=1.1 * found.largest)


@pytest.fixture(scope="module")
def digits() -> tuple[zoo.Collection, Tensor]:
    members = zoo.load("resnet8-digits", n=3)
    return members, members.preprocess(zoo.images.load("digits").images[:6])


def test_stacked_members_are_compared_one_by_one(digits: tuple[zoo.Collection, Tensor]) -> None:
    members, x = digits
    table, generator = members.symmetry_table, torch.Generator().manual_seed(0)
    params = {n: t.double() if t.is_floating_point() else t for n, t in members.stack().items()}
    moved = apply(table, params, random_element(table, generator, members=3))
    moved["fc.bias"][1, 4] += 0.25
    found = check_equivalence(members, moved, None, x)
    assert found.ids == tuple(members.ids)
    assert found.worst[0] == members.ids[1]
    assert [bool((row <= found.tolerance).all()) for row in found.relative] == [True, False, True]
    assert float(found.absolute[1].max()) == pytest.approx(0.25, rel=1e-12)
    for i in range(3):
        alone = check_equivalence(members[i], {n: t[i] for n, t in moved.items()}, None, x)
        assert torch.equal(alone.relative[0], found.relative[i])
        assert alone.ids == (members.ids[i],)


@pytest.mark.slow
def test_every_form_of_the_same_parameters(digits: tuple[zoo.Collection, Tensor]) -> None:
    members, x = digits
    one = members[0]
    forms: list[Any] = [one, one.model(), one.state_dict(), one.model().double(), dict(one.model().half().state_dict())]
    for a in forms[:4]:
        for b in forms[:4]:
            assert check_equivalence(a, b, members._skeleton(), x).largest == 0
    assert 1e-6 < check_equivalence(one, forms[4], None, x).largest < 0.1  # rounded to float16
    assert check_equivalence(members, members.stack(), None, x).largest == 0
    assert zoo.check_equivalence(members, members[:], members[2].model(), x).relative.shape == (3, 6)


APPROXIMATE = {
    "group_normed": ("1", "4", "7", "10"), "layer_normed": ("norm",), "residual_group_normed": None, "owned": ("norm3",)
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_scales_hold_at_eps_0_and_say_what_they_change(name: str) -> None:
    net, x, generator = drawn(name)
    moved = apply(table_of(name), net.state_dict(), random_element(table_of(name), generator, approximate=True))
    found = check_equivalence(net, moved, None, x, eps=0)
    assert found
    assert found.change is not None
    relative, _ = expected(by_hand(net, net.state_dict(), x), by_hand(net, moved, x))
    np.testing.assert_allclose(found.change[0], relative, rtol=1e-6)
    assert relative.max() > 1e-9
    assert not check_equivalence(net, moved, None, x)
    assert found.changed == (APPROXIMATE[name] or tuple(f"norm{i}" for i in range(1, 5)))
    bare = without_eps(EVERY[name][0]().double().eval())
    bare.load_state_dict(net.state_dict())
    relative, _ = expected(by_hand(bare, net.state_dict(), x), by_hand(bare, moved, x))
    assert found.largest == pytest.approx(float(relative.max()), abs=1e-13)


def test_a_row_before_a_filter_response_norm() -> None:
    """Scaled by 0.3 it moves the outputs by about 6e-5 of themselves; the norm computes in float32, and it is said."""
    from timm.layers import FilterResponseNormTlu2d

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), FilterResponseNormTlu2d(8, eps=1e-6), nn.Flatten())
    params = {n: t.double() for n, t in net.state_dict().items()}
    moved = rescale(symmetries(net, torch.zeros(2, 3, 6, 6)), params, {"0": torch.full((8,), 0.3)})
    x = torch.randn(16, 3, 6, 6)
    found = check_equivalence(params, moved, net, 0.3 * x, eps=0, tolerance=1e-6)
    assert found
    assert (found.narrow, found.changed) == (("1",), ("1",))
    assert found.change is not None
    assert 1e-5 < float(found.change.max()) < 1e-3
    text = str(found).splitlines()
    assert text[2].startswith("With eps = 0 in 1 norm; with their own, outputs change by at most ")
    assert text[3] == "Rounded to less than float64 in '1': differences of about 1e-6 mean little"
    assert net[1].eps == 1e-6


def test_nothing_that_is_given_changes() -> None:
    net, x, generator = drawn("group_normed")
    net.train()
    net[0].eval()
    modes = [layer.training for layer in net.modules()]
    state = {n: t.clone() for n, t in net.state_dict().items()}
    moved = apply(table_of("group_normed"), state, random_element(table_of("group_normed"), generator))
    kept, inputs = {n: t.clone() for n, t in moved.items()}, x.clone()
    assert check_equivalence(net, moved, None, x, eps=1e-20)
    assert [layer.training for layer in net.modules()] == modes
    assert [layer.eps for layer in net.modules() if hasattr(layer, "eps")] == [1e-5] * 4
    assert all(torch.equal(t, state[n]) for n, t in net.state_dict().items())
    assert all(torch.equal(t, kept[n]) for n, t in moved.items())
    assert torch.equal(x, inputs)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules())
    assert all(p.grad is None and p.dtype == torch.float64 for p in net.parameters())


def test_a_module_in_training_mode_is_taken_in_eval_mode() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    x = torch.randn(6, 3)
    assert check_equivalence(net, net.state_dict(), None, x).largest == 0
    assert check_equivalence(net, net.state_dict(), net, x[:1]).relative.shape == (1, 1)


def test_modules_that_write_into_their_inputs_or_state() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        net.count.add_(1)
        x += 1
        return x * net.gain + net.count

    net = Shaped(forward, gain=nn.Parameter(torch.rand(3).double()))
    net.register_buffer("count", torch.zeros(3, dtype=torch.float64))
    state, x = net.state_dict(), torch.randn(4, 3).double()
    assert check_equivalence(state, state, net, x).largest == 0
    assert not bool(state["count"].any())


class Many(nn.Module):
    """Two inputs, and outputs of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        z = self.layer(x)
        return {"logits": z, "more": [z.argmax(1), (z.mean(), None)], "complex": torch.fft.rfft(z + y)}


def test_outputs_of_many_kinds() -> None:
    net = Many()
    other = net.state_dict() | {"layer.bias": net.layer.bias.detach() + 1}
    found = check_equivalence(net, other, None, (torch.randn(5, 3), torch.ones(5, 1)))
    assert found.relative.shape == (1, 1)  # a mean is no row an input
    assert float(found.absolute.max()) == pytest.approx(4, rel=1e-6)  # of the sum over four logits


def test_several_outputs_have_scales_of_their_own() -> None:
    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return 1e9 * x, net.gain * x

    net = Shaped(forward, gain=nn.Parameter(torch.ones(1)))
    found = check_equivalence(net, {"gain": torch.full((1,), 1.5)}, None, torch.ones(2, 1))
    assert found.relative.tolist() == [[pytest.approx(1 / 3)] * 2]


def test_the_result_as_text() -> None:
    net = nn.Linear(2, 2)
    params = {n: t[None].expand(2, *t.shape) for n, t in net.state_dict().items()}
    found = check_equivalence(params, params, net, torch.ones(3, 2))
    assert str(found) == (
        "The same function within 1e-10: relative difference at most 0, absolute 0\n"
        "Compared in float64 for 2 members and 3 inputs; the worst is member 0, input 0"
    )
    values = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
    apart = Equivalence((7,), values, 2 * values, 0.1, 0.0, ("bn",), values / 2, ("a", "b", "c", "d"))
    assert str(apart) == (
        "Not the same function within 0.1: relative difference at most 0.5, absolute 1\n"
        "Compared in float64 for 1 member and 2 inputs; the worst is member 7, input 0\n"
        "With eps = 0 in 1 norm; with their own, outputs change by at most 0.25 of the largest\n"
        "Rounded to less than float64 in 'a', 'b', 'c' and 1 more: differences of about 1e-6 mean little"
    )


# What is refused.

X = torch.ones(2, 3)


def layer() -> nn.Linear:
    return nn.Linear(3, 3)


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    state = {"weight": torch.eye(3), "bias": torch.zeros(3)} | changes
    return {n: t for n, t in state.items() if t is not None}


LINEAR = "expected the 2 tensors of Linear by name and shape"
BAD_TENSORS: list[tuple[Any, type[Exception], str]] = [
    (tensors(bias=None), LayoutError, f"tensors of b: {LINEAR}; found missing bias."),
    (tensors(extra=torch.ones(1)), LayoutError, f"tensors of b: {LINEAR}; found extra extra."),
    (
        tensors(bias=torch.zeros(4)),
        LayoutError,
        f"tensors of b: {LINEAR}; found misshapen bias [4] for [3].",
    ),
    (
        {"weight": torch.zeros(2, 3, 3), "bias": torch.zeros(4, 3)},
        LayoutError,
        "tensors of b: expected one number of members; found 2 of 'weight' and 4 of 'bias'.",
    ),
    (
        {"weight": torch.zeros(2, 3, 3), "bias": torch.zeros(2, 3)},
        UsageError,
        "a and b: expected one member each, or as many stacked ones; found one member alone and 2 members.",
    ),
    (
        {"weight": torch.zeros(0, 3, 3), "bias": torch.zeros(0, 3)},
        UsageError,
        "tensors of b: expected one member or more; found none.",
    ),
    (
        tensors(bias=torch.tensor([0, torch.nan, 0])),
        DamagedError,
        "tensor 'bias' of b: expected finite weights; found infinite ones or NaN.",
    ),
    (
        {"weight": 3},
        UsageError,
        "b: expected a state dict, a Member, a Collection, or a module; found dict of other th",
    ),
    ("b", UsageError, "b: expected a state dict, a Member, a Collection, or a module; found str."),
]


@pytest.mark.parametrize(("b", "kind", "text"), BAD_TENSORS, ids=range(len(BAD_TENSORS)))
def test_tensors_that_are_not_the_modules(b: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as error:
        check_equivalence(tensors(), b, layer(), X)
    assert str(error.value).startswith(text)


def test_bad_inputs_and_options_are_refused() -> None:
    def text(inputs: Any, module: Any = None, **options: Any) -> str:
        with pytest.raises(UsageError) as error:
            check_equivalence(tensors(), tensors(), module or layer(), inputs, **options)
        return str(error.value)

    assert text(torch.full((1, 3), torch.inf)) == "inputs: expected finite numbers; found infinite ones or NaN."
    assert text(()) == "inputs: expected a tensor, or a tuple of tensors; found ()."
    assert text(torch.zeros(0, 3)) == "inputs: expected one or more; found none: a tensor of shape (0, 3)."
    assert (
        text(torch.zeros(2, 3))
        == "inputs: expected some that tell functions apart; found ones whose outputs are all 0."
    )
    assert text(torch.ones(2, 4)).startswith("inputs: expected one batch that Linear takes; found ")
    assert text((X, X)).startswith("inputs: expected one batch that Linear takes; found ")
    assert text(X, tolerance=-1.0) == "tolerance: expected a number from 0; found -1.0."
    assert text(X, eps=float("nan")) == "eps: expected a number from 0; found nan."
    assert text(X, eps=0) == (
        "eps: expected norms without running statistics in Linear, each with an `eps`; found no such layer. "
        "Leave eps out: the module's scalings are exact."
    )
    assert text(X, device="moon").startswith("device 'moon': ")
    with pytest.raises(UsageError, match=r"^module: expected the module that computes the function; found None, and"):
        check_equivalence(tensors(), layer(), None, X)


def test_the_layer_that_fails_is_named() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2)))
    with pytest.raises(UsageError, match=r"^inputs: expected one batch that Sequential takes; found in layer '0.1': "):
        check_equivalence(net, net, None, X)


def test_outputs_that_are_not_finite() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.GroupNorm(1, 3))
    state = {n: torch.zeros_like(t) for n, t in net.state_dict().items()} | {"1.bias": torch.ones(3)}
    with pytest.raises(DamagedError) as error:
        check_equivalence(state, state, net, X, eps=0)
    assert str(error.value) == (
        "outputs of a: expected finite numbers; found infinite ones or NaN. At eps = 0 what is all zeros is divided by "
        "zero: give a small eps, such as 1e-20."
    )


def test_tied_tensors_have_one_value() -> None:
    net, x, _ = drawn("shared")
    state = net.state_dict()
    assert check_equivalence(state, state, net, x).largest == 0
    with pytest.raises(LayoutError) as error:
        check_equivalence(state, state | {"two.weight": state["two.weight"] + 1}, net, x)
    assert str(error.value) == (
        "tensors 'one.weight' and 'two.weight' of b: expected one value: they are one tensor of the module; found two."
    )


class Holding(nn.Module):
    """A module whose function holds on to its weight, to a list of it, or to the module itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.held = [self.weight]
        held, itself = self.weight, [self]
        self.function: Callable[[Tensor], Tensor] = {
            "weight": lambda x: F.linear(x, held),
            "list": lambda x: F.linear(x, itself[0].held[0].clone()),
            "itself": lambda x: F.linear(x, itself[0].weight),
        }[how]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("how", ["weight", "list", "itself"])
def test_tensors_that_a_state_dict_does_not_reach(how: str) -> None:
    """Run with either state dict such a module would compute the same, and any two would look equal."""
    with pytest.raises(UsageError) as error:
        check_equivalence({"weight": torch.eye(3)}, {"weight": 2 * torch.eye(3)}, Holding(how), X)
    assert str(error.value) == (
        "tensor 'weight' of the module: expected a tensor that the module looks up where its state dict keeps it; "
        "found one that a function or list of its own holds on to. Read it as an attribute (`self.weight`) when "
        "forward runs."
    )


class Stubborn(nn.Linear):
    def train(self, mode: bool = True) -> Stubborn:
        return self


BAD_MODULES: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: Shaped(lambda net, x: F.dropout(net.weight + x, 0.5), weight=nn.Parameter(torch.ones(3))),
        "module Shaped in eval mode: expected the same outputs each time; found others in a second run. Dropout and "
        "sampling have to stop in eval mode, as `F.dropout(x, p, self.training)` does.",
    ),
    (
        lambda: Stubborn(3, 3),
        "module Stubborn: expected eval mode, without dropout and batch statistics; found layer '' still in training "
        "mode after .eval().",
    ),
    (
        lambda: Shaped(lambda net, x: (x * net.weight) @ torch.ones(3, 2), weight=nn.Parameter(torch.ones(3))),
        "module Shaped: expected one that computes in the dtype of its inputs, here float64; found expected m1 and m2 "
        "to have the same dtype, but got: double != float. Make tensors inside it like its inputs, as "
        "`torch.zeros_like(x)` does.",
    ),
    (
        lambda: Shaped(lambda net, x: "text" if net.weight.sum() else x, weight=nn.Parameter(torch.ones(3))),
        "outputs: expected tensors, or tuples, lists and dicts of them; found str.",
    ),
]


@pytest.mark.parametrize(("build", "text"), BAD_MODULES, ids=range(len(BAD_MODULES)))
def test_modules_that_are_no_function_of_state_and_inputs(build: Callable[[], nn.Module], text: str) -> None:
    net = build()
    with pytest.raises(UsageError) as error:
        check_equivalence(net, net, None, X)
    assert str(error.value) == text


def test_a_module_that_cannot_be_copied() -> None:
    net = layer()
    net.product = net.weight * 2  # type: ignore[assignment]
    with pytest.raises(
        UsageError, match=r"^module Linear: expected one that can be copied; found Only Tensors created"
    ):
        check_equivalence(net, net, None, X)
