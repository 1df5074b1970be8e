"""Paths inside a source: why a path that anyone may have written is refused."""

from __future__ import annotations

from pathlib import PurePosixPath

LONGEST_PATH = 1024  # characters


def path_refusal(path_in_source: str) -> str:
    """Return the reason why a path from a manifest is refused; "" if the path stays inside its source."""
    parts = PurePosixPath(path_in_source).parts
    path_text = repr(path_in_source if len(path_in_source) <= 200 else f"{path_in_source[:200]}…")
    if not path_in_source or "\0" in path_in_source or "\\" in path_in_source or ":" in path_in_source:
        return f"{path_text}, which is empty or has a NUL, a backslash or a colon"
    # Some systems drop dots and spaces at the end of a name, so that "... " becomes "..".
    if path_in_source.startswith("/") or any(not part.strip(". ") for part in parts):
        return f"{path_text}, which leads out of it"
    if any(len(part.encode(errors="replace")) > 255 for part in parts) or len(path_in_source) > LONGEST_PATH:
        return f"{path_text}, which is longer than a file system takes"
    return "" if "/".join(parts) == path_in_source else f"{path_text}, which is no plain path"
