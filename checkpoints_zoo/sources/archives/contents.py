"""The index of an archive: its members with their byte ranges, and its other files, each with the reason why it is no
member.

This is one file, because the index needs members' ids, which are read from their names, and the predicted order of
names in an archive.
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
from checkpoints_zoo.sources.archives.tar import BLOCK_BYTES, ReadExactly, TarHeader, leads_out

INDEX_VERSION = 1
LARGEST_HEADER_NBYTES = 2**20  # Largest number of bytes of a safetensors header: enough for about ten thousand tensors.

_LAST_NUMBER = re.compile(r"(?P<before>.*?)(?P<number>[0-9]{1,9})(?P<after>[^0-9]*)", re.DOTALL)


@dataclass(frozen=True)
class MemberHeader:
    """A safetensors header that several members share: its number of bytes, and (name, dtype, shape) of each tensor."""

    header_nbytes: int
    tensors: tuple[tuple[str, str, Shape], ...]

    @cached_property
    def payload_nbytes(self) -> int:
        """Number of bytes of all tensors together."""
        return sum(math.prod(shape) * ELEMENT_BYTES[dtype] for _, dtype, shape in self.tensors)


@dataclass(frozen=True, slots=True)
class Entry:
    """One member's file in an archive.

    Args:
        name: name of the file in the archive.
        start: offset in the archive of the file's first byte: its pax records and long names, or its tar header.
        data_offset: offset in the archive of the file's contents: the safetensors header, then the tensors.
        header_number: position of the member's safetensors header in the list `Index.headers`.
        verified: whether the member's headers were read; False if they were only predicted.
    """

    name: str
    start: int
    data_offset: int
    header_number: int
    verified: bool


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of an archive that is not a member, and the reason; the file may be a damaged member."""

    name: str
    reason: str
    is_damaged_member: bool


@dataclass(frozen=True)
class Index:
    """The index of an archive.

    Args:
        name: name of the archive.
        size: size of the archive, in bytes.
        kind: "tar" or "gzip"; the contents of a gzipped archive are unknown until it is read from its start.
        headers: the different safetensors headers that members of the archive have.
        entries: the members' files, in the order of the archive.
        others: the files of the archive that are not members.
    """

    name: str
    size: int
    kind: str
    headers: tuple[MemberHeader, ...] = ()
    entries: tuple[Entry, ...] = ()
    others: tuple[OtherFile, ...] = ()

    @cached_property
    def _by_offset(self) -> dict[int, Entry]:
        return {entry.data_offset + self.headers[entry.header_number].header_nbytes: entry for entry in self.entries}

    def entry_at(self, offset: int) -> Entry:
        """Find the member whose tensors begin at an offset in the archive; return it.

        Raises:
            KeyError: no member's tensors begin at this offset.
        """
        return self._by_offset[offset]

    def byte_range(self, entry: Entry) -> tuple[int, int]:
        """Return (offset, length) of the byte range of the archive that holds a member's headers and tensors."""
        header = self.headers[entry.header_number]
        return entry.start, entry.data_offset + header.header_nbytes + header.payload_nbytes - entry.start

    def to_json(self) -> dict[str, Any]:
        """Return the index as JSON values."""
        return {
            "version": INDEX_VERSION,
            "name": self.name,
            "size": self.size,
            "kind": self.kind,
            "heads": [[h.header_nbytes, [[n, d, list(s)] for n, d, s in h.tensors]] for h in self.headers],
            "entries": [[e.name, e.start, e.data_offset, e.header_number, e.verified] for e in self.entries],
            "others": [[o.name, o.reason, o.is_damaged_member] for o in self.others],
        }

    @classmethod
    def from_json(cls, values: Any) -> Index:
        """Read and check JSON values as `to_json` writes them; return the index.

        Raises:
            FormatError: the JSON values do not have the form of an index, or members overlap or exceed the archive.
        """
        try:
            headers = tuple(
                MemberHeader(header_nbytes, tuple((n, d, tuple(s)) for n, d, s in t))
                for header_nbytes, t in values["heads"]
            )
            entries = tuple(Entry(*entry) for entry in values["entries"])
            others = tuple(OtherFile(*other) for other in values["others"])
            index = cls(values["name"], values["size"], values["kind"], headers, entries, others)
            is_valid = values["version"] == INDEX_VERSION and type(values["version"]) is int and index._is_sound()
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise FormatError("index of an archive", expected="what `to_json` writes", found=repr(error)) from error
        if not is_valid:
            expected = "what `to_json` writes: members one behind the other within the archive"
            raise FormatError("index of an archive", expected=expected, found=reprlib.repr(values))
        return index

    def _is_sound(self) -> bool:
        """Say whether all values have the right types, and no member overlaps another or exceeds the archive."""
        for header in self.headers:
            if (
                type(header.header_nbytes) is not int
                or not 10 <= header.header_nbytes <= LARGEST_HEADER_NBYTES
                or not header.tensors
            ):
                return False
            if not all(type(n) is str and d in ELEMENT_BYTES and is_possible_shape(s) for n, d, s in header.tensors):
                return False
        if not (type(self.name) is str and type(self.size) is int and self.kind in ("tar", "gzip")):
            return False
        previous_end, unchecked_entries = 0, list[Any](self.entries)
        for entry in unchecked_entries:
            integer_fields = (entry.start, entry.data_offset, entry.header_number)
            if (
                type(entry.name) is not str
                or type(entry.verified) is not bool
                or any(type(x) is not int for x in integer_fields)
            ):
                return False
            if not (
                previous_end <= entry.start <= entry.data_offset - BLOCK_BYTES
                and 0 <= entry.header_number < len(self.headers)
            ):
                return False
            previous_end = (
                entry.data_offset
                + self.headers[entry.header_number].header_nbytes
                + self.headers[entry.header_number].payload_nbytes
            )
        others_are_sound = all(
            type(other_file.name) is str
            and type(other_file.reason) is str
            and type(other_file.is_damaged_member) is bool
            for other_file in self.others
        )
        return others_are_sound and previous_end <= self.size


