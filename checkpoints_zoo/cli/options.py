"""Options that several commands share: selected members, images, hardware, and files that are written."""

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
from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.text import count_with_noun, format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.sources.finding import SelectedMembers
    from checkpoints_zoo.workers import Engine

IMAGES_HELP = "a name, a folder, a Parquet file, or hf://datasets/ORG/NAME"
NONE_WORD = "none"


@dataclass(frozen=True)
class Selection:
    """The name of a collection and the selection of its members: the arguments of `zoo.load`."""

    name: str
    n: int | None
    where: str | None
    members: str | None
    sample: int | None
    source: str | None
    architecture: str | None = None

    def load(self) -> Collection:
        """Load the selected members; return them as a Collection. An error of the selection comes before torch is
        imported."""
        selected = None if " + " in self.name else self.find()
        from checkpoints_zoo.collection.collection import Collection, load

        build = None if self.architecture is None else import_function(self.architecture)
        if selected is None:  # Citations of several collections, which are joined.
            return load(**self._load_arguments(), architecture=build)
        return Collection._of_selected(selected, build)

    def find(self) -> SelectedMembers:
        """Select members as `zoo.load` does, without importing torch or pandas; return their manifest rows."""
        from checkpoints_zoo.sources.finding import select_members

        arguments = self._load_arguments()
        return select_members(arguments.pop("name"), **arguments)

    def other_collection(self, name: str, other_source: str | None = None) -> Selection:
        """Return a selection of all members of another collection of the same architecture.

        Args:
            name: name of the other collection.
            other_source: source that has the collection; None for the source of this selection.
        """
        return Selection(name, None, None, None, None, other_source or self.source, self.architecture)

    def _load_arguments(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "architecture"}


def name_and_size(members: Collection) -> str:
    """Return the name of a collection, its number of members and their bytes: "mine: 2 members, 29.26 kB"."""
    return f"{members.name}: {count_with_noun(len(members), 'member')}, {format_bytes(members.nbytes)}"


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the argument NAME and the options that select members; pass the values to the command as
    `selection`."""

    @click.argument("name", metavar="NAME")
    @click.option("-n", "n", type=int, metavar="N", help="The first N members; with --sample, N random ones.")
    @click.option("--where", metavar="SQL", help='A condition on the manifest\'s columns: "test_accuracy > 0.97".')
    @click.option("--members", metavar="IDS", help='Members by id: "0-9,15,7@40".')
    @click.option("--sample", type=int, metavar="SEED", help="Choose the N members at random, by this seed.")
    @click.option(
        "--source", metavar="SOURCE", help="A folder, hf://datasets/ORG/NAME[@REVISION], https://… or gs://…."
    )
    @wraps(command)
    def run_command(*args: Any, **options: Any) -> Any:
        option_names = [field.name for field in fields(Selection) if field.name != "architecture"]
        selection = Selection(**{name: options.pop(name) for name in option_names})
        return command(*args, selection=selection, **options)

    return run_command


def network_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `selection_options`, and an option for a network that the package lacks."""

    @selection_options
    @click.option("--architecture", metavar="MODULE:FUNCTION", help="Builds a network of your own; its code runs.")
    @wraps(command)
    def run_command(*args: Any, selection: Selection, architecture: str | None, **options: Any) -> Any:
        return command(*args, selection=replace(selection, architecture=architecture), **options)

    return run_command


@dataclass(frozen=True)
class Hardware:
    """The devices and processes for training, from the options --device, --workers and --ray."""

    devices: str
    workers: int | None
    ray: str | None

    def engine(self, say: Callable[[str], object]) -> Engine:
        """Return the engine that trains on this hardware.

        Args:
            say: function called with a message for each worker that died.

        Raises:
            UsageError: this machine lacks the device.
        """
        from checkpoints_zoo.workers import choose_engine

        devices = [device.strip() for device in self.devices.split(",")]
        if self.ray is None:
            from checkpoints_zoo.networks.device import check_device

            for device in devices:
                check_device(device)
        return choose_engine(self.workers, devices, self.ray, say)


def hardware_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of training hardware, and pass it the Hardware as `hardware`."""

    @click.option(
        "--device", "--devices", "devices", default="cpu", metavar="DEVICE,…",
        help="What to train on, such as cuda, or cuda:0,cuda:1; for two workers on one: cuda,cuda.",
    )  # fmt: skip
    @click.option(
        "--workers", type=click.IntRange(min=1), metavar="N", help="Processes at a time; one a device if not given."
    )
    @click.option("--ray", metavar="CLUSTER", help="Train on a Ray cluster: auto, local, or an address.")
    @wraps(command)
    def run_command(*args: Any, **options: Any) -> Any:
        arguments = {field.name: options.pop(field.name) for field in fields(Hardware)}
        return command(*args, hardware=Hardware(**arguments), **options)

    return run_command


class OutputFile(click.ParamType[Path]):
    """An option's file that a command writes at its end. The file's name and folder are checked at the start.

    Args:
        endings: suffixes that the file's name may have, such as ".png"; empty if any suffix is allowed.
    """

    name = "file"

    def __init__(self, *endings: str) -> None:
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value).expanduser()
        if self.endings and path.suffix.lower() not in self.endings:
            self.fail(f"{str(value)!r} does not end in {' or '.join(self.endings)}.", param, ctx)
        disk.check_output(path)
        return path


class OutputFolder(click.ParamType[Path]):
    """An option's folder that a command writes into at its end. The folder is checked at the start."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value).expanduser()
        disk.check_output(path, "folder")
        return path


def parse_reference(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Parse the reference of an alignment; return a member's id, "mean", or None if the option is missing."""
    if value is None or value == "mean":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a member's id nor mean.", context, parameter)
    return int(value)


def import_function(module_and_function: str) -> Callable[..., Any]:
    """Import a function that is named as MODULE:FUNCTION; return the function. The module's code runs. From now on
    modules are also searched for in the working folder.

    Raises:
        UsageError: there is no such function.
    """
    module_name, _, function_name = module_and_function.partition(":")
    if (current_folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, current_folder)  # the folder stays in sys.path, because worker processes search it as well
    try:
        imported_object: Any = import_module(module_name)
        for part in function_name.split("."):
            imported_object = getattr(imported_object, part)
    except (ImportError, AttributeError, ValueError) as error:
        expected = "MODULE:FUNCTION that can be imported from here"
        raise UsageError(f"architecture {module_and_function}", expected=expected, found=str(error)) from error
    if not callable(imported_object):
        raise UsageError(
            f"architecture {module_and_function}", expected="a function", found=f"a {type(imported_object).__name__}"
        )
    build: Callable[..., Any] = imported_object
    return build
