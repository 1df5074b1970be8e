"""`zoo-cli train`, `zoo-cli train-merge` and `zoo-cli recipes`: train members and export them as a source."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option, table
from checkpoints_zoo.cli.options import Hardware, OutputFolder, hardware_options
from checkpoints_zoo.errors import UsageError

if TYPE_CHECKING:
    from checkpoints_zoo.training.population import Progress


@click.command()
@click.argument("recipe", metavar="RECIPE")
@click.option("--members", required=True, metavar="IDS", help="Ids, such as 0-63 or 3,5,8-11: the members' seeds.")
@click.option("-o", "--out", "folder", required=True, metavar="DIR", type=OutputFolder(), help="Folder of the source.")
@click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE",
    help="Set a field of the recipe, such as lr=0.05 or epochs=1; may be given again.",
)  # fmt: skip
@click.option("--name", metavar="NAME", help="Name of the collection; the recipe's if not given.")
@hardware_options
@click.option("--log-json", is_flag=True, help="Write a JSON line a member to stderr too.")
@click.option(
    "--init-permutation", type=click.IntRange(min=0), default=0, metavar="TRANSPOSITIONS",
    help="Permute each member's initialisation by so many transpositions of units.",
)  # fmt: skip
@click.option(
    "--init-seed", type=click.IntRange(min=0, max=2**31 - 1), metavar="SEED",
    help="Start all members from one initialisation, this seed's; each sees the images in its own order.",
)  # fmt: skip
@format_option
def train_command(
    recipe: str,
    members: str,
    out: Output,
    folder: Path,
    changes: tuple[str, ...],
    name: str | None,
    hardware: Hardware,
    log_json: bool,
    init_permutation: int,
    init_seed: int | None,
) -> None:
    """Train members of a recipe and export them as a source: shards, manifest, description.

    RECIPE is a name that `zoo-cli recipes` lists, or a Python file that defines RECIPE or RECIPES (FILE.py:NAME takes
    one of several). Members that the folder has already are not trained again; an interrupted run continues from its
    last saved state.
    """
    start_time = time.monotonic()
    from checkpoints_zoo.formats.selection import format_ids, parse_ids
    from checkpoints_zoo.training.export import train_into
    from checkpoints_zoo.training.recipes import recipe_from_options

    member_ids = [member for member, epoch in parse_ids(members) if epoch is None]
    if len(member_ids) < len(parse_ids(members)):
        raise UsageError("--members", expected="ids without epochs", found=members)
    chosen_recipe = recipe_from_options(recipe, changes, name, init_permutation, init_seed)

    def report_progress(progress: Progress) -> None:
        members_text = format_ids([(member, None) for member in progress.members])
        accuracy_text = "" if progress.accuracy is None else f", test accuracy {progress.accuracy:.4f}"
        elapsed_seconds = time.monotonic() - start_time
        out.say(
            f"{chosen_recipe.name} {members_text}: epoch {progress.epoch}/{progress.epochs}, "
            f"loss {progress.loss:.4f}{accuracy_text}, {elapsed_seconds:.0f} s"
        )

    engine, log_line = hardware.engine(out.say), out.say if log_json else lambda line: None
    try:
        trained_members = train_into(chosen_recipe, member_ids, folder, engine, out.say, report_progress, log=log_line)
    except KeyboardInterrupt:
        out.say("the same command goes on where it was")
        raise
    values = {
        "collection": chosen_recipe.name,
        "trained": trained_members,
        "seconds": round(time.monotonic() - start_time),
        "path": folder,
    }
    out.data(values, fact_lines(values))


@click.command()
@click.argument("file", metavar="[FILE.py]", required=False)
@format_option
def recipes_command(file: str | None, out: Output) -> None:
    """List the recipes that come with the package, or those of a Python file, whose code runs.

    "at once": number of members that are trained together on one device.
    """
    rows = recipe_rows(file)
    table_rows = [
        {
            "recipe": row["recipe"], "members": f"{row['members']:,}", "architecture": row["architecture"],
            "data": row["dataset"], "epochs": row["epochs"], "at once": row["stack_width"],
            "precision": row["precision"],
        }
        for row in rows
    ]  # fmt: skip
    out.data(rows, table(table_rows, right_aligned=["members"]))


def recipe_rows(file_or_name: str | None) -> list[dict[str, Any]]:
    """Return name -> row of the table for each recipe of a file or of the package.

    Args:
        file_or_name: Python file, or name of a recipe, or None for all recipes of the package.

    Raises:
        UsageError: no such recipe or file.
    """
    from checkpoints_zoo.training import recipe_files
    from checkpoints_zoo.training.recipes import RECIPES, recipe_by_name

    recipes = {name: make_recipe() for name, make_recipe in RECIPES.items()}
    if file_or_name is not None:
        is_file = recipe_files.is_recipe_file(file_or_name)
        recipes = (
            recipe_files.read_recipes(Path(file_or_name)) if is_file else {file_or_name: recipe_by_name(file_or_name)}
        )
    return [
        {
            "recipe": name, "members": recipe.members, "architecture": recipe.architecture, "dataset": recipe.dataset,
            "epochs": recipe.epochs, "stack_width": recipe.stack_width, "precision": recipe.precision,
        }
        for name, recipe in recipes.items()
    ]  # fmt: skip


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DIR...", type=click.Path(path_type=Path))
@click.option("-o", "--out", "folder", required=True, metavar="DIR", type=OutputFolder(),
              help="Folder of the source; it may hold members already.")  # fmt: skip
@click.option("--name", "names", multiple=True, metavar="NAME", help="A collection; all of the folders if not given.")
@format_option
def merge_command(folders: tuple[Path, ...], folder: Path, names: tuple[str, ...], out: Output) -> None:
    """Merge members that were trained into several folders into one source.

    The source has the same bytes as if one run had trained all members, except for times, versions and devices in the
    rows. Members of different recipes, and a member with different weights in two folders, are refused.
    """
    from checkpoints_zoo.training.merge import merge

    merged_counts = merge(folders, folder, names or None, out.say)
    rows = [
        {"collection": name, "members": member_count, "path": folder} for name, member_count in merged_counts.items()
    ]
    out.data(rows, table(rows))


if __name__ == "__main__":
    from checkpoints_zoo.cli.old_forms import run_old_form

    run_old_form("python -m checkpoints_zoo.cli.train")