@dataclass
class Contents:
    """A collector of an archive's files, which are added one by one and divided into members and other files.

    Args:
        archive: name of the archive, for error texts.
    """

    archive: str
    headers: list[MemberHeader] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    others: list[OtherFile] = field(default_factory=list)
    _number_of_header: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def add(self, file: TarHeader, read_exactly: ReadExactly) -> Entry | None:
        """Classify a file by its first bytes and record it; return its entry if it is a member, else None.

        Args:
            file: tar header of the file.
            read_exactly: function (offset, length) -> bytes that reads the archive.
        """
        if reason := _reason_not_member(file):
            self.others.append(OtherFile(file.name, reason, False))
            return None
        has_suffix = file.name.lower().endswith(".safetensors")
        first_bytes = read_exactly(file.data_offset, min(file.size, 512 if has_suffix else 9))
        if first_bytes[8:9] != b"{" and not has_suffix:
            self.others.append(OtherFile(file.name, "no safetensors file", False))
            return None
        file_text = f"{file.name!r} in {self.archive}"
        try:
            header_nbytes = 0 if guess_kind(first_bytes) else 8 + header_length(first_bytes, file.size, file_text)
            if header_nbytes > LARGEST_HEADER_NBYTES:
                raise DamagedError(
                    f"header of {file_text}",
                    expected=f"at most {LARGEST_HEADER_NBYTES:,} bytes",
                    found=f"{header_nbytes:,}",
                )
        except DamagedError as error:
            self.others.append(OtherFile(file.name, str(error), has_suffix))
            return None
        # If the header can't be read, the archive is damaged.
        header_bytes = (
            first_bytes if len(first_bytes) >= header_nbytes else read_exactly(file.data_offset, header_nbytes)
        )
        try:
            header_number = self._position_of_header(header_bytes, header_nbytes, file.size, file_text)
        except DamagedError as error:
            self.others.append(OtherFile(file.name, str(error), has_suffix))
            return None
        self.entries.append(Entry(file.name, file.start, file.data_offset, header_number, True))
        return self.entries[-1]

    def _position_of_header(self, header_bytes: bytes, header_nbytes: int, file_nbytes: int, file_text: str) -> int:
        """Parse a member's safetensors header, equal bytes only once; return its position in the list of headers."""
        header_key = hashlib.sha256(header_bytes[:header_nbytes]).digest(), file_nbytes
        if header_key not in self._number_of_header:
            parsed_header = parse_header(header_bytes, file_nbytes, file_text)
            header = MemberHeader(header_nbytes, tuple((n, d, s) for n, (d, s, _, _) in parsed_header.tensors.items()))
            if not header.tensors:
                raise DamagedError(f"header of {file_text}", expected="tensors", found="none")
            if header not in self.headers:
                self.headers.append(header)
            self._number_of_header[header_key] = self.headers.index(header)
        return self._number_of_header[header_key]

    def index(self, archive_nbytes: int) -> Index:
        """Return the index of the added files. If several files have the same name, the last one wins, as when a tar is
        unpacked."""
        last_with_name = {e.name: e for e in self.entries}
        replaced_entries = [e for e in self.entries if last_with_name[e.name] is not e]
        others = [OtherFile(e.name, "a later file has the same name", False) for e in replaced_entries]
        entries = tuple(e for e in self.entries if last_with_name[e.name] is e)
        return Index(self.archive, archive_nbytes, "tar", tuple(self.headers), entries, (*self.others, *others))


