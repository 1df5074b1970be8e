"""The store: views where members lie evenly in one file, copies otherwise; against tensors stacked one by one."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.collection import reading
from checkpoints_zoo.collection.reading import read_vectors, stack
from checkpoints_zoo.errors import DamagedError, LayoutError, TooLargeError, UsageError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location, hash_members
from checkpoints_zoo.networks import device as devices
from tests.support.scenarios import Built, State, build, file_bytes, hash_of, raw

HALF, FULL, WIDE, BRAIN = torch.float16, torch.float32, torch.float64, torch.bfloat16


def located(built: Built, members: list[int] | None = None) -> list[Location]:
    return zoo.load(built.name, source=built.root, members=members)._locations()


def looped(built: Built, members: list[int], dtype: torch.dtype | None = None) -> State:
    """Stack tensors one by one; statistics in float32 or wider."""
    states = [built.states[m, 40] for m in members]
    out = {}
    for name in states[0]:
        rows = torch.stack([s[name] for s in states])
        if dtype is not None and rows.is_floating_point():
            statistic = name.endswith(("running_mean", "running_var"))
            rows = rows.to(WIDE if dtype == WIDE else FULL) if statistic else rows.to(dtype)
        out[name] = rows
    return out


def assert_same(found: State, wanted: State) -> None:
    """Bit for bit, dtypes and order too."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def is_view(stacked: State, built: Built, members: list[int]) -> bool:
    """Whether all tensors lie in memory as they lie in the file."""
    rows = {r["member"]: r for r in built.rows}
    step = rows[members[1]]["offset"] - rows[members[0]]["offset"] if len(members) > 1 else None
    tensors = [t for t in stacked.values() if t.numel()]
    base, at = tensors[0].data_ptr(), 0
    for t in tensors:
        if t.data_ptr() - base != at or (step is not None and t.stride(0) * t.element_size() != step):
            return False
        at += t[0].numel() * t.element_size()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("net", ["convnet", "resnet8", "mlp"])
@pytest.mark.parametrize("weights", [HALF, FULL, BRAIN, WIDE])
@pytest.mark.parametrize("members", [[0, 1, 2, 3, 4], [2], [1, 2], [0, 2, 4], [1, 4]])
def test_evenly_spaced_members_are_a_view(tmp_path: Path, net: str, weights: torch.dtype, members: list[int]) -> None:
    built = build(tmp_path, net, range(5), weights=weights)
    stacked = stack(located(built, members))
    assert_same(stacked, looped(built, members))
    assert is_view(stacked, built, members)
    assert_same(stack(located(built, members), check=True), looped(built, members))


