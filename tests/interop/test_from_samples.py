"""Draws of any posterior become a source: every form they come in gives the same bytes."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import LayoutError, LeftOut, StorageError, UsageError
from checkpoints_zoo.interop.samples import from_samples
from tests.hub import Hub
from tests.support.publications import ADDRESS, NEW, PICTURE, consistent
from tests.support.scenarios import Mlp, State, digest_of, hash_of, opened, random_state

COUNT = 7


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shards hold three draws."""
    monkeypatch.setattr("checkpoints_zoo.formats.shard_files.LARGEST_TENSOR_COUNT", 51)


def draws(count: int = COUNT) -> list[State]:
    """Draws that share their buffers: the statistics, the mask and the order of the first."""
    made = [random_state("mlp", seed) for seed in range(count)]
    parameters = {name for name, _ in Mlp().named_parameters()}
    return [{n: t if n in parameters or n == "tied.weight" else made[0][n] for n, t in state.items()} for state in made]


def module_of(state: State) -> Mlp:
    net = Mlp()
    net.load_state_dict(state)
    return net


def source_of(samples: Any, out: Path, name: str = "mine-swag", method: str = "swag", **options: Any) -> zoo.Collection:
    return zoo.from_samples(samples, Mlp, out=out, name=name, method=method, **options)


def kept(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}


def same(members: zoo.Collection, made: list[State]) -> None:
    """Check the members' tensors, bit for bit, as the safetensors library and hashlib see them."""
    there: State = {}
    for path in (members.source.root / "shards" / members.name).iterdir():
        there |= opened(path)
    for member, row in zip(members.ids, members.rows.to_pylist(), strict=True):
        wanted = kept(made[member])
        assert {n.partition("/")[2] for n in there if n.startswith(f"{member:06d}/")} - {"_pad"} == wanted.keys()
        assert all(torch.equal(there[f"{member:06d}/{n}"], t) for n, t in wanted.items())
        assert row["sha256"] == hash_of(wanted)


def stacked(made: list[State]) -> State:
    return {name: torch.stack([state[name] for state in made]) for name in made[0]}


def flat(made: list[State]) -> Tensor:
    return torch.stack([parameters_to_vector(module_of(state).parameters()).detach() for state in made])


def named(made: list[State]) -> Iterator[dict[str, Tensor]]:
    return (dict(module_of(state).named_parameters()) for state in made)


FORMS: dict[str, Callable[[list[State]], tuple[Any, dict[str, Any]]]] = {
    "state dicts": lambda made: (made, {}),
    "an iterator": lambda made: (iter(made), {}),
    "wrapped": lambda made: ([{f"module.net.{n}": t for n, t in state.items()} for state in made], {}),
    "stacked": lambda made: (stacked(made), {}),
    "stacked arrays": lambda made: ({n: t.numpy() for n, t in stacked(made).items()}, {}),
    "without counters": lambda made: ((kept(state) for state in made), {}),
    "parameters": lambda made: (named(made), {"buffers": made[0]}),
    "flat": lambda made: (flat(made), {"buffers": module_of(made[0]), "order": "parameters"}),
    "flat arrays": lambda made: (iter(flat(made).numpy()), {"buffers": made[0], "order": "parameters"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_bytes(form: str, tmp_path: Path) -> None:
    made = draws()
    samples, options = FORMS[form](made)
    members = source_of(samples, tmp_path / "out", **options)
    assert (members.ids, len(members.description.layouts)) == (list(range(COUNT)), 1)
    same(members, made)
    assert [row["path"][:22] for row in members.rows.to_pylist()] == [f"shards/mine-swag/0000{i // 3}"
                                                                     for i in range(COUNT)]  # fmt: skip
    assert zoo.verify(members) == []
    images = torch.rand(3, 1, 8, 8)
    assert torch.allclose(members.ensemble()(images)[4], module_of(made[4]).eval()(images), atol=1e-5)
    assert not list((tmp_path / "out" / ".import").iterdir())


@pytest.mark.slow
def test_vectors_of_a_weight_dataset_come_back(tmp_path: Path) -> None:
    members = zoo.load("resnet8-digits", n=3)
    dataset = members.dataset()
    vectors = torch.stack([dataset[i][0] for i in range(3)])
    found = zoo.from_samples(vectors, "resnet8", arguments=members.description.arguments, method="vi", out=tmp_path,
                             name="resnet8-vi", order=dataset.spans, like="resnet8-digits")  # fmt: skip
    for name, tensor in members.stack().items():
        assert torch.equal(found.stack()[name], tensor)
    assert found.rows["sha256"].to_pylist() == members.rows["sha256"].to_pylist()
    again = found.dataset(("draw",))  # in an order of its own: all of it is float32 now
    assert all(torch.equal(again[1][0][span], vectors[1][dataset.spans[name]]) for name, span in again.spans.items())


def test_a_flat_vector_is_what_torch_makes_of_it(tmp_path: Path) -> None:
    made = draws(2)
    vectors = torch.randn(2, flat(made).shape[1])
    members = source_of(vectors, tmp_path, buffers=made[0], order="parameters")
    for at, vector in enumerate(vectors):
        net = module_of(made[0])
        vector_to_parameters(vector, net.parameters())
        assert all(torch.equal(members.stack()[n][at], t) for n, t in kept(dict(net.state_dict())).items())


SHAPES = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}", fullmatch=True),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    min_size=1,
    max_size=5,
)
FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@pytest.mark.slow
@settings(max_examples=10)
@given(SHAPES, FLOATS, st.integers(1, 5), st.booleans())
def test_any_draws_come_back(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, count: int, one: bool) -> None:
    build = lambda: nn.ParameterDict({n: torch.zeros(s) for n, s in shapes.items()})  # noqa: E731
    made = {n: torch.randn(count, *s).to(dtype) for n, s in shapes.items()}
    samples = ({n: t[i] for n, t in made.items()} for i in range(count)) if one else made
    with tempfile.TemporaryDirectory() as place:
        members = zoo.from_samples(samples, build, method="hmc", out=place, name="mine-hmc", run=0)
        assert members.rows["draw"].to_pylist() == list(range(count))
        for name, tensor in members.stack().items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, made[name])


