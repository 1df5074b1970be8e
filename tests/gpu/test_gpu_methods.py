"""Methods on a GPU: steps that do not wait, keys with the name of the GPU, and blocks as large as its memory."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo import images
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.dropout import Dropout
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.snapshot import Snapshot
from checkpoints_zoo.populations import discrepancy
from checkpoints_zoo.training.optimizers import update_averages
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
RECIPE = dataclasses.replace(
    convnet_digits(), name="brief-digits", epochs=1, batch_size=32, augmentation="shift1", stack_width=2
)


def problem_on(device: str, **changes: Any) -> Problem:
    data = images.load("digits", "train")
    assert data.labels is not None
    data = dataclasses.replace(data, images=data.images[:96], labels=data.labels[:96])
    return Problem(dataclasses.replace(RECIPE, **changes), data, device=torch.device(device))


def test_batches_wait_once_an_epoch() -> None:
    """And they are those of the CPU."""
    batches, wanted = (problem_on(device).batches(32, [3, 4]) for device in ("cuda", "cpu"))
    found = [next(batches)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += itertools.islice(batches, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (inputs, labels), (right_inputs, right_labels) in zip(found, wanted, strict=False):
        torch.testing.assert_close(inputs.cpu(), right_inputs)
        assert torch.equal(labels.cpu(), right_labels)


@pytest.mark.parametrize("width", [1, 2])
def test_no_step_with_dropout_waits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the masks are those of the CPU."""
    steps: list[int] = []

    def watched(recipe: Recipe, step: int, *rest: Any) -> None:
        update_averages(recipe, step, *rest)
        steps.append(step)
        torch.cuda.set_sync_debug_mode("error" if step in (0, 1) else "default")

    wanted = Dropout(0.1).fit(problem_on("cpu", stack_width=width), 2, 2, 0)
    with monkeypatch.context() as patch:
        patch.setattr("checkpoints_zoo.training.loop.update_averages", watched)
        try:
            runs = Dropout(0.1).fit(problem_on("cuda", stack_width=width), 2, 2, 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert steps == [0, 1, 2] * (2 // width)
    for run, right in zip(runs, wanted, strict=True):
        for name, tensor in right.states.items():
            bound = 1e-3 * max(1.0, float(tensor.abs().max()))
            torch.testing.assert_close(run.states[name], tensor, rtol=0.0, atol=bound, msg=name)


def test_draws_of_a_gpu_are_not_those_of_a_processor(tmp_path: Path) -> None:
    drawn = fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2, device="cuda")
    record = fitting.read_fit_record(tmp_path, drawn.name)
    assert record is not None
    assert record.device == torch.cuda.get_device_name()
    assert fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2, device="cuda").citation == drawn.citation
    with pytest.raises(UsageError, match=f"found settings .* on {record.device}"):
        fitting.fit(Snapshot(), RECIPE, out=tmp_path, runs=1, draws=2)
    assert problem_on("cuda")._modes_key(1) != problem_on("cpu")._modes_key(1)


def test_blocks_of_mmd_are_as_large_as_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    members = zoo.load("convnet-digits", n=8)
    wanted, sizes = zoo.mmd(members, permutations=9), list[int]()
    batches = type(members).batches

    def recorded(self: Any, size: int, *rest: Any) -> Any:
        sizes.append(size)
        return batches(self, size, *rest)

    monkeypatch.setattr(type(members), "batches", recorded)
    monkeypatch.setattr(discrepancy, "free_bytes", lambda device: 24 * members.nbytes // 8)
    found = zoo.mmd(members, permutations=9, device="cuda")
    assert set(sizes) == {3}
    assert found.value == pytest.approx(wanted.value, abs=1e-6)