COPIES: dict[str, tuple[list[int], int]] = {
    "reversed": ([4, 3, 2, 1, 0], 100),
    "scattered": ([0, 1, 3], 100),
    "the first of one file and the second of another": ([0, 3], 2),
    "several files": ([0, 1, 2, 3, 4], 2),
    "several files, shuffled": ([3, 0, 4, 2, 1], 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", ["resnet8", "mlp"])
@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("dtype", [None, FULL, WIDE])
def test_unevenly_spaced_members_are_copies(tmp_path: Path, net: str, case: str, dtype: torch.dtype | None) -> None:
    members, per_shard = COPIES[case]
    built = build(tmp_path, net, range(5), weights=HALF, per_shard=per_shard)
    stacked = stack(located(built, members), dtype=dtype)
    assert_same(stacked, looped(built, members, dtype))
    assert all(t.is_contiguous() for t in stacked.values())


@pytest.mark.parametrize("dtype", [None, FULL])
@pytest.mark.parametrize("large_pages", [1, 2**22])
def test_groups_of_scattered_members_against_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, large_pages: int
) -> None:
    """Members are read in groups of three; a group has members of several shards."""
    built = build(tmp_path, "resnet8", range(14), weights=HALF, per_shard=5)
    monkeypatch.setattr(reading, "GROUP_BYTES", 3 * built.rows[0]["nbytes"])
    monkeypatch.setattr(reading, "NUMPY_LARGE_PAGES_BYTES", large_pages)
    members = [12, 3, 0, 9, 6, 7, 8, 13]
    files = {path: safetensors.torch.load_file(built.root / path) for path in {row["path"] for row in built.rows}}
    path_of = {row["member"]: row["path"] for row in built.rows}
    states = [
        {n.removeprefix(f"{m:06d}/"): t for n, t in files[path_of[m]].items() if n.startswith(f"{m:06d}/")}
        for m in members
    ]
    found = stack(located(built, members), dtype=dtype)
    vectors = read_vectors(located(built, members), FULL)
    for row, state in enumerate(states):
        for name, tensor in found.items():
            wanted = state[name] if dtype is None or "running" in name else state[name].to(dtype)
            assert (tensor.dtype, raw(tensor[row])) == (wanted.dtype, raw(wanted)), name
        assert raw(vectors[row]) == raw(torch.cat([state[name].float().flatten() for name in found]))


def test_one_tensor_that_is_not_finite_in_a_group(tmp_path: Path) -> None:
    def spoil(member: int, state: State) -> None:
        if member in (4, 6):
            state["fc.bias"][-2:] = float("inf")

    built = build(tmp_path, "resnet8", range(8), weights=HALF, per_shard=3, change=spoil)
    for read in (lambda x: stack(x, dtype=FULL), lambda x: read_vectors(x, FULL)):
        with pytest.raises(DamagedError) as caught:
            read(located(built, [1, 6, 4, 0]))
        assert str(caught.value) == (
            "tensor 'fc.bias' of member 6: expected finite weights; found 2 that are not, as torch.float32. Leave the"
            " member out, or ask its producer."
        )
        assert len(read(located(built, [7, 1, 0]))) > 0


@pytest.mark.parametrize("weights", [HALF, FULL, BRAIN, WIDE])
@pytest.mark.parametrize("dtype", [HALF, FULL, BRAIN, WIDE])
def test_dtypes(tmp_path: Path, weights: torch.dtype, dtype: torch.dtype) -> None:
    built = build(tmp_path, "mlp", [0, 1, 2], weights=weights)
    stacked = stack(located(built), dtype=dtype)
    assert_same(stacked, looped(built, [0, 1, 2], dtype))
    assert stacked["norm.running_var"].dtype == (WIDE if dtype == WIDE else FULL)
    assert (stacked["mask"].dtype, stacked["order"].dtype) == (torch.bool, torch.int64)


def test_a_large_variance_stays_finite_in_a_stack_of_halves(tmp_path: Path) -> None:
    def large(member: int, state: State) -> None:
        state["bn1.running_var"].fill_(70_000.0 + member)

    built = build(tmp_path, "resnet8", [0, 1], weights=HALF, change=large)
    for dtype in (None, HALF, BRAIN):
        assert stack(located(built), dtype=dtype)["bn1.running_var"][1].tolist() == [70_001.0] * 8


def test_writing_to_a_view_changes_neither_the_file_nor_another_view(tmp_path: Path) -> None:
    built = build(tmp_path)
    before = hashlib.sha256(built.shard.read_bytes()).hexdigest()
    one, other = stack(located(built)), stack(located(built))
    for tensor in one.values():
        tensor.zero_()
    assert_same(other, looped(built, [0, 1, 2, 3]))
    assert hashlib.sha256(built.shard.read_bytes()).hexdigest() == before
    del other
    built.shard.unlink()  # the map keeps what it shows
    assert not one["fc1.weight"].any()


def test_a_view_holds_no_file_open_and_saves_no_more_than_itself(tmp_path: Path) -> None:
    built = build(tmp_path, members=range(30))
    opened = Path("/proc/self/fd")
    before = len(list(opened.iterdir())) if opened.exists() else 0
    kept = [stack(located(built, [m])) for m in range(30)]
    if before:
        assert len(list(opened.iterdir())) == before
    torch.save(kept[3], tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 3 * built.rows[0]["nbytes"]
    assert_same(torch.load(tmp_path / "one.pt", weights_only=True), looped(built, [3]))


def test_several_layouts(tmp_path: Path) -> None:
    built = build(tmp_path / "a", "resnet8", [0, 1], weights=HALF)
    other = build(tmp_path / "b", "resnet8", [2, 3], weights=FULL)
    shutil.copytree(other.root / "shards", built.root / "shards", dirs_exist_ok=True)
    built.rows += [{**r, "layout": "full"} for r in other.rows]
    built.states |= other.states
    built.description["layouts"]["full"] = other.description["layouts"]["only"]
    built.write()
    order = [3, 0, 1, 2]
    wanted = {n: t.to(FULL) for n, t in looped(built, order, FULL).items()}
    found = stack(located(built, order))
    assert {n: raw(t) for n, t in found.items()} == {n: raw(t) for n, t in wanted.items()}
    assert hash_members(located(built)) == [hash_of(built.states[m, 40]) for m in (0, 1, 2, 3)]
    vectors = torch.cat([t.flatten(1) for t in wanted.values()], 1)
    assert raw(read_vectors(located(built, order), FULL)) == raw(vectors)


@pytest.mark.parametrize("buffer_bytes", [8, 100, 5_000, 30_000])
@pytest.mark.parametrize("dtype", [FULL, HALF, None])
def test_members_larger_than_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(reading, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(reading, "GROUP_BYTES", buffer_bytes)
    built = build(tmp_path, "mlp", range(5), weights=HALF, per_shard=3)
    assert_same(stack(located(built, [4, 0, 1, 2]), dtype=dtype), looped(built, [4, 0, 1, 2], dtype))
    vectors = [torch.cat([t.to(WIDE).flatten() for t in built.states[m, 40].values()]) for m in (4, 0, 1, 2)]
    assert raw(read_vectors(located(built, [4, 0, 1, 2]), WIDE)) == raw(torch.stack(vectors))


def test_a_member_of_several_megabytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(700, 1000), "b": torch.randn(3)}
    (tmp_path / "f").write_bytes(file_bytes({f"000000/{n}": ("F32", t.shape, raw(t)) for n, t in tensors.items()}))
    layout = Layout.of([("a", "F32", (700, 1000)), ("b", "F32", (3,))])
    found = stack([Location(0, "000000/", tmp_path / "f", 4096, dataclasses.replace(layout, pad=0))], dtype=WIDE)
    assert_same(found, {n: t.double()[None] for n, t in tensors.items()})


def test_tensors_at_any_byte(tmp_path: Path) -> None:
    """As in an archive: an odd order, no pad, members at odd bytes."""
    tensors: State = {
        "m": torch.tensor([True]),
        "w": torch.tensor([1.5, 2.5]),
        "h": torch.tensor([1.0, 2.0, 3.0]).half(),
    }
    rows = [{n: t * k if t.is_floating_point() else t for n, t in tensors.items()} for k in (1, 2, 3)]
    kinds = {"m": "BOOL", "w": "F32", "h": "F16"}
    content = file_bytes(
        {f"{i:06d}/{n}": (kinds[n], t.shape, raw(t)) for i, r in enumerate(rows) for n, t in r.items()}
    )
    (tmp_path / "f").write_bytes(content)
    layout = Layout.from_json(
        {"tensors": [[n, kinds[n], list(t.shape)] for n, t in tensors.items()], "counters": [], "pad": 0}
    )
    locations = [Location(i, f"{i:06d}/", tmp_path / "f", 4096 + 15 * i, layout) for i in range(3)]
    for chosen in (locations, locations[:1], locations[1:2], locations[::-1]):
        assert_same(stack(chosen), {n: torch.stack([rows[x.member][n] for x in chosen]) for n in tensors})
    assert hash_members(locations) == [hash_of(r) for r in rows]


def test_names(tmp_path: Path) -> None:
    built = build(tmp_path, "mlp", weights=HALF)
    wanted = looped(built, [0, 1, 2, 3], FULL)
    for names in (["out.bias"], ["norm.running_var", "again.weight", "scale"], [], iter(["nothing"])):
        chosen = list(names)
        assert_same(stack(located(built), dtype=FULL, tensor_names=chosen), {n: wanted[n] for n in chosen})
        assert list(stack(located(built), tensor_names=chosen)) == chosen
    with pytest.raises(
        UsageError, match=r"^tensor 'fc': expected a name among order, norm.running_mean, norm.running_v"
    ):
        stack(located(built), tensor_names=["fc"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2, "float16", float])
def test_bad_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(UsageError) as caught:
        stack(located(build(tmp_path)), dtype=dtype)
    assert str(caught.value) == (
        f"dtype of stacked weights: expected torch.float64, float32, float16 or bfloat16; found {dtype!r}."
    )


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", "meta", 3.5, None, ""])
def test_missing_devices_are_refused(tmp_path: Path, device: str) -> None:
    members = zoo.load("tiny", source=build(tmp_path).root)
    for use in (
        members.stack,
        members.ensemble,
        lambda d: members.batches(2, d),
        members[0].state_dict,
        members[0].model,
    ):
        with pytest.raises(UsageError) as caught:
            use(device)
        assert str(caught.value).startswith(f"device '{device}': expected a device of this machine; found ")
        assert "\n" not in str(caught.value)


def test_more_memory_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, weights=HALF)  # 4 members of 3,658 weights
    monkeypatch.setattr(devices, "free_bytes", lambda device: 40_000)
    asked: list[object] = []
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: asked.append(a) if "meta" not in str(k) and a != (0,) else Tensor()
    )
    with pytest.raises(TooLargeError) as caught:
        stack(located(built), dtype=FULL)
    assert asked == []
    assert str(caught.value) == (
        "4 stacked members on cpu: expected at most 40,000 bytes, the memory that is free; found 58,528."
        " Use .batches(1), a smaller dtype, or fewer members."
    )


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 10 bytes")

    built = build(tmp_path, "mlp")
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    assert_same(stack(located(built)), looped(built, [0, 1, 2, 3]))


