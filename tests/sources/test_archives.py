"""Archives on disk as a source, gzipped ones, hostile and damaged ones; Python's tarfile is the oracle."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, UsageError, ZooError
from checkpoints_zoo.formats import arrow_tables
from checkpoints_zoo.formats.layout import Layout, content_hash, is_counter
from checkpoints_zoo.formats.shard_files import hash_members
from checkpoints_zoo.sources.archives import (
    index_archive,
    rows_of_archives,
    source_of_archive,
    stream_members,
    walk_archive,
)
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, tensor_shapes
from checkpoints_zoo.sources.folder_source import FolderSource
from tests.support.archives import Counted, local_tar, tar_header

State = dict[str, Tensor]


def state(seed: int, architecture: str, counter: float | None = None, **arguments: Any) -> State:
    """Make a random float16 state dict under our names; counters are the one given, or left out."""
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(architecture, **arguments)
    weights = {n: torch.randn(s, generator=generator).half() for n, s in shapes.items() if not is_counter(n)}
    counters = {n: torch.tensor(counter or 0.0).half() for n in shapes if is_counter(n) and counter is not None}
    return weights | counters


def saved(ours: State, architecture: str, metadata: dict[str, str] | None = None) -> bytes:
    """Save a state dict with the safetensors library under upstream's names and shapes."""
    rule = KEY_MAPS[architecture]
    renamed = {}
    for name, tensor in ours.items():
        stored, shape = rule.translate_to_stored(name, tuple(tensor.shape))
        renamed[stored] = tensor.reshape(shape)
    return safetensors.torch.save(renamed, metadata)


def opened(path: Path) -> Collection:
    description, rows = source_of_archive(path)
    return Collection(FolderSource(path.parent, path.parent.as_uri()), "0" * 40, description, rows)


NORMED = [state(i, "resnet20-frn-silu", classes=10, conv_bias=False) for i in range(20)]
TEXT_ORDER = sorted(range(20), key=str)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "format", "before"),
    [
        (list(range(20)), tarfile.PAX_FORMAT, "cifar10-resnet20-frn-silu-0-19/"),
        (TEXT_ORDER, tarfile.GNU_FORMAT, "./"),
        (random.Random(1).sample(range(20), 20), tarfile.USTAR_FORMAT, ""),
        (list(range(20)), tarfile.GNU_FORMAT, "long/" * 30),
    ],
    ids=["pax", "gnu", "ustar shuffled", "gnu long names"],
)
def test_members_of_an_archive_are_the_originals(tmp_path: Path, order: list[int], format: int, before: str) -> None:
    files = [(f"{before}version_{i}.safetensors", saved(NORMED[i], "resnet20-frn-silu")) for i in order]
    if before.startswith("cifar10"):
        files = [(before, b""), (f"{before}._version_0.safetensors", b"\0\5\x16\7" * 40), *files, ("README", b"hi")]
    path = tmp_path / "cifar10-resnet20-frn-silu-0-19.tgz"
    path.write_bytes(local_tar(files, format))
    members = opened(path)
    assert (members.ids, members.description.architecture) == (list(range(20)), "resnet20-frn-silu")
    assert members.description.arguments == {"classes": 10, "conv_bias": False}
    for member, wanted in zip(members, NORMED, strict=True):
        found = member.state_dict()
        assert set(found) == set(wanted)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert {t.dtype for t in found.values()} == {torch.float16}
    stacked = members.stack()
    assert all(torch.equal(stacked[n][7], t) for n, t in NORMED[7].items())
    assert all(row["sha256"] is None and row["seed"] is None for row in members.rows.to_pylist())
    # The content hash does not know how a member is stored.
    ours = Layout.of([(n, "F16", tuple(t.shape)) for n, t in NORMED[4].items()])
    packed = b"".join(NORMED[4][t.name].numpy().tobytes() for t in ours.tensors)
    assert hash_members(members[4:5]._locations()) == [content_hash(ours, packed)]


@pytest.mark.slow
def test_members_of_an_archive_make_an_ensemble(tmp_path: Path) -> None:
    path = tmp_path / "a.tgz"
    path.write_bytes(local_tar([(f"v_{i}.safetensors", saved(NORMED[i], "resnet20-frn-silu")) for i in range(3)]))
    members = opened(path)
    images = torch.rand(2, 3, 32, 32)
    logits = members.ensemble()(images)
    assert torch.isfinite(logits).all()
    assert logits.shape == (3, 2, 10)
    with torch.inference_mode():
        assert torch.allclose(members[2].model()(images), logits[2], atol=1e-4)


def test_the_index_of_a_local_archive_counts_its_requests() -> None:
    raw = local_tar([(f"version_{i}.safetensors", saved(NORMED[i], "resnet20-frn-silu")) for i in range(20)])
    read = Counted(raw)
    found = index_archive(read, len(raw), "a.tgz")
    assert (len(found.entries), read.requests) == (20, 21)  # each member's headers, the end, and nothing twice
    assert read.bytes < 20 * 15_000 + 65_536


