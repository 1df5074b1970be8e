"""Options that several commands share: the members that are meant, and what builds a net of a user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.sources.source import SelectedMembers, select_members

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection


@dataclass(frozen=True)
class Selection:
    """A name and which of its members are meant: the arguments of `zoo.load`."""

    name: str
    n: int | None
    where: str | None
    members: str | None
    sample: int | None
    source: str | None
    architecture: str | None = None

    def load(self) -> Collection:
        """Return the members as a Collection."""
        from checkpoints_zoo.collection.collection import load

        build = None if self.architecture is None else imported(self.architecture)
        return load(**self._chosen(), architecture=build)

    def find(self) -> SelectedMembers:
        """Select as `zoo.load` does, importing neither torch nor pandas; return what the manifest says."""
        return select_members(**self._chosen())

    def _chosen(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "architecture"}


def finding(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command NAME and the options that select members, and pass it the Selection as `selection`."""

    @click.argument("name", metavar="NAME")
    @click.option("-n", "n", type=int, metavar="N", help="The first N members; with --sample, N drawn ones.")
    @click.option("--where", metavar="SQL", help='A condition on the manifest\'s columns: "test_accuracy > 0.97".')
    @click.option("--members", metavar="IDS", help='Members by id: "0-9,15,7@40".')
    @click.option("--sample", type=int, metavar="SEED", help="Draw the N members without replacement, by this seed.")
    @click.option("--source", metavar="SOURCE", help="A folder, or hf://datasets/ORG/NAME[@REVISION].")
    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        chosen = {f.name: options.pop(f.name) for f in fields(Selection) if f.name != "architecture"}
        return command(*args, selection=Selection(**chosen), **options)

    return wrapped


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that runs members what `finding` does, and the option that says what builds their net."""

    @finding
    @click.option("--architecture", metavar="MODULE:FUNCTION", help="What builds a net of your own; its code runs.")
    @wraps(command)
    def wrapped(*args: Any, selection: Selection, architecture: str | None, **options: Any) -> Any:
        return command(*args, selection=replace(selection, architecture=architecture), **options)

    return wrapped


def imported(text: str) -> Callable[..., Any]:
    """Import what MODULE:FUNCTION names, looking in the working folder too, from now on; return it.

    The module's code runs.

    Raises:
        UsageError: there is none.
    """
    module, _, name = text.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # and it stays: worker processes look there as well
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"architecture {text}", expected="MODULE:FUNCTION that can be imported from here",
                         found=str(error)) from error  # fmt: skip
    if not callable(found):
        raise UsageError(f"architecture {text}", expected="a function", found=f"a {type(found).__name__}")
    build: Callable[..., Any] = found
    return build