def test_many_threads_read_at_once(tmp_path: Path) -> None:
    built = build(tmp_path, "convnet", range(8), weights=HALF, per_shard=3)
    locations = located(built)
    barrier = threading.Barrier(8)

    def read(i: int) -> tuple[list[int], State]:
        barrier.wait()
        members = [(i * 3 + k) % 8 for k in range(5)]
        return members, stack([locations[m] for m in members], dtype=FULL)

    with ThreadPoolExecutor(8) as pool:
        for members, found in pool.map(read, range(8)):
            assert_same(found, looped(built, members, FULL))


def test_members_with_other_tensors_do_not_stack(tmp_path: Path) -> None:
    one = located(build(tmp_path / "a", "convnet", [0]))
    other = located(build(tmp_path / "b", "mlp", [1]))
    with pytest.raises(
        LayoutError,
        match=r"^member 1 beside member 0: expected the layout's 8 tensors by name and shape; found missing conv1",
    ):
        stack(one + other)


def test_integers_of_two_kinds_do_not_stack(tmp_path: Path) -> None:
    kinds = {"U16": bytes(2), "I32": bytes(4)}
    locations = []
    for i, (kind, values) in enumerate(kinds.items()):
        (tmp_path / kind).write_bytes(file_bytes({f"{i:06d}/n": (kind, [1], values)}))
        locations.append(
            Location(i, f"{i:06d}/", tmp_path / kind, 4096, dataclasses.replace(Layout.of([("n", kind, (1,))]), pad=0))
        )
    assert stack(locations[:1])["n"].dtype == torch.uint16
    with pytest.raises(LayoutError) as caught:
        stack(locations)
    assert str(caught.value) == "tensor 'n': expected one dtype in all members; found torch.uint16 and torch.int32."
