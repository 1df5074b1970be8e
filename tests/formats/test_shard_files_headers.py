"""Headers of safetensors files: what the library writes is read, and what it refuses is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import (
    LARGEST_HEADER_NBYTES,
    guess_kind,
    header_length,
    parse_header,
    read_header,
    shard_header,
)
from tests.support.scenarios import file_bytes, random_state, raw, stored

GOOD = {
    "a": ("F32", [2], bytes(8)),
    "b": ("F16", [3], bytes(6)),
    "none": ("I64", [0, 4], b""),
    "c": ("BOOL", [], b"\1"),
}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {n: t.contiguous() for n, t in stored(random_state("resnet8", 0), torch.float16).items()}
    save_file(tensors, tmp_path / "f", metadata={"z": "1", "a": "ü"})
    header = read_header(tmp_path / "f")
    assert header.metadata == {"z": "1", "a": "ü"}
    content = (tmp_path / "f").read_bytes()[header.data_start :]
    assert set(header.tensors) == set(tensors)
    for name, (_, shape, begin, end) in header.tensors.items():
        assert shape == tuple(tensors[name].shape)
        assert content[begin:end] == raw(tensors[name])


def test_reads_a_file_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(file_bytes(GOOD, metadata=False))
    header = read_header(tmp_path / "f")
    assert header.data_start == 4096
    assert header.metadata == {}
    assert dict(header.tensors) == {
        "a": ("F32", (2,), 0, 8),
        "b": ("F16", (3,), 8, 14),
        "none": ("I64", (0, 4), 14, 14),
        "c": ("BOOL", (), 14, 15),
    }


@pytest.mark.parametrize("members", [0, 1, 2, 31, 400])
def test_shard_header_is_padded_with_spaces(members: int) -> None:
    layout = Layout.of([("weight", "F16", (3,))])
    header = shard_header(layout, [f"{m:06d}/" for m in range(members)])
    length = struct.unpack("<Q", header[:8])[0]
    text = header[8:]
    assert len(header) % 4096 == 0
    assert len(text) == length
    assert text.rstrip(b" ") == text[: text.rindex(b"}") + 1]
    assert len(text) - len(text.rstrip(b" ")) < 4096
    assert len(json.loads(text)) == 1 + 2 * members


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "a Git LFS pointer, not the"
            " file it points to"),
        (b"<!DOCTYPE html><html><head>", "a web page"),
        (b"\n\n  <HTML lang='en'>", "a web page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code>", "a web page"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00", "a zip archive (a torch pickle perhaps)"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a Python pickle"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "a gzip file"),
        (b"", ""),
        (b"{}", ""),
        (b'\x1f\x8b\x08\x00\x00\x00\x00\x00{"a":', ""),  # a header of 559,903 bytes
        (file_bytes(GOOD)[:512], ""),
    ],
)  # fmt: skip
def test_what_a_file_is(first: bytes, kind: str) -> None:
    assert guess_kind(first) == kind


def test_a_cut_file_is_noticed_wherever_it_is_cut(tmp_path: Path) -> None:
    content = file_bytes(GOOD)
    path = tmp_path / "f"
    for size in [*range(0, 600, 7), *range(4000, len(content))]:
        path.write_bytes(content[:size])
        with pytest.raises(
            DamagedError,
            match=r"found too few bytes for a header|a header length of 4,088|the file is cut|offsets within",
        ):
            read_header(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(DamagedError, match=r"expected 15 bytes of tensors; found 16: the file is cut, or more was app"):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1, LARGEST_HEADER_NBYTES + 1, 2**31, 2**63, 2**64 - 1, 4096])
def test_a_header_length_that_cannot_be(length: int) -> None:
    content = struct.pack("<Q", length) + file_bytes(GOOD)[8:]
    with pytest.raises(DamagedError) as caught:
        header_length(content, len(content) - 60, "FILE")
    assert str(caught.value) == (
        f"file FILE: expected a safetensors header within its {len(content) - 60:,} bytes; found a header length of"
        f" {length:,}. The file is cut or no safetensors file; get it again."
    )


def framed(text: bytes, body: bytes = bytes(15)) -> bytes:
    return struct.pack("<Q", len(text)) + text + body


def values() -> dict[str, Any]:
    content = file_bytes(GOOD, metadata=False)
    parsed: dict[str, Any] = json.loads(content[8:4096])
    return parsed


HUGE = int("9" * 4000)
TENSOR = "tensor 'a' in the header of FILE: expected "
JSON = "header of FILE: expected JSON with dtype, shape and data_offsets of each tensor; found "
DAMAGED = [
    ({"dtype": "F31"}, TENSOR + "a dtype among F64, "), ({"dtype": ["F32"]}, TENSOR + "a dtype among F64, "),
    ({"dtype": {}}, TENSOR + "a dtype among F64, "), ({"dtype": None}, TENSOR + "a dtype among F64, "),
    ({"dtype": "F64"}, TENSOR + "16 bytes for F64 [2]; found offsets [0, 8]. Get the file again."),
    ({"shape": [3]}, TENSOR + "12 bytes for F32 [3]; found offsets [0, 8]. Get the file again."),
    ({"shape": [2**59]}, TENSOR + "2,305,843,009,213,693,952 bytes for F32 [576460752303423488]; found offsets [0,"
                                  " 8]."),
    *(({"shape": s}, JSON) for s in ([-2], [-2, -1], [2.0], [True, 2], ["2"], "2", 2, None, [[2]], [HUGE, HUGE],
                                     [2**64], [2**40, 2**40], [0, 2**63], [1] * 70 + [2])),
    *(({"data_offsets": o}, JSON) for o in ([0], [0, 8, 9], [0.0, 8], [False, 8], "08", None, 8, [None, 8], [0, [8]],
                                            {})),
    ({"data_offsets": [8, 0]}, "tensor '"), ({"data_offsets": [-8, 0]}, TENSOR + "offsets that start at 0; found"
        " [-8, 0], which overlaps"),
    ({"data_offsets": [4, 12]}, "tensor '"), ({"data_offsets": [HUGE, HUGE + 8]}, "tensor '"),
    ({"data_offsets": [2**63, 2**63 + 8]}, "tensor '"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), DAMAGED, ids=lambda v: str(v)[:40])
def test_a_tensor_that_cannot_be(change: dict[str, Any], text: str) -> None:
    header = values()
    header["a"].update(change)
    content = framed(json.dumps(header).encode())
    with pytest.raises(DamagedError) as caught:
        parse_header(content, len(content), "FILE")
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 9000


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([4, 10], "tensor 'b' in the header of FILE: expected offsets that start at 8; found [4, 10], which overlaps"
                  " the tensor before."),
        ([9, 15], "tensor 'b' in the header of FILE: expected offsets that start at 8; found [9, 15], which leaves a"
                  " hole after the tensor before."),
    ],
)  # fmt: skip
def test_overlaps_and_holes(offsets: list[int], text: str) -> None:
    header = values()
    header["b"]["data_offsets"] = offsets
    content = framed(json.dumps(header).encode())
    with pytest.raises(DamagedError) as caught:
        parse_header(content, len(content), "FILE")
    assert str(caught.value) == text + " Get the file again."


@pytest.mark.parametrize(
    "text",
    [
        b"", b"xx", b"12", b"null", b'"a"', b"[1]", b'{"a"', b'{"a": 1}', b'{"a": {}}', b'{"a": {"dtype": "F32"}}',
        b'{"\xff": 1}', '{"a": 1}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', b'{"__metadata__": []}',
        b'{"__metadata__": {"a": 1}}', b'{"__metadata__": "a"}', b'{"__metadata__": null}',
    ],
    ids=lambda t: repr(t)[:40],
)  # fmt: skip
def test_json_that_is_no_header(text: bytes) -> None:
    content = framed(text)
    with pytest.raises(DamagedError, match=r"^header of FILE: expected JSON|^file FILE: expected a safetensors header"):
        parse_header(content, len(content), "FILE")


def test_nesting_of_any_depth_is_an_error_of_ours() -> None:
    for depth in range(1, 1100, 3):
        shape = b"[" * depth + b"]" * depth
        content = framed(b'{"a":{"dtype":"F32","shape":' + shape + b',"data_offsets":[0,15]}}')
        with pytest.raises(DamagedError):
            parse_header(content, len(content), "FILE")


@given(st.lists(st.tuples(st.integers(0, 4110), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_is_accepted_the_library_accepts_too(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(file_bytes(GOOD))
    length = len(content[:4096].rstrip(b" "))
    for at, value in changes:
        content[at if at >= 4096 else at % length] = value
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(content)
    try:
        ours = read_header(path)
    except DamagedError:
        return
    try:
        with safe_open(path, framework="np") as file:
            assert set(file.keys()) == set(ours.tensors)
    except SafetensorError as error:  # pragma: no cover
        pytest.fail(f"accepted, but the library refuses it: {error}")
