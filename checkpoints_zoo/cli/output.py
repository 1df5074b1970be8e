"""The one sink of all commands: data to stdout as tables or JSON, talk to stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any

import click

from checkpoints_zoo.formats.text import aligned
from checkpoints_zoo.formats.text import in_bytes as in_bytes


@dataclass(frozen=True)
class Output:
    """Where a command's data and talk go.

    Args:
        format: "table" for people, "json" for programs.
    """

    format: str

    def data(self, values: Any, *blocks: str) -> None:
        """Write a command's data to stdout: the values as JSON, or the blocks of text, a line between them.

        Args:
            values: JSON values, datetimes and paths; numbers that are not finite become null.
            blocks: the same for people; empty ones are left out.
        """
        if self.format == "json":
            text = json.dumps(_plain(values), indent=1, allow_nan=False)
        else:
            text = "\n\n".join(block for block in blocks if block)
        if text:
            click.echo(text)

    def say(self, text: str) -> None:
        """Write talk to stderr."""
        click.echo("\n".join(printable(line) for line in text.split("\n")), err=True)


def output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --format, and pass it the Output as `out`."""

    @click.option(
        "--format", "format", type=click.Choice(["table", "json"]), default="table", metavar="table|json",
        help="How to print data: a table for people, or JSON.",
    )  # fmt: skip
    @wraps(command)
    def wrapped(*args: Any, format: str, **options: Any) -> Any:
        return command(*args, out=Output(format), **options)

    return wrapped


def _plain(values: Any) -> Any:
    """Return values that JSON can hold."""
    if isinstance(values, Mapping):
        return {str(key): _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    if isinstance(values, datetime):
        return values.isoformat()
    return str(values) if isinstance(values, Path) else values


def table(rows: Sequence[Mapping[str, Any]], right: Sequence[str] = ()) -> str:
    """Lay rows out in columns; return the text.

    Args:
        rows: with the same keys, which become the header.
        right: keys of columns of text that are aligned to the right, as numbers are.

    >>> print(table([{"name": "a", "members": 64}, {"name": "long", "members": 8}]))
    name  members
    a          64
    long        8
    """
    if not rows:
        return ""
    numbers = {
        at
        for at, key in enumerate(rows[0])
        if key in right or all(isinstance(row[key], int | float | None) for row in rows)
    }
    return aligned([list(rows[0]), *([text(row[key]) for key in rows[0]] for row in rows)], numbers)


def facts(values: Mapping[str, Any]) -> str:
    """Lay out one fact a line; return the text.

    >>> print(facts({"name": "convnet-digits", "members": 64}))
    name     convnet-digits
    members  64
    """
    width = max(map(len, values))
    return "\n".join(f"{key.ljust(width)}  {text(value)}".rstrip() for key, value in values.items())


def text(value: Any) -> str:
    """Write a value for people; return the text, fit for a terminal.

    >>> text(0.1234567), text(None), text(True)
    ('0.1235', '-', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if isinstance(value, list | tuple):
        return ", ".join(text(v) for v in value)
    return printable(str(value))


def printable(value: str) -> str:
    """Return text on one line without control characters: names from a source must not steer the terminal."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else f"\\x{ord(c):02x}" for c in value)


def percent(share: float | None) -> str | None:
    """Write a share as percent; return the text.

    >>> percent(0.98148)
    '98.15 %'
    """
    return None if share is None else f"{100 * share:.4g} %"
