"""Pickles of numpy arrays in dicts, lists and tuples, read without running or importing anything that they name.

A pickle is a program for a machine with a stack and a memo. `read_pickled_arrays` walks its opcodes and builds numbers,
texts, bytes, containers and arrays. Of the calls that a pickle asks for, those by which numpy's arrays, dtypes and
scalars, OrderedDict and haiku's mappings are pickled are recognised by name and done here; every other call is refused.
Opcodes: CPython's Lib/pickletools.py; the states of arrays and dtypes: `__reduce__` in numpy's core. This is one file,
since the stack, the memo and the limits on what a pickle may take belong to one machine.
"""

from __future__ import annotations

import codecs
import math
import re
import struct
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from checkpoints_zoo.errors import DamagedError, FormatError

Buffer = bytes | bytearray | memoryview

PROTOCOLS = range(2, 6)
LARGEST_DEPTH = 100  # Largest number of containers inside each other.
MOST_OPCODES = 400_000  # An opcode of one byte can make an object of about 100 bytes.
LARGEST_INTEGER_NBYTES = 1024
MOST_AXES, LARGEST_LENGTH = 64, 2**63  # of an array
LARGEST_KEY = 2**60  # Larger numbers can be chosen so that all have one hash.
LONGEST_TEXT_NBYTES = 1 << 12  # A longer text stays undecoded until it is needed: protocol 2 holds raw bytes as texts.
DECODED_NBYTES = 1 << 20  # Number of bytes of a text that are decoded at once.
_DTYPE_CODE = re.compile(r"[biuf](1|2|4|8|16)", re.ASCII)
_CORES = ("numpy.core", "numpy._core")  # the same modules, before numpy 2 and since
_RECONSTRUCT = {(f"{core}.multiarray", "_reconstruct") for core in _CORES}
_SCALAR = {(f"{core}.multiarray", "scalar") for core in _CORES}
_FROM_BUFFER = {(f"{core}.numeric", "_frombuffer") for core in _CORES}
_DTYPE, _ARRAY, _ENCODE = ("numpy", "dtype"), ("numpy", "ndarray"), ("_codecs", "encode")
_BYTES = {("__builtin__", "bytes"), ("builtins", "bytes")}
_ORDERED_DICT = ("collections", "OrderedDict")
_MAPPINGS = {("haiku._src.data_structures", name) for name in ("FlatMapping", "FlatMap", "frozendict")}
_FIXED = {"K": "<B", "M": "<H", "J": "<i", "G": ">d"}  # opcodes of numbers -> their struct formats
_CONSTANTS = {"N": None, "\x88": True, "\x89": False}
_LENGTH_OF_TEXT = {"\x8c": "<B", "X": "<I", "\x8d": "<Q"}  # opcodes of texts -> format of the length before them
_LENGTH_OF_BYTES = {"C": "<B", "B": "<I", "\x8e": "<Q", "\x96": "<Q"}
_LENGTH_OF_INTEGER = {"\x8a": "<B", "\x8b": "<I"}
_PUT, _GET = {"q": "<B", "r": "<I"}, {"h": "<B", "j": "<I"}  # opcodes that write and read the memo
_TUPLES = {")": 0, "\x85": 1, "\x86": 2, "\x87": 3}


@dataclass(frozen=True)
class _Name:
    """A module's attribute that the pickle names; it is never looked up."""

    module: str
    attribute: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.module, self.attribute

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"[:200]


@dataclass(frozen=True)
class _LongText:
    """A text that is not decoded yet."""

    encoded: memoryview


@dataclass
class _UnfinishedDtype:
    """A dtype, whose byte order comes later."""

    dtype: np.dtype[Any]


@dataclass
class _UnfinishedArray:
    """An array, whose shape, dtype and values come later."""

    array: np.ndarray[Any, Any] | None = None


class _Mark:
    """The place on the stack where the elements of a container begin."""


