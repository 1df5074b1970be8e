"""Layouts and shards: written = read by safetensors' own reader, same tensors same bytes, one range a member."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from checkpoints_zoo.collection.reading import stack
from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, UsageError
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.layout import ELEMENT_BYTES, Layout, content_hash, tensors_not_finite
from checkpoints_zoo.formats.shard_files import Location, hash_members, members_per_shard, tensor_prefix, write_shard
from checkpoints_zoo.networks.modules import DTYPE_NAMES, layout_of, pack_member
from tests.support.scenarios import State, hash_of, opened, random_state, raw, stored

LABELS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in ("_pad", "__metadata__") and not name.endswith("num_batches_tracked")
)
SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
DTYPES = st.sampled_from([*DTYPE_NAMES.keys() - {torch.uint16, torch.uint32, torch.uint64}])


@st.composite
def states(draw: st.DrawFn) -> State:
    """A state dict with weights, integers, statistics, a counter; some scalars, some with nothing in them."""
    names = draw(st.lists(LABELS, min_size=1, max_size=6, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    state = {}
    for name in names:
        values = torch.randn(draw(SHAPES), generator=generator, dtype=torch.float64) * 50
        state[name] = values.to(draw(DTYPES))
    if draw(st.booleans()):
        state |= {f"bn.running_{n}": torch.rand(3, generator=generator) * 1e6 for n in ("mean", "var")}
        state["bn.num_batches_tracked"] = torch.tensor(7)
    return state


@pytest.mark.slow
@given(st.lists(states(), min_size=1, max_size=3), st.sampled_from([torch.float16, torch.float32]))
def test_written_is_read(tmp_path_factory: pytest.TempPathFactory, drawn: list[State], dtype: torch.dtype) -> None:
    first = drawn[0]  # the others: the same tensors, other values
    members = [first, *({n: torch.flip(t, [0] if t.dim() else []) for n, t in first.items()} for _ in drawn[1:])]
    layout = layout_of(first, dtype)
    keys = [tensor_prefix(id) for id in range(5, 5 + len(members))]
    path = write_shard(
        tmp_path_factory.mktemp("s"),
        0,
        layout,
        [(k, pack_member(m, layout)) for k, m in zip(keys, members, strict=True)],
    )
    start = struct.unpack("<Q", path.read_bytes()[:8])[0] + 8
    assert start % 4096 == 0
    # safetensors' reader sees every tensor, rounded as the format says, and the pad.
    seen = opened(path)
    pads = {key + "_pad": torch.zeros(layout.pad, dtype=torch.uint8) for key in keys if layout.pad}
    wanted = {k + n: t for k, m in zip(keys, members, strict=True) for n, t in stored(m, dtype).items()} | pads
    facts = [{n: (t.dtype, t.shape, raw(t)) for n, t in state.items()} for state in (seen, wanted)]
    assert facts[0] == facts[1]
    # A member is one range without holes that starts at a multiple of 8; each tensor is aligned to its elements.
    header = json.loads(path.read_bytes()[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    at = 0
    for name, value in header.items():
        begin, end = value["data_offsets"]
        assert begin == at
        assert end % 8 == 0 if name.endswith("/_pad") else begin % ELEMENT_BYTES[value["dtype"]] == 0
        at = end
    assert at == len(path.read_bytes()) - start == layout.nbytes * len(members)
    locations = [Location(5 + i, k, path, start + i * layout.nbytes, layout) for i, k in enumerate(keys)]
    read = stack(locations)
    for i, m in enumerate(members):
        assert {n: raw(t[i]) for n, t in read.items()} == {n: raw(t) for n, t in stored(m, dtype).items()}
    assert hash_members(locations) == [hash_of(stored(m, dtype)) for m in members]


GOLDEN = (
    '{"__metadata__":{"format":"pt"},'
    '"000007/bn.running_var":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    '"000007/w":{"dtype":"F16","shape":[2],"data_offsets":[4,8]},'
    '"000007/mask":{"dtype":"BOOL","shape":[],"data_offsets":[8,9]},'
    '"000007/_pad":{"dtype":"U8","shape":[7],"data_offsets":[9,16]}}'
)
TINY = {
    "w": torch.tensor([1.0, -2.0]),
    "mask": torch.tensor(True),
    "bn.running_var": torch.tensor([70000.0]),
    "bn.num_batches_tracked": torch.tensor(3),
}


def test_golden_bytes(tmp_path: Path) -> None:
    layout = layout_of(TINY, torch.float16)
    path = write_shard(tmp_path, 3, layout, [("000007/", pack_member(TINY, layout))])
    body = bytes.fromhex("00b88847 003c00c0 01 00000000000000")  # 70000 in float32, 1 and -2 in float16, true
    wanted = struct.pack("<Q", 4088) + GOLDEN.encode().ljust(4088) + body
    assert path.read_bytes() == wanted
    assert path.name == f"00003-{hashlib.sha256(wanted).hexdigest()[:8]}.safetensors" == "00003-abb27330.safetensors"
    assert layout.counters == ("bn.num_batches_tracked",)
    # By hand: names in order, the counter left out, float16 widened.
    text = b'["bn.running_var","F32",[1]]\n' + bytes.fromhex("00b88847") + b'["mask","BOOL",[]]\n\x01'
    text += b'["w","F32",[2]]\n' + struct.pack("<2f", 1, -2)
    assert content_hash(layout, body) == hashlib.sha256(text).hexdigest()


def test_same_tensors_same_bytes_in_any_memory_format(tmp_path: Path) -> None:
    def written(state: State, folder: str) -> bytes:
        layout = layout_of(state, torch.float16)
        return write_shard(tmp_path / folder, 0, layout, [("000000/", pack_member(state, layout))]).read_bytes()

    plain = {"conv": torch.randn(4, 3, 2, 2), "fc": torch.randn(5, 6), "row": torch.randn(1, 6).repeat(3, 1)}
    others = {
        "conv": plain["conv"].to(memory_format=torch.channels_last),
        "fc": plain["fc"].T.contiguous().T,
        "row": plain["row"][:1].expand(3, 6),
    }
    sliced = {n: torch.stack([t, t], -1)[..., 1] for n, t in plain.items()}
    grown = {n: torch.nn.Parameter(t.double()) for n, t in plain.items()}
    assert not any(t.is_contiguous() for t in others.values())
    files = {written(state, str(i)) for i, state in enumerate((plain, others, sliced, grown))}
    assert len(files) == 1


def hashed(tensors: State, tmp_path: Path) -> str:
    """Hash tensors as the safetensors library lays them out in a file of its own."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    content = path.read_bytes()
    start = struct.unpack("<Q", content[:8])[0] + 8
    header = json.loads(content[8:start])
    order = sorted(header.items(), key=lambda pair: pair[1]["data_offsets"])
    layout = Layout.from_json({"tensors": [[n, v["dtype"], v["shape"]] for n, v in order], "counters": [], "pad": 0})
    return content_hash(layout, content[start:])


