"""Modules of members: against modules built by hand and loaded strictly; independent, like any other module."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import LayoutError, UsageError
from tests.support.scenarios import NETS, Built, Mlp, build, digest_of, five, hand_made, inputs, load, raw


@pytest.fixture(scope="module", params=list(NETS))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return five(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def members(built: Built) -> Collection:
    return load(built)


def test_state_dict_is_what_was_stored(members: Collection, built: Built) -> None:
    for member in members:
        state = member.state_dict()
        wanted = built.states[member.id, 40]
        counters = {
            n for n in NETS[built.description["architecture"]]().state_dict() if n.endswith("num_batches_tracked")
        }
        assert set(state) == set(wanted) | counters
        assert {n: (t.dtype, raw(t)) for n, t in state.items() if n in wanted} == {
            n: (t.dtype, raw(t)) for n, t in wanted.items()
        }
        assert all(state[n].dtype == torch.int64 and state[n] == 0 for n in counters)
        NETS[built.description["architecture"]]().load_state_dict(state, strict=True)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_model_equals_a_module_built_by_hand(
    members: Collection, built: Built, dtype: torch.dtype, bound: float
) -> None:
    x = inputs(dtype=dtype)
    for member in members:
        model, wanted = member.model(dtype=dtype), hand_made(built, member.id, dtype)
        assert not model.training
        assert type(model) is type(wanted)
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in wanted.named_parameters()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in wanted.named_buffers()]
        assert list(model.state_dict()) == list(wanted.state_dict())
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        logits = wanted(x)
        assert (model(x) - logits).abs().max() <= bound * logits.abs().max()


def test_training_one_model_changes_no_other_and_no_file(members: Collection, built: Built) -> None:
    before = digest_of(built.root)
    one, twin = members[1].model(), members[1].model()
    stacked = members.stack()
    x = inputs(16)
    one.train()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        one(x).square().mean().backward()
        assert all(p.grad is not None for p in one.parameters() if p.numel())
        optimizer.step()
    assert not torch.equal(one.eval()(x), twin(x))
    assert torch.equal(twin(x), hand_made(built, 1)(x))
    assert torch.equal(members[1].model()(x), twin(x))
    assert {n: raw(t[1]) for n, t in stacked.items()} == {n: raw(t) for n, t in built.states[1, 40].items()}
    assert digest_of(built.root) == before


def test_a_model_is_a_module_like_any_other(members: Collection, tmp_path: Path) -> None:
    model, x = members[0].model(), inputs()
    logits = model(x)
    other = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(other(x), logits)
    assert torch.equal(loaded(x), logits)
    calls: list[int] = []
    handle = next(other.children()).register_forward_hook(lambda *_: calls.append(1))
    other(x)
    members[0].model()(x)  # hooks of one are not another's
    handle.remove()
    other(x)
    assert calls == [1]
    assert other.double()(x.double()).dtype == torch.float64


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    members = load(build(tmp_path, "mlp"))
    model = members[0].model()
    assert model.again.weight is model.tied.weight
    assert model.again.weight is not members[1].model().again.weight
    assert copy.deepcopy(model).again.weight is not model.again.weight


def test_where_tied_tensors_differ_the_last_counts_as_in_a_strict_load(tmp_path: Path) -> None:
    built = build(tmp_path, "mlp", change=lambda member, state: state.update({"tied.weight": state["tied.weight"] + 1}))
    members, x = load(built), inputs()
    wanted = torch.stack([hand_made(built, m)(x) for m in members.ids])
    assert torch.equal(torch.stack([m.model()(x) for m in members]), wanted)
    assert torch.equal(members.ensemble()(x), wanted)


# Architectures of the user's own


class Table(Mlp):
    """Buffers outside the state dict, values looked at while it builds, containers and functions as attributes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, 10), persistent=False)
        self.counts: dict[str, int] = defaultdict(int)
        self.parts = [self.inside, self.out]
        self.act = torch.tanh
        self.shift = lambda x: x + 1

    def forward(self, images: Tensor) -> Tensor:
        self.counts["calls"] += 1
        assert self.parts == [self.inside, self.out]
        logits: Tensor = self.shift(self.act(super().forward(images))) * self.table
        return logits


class Looks(Table):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.table[0].item()
        self.widths = [int(w) for w in torch.tensor([5.0, 5.0])]


