"""Files of torch.save, and pickles of numpy arrays, on this disk: only tensors are read, and no code of a file runs.

Files from the Hub are never opened here.

This is one file, because both kinds are opened, searched for state dicts and refused alike.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints_zoo.errors import DamagedError, LayoutError, TooLargeError, UsageError
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.pickled_arrays import read_pickled_arrays
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.interop.ingest.origin import SAFETENSORS_SUFFIX, Origin, is_pickle_of_arrays
from checkpoints_zoo.interop.ingest.selection import NetTensors
from checkpoints_zoo.sources.archives import IdentifyNet, MemberGroup, MemberHeader, MemberRange

if TYPE_CHECKING:
    from torch import Tensor

    StateDict = dict[str, Tensor]

# First bytes of files of torch.save: a zip archive, or before torch 1.6 a pickle of protocol 2.
ZIP_FIRST_BYTES, PICKLE_FIRST_BYTES = b"PK\x03\x04", b"\x80\x02"
# Exceptions of the readers in torch, pickle and zipfile for damaged files, besides their own error classes.
PARSER_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError,
    ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
MAX_DEPTH = 4  # number of levels of nested dicts that are searched for state dicts


@dataclass(frozen=True)
class StateDictPlace:
    """Where the state dict is in a file.

    Args:
        key: key of the state dict in a file ("ema", "model/state_dict"); "" to search for the state dict.
        recogniser: function that recognises the network's tensors, so that the network's state dict is found under any
            key. Without a recogniser, the file must be a state dict, or have one under "state_dict", as Lightning
            writes it.
    """

    key: str = ""
    recogniser: IdentifyNet | None = None
    net: NetTensors | None = None


def members_of_pickles(origin: Origin, place: StateDictPlace) -> MemberGroup:
    """Read the names and shapes of tensors in files of torch.save; return the members. A damaged file becomes a failed
    member.

    Args:
        origin: origin that has the files.
        place: place of the state dict in each file.

    Raises:
        UsageError: a file can't be read without running code, or has two state dicts that fit the network.
    """
    distinct_headers: dict[MemberHeader, MemberHeader] = {}
    members, damaged = [], []
    for path in origin.pickles:
        try:
            head = _choose_header(origin.root / path, place)
        except DamagedError as error:
            damaged.append((path, str(error)))
            continue
        members.append(MemberRange(path, path, 0, distinct_headers.setdefault(head, head)))
    return MemberGroup(members, damaged)


def _choose_header(path: Path, place: StateDictPlace) -> MemberHeader:
    """Choose the state dict in a file that fits the network; return its header."""
    header_of_key = {
        key: header_of_state_dict(state, f" of file {path}")
        for key, state in _read_selected_state_dicts(path, place).items()
    }
    if place.recogniser is None or len(header_of_key) == 1:
        return next(iter(header_of_key.values()))
    fitting_headers = {key: header for key, header in header_of_key.items() if _is_recognised(header, place.recogniser)}
    if len(fitting_headers) > 1:
        raise UsageError(
            f"file {path}",
            expected="one state dict of the net",
            found=f"{len(fitting_headers)} that fit, under {', '.join(map(repr, fitting_headers))}",
            do=f"Choose one with key={next(iter(fitting_headers))!r}, or --key {next(iter(fitting_headers))}",
            path=path,
        )
    # If no state dict fits, the error compares the largest state dict with the network.
    return next(iter(fitting_headers.values()), None) or max(
        header_of_key.values(), key=lambda header: len(header.tensors)
    )


def _is_recognised(head: MemberHeader, identify_net: IdentifyNet) -> bool:
    try:
        identify_net(head)
    except LayoutError:
        return False
    return True


def _read_selected_state_dicts(path: Path, place: StateDictPlace) -> dict[str, StateDict]:
    """Read the state dicts in a file that may be the network's, reduced to the network's tensors; return key -> state
    dict.

    Raises:
        UsageError: the same cases as in `_read_candidate_state_dicts`, or several prefixes fit the network.
        DamagedError: the same cases as in `_read_candidate_state_dicts`.
    """
    state_dicts = _read_candidate_state_dicts(path, place)
    return state_dicts if place.net is None else {key: place.net.select(s, str(path)) for key, s in state_dicts.items()}


def _read_candidate_state_dicts(path: Path, place: StateDictPlace) -> dict[str, StateDict]:
    """Read the state dicts in a file that may be the network's; return key -> state dict.

    Raises:
        UsageError, FormatError: the file can't be read without running code, so it was not read; or the file lacks the
            key.
        DamagedError: the file is cut short, or holds no named tensors.
    """
    if is_pickle_of_arrays(path.name):
        loaded_object = read_pickled_arrays(path.read_bytes(), f"file {path}")
        state_dicts = dict(_find_dicts_of_arrays(loaded_object))
    else:
        loaded_object = _load_file(path)
        state_dicts = dict(_find_state_dicts(loaded_object))
    if place.key:
        if place.key not in state_dicts:
            raise UsageError(
                f"file {path}",
                expected=f"a state dict under {place.key!r}",
                found=f"{', '.join(map(repr, state_dicts)) or 'none'}"
                if "" not in state_dicts
                else "one without any key",
                path=path,
            )
        return {place.key: state_dicts[place.key]}
    if place.recogniser is None:
        state_dicts = {key: state for key, state in state_dicts.items() if key in ("", "state_dict")}
    if state_dicts:
        return state_dicts
    description, keys = f"a {type(loaded_object).__name__}", [key for key, _ in _find_state_dicts(loaded_object) if key]
    if isinstance(loaded_object, Mapping):
        # Entries that are not named tensors are listed first: because of them the dict is not a state dict.
        entries = sorted(loaded_object.items(), key=lambda entry: _is_tensor_entry(*entry))
        entry_types = [f"{n!r}: {type(v).__name__}" for n, v in entries]
        description = first_few(entry_types, 5) or "an empty one"
    raise DamagedError(
        f"file {path}",
        expected="a state dict, tensors by name, or one under 'state_dict'",
        found=description,
        do=f"Give the architecture, which finds it, or key={keys[0]!r} (--architecture, --key {keys[0]})"
        if keys
        else "",
        path=path,
    )


def _find_state_dicts(loaded_object: Any) -> Iterator[tuple[str, StateDict]]:
    """Yield the state dicts in nested dicts with their keys; the same dict is yielded only once."""
    level_entries, visited_ids = [("", loaded_object)], set[int]()
    for _ in range(MAX_DEPTH):
        next_level_entries = []
        for key, value in level_entries:
            if not isinstance(value, Mapping) or id(value) in visited_ids:
                continue
            visited_ids.add(id(value))
            if value and all(_is_tensor_entry(n, t) for n, t in value.items()):
                yield key, dict(value)
            else:
                next_level_entries += [(f"{key}/{n}" if key else n, v) for n, v in value.items() if type(n) is str]
        level_entries = next_level_entries


def _find_dicts_of_arrays(loaded_object: Any, key: str = "") -> Iterator[tuple[str, StateDict]]:
    """Yield a dict of numpy arrays, and each dict in it, as state dicts with their keys. The name of an array in a dict
    inside the state dict is the path to it ("conv/w"); values that are no arrays are left out."""
    if isinstance(loaded_object, dict):
        if state := dict(_named_tensors(loaded_object, "")):
            yield key, state
        for name, value in loaded_object.items():
            if type(name) is str:
                yield from _find_dicts_of_arrays(value, f"{key}/{name}" if key else name)


def _named_tensors(arrays: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    import torch

    for name, value in arrays.items():
        if isinstance(value, dict):
            yield from _named_tensors(value, f"{prefix}{name}/")
        elif isinstance(value, np.ndarray):
            try:
                yield f"{prefix}{name}", torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))
            except TypeError as error:  # torch has no such numbers, as of 16 bytes.
                expected = "an array of a dtype that torch has"
                raise DamagedError(f"array {prefix}{name}", expected=expected, found=str(value.dtype)) from error


def _is_tensor_entry(name: object, value: object) -> bool:
    """Return whether an entry of a dict could belong to a state dict: its key is a string, its value a tensor."""
    import torch

    return type(name) is str and isinstance(value, torch.Tensor)


def _load_file(path: Path) -> Any:
    import torch

    if path.name.lower().endswith(SAFETENSORS_SUFFIX):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, *PARSER_ERRORS) as error:
            raise DamagedError(
                f"file {path}", expected="a whole safetensors file", found=str(error)[:200], path=path
            ) from error
    with path.open("rb") as file:
        first = file.read(512)
    if not first.startswith((ZIP_FIRST_BYTES, PICKLE_FIRST_BYTES)):
        found = guess_kind(first) or f"something else: {first[:16]!r}"
        raise DamagedError(f"file {path}", expected="a file of torch.save", found=found, path=path)
    if first.startswith(ZIP_FIRST_BYTES):
        _check_zip(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The file is memory-mapped: reading names and shapes reads no weights.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=first.startswith(ZIP_FIRST_BYTES))
    except pickle.UnpicklingError as error:
        if (protocol := _pickle_protocol(path)) > 2:
            raise UsageError(
                f"file {path}",
                expected="a pickle of protocol 2, as torch.save writes it and torch.load(weights_only=True) reads it",
                found=f"protocol {protocol}, of torch.save(…, pickle_protocol={protocol})",
                do="It was not opened. If you made it yourself, save it again without pickle_protocol",
                path=path,
            ) from error
        names = _unsafe_names_text(path, str(error))
        raise UsageError(
            f"file {path}",
            expected="tensors alone, as torch.load(weights_only=True) reads them",
            found=f"a pickle that asks for {names}",
            do="It was not opened and nothing was imported: a pickle can run code. "
            "If you made it yourself, save its state dict with safetensors.torch.save_file",
            path=path,
        ) from error
    except PARSER_ERRORS as error:
        raise DamagedError(
            f"file {path}",
            expected="a whole file of torch.save",
            found=str(error).partition(". ")[0] or "its end",
            path=path,
        ) from error


def _pickle_protocol(path: Path) -> int:
    """Return the pickle protocol that a file of torch.save declares, 0 if it declares none; nothing is executed."""
    try:
        with zipfile.ZipFile(path) as file:
            name = next(name for name in file.namelist() if name.endswith("data.pkl"))
            with file.open(name) as stored:
                start = stored.read(2)
    except (*PARSER_ERRORS, StopIteration):
        return 0
    # 0x80 is the opcode PROTO, which precedes the protocol.
    return start[1] if len(start) == 2 and start[:1] == b"\x80" else 0


def _unsafe_names_text(path: Path, error_text: str) -> str:
    """Return the names of the objects besides tensors that a pickle's opcodes ask for; nothing is executed."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    match = re.search(r"GLOBAL ([\w.]+)", error_text) or re.search(r"(Unsupported \w+ \S+)", error_text)
    refused_names = [match[1]] if match else []
    try:
        other_names = sorted(set(get_unsafe_globals_in_checkpoint(path)) - set(refused_names))
    except (*PARSER_ERRORS, pickle.UnpicklingError):  # the file is damaged in another way, or is no zip archive
        other_names = []
    names = refused_names + other_names
    return first_few(names, 5) or "more"


