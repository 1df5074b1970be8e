"""The index of true-sized archives that take no disk: few reads where regular, every member found where not."""

from __future__ import annotations

import json
import random
import tarfile
from typing import Any

import pytest

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.sources.archives import Index, index_archive, is_as_predicted, rows_of_archives, walk_archive
from tests.hub.virtual import Virtual, joined
from tests.support.archives import Counted, Part, folder, head, member, tar_header, virtual_tar

COUNT = 1024
FOLDER = "cifar100-resnet18-0-1023"
HEAD, PAYLOAD = head()


def named(numbers: list[int], pattern: str = FOLDER + "/version_{}.safetensors") -> list[tuple[str, Part]]:
    """Name members by number; each has bytes of its own, from its number."""
    return [(pattern.format(number), member(number)) for number in numbers]


def text_order(numbers: range) -> list[int]:
    return sorted(numbers, key=lambda number: f"version_{number}.safetensors")


def assert_right(archive: Virtual, found: Index, entry_at: list[int] | None = None) -> None:
    """Check that members' bytes are where the index says, by their contents: noise seeded by the number in the name."""
    for at in entry_at if entry_at is not None else range(len(found.entries)):
        entry = found.entries[at]
        number = int(entry.name.rpartition("_")[2].split(".")[0])
        wanted = member(number)
        begin, length = wanted.size - 4096, 4096
        assert archive.read(entry.data_offset + begin, length) == wanted.read(begin, length), entry
        assert archive.read(entry.data_offset, len(HEAD)) == HEAD, entry


def window(archive: Virtual, found: Index, at: int) -> bytes:
    entry = found.entries[at]
    start, length = found.byte_range(entry)
    return archive.read(start, length - PAYLOAD)


def test_the_members_are_of_true_size() -> None:
    assert PAYLOAD == 22_459_504  # 11,229,752 float16 elements: a fact of the net
    assert 22.4e6 < member(0).size < 22.5e6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "pattern", "format"),
    [
        (list(range(COUNT)), FOLDER + "/version_{}.safetensors", tarfile.GNU_FORMAT),
        (text_order(range(COUNT)), FOLDER + "/version_{}.safetensors", tarfile.GNU_FORMAT),
        (text_order(range(1024, 2048)), "./x/version_{}.safetensors", tarfile.USTAR_FORMAT),
        (text_order(range(COUNT)), "x" * 120 + "/version_{}.safetensors", tarfile.GNU_FORMAT),
        (list(range(COUNT)), "é" * 70 + "/version_{:04d}.safetensors", tarfile.PAX_FORMAT),
        (list(range(8192, 9216)), "version_{}.safetensors", tarfile.PAX_FORMAT),
    ],
    ids=["numbers", "text", "ustar", "gnu long names", "pax names", "pax"],
)
def test_a_regular_archive_takes_few_reads(numbers: list[int], pattern: str, format: int) -> None:
    archive = virtual_tar(named(numbers, pattern), format)
    read = Counted(archive)
    found = index_archive(read, archive.size, "a.tgz")
    assert read.requests <= 40
    assert read.bytes < archive.size / 1000
    assert [e.name for e in found.entries] == [pattern.format(n).removeprefix("./") for n in numbers]
    assert 20 < sum(e.verified for e in found.entries) <= 32
    assert_right(archive, found, random.Random(0).sample(range(COUNT), 40))
    for at in (0, 1, 17, 500, 1023):
        assert is_as_predicted(window(archive, found, at), found.entries[at], found)
    walked = walk_archive(Counted(archive), archive.size, "a.tgz")
    assert [(e.name, e.start, e.data_offset, e.header_number) for e in walked.entries] == [
        (e.name, e.start, e.data_offset, e.header_number) for e in found.entries
    ]
    assert Index.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_folders_and_small_files_before_the_members_cost_nothing() -> None:
    before = virtual_tar([(FOLDER + "/README.md", b"# hello"), (FOLDER + "/.DS_Store", bytes(6148))])
    whole = folder(FOLDER + "/") + before.read(0, 2 * 512 + 512 + 6656)
    archive = joined(whole, virtual_tar(named(list(range(COUNT)))))
    read = Counted(archive)
    found = index_archive(read, archive.size, "a.tgz")
    assert (read.requests <= 40, len(found.entries), len(found.others)) == (True, COUNT, 3)
    assert [o.reason for o in found.others] == ["a folder", "no safetensors file", "a hidden file"]
    assert_right(archive, found, [0, 1, 511, 1023])