@pytest.mark.parametrize("net", ["convnet", "resnet8", "mlp"])
def test_content_hash_is_the_same_however_a_member_is_stored(net: str, tmp_path: Path) -> None:
    state = random_state(net, 3)
    half = stored(state, torch.float16)
    wanted = hash_of(half)
    layout = layout_of(state, torch.float16)
    assert content_hash(layout, pack_member(state, layout)) == wanted
    assert hashed(half, tmp_path) == wanted
    wide = {n: t.float() if t.is_floating_point() else t for n, t in half.items()}
    assert hashed(wide, tmp_path) == wanted
    assert hashed({"a.num_batches_tracked": torch.tensor(3), **half}, tmp_path) == wanted
    brain = {n: t.bfloat16() if t.dtype == torch.float16 else t for n, t in half.items()}
    widened = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in brain.items()}
    assert hashed(brain, tmp_path) == hashed(widened, tmp_path) == hash_of(widened)


def test_content_hash_tells_what_differs(tmp_path: Path) -> None:
    base = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3, 4])}
    others = [
        {**base, "a": torch.tensor([[1.0, np.nextafter(np.float32(2), np.float32(3))]])},
        {**base, "a": base["a"].double()},
        {**base, "a": base["a"].T},
        {**base, "b": base["b"].int()},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"]},
        {**base, "a": torch.tensor([[1.0, 2.0]]) * torch.tensor(-1.0)},
    ]
    assert len({hashed(s, tmp_path) for s in (base, *others)}) == len(others) + 1


