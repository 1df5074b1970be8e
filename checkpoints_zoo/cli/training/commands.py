"""`python -m training merge` and `python -m training verify`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from checkpoints_zoo.cli.training.terminal import engine_of, failing, say

FOLDER = click.Path(file_okay=False, path_type=Path)


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
        from checkpoints_zoo.collection.loading import load
        from checkpoints_zoo.training.choosing import chosen
        from checkpoints_zoo.training.retrain import retrain

        made = None if recipe is None else chosen(recipe, changes)
        found = retrain(load(name, source=source), count, made, engine_of(devices, workers, ray), say)
        for each in found:
            agree = "agree" if each.same else "DIFFER"
            click.echo(f"member {each.member}: {each.compared} {agree}: {each.text}")
        sys.exit(0 if all(each.same for each in found) else 1)