def header_of_state_dict(state: Mapping[str, Tensor], error_suffix: str = "") -> MemberHeader:
    """Return the header of a state dict: names, dtypes and shapes.

    Args:
        state: tensors by name.
        error_suffix: text after the tensor's name in errors, such as " of file …".

    Raises:
        DamagedError: safetensors can't store one of the tensors.
    """
    import torch

    from checkpoints_zoo.networks.modules import DTYPE_NAMES

    for name, t in state.items():
        if t.layout != torch.strided or t.is_quantized or t.dtype not in DTYPE_NAMES or t.is_meta:
            raise DamagedError(
                f"tensor {name!r}{error_suffix}", expected=f"a plain one of {', '.join(DTYPE_NAMES.values())}",
                found=f"{t.dtype}, {t.layout}{' without values' if t.is_meta else ''}", tensor=name,
            )  # fmt: skip
    return MemberHeader(0, tuple((name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in state.items()))


def read_member_bytes(path: Path, place: StateDictPlace, layout: Layout) -> bytearray:
    """Read a member's tensors; return their bytes in the order of its layout.

    Args:
        path: path of the file.
        place: place of the state dict in the file.
        layout: layout of the member, from its header.

    Raises:
        UsageError, DamagedError: the file can't be read, or its tensors have changed.
        TooLargeError: the tensors need more than the free memory; views of few stored bytes can be that large.
    """

    from checkpoints_zoo.networks.device import free_if_short

    if (free_bytes := free_if_short(layout.nbytes)) is not None:
        expected = f"at most {free_bytes:,} bytes of tensors, the memory that is free"
        raise TooLargeError(f"file {path}", expected=expected, found=f"{layout.nbytes:,}", path=path)
    tensors = [
        (t.stored or t.name, t.dtype, t.shape if t.stored_shape is None else t.stored_shape) for t in layout.tensors
    ]
    for state in _read_selected_state_dicts(path, place).values():
        if list(header_of_state_dict(state).tensors) == tensors:
            return state_bytes(state)
    raise DamagedError(f"file {path}", expected="the tensors that it had before", found="others", path=path)


def state_bytes(state: Mapping[str, Tensor]) -> bytearray:
    """Return the concatenated bytes of a state dict's tensors."""
    import torch

    tensor_bytes = bytearray()
    for t in state.values():
        if t.numel():
            tensor_bytes += t.detach().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return tensor_bytes


def checksum_problem(path: Path) -> str:
    """Compare a file of torch.save with its checksums; return the problem, or "" if there is none or no checksums.

    torch.load does not compare the checksums.
    """
    if not zipfile.is_zipfile(path):  # torch's format before version 1.6
        return ""
    try:
        with zipfile.ZipFile(path) as file:
            # Files written under torch.serialization.set_crc32_options(False) have no checksums.
            has_checksums = any(entry.CRC for entry in file.infolist())
            changed = file.testzip() if has_checksums else None
    except PARSER_ERRORS as error:
        return f"a zip archive that can't be read ({type(error).__name__}: {error})"[:200]
    return "" if changed is None else f"values that differ from the saved ones, by the checksum of {changed}"


def _check_zip(path: Path) -> None:
    """Check that a zip archive is complete and does not unpack to more bytes than it has, which could fill the memory.

    Raises:
        DamagedError: the archive is cut, can't be listed, is compressed (torch.save never compresses), or its files
            overlap.
    """
    try:
        with zipfile.ZipFile(path) as file:
            is_torchscript = any("/code/" in name for name in file.namelist())
            unpacked_nbytes = sum(entry.file_size for entry in file.infolist())
            is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist())
    except (NotImplementedError, ValueError, OSError) as error:  # torch may read an archive that zipfile can't list
        found = f"one that can't be listed ({type(error).__name__}: {error})"[:200]
        expected = "a zip archive as torch.save writes it"
        raise DamagedError(f"file {path}", expected=expected, found=found, path=path) from error
    except zipfile.BadZipFile as error:
        found = f"{path.stat().st_size:,} bytes without the end that a zip archive has"
        raise DamagedError(f"file {path}", expected="a whole file of torch.save", found=found, path=path) from error
    if not _has_one_directory(path):
        found, expected = (
            "another list of them, or bytes after it",
            "a zip archive with one list of its files, at its end",
        )
        raise DamagedError(f"file {path}", expected=expected, found=found, path=path)
    if is_torchscript or is_compressed or unpacked_nbytes > path.stat().st_size:
        found = f"{unpacked_nbytes:,} bytes packed into {path.stat().st_size:,}"
        raise DamagedError(
            f"file {path}",
            expected="a zip archive as torch.save writes it, nothing compressed",
            found="a TorchScript module, which is code" if is_torchscript else found,
            path=path,
        )


def _has_one_directory(path: Path) -> bool:
    """Return whether a zip archive has one directory, at the offset in its end record and directly before that record.

    zipfile reads the directory before the end record, torch the one at the offset: two directories could differ.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 98))
        tail_bytes = file.read()
    directory_end, (length, offset) = size - 22, struct.unpack("<2I", tail_bytes[-10:-2])
    if tail_bytes[-42:-38] == b"PK\x06\x07":  # a zip64 archive of torch.save ends with this record of 56 bytes
        directory_end = size - 98
        if tail_bytes[:4] != b"PK\x06\x06" or struct.unpack("<Q", tail_bytes[-34:-26])[0] != directory_end:
            return False
        length, offset = struct.unpack("<2Q", tail_bytes[-58:-42])
    return tail_bytes[-22:-18] == b"PK\x05\x06" and bool(offset + length == directory_end)
