"""Ensembles: against a loop over modules; in eval mode, in any dtype, on inputs that they say they take."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.formats import manifest
from tests.support.scenarios import NETS, Built, build, five, hand_made, hash_of, inputs, load, opened


@pytest.fixture(scope="module", params=list(NETS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return five(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def members(built: Built) -> Collection:
    return load(built)


def test_half_precision_computes(members: Collection, built: Built) -> None:
    """Layers with statistics keep to float32, so that torch's kernels run and no variance is infinite."""
    x = inputs()
    wanted = torch.stack([hand_made(built, m)(x) for m in members.ids])
    for dtype, bound in ((torch.float16, 0.02), (torch.bfloat16, 0.1)):
        ensemble = members.ensemble(dtype=dtype)
        moved = members.ensemble().to(dtype)
        assert ensemble.dtype == moved.dtype == dtype
        for found in (ensemble(x.to(dtype)), moved(x.to(dtype)), members[:1].ensemble(dtype=dtype)(x.to(dtype))):
            assert (found - wanted[: len(found)]).abs().max() <= bound * wanted.abs().max()
        found = members[0].model(dtype=dtype)(x.to(dtype))
        assert (found - wanted[0]).abs().max() <= bound * wanted.abs().max()
        assert not any(
            t.dtype == dtype for n, t in moved.stacked.items() if n.endswith(("running_mean", "running_var"))
        )


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_ensemble_equals_a_loop_over_models(
    members: Collection, built: Built, dtype: torch.dtype, bound: float
) -> None:
    x = inputs(dtype=dtype)
    ensemble = members.ensemble(dtype=dtype)
    assert (len(ensemble), ensemble.ids, ensemble.dtype) == (5, [0, 1, 2, 3, 4], dtype)
    looped = torch.stack([m.model(dtype=dtype)(x) for m in members])
    by_hands = torch.stack([hand_made(built, m, dtype)(x) for m in members.ids])
    logits = ensemble(x)
    assert logits.shape == (5, 7, 10)
    for wanted in (looped, by_hands):
        assert (logits - wanted).abs().max() <= bound * wanted.abs().max()
    assert torch.equal(members[::-1].ensemble(dtype=dtype)(x).flip(0), logits)


def test_ensemble_stays_in_eval_mode_and_moves(members: Collection) -> None:
    ensemble, x = members.ensemble(), inputs()
    before = ensemble(x)
    with pytest.raises(UsageError) as caught:
        ensemble.train()
    assert str(caught.value) == (
        "ensemble.train(): expected eval mode: the members are finished, and batch statistics would mix their inputs."
        " Use members[i].model() to train one of them further."
    )
    assert not ensemble.training
    assert ensemble.eval() is ensemble.train(False) is ensemble
    assert torch.equal(ensemble(x), before)
    wide = copy.deepcopy(ensemble).to(torch.float64)
    assert wide.dtype == torch.float64
    assert (
        wide(x.double()) - members.ensemble(dtype=torch.float64)(x.double())
    ).abs().max() <= 1e-12 * before.abs().max()
    assert torch.equal(ensemble(x), before)  # the copy is its own
    assert ensemble.double() is ensemble
    assert ensemble.float().dtype == torch.float32


def test_ensemble_says_which_inputs_it_takes(members: Collection) -> None:
    ensemble = members.ensemble()
    for wrong in (inputs(dtype=torch.float64), torch.zeros(1, 1, 8, 8, dtype=torch.uint8)):
        with pytest.raises(UsageError) as caught:
            ensemble(wrong)
        assert str(caught.value) == (
            f"inputs of the ensemble: expected torch.float32 on cpu; found {wrong.dtype} on cpu."
            " Give members.preprocess(images).to(device, dtype)."
        )


def test_logits_that_are_not_finite_name_their_members(tmp_path: Path) -> None:
    def huge(member: int, state: dict[str, torch.Tensor]) -> None:
        if member in (1, 3):
            for name in ("fc1.weight", "fc2.weight"):
                state[name].mul_(1e25)

    ensemble, x = load(build(tmp_path, change=huge)).ensemble(), inputs()
    with pytest.raises(DamagedError) as caught:
        ensemble(x)
    assert str(caught.value) == (
        "logits of members 1, 3: expected finite numbers; found infinite ones or NaN."
        " `zoo-cli verify` says whether their weights are damaged."
    )
    assert ensemble(x * float("nan")).isnan().any()  # the inputs' fault, not the members'


def test_logits_beyond_float16_say_what_to_compute_in(tmp_path: Path) -> None:
    ensemble = load(build(tmp_path, change=lambda i, state: state["fc2.bias"].fill_(1e5))).ensemble().half()
    with pytest.raises(DamagedError) as caught:
        ensemble(inputs(dtype=torch.float16))
    assert str(caught.value) == (
        "logits of members 0, 1, 2, 3: expected finite numbers; found infinite ones or NaN. float16 ends at 65,504:"
        " compute in float32 or bfloat16."
    )


def test_a_variance_beyond_float16_stays_as_it_is_when_members_move() -> None:
    ensemble = zoo.load("resnet8-digits", n=2).ensemble()
    variances = [n for n in ensemble.stacked if n.endswith("running_var")]
    for name in variances:
        ensemble.stacked[name].fill_(1e6)
    wanted = ensemble(inputs())
    assert ensemble.to(torch.float16) is ensemble
    assert {ensemble.stacked[n].dtype for n in variances} == {torch.float32}
    assert ensemble.stacked["conv1.weight"].dtype == torch.float16
    assert (ensemble(inputs(dtype=torch.float16)) - wanted).abs().max() <= 0.02 * wanted.abs().max()


# The collections that ship, all members


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_shipped_ensembles_equal_a_loop(name: str, dtype: torch.dtype, bound: float) -> None:
    members = zoo.load(name)
    x = members.preprocess(zoo.images.load("digits").images[:20]).to(dtype)
    wanted = torch.stack([m.model(dtype=dtype)(x) for m in members])
    assert (members.ensemble(dtype=dtype)(x) - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_shipped_members_are_what_the_manifest_says(name: str, tmp_path: Path) -> None:
    members = zoo.load(name)
    tensors = opened(members._locations()[0].path)
    for member in members:
        prefix = f"{member.id:06d}/"
        state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        state.pop("_pad", None)
        assert hash_of(state) == member.row["sha256"]
    path = members.source.manifest_path(name)
    manifest.write_manifest(manifest.read_manifest(path), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert zoo.load(members.citation).ids == members.ids
