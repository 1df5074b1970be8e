"""Loss barriers and re-estimated running statistics: against torch's own, against loops over modules, against facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import MemberNotFound, UsageError
from checkpoints_zoo.images import ImageData, Preprocess
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.populations import untrained_networks as evaluating
from checkpoints_zoo.populations.loss_barrier import Barriers, barrier, interpolate
from checkpoints_zoo.populations.statistics import has_statistics, reestimate_statistics
from checkpoints_zoo.populations.untrained_networks import Evaluator, InputBatches, make_evaluator
from checkpoints_zoo.symmetry import Element, random_element
from tests.support.few_digits import some

TEST, TRAIN = some("test", 90), some("train", 130)


def loaded(members: zoo.Collection, state: Mapping[str, Tensor]) -> nn.Module:
    """A module with these tensors, by a strict load as any torch user would."""
    module = build_architecture(members.description.architecture, **members.description.arguments)
    counters = {n: t for n, t in module.state_dict().items() if n.endswith("num_batches_tracked")}
    module.load_state_dict({**{n: t.float() for n, t in state.items()}, **counters}, strict=True)
    return module.eval()


def batches(members: zoo.Collection, data: ImageData, sizes: list[int]) -> list[Tensor]:
    return list(torch.split(members.preprocess(data.images), sizes))


def nll(module: nn.Module, members: zoo.Collection, data: ImageData) -> float:
    """Mean negative log-likelihood in nats, with NumPy."""
    assert data.labels is not None
    with torch.no_grad():
        logits = module(members.preprocess(data.images)).double().numpy()
    shifted = logits - logits.max(1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return float(-log_probs[np.arange(len(logits)), data.labels.numpy()].mean())


def test_statistics_are_those_of_update_bn() -> None:
    members = zoo.load("resnet8-digits", n=2)
    parts = batches(members, TRAIN, [50, 30, 50])
    stacked = members.stack(dtype=torch.float32)
    before = {n: t.clone() for n, t in stacked.items()}
    found = reestimate_statistics(members._skeleton(), stacked, parts)
    for i in range(2):
        module = loaded(members, {n: t[i] for n, t in stacked.items()})
        update_bn(parts, module)
        for name, tensor in module.state_dict().items():
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(found[name][i], tensor, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(found[n], t) for n, t in stacked.items())
    assert all(torch.equal(stacked[n], t) for n, t in before.items())
    assert not any(m.training for m in members._skeleton().modules())
    assert list(found) == list(stacked)


def test_statistics_of_one_batch_are_its_mean_and_unbiased_variance() -> None:
    members = zoo.load("resnet8-digits", n=1)
    inputs = members.preprocess(TRAIN.images)
    found = reestimate_statistics(members._skeleton(), members.stack(dtype=torch.float32), [inputs])
    module = members[0].model()
    assert isinstance(module.conv1, nn.Conv2d)
    maps = module.conv1(inputs).detach().double().numpy().transpose(1, 0, 2, 3).reshape(8, -1)
    np.testing.assert_allclose(found["bn1.running_mean"][0], maps.mean(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["bn1.running_var"][0], maps.var(1, ddof=1), rtol=1e-5)


def test_dropout_stays_off_while_statistics_are_estimated() -> None:
    net = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3)).eval()
    stacked = {n: t[None] for n, t in net.state_dict().items() if t.is_floating_point()}
    values = torch.arange(12.0).reshape(4, 3)
    found = reestimate_statistics(net, stacked, [values])
    np.testing.assert_allclose(found["1.running_mean"][0], values.numpy().mean(0), rtol=1e-6)


class Twice(nn.Module):
    """One norm called twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.BatchNorm1d(3)
        self.two = self.one
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.two(self.one(x).relu() * 3 + 1))


def test_a_norm_called_twice_is_estimated_as_torch_does() -> None:
    net = Twice().eval()
    stacked = {n: t[None].clone() for n, t in net.state_dict().items() if not n.endswith("tracked")}
    parts = list(torch.split(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), 6))
    found = reestimate_statistics(net, stacked, parts)
    update_bn(parts, net)
    torch.testing.assert_close(found["two.running_var"][0], net.one.running_var, rtol=1e-6, atol=1e-7)


