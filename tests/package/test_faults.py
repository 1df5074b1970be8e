"""The table of faults agrees with the tests, and has every kind of fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.make import faults

TESTS = Path(faults.__file__).parents[2] / "tests"
# Kinds of faults that the table must have.
KINDS = (
    "401", "403", "no such repo", "no such revision", "no such file", "gated", "408", "429 with a wait", "429 without",
    "500", "503", "reset", "cut short", "wrong bytes", "no bytes for a long time", "200 instead of 206", "416",
    "expired link", "another host", "size 0", "HTML page", "LFS pointer", "disk full", "read-only cache",
    "several processes", "SIGKILL", "offline, all", "offline, some", "offline, nothing", "new commit", "re-publication",
)  # fmt: skip


def source_of(file: str) -> str:
    """Return the text of a test file, from any folder of the tests."""
    (path,) = TESTS.rglob(file)
    return path.read_text(encoding="utf-8")


def test_the_table_is_up_to_date() -> None:
    written = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")
    assert written == faults.page(), "run `python -m docs.make`"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_there(kind: str) -> None:
    assert any(kind in row.kind for row in faults.rows())


def test_every_test_is_there() -> None:
    for row in faults.rows():
        file, _, name = row.test.partition("::")
        assert re.search(rf"^def {name}\(", source_of(file), re.MULTILINE), row.test


def test_pinned_texts_are_those_of_the_tests() -> None:
    """Each text of the table stands in a test or among the lasting faults, word for word between dots."""
    for row in faults.ROWS:
        file = row.test.partition("::")[0]
        source = (source_of(file) + source_of("lasting_faults.py")).replace("\\", "")
        for words in re.findall(r"(?:expected|found) [a-z][^;.…0-9]{12,}", row.seen):
            assert words.strip() in source or "HF_HUB_OFFLINE" in words, (row.test, words)