def test_statistics_stay_float32(tmp_path: Path) -> None:
    made = [{n: t.half() if t.is_floating_point() else t for n, t in state.items()} for state in draws(2)]
    members = source_of(made, tmp_path)
    assert (members.rows["dtype"][0].as_py(), members.stack()["norm.running_var"].dtype) == ("F16", torch.float32)
    same(members, [{n: t.float() if "running" in n else t for n, t in state.items()} for state in made])


def test_one_draw_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def chain() -> Iterator[State]:
        nonlocal most
        for state in draws(20):
            fresh = {name: tensor.clone() for name, tensor in state.items()}
            alive.append(weakref.ref(fresh["out.weight"]))
            most = max(most, sum(r() is not None for r in alive))
            yield fresh
            del fresh

    assert len(source_of(chain(), tmp_path)) == 20
    assert most <= 2


def test_runs_and_columns(tmp_path: Path) -> None:
    members = source_of(draws(5), tmp_path, "mine-swag-multi", run=[0, 0, 1, 1, 1], title="Draws", licence="MIT",
                        columns={"lr": 0.05, "seed": [1, 1, 2, 2, 2]})  # fmt: skip
    rows = members.rows.to_pylist()
    assert [(r["method"], r["run"], r["draw"], r["seed"], r["lr"]) for r in rows] == [
        ("swag", 0, 0, 1, 0.05), ("swag", 0, 1, 1, 0.05), ("swag", 1, 0, 2, 0.05), ("swag", 1, 1, 2, 0.05),
        ("swag", 1, 2, 2, 0.05),
    ]  # fmt: skip
    assert (members.description.title, members.description.licence) == ("Draws", "MIT")
    alone = source_of(draws(2), tmp_path, "mine", "independent").rows.to_pylist()
    assert [(r["method"], r["run"], r["draw"]) for r in alone] == [("independent", None, None)] * 2


def test_draws_of_a_chain_may_repeat(tmp_path: Path) -> None:
    made = draws(3)
    made[2] = made[0]
    assert source_of(made, tmp_path, "mine-hmc", "hmc", run=0).ids == [0, 1, 2]
    text = r"^collection mine-swag: 1 of 3 members are left out\. member 2: excluded, the weights of member 0\.$"
    with pytest.warns(LeftOut, match=text):
        assert source_of(made, tmp_path).ids == [0, 1]
    made[1] = {name: tensor.clone() for name, tensor in made[1].items()}
    made[1]["out.bias"][0] = float("inf")
    with pytest.warns(LeftOut, match=r"1 of 2 .*member 1: failed, values that are not finite in out\.bias\.$"):
        assert source_of(made[:2], tmp_path, "more-swag").ids == [0]


