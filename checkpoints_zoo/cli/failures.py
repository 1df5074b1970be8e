"""The one table from an exception to an exit code, and the line that says what went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from checkpoints_zoo import errors
from checkpoints_zoo.cli.output import printable

DONE, FOUND, USAGE, MISSING, DAMAGED, NETWORK, BUG, INTERRUPTED, CLOSED = 0, 1, 2, 3, 4, 5, 70, 130, 141

MEANINGS = {
    DONE: "done",
    FOUND: "`verify` or `audit` found something",
    USAGE: "a command, option or selection that can't be met",
    MISSING: "a collection, member, source or file that is not there, or may not be read",
    DAMAGED: "damaged data, or a format that this version can't read",
    NETWORK: "the network; or someone else has published to the repo meanwhile",
    BUG: "a bug of ours: please report it",
    INTERRUPTED: "interrupted",
    CLOSED: "nobody reads the output any more (`zoo-cli list | head -1`)",
}


class ClosedOutput(Exception):
    """Nobody reads the output: a BrokenPipeError by another name, since click ends with code 1 on that one."""


# The first kind that fits; anything else is a bug.
CODES: tuple[tuple[type[BaseException], int], ...] = (
    (click.exceptions.Abort, INTERRUPTED),
    (KeyboardInterrupt, INTERRUPTED),
    (ClosedOutput, CLOSED),
    (BrokenPipeError, CLOSED),
    (click.ClickException, USAGE),
    (errors.UsageError, USAGE),
    (errors.SelectionError, USAGE),
    (errors.TooLargeError, USAGE),
    (errors.WorkerError, USAGE),
    (errors.CollectionNotFound, MISSING),
    (errors.MemberNotFound, MISSING),
    (errors.SourceNotFound, MISSING),
    (errors.LockedError, MISSING),
    (errors.DamagedError, DAMAGED),
    (errors.FormatError, DAMAGED),
    (errors.LayoutError, DAMAGED),
    (ConnectionError, NETWORK),
    (TimeoutError, NETWORK),
    (OSError, MISSING),
)


def code_of(error: BaseException) -> int:
    """Return the exit code for an exception."""
    return next((code for kind, code in CODES if isinstance(error, kind)), BUG)


def explain(error: BaseException) -> int:
    """Say on stderr what went wrong; return the exit code."""
    code = code_of(error)
    if code == BUG:
        traceback.print_exception(error)
        version = _version()
        kind = type(error).__name__
        say(f"error: a bug of ours ({kind} in {version}): please report it, with the lines above")
    elif code == INTERRUPTED:
        say("interrupted")
    elif code != CLOSED:
        say(f"error: {_text(error)}")
    return code


@contextmanager
def closed_output() -> Iterator[None]:
    """Turn a BrokenPipeError into ClosedOutput."""
    try:
        yield
    except BrokenPipeError as error:
        raise ClosedOutput from error


def say(text: str) -> None:
    """Write one line to stderr."""
    click.echo(f"zoo-cli: {printable(text)}", err=True)


def _text(error: BaseException) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = error.format_message().rstrip(".")
        return f"{message}{'' if message.endswith('?') else '.'} See `{error.ctx.command_path} --help`."
    if isinstance(error, click.ClickException):
        return error.format_message()
    return str(error)


def _version() -> str:
    from importlib.metadata import version

    return f"checkpoints-zoo {version('checkpoints-zoo')}"


def discard_output() -> None:
    """Point stdout at nothing, so that Python's own flush at its end finds no closed pipe."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
    except (AttributeError, OSError, ValueError):
        return
