"""What training leaves: snapshots, accuracies; and how members fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training.loop import initial_state, measure_accuracies, train_epochs
from checkpoints_zoo.training.population import Progress, train_stack
from tests.training.test_loop import CONVNET, DROPPING, RESNET, dropping, part


@pytest.mark.parametrize("width", [1, 2])
def test_snapshots_are_the_weights_along_the_way(width: int) -> None:
    recipe = dataclasses.replace(RESNET, stack_width=width, epochs=3, snapshots=(0, 2))
    members = list(range(width))
    plain = dataclasses.replace(recipe, snapshots=())
    state = initial_state(plain, members)
    wanted = {0: {n: t.clone() for n, t in (state.params | state.buffers).items()}}
    for epoch in train_epochs(plain, members, state, part()):
        wanted[epoch] = {n: t.clone() for n, t in (state.params | state.buffers).items()}
    for member in train_stack(recipe, tuple(members), part()):
        assert list(member.snapshots) == [0, 2]
        for epoch, kept in {**member.snapshots, 3: member.state}.items():
            assert all(torch.equal(kept[n], wanted[epoch][n][member.member]) for n in kept)


@pytest.mark.slow
@pytest.mark.parametrize("averaging", ["none", "swa"])
def test_accuracies_are_those_of_the_modules(averaging: str) -> None:
    recipe = dataclasses.replace(RESNET, stack_width=3, averaging=averaging)
    state, data = initial_state(recipe, [0, 1, 2]), part()
    list(train_epochs(recipe, [0, 1, 2], state, data))
    test = images.load("digits", "test")
    got = measure_accuracies(recipe, state, data, test)
    assert got.shape == (3,)
    for member in train_stack(recipe, (0, 1, 2), data):
        module = recipe.module().eval()
        module.load_state_dict({**module.state_dict(), **member.state})
        with torch.no_grad():
            right = (module(recipe.preprocess(test.images)).argmax(1) == test.labels).double().mean()
        assert float(got[member.member]) == pytest.approx(float(right), abs=1.5 / len(test))


def test_it_ends_when_all_members_have_failed() -> None:
    recipe = dataclasses.replace(CONVNET, epochs=50, lr=1e30, stack_width=2)
    state = initial_state(recipe, [0, 1])
    assert list(train_epochs(recipe, [0, 1], state, part())) == [1]
    assert list(train_epochs(recipe, [0, 1], state, part())) == []  # nor does it go on from there
    for member in train_stack(recipe, (0, 1), part()):
        assert member.status == "failed"
        assert member.reason.startswith("the loss was not finite at step ")


def test_weights_beyond_what_is_stored_fail() -> None:
    recipe = dataclasses.replace(CONVNET, epochs=1, storage="float16", lr=1e9, momentum=0.0, schedule="constant")
    (member,) = train_stack(dataclasses.replace(recipe, batch_size=len(part())), (0,), part())
    assert (member.status, member.reason) == ("failed", "conv1.weight was beyond float16 at the end")


def test_a_member_whose_gradients_overflow_skips_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.amp.GradScaler; here for one of two members, whose factor is out of reach at first."""
    recipe = dataclasses.replace(CONVNET, precision="float16", stack_width=2, epochs=1)
    state = initial_state(recipe, [0, 1])
    state.scaling["scale"][1] = 2.0**120
    before = {name: tensor.clone() for name, tensor in state.params.items()}
    list(train_epochs(recipe, [0, 1], state, part()))
    assert state.scaling["scale"].tolist() == [65536.0, 2.0**117]
    assert state.scaling["steps"].tolist() == [3, 0]
    assert not state.momentum["fc2.bias"][1].any()
    assert all(torch.equal(before[n][1], state.params[n][1]) for n in before)
    assert not torch.equal(before["fc2.bias"][0], state.params["fc2.bias"][0])
    assert state.failed_step.tolist() == [-1, -1]
    monkeypatch.setattr("checkpoints_zoo.training.optimizers.GROWTH_STEPS", 2)
    again = initial_state(recipe, [0, 1])
    list(train_epochs(recipe, [0, 1], again, part()))
    assert again.scaling["scale"].tolist() == [131072.0, 131072.0]
    assert again.scaling["steps"].tolist() == [1, 1]


def test_compile_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        asked.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    for width in (1, 2):
        recipe = dataclasses.replace(CONVNET, compile=True, stack_width=width, epochs=1)
        for member in train_stack(recipe, (0,), part()):
            assert member.status == "ok"
    assert len(asked) == 2


def test_an_architecture_that_is_not_all_trained_is_refused() -> None:
    def frozen() -> nn.Module:
        module = dropping()
        module.get_parameter("1.bias").requires_grad_(False)
        return module

    with pytest.raises(UsageError) as error:
        initial_state(dataclasses.replace(DROPPING, build=frozen), [0])
    assert str(error.value) == (
        "function `build` of recipe 'small': expected a function that returns a torch.nn.Module whose parameters are "
        "all trained; found parameter '1.bias' without requires_grad."
    )


CUT = {
    "ema": dataclasses.replace(RESNET, averaging="ema", averaging_decay=0.5, stack_width=2),
    "swa": dataclasses.replace(RESNET, averaging="swa", averaging_start=1, channels_last=True),
    "float16": dataclasses.replace(CONVNET, precision="float16", stack_width=2),
    "snapshots": dataclasses.replace(RESNET, snapshots=(0, 1), channels_last=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", CUT)
def test_cut_short_and_gone_on_with_is_never_cut_short(option: str, tmp_path: Path) -> None:
    """What comes with an option is saved and taken up again: bit for bit."""
    recipe = dataclasses.replace(CUT[option], epochs=3, save_every=1)
    stack = tuple(range(recipe.stack_width))

    def stop(progress: Progress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    whole = train_stack(recipe, stack, part())
    with pytest.raises(KeyboardInterrupt):
        train_stack(recipe, stack, part(), tmp_path / "state.safetensors", stop)
    epochs: list[int] = []
    again = train_stack(
        recipe, stack, part(), tmp_path / "state.safetensors", lambda progress: epochs.append(progress.epoch)
    )
    assert epochs == [3]
    for a, b in zip(whole, again, strict=True):
        assert list(a.snapshots) == list(b.snapshots) == list(recipe.snapshots)
        for one, other in ((a.state, b.state), *((a.snapshots[e], b.snapshots[e]) for e in recipe.snapshots)):
            assert list(one) == list(other)
            assert all(torch.equal(one[name], other[name]) for name in one)