def test_a_chain_goes_on(tmp_path: Path) -> None:
    made, whole, out = draws(8), tmp_path / "whole", tmp_path / "out"
    told: dict[str, Any] = {"run": 0, "title": "A chain", "columns": {"lr": 0.1}}
    source_of(made, whole, **told)
    source_of(made[:5], out, **told)
    assert source_of(made, out, run=0, columns={"lr": 0.1}).ids == list(range(8))
    for path in ("shards/mine-swag", "manifests"):
        names = sorted(p.name for p in (whole / path).iterdir())
        assert names == sorted(p.name for p in (out / path).iterdir())
        assert all((whole / path / n).read_bytes() == (out / path / n).read_bytes() for n in names)
    before = digest_of(out)
    for samples, found in ((made[:5], "8 draws, not 5"), (made[1:], "another draw 0")):
        with pytest.raises(
            UsageError, match=rf"expected no members, or the first of these draws; found {found}\. Give an"
        ):
            source_of(samples, out, run=0)
        assert digest_of(out) == before


class Stop(Exception):
    """In place of a kill, or of a sampler that fails."""


def test_a_sampler_that_fails(tmp_path: Path) -> None:
    made = draws(8)

    def failing() -> Iterator[State]:
        yield from made[:7]
        raise Stop

    with pytest.raises(Stop):
        source_of(failing(), tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    source_of(made[:5], tmp_path)
    before = digest_of(tmp_path)
    with pytest.raises(Stop):
        source_of(failing(), tmp_path)
    assert digest_of(tmp_path) == before


def test_what_a_kill_leaves_does_not_load_and_goes_away(tmp_path: Path) -> None:
    out, left = tmp_path / "out", tmp_path / "left"

    def killed() -> Iterator[State]:
        yield from draws(7)
        shutil.copytree(out, left)  # as it is at this moment
        raise Stop

    with pytest.raises(Stop):
        source_of(killed(), out)
    assert len(list((left / "shards" / "mine-swag").iterdir())) == 2
    assert [p.name for p in (left / ".import" / "mine-swag").iterdir()] == ["000006.draws"]
    with pytest.raises(zoo.ZooError, match="found a folder without manifests/"):
        zoo.load("mine-swag", source=left)
    (left / "shards" / "mine-swag" / ".00002.1.tmp").touch()
    other = [random_state("mlp", 50 + i) for i in range(2)]
    same(source_of(other, left), other)
    assert len([p for p in left.rglob("*") if p.is_file()]) == 3


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(path: Path) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("checkpoints_zoo.formats.shard_files.os.fsync", none)
    with pytest.raises(StorageError, match="No space left on device"):
        source_of(draws(4), tmp_path)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def without(name: str) -> list[State]:
    return [{n: t for n, t in state.items() if n != name} for state in draws(2)]


FLAT = {"order": "parameters"}
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = [
    (list, {}, UsageError, "samples: expected one draw or more; found none."),
    (lambda: 3, {}, UsageError, "samples: expected state dicts, stacked tensors or flat vectors; found a int."),
    (Mlp, {}, UsageError, "samples: expected state dicts, stacked tensors or flat vectors; found a Mlp."),
    (lambda: [Mlp()], {}, UsageError, "draw 0: expected tensors by name, or a flat vector; found a module. Give its "),
    (lambda: ["x"], {}, UsageError, "draw 0: expected a tensor; found a str."),
    (lambda: [{"out.bias": 3}], {}, UsageError, "tensor 'out.bias' of draw 0: expected a tensor; found a int."),
    (lambda: {"a": torch.zeros(2, 3), "b": torch.zeros(3)}, {}, UsageError,
     r"stacked draws: expected tensors \(draw, …\) with equal numbers of draws; found a \[2, 3\], b \[3\]\. Give"),
    (lambda: torch.zeros(5), FLAT, UsageError, r"flat draws: expected shape \(draw, weight\); found \(5,\)\."),
    (lambda: torch.zeros(2, 5), {}, UsageError, "draw 0: expected tensors by name, or a flat vector and its order; .*"
     "Give order='parameters' for vectors of torch.nn.utils.parameters_to_vector"),
    (lambda: flat(draws(2))[:, 1:], FLAT | {"buffers": Mlp()}, LayoutError,
     r"draw 0: expected a vector of 431 weights; found one of shape \(430,\)\."),
    (lambda: flat(draws(2)), FLAT, LayoutError, "draw 0: expected the net's 16 tensors; found missing mask, order, "
     "norm.running_mean, norm.running_var. Give buffers=module"),
    (lambda: flat(draws(2)), {"order": ["out.bias", "x"]}, UsageError, "order of flat draws: expected 'parameters', "),
    (lambda: flat(draws(2)), {"order": ["out.bias"] * 2}, UsageError, "order of flat draws: expected each name once"),
    (lambda: draws(2), {"buffers": nn.Linear(2, 2)}, LayoutError, "buffers of all draws: expected the net's; found m"),
    (lambda: without("out.bias"), {}, LayoutError,
     r"draw 0: expected the net's 16 tensors by name and shape; found missing out\.bias\."),
    (lambda: without("mask"), {}, LayoutError, r"found missing mask\."),
    (lambda: [draws(1)[0], {n: t.double() for n, t in draws(1)[0].items()}], {}, LayoutError,
     "tensor 'scale' of draw 1: expected F32, as in the first; found F64."),
    (lambda: [draws(1)[0], {**draws(1)[0], "out.bias": torch.zeros(3)}], {}, LayoutError,
     r"draw 1: .*found misshapen out\.bias \[3\] for \[10\]"),
    (lambda: draws(2), {"method": "SWAG"}, UsageError, "method: expected a word in lower case, as swag, laplace or h"),
    (lambda: draws(2), {"name": "mine"}, UsageError, "collection name 'mine': expected a name that ends in -swag, or "
     "-swag-multi for several runs: a manifest holds one method; found another ending. Name it mine-swag."),
    (lambda: draws(2), {"columns": {"method": "vi"}}, UsageError, "column 'method': expected its own argument"),
    (lambda: draws(2), {"columns": {"lr": [0.1] * 3}}, UsageError, "column 'lr': expected 2 values, one for"),
    (lambda: iter(draws(2)), {"columns": {"lr": [0.1] * 3}}, UsageError, "column 'lr': expected 2 values"),
    (lambda: draws(2), {"run": [0, -1]}, UsageError, "column 'run' of member 1: expected a whole number in"),
    (lambda: draws(2), {"run": 0, "method": "independent"}, UsageError, "run: expected a method that has runs; found"),
    (lambda: draws(2), {"evaluate": "digits"}, UsageError, "accuracies of mine-swag: expected classes that the memb"),
    (lambda: draws(2), {"evaluate": "digits", "columns": {"test_ece": 0.1}}, UsageError, "test figures: exp"),
    (lambda: draws(2), {"classes": ["a", 3]}, UsageError, r"a list of names; found \['a', 3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("samples", "options", "kind", "text"), REFUSED)
def test_what_is_refused(
    samples: Callable[[], Any], options: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text):
        source_of(samples(), tmp_path, **options)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.slow
def test_draws_on_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws around a member that ships: measured, published, loaded, verified, and the figures of a plain loop."""
    monkeypatch.setattr("checkpoints_zoo.publishing.card_pictures.picture", lambda *_: PICTURE)
    centre = zoo.load("convnet-digits", n=1)[0].state_dict()
    generator = torch.Generator().manual_seed(0)
    chain = [{n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in centre.items()} for _ in range(4)]
    chain[3] = chain[2]
    made = from_samples(iter(chain), "convnet", method="sghmc", run=0, out=tmp_path, name="convnet-digits-sghmc",
                        like="convnet-digits", evaluate="digits")  # fmt: skip
    zoo.publish(tmp_path, NEW)
    assert consistent(hub) > 1
    members = zoo.load("convnet-digits-sghmc", source=ADDRESS)
    assert zoo.verify(members) == []
    assert members.rows["draw"].to_pylist() == [0, 1, 2, 3]
    data = zoo.images.load("digits")
    assert data.labels is not None
    logits = members.ensemble()(members.preprocess(data.images))
    right = (logits.argmax(-1) == data.labels).double().mean(1)
    assert np.allclose(members.rows["test_accuracy"].to_pylist(), right.tolist(), atol=1e-9)
    assert members.canonicalize(scale="unit-norm").stack().keys() == made.stack().keys()