@pytest.mark.slow
@pytest.mark.parametrize("counter", [29_325.0, float("inf"), None])
def test_counters_of_an_archive_are_rebuilt(tmp_path: Path, counter: float | None) -> None:
    states = [state(i, "resnet18", counter, classes=10) for i in range(2)]
    path = tmp_path / "a.tgz"
    path.write_bytes(local_tar([(f"v_{i}.safetensors", saved(s, "resnet18")) for i, s in enumerate(states)]))
    members = opened(path)
    assert not any(is_counter(name) for name in members.stack())
    found = members[1].state_dict()
    counters = {n: t for n, t in found.items() if is_counter(n)}
    assert len(counters) == 20
    assert all(t.dtype == torch.int64 and t.item() == 0 for t in counters.values())
    assert all(torch.equal(found[n], t) for n, t in states[1].items() if not is_counter(n))
    members[1].model().load_state_dict(found, strict=True)
    assert not any(is_counter(name) for name in members.dataset(labels=("member",)).spans)
    with pytest.raises(UsageError, match="a name among"):
        members.stack(names=["bn1.num_batches_tracked"])


SMALL = {"classes": 10, "hidden": None}


def small(seed: int, metadata: dict[str, str] | None = None) -> bytes:
    return saved(state(seed, "optunet", **SMALL), "optunet", metadata)


def test_members_with_other_headers_each_have_their_layout(tmp_path: Path) -> None:
    contents = [small(0), small(1, {"seed": "1"}), small(2, {"seed": "22222222"}), b"\x93NUMPY" * 100, small(4)]
    other = saved(state(5, "optunet", classes=10, hidden=3), "optunet")
    path = tmp_path / "nets.tar"
    path.write_bytes(local_tar([(f"n{i}.safetensors", c) for i, c in enumerate([*contents, other])]))
    description, rows = source_of_archive(path)
    assert rows.column("status").to_pylist() == ["ok", "ok", "ok", "failed", "ok", "excluded"]
    assert "expected a safetensors header within its 600 bytes" in rows.column("reason").to_pylist()[3]
    assert rows.column("reason").to_pylist()[5] == "a optunet with {'classes': 10, 'hidden': 3}"
    assert len(description.layouts) == 3
    members = opened(path)
    stacked = Collection(members.source, "0" * 40, description, arrow_tables.take_rows(rows, [0, 1, 2, 4])).stack()
    for at, seed in enumerate([0, 1, 2, 4]):
        assert all(torch.equal(stacked[n][at], t) for n, t in state(seed, "optunet", **SMALL).items())
    values = next(iter(description.layouts.values())).to_json()
    first = values["tensors"][0]
    for bad in ([*first[:3], 5, [1]], [*first[:3], "a", [-1]], [*first[:3], "a"], [*first, 1, 2]):
        with pytest.raises(FormatError):
            Layout.from_json({**values, "tensors": [bad]})
    for header_nbytes in (-1, 2.0, True, 2**60):
        with pytest.raises(FormatError):
            Layout.from_json({**values, "lead": header_nbytes})
    again = {key: Layout.from_json(layout.to_json()) for key, layout in description.layouts.items()}
    assert again == description.layouts


def test_another_file_where_a_member_was_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nets.tar"
    path.write_bytes(local_tar([(f"n{i}.safetensors", small(i)) for i in range(3)]))
    members = opened(path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"conv2.weight", members.rows.column("offset")[0].as_py())
    raw[at : at + 5] = b"conv7"
    path.write_bytes(raw)
    with pytest.raises(DamagedError) as caught:
        members.stack()
    assert str(caught.value) == (
        f"header of member 1 in file {path}: expected tensor 'conv2.weight', F16 [10, 1, 5, 5] at 64; "
        "found no tensor 'conv2.weight'. Index the archive again."
    )
    path.write_bytes(raw[: members.rows.column("offset")[1].as_py() + 5])
    with pytest.raises(DamagedError, match=r"^member 1 in file .*: expected bytes .*; found a file of"):
        members[1].state_dict()


