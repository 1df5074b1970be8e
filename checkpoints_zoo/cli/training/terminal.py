"""What the commands share: talk on stderr, errors as one line and an exit code, the engine that was asked for."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from checkpoints_zoo.cli.failures import BUG, INTERRUPTED, USAGE, code_of
from checkpoints_zoo.errors import LockedError, ZooError
from checkpoints_zoo.executor import Engine, engine


def say(text: str) -> None:
    """Write to stderr, where talk goes."""
    click.echo(text, err=True)


@contextmanager
def failing() -> Iterator[None]:
    """Turn errors that a user meets into a line on stderr and an exit code while the block runs."""
    try:
        yield
    except ZooError as error:
        job = [note.split(":")[0] for note in getattr(error, "__notes__", []) if note.startswith("in job ")]
        say(f"{error}{f' ({job[0]})' if job else ''}")
        sys.exit(USAGE if isinstance(error, LockedError) else code_of(error))
    except KeyboardInterrupt:
        say("interrupted: the same command goes on where it was")
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 (verify's exit code 1 has another meaning)
        traceback.print_exception(error)
        say("a bug of ours: please report it, with the lines above")
        sys.exit(BUG)


def engine_of(devices: str, workers: int | None, ray: str | None) -> Engine:
    """Return the engine that the command line asks for.

    Args:
        devices: between commas.
        workers, ray: as of `executor.engine`.

    Raises:
        UsageError: a device that isn't there.
    """
    each = [device.strip() for device in devices.split(",")]
    if ray is None:
        from checkpoints_zoo.networks.device import check_device

        for device in each:
            check_device(device)
    return engine(workers, each, ray, say)
