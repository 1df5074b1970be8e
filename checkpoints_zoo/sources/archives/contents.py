"""The index of an archive: its members with their byte ranges, and its other files, each with the reason why it is no
member.

This file also reads members' ids from their names, and predicts the order of names in an archive.
"""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats.layout import ELEMENT_BYTES, Shape, is_possible_shape
from checkpoints_zoo.formats.shard_files import guess_kind, header_length, parse_header
from checkpoints_zoo.sources.archives.tar import BLOCK, ReadExactly, TarHeader, leads_out

VERSION = 1
MOST_LEAD = 2**20  # Largest number of bytes of a member's safetensors header, enough for some ten thousand tensors.

_LAST_NUMBER = re.compile(r"(?P<before>.*?)(?P<number>[0-9]{1,9})(?P<after>[^0-9]*)", re.DOTALL)


@dataclass(frozen=True)
class MemberHeader:
    """A safetensors header that several members share: its length, and (name, dtype, shape) of each tensor in order."""

    header_nbytes: int
    tensors: tuple[tuple[str, str, Shape], ...]

    @cached_property
    def payload(self) -> int:
        """Number of bytes of all tensors together."""
        return sum(math.prod(shape) * ELEMENT_BYTES[dtype] for _, dtype, shape in self.tensors)


@dataclass(frozen=True, slots=True)
class Entry:
    """One member's file in an archive.

    Args:
        name: name of the file in the archive.
        start: offset of the file's tar header in the archive, pax records and long names included.
        data: offset of the file's first byte: its safetensors header, then its tensors.
        head: position of the member's header in the list `Index.heads`.
        verified: whether the member's headers were read; False if they were only predicted.
    """

    name: str
    start: int
    data: int
    head: int
    verified: bool


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of the archive that is no member, or a damaged member (`member` is true), with the reason (`why`)."""

    name: str
    why: str
    member: bool


@dataclass(frozen=True)
class Index:
    """The index of an archive.

    Args:
        name: name of the archive.
        size: size of the archive, in bytes.
        kind: "tar" or "gzip"; the contents of a gzipped archive are unknown until it is read from its start.
        heads: the different safetensors headers of the members.
        entries: the members' files, in the order of the archive.
        others: the files that are no members.
    """

    name: str
    size: int
    kind: str
    heads: tuple[MemberHeader, ...] = ()
    entries: tuple[Entry, ...] = ()
    others: tuple[OtherFile, ...] = ()

    @cached_property
    def _by_offset(self) -> dict[int, Entry]:
        return {e.data + self.heads[e.head].header_nbytes: e for e in self.entries}

    def at(self, offset: int) -> Entry:
        """Find the member whose tensors begin at an offset in the archive; return it.

        Raises:
            KeyError: none does.
        """
        return self._by_offset[offset]

    def span(self, entry: Entry) -> tuple[int, int]:
        """Return (offset, length) of the byte range with a member's headers and tensors."""
        head = self.heads[entry.head]
        return entry.start, entry.data + head.header_nbytes + head.payload - entry.start

    def to_json(self) -> dict[str, Any]:
        """Return the index as JSON values."""
        return {
            "version": VERSION,
            "name": self.name,
            "size": self.size,
            "kind": self.kind,
            "heads": [[h.header_nbytes, [[n, d, list(s)] for n, d, s in h.tensors]] for h in self.heads],
            "entries": [[e.name, e.start, e.data, e.head, e.verified] for e in self.entries],
            "others": [[o.name, o.why, o.member] for o in self.others],
        }

    @classmethod
    def from_json(cls, values: Any) -> Index:
        """Read and check JSON values as `to_json` writes them; return the index.

        Raises:
            FormatError: the values have another form, or members overlap or exceed the archive.
        """
        try:
            heads = tuple(
                MemberHeader(header_nbytes, tuple((n, d, tuple(s)) for n, d, s in t))
                for header_nbytes, t in values["heads"]
            )
            entries = tuple(Entry(*entry) for entry in values["entries"])
            others = tuple(OtherFile(*other) for other in values["others"])
            index = cls(values["name"], values["size"], values["kind"], heads, entries, others)
            is_valid = values["version"] == VERSION and type(values["version"]) is int and index._is_sound()
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FormatError("index of an archive", expected="what `to_json` writes", found=repr(error)) from error
        if not is_valid:
            expected = "what `to_json` writes: members one behind the other within the archive"
            raise FormatError("index of an archive", expected=expected, found=reprlib.repr(values))
        return index

    def _is_sound(self) -> bool:
        """Say whether all values have the right types, and no member overlaps another or exceeds the archive."""
        for head in self.heads:
            if type(head.header_nbytes) is not int or not 10 <= head.header_nbytes <= MOST_LEAD or not head.tensors:
                return False
            if not all(type(n) is str and d in ELEMENT_BYTES and is_possible_shape(s) for n, d, s in head.tensors):
                return False
        if not (type(self.name) is str and type(self.size) is int and self.kind in ("tar", "gzip")):
            return False
        at, entries = 0, list[Any](self.entries)
        for e in entries:
            numbers = (e.start, e.data, e.head)
            if type(e.name) is not str or type(e.verified) is not bool or any(type(x) is not int for x in numbers):
                return False
            if not (at <= e.start <= e.data - BLOCK and 0 <= e.head < len(self.heads)):
                return False
            at = e.data + self.heads[e.head].header_nbytes + self.heads[e.head].payload
        kinds = all(type(o.name) is str and type(o.why) is str and type(o.member) is bool for o in self.others)
        return kinds and at <= self.size