@pytest.mark.slow
def test_a_gzipped_archive_is_streamed(tmp_path: Path) -> None:
    contents = {f"net/version_{i}.safetensors": small(i) for i in range(300)}
    raw = local_tar([("net/", b""), ("net/README", b"hi"), *contents.items()], mode="w:gz")
    found = index_archive(Counted(raw), len(raw), "a.tgz")
    assert (found.kind, found.entries) == ("gzip", ())
    streamed = {
        name: whole for name, header, whole in stream_members(io.BytesIO(raw), "a.tgz") if len(header.tensors) == 4
    }
    assert streamed == contents
    for cut in (5, 30, len(raw) // 2, len(raw) - 9, len(raw) - 1):
        with pytest.raises(DamagedError, match=r"^archive a.tgz at byte"):
            list(stream_members(io.BytesIO(raw[:cut]), "a.tgz"))
    changed = bytearray(raw)
    changed[len(raw) // 2] ^= 0x55
    with pytest.raises(DamagedError):
        list(stream_members(io.BytesIO(changed), "a.tgz"))
    bomb = gzip.compress(tar_header("v_1.safetensors", 2**33) + b"\x20\0\0\0\0\0\0\0{" + bytes(10**6))
    with pytest.raises(DamagedError):
        list(stream_members(io.BytesIO(bomb), "a.tgz"))
    (tmp_path / "a.tgz").write_bytes(raw)
    with pytest.raises(
        UsageError, match="expected an uncompressed tar, whose members can be read by byte ranges; found a gzipped"
    ):
        source_of_archive(tmp_path / "a.tgz")


def by_tarfile(raw: bytes) -> dict[str, tuple[int, int]]:
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        return {m.name.removeprefix("./"): (m.offset_data, m.size) for m in tar if m.isreg()}


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/\\"), min_size=1, max_size=150)


@pytest.mark.slow
@given(
    names=st.lists(NAMES.map(lambda n: f"d/x{n}1.safetensors"), min_size=1, max_size=5, unique=True),
    format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    foreign=st.lists(st.integers(0, 3000), max_size=3),
)
def test_places_are_those_that_tarfile_finds(names: list[str], format: int, foreign: list[int]) -> None:
    files = [*((name, small(i)) for i, name in enumerate(names)), *((f"f{i}", bytes(n)) for i, n in enumerate(foreign))]
    random.Random(len(files)).shuffle(files)
    raw = local_tar(files, format)
    found = walk_archive(Counted(raw), len(raw), "a.tar")
    wanted = {n: place for n, place in by_tarfile(raw).items() if n.startswith("d/")}
    assert {
        e.name: (
            e.data_offset,
            found.headers[e.header_number].header_nbytes + found.headers[e.header_number].payload_nbytes,
        )
        for e in found.entries
    } == wanted


PLAIN = local_tar([(f"version_{i}.safetensors", small(i)) for i in range(2)], tarfile.GNU_FORMAT)
END = 2 * (512 + -(-len(small(0)) // 512) * 512)


@pytest.mark.slow
def test_a_cut_archive_is_damaged_wherever_it_is_cut() -> None:
    whole = walk_archive(Counted(PLAIN), len(PLAIN), "a.tar").entries
    for cut in range(END + 1100):
        if cut >= END + 512:
            assert walk_archive(Counted(PLAIN[:cut]), cut, "a.tar").entries == whole
        else:
            with pytest.raises(DamagedError):
                index_archive(Counted(PLAIN[:cut]), cut, "a.tar", threads=1)


@pytest.mark.slow
def test_changed_bytes_never_lead_out_or_on_for_ever() -> None:
    rng = random.Random(5)
    for _ in range(1500):
        raw = bytearray(PLAIN)
        for _ in range(rng.choice((1, 1, 2, 20))):
            raw[rng.randrange(END)] = rng.choice((0, 0x20, 0x30, 0x37, 0x80, 0xFF, rng.randrange(256)))
        read = Counted(bytes(raw))
        try:
            found = walk_archive(read, len(raw), "a.tar")
            rows_of_archives({"a.tar": found})
        except (DamagedError, LayoutError):
            continue
        assert all(0 < e.data_offset < len(raw) for e in found.entries)
        assert read.requests <= 2 * (len(found.entries) + len(found.others)) + 4


def test_files_that_are_no_members_are_reported_and_passed() -> None:
    size = len(small(0))
    bad: list[tuple[str, dict[str, Any]]] = [
        *(("../../etc/x.safetensors", {}), ("/abs/x.safetensors", {}), ("a/../b.safetensors", {})),
        *(("l.safetensors", {"type": kind, "linkname": "/etc/passwd", "size": 0}) for kind in (b"1", b"2", b"3", b"6")),
        *(("q.safetensors", {"type": b"Q"}), ("empty.safetensors", {"size": 0})),
    ]
    body = small(0).ljust(-(-size // 512) * 512, b"\0")
    parts = [
        tar_header(n, f.pop("size", size), **f) + (body if "x" in n or "b.s" in n or "q" in n else b"") for n, f in bad
    ]
    raw = b"".join(parts) + tar_header("good_1.safetensors", size) + body + bytes(512 * 5000)
    found = index_archive(Counted(raw), len(raw), "a.tar")
    assert [e.name for e in found.entries] == ["good_1.safetensors"]
    out = "a name that leads out of the archive's folder"
    links = ["a hard link", "a symbolic link", "a device", "a pipe"]
    assert [o.reason for o in found.others] == [out] * 3 + links + ["of the unknown kind 'Q'", "an empty file"]
    with pytest.raises(ZooError, match="expected safetensors files in the tar; found none among 1 files"):
        index_archive(Counted(parts[0] + bytes(2048)), len(parts[0]) + 2048, "a.tar")
    twice = local_tar([("v_1.safetensors", small(0)), ("v_1.safetensors", small(1))])
    found = index_archive(Counted(twice), len(twice), "a.tar")
    assert found.entries[0].data_offset == by_tarfile(twice)["v_1.safetensors"][0]
    assert found.others[0].reason == "a later file has the same name"
