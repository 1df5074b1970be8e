"""`python -m training RECIPE --members 0-63 --out out/`: train members and export them as a source."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import click

from checkpoints_zoo.errors import LockedError, UsageError, ZooError
from checkpoints_zoo.selection import format_ids, parse_ids
from training.export import export, members_of
from training.population import Progress, train
from training.recipes import RECIPES


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Choice(sorted(RECIPES)))
@click.option("--members", required=True, help="Ids, such as 0-63 or 3,5,8-11; an id is the member's seed.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder of the source.")
@click.option(
    "--init-permutation", type=click.IntRange(min=0), default=0, metavar="TRANSPOSITIONS",
    help="Permute each member's initialisation by so many transpositions of units.",
)  # fmt: skip
@click.option(
    "--init-seed", type=click.IntRange(min=0, max=2**31 - 1), metavar="SEED",
    help="Start all members from one initialisation, this seed's; each sees the images in its own order.",
)  # fmt: skip
def main(recipe: str, members: str, out: Path, init_permutation: int, init_seed: int | None) -> None:
    """Train members of RECIPE and export them as a source: shards, manifest, description.

    Members that OUT holds already are left alone; a run that was killed goes on where it was saved.
    """
    chosen = RECIPES[recipe]()
    if init_permutation or init_seed is not None:
        name = recipe + (f"-from-{init_seed}" if init_seed is not None else "")
        name += f"-permuted-{init_permutation}" if init_permutation else ""
        chosen = replace(chosen, name=name, init_permutation=init_permutation, init_seed=init_seed)
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(text, err=True)

    def progress(p: Progress) -> None:
        ids = format_ids([(m, None) for m in p.members])
        say(f"{recipe} {ids}: epoch {p.epoch}/{p.epochs}, loss {p.loss:.4f}, {time.monotonic() - began:.0f} s")

    try:
        ids = [member for member, epoch in parse_ids(members) if epoch is None]
        if len(ids) < len(parse_ids(members)):
            raise UsageError("--members", expected="ids without epochs", found=members)
        there = members_of(chosen, out)
        wanted = [member for member in ids if member not in there]
        if len(wanted) < len(ids):
            say(f"{recipe}: {len(ids) - len(wanted)} of these members are in {out} already")
        train(chosen, wanted, out, lambda trained: export(chosen, trained, out), progress)
        say(f"{recipe}: {len(wanted)} members trained into {out} in {time.monotonic() - began:.0f} s")
    except (UsageError, LockedError) as error:
        say(str(error))
        sys.exit(2)
    except ZooError as error:
        say(str(error))
        sys.exit(4)


if __name__ == "__main__":
    main()