def shuffled() -> list[tuple[str, Part]]:
    numbers = list(range(COUNT))
    random.Random(3).shuffle(numbers)
    return named(numbers)


def one_larger() -> list[tuple[str, Part]]:
    files = named(list(range(COUNT)))
    files[700] = (files[700][0], member(700, dtype="F32"))
    return files


def one_foreign() -> list[tuple[str, Part]]:
    files = named(list(range(COUNT)))
    return [*files[:900], (FOLDER + "/notes.txt", b"?" * 700), *files[900:]]


def one_missing() -> list[tuple[str, Part]]:
    return named([n for n in range(COUNT) if n != 333])


@pytest.mark.slow
@pytest.mark.parametrize("make", [shuffled, one_larger, one_foreign, one_missing])
def test_an_irregular_archive_is_walked(make: object) -> None:
    files: list[tuple[str, Part]] = make()  # type: ignore[operator]
    archive = virtual_tar(files)
    read = Counted(archive)
    found = index_archive(read, archive.size, "a.tgz")
    assert read.requests <= 2 * len(files) + 4
    assert read.bytes < archive.size / 1000
    assert all(e.verified for e in found.entries)
    members = [name for name, _ in files if name.endswith(".safetensors")]
    assert [e.name for e in found.entries] == members
    places = [at for at, e in enumerate(found.entries) if found.headers[e.header_number] == found.headers[0]]
    assert_right(archive, found, random.Random(0).sample(places, 60) + places[-1:])
    rows, layouts, net = rows_of_archives({"a.tgz": found})
    assert net == {"architecture": "resnet18", "arguments": {"classes": 100}}
    assert len(layouts) == len(found.headers) == (2 if make is one_larger else 1)
    assert [r["member"] for r in rows] == [int(n.rpartition("_")[2].split(".")[0]) for n in members]
    assert all(r["status"] == "ok" for r in rows)


@pytest.mark.slow
def test_two_members_in_each_others_place_are_found_when_read() -> None:
    files = named(list(range(COUNT)))
    files[601], files[602] = files[602], files[601]  # between samples: nothing tells but the names
    archive = virtual_tar(files)
    found = index_archive(Counted(archive), archive.size, "a.tgz")
    assert not found.entries[601].verified
    assert not is_as_predicted(window(archive, found, 601), found.entries[601], found)
    walked = walk_archive(Counted(archive), archive.size, "a.tgz")
    assert_right(archive, walked, [600, 601, 602, 603])


@pytest.mark.slow
def test_a_walk_reads_ahead_in_batches() -> None:
    archive = virtual_tar(named(list(range(COUNT))))
    for threads in (1, 8):
        read = Counted(archive)
        found = walk_archive(read, archive.size, "a.tgz", threads=threads)
        assert len(found.entries) == COUNT
        assert read.requests <= COUNT + 40


def test_a_second_archive_counts_on() -> None:
    first, again, after = (
        index_archive(Counted(a), a.size, "a.tgz")
        for a in (virtual_tar(named(ns)) for ns in ([0, 1, 2], [0, 1, 2], [7, 8]))
    )
    rows, layouts, _ = rows_of_archives({"1.tgz": first, "2.tgz": again, "3.tgz": after})
    assert [(r["member"], r["path"]) for r in rows] == [
        (0, "1.tgz"), (1, "1.tgz"), (2, "1.tgz"), (3, "2.tgz"), (4, "2.tgz"), (5, "2.tgz"), (7, "3.tgz"), (8, "3.tgz"),
    ]  # fmt: skip
    assert len(layouts) == 1