def _reason_not_member(file: TarHeader) -> str:
    """Return the reason why the tar header of a file rules out that it is a member; "" if it can be one."""
    if leads_out(file.name) or "\0" in file.name:
        return "a name that leads out of the archive's folder"
    if file.kind:
        return file.kind
    if file.name.rpartition("/")[2].startswith("."):
        return "a hidden file"
    return "" if file.size else "an empty file"


def numbers_in(file_name: str) -> list[int]:
    """Return the whole numbers that a name contains, in order."""
    return [int(digits) for digits in re.findall("[0-9]{1,18}", file_name)]


def tensors_of_header(header: MemberHeader) -> Mapping[str, tuple[str, Shape]]:
    """Return stored name -> (dtype, shape) of the tensors of a safetensors header, in order."""
    return {name: (dtype, shape) for name, dtype, shape in header.tensors}


def predict_file_names(sampled_names: Mapping[int, str], member_count: int, archive: str) -> list[str] | None:
    """Predict the names of all members from a few sampled names, in numeric or alphabetic order; return them, None if
    neither order fits.

    Args:
        sampled_names: number of a sampled member in the archive (0, 1, …) -> name of its file.
        member_count: number of members in the archive.
        archive: name of the archive; a number in it may be the number of the first member.

    >>> predict_file_names({0: "v_0.st", 1: "v_1.st", 2: "v_10.st", 11: "v_9.st"}, 12, "")[:5]
    ['v_0.st', 'v_1.st', 'v_10.st', 'v_11.st', 'v_2.st']
    """
    name_matches = [_LAST_NUMBER.fullmatch(name) for name in sampled_names.values()]
    matches_with_number = [match for match in name_matches if match]
    if len({(match["before"], match["after"]) for match in matches_with_number}) != 1 or len(matches_with_number) < len(
        name_matches
    ):
        return None
    file_numbers = [int(match["number"]) for match in matches_with_number]
    widths_with_zeros = (
        {len(match["number"]) for match in matches_with_number}
        if any(match["number"].startswith("0") for match in matches_with_number)
        else set()
    )
    number_width = widths_with_zeros.pop() if len(widths_with_zeros) == 1 else 0
    text_before, text_after = matches_with_number[0]["before"], matches_with_number[0]["after"]
    numbers_in_archive_name = [int(digits) for digits in re.findall("[0-9]{1,9}", archive)]
    for first_number in dict.fromkeys(
        [min(file_numbers), max(file_numbers) - member_count + 1, *numbers_in_archive_name]
    ):
        if first_number < 0:
            continue
        names = [
            f"{text_before}{number:0{number_width}d}{text_after}"
            for number in range(first_number, first_number + member_count)
        ]
        for ordered_names in (names, sorted(names)):
            if all(ordered_names[position] == name for position, name in sampled_names.items()):
                return ordered_names
    return None


def numbers_from_file_names(file_names: Sequence[str]) -> list[int]:
    """Give each member of an archive a different number, read from its name; return the numbers.

    The number is the last whole number in the file's name, or in its path, if all members then have different numbers;
    else the number is the member's position.

    >>> numbers_from_file_names(["net/version_7.safetensors", "net/version_3.safetensors"])
    [7, 3]
    >>> numbers_from_file_names(["a", "b"])
    [0, 1]
    """
    for texts_with_number in ([name.rpartition("/")[2] for name in file_names], file_names):
        name_matches = [_LAST_NUMBER.fullmatch(name.removesuffix(".safetensors")) for name in texts_with_number]
        file_numbers = [int(match["number"]) for match in name_matches if match]
        if (
            len(file_numbers) == len(file_names)
            and len(set(file_numbers)) == len(file_names)
            and max(file_numbers, default=0) < 2**30
        ):
            return file_numbers
    return list(range(len(file_names)))