def read_pickled_arrays(content: Buffer, label: str) -> Any:
    """Read a pickle of protocols 2 to 5; return the object, of dicts, lists, tuples, None, bools, numbers, texts, bytes
    and numpy arrays of the kinds b, i, u and f. Some arrays are read-only.

    Beside the content, memory of at most the content's size and 64 MB is taken, and time grows with the size: a length
    is compared with what is left before memory is taken, and objects that would be larger, written out, are refused.

    Args:
        content: the bytes of the pickle.
        label: name of the pickle in errors, such as "file x.pkl".

    Raises:
        FormatError: the pickle asks for a call or an object of another kind; nothing was run.
        DamagedError: the pickle is cut short or broken.

    >>> import pickle
    >>> read_pickled_arrays(pickle.dumps({"w": np.arange(3)}), "example")
    {'w': array([0, 1, 2])}
    >>> read_pickled_arrays(pickle.dumps(abs), "example")
    Traceback (most recent call last):
        ...
    checkpoints_zoo.errors.FormatError: example: expected a pickle of numpy arrays in dicts, lists and tuples; \
found builtins.abs. Nothing was run. If you made it yourself, save its arrays with safetensors.
    """
    return _Machine(memoryview(content).cast("B"), label).run()


class _Machine:
    """The stack and the memo of one pickle.

    Args:
        content: the bytes of the pickle.
        label: name of the pickle in errors.
    """

    def __init__(self, content: memoryview, label: str) -> None:
        self.content, self.label = content, label
        self.position = self.opcode_count = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.finished_bytes: dict[int, bytes] = {}
        self.made_nbytes = 0  # Number of bytes that calls made of the content; each byte is needed once.

    def run(self) -> Any:
        """Walk the opcodes to the end; return the object."""
        if not len(self.content) or self.content[0] != 0x80:
            raise self._damaged("the first byte of protocol 2 or later", bytes(self.content[:1]).hex() or "nothing")
        try:
            while (opcode := chr(self._take(1)[0])) != ".":
                self._step(opcode)
            value = self._pop()
        except (ValueError, OverflowError) as error:  # The size or the values of an array or a text.
            if isinstance(error, FormatError | DamagedError):
                raise
            raise self._damaged("sound values", str(error)[:200]) from error
        if self.stack or self.position != len(self.content):
            raise self._damaged("its end", f"{len(self.content) - self.position:,} bytes and {len(self.stack)} objects")
        self.part_count = 0
        return self._finish(0, value)

    def _step(self, opcode: str) -> None:
        """Do what one opcode asks for."""
        stack = self.stack
        self.opcode_count += 1
        if self.opcode_count > MOST_OPCODES:
            raise self._refused(f"more than {MOST_OPCODES:,} opcodes")
        if opcode == "\x80":
            if (protocol := self._take(1)[0]) not in PROTOCOLS:
                raise self._refused(f"protocol {protocol}")
        elif opcode == "\x95":  # the length of a frame, which says nothing more
            self._check_length(self._number("<Q"))
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _FIXED:
            stack.append(self._number(_FIXED[opcode]))
        elif opcode in _LENGTH_OF_INTEGER:
            if (length := self._number(_LENGTH_OF_INTEGER[opcode])) > LARGEST_INTEGER_NBYTES:
                raise self._refused(f"a whole number of {length:,} bytes")
            stack.append(int.from_bytes(self._take(length), "little", signed=True))
        elif opcode in _LENGTH_OF_TEXT:
            encoded = self._take(self._number(_LENGTH_OF_TEXT[opcode]))
            is_short = len(encoded) <= LONGEST_TEXT_NBYTES
            stack.append(str(encoded, "utf-8", "surrogatepass") if is_short else _LongText(encoded))
        elif opcode in _LENGTH_OF_BYTES:
            stack.append(self._take(self._number(_LENGTH_OF_BYTES[opcode])))
        elif opcode == "(":
            stack.append(_Mark())
        elif opcode in _TUPLES:
            stack.append(tuple(self._pop_many(_TUPLES[opcode])))
        elif opcode in "t]}":
            stack.append(tuple(self._pop_to_mark()) if opcode == "t" else [] if opcode == "]" else {})
        elif opcode in "ae":
            values = [self._pop()] if opcode == "a" else self._pop_to_mark()
            self._top(list).extend(values)
        elif opcode in "su":
            values = self._pop_many(2) if opcode == "s" else self._pop_to_mark()
            if len(values) % 2:
                raise self._damaged("a value for each key", "a key alone")
            self._top(dict).update(zip(map(self._key, values[::2]), values[1::2], strict=True))
        elif opcode in _PUT or opcode == "\x94":
            number = len(self.memo) if opcode == "\x94" else self._number(_PUT[opcode])
            self.memo[number] = self._top(object)
        elif opcode in _GET:
            number = self._number(_GET[opcode])
            if number not in self.memo:
                raise self._damaged("an object in the memo", f"none under {number}")
            stack.append(self.memo[number])
        elif opcode == "c":
            stack.append(_Name(self._line(), self._line()))
        elif opcode == "\x93":
            module, attribute = self._pop_many(2)
            if type(module) is not str or type(attribute) is not str:
                raise self._refused("a name that is no text")
            stack.append(_Name(module, attribute))
        elif opcode == "R":
            function, arguments = self._pop_many(2)
            stack.append(self._call(function, arguments))
        elif opcode == "b":
            state = self._pop()
            self._build(self._top(object), state)
        elif opcode == "0":
            self._pop()
        elif opcode == "1":
            self._pop_to_mark()
        elif opcode == "2":
            stack.append(self._top(object))
        else:
            raise self._refused(f"opcode {opcode!r} at byte {self.position - 1:,}")

    # ---- bytes ----
    def _take(self, length: int) -> memoryview:
        """Return the next bytes of the content."""
        self._check_length(length)
        self.position += length
        return self.content[self.position - length : self.position]

    def _check_length(self, length: int) -> None:
        if length > len(self.content) - self.position:
            expected = f"{length:,} bytes more at byte {self.position:,}"
            raise self._damaged(expected, f"{len(self.content) - self.position:,}, its end")

    def _number(self, number_format: str) -> Any:
        """Return the next number of the content."""
        return struct.unpack(number_format, self._take(struct.calcsize(number_format)))[0]

    def _line(self) -> str:
        """Return the next line of the content, as names are written."""
        line_end = bytes(self.content[self.position : self.position + 500]).find(b"\n")
        if line_end < 0:
            raise self._damaged("a name that ends", "none")
        return str(self._take(line_end + 1)[:-1], "utf-8")

    # ---- stack ----
    def _pop(self) -> Any:
        return self._pop_many(1)[0]

    def _pop_many(self, count: int) -> list[Any]:
        """Remove objects from the top of the stack; return them in the order of the stack."""
        values = self.stack[len(self.stack) - count :] if count <= len(self.stack) else []
        if len(values) < count or any(isinstance(value, _Mark) for value in values):
            raise self._damaged("an object on the stack", "none")
        del self.stack[len(self.stack) - count :]
        return values

    def _pop_to_mark(self) -> list[Any]:
        """Remove the objects above the last mark, and the mark; return the objects."""
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                values = self.stack[place + 1 :]
                del self.stack[place:]
                return values
        raise self._damaged("a mark on the stack", "none")

    def _top(self, kind: type) -> Any:
        if not self.stack or isinstance(self.stack[-1], _Mark) or not isinstance(self.stack[-1], kind):
            raise self._damaged(f"a {kind.__name__} on the stack", "none")
        return self.stack[-1]

    def _key(self, key: Any) -> Any:
        """Return the key of a dict, decoded."""
        match key:
            case None | str() | bytes():
                return key
            case memoryview() | bytearray() if len(key) <= LONGEST_TEXT_NBYTES:
                return bytes(key)
            case int() if abs(key) < LARGEST_KEY:
                return key
        raise self._refused("a key that is no short text or whole number")

    # ---- calls ----
    def _call(self, function: Any, arguments: Any) -> Any:
        """Return what a known call makes."""
        name = function.pair if isinstance(function, _Name) else None
        match arguments:
            case (_Name() as kind, _, _) if name in _RECONSTRUCT and kind.pair == _ARRAY:
                return _UnfinishedArray()
            case (str(code), _, _) if name == _DTYPE and _DTYPE_CODE.fullmatch(code):
                try:
                    return _UnfinishedDtype(np.dtype(code))
                except TypeError:  # "b4", or a float of 16 bytes where there is none
                    raise self._refused(f"the dtype {code}") from None
            case (str() | _LongText() as text, "latin1" | "latin-1") if name == _ENCODE:
                return self._encode(text)
            case () if name in _BYTES:
                return b""
            case (raw, _UnfinishedDtype(dtype), tuple(shape), "C" | "F" as order) if name in _FROM_BUFFER:
                return self._array(raw, dtype, shape, order)
            case (_UnfinishedDtype(dtype), raw) if name in _SCALAR:
                return self._array(raw, dtype, (), "C")[()]
            case (dict(mapping),) if name in _MAPPINGS:
                return mapping
            case () if name == _ORDERED_DICT:
                return {}
        raise self._refused(str(function) if name else "a call of no function")

    def _build(self, target: Any, state: Any) -> None:
        """Finish an array or a dtype."""
        match target, state:
            case _UnfinishedArray(None), (1, tuple(shape), _UnfinishedDtype(dtype), bool(is_fortran), raw):
                target.array = self._array(raw, dtype, shape, "F" if is_fortran else "C")
            case _UnfinishedDtype(dtype), (3, "<" | ">" | "|" | "=" as order, None, None, None, -1, -1, 0):
                target.dtype = dtype.newbyteorder(order)
            case _:
                raise self._refused("the state of another object than a plain array")

    def _array(self, raw: Any, dtype: np.dtype[Any], shape: tuple[Any, ...], order: Any) -> np.ndarray[Any, Any]:
        """Return an array of raw bytes, in memory of its own."""
        if not isinstance(raw, Buffer):
            raise self._refused("an array of objects")
        if len(shape) > MOST_AXES or not all(type(n) is int and 0 <= n < LARGEST_LENGTH for n in shape):
            raise self._damaged(f"a shape of at most {MOST_AXES} whole numbers", "another")
        if (nbytes := math.prod(shape) * dtype.itemsize) != len(raw):
            raise self._damaged(f"{nbytes:,} bytes of an array of shape {shape}"[:200], f"{len(raw):,}")
        array = np.frombuffer(raw, dtype)
        if isinstance(raw, memoryview):  # of the content, where it may not be aligned
            self._count_made(nbytes)
            array = array.copy()
        return array.reshape(shape, order=order)

    def _encode(self, text: str | _LongText) -> bytearray:
        """Return the bytes that protocol 2 holds as a text, each byte as the character with its number."""
        encoded = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text.encoded
        self._count_made(len(encoded))
        decoder, raw = codecs.getincrementaldecoder("utf-8")(), bytearray()
        for start in range(0, len(encoded), DECODED_NBYTES):
            part = bytes(encoded[start : start + DECODED_NBYTES])
            raw += decoder.decode(part, start + DECODED_NBYTES >= len(encoded)).encode("latin-1")
        return raw

    def _count_made(self, nbytes: int) -> None:
        self.made_nbytes += nbytes
        if self.made_nbytes > len(self.content):
            raise self._refused("one buffer of many arrays")

    # ---- the result ----
    def _finish(self, depth: int, value: Any) -> Any:
        """Return an object without unfinished parts. Parts that occur several times are counted each time, so that
        objects that contain themselves, and small pickles of large objects, end here."""
        self.part_count += 1
        if depth > LARGEST_DEPTH or self.part_count > MOST_OPCODES:
            raise self._refused(f"over {LARGEST_DEPTH} containers inside each other, or {MOST_OPCODES:,} objects")
        finish = partial(self._finish, depth + 1)
        match value:
            case dict():
                return {key: finish(part) for key, part in value.items()}
            case list() | tuple():
                return type(value)(map(finish, value))
            case _UnfinishedArray(array=np.ndarray() as array):
                return array
            case _LongText(encoded=encoded):
                self._count_made(len(encoded))
                return str(encoded, "utf-8", "surrogatepass")
            case memoryview():
                self._count_made(len(value))
                return bytes(value)
            case bytearray():  # It was counted when it was made; each occurrence is the same object.
                if id(value) not in self.finished_bytes:
                    self.finished_bytes[id(value)] = bytes(value)
                return self.finished_bytes[id(value)]
            case _Name() as name:
                raise self._refused(str(name))
            case _UnfinishedArray() | _UnfinishedDtype():
                raise self._refused("an array without values, or a dtype")
        return value

    # ---- errors ----
    def _damaged(self, expected: str, found: str) -> DamagedError:
        return DamagedError(self.label, expected=f"{expected} of a pickle", found=found)

    def _refused(self, found: str) -> FormatError:
        advice = "save its arrays with safetensors"
        if found.startswith("torch."):
            advice = "load it in your own code, and save the tensors with torch.save (.pt) or safetensors"
        return FormatError(
            self.label,
            expected="a pickle of numpy arrays in dicts, lists and tuples",
            found=found,
            do=f"Nothing was run. If you made it yourself, {advice}",
        )
