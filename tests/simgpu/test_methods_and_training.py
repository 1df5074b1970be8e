"""Training and all methods on simulated cards: the same bits on each card and in each worker, close to the CPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.predictions import storing
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.loop import initial_state, measure_accuracies, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits, resnet8_digits
from checkpoints_zoo.workers import Engine, InProcess, Processes
from tests.methods.test_fitting import BRIEF
from tests.support.few_digits import noise, some

pytestmark = [pytest.mark.simgpu, pytest.mark.filterwarnings("ignore:.*:FutureWarning")]
FIRST, SECOND = torch.device("cuda"), torch.device("cuda:1")
DEVICES = ("cuda:0", "cuda:1")
# The libraries behind these methods draw noise on the device.
DRAWN_ON_THE_CARD = {"vi", "laplace", "laplace-last-layer", "sgld", "sghmc", "csghmc"}
OF_NOISE = dataclasses.replace(
    convnet_digits(), name="brief", epochs=1, batch_size=32, stack_width=2, dataset="noise",
    split_rule="none", images=noise,
)  # fmt: skip
OF_FEW = dataclasses.replace(OF_NOISE, dataset="few-digits", images=lambda: (some("train", 64), some("test", 20)))
RESNET = dataclasses.replace(resnet8_digits(), name="brief", epochs=1, batch_size=32, arguments={"widths": (4, 4, 4)})
RECIPES = {
    "alone": dataclasses.replace(RESNET, stack_width=1, channels_last=True, precision="bfloat16"),
    "stacked": dataclasses.replace(RESNET, stack_width=2, augmentation="crop4-flip", averaging="swa"),
}


def trained(recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
    """Train two steps; return the weights and the accuracies."""
    ids = list(range(recipe.stack_width))
    state = initial_state(recipe, ids).to(device)
    assert list(train_epochs(recipe, ids, state, some("train", 64))) == [1]
    accuracies = measure_accuracies(recipe, state, some("train", 64), some("test", 50))
    return {**state.params, **state.buffers, "accuracies": accuracies, "loss": state.loss}


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_the_same_on_each_card(name: str) -> None:
    first, second = (trained(RECIPES[name], device) for device in (FIRST, SECOND))
    assert {t.device for t in second.values()} == {SECOND}
    assert all(torch.equal(t.cpu(), second[n].cpu()) for n, t in first.items())


@dataclasses.dataclass(frozen=True)
class InTurn:
    """An engine that runs jobs in this process, on several devices in turn."""

    devices: Sequence[str]

    @property
    def device(self) -> str:
        return self.devices[0]

    def run(self, work: Any, jobs: Iterable[Any]) -> Generator[tuple[Any, Any], None, None]:
        for i, job in enumerate(jobs):
            yield job, work(job.argument, self.devices[i % len(self.devices)])


def test_two_cards_predict_what_one_card_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are stored in float16, each rounded by 1/2048."""
    members = zoo.load("convnet-digits", n=4)
    monkeypatch.setattr(storing, "choose_engine", lambda workers, devices, *rest: InTurn(devices))
    both = members.predict(some("test", 40), tmp_path / "two", devices=DEVICES).logits()
    one = members.predict(some("test", 40), tmp_path / "one", device=DEVICES[0]).logits()
    assert (both - one).abs().max() <= one.abs().max() / 1024


def test_a_worker_on_one_card_trains_what_another_trains(tmp_path: Path) -> None:
    sources = []
    engines: list[Engine] = [Processes(1, DEVICES[1:]), InProcess(DEVICES[0])]
    for engine in engines:
        folder = tmp_path / engine.device.replace(":", "-")
        assert train_into(OF_NOISE, [0, 1, 2, 3], folder, engine) == 4
        sources.append(zoo.load("brief", source=folder).stack())
    assert all(torch.equal(t, sources[1][name]) for name, t in sources[0].items())


@pytest.mark.parametrize("name", BRIEF)
def test_a_method_draws_close_to_the_cpus(name: str, tmp_path: Path) -> None:
    """On a card that is not the current one. Draws of the CPU differ by rounding; where the noise is drawn on the card,
    another card gives equal draws."""
    is_drawn_on_the_card = name in DRAWN_ON_THE_CARD
    found, wanted = (draws(BRIEF[name], str(x), tmp_path) for x in (SECOND, FIRST if is_drawn_on_the_card else "cpu"))
    for tensor_name, tensor in found.items():
        assert tensor.isfinite().all(), tensor_name
        largest = float(wanted[tensor_name].abs().max())
        difference = float((tensor - wanted[tensor_name]).abs().max())
        most = 0.0 if is_drawn_on_the_card else 1e-3 * max(1.0, largest)
        assert difference <= most, f"{tensor_name}: {difference:.3g} of {largest:.3g}"


def draws(method: Method, device: str, folder: Path) -> dict[str, Tensor]:
    out = folder / device.replace(":", "-")
    for _ in device:  # so often that each device's generator has a state of its own
        torch.rand(1, device=device)
    return fitting.fit(method, OF_FEW, out=out, runs=2, draws=2, device=device).stack(dtype=torch.float32)
