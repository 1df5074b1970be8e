"""Are the deep ensemble's p-values on `convnet-digits` chance? The same test against a second reference.

The comparison has 100 new members of the recipe, a deep ensemble with the seeds from 1,000,000 on, and tests their MMD²
and NS against the 64 members of the collection. All are independent members of one recipe, so p-values are uniform
between 0 and 1. The second reference is 64 members with the 64 seeds after those of the deep ensemble: 1,000,100 to
1,000,163. The seeds were fixed before any of these members was trained.

`python -m docs.studies.second_reference --out FOLDER --json docs/studies/second-reference.json` trains what the folder
lacks, which takes a quarter of an hour on one core, and tests.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.methods.comparing.measures import Closeness
from checkpoints_zoo.methods.comparing.study import DEFAULT_PERMUTATIONS, JACKKNIFE_SUBSETS
from checkpoints_zoo.methods.deep_ensemble import check_no_shared_members, train_members
from checkpoints_zoo.methods.fitting import DEFAULT_DRAWS
from checkpoints_zoo.methods.modes import FIRST_SEED
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.recipes import convnet_digits
from checkpoints_zoo.workers import InProcess

SEEDS = range(FIRST_SEED + DEFAULT_DRAWS, FIRST_SEED + DEFAULT_DRAWS + 64)
ENSEMBLE, SECOND = "convnet-digits-deep-ensemble", "convnet-digits-second"


def train(out: Path) -> tuple[zoo.Collection, zoo.Collection]:
    """Train the deep ensemble and the second reference, as far as the folder lacks them; return both."""
    recipe = convnet_digits()
    train_members(recipe, out / "deep", ENSEMBLE, DEFAULT_DRAWS, say=click.echo)
    second = replace(recipe, name=SECOND, members=len(SEEDS), made_from=recipe.name)
    train_into(second, SEEDS, out / "second", InProcess("cpu"), click.echo)
    return zoo.load(ENSEMBLE, source=out / "deep"), zoo.load(SECOND, source=out / "second")


def p_values(ensemble: zoo.Collection, reference: zoo.Collection) -> dict[str, dict[str, dict[str, float | None]]]:
    """Test an ensemble against a reference as `zoo.compare` does; return measure -> group -> MMD² and p-value."""
    measured = Closeness(reference, DEFAULT_PERMUTATIONS, JACKKNIFE_SUBSETS, seed=0).measure(ensemble, None)
    return {
        name: {group: {"value": x.value, "p": x.p} for group, x in groups.items()} for name, groups in measured.items()
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the trained members.")
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="File of the p-values.")
def command(out: Path, path: Path) -> None:
    """Train the members, test them, and write the p-values."""
    torch.set_num_threads(1)
    ensemble, second = train(out)
    first = zoo.load("convnet-digits")
    for members, reference in ((ensemble, first), (ensemble, second), (second, first)):
        check_no_shared_members(members, reference)
    result = {
        "seeds": [SEEDS[0], SEEDS[-1]],
        "permutations": DEFAULT_PERMUTATIONS,
        "torch": torch.__version__,
        "deep ensemble against the first reference": p_values(ensemble, first),
        "deep ensemble against the second reference": p_values(ensemble, second),
        "second reference against the first reference": p_values(second, first),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    command()