@given(states(), st.sampled_from([torch.float16, torch.float64]))
def test_layout_survives_json(state: State, dtype: torch.dtype) -> None:
    layout = layout_of(state, dtype)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([("_pad", "F32", (2,))], "tensor '_pad': expected another name: '_pad' is the format's own."),
        ([], "layout: expected one tensor or more, every name once; found no tensors."),
        ([("a", "F32", ()), ("a", "F32", ())], "layout: expected one tensor or more, every name once; found a name"
            " twice."),
        (
            [("a", "F8_E4M3", ())],
            "tensor 'a': expected a dtype among F64, I64, U64, F32, I32, U32, F16, BF16, I16, U16, I8, U8, BOOL;"
            " found F8_E4M3.",
        ),
    ],
)  # fmt: skip
def test_layout_refuses(tensors: list[tuple[str, str, tuple[int, ...]]], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Layout.of(tensors)
    assert str(caught.value) == text
    with pytest.raises(UsageError, match=r"^tensor 'a': expected a dtype among F64, .*; found torch.c"):
        layout_of({"a": torch.zeros(2).cfloat()}, torch.float32)


ONE = [["a", "F32", [2]]]


@pytest.mark.parametrize(
    "values",
    [
        None, 3, [], "x", {}, {"tensors": ONE, "counters": []}, {"tensors": [], "counters": [], "pad": 0},
        *({"tensors": ONE, "counters": [], "pad": pad} for pad in (-1, 8, True, 1.0, "0", None)),
        *({"tensors": ONE, "counters": c, "pad": 0} for c in ("abc", ["a"], [3], ["x.num_batches_tracked"] * 2)),
        *({"tensors": t, "counters": [], "pad": 0} for t in (
            "abc", ["abc"], {"abc": 1}, [["a", "F32"]], [["a", "F32", 2]], [["a", "F32", "2"]], [[1, "F32", [2]]],
            [["a", ["F32"], [2]]], [["a", "float32", [2]]], [["_pad", "U8", [2]]], ONE + ONE,
            [["a", "F32", [-1]]], [["a", "F32", [1.0]]], [["a", "F32", [True]]], [["a", "F32", [2**70]]],
            [["a", "F32", [2**31, 2**31]]], [["a", "F32", [0, 2**31, 2**31]]], [["a", "F32", [1] * 70]],
        )),
    ],
    ids=lambda v: repr(v)[:60],
)  # fmt: skip
def test_layout_from_a_damaged_description(values: object) -> None:
    with pytest.raises(FormatError, match=r"^layout: expected|^tensor "):
        Layout.from_json(values)


def test_members_per_shard() -> None:
    assert members_per_shard(Layout.of([("a", "F32", (2,))])) == 32_000
    assert members_per_shard(Layout.of([("a", "F32", (1,))])) == 16_000  # the pad is a tensor too
    assert members_per_shard(Layout.of([("a", "F32", (2,))]), most_snapshots=10) == 3_200
    assert members_per_shard(Layout.of([("a", "F32", (250_000_000,))])) == 2
    assert members_per_shard(Layout.of([("a", "F32", (250_000_002,))])) == 1
    assert members_per_shard(Layout.of([("a", "F64", (10**9,))]), most_snapshots=3) == 1
    assert members_per_shard(Layout.of([("a", "F32", (0,))])) == 32_000


def test_prefixes_never_collide() -> None:
    ids = [0, 1, 12, 999_999, 1_000_000, 1_234_567, 2**31 - 1]
    keys = [tensor_prefix(m, e) for m in ids for e in (None, 0, 1, 12, 2**31 - 1)]
    assert keys[:3] == ["000000/", "000000@0/", "000000@1/"]
    assert len(set(keys)) == len(keys)
    assert not any(a != b and b.startswith(a) for a in keys for b in keys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_found_and_not_packed(dtype: torch.dtype, value: float) -> None:
    state = {"a": torch.ones(3), "b": torch.tensor([[1.0, value]]), "n": torch.tensor([1, 2])}
    layout = layout_of(state, dtype)
    member = b"".join(raw(t) for t in stored(state, dtype).values())
    assert tensors_not_finite(layout, member) == ["b"]
    with pytest.raises(
        DamagedError, match=f"^tensor 'b': expected values that are finite as {DTYPE_NAMES[dtype]}; found inf"
    ):
        pack_member(state, layout)


def test_a_weight_too_large_for_float16_is_not_packed() -> None:
    state = {"w": torch.tensor([65504.0]), "bn.running_var": torch.tensor([1e9])}
    layout = layout_of(state, torch.float16)
    assert raw(torch.tensor([1e9])) in bytes(pack_member(state, layout))
    with pytest.raises(DamagedError) as caught:
        pack_member({**state, "w": torch.tensor([65520.0])}, layout)
    assert str(caught.value) == (
        "tensor 'w': expected values that are finite as F16; found infinite ones or NaN."
        " Leave the member out, or store it in a wider dtype."
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"w": None}, "missing w"),
        ({"new": torch.ones(1)}, "extra new"),
        ({"w": torch.ones(1, 2)}, "misshapen w [1, 2] for [2]"),
        ({"w": None, "mask": torch.ones(2), "new": torch.ones(1)}, "missing w; extra new; misshapen mask [2] for []"),
    ],
)  # fmt: skip
def test_pack_names_what_does_not_fit(change: dict[str, Tensor | None], found: str) -> None:
    state = {n: t for n, t in {**TINY, **change}.items() if t is not None}
    with pytest.raises(LayoutError) as caught:
        pack_member(state, layout_of(TINY, torch.float16))
    assert str(caught.value) == f"state dict: expected the layout's 3 tensors by name and shape; found {found}."


def test_a_shard_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(TINY, torch.float16)
    member = pack_member(TINY, layout)
    first = write_shard(tmp_path, 0, layout, [("000000/", member)])
    before = first.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path, 0, layout, [("000000/", member), ("000001/", member)])
    assert list(tmp_path.iterdir()) == [first]
    assert first.read_bytes() == before
    for members in ([("000000/", member)] * 2, [("000000/", member[:-1])]):
        with pytest.raises(
            UsageError, match=r"^members of shard 0: expected each once, with 16 bytes; found others\.$"
        ):
            write_shard(tmp_path, 0, layout, members)
