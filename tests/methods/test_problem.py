"""The posterior that methods approximate, against plain torch: SGD's loss, a Gaussian's density, running statistics."""

from __future__ import annotations

import copy
import dataclasses
import math
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.methods import modes
from checkpoints_zoo.methods import problem as problems
from checkpoints_zoo.methods.modes import FIRST_SEED
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits

BRIEF = dataclasses.replace(convnet_digits(), epochs=2, stack_width=4)


def parameters(problem: Problem) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: p.detach() for name, p in problem.recipe.module().named_parameters()}


def test_log_posterior_is_n_times_the_loss_that_sgd_minimises() -> None:
    problem = Problem.of(convnet_digits())
    params = parameters(problem)
    net = problem.recipe.skeleton()
    net.load_state_dict(params)
    loss = F.cross_entropy(net(problem.inputs), problem.labels)
    loss = loss + problem.recipe.weight_decay / 2 * sum(p.square().sum() for p in net.parameters())
    wanted = torch.autograd.grad(-problem.count * loss, list(net.parameters()))

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    value, logits = problem.log_posterior(leaves, (problem.inputs, problem.labels))
    found = torch.autograd.grad(value, list(leaves.values()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
    assert logits.shape == (1257, 10)
    prior = Normal(0.0, problem.prior_precision**-0.5)
    density = sum(prior.log_prob(p.double()).sum() for p in params.values())
    assert math.isclose(problem.log_prior(params), density, rel_tol=1e-5)
    likelihood = -F.cross_entropy(problem.forward(params, problem.inputs), problem.labels, reduction="sum")
    assert math.isclose(value.detach(), likelihood + density, rel_tol=1e-5)


def test_batches_estimate_the_posterior_without_bias() -> None:
    problem = Problem.of(convnet_digits())
    params = parameters(problem)
    batches = list(islice(problem.batches(419, [5, 6]), 3))  # a whole epoch: 3 · 419 = 1,257
    labels = torch.cat([labels for _, labels in batches], 1)
    assert [torch.equal(row.sort().values, problem.labels.sort().values) for row in labels] == [True, True]
    assert not torch.equal(labels[0], labels[1])
    whole, _ = problem.log_posterior(params, (problem.inputs, problem.labels))
    for run in (0, 1):
        values = [problem.log_posterior(params, (inputs[run], labels[run]))[0] for inputs, labels in batches]
        assert math.isclose(sum(values) / 3, whole, rel_tol=1e-5)
    again = next(problem.batches(419, [6]))
    assert torch.equal(again[0][0], batches[0][0][1])


def test_held_out_images_are_the_last_and_not_among_the_others() -> None:
    whole, part = Problem.of(convnet_digits()), Problem.of(convnet_digits(), held_out=250)
    assert part.held_out is not None
    assert (part.count, len(part.held_out)) == (1007, 250)
    assert torch.equal(torch.cat([part.images.images, part.held_out.images]), whole.images.images)
    assert part.prior_precision == pytest.approx(1.007)
    for wrong in (-1, 1257):
        with pytest.raises(UsageError, match=r"images held out of 'digits': expected 0 to 1,225: a batch"):
            Problem.of(convnet_digits(), held_out=wrong)
    with pytest.raises(UsageError, match=r"weight_decay of recipe 'convnet-digits': expected more than 0"):
        Problem.of(dataclasses.replace(convnet_digits(), weight_decay=0.0))


@pytest.mark.slow
def test_modes_are_members_of_the_recipe_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpoints_zoo.training.loop import initial_state, train_epochs

    state = initial_state(BRIEF, range(FIRST_SEED, FIRST_SEED + 4))
    assert list(train_epochs(BRIEF, range(FIRST_SEED, FIRST_SEED + 4), state, BRIEF.split("train")))
    torch_state = torch.random.get_rng_state()
    params, buffers = Problem.of(BRIEF, folder=tmp_path).modes(4)
    assert torch.equal(torch_state, torch.random.get_rng_state())
    assert all(torch.equal(params[name], state.params[name]) for name in state.params)
    assert (params.keys(), buffers) == (state.params.keys(), {})
    monkeypatch.setattr(modes, "train_epochs", None)
    again, _ = Problem.of(BRIEF, folder=tmp_path).modes(4)
    assert all(torch.equal(params[name], again[name]) for name in params)
    carried = Problem.of(BRIEF, folder=tmp_path).trained_state(4)
    assert carried.epoch == 0
    assert all(not bool(m.any()) for m in carried.momentum.values())
    (kept,) = tmp_path.glob("modes-*.safetensors")
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(DamagedError, match=r"modes .*safetensors: expected a safetensors file; found .* Delete it:"):
        Problem.of(BRIEF, folder=tmp_path).modes(4)


def test_networks_with_norms_take_the_batch_and_are_finished_with_statistics() -> None:
    problem = Problem.of(resnet8_digits())
    torch.manual_seed(0)
    net = problem.recipe.module()
    params = {name: p.detach() for name, p in net.named_parameters()}
    inputs = problem.inputs[:64]
    torch.testing.assert_close(problem.forward(params, inputs), net(inputs), rtol=1e-5, atol=1e-5)

    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    states = problem.finish(stacked)
    module = copy.deepcopy(problem.recipe.skeleton())
    assert set(states) == {n for n in module.state_dict() if not n.endswith("num_batches_tracked")}
    module.load_state_dict({name: tensor[0] for name, tensor in states.items()}, strict=False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    batches = list(problem.inputs.split(problems.FORWARD_BATCH))
    torch.optim.swa_utils.update_bn(batches, module)
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(before[name], tensor, rtol=1e-4, atol=1e-5)
