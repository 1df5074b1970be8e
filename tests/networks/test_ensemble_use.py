"""What else an ensemble does: gradients, changed weights, threads, slices, predictions, copies."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from tests.support.ensemble_nets import (
    HERE,
    Base,
    Block,
    Counting,
    Cumulative,
    assert_close,
    ensemble,
    images,
    looped,
    mlp,
    randomised,
    stacked,
)  # fmt: skip

Oracle = Callable[[str], ModuleType]


# Gradients, and what is written to the weights


@pytest.mark.parametrize("execution", [*HERE, None])
def test_gradients_flow_to_inputs_and_weights(execution: str | None) -> None:
    x = images(3, torch.float64)
    made, _ = looped(Block, x, 2)
    wanted_inputs, own = torch.zeros_like(x), []
    for m in made:
        m.requires_grad_(True)
        mine = x.clone().requires_grad_()
        m(mine).square().sum().backward()
        assert mine.grad is not None
        wanted_inputs += mine.grad
        own.append({n: p.grad for n, p in m.named_parameters()})
    ens, mine = ensemble(Block, made, execution), x.clone().requires_grad_()
    ens(mine).square().sum().backward()
    assert mine.grad is not None
    assert_close(mine.grad, wanted_inputs, 1e-10)
    names = own[0]
    for name in names:
        ens.stacked[name].requires_grad_()
    ens(x).square().sum().backward()
    for name in names:
        wanted = torch.stack([g[name] for g in own])  # type: ignore[misc]
        found = ens.stacked[name].grad
        assert found is not None
        assert (found - wanted).abs().max() <= 1e-10 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch's own, of jvp
def test_transforms_around_an_ensemble() -> None:
    x = images(2, torch.float64)
    made, _ = looped(Block, x, 2)
    ens = ensemble(Block, made, "loop")
    single = torch.func.grad(lambda y: ens(y).square().sum())(x)
    direction = torch.ones_like(x)
    _, tangent = torch.func.jvp(lambda y: ens(y).square().sum(), (x,), (direction,))
    assert_close(tangent, (single * direction).sum(), 1e-10)


@pytest.mark.parametrize("execution", HERE)
def test_what_is_written_to_the_weights_counts(execution: str) -> None:
    x = images(9)
    made, wanted = looped(Block, x, 3)
    ens = ensemble(Block, made, execution)
    assert_close(ens(x), wanted)
    ens.stacked["first.weight"].mul_(0.5)
    for m in made:
        m.first.weight.data.mul_(0.5)  # type: ignore[operator, union-attr]
    ens.stacked["out.bias"] = ens.stacked["out.bias"] + 1
    with torch.no_grad():
        wanted = torch.stack([m(x) + 1 for m in made])
    assert_close(ens(x), wanted)


@pytest.mark.slow
def test_compiled_ensembles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile is given, without the C++ compiler that it needs on a CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for build, execution, batches in ((mlp, "loop", (2,)), (mlp, "grouped", (2, 20)), (Cumulative, None, (2,))):
        made, _ = looped(build, images(), 2)
        ens = Ensemble(copy.deepcopy(made[0]), stacked(made), range(2), execution=execution, compile=True)
        for batch in batches:
            with torch.no_grad():
                wanted = torch.stack([m(images(batch)) for m in made])
                assert_close(ens(images(batch)), wanted)


def test_modules_of_other_threads_run_while_one_is_traced() -> None:
    x, other = images(1), randomised(Block(), 0)
    wanted = other(x)
    running = threading.Event()

    class Waiting(Base):
        def forward(self, x: Tensor) -> Tensor:
            running.set()
            assert done.wait(20)
            return self.end(self.norm(self.conv(x)))

    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        tracing = pool.submit(lambda: derive_program(Waiting().eval(), 4))
        assert running.wait(20)
        assert torch.equal(other(x), wanted)
        done.set()
        assert tracing.result() is not None


@pytest.mark.parametrize("build", [Block, Counting])
def test_threads_that_share_an_ensemble(build: Callable[[], nn.Module]) -> None:
    x = images(4)
    made, wanted = looped(build, x, 6)
    ens = ensemble(build, made)
    halves = [ens[:3], ens[3:]]
    with ThreadPoolExecutor(4) as pool:
        for logits in pool.map(lambda _: ens(x), range(12)):
            assert_close(logits, wanted)
        for i, logits in enumerate(pool.map(lambda i: halves[i % 2](x), range(12))):
            assert_close(logits, wanted[3 * (i % 2) :][:3])


def test_what_was_prepared_without_gradients_gives_them_later() -> None:
    x = images(3, torch.float64)
    made, _ = looped(Block, x, 2)
    ens, mine = ensemble(Block, made, "loop"), x.clone().requires_grad_()
    with torch.inference_mode():
        ens(x)
    ens(mine).sum().backward()
    wanted = x.clone().requires_grad_()
    torch.stack([m(wanted) for m in made]).sum().backward()
    assert mine.grad is not None
    assert wanted.grad is not None
    assert_close(mine.grad, wanted.grad, 1e-10)


# The ensemble's own


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("resnet8-digits", n=5)


@pytest.fixture(scope="module")
def digits(members: zoo.Collection) -> Tensor:
    return members.preprocess(zoo.images.load("digits").images[:9])


def test_predict_is_the_mean_of_probabilities(members: zoo.Collection, digits: Tensor) -> None:
    ens = members.ensemble()
    with torch.no_grad():
        wanted = torch.stack([m.model()(digits).double().softmax(1) for m in members]).mean(0)
    assert (ens.predict(digits) - wanted).abs().max() <= 1e-6
    assert torch.equal(ens.predict_proba(digits), ens.predict(digits))
    assert ens._repr_html_() == "<pre>Ensemble(5 × ResNet8, torch.float32, cpu)</pre>"
    half = members.ensemble(dtype=torch.bfloat16).predict(digits.bfloat16())
    assert half.dtype == torch.float32
    assert (half - wanted).abs().max() <= 0.05
    assert (half.sum(1) - 1).abs().max() <= 1e-6


def test_flat_is_in_torch_uncertaintys_order(members: zoo.Collection, digits: Tensor, oracle: Oracle) -> None:
    deep = oracle("torch_uncertainty.methods").deep_ensembles
    theirs = deep([m.model() for m in members], task="classification").eval()
    with torch.no_grad():
        assert_close(members.ensemble().flat(digits), theirs(digits))


def test_slices_and_positions_share_memory(members: zoo.Collection, digits: Tensor) -> None:
    ens = members.ensemble()
    logits = ens(digits)
    for some in (slice(2, 5), slice(None), slice(None, None, 2), slice(3, 0, -1), slice(-1, None)):
        part = ens[some]
        assert isinstance(part, Ensemble)
        assert part.ids == members.ids[some]
        assert_close(part(digits), logits[list(range(5))[some]])
    assert ens[1:3].stacked["conv1.weight"].data_ptr() == ens.stacked["conv1.weight"][1].data_ptr()
    for at in (0, 3, -1):
        one = ens[at]
        assert type(one).__name__ == "ResNet8"
        assert not one.training
        assert_close(one(digits), logits[at])
    with torch.no_grad():
        ens[3].fc.bias.add_(1)  # type: ignore[operator, union-attr]
    assert_close(ens(digits)[3], logits[3] + 1)
    assert len(list(ens)) == 5
    for wrong in (5, -6, "a", 1.0, None):
        with pytest.raises(MemberNotFound) as caught:
            ens[wrong]  # type: ignore[index]
        assert str(caught.value) == (
            f"position {wrong!r} of an ensemble: expected a whole number from 0 to 4, or a slice; found {wrong!r}."
        )
    with pytest.raises(SelectionError, match=r"^slice of an ensemble: expected one member or more; found none\.$"):
        ens[5:]


def test_a_copy_and_a_saved_ensemble_are_their_own(members: zoo.Collection, digits: Tensor, tmp_path: Any) -> None:
    ens = members.ensemble()
    logits = ens(digits)
    other = copy.deepcopy(ens)
    torch.save(ens, tmp_path / "ens.pt")
    loaded = torch.load(tmp_path / "ens.pt", weights_only=False)
    for tensor in ens.stacked.values():
        tensor.zero_()
    for kept in (other, loaded):
        assert torch.equal(kept(digits), logits)


def test_damaged_members_are_named_whatever_runs() -> None:
    x = images(1)
    made, _ = looped(Block, x, 9)
    made[4].out.weight.data.fill_(float("inf"))  # type: ignore[operator, union-attr]
    for execution in (*HERE, None):
        with pytest.raises(DamagedError, match=r"^logits of members 4: expected finite numbers"):
            ensemble(Block, made, execution)(x)
