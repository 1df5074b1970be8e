"""Members read chunk by chunk: the same logits, the next chunk meanwhile, smaller chunks when memory is short."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import DamagedError, SmallerChunk, TooLargeError, UsageError
from checkpoints_zoo.networks import device as devices
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.ensemble import Stream, members_in_chunk
from checkpoints_zoo.networks.ensemble.executions import Runner
from tests.support.scenarios import build, hand_made, inputs, load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def members() -> zoo.Collection:
    return zoo.load("resnet8-digits", n=7)


@pytest.fixture(scope="module")
def digits(members: zoo.Collection) -> Tensor:
    return members.preprocess(zoo.images.load("digits").images[:4])


def short(limit: int, kind: type[BaseException] = MemoryError, words: str = "") -> Callable[..., Tensor]:
    """Let runs of more than `limit` members fail for want of memory."""
    run = Runner.run

    def failing(self: Runner, *arguments: object) -> Tensor:
        if self.member_count > limit:
            raise kind(words)
        return run(self, *arguments)  # type: ignore[arg-type]

    return failing


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_give_the_same_logits(members: zoo.Collection, digits: Tensor, chunk: int) -> None:
    wanted = torch.stack([m.model()(digits) for m in members])
    ens = members.ensemble(chunk=chunk)
    for _ in range(2):
        assert (ens(digits) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (ens.predict(digits) - wanted.softmax(-1).mean(0)).abs().max() <= 1e-6
    assert torch.equal(ens.flat(digits), ens(digits).flatten(0, 1))
    assert repr(ens) == f"Ensemble(7 × ResNet8, torch.float32, cpu, read {chunk} at a time)"
    parts = list(ens.parts())
    assert [p.ids for p in parts] == [members.ids[i : i + chunk] for i in range(0, 7, chunk)]
    assert torch.cat([p(digits) for p in parts]).shape == wanted.shape
    for some in (slice(1, 6), slice(None, None, -2)):
        part = ens[some]
        assert part.ids == members.ids[some]
        assert (part(digits) - wanted[list(range(7))[some]]).abs().max() <= 1e-5 * wanted.abs().max()
    assert (ens[-2](digits) - wanted[-2]).abs().max() <= 1e-5 * wanted.abs().max()


def test_chunks_move_and_have_no_weights_at_hand(members: zoo.Collection, digits: Tensor) -> None:
    ens = members.ensemble(chunk=3)
    assert ens.to(torch.float64) is ens
    assert (ens.dtype, ens(digits.double()).dtype) == (torch.float64, torch.float64)
    wanted = members.ensemble(dtype=torch.float64)(digits.double())
    assert (ens(digits.double()) - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    with pytest.raises(UsageError) as caught:
        ens.stacked  # noqa: B018
    assert str(caught.value) == (
        "stacked weights of an ensemble: expected members in memory; found Ensemble(7 × ResNet8,"
        " torch.float64, cpu, read 3 at a time). Use .parts(), or members.batches(...)."
    )
    with pytest.raises(
        UsageError, match=r"^inputs of the ensemble: expected torch.float64 on cpu; found torch.float32"
    ):
        ens(digits)


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "3", True])
def test_chunks_that_are_none(members: zoo.Collection, chunk: int) -> None:
    with pytest.raises(UsageError) as caught:
        members.ensemble(chunk=chunk)
    assert str(caught.value) == (f"chunk of an ensemble: expected a whole number from 1, or None; found {chunk!r}.")


def test_a_damaged_member_is_named_by_its_id(tmp_path: Path) -> None:
    def huge(member: int, state: dict[str, Tensor]) -> None:
        if member == 3:
            for name in ("fc1.weight", "fc2.weight"):
                state[name].mul_(1e25)

    members = load(build(tmp_path, members=range(5), change=huge))
    with pytest.raises(DamagedError, match=r"^logits of members 3: expected finite numbers"):
        members.ensemble(chunk=2)(inputs())


def test_nothing_is_read_before_it_is_needed_and_the_next_chunk_while_one_is_used() -> None:
    events: list[str] = []
    following = threading.Event()

    def read(some: range, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
        events.append(f"read {some.start}")
        if some.start == 2:
            following.set()
        return {"w": torch.arange(some.start, some.stop)}

    stream = Stream(read, 5, 2, CPU, None)
    assert events == []

    def use(some: range, stacked: dict[str, Tensor]) -> list[int]:
        assert following.wait(10)  # the next one is on its way
        return stacked["w"].tolist()  # type: ignore[no-any-return]

    each = stream.map_chunks(use)
    assert next(each) == [0, 1]
    assert events == ["read 0", "read 2"]  # and no further than one ahead
    assert list(each) == [[2, 3], [4]]
    assert events == ["read 0", "read 2", "read 4"]


def test_an_error_of_the_reader_comes_through() -> None:
    def read(some: range, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
        raise DamagedError("file x", member=some.start)

    with pytest.raises(DamagedError, match=r"^file x\.$"):
        list(Stream(read, 5, 2, CPU, None).map_chunks(lambda some, stacked: stacked))


# Memory that is short


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MemoryError, ""),
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
def test_a_chunk_that_does_not_run_is_halved(
    members: zoo.Collection, digits: Tensor, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], words: str
) -> None:
    wanted = members.ensemble()(digits)
    monkeypatch.setattr(Runner, "run", short(2, kind, words))
    ens = members.ensemble(chunk=6, execution="loop")
    with pytest.warns(SmallerChunk) as caught:
        found = ens(digits)
    assert [str(w.message) for w in caught] == [
        "not enough memory on cpu for 6 members at once: 3 at a time from now on",
        "not enough memory on cpu for 3 members at once: 1 at a time from now on",
    ]
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with warnings.catch_warnings(action="error"):  # said once
        assert torch.equal(ens(digits), found)


def test_a_chunk_that_cannot_be_read_is_halved() -> None:
    def read(some: range, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
        if len(some) > 2 and some.start > 0:
            raise TooLargeError("chunk")
        return {"w": torch.arange(some.start, some.stop)}

    stream = Stream(read, 11, 4, CPU, None)
    with pytest.warns(SmallerChunk, match=r"^not enough memory on cpu for 4 members at once: 2 at a time from now on$"):
        found = list(stream.map_chunks(lambda some, stacked: stacked["w"].tolist()))
    assert found == [[0, 1, 2, 3], [4, 5], [6, 7], [8, 9], [10]]


def test_one_member_that_does_not_fit(members: zoo.Collection, digits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", short(0))
    for ens in (members[:1].ensemble(chunk=1), members[:1].ensemble()):
        with pytest.raises(TooLargeError) as caught:
            ens(digits)
        assert str(caught.value) == (
            "one member on cpu: expected memory for its weights and activations; found less than a batch of 4 needs."
            " Give a smaller batch."
        )


def test_other_errors_are_not_taken_for_a_want_of_memory(
    members: zoo.Collection, digits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "run", short(0, RuntimeError, "shapes"))
    for chunk in (None, 3):
        with pytest.raises(RuntimeError, match=r"^shapes$"):
            members.ensemble(chunk=chunk)(digits)


@pytest.mark.parametrize("execution", ["grouped", "vmap"])
def test_members_side_by_side_are_halved(
    members: zoo.Collection, digits: Tensor, monkeypatch: pytest.MonkeyPatch, execution: str
) -> None:
    run, tried = Runner.run, []

    def failing(self: Runner, choice: object, *arguments: object) -> Tensor:
        tried.append(choice.members_at_once)  # type: ignore[attr-defined]
        if tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, choice, *arguments)  # type: ignore[arg-type]

    wanted = members.ensemble()(digits)
    monkeypatch.setattr(Runner, "run", failing)
    ens = members.ensemble(execution=execution)
    with pytest.warns(SmallerChunk) as caught:
        found = ens(digits)
    assert len(caught) == 2
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    ens(digits)
    assert tried == [7, 3, 1, 1]


def test_members_beyond_memory_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16 that is widened can't stay in the file: 10 members of 3,658 weights are 146,320 bytes."""
    built = build(tmp_path, members=range(10), weights=torch.float16)
    wanted = torch.stack([hand_made(built, m)(inputs()) for m in range(10)])
    monkeypatch.setattr(devices, "free_bytes", lambda device: 100_000)
    with pytest.warns(SmallerChunk) as caught:
        ens = load(built).ensemble()
    assert [str(w.message) for w in caught] == [
        "not enough memory on cpu for 10 members: every call reads them, 1 at a time"
    ]
    assert (ens(inputs()) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    monkeypatch.setattr(devices, "free_bytes", lambda device: 10_000)
    with pytest.raises(TooLargeError):
        load(built).ensemble()


def test_how_many_members_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"a": torch.zeros(1, 100), "b": torch.zeros(1, 50, dtype=torch.float16)}  # 500 bytes
    for free, chunk in ((20_000, 10), (3_000, 1), (100, 1), (10**9, 64), (None, 64)):
        monkeypatch.setattr(devices, "free_bytes", lambda device, free=free: free)
        assert members_in_chunk(one, 64, CPU) == chunk


def test_a_view_of_the_members_is_streamed_as_it_is(members: zoo.Collection, digits: Tensor) -> None:
    seen = members.canonicalize(permute="norm")
    wanted = members.ensemble()(digits)
    for ens in (seen.ensemble(), seen.ensemble(chunk=3)):
        assert isinstance(ens, Ensemble)
        assert (ens(digits) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    part = next(members.canonicalize(permute="norm").ensemble(chunk=3).parts())
    assert torch.equal(part.stacked["conv1.weight"], seen.stack()["conv1.weight"][:3].float())
