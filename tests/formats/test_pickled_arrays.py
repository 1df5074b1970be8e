"""Pickles of arrays are read as Python's pickle module reads them; what is no array is refused, and nothing is run."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats import pickled_arrays
from checkpoints_zoo.formats.pickled_arrays import read_pickled_arrays
from tests.fuzz_pickles import PROTOCOLS, fuzz
from tests.support.hmc_bucket import haiku_mapping

dtypes = st.one_of(npst.boolean_dtypes(), npst.integer_dtypes(endianness="?"), npst.unsigned_integer_dtypes(),
                   npst.floating_dtypes(endianness="?"))  # fmt: skip
arrays = npst.arrays(dtypes, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
atoms = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), arrays,
                  arrays.map(np.asfortranarray), npst.arrays(dtypes, ()).map(lambda x: x[()]))  # fmt: skip
objects = st.recursive(
    atoms,
    lambda parts: st.one_of(
        st.lists(parts, max_size=5), st.lists(parts, max_size=5).map(tuple),
        st.dictionaries(st.text() | st.integers(-(2**59), 2**59) | st.none() | st.binary(), parts, max_size=5),
        st.lists(st.tuples(st.text(), parts), max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)  # fmt: skip


def read(content: bytes) -> Any:
    return read_pickled_arrays(content, "file x.pkl")


def assert_same(found: Any, wanted: Any) -> None:
    """Compare two objects by type, values and, for arrays and numpy's numbers, dtype and bytes."""
    if isinstance(wanted, np.ndarray | np.generic):
        assert isinstance(found, np.ndarray | np.generic)
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted)
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_same(*pair)
    else:
        assert type(found) is type(wanted)
        assert struct.pack("d", found) == struct.pack("d", wanted) if type(wanted) is float else found == wanted


