"""`python -m training RECIPE --members 0-63 --out out/`: train members and export them as a source; merge, verify.

Without a clone it is `python -m checkpoints_zoo.cli.train`. Talk goes to stderr; an error is one line and an exit code.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkpoints_zoo.cli.main import BUG, INTERRUPTED, USAGE, code_of, table
from checkpoints_zoo.errors import LockedError, UsageError, ZooError
from checkpoints_zoo.workers import Engine, choose_engine

if TYPE_CHECKING:
    from checkpoints_zoo.training.population import Progress

FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", required=False)
@click.option("--members", metavar="IDS", help="Ids, such as 0-63 or 3,5,8-11; an id is the member's seed.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the source.")
@click.option("--list", "listing", is_flag=True, help="List the recipes, or those of the file RECIPE, and stop.")
@click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE",
    help="Set a field of the recipe, such as lr=0.05 or epochs=1; may be given again.",
)  # fmt: skip
@click.option("--name", help="Name of the collection; by default the recipe's.")
@click.option(
    "--device", "--devices", "devices", default="cpu", show_default=True, metavar="DEVICE[,DEVICE...]",
    help="What to train on, such as cuda, or cuda:0,cuda:1; for two workers on one: cuda,cuda.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes at a time; one a device by default."
)
@click.option("--ray", metavar="CLUSTER", help="Train on a Ray cluster: auto, local, or an address.")
@click.option("--log-json", is_flag=True, help="Write a JSON line a member to stderr too.")
@click.option(
    "--init-permutation", type=click.IntRange(min=0), default=0, metavar="TRANSPOSITIONS",
    help="Permute each member's initialisation by so many transpositions of units.",
)  # fmt: skip
@click.option(
    "--init-seed", type=click.IntRange(min=0, max=2**31 - 1), metavar="SEED",
    help="Start all members from one initialisation, this seed's; each sees the images in its own order.",
)  # fmt: skip
def main(
    recipe: str | None,
    members: str | None,
    out: Path | None,
    listing: bool,
    changes: tuple[str, ...],
    name: str | None,
    devices: str,
    workers: int | None,
    ray: str | None,
    log_json: bool,
    init_permutation: int,
    init_seed: int | None,
) -> None:
    """Train members of RECIPE and export them as a source: shards, manifest, description.

    RECIPE is a name of --list, or a Python file that defines RECIPE or RECIPES (FILE.py:NAME takes one of several).
    Members that OUT holds already are left alone; a run that was killed goes on where it was saved.

    \b
    Two further commands, each with a --help of its own:
      python -m training merge   puts members of several folders together
      python -m training verify  trains some members again and compares
    """
    began = time.monotonic()
    if not listing:
        for option, value in (("argument 'RECIPE'", recipe), ("option '--members'", members), ("option '--out'", out)):
            if value is None:
                raise click.UsageError(f"Missing {option}.")
    with failing():
        from checkpoints_zoo.formats.selection import format_ids, parse_ids
        from checkpoints_zoo.training.export import train_into
        from checkpoints_zoo.training.recipes import choose_recipe

        if recipe is None or members is None or out is None or listing:
            click.echo(table_of(recipe))
            return
        ids = [member for member, epoch in parse_ids(members) if epoch is None]
        if len(ids) < len(parse_ids(members)):
            raise UsageError("--members", expected="ids without epochs", found=members)
        what = choose_recipe(recipe, changes, name, init_permutation, init_seed)

        def progress(p: Progress) -> None:
            stack = format_ids([(m, None) for m in p.members])
            accuracy = "" if p.accuracy is None else f", test accuracy {p.accuracy:.4f}"
            seconds = time.monotonic() - began
            say(f"{what.name} {stack}: epoch {p.epoch}/{p.epochs}, loss {p.loss:.4f}{accuracy}, {seconds:.0f} s")

        on = engine_of(devices, workers, ray)
        trained = train_into(what, ids, out, on, say, progress, log=say if log_json else lambda line: None)
        say(f"{what.name}: {trained} members trained into {out} in {time.monotonic() - began:.0f} s")


def table_of(text: str | None) -> str:
    """Return a table of the recipes of a file, or of those that come with the package, by the names they are chosen by.

    Raises:
        UsageError: no such recipe or file.
    """
    from checkpoints_zoo.training import recipe_files
    from checkpoints_zoo.training.recipes import RECIPES, recipe_by_name

    recipes = {name: make() for name, make in RECIPES.items()}
    if text is not None:
        recipes = (
            recipe_files.read_recipes(Path(text)) if recipe_files.is_recipe_file(text) else {text: recipe_by_name(text)}
        )
    return table(
        [
            {
                "recipe": name, "members": f"{r.members:,}", "architecture": r.architecture, "data": r.dataset,
                "epochs": r.epochs, "at once": r.stack_width, "precision": r.precision,
            }
            for name, r in recipes.items()
        ],
        right=["members"],
    )  # fmt: skip


@click.command("merge", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=FOLDER)
@click.option("--out", required=True, type=FOLDER, help="Folder of the source; it may hold members already.")
@click.option("--name", "names", multiple=True, help="A collection; by default all that the folders have.")
def merge_command(folders: tuple[Path, ...], out: Path, names: tuple[str, ...]) -> None:
    """Put members that were trained into several folders together into one source.

    The source is the same, byte for byte, as if one run had trained them all, but for times, versions and devices in
    the rows. Members of different recipes, and a member with different weights in two folders, are refused.
    """
    with failing():
        from checkpoints_zoo.training.merge import merge

        for name, members in merge(folders, out, names or None, say).items():
            say(f"{name}: {members:,} members in {out}")


@click.command("verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.option("--retrain", "count", default=3, show_default=True, type=click.IntRange(min=1), metavar="N",
              help="How many members to train again, spread evenly.")  # fmt: skip
@click.option("--source", metavar="SOURCE", help="Where the collection lies; by default where the catalog says.")
@click.option("--recipe", help="The recipe, where the rows' name isn't known here: a name, or FILE.py[:NAME].")
@click.option("--set", "changes", multiple=True, metavar="FIELD=VALUE", help="What was set of --recipe.")
@click.option("--device", "--devices", "devices", default="cpu", show_default=True, metavar="DEVICE[,DEVICE...]",
              help="What to train on.")  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes at a time; one a device by default."
)
@click.option("--ray", metavar="CLUSTER", help="Train on a Ray cluster: auto, local, or an address.")
def verify_command(
    name: str, count: int, source: str | None, recipe: str | None, changes: tuple[str, ...], devices: str,
    workers: int | None, ray: str | None,
) -> None:  # fmt: skip
    """Train some members of collection NAME again from their rows, and compare: exit code 1 where one differs.

    Bit for bit where torch and the processor are those that the row names; by test accuracy elsewhere.
    """
    with failing():
        from checkpoints_zoo.collection.collection import load
        from checkpoints_zoo.training.recipes import choose_recipe
        from checkpoints_zoo.training.retrain import retrain

        made = None if recipe is None else choose_recipe(recipe, changes)
        found = retrain(load(name, source=source), count, made, engine_of(devices, workers, ray), say)
        for each in found:
            agree = "agree" if each.same else "DIFFER"
            click.echo(f"member {each.member}: {each.compared} {agree}: {each.text}")
        sys.exit(0 if all(each.same for each in found) else 1)


def command() -> None:
    """Run the command that the first argument names, `main` where it names none."""
    commands = {"merge": merge_command, "verify": verify_command}
    found = commands.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without "±" shows its code
    if found is None:
        main(prog_name="python -m training")
    else:
        found(sys.argv[2:], prog_name=f"python -m training {sys.argv[1]}")


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
        workers, ray: as of `workers.choose_engine`.

    Raises:
        UsageError: a device that isn't there.
    """
    each = [device.strip() for device in devices.split(",")]
    if ray is None:
        from checkpoints_zoo.networks.device import check_device

        for device in each:
            check_device(device)
    return choose_engine(workers, each, ray, say)


def say(text: str) -> None:
    """Write to stderr, where talk goes."""
    click.echo(text, err=True)


if __name__ == "__main__":
    command()
