"""The page on the architecture: its words are written by hand, its picture and its ways of a datum are made."""

from __future__ import annotations

from collections.abc import Mapping

from docs.make.marks import fill
from docs.make.rooms import PACKAGE, ROOT, first_sentence, order, room_table
from docs.make.ways import WAYS, traced

PAGE = ROOT / "docs" / "architecture.md"


def page() -> str:
    """Return the page, its rooms read and its ways traced anew."""
    written = PAGE.read_text(encoding="utf-8")
    parts = {name: table(files) for name, files in zip(WAYS, traced(*WAYS.values()), strict=True)}
    try:
        order((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    except LookupError:  # without the contract the table stays as it is
        return fill(written, parts)
    return fill(written, {"rooms": room_table(), **parts})


def table(files: Mapping[str, str]) -> str:
    """Lay out the files of a way: each with the function that runs first, and the file's own first sentence."""
    lines = ["| | file | first call | what it is |", "|---|---|---|---|"]
    lines += [
        f"| {at} | `{file}` | `{function.replace('.<locals>', '')}` | {first_sentence(ROOT / PACKAGE / file)} |"
        for at, (file, function) in enumerate(files.items(), 1)
    ]
    return "\n".join(lines)
