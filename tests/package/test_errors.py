"""Errors: their text, the builtin a caller would catch, the facts they carry, and the way between processes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from checkpoints_zoo import errors
from checkpoints_zoo.errors import ZooError

KINDS = {
    "CollectionNotFound": KeyError,
    "MemberNotFound": (KeyError, IndexError),
    "SourceNotFound": FileNotFoundError,
    "SelectionError": ValueError,
    "UsageError": ValueError,
    "MissingPackage": (ValueError, ModuleNotFoundError),
    "SymmetryError": ValueError,
    "FormatError": ValueError,
    "DamagedError": ValueError,
    "LayoutError": ValueError,
    "TooLargeError": MemoryError,
    "LockedError": BlockingIOError,
    "NetworkError": ConnectionError,
    "AccessError": PermissionError,
    "StorageError": OSError,
    "WorkerError": RuntimeError,
}


def test_every_error_is_listed_here() -> None:
    kinds = {n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, ZooError)}
    assert kinds - {"ZooError"} == set(KINDS)


@pytest.mark.parametrize(
    ("clauses", "text"),
    [
        ({}, "thing."),
        ({"do": "Do this"}, "thing. Do this."),
        ({"do": "Did you mean that?"}, "thing. Did you mean that?"),
        ({"expected": "a"}, "thing: expected a."),
        ({"found": "b"}, "thing: found b."),
        ({"expected": "a", "found": "b"}, "thing: expected a; found b."),
        ({"expected": "a", "found": "b", "do": "Do this"}, "thing: expected a; found b. Do this."),
    ],
)
def test_text(clauses: dict[str, str], text: str) -> None:
    assert str(ZooError("thing", **clauses)) == text


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str) -> None:
    kind: type[ZooError] = getattr(errors, name)
    error = kind(
        "thing",
        expected="a",
        found="b",
        do="Do this",
        collection="c",
        member=0,
        tensor="t",
        path=Path("x") / "y",
    )
    expected = KINDS[name] if isinstance(KINDS[name], tuple) else (KINDS[name],)
    assert all(isinstance(error, builtin) for builtin in expected)
    # KeyError and OSError would show a repr or an errno instead.
    assert str(error) == "thing: expected a; found b. Do this."
    facts = {"collection": "c", "member": 0, "tensor": "t", "path": "x/y", "thing": "thing", "expected": "a",
             "found": "b", "do": "Do this"}  # fmt: skip
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301
        assert type(other) is kind
        assert str(other) == str(error)
        assert {name: getattr(other, name) for name in facts} == facts


def test_facts_are_none_unless_given() -> None:
    error = ZooError("thing")
    assert (error.collection, error.member, error.tensor, error.path) == (None, None, None, None)
