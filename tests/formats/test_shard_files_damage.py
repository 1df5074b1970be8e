"""Damaged shards, kind by kind: an error of ours that says what came, and changes nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_zoo.errors import DamagedError, SourceNotFound, ZooError
from checkpoints_zoo.formats.shard_files import check_against_files, hash_members
from tests.support.refusals import HTML, PICKLE, POINTER, refused
from tests.support.scenarios import Built, State, build, load, raw

NESTED = b"[" * 100_000


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A source of four members that a test may damage."""
    return build(tmp_path / "source", weights=torch.float16)


def uses(built: Built) -> list[Callable[[], object]]:
    """Every way to read members' bytes: as a view, as a copy, one alone, streamed, hashed, as vectors."""
    return [
        lambda: load(built).stack(),
        lambda: load(built).stack(dtype=torch.float64),
        lambda: load(built)[0].state_dict(),
        lambda: load(built)[0].model(),
        lambda: list(load(built).batches(3)),
        lambda: load(built).ensemble(),
        lambda: load(built).dataset()[0],
    ]


def test_a_layout_of_terabytes_is_refused_before_memory_is_asked_for(built: Built) -> None:
    built.description["layouts"]["only"]["tensors"][4] = ["fc1.weight", "F16", [2**38, 64]]
    nbytes = 7320 - 2 * 32 * 64 + 2 * 2**38 * 64
    built.rows = [r | {"nbytes": nbytes} for r in built.rows]
    built.write()
    text = (
        "member 0 in file ROOT/SHARD: expected tensor '000000/fc1.weight', F16 [274877906944, 64] at 2496, as the"
        " manifest"
        " says; found F16 [32, 64] at 2496. Manifest and file do not belong together; get the source again."
    )
    for use in uses(built)[:3]:
        refused(built, use, text)
    text = f"file ROOT/SHARD: expected {4096 + nbytes:,} bytes or more; found 33,376. Get the file again."
    refused(built, lambda: hash_members(load(built)._locations()), text)


