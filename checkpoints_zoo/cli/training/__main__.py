"""`python -m training RECIPE --members 0-63 --out out/`: train members and export them as a source."""

from __future__ import annotations

import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkpoints_zoo.cli.training.commands import merge_command, verify_command
from checkpoints_zoo.cli.training.terminal import engine_of, failing, say
from checkpoints_zoo.errors import UsageError

if TYPE_CHECKING:  # what imports torch is imported where a command runs, so that --help starts without it
    from checkpoints_zoo.training.population import Progress


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
        from checkpoints_zoo.cli.training.listing import table_of
        from checkpoints_zoo.formats.selection import format_ids, parse_ids
        from checkpoints_zoo.training.choosing import chosen
        from checkpoints_zoo.training.export import run

        if recipe is None or members is None or out is None or listing:
            click.echo(table_of(recipe))
            return
        ids = [member for member, epoch in parse_ids(members) if epoch is None]
        if len(ids) < len(parse_ids(members)):
            raise UsageError("--members", expected="ids without epochs", found=members)
        what = chosen(recipe, changes, name, init_permutation, init_seed)

        def progress(p: Progress) -> None:
            stack = format_ids([(m, None) for m in p.members])
            accuracy = "" if p.accuracy is None else f", test accuracy {p.accuracy:.4f}"
            seconds = time.monotonic() - began
            say(f"{what.name} {stack}: epoch {p.epoch}/{p.epochs}, loss {p.loss:.4f}{accuracy}, {seconds:.0f} s")

        on = engine_of(devices, workers, ray)
        trained = run(what, ids, out, on, say, progress, log=say if log_json else lambda line: None)
        say(f"{what.name}: {trained} members trained into {out} in {time.monotonic() - began:.0f} s")


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


if __name__ == "__main__":
    command()
