"""Executions of an ensemble against a plain loop over modules: logits, folded norms, the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from checkpoints_zoo.networks.ensemble.executions import Runner
from checkpoints_zoo.networks.ensemble.program import MAX_MEAN_RATIO, choose_foldable_norms
from tests.support.ensemble_nets import (
    HERE,
    PROGRAMS,
    Block,
    ByValue,
    Cumulative,
    assert_close,
    ensemble,
    images,
    looped,
    stacked,
)  # fmt: skip

Oracle = Callable[[str], ModuleType]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for fused attention.
@pytest.mark.parametrize("net", PROGRAMS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_executions_equal_a_loop_over_modules(net: str, dtype: torch.dtype, bound: float) -> None:
    build = PROGRAMS[net]
    bound = max(bound, 1e-6) if net == "frn" else bound  # it goes through float32
    batches = [images(batch, dtype) for batch in (40, 1, 5)]
    every = [looped(build, x, 3) for x in batches]
    before = [x.clone() for x in batches]
    for execution in (*HERE, None):
        ens = ensemble(build, every[0][0], execution)
        for x, (_, wanted) in zip(batches, every, strict=True):
            for _ in range(2):  # the second time with what was kept
                assert_close(ens(x), wanted, bound)
            assert ens._runner is not None
            assert ens._runner.program(x) is not None
    assert all(torch.equal(x, was) for x, was in zip(batches, before, strict=True))


@pytest.mark.parametrize("net", PROGRAMS)
def test_overwriting_changes_no_bit(net: str) -> None:
    """A program may write results over what nothing reads later: the same operations, the same values."""
    build, x = PROGRAMS[net], images(4)
    made, wanted = looped(build, x, 1)
    program, state = derive_program(made[0], x.dim()), stacked(made)
    assert program is not None
    assert any(step.overwrite_index >= 0 for step in program.steps)
    ready = program.prepare(state)
    kept = [None if t is None else t.clone() for t in ready]
    with torch.no_grad():
        results = [program.run(ready, x, 1, over) for over in (True, False, True)]
    for found in results:
        assert torch.equal(found, results[1])
    # A vision transformer computes fewer tokens than its module, and products of fewer rows may round otherwise.
    assert_close(results[1], wanted, 1e-6 if net == "vit" else 0)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(ready, kept, strict=True))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    for name, build in PROGRAMS.items():
        x = images(4)
        made, wanted = looped(build, x, 3)
        # torch's vmap takes no norm whose statistics are wider than its inputs.
        for execution in ("loop", "grouped", *(["vmap"] if name == "frn" else []), None):
            ens = ensemble(build, made, execution).to(dtype)
            logits = ens(x.to(dtype))
            assert logits.dtype == dtype
            assert (logits - wanted).abs().max() <= bound * wanted.abs().max(), (name, execution)


@pytest.mark.slow
def test_torch_uncertaintys_nets(oracle: Oracle) -> None:
    """Upstream's own modules: both have a program, norms are folded where there are statistics."""
    resnet = oracle("torch_uncertainty.models.classification.resnet").resnet
    frn = oracle("torch_uncertainty.layers.filter_response_norm").FilterResponseNorm2d
    silu: dict[str, Any] = {"arch": 20, "activation_fn": F.silu, "normalization_layer": frn}
    for options, norms in ((silu, 0), ({"arch": 18, "width_multiplier": 0.25}, 20)):
        build = lambda o=options: resnet(in_channels=3, num_classes=10, style="cifar", **o)  # noqa: E731
        x = images(3, channels=3, size=16)
        made, wanted = looped(build, x, 2)
        program = derive_program(made[0], 4)
        assert program is not None
        assert len(program.norms) == len(choose_foldable_norms(program.norms, stacked(made))) == norms
        for execution in ("loop", "grouped"):
            assert_close(ensemble(build, made, execution)(x), wanted)


# Folding