AGAIN = " Get the file again."
CONTENTS: list[tuple[bytes, str]] = [
    (b"", "file ROOT/SHARD: expected a safetensors header within its 0 bytes; found too few bytes for a header. The"
          " file is cut or no safetensors file; get it again."),
    (HTML, "file ROOT/SHARD: expected a safetensors file; found a web page." + AGAIN),
    (b"  \n" + HTML.lower(), "file ROOT/SHARD: expected a safetensors file; found a web page." + AGAIN),
    (POINTER, "file ROOT/SHARD: expected a safetensors file; found a Git LFS pointer, not the file it points"
              " to." + AGAIN),
    (PICKLE, "file ROOT/SHARD: expected a safetensors file; found a zip archive (a torch pickle perhaps)." + AGAIN),
    (b"\x80\x02}q\x00." + bytes(100), "file ROOT/SHARD: expected a safetensors file; found a Python pickle." + AGAIN),
    (b"\x1f\x8b\x08\x00" + bytes(100), "file ROOT/SHARD: expected a safetensors file; found a gzip file." + AGAIN),
    (bytes(5000), "file ROOT/SHARD: expected a safetensors header within its 5,000 bytes; found a header length of"
                  " 0. The file is…"),
    (b"\xff" * 5000, "file ROOT/SHARD: expected a safetensors header within its 5,000 bytes; found a header length"
                     " of 18,446,744,073,709,551,615.…"),
    (struct.pack("<Q", 100_000) + NESTED, "header of ROOT/SHARD: expected JSON with dtype, shape and data_offsets of"
                                          " each tensor; found RecursionError(…"),
    (struct.pack("<Q", 2) + b"{}", "member 0 in file ROOT/SHARD: expected tensor '000000/conv1.weight', F16 [8, 1,"
                                   " 3, 3] at 4086, as the manifest says; found no such tensor.…"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("content", "text"), CONTENTS, ids=lambda v: repr(v)[:30])
def test_a_shard_that_is_something_else(built: Built, content: bytes, text: str) -> None:
    built.shard.write_bytes(content)
    for use in uses(built):
        error = refused(built, use, text)
        assert isinstance(error, DamagedError)
        assert error.path == str(built.shard)


@pytest.mark.slow
def test_a_shard_cut_anywhere(built: Built) -> None:
    content = built.shard.read_bytes()
    for size in [*range(20), *range(20, len(content), 991), len(content) - 1]:
        built.shard.write_bytes(content[:size])
        for use in uses(built)[:3]:
            with pytest.raises(
                DamagedError, match=r"^(file|header of|tensor '.*' in the header of) .*safetensors: expected"
            ):
                use()


def test_a_shard_that_is_missing(built: Built) -> None:
    built.shard.unlink()
    text = (
        "file SHARD of source file://ROOT: expected a file, since the manifest names it; found no such file. Get"
        " the source again, or select members of other files."
    )
    for use in uses(built):
        assert type(refused(built, use, text)) is SourceNotFound
    built.shard.mkdir()
    refused(built, uses(built)[0], text)


def test_a_shard_that_is_a_link_out_of_the_source(built: Built) -> None:
    outside = built.root.parent / "outside"
    built.shard.rename(outside)
    built.shard.symlink_to(outside)
    text = f"path 'SHARD' in a manifest of file://ROOT: expected a file inside the source; found a link to {outside}."
    for use in uses(built):
        refused(built, use, text)


def rewrite(built: Built, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of the shard, keeping its length."""
    content = built.shard.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    built.shard.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


MEMBER = "member 1 in file ROOT/SHARD: expected tensor '000001/"
NOT_TOGETHER = " Manifest and file do not belong together; get the source again."
HEADERS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda h: h.update({"000001/conv9.bias": h.pop("000001/conv1.bias")}), MEMBER + "conv1.bias', F16 [8] at 7464,"
        " as the manifest says; found no such tensor." + NOT_TOGETHER),
    (lambda h: h["000001/conv1.bias"].update(dtype="BF16"), MEMBER + "conv1.bias', F16 [8] at 7464, as the manifest"
        " says; found BF16 [8] at 7464." + NOT_TOGETHER),
    (lambda h: h["000001/conv1.bias"].update(shape=[2, 4]), MEMBER + "conv1.bias', F16 [8] at 7464, as the manifest"
        " says; found F16 [2, 4] at 7464." + NOT_TOGETHER),
    (lambda h: h["000001/conv1.bias"].update(dtype="I16"), MEMBER + "conv1.bias', F16 [8] at 7464, as the manifest"
        " says; found I16 [8] at 7464." + NOT_TOGETHER),
    (lambda h: h["000001/conv1.bias"].update(shape=[9]), "tensor '000001/conv1.bias' in the header of ROOT/SHARD:"
        " expected 18 bytes for F16 [9]; found offsets [7464, 7480]." + AGAIN),
    (lambda h: h["000001/conv1.bias"].update(dtype="F8"), "tensor '000001/conv1.bias' in the header of ROOT/SHARD:"
        " expected a dtype among F64, …"),
    (lambda h: h["000001/conv1.bias"].update(data_offsets=[7448, 7464]), "tensor '000001/conv1.bias' in the header"
        " of ROOT/SHARD: expected offsets that start at 7464; found [7448, 7464], which overlaps the tensor"
        " before." + AGAIN),
    (lambda h: h["000001/conv1.bias"].update(data_offsets=[-16, 0]), "tensor '000001/conv1.bias' in the header of"
        " ROOT/SHARD: expected offsets that start at 0; found [-16, 0], which overlaps the tensor before." + AGAIN),
    (lambda h: h["000001/conv1.bias"].update(data_offsets=[2**62, 2**62 + 16]), "tensor '000001/conv2.weight' in the"
        " header of ROOT/SHARD: expected offsets that start at 7464; found [7480, 9784], which leaves a hole after"
        " the tensor before." + AGAIN),
    (lambda h: h.pop("000003/_pad"), "header of ROOT/SHARD: expected 29,276 bytes of tensors; found 29,280: the file"
                                     " is cut, or more was appended." + AGAIN),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), HEADERS, ids=lambda v: str(v)[-90:-20])
def test_a_header_that_does_not_fit(built: Built, change: Callable[[dict[str, Any]], object], text: str) -> None:
    rewrite(built, change)
    for use in (uses(built)[i] for i in (0, 1, 4, 5)):
        refused(built, use, text)


@pytest.mark.parametrize("offset", [0, 8, 4095, 4096 + 8, 33_376, 2**40, 2**63 - 1])
def test_an_offset_that_points_elsewhere(built: Built, offset: int) -> None:
    built.rows[1]["offset"] = offset
    built.write()
    text = (
        f"{MEMBER}conv1.weight', F16 [8, 1, 3, 3] at {offset - 4096}, as the manifest says; found F16 [8, 1, 3,"
        f" 3] at 7320.{NOT_TOGETHER}"
    )
    for use in (uses(built)[i] for i in (0, 1, 4, 5)):
        error = refused(built, use, text)
        assert (error.member, error.tensor) == (1, "conv1.weight")


def test_two_members_at_one_place(built: Built) -> None:
    built.rows[1]["offset"] = built.rows[0]["offset"]
    built.write()
    refused(
        built,
        uses(built)[0],
        f"{MEMBER}conv1.weight', F16 [8, 1, 3, 3] at 0, as the manifest says; found F16 [8, 1, 3, 3] at"
        f" 7320.{NOT_TOGETHER}",
    )


def test_changed_bytes_are_told_by_the_hash(built: Built) -> None:
    content = bytearray(built.shard.read_bytes())
    content[built.rows[2]["offset"] + 100] ^= 1
    built.shard.write_bytes(content)
    members = load(built)
    check_against_files(members._locations())  # the header is as it was
    claimed = members.manifest["sha256"].tolist()
    assert [a == b for a, b in zip(hash_members(members._locations()), claimed, strict=True)] == [
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("net", "tensor"), [("convnet", "fc2.bias"), ("resnet8", "layer2.0.bn1.running_var"), ("mlp", "scale")]
)
def test_weights_that_are_not_finite(tmp_path: Path, value: float, net: str, tensor: str) -> None:
    def spoil(member: int, state: State) -> None:
        if member >= 2:
            state[tensor].view(-1)[0] = value

    built = build(tmp_path, net, weights=torch.float16, change=spoil)
    members = load(built)
    assert not torch.isfinite(members.stack()[tensor]).all()  # a view is not looked at
    half = "torch.float32" if tensor.endswith("running_var") else "torch.float16"
    for use, kind in (
        (members.ensemble, "torch.float32"), (lambda: members.stack(dtype=torch.float64), "torch.float64"),
        (members[::-1][1:].stack, half), (lambda: list(members.batches(3)), half), (members[2].state_dict, half),
        (members[2].model, "torch.float32"), (lambda: members.dataset()[2], "torch.float32"),
    ):  # fmt: skip
        error = refused(
            built,
            use,
            f"tensor {tensor!r} of member 2: expected finite weights; found 1 that are not, as {kind}. Leave the"
            f" member out, or ask its producer.",
        )
        assert (error.member, error.tensor) == (2, tensor)
    members[:2].ensemble()


def test_a_variance_that_float16_made_infinite(tmp_path: Path) -> None:
    """As upstream stores them: statistics in float16, 70,000 became inf."""
    built = build(tmp_path, "resnet8", [0], change=lambda m, s: s["bn1.running_var"].fill_(70_000.0))
    name = built.rows[0]["path"]
    content = built.shard.read_bytes()
    kept = {n: t.half() if t.is_floating_point() else t for n, t in built.states[0, 40].items()}
    assert kept["bn1.running_var"].isinf().all()
    body = b"".join(raw(t) for t in kept.values())
    header, at = {}, 0
    for n, t in kept.items():
        header[f"000000/{n}"] = {"dtype": "F16", "shape": list(t.shape), "data_offsets": [at, at + t.numel() * 2]}
        at += t.numel() * 2
    text = json.dumps(header).encode()
    built.shard.write_bytes(struct.pack("<Q", len(text)) + text + body)
    assert built.shard.read_bytes() != content
    layout = built.description["layouts"]["only"]
    layout |= {"tensors": [[n, "F16", list(t.shape)] for n, t in kept.items()], "pad": 0}
    built.rows[0] |= {"offset": 8 + len(text), "nbytes": at, "dtype": "F16", "path": name}
    built.write()
    refused(
        built,
        load(built).ensemble,
        "tensor 'bn1.running_var' of member 0: expected finite weights; found 8 that are not, as torch.float32. Leave…",
    )


def test_a_layout_with_other_tensors_than_the_file(built: Built) -> None:
    tensors = built.description["layouts"]["only"]["tensors"]
    cases = {
        "missing in the file": [*tensors[:-1], ["fc2.offset", "F16", [10]]],
        "misshapen": [*tensors[:-1], ["fc2.bias", "F16", [2, 5]]],
        "another order": [*tensors[:-2], tensors[-1], tensors[-2]],
        "another dtype": [*tensors[:-1], ["fc2.bias", "BF16", [10]]],
    }
    for changed in cases.values():
        built.description["layouts"]["only"]["tensors"] = changed
        built.write()
        refused(built, uses(built)[0], "member 0 in file ROOT/SHARD: expected tensor '000000/fc2…")


def test_a_layout_that_leaves_tensors_out(built: Built) -> None:
    layout = built.description["layouts"]["only"]
    layout["tensors"].pop()  # fc2.bias, the last one: 20 bytes
    built.rows = [r | {"nbytes": 7300 - 4} for r in built.rows]
    layout["pad"] = 0
    built.write()
    text = (
        "architecture for tiny: expected the layout's 7 tensors by name and shape; found extra fc2.bias. Give the"
        " architecture with which these members were trained."
    )
    refused(built, load(built).ensemble, text)


@pytest.mark.slow
def test_a_random_walk_of_damage(built: Built) -> None:
    """Whatever is changed in the shard, either the members come out or an error of ours."""
    generator = torch.Generator().manual_seed(0)
    content = built.shard.read_bytes()
    length = len(content[:4096].rstrip(b" "))
    for _ in range(120):
        changed = bytearray(content)
        for at, value in torch.randint(0, 2**20, (2, 2), generator=generator).tolist():
            changed[at % length] = value % 256
        built.shard.write_bytes(changed)
        try:
            load(built).stack(dtype=torch.float32)
        except ZooError:
            continue