@dataclass
class Contents:
    """Collects the files of an archive one by one, and divides them into members and other files.

    Args:
        archive: name of the archive, for error texts.
    """

    archive: str
    heads: list[MemberHeader] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    others: list[OtherFile] = field(default_factory=list)
    _known: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def add(self, file: TarHeader, take: ReadExactly) -> Entry | None:
        """Classify a file by its first bytes and record it; return its entry if it is a member, else None.

        Args:
            file: tar header of the file.
            take: function (offset, length) -> bytes that reads the archive.
        """
        if why := _reason_not_member(file):
            self.others.append(OtherFile(file.name, why, False))
            return None
        named = file.name.lower().endswith(".safetensors")
        first = take(file.data, min(file.size, 512 if named else 9))
        if first[8:9] != b"{" and not named:
            self.others.append(OtherFile(file.name, "no safetensors file", False))
            return None
        path = f"{file.name!r} in {self.archive}"
        try:
            header_nbytes = 0 if guess_kind(first) else 8 + header_length(first, file.size, path)
            if header_nbytes > MOST_LEAD:
                raise DamagedError(
                    f"header of {path}", expected=f"at most {MOST_LEAD:,} bytes", found=f"{header_nbytes:,}"
                )
        except DamagedError as error:
            self.others.append(OtherFile(file.name, str(error), named))
            return None
        # An error of this read means that the archive is damaged.
        raw = first if len(first) >= header_nbytes else take(file.data, header_nbytes)
        try:
            head = self._position_of_header(raw, header_nbytes, file.size, path)
        except DamagedError as error:
            self.others.append(OtherFile(file.name, str(error), named))
            return None
        self.entries.append(Entry(file.name, file.start, file.data, head, True))
        return self.entries[-1]

    def _position_of_header(self, raw: bytes, header_nbytes: int, size: int, path: str) -> int:
        """Parse a member's safetensors header (equal bytes only once); return its position in the list of headers."""
        key = hashlib.sha256(raw[:header_nbytes]).digest(), size
        if key not in self._known:
            header = parse_header(raw, size, path)
            head = MemberHeader(header_nbytes, tuple((n, d, s) for n, (d, s, _, _) in header.tensors.items()))
            if not head.tensors:
                raise DamagedError(f"header of {path}", expected="tensors", found="none")
            if head not in self.heads:
                self.heads.append(head)
            self._known[key] = self.heads.index(head)
        return self._known[key]

    def index(self, size: int) -> Index:
        """Return the index. If several files have the same name, the last one wins, as when a tar is unpacked."""
        last = {e.name: e for e in self.entries}
        twice = [e for e in self.entries if last[e.name] is not e]
        others = [OtherFile(e.name, "a later file has the same name", False) for e in twice]
        entries = tuple(e for e in self.entries if last[e.name] is e)
        return Index(self.archive, size, "tar", tuple(self.heads), entries, (*self.others, *others))


