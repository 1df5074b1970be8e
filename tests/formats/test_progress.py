"""Progress: a bar with a rate on a terminal, after two seconds, and nothing in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from checkpoints_zoo.formats import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a loop of two batches of three members each; return what is on stderr."""
    monkeypatch.setattr(sys, "stderr", stderr)
    batches = [[0, 1, 2], [3, 4, 5]]
    assert list(progress.progress(batches, 6, "some: mass", size=len)) == batches
    return "" if stderr is None else stderr.getvalue()


def test_a_long_loop_shows_a_rate_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 0)
    text = shown(Terminal(), monkeypatch)
    assert "some: mass:" in text
    assert "/6 [" in text
    assert "members/s" in text
    assert text.endswith("\r")  # the line is empty again


def test_a_short_loop_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(Terminal(), monkeypatch) == ""


@pytest.mark.parametrize("stderr", [io.StringIO(), None], ids=["pipe", "none"])
def test_a_pipe_gets_nothing(stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 0)
    assert shown(stderr, monkeypatch) == ""
