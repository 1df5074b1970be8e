"""Members and posteriors: stacked parameters, chains that start at members, and back, against one chain at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import LayoutError, UsageError
from tests.support import scenarios
from tests.support.neighbours_page import THEIR_OWN, run_section

pytestmark = [pytest.mark.slow, *(pytest.mark.filterwarnings(w) for w in THEIR_OWN)]


@pytest.fixture(scope="module")
def posteriors(oracle: Callable[[str], ModuleType]) -> Any:
    return oracle("posteriors")


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("resnet8-digits", n=4)


@pytest.fixture(scope="module")
def batch(members: zoo.Collection) -> tuple[Tensor, Tensor]:
    inputs, labels = next(iter(zoo.interop.loader(members, "digits", "train", batch=64)))
    return inputs, (labels + 1) % 10  # wrong ones: gradients are not small


def test_stacks_are_those_of_torch_func(posteriors: Any, members: zoo.Collection) -> None:
    params, buffers = zoo.interop.posteriors.stacked(members)
    wanted = torch.func.stack_module_state([m.model() for m in members])
    assert list(params.keys()) == list(wanted[0])
    assert params.batch_size == buffers.batch_size == torch.Size([4])
    kept = {n for n in wanted[1] if not n.endswith("num_batches_tracked")}
    assert set(buffers.keys()) == kept
    for found, theirs in ((params, wanted[0]), (buffers, wanted[1])):
        for name in found.keys():  # noqa: SIM118 (no dict)
            assert torch.equal(found[name], theirs[name]), name


def test_the_posterior_predictive_is_the_ensembles(posteriors: Any, members: zoo.Collection) -> None:
    params, buffers = zoo.interop.posteriors.stacked(members)
    inputs = members.preprocess(zoo.images.load("digits").images[:100])
    run = posteriors.model_to_function(members[0].model())  # its own way: one dict of tensors, then the inputs
    logits = torch.vmap(lambda p, b: run({**p, **b}, inputs))(params, buffers)
    ours = torch.vmap(zoo.interop.posteriors.forward(members), (0, 0, None))(params, buffers, inputs)
    wanted = torch.stack([m.model()(inputs) for m in members])
    for found in (logits, ours):
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert torch.allclose(logits.softmax(-1).mean(0), members.ensemble().predict(inputs), rtol=0, atol=1e-5)


def log_posterior(forward: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, labels, buffers = batch
        logits = forward(params, buffers, inputs)
        return -cross_entropy(logits, labels) - 1e-3 * sum((p**2).sum() for p in params.values()), logits

    return run


@pytest.mark.parametrize("sampler", ["sghmc", "sgld", "baoa"])
def test_stacked_chains_move_as_each_alone(
    posteriors: Any, members: zoo.Collection, batch: tuple[Tensor, Tensor], sampler: str
) -> None:
    forward = zoo.interop.posteriors.forward(members)
    cold: dict[str, Any] = {} if sampler == "sgld" else {"momenta": 0.0}
    transform = getattr(posteriors.sgmcmc, sampler).build(log_posterior(forward), lr=0.1, temperature=0.0, **cold)
    _, buffers = zoo.interop.posteriors.stacked(members)
    state = zoo.interop.posteriors.state(members, transform)
    assert tuple(state.batch_size) == (4,)
    step = torch.vmap(transform.update, in_dims=(0, (None, None, 0)), randomness="different")
    for _ in range(2):
        state, logits = step(state, (*batch, buffers))
    assert logits.shape == (4, 64, 10)
    assert state.step.tolist() == [2, 2, 2, 2]
    changed = 0.0
    for i in (0, 3):
        module = members[i].model()
        start = {n: p.detach() for n, p in module.named_parameters()}
        rest = dict(module.named_buffers())
        alone = transform.init(start)
        for _ in range(2):
            alone, _ = transform.update(alone, (*batch, rest))
        for name, wanted in alone.params.items():
            scale = max(float(wanted.abs().max()), 1e-3)
            away = float((wanted - start[name]).abs().max())
            changed = max(changed, away)
            assert (state.params[name][i] - wanted).abs().max() < 1e-5 * scale, name
        assert float(state.log_posterior[i]) == pytest.approx(float(alone.log_posterior), abs=1e-4)
        assert (state[i].params["fc.weight"] == state.params["fc.weight"][i]).all()
    assert changed > 1e-3


def test_there_and_back(posteriors: Any, members: zoo.Collection) -> None:
    transform = posteriors.sgmcmc.sghmc.build(lambda p, b: (torch.zeros(()), torch.zeros(())), lr=0.1)
    state = zoo.interop.posteriors.state(members, transform)
    inputs = members.preprocess(zoo.images.load("digits").images[:20])
    whole = members.ensemble()
    for drawn in (state, state.params, dict(state.params)):
        back = zoo.interop.posteriors.ensemble(drawn, members)
        assert back.ids == members.ids
        assert back.stacked.keys() == whole.stacked.keys()
        assert all(torch.equal(back.stacked[n], t) for n, t in whole.stacked.items())
        assert torch.equal(back(inputs), whole(inputs))
        assert torch.equal(back[2](inputs), members[2].model()(inputs))
    moved = zoo.interop.posteriors.ensemble(state.params * 2, whole)
    again, _ = zoo.interop.posteriors.stacked(moved)
    assert all(torch.equal(again[n], 2 * state.params[n]) for n in again.keys())  # noqa: SIM118 (no dict)


def test_tied_weights_count_once(posteriors: Any, tmp_path: Path) -> None:
    built = scenarios.build(tmp_path, "mlp", members=(0, 1))
    members = zoo.load("tiny", source=tmp_path, architecture=scenarios.Mlp)
    params, buffers = zoo.interop.posteriors.stacked(members)
    assert set(params.keys()) == {n for n, _ in scenarios.Mlp().named_parameters(remove_duplicate=False)} - {
        "again.weight"
    }
    assert set(buffers.keys()) == {"norm.running_mean", "norm.running_var", "mask", "order"}
    params["tied.weight"] += 1
    back = zoo.interop.posteriors.ensemble(params, members)
    assert torch.equal(back.stacked["again.weight"], back.stacked["tied.weight"])
    module = scenarios.Mlp()
    module.load_state_dict(built.states[1, 40], strict=False)
    with torch.no_grad():
        module.tied.weight += 1
    inputs = torch.randn(5, 1, 8, 8)
    assert torch.allclose(back(inputs)[1], module.eval()(inputs), rtol=1e-5, atol=1e-4)
    one = {n: t[1] for n, t in params.items()}, {n: t[1] for n, t in buffers.items()}
    logits = zoo.interop.posteriors.forward(members)(*one, inputs)
    assert torch.allclose(logits, module(inputs), rtol=1e-5, atol=1e-4)


def test_a_dict_in_a_state_loses_chains(posteriors: Any) -> None:
    """Why parameters are TensorDicts; once this fails, they need not be."""
    transform = posteriors.sgmcmc.sghmc.build(lambda p, b: (torch.zeros(()), torch.zeros(())), lr=0.1)
    state = torch.vmap(transform.init, randomness="different")({"w": torch.zeros(4, 3)})
    assert tuple(state.params["w"].shape) == (3,)


def test_refusals(posteriors: Any, members: zoo.Collection) -> None:
    params, _ = zoo.interop.posteriors.stacked(members)
    with pytest.raises(LayoutError, match=r"drawn parameters 'bn1\.bias': expected \(4, 8\); found \(2, 8\)"):
        zoo.interop.posteriors.ensemble(params[:2], members)
    with pytest.raises(LayoutError, match=r"drawn parameters 'more': expected none; found \(4,\)"):
        zoo.interop.posteriors.ensemble({**params, "more": torch.zeros(4)}, members)
    with pytest.raises(LayoutError, match=r"drawn parameters 'fc\.bias': expected \(4, 10\); found none"):
        zoo.interop.posteriors.ensemble({n: t for n, t in params.items() if n != "fc.bias"}, members)
    with pytest.raises(UsageError, match=r"drawn parameters: expected a stacked state .*; found Tensor"):
        zoo.interop.posteriors.ensemble(torch.zeros(3), members)
    with pytest.raises(UsageError, match="stacked weights of an ensemble"):
        zoo.interop.posteriors.stacked(members.ensemble(chunk=2))


def test_the_page(posteriors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_section("posteriors")