@given(objects, st.sampled_from(PROTOCOLS))
def test_objects_come_back(value: Any, protocol: int) -> None:
    assert_same(read(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_arrays_texts_and_shared_parts(protocol: int) -> None:
    random_bytes = np.random.default_rng(0).integers(0, 256, 3_000_001, dtype=np.uint8)
    shared = {"w": np.arange(7.0)}
    value = {"a": random_bytes, "b": random_bytes.view("u1")[:300_000].view("<f4"), "text": "ü€" * 5000,
             "twice": [shared, shared], "bytes": random_bytes.tobytes()[:9000]}  # fmt: skip
    assert_same(read(pickle.dumps(value, protocol)), value)


def test_numpy_1_and_2_name_their_modules_differently() -> None:
    value = {"w": np.arange(6).reshape(2, 3), "one": np.float64(1.5)}
    for protocol in (2, 3):
        content = pickle.dumps(value, protocol)
        assert (b"numpy._core." in content) == (np.lib.NumpyVersion(np.__version__) >= "2.0.0")
        for old, new in ((b"numpy._core.", b"numpy.core."), (b"numpy.core.", b"numpy._core.")):
            assert_same(read(content.replace(old, new)), value)


@pytest.mark.parametrize("name", ["FlatMapping", "frozendict"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_mappings_of_haiku_are_dicts(name: str, protocol: int) -> None:
    inner = {"w": np.ones((3, 2, 2, 1, 4), np.float32), "b": np.zeros((3, 4), np.float32)}
    with haiku_mapping(name) as kind:
        content = pickle.dumps({"params": kind({"conv": kind(inner)}), "net_state": kind({})}, protocol)
    assert_same(read(content), {"params": {"conv": inner}, "net_state": {}})
    assert "haiku" not in sys.modules


def proto(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def of_global(name: bytes) -> bytes:
    return b"c" + name + b"\n"


INT_ARRAY = pickle.dumps(np.arange(4), 2)
COLLIDING = b"}(" + b"".join(b"\x8a\x10" + (i * (2**61 - 1)).to_bytes(16, "little") + b"N" for i in range(1, 9_000))
REFUSED = {
    "a call": proto(of_global(b"os\nsystem") + b"X\x02\x00\x00\x00id\x85R"),
    "a call by names on the stack": proto(b"\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R"),
    "eval": proto(of_global(b"builtins\neval") + b"X\x01\x00\x00\x001\x85R"),
    "getattr": proto(of_global(b"builtins\ngetattr") + of_global(b"numpy\nndarray") + b"\x8c\x05shape\x86R"),
    "numpy's loader": proto(of_global(b"numpy\nload") + b"\x8c\x05x.npy\x85R"),
    "another of its classes": proto(of_global(b"numpy._core.multiarray\n_reconstruct") + of_global(b"numpy\nmatrix")
                                    + b"K\x00\x85C\x01b\x87R"),
    "_codecs.decode": proto(of_global(b"_codecs\ndecode") + b"C\x01xX\x03\x00\x00\x00zip\x86R"),
    "encode to something else": proto(of_global(b"_codecs\nencode") + b"X\x01\x00\x00\x00xX\x03\x00\x00\x00zip\x86R"),
    "a class": proto(of_global(b"collections\nOrderedDict")),
    "INST": proto(b"(ios\nsystem\n"), "OBJ": proto(b"(" + of_global(b"os\nsystem") + b"o"),
    "NEWOBJ": proto(of_global(b"collections\nOrderedDict") + b")\x81"),
    "NEWOBJ_EX": proto(of_global(b"collections\nOrderedDict") + b")}\x92"),
    "BUILD of a dict": proto(b"}}b"), "BUILD of a name": proto(of_global(b"os\nsystem") + b"}b"),
    "extension codes": proto(b"\x82\x01"), "extension codes of 4 bytes": proto(b"\x84\x01\x00\x00\x00"),
    "persistent ids": proto(b"K\x01Q"), "persistent lines": proto(b"Px\n"),
    "buffers from elsewhere": proto(b"\x97", 5), "sets": proto(b"\x8f"), "frozen sets": proto(b"(\x91"),
    "protocol 0": pickle.dumps({"a": 1}, 0), "protocol 1": pickle.dumps({"a": 1}, 1), "protocol 6": proto(b"N", 6),
    "texts of numbers": proto(b"I1\n"), "no bytes": b"", "a text": b"hello",
    "objects": pickle.dumps(np.array([{}, print], object), 4), "times": pickle.dumps(np.array(["2020"], "M8[D]")),
    "texts in arrays": pickle.dumps(np.array(["a"])), "records": pickle.dumps(np.zeros(2, [("a", "f4")])),
    "complex": pickle.dumps(np.ones(2, complex)), "a set": pickle.dumps({1, 2}), "a function": pickle.dumps(len),
    "a dtype": pickle.dumps(np.dtype("f4")), "an array without values":
        proto(of_global(b"numpy._core.multiarray\n_reconstruct") + of_global(b"numpy\nndarray")
              + b"K\x00\x85C\x01b\x87R"),
    "a memo index of 2**31": proto(b"Nr\x00\x00\x00\x80j\x01\x00\x00\x80"),
    "a text of 2**63 bytes": proto(b"\x8d" + b"\xff" * 8), "bytes of 2**62": proto(b"\x8e" + b"\xff" * 7 + b"\x3f"),
    "an integer of 2**31 bytes": proto(b"\x8b\xff\xff\xff\x7f"), "a frame beyond the end": proto(b"\x95" + b"\xff" * 8),
    "tuples of tuples": proto(b"Nq\x000" + b"h\x00h\x00\x86q\x000" * 60 + b"h\x00"),
    "tuples inside each other": proto(b"N" + b"\x85" * 20_000),
    "lists inside each other": proto(b"]" + b"]" * 5000 + b"a" * 5000),
    "a list of itself": proto(b"]q\x00h\x00a"), "a dict of itself": proto(b"}q\x00X\x01\x00\x00\x00ah\x00s"),
    "one buffer of many arrays": proto(
        of_global(b"numpy\ndtype") + b"\x8c\x02u1\x89\x88\x87Rq\x01B" + struct.pack("<I", 10**6) + bytes(10**6)
        + b"q\x02(" + (of_global(b"numpy._core.numeric\n_frombuffer")
                       + b"(h\x02h\x01J\x40\x42\x0f\x00\x85\x8c\x01CtR") * 300 + b"t"),
    "keys of one hash": proto(COLLIDING + b"u"), "a list as key": proto(b"}]Ns"), "half a pair": proto(b"}(NNNu"),
    "many small objects": proto(b"(" + b"}" * 450_000 + b"t"),
    "a shape that is too large": INT_ARRAY.replace(b"K\x04", b"K\x05", 1),
    "a product that overflows":
        proto(INT_ARRAY[2:-1].replace(b"K\x04\x85", b"(" + b"J\xff\xff\xff\x7f" * 70 + b"t", 1)),
    "a stack without objects": proto(b"a"), "no mark": proto(b"u"), "two objects": proto(b"NN"), "a mark": proto(b"("),
    "nothing in the memo": proto(b"h\x05"), "more after the end": pickle.dumps(1) + b"x",
    "not UTF-8": proto(b"\x8c\x01\xff"), "no end": pickle.dumps({"a": 1})[:-1],
}  # fmt: skip


def test_a_tensor_of_torch_is_not_an_array() -> None:
    content = proto(of_global(b"torch.storage\n_load_from_bytes") + b"C\x01x\x85R", 4)
    with pytest.raises(
        FormatError, match=r"found torch\.storage\._load_from_bytes\. .* save the tensors with torch\.sav"
    ):
        read(content)


# What is found in those whose limit or name must be the reason.
FOUND = {
    "a call": "os.system", "a call by names on the stack": "os.system", "eval": "builtins.eval",
    "getattr": "builtins.getattr", "numpy's loader": "numpy.load", "_codecs.decode": "_codecs.decode",
    "encode to something else": "_codecs.encode", "BUILD of a dict": "the state of another object",
    "extension codes": "opcode", "persistent ids": "opcode 'Q'", "objects": "the dtype|numpy.dtype|array of objects",
    "a memo index of 2**31": "none under 2147483649", "a text of 2**63 bytes": "its end",
    "an integer of 2**31 bytes": "a whole number of 2,147,483,647 bytes", "tuples of tuples": "40,000 objects",
    "a list of itself": "100 containers", "a dict of itself": "100 containers",
    "one buffer of many arrays": "one buffer of many arrays", "keys of one hash": "a key that is no",
    "many small objects": "more than 40,000 opcodes", "a shape that is too large": "32",
    "a product that overflows": "another", "more after the end": "1 bytes and 0 objects",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_pickle_of_arrays_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth of the time and the memory that a pickle may take."""
    content = REFUSED[name]
    monkeypatch.setattr(pickled_arrays, "MOST_OPCODES", pickled_arrays.MOST_OPCODES // 10)
    tracemalloc.start()
    try:
        with pytest.raises(
            (FormatError, DamagedError), match=rf"^file x.pkl: expected .*; found .*{FOUND.get(name, '')}"
        ):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < len(content) + 6.4 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_memory_is_that_of_the_arrays(protocol: int) -> None:
    content = pickle.dumps({"w": np.random.default_rng(0).integers(0, 256, 20_000_000, dtype=np.uint8)}, protocol)
    tracemalloc.start()
    try:
        read(content)
        assert tracemalloc.get_traced_memory()[1] < len(content) + 16 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_nothing_is_imported_or_run() -> None:
    script = """
import pickle, sys
sys.path.insert(0, '.')
from tests.formats.test_pickled_arrays import REFUSED
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.formats.pickled_arrays import read_pickled_arrays
modules, events = set(sys.modules), []
watched = ('import', 'exec', 'compile', 'open', 'os.', 'subprocess.', 'pickle.', 'socket.', 'ctypes.', 'marshal.')
sys.addaudithook(lambda event, arguments: events.append((event, arguments)) if event.startswith(watched) else None)
for content in REFUSED.values():
    try:
        read_pickled_arrays(content, 'x')
    except ZooError as error:
        str(error)
events = list(events)
assert not events, events[:3]
assert set(sys.modules) == modules, set(sys.modules) - modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_mutated_pickles_are_read_or_refused() -> None:
    """A share of what `python -m tests.fuzz_pickles` reads, with its bounds on memory and its watch for imports."""
    counts = fuzz(3000, seed=0)
    assert set(counts) == {"read", "FormatError", "DamagedError"}
    assert min(counts.values()) > 30
