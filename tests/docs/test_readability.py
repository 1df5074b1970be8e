"""The draw of sentences and names that a stranger reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from docs.make import readability
from docs.make.readability import ROOT

FILE = '''"""A short module.

It has a second sentence of words.
"""

# A comment that goes on
# over two lines of text.
LIMIT = 3


def check(count: int) -> None:
    """Check a count against the limit.

    Args:
        count: how many there are in all.
    """
    if count > LIMIT:
        raise ValueError(f"count: expected at most {LIMIT}. Give a smaller count here.")
'''


def test_sentences_of_docstrings_comments_and_errors_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(FILE, encoding="utf-8")
    assert {sentence for sentence, _ in readability.sentences(path)} == {
        "It has a second sentence of words.",
        "A comment that goes on over two lines of text.",
        "Check a count against the limit.",
        "count: how many there are in all.",
        "count: expected at most {LIMIT}.",
        "Give a smaller count here.",
    }


def test_a_name_stands_in_its_whole_statement(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "def add(\n    first: int,\n    second: int,\n) -> int:\n    total = (\n        first\n        + second)\n"
    )
    assert [readability._code(path, line) for line in (1, 3, 5)] == [
        "def add( first: int, second: int, ) -> int:",
        "def add( first: int, second: int, ) -> int:",
        "total = ( first + second)",
    ]


@pytest.mark.slow
def test_a_seed_draws_the_same_lines_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a room: the whole package takes seconds for each name."""
    shutil.copytree(ROOT / "checkpoints_zoo" / "predictions", tmp_path / "checkpoints_zoo" / "predictions")
    monkeypatch.setattr(readability, "ROOT", tmp_path)
    monkeypatch.setattr(readability, "everything", readability.everything.__wrapped__)
    assert readability.draw(20, seed=0) == readability.draw(20, seed=0)
    assert readability.draw(20, seed=0) != readability.draw(20, seed=1)