def test_an_index_that_was_changed_is_refused() -> None:
    archive = virtual_tar(named([0, 1, 2]))
    good = index_archive(Counted(archive), archive.size, "a.tgz").to_json()
    assert Index.from_json(json.loads(json.dumps(good))).to_json() == good
    for path, value in [
        (("version",), 2), (("version",), True), (("size",), 10), (("kind",), "zip"), (("name",), None),
        (("entries", 1, 1), 0), (("entries", 1, 2), 5.0), (("entries", 1, 3), 1), (("entries", 1, 3), -1),
        (("entries", 1, 4), 1), (("heads", 0, 0), -8), (("heads", 0, 1, 0, 1), "F7"), (("heads", 0, 1, 0, 2), [2**62]),
        (("others",), [["a", "b"]]), (("entries",), None), (("heads",), [[8]]),
    ]:  # fmt: skip
        bad = json.loads(json.dumps(good))
        place = bad
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(FormatError, match=r"^index of an archive: expected what `to_json` writes"):
            Index.from_json(bad)
    nothing: list[Any] = [None, [], {}, "x"]
    for values in nothing:
        with pytest.raises(FormatError):
            Index.from_json(values)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b"<!DOCTYPE html><html>" + bytes(600), "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer, not the file it points to"),
        (b"PK\x03\x04" + bytes(600), "a zip archive (a torch pickle perhaps)"),
        (b"", "something else: b''"),
        (b"ustar" * 200, "something else: b'ustarustarustaru'"),
    ],
)
def test_what_is_no_archive_is_named(raw: bytes, found: str) -> None:
    with pytest.raises(DamagedError) as caught:
        index_archive(Counted(raw), len(raw), "a.tgz")
    assert str(caught.value) == (
        f"archive a.tgz at byte 0: expected a tar, or a gzipped one; found {found}. Get the archive again."
    )


def block(name: str = "v_1.safetensors", size: int = 0, **fields: Any) -> bytes:
    return tar_header(name, size, **fields)


def patched(raw: bytes, at: int, new: bytes) -> bytes:
    """Change a header and mend its checksum."""
    made = bytearray(raw)
    made[at : at + len(new)] = new
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made[:512])
    return bytes(made)


BAD = {
    "negative size": (patched(block(), 124, b"\xff" * 12), "a size that a file can have"),
    "base-256 size": (patched(block(), 124, b"\x80" + b"\xff" * 11), "a size that a file can have"),
    "size beyond the file": (patched(block(), 124, b"77777777777\0"), "the 8,589,934,591 bytes of 'v_1.safetensors'"),
    "no size": (patched(block(), 124, b"9z".ljust(12)), "a size in octal digits"),
    "wrong checksum": (block()[:20] + b"x" + block()[21:], "the header of a file"),
    "sparse": (block(type=b"S"), "whole files"),
    "records for ever": (block(type=b"x") * 40, "at most 8 records before a file"),
    "huge records": (block(type=b"x", size=2**21) + bytes(2**22), "at most 1,048,576 bytes of records"),
    "false pax length": (
        block(type=b"x", size=20) + b"99 path=abc\n".ljust(512, b"x"),
        "pax records of the stated length",
    ),
    "pax size": (block(type=b"x", size=13) + b"13 size=-123\n".ljust(512, b"\0") + block(), "a size in the pax"),
    "global path": (block(type=b"g", size=12) + b"12 path=abc\n".ljust(512, b"\0"), "a path and a size for one"),
    "a record and the end": (block(type=b"L", size=5) + b"12345".ljust(512, b"\0") + bytes(512), "the header of a"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_hostile_header_is_refused(kind: str) -> None:
    header, expected = BAD[kind]
    raw = block("first", 0) + header + bytes(20_000)
    with pytest.raises(DamagedError, match=f"^archive a.tar at byte [0-9,]+: expected {expected}"):
        index_archive(Counted(raw), len(raw), "a.tar")