@pytest.mark.parametrize("kind", [Table, Looks])
def test_what_a_module_keeps_outside_its_state_dict(tmp_path: Path, kind: type[Table]) -> None:
    built = build(tmp_path, "mlp")
    members = zoo.load("tiny", source=tmp_path, architecture=kind)
    for dtype in (torch.float32, torch.float64):
        x = inputs(dtype=dtype)
        wanted = []
        for m in members.ids:
            module = kind().eval().to(dtype)
            module.load_state_dict(built.states[m, 40], strict=False)
            wanted.append(module(x))
        logits = torch.stack(wanted)
        models = [m.model(dtype=dtype) for m in members]
        bound = 1e-12 if dtype == torch.float64 else 1e-5
        for found in (
            torch.stack([m(x) for m in models]),
            members.ensemble(dtype=dtype)(x),
            members.ensemble().to(dtype)(x),
        ):
            assert found.dtype == dtype
            assert (found - logits).abs().max() <= bound * logits.abs().max()
        assert models[0].table is not models[1].table
        assert models[0].counts is not models[1].counts
        assert models[0].parts[0] is models[0].inside
    half = inputs(dtype=torch.float16)
    for net in (members.ensemble(dtype=torch.float16), members[0].model(dtype=torch.float16)):
        assert net(half).dtype == torch.float16


def test_the_skeleton_has_no_memory_and_is_built_once(tmp_path: Path) -> None:
    built, calls = build(tmp_path, "mlp"), []

    def counted() -> nn.Module:
        calls.append(1)
        return Mlp()

    members = zoo.load("tiny", source=built.root, architecture=counted)
    for m in (*members, *members[1:]):
        m.model()
    members.ensemble()
    assert len(calls) == 1
    assert all(t.is_meta for t in members._skeleton().state_dict().values())


def test_one_layout_a_member_where_they_differ(tmp_path: Path) -> None:
    """Two widths in one collection: no stack, but each member's own module."""
    built = build(tmp_path, "mlp", [0, 1])
    wide = Mlp(7)
    narrow = built.description["layouts"]["only"]
    tensors = [[n, d, [7 if s == 5 else s for s in shape]] for n, d, shape in narrow["tensors"]]
    nbytes = sum(t.numel() * t.element_size() for n, t in wide.state_dict().items() if "num_batches" not in n)
    built.description["layouts"]["a"] = {**narrow, "tensors": tensors, "pad": -nbytes % 8}
    built.rows[1] |= {"layout": "a", "nbytes": nbytes + -nbytes % 8}
    built.write()
    members = load(built)
    assert members[0].model()(inputs()).shape == (7, 10)
    with pytest.raises(
        LayoutError, match=r"^architecture for tiny: expected the layout's 16 tensors by name and shape; found missh"
    ):
        members[1].model()


@pytest.mark.parametrize(
    ("architecture", "found"),
    [
        (Mlp(), "Mlp("),
        ("convnet", "'convnet'"),
        (3, "3"),
        (lambda: None, "None"),
        (lambda: Mlp, "<class 'tests.support.scenarios.Mlp'>"),
    ],
)
def test_architectures_that_are_none(tmp_path: Path, architecture: object, found: str) -> None:
    members = zoo.load("tiny", source=build(tmp_path, "mlp").root, architecture=architecture)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        members.ensemble()
    assert str(caught.value) == (
        f"architecture for tiny: expected a function that returns a torch.nn.Module; found {found}."
    )


class Other(Mlp):
    def __init__(self) -> None:
        super().__init__(6)
        self.more = nn.Linear(2, 2)
        del self.scale


def test_an_architecture_that_does_not_fit(tmp_path: Path) -> None:
    members = zoo.load("tiny", source=build(tmp_path, "mlp").root, architecture=Other)
    for use in (members.ensemble, members[0].model, members._skeleton):
        with pytest.raises(LayoutError) as caught:
            use()
        assert str(caught.value) == (
            "architecture for tiny: expected the layout's 16 tensors by name and shape; found missing scale;"
            " extra more.weight, more.bias; misshapen order [6] for [5], inside.weight [6, 64] for [5, 64],"
            " inside.bias [6] for [5], norm.weight [6] for [5], norm.bias [6] for [5] and 8 more."
            " Give the architecture with which these members were trained."
        )
        assert caught.value.tensor == "scale"
    assert members.stack()["scale"].shape == (4,)  # weights need no architecture


def test_an_error_of_the_architecture_itself_comes_through(tmp_path: Path) -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no such option")

    members = zoo.load("tiny", source=build(tmp_path, "mlp").root, architecture=broken)
    with pytest.raises(RuntimeError, match=r"^no such option$"):
        members.ensemble()


@pytest.mark.parametrize(
    "arguments", [{"name": 1}, {"classes": 10, "self": 2}, {"classes": "ten"}, {"classes": 10**9}, {"channels": [1]}]
)
def test_arguments_in_a_description_that_cannot_be(tmp_path: Path, arguments: dict[str, object]) -> None:
    built = build(tmp_path)
    built.description["arguments"] = arguments
    built.write()
    with pytest.raises(
        UsageError, match=r"^a(rchitecture 'convnet'|rgument '.*' of architecture 'convnet'): expected "
    ):
        load(built).ensemble()


def test_a_net_the_package_lacks(tmp_path: Path) -> None:
    members = zoo.load("tiny", source=build(tmp_path, "mlp").root)
    with pytest.raises(UsageError, match=r"^architecture 'my-mlp' of tiny: expected one of the package's \(convnet, "):
        members.ensemble()