def folding(mean: float, variance: float) -> tuple[Tensor, Tensor, int]:
    """Return logits with and without norms of such statistics folded, in units of the largest, and how many were."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 3))

    x = images()
    made, _ = looped(build, x, 2)
    for m in made:
        m.get_submodule("1").running_mean.fill_(mean)  # type: ignore[operator, union-attr]
        m.get_submodule("1").running_var.fill_(variance)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        wanted = torch.stack([m(x) for m in made])
    program = derive_program(made[0], 4)
    assert program is not None
    return ensemble(build, made, "loop")(x), wanted, len(choose_foldable_norms(program.norms, stacked(made)))


@pytest.mark.parametrize("variance", [0.0, 1e-8, 1.0, 1e8])
@pytest.mark.parametrize("ratio", [0.0, -1.0, MAX_MEAN_RATIO - 1, MAX_MEAN_RATIO + 1, 1e4])
def test_folded_norms_change_rounding_alone(variance: float, ratio: float) -> None:
    mean = ratio * (variance + 1e-5) ** 0.5
    found, wanted, folded = folding(mean, variance)
    assert folded == (abs(ratio) <= MAX_MEAN_RATIO)
    assert_close(found, wanted, 1e-5)


def test_a_norm_that_would_overflow_its_kernel_is_not_folded() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 3))

    x = images()
    made, _ = looped(build, x, 2)
    for m in made:
        for tensor in m.get_submodule("0").parameters():
            tensor.data.mul_(1e-30)
        m.get_submodule("1").weight.data.fill_(1e38)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        wanted = torch.stack([m(x) for m in made])
    assert wanted.isfinite().all()
    program = derive_program(made[0], 4)
    assert program is not None
    assert choose_foldable_norms(program.norms, stacked(made)) == ()
    assert_close(ensemble(build, made, "loop")(x), wanted)


# The choice


def test_an_execution_that_is_none() -> None:
    made, _ = looped(Block, images(), 2)
    with pytest.raises(UsageError) as caught:
        ensemble(Block, made, "fast")
    expected = "expected loop, grouped, vmap, graph, module or None; found 'fast'."
    assert str(caught.value) == f"execution of an ensemble: {expected}"
    with pytest.raises(UsageError) as caught:
        ensemble(Block, made, "graph")
    assert str(caught.value) == "execution 'graph': expected a CUDA device; found cpu. Take None."
    with pytest.raises(UsageError, match=r"^execution 'vmap' with compile=True: expected 'loop', 'grouped' or None\."):
        Ensemble(Block(), stacked(made), [0, 1], execution="vmap", compile=True)


def chosen(build: Callable[[], nn.Module], members: int, batch: int) -> tuple[str, int]:
    made, _ = looped(build, images(batch), 1)
    runner = Runner(made[0], {n: t.expand(members, *t.shape[1:]) for n, t in stacked(made).items()})
    choice, _ = runner.choose(images(batch))
    return choice.execution, choice.members_at_once


def test_small_batches_run_side_by_side_and_large_ones_one_by_one() -> None:
    assert chosen(Block, 64, 1) == ("grouped", 64)
    assert chosen(Block, 4, 1) == ("loop", 1)
    assert chosen(Block, 64, 400) == ("loop", 1)
    assert chosen(Cumulative, 64, 1) == ("vmap", 64)
    assert chosen(Cumulative, 64, 400) == ("loop", 1)
    assert chosen(ByValue, 64, 1) == ("loop", 1)


def test_logits_of_a_member_depend_on_no_other_in_a_loop() -> None:
    x = images(40)
    made, _ = looped(Block, x, 4)
    made[3].norm1.running_mean.fill_(1e6)  # type: ignore[operator, union-attr]
    everyone, some = ensemble(Block, made, "loop")(x), ensemble(Block, made[1:3], "loop")(x)
    assert torch.equal(everyone[1:3], some)


def test_mps_takes_the_loop() -> None:
    from checkpoints_zoo.networks.ensemble.executions import choose_execution

    for weights, batch in ((1, 1), (2**30, 2**30)):
        assert choose_execution("mps", weights, 1000, batch).execution == "loop"
    assert choose_execution("cuda", 273_258, 1000, 65_536).members_at_once == 1000
    assert choose_execution("cuda", 11_220_132, 64, 128 * 262_144).execution == "graph"


@pytest.fixture
def threads() -> Iterator[list[int]]:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield seen
    torch.set_num_threads(before)


def test_small_members_run_on_one_thread(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Runner.run
    monkeypatch.setattr(Runner, "run", lambda self, *a: threads.append(torch.get_num_threads()) or run(self, *a))
    made, _ = looped(Block, images(), 2)
    ensemble(Block, made)(images())
    wide = lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3000), nn.Linear(3000, 3))  # noqa: E731
    ensemble(wide, looped(wide, images(), 2)[0])(images())
    assert threads == [1, 2]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_through_the_module_the_logits_are_its_own_bit_for_bit(name: str) -> None:
    members = zoo.load(name, n=3)
    inputs = members.preprocess(zoo.images.load("digits").images[:24])
    with torch.no_grad():
        own = torch.stack([member.model()(inputs) for member in members])
        assert torch.equal(members.ensemble(execution="module")(inputs), own)
