"""The collection `mlp-digits-hmc`: full-batch HMC draws from the posterior of `mlp-digits`, thinned.

`python -m docs.studies.hmc_digits --out FOLDER --json docs/studies/hmc-digits-draws.json` runs eight chains, which
takes about a quarter of an hour on one core, keeps every fifteenth of their 120 draws, and writes the source
FOLDER/source, whose files ship in `checkpoints_zoo/embedded`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.hmc import Hmc
from checkpoints_zoo.training.recipes import mlp_digits

NAME, CHAINS, DRAWS, EVERY = "mlp-digits-hmc", 8, 120, 15
METHOD = Hmc(steps=80, warmup=100)
TITLE = "HMC draws of small multilayer perceptrons, on handwritten digits"
CITATION = "checkpoints_zoo: full-batch HMC of the recipe mlp-digits, 8 chains"


def thin(draws: zoo.Collection, out: Path) -> zoo.Collection:
    """Keep every fifteenth draw of each chain; write them as a source, and return its collection."""
    columns = zip(*(draws.rows.column(name).to_pylist() for name in ("run", "draw")), strict=True)
    kept = [position for position, (_, draw) in enumerate(columns) if draw % EVERY == EVERY - 1]
    runs = draws.rows.column("run").to_pylist()
    recipe = mlp_digits()
    return zoo.from_samples(
        draws.take(kept).stack(), recipe.architecture, arguments=recipe.arguments, method="hmc", out=out, name=NAME,
        run=[runs[position] for position in kept], evaluate="digits", like="convnet-digits", title=TITLE,
        licence="Apache-2.0", citation=CITATION, columns={"recipe": recipe.name, "recipe_hash": recipe.hash},
    )  # fmt: skip


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the chains and the source.")
@click.option("--json", "path", type=click.Path(path_type=Path), required=True, help="File of the diagnostics.")
def command(out: Path, path: Path) -> None:
    """Run the chains, keep some of their draws, and write the diagnostics."""
    torch.set_num_threads(1)
    recipe = mlp_digits()
    draws = fitting.fit(METHOD, recipe, out=out / "fit", runs=CHAINS, draws=DRAWS, modes=out / "modes")
    record = fitting.read_fit_record(out / "fit", draws.name)
    assert record is not None
    kept = thin(draws, out / "source")
    halves = zoo.compare_predictives(kept[: len(kept) // 2], kept[len(kept) // 2 :], "digits")
    all_halves = zoo.compare_predictives(draws[: len(draws) // 2], draws[len(draws) // 2 :], "digits")
    to_all = zoo.compare_predictives(kept, draws, "digits")
    values = {
        "settings": record.settings,
        "runs": list(record.facts),
        "seconds": record.seconds,
        "accuracy": {"all": zoo.evaluate(draws, "digits", sizes=[len(draws)])["accuracy"].value,
                     "kept": zoo.evaluate(kept, "digits")["accuracy"].value},
        "halves": {name: x.value for name, x in halves.figures.items()},
        "halves_of_all": {name: x.value for name, x in all_halves.figures.items()},
        "kept_to_all": {name: x.value for name, x in to_all.figures.items()},
    }  # fmt: skip
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    command()
