"""Marks of tests that fail because of a bug that is known and not yet mended."""

from __future__ import annotations

import pytest


def known_bug(what: str) -> pytest.MarkDecorator:
    """Let a test fail, or pass once the bug is mended: then this mark goes.

    Args:
        what: the bug, in a few words.
    """
    return pytest.mark.xfail(reason=f"known bug: {what}", strict=False)