def _reason_not_member(file: TarHeader) -> str:
    """Return the reason why the tar header of a file rules out that it is a member; "" if it can be one."""
    if leads_out(file.name) or "\0" in file.name:
        return "a name that leads out of the archive's folder"
    if file.kind:
        return file.kind
    if file.name.rpartition("/")[2].startswith("."):
        return "a hidden file"
    return "" if file.size else "an empty file"


def numbers_in(name: str) -> list[int]:
    """Return the whole numbers that a name contains, in order."""
    return [int(digits) for digits in re.findall("[0-9]{1,18}", name)]


def tensors_of(head: MemberHeader) -> Mapping[str, tuple[str, Shape]]:
    """Return stored name -> (dtype, shape) of the tensors of a safetensors header, in order."""
    return {name: (dtype, shape) for name, dtype, shape in head.tensors}


def names_in_order(sampled: Mapping[int, str], count: int, archive: str) -> list[str] | None:
    """Predict the names of all members from a few sampled names, in numeric or alphabetic order; return them, None if
    neither order fits.

    Args:
        sampled: the known names: number of the member in the archive (0, 1, …) -> name.
        count: number of members in the archive.
        archive: name of the archive; numbers in it may tell the number of the first member.

    >>> names_in_order({0: "v_0.st", 1: "v_1.st", 2: "v_10.st", 11: "v_9.st"}, 12, "")[:5]
    ['v_0.st', 'v_1.st', 'v_10.st', 'v_11.st', 'v_2.st']
    """
    matches = [_LAST_NUMBER.fullmatch(name) for name in sampled.values()]
    numbered = [match for match in matches if match]
    if len({(m["before"], m["after"]) for m in numbered}) != 1 or len(numbered) < len(matches):
        return None
    numbers = [int(m["number"]) for m in numbered]
    padding = {len(m["number"]) for m in numbered} if any(m["number"].startswith("0") for m in numbered) else set()
    width = padding.pop() if len(padding) == 1 else 0
    before, after = numbered[0]["before"], numbered[0]["after"]
    hints = [int(digits) for digits in re.findall("[0-9]{1,9}", archive)]
    for first in dict.fromkeys([min(numbers), max(numbers) - count + 1, *hints]):
        if first < 0:
            continue
        names = [f"{before}{number:0{width}d}{after}" for number in range(first, first + count)]
        for ordered in (names, sorted(names)):
            if all(ordered[place] == name for place, name in sampled.items()):
                return ordered
    return None


def numbers_of(names: Sequence[str]) -> list[int]:
    """Give each member of an archive a different number, read from its name; return the numbers.

    The number is the last one in the file's name, or in its whole path, if these differ for all members; else the
    member's position.

    >>> numbers_of(["net/version_7.safetensors", "net/version_3.safetensors"]), numbers_of(["a", "b"])
    ([7, 3], [0, 1])
    """
    for part in ([name.rpartition("/")[2] for name in names], names):
        matches = [_LAST_NUMBER.fullmatch(name.removesuffix(".safetensors")) for name in part]
        numbers = [int(match["number"]) for match in matches if match]
        if len(numbers) == len(names) and len(set(numbers)) == len(names) and max(numbers, default=0) < 2**30:
            return numbers
    return list(range(len(names)))