def test_statistics_that_cannot_be_estimated() -> None:
    net = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True)).eval()
    stacked = {n: t[None] for n, t in net.state_dict().items() if t.is_floating_point()}
    with pytest.raises(
        UsageError, match=r"^running statistics '0\.running_mean': expected those of a batch norm of tor"
    ):
        reestimate_statistics(net, stacked, [torch.zeros(2, 2, 4)])
    plain = nn.Sequential(nn.BatchNorm1d(2)).eval()
    with pytest.raises(UsageError, match="inputs to estimate running statistics on: expected two or more; found none"):
        reestimate_statistics(plain, {n: t[None] for n, t in plain.state_dict().items() if t.is_floating_point()}, [])
    assert has_statistics(plain)
    assert not has_statistics(nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_the_line_is_a_loop_over_modules(name: str) -> None:
    members = zoo.load(name, members="3,5")
    found = barrier(members, data=TEST, points=3, statistics=TRAIN, batch=64)
    first, second = (m.state_dict(dtype=torch.float32) for m in members)
    losses = []
    for x in (0.0, 0.5, 1.0):
        state = {
            n: torch.from_numpy((1 - x) * t.numpy() + x * second[n].numpy()).float()
            for n, t in first.items()
            if t.is_floating_point()
        }
        module = loaded(members, state)
        update_bn(list(torch.tensor_split(members.preprocess(TRAIN.images), 3)), module)
        losses.append(nll(module.eval(), members, TEST))
    np.testing.assert_allclose(found.losses[0].numpy(), losses, rtol=2e-4, atol=1e-5)
    expected = max(losses) - (losses[0] + losses[-1]) / 2
    assert float(found.barriers) == pytest.approx(expected, rel=1e-3)
    stored = [nll(m.model(), members, TEST) for m in members]
    np.testing.assert_allclose(found.stored[0].numpy(), stored, rtol=1e-4)
    assert found.pairs == ((3, 5),)
    assert (found.inputs, found.data) == (90, f"digits/test {TEST.fingerprint}")
    has = name == "resnet8-digits"
    assert (found.statistics_images, found.statistics) == (
        (130, f"digits/train {TRAIN.fingerprint}") if has else (0, "")
    )


def test_averaged_running_buffers_are_not_the_statistics_of_the_average() -> None:
    members = zoo.load("resnet8-digits", n=2)
    judge = make_evaluator(members, TEST, TRAIN, "cpu", 512)
    first, second = ({n: t for n, t in m.state_dict().items() if t.is_floating_point()} for m in members)
    middle = interpolate(first, second, torch.tensor([0.5]))
    averaged, estimated = (float(judge.losses(judge.log_probs(middle, reestimated=new))) for new in (False, True))
    assert averaged > estimated + 0.2


@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_a_member_and_its_permuted_copy(name: str) -> None:
    members = zoo.load(name, n=2)
    element = random_element(members.symmetry_table, torch.Generator().manual_seed(1), members=2)
    copies = members.transform(Element(element.permutations))
    options: dict[str, Any] = {"points": 5, "statistics": TRAIN}
    before = barrier(members[0], copies[0], data=TEST, **options)
    after = barrier(members[0], copies.align(to=members[0])[0], data=TEST, **options)
    assert float(before.barriers) > 0.3
    assert float(after.barriers) == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(before.losses[:, 0], before.losses[:, -1], rtol=1e-4, atol=1e-5)
    same = barrier(members[1], members[1], TEST, **options)
    assert float(same.barriers) == pytest.approx(0, abs=1e-7)


def test_a_linear_model_rises_nowhere_above_the_chord() -> None:
    # Its loss is convex in the weights.
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    assert TEST.labels is not None
    inputs = InputBatches(TEST, Preprocess((8, 8), 1, (0.3,), (0.4,)), torch.device("cpu"), 64)
    judge = Evaluator(net, inputs, TEST.labels, None)
    generator = torch.Generator().manual_seed(0)
    ends = [{n: torch.randn(t.shape, generator=generator) * s for n, t in net.state_dict().items()} for s in (0.1, 0.3)]
    lambdas = torch.linspace(0, 1, 25, dtype=torch.float64)
    losses = judge.losses(judge.log_probs(interpolate(*ends, lambdas)))
    chord = torch.lerp(losses[0], losses[-1], lambdas)
    assert (losses[1:-1] < chord[1:-1]).all()
    found = Barriers(((0, 1),), lambdas, losses[None], losses[None], losses[None, [0, -1]], "", 90, "", 0)
    assert float(found.barriers) == pytest.approx(abs(float(losses[0] - losses[-1])) / 2, rel=1e-12)


def test_barriers_fall_with_alignment() -> None:
    members = zoo.load("convnet-digits", n=6)
    before, after = (barrier(m, data=TEST, points=9) for m in (members, members.align(to=0)))
    assert (after.barriers < before.barriers).all()
    assert before.pairs == tuple((0, i) for i in range(1, 6))
    # The figures of a pair do not depend on its company.
    alone = barrier(members[0], members[3], TEST, points=9)
    torch.testing.assert_close(alone.losses[0], before.losses[2], rtol=1e-6, atol=1e-7)
    mean = before.mean
    assert mean.value == pytest.approx(float(before.barriers.mean()))
    assert mean.low is not None
    assert mean.low < mean.value


def test_all_lines_start_from_the_chosen_member() -> None:
    members = zoo.load("convnet-digits", members="2,4,7")
    found = barrier(members, data=TEST, to=4, points=3)
    assert found.pairs == ((4, 2), (4, 7))
    start = nll(members[1].model(), members, TEST)
    np.testing.assert_allclose(found.losses[:, 0].numpy(), [start, start], rtol=1e-4)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    members = zoo.load("convnet-digits", n=3)
    whole = barrier(members, data=TEST, points=5)
    monkeypatch.setattr("checkpoints_zoo.populations.loss_barrier.STACK_BYTES", 20_000)
    torch.testing.assert_close(barrier(members, data=TEST, points=5).losses, whole.losses, rtol=1e-5, atol=1e-7)
    assert evaluating.STACK_BYTES > 20_000


def test_results_as_frame_and_json() -> None:
    found = barrier(zoo.load("convnet-digits", n=3), data=TEST, points=3)
    frame = found.to_frame()
    assert list(frame.columns) == ["first", "second", "lambda", "loss", "accuracy"]
    assert frame["lambda"].tolist() == [0, 0.5, 1] * 2
    assert frame["loss"].tolist() == found.losses.flatten().tolist()
    values = json.loads(found.to_json())
    assert values["barriers"] == found.barriers.tolist()
    assert values["mean"]["value"] == found.mean.value
    assert values["unit"] == "nats"
    assert ((found.accuracies >= 0) & (found.accuracies <= 1)).all()
    assert (found.accuracies[:, 0] > 0.9).all()


def test_what_a_barrier_cannot_take() -> None:
    members = zoo.load("convnet-digits", n=2)
    with pytest.raises(
        UsageError, match=r"members of a loss barrier: expected two or more; found 1 of convnet-digits\."
    ):
        barrier(members[:1], data=TEST)
    with pytest.raises(UsageError, match="points on a line: expected a whole number from 2; found 1"):
        barrier(members, data=TEST, points=1)
    with pytest.raises(UsageError, match="images a batch: expected a whole number from 2; found 1"):
        barrier(members, data=TEST, batch=1)
    with pytest.raises(MemberNotFound, match="member 9"):
        barrier(members, data=TEST, to=9)
    other = zoo.load("resnet8-digits", n=1)
    with pytest.raises(
        UsageError,
        match=r"members convnet-digits/0 and resnet8-digits/0: expected tensors of the same names and shapes; found",
    ):
        barrier(members[0], other[0], data=TEST)
    with pytest.raises(
        UsageError, match=r"second: expected None beside a Collection; found str\. Give images as data="
    ):
        barrier(members, "digits")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="second: expected a Member beside a Member; found NoneType"):
        barrier(members[0])
    with pytest.raises(UsageError, match="to: expected None: the line starts at the first member; found 1"):
        barrier(members[0], members[1], to=1)
    with pytest.raises(
        UsageError, match="loss barrier: expected a Collection, or a Member and a second one; found str"
    ):
        barrier("convnet-digits")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tensor 'n': expected the same integers in both members; found others"):
        interpolate({"n": torch.tensor([1])}, {"n": torch.tensor([2])}, torch.tensor([0.5]))
    with pytest.raises(UsageError, match="images to estimate running statistics on: expected two or more; found 1 of"):
        barrier(zoo.load("resnet8-digits", n=2), data=TEST, statistics=some("train", 1))


def test_integers_that_agree_stay() -> None:
    ends = {"n": torch.tensor([1, 2]), "w": torch.tensor([0.1])}
    line = interpolate(ends, ends, torch.linspace(0, 1, 3))
    assert line["n"].tolist() == [[1, 2]] * 3
    assert torch.equal(line["w"], ends["w"].expand(3, 1))
