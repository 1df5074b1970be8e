"""Does a permuted start end permuted? Transpositions, distance and loss barrier after training against those before.

The study of Xiao, Liu, Bamler 2023 (arXiv 2401.00611), on handwritten digits. Two members start from one
initialisation. The units of the second member are permuted by some transpositions. Both are trained on the same images
in different orders: with the same order, both would end as the same network, permuted. Then the second is matched to
the first.

`python -m docs.studies.transpositions --out study.json` trains and measures; `--plot study.png` draws.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, RED, check_picture_path, save_figure
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.populations.loss_barrier import interpolate
from checkpoints_zoo.symmetry import Table, permute, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from checkpoints_zoo.symmetry.canonical.distances import squared_distance, transpositions
from checkpoints_zoo.training.gradients import Tensors
from checkpoints_zoo.training.loop import StackState, initial_state, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import convnet_digits

COUNTS = (0, 1, 2, 4, 8, 16, 32, 53)
RUNS = 5
POINTS = 25


@dataclass(frozen=True)
class Pair:
    """The two members of one run.

    Args:
        run: number of the run: the seed of the initialisation and of the first member's order.
        before, after: transpositions of the permutation that was applied at the start, and of the one that matches
            the second member to the first after training.
        distance, aligned_distance: squared distance of the weights, as trained and once matched.
        barrier, aligned_barrier: nats, likewise.
    """

    run: int
    before: int
    after: int
    distance: float
    aligned_distance: float
    barrier: float
    aligned_barrier: float


def join_states(parts: Sequence[StackState]) -> StackState:
    """Stack several states of members that have not been trained; return one state."""

    def together(kind: str) -> Tensors:
        first: Tensors = getattr(parts[0], kind)
        return {name: torch.cat([getattr(part, kind)[name] for part in parts]) for name in first}

    return StackState(
        params=together("params"),
        momentum=together("momentum"),
        buffers=together("buffers"),
        loss=torch.cat([part.loss for part in parts]),
        failed_step=torch.cat([part.failed_step for part in parts]),
    )


def train_and_measure(recipe: Recipe, counts: Sequence[int] = COUNTS, runs: int = RUNS) -> list[Pair]:
    """Train the pairs in one stack and measure them; return one Pair a run and count.

    Args:
        recipe: recipe of the members, without running statistics.
        counts: numbers of transpositions at the start.
        runs: number of initialisations.

    Raises:
        UsageError: more transpositions than the units allow.
    """
    states, orders = [], []
    for run in range(runs):
        states.append(initial_state(replace(recipe, init_seed=run), [run]))
        orders.append(run)
        for count in counts:
            second = 1000 * (run + 1) + count
            states.append(initial_state(replace(recipe, init_seed=run, init_permutation=count), [second]))
            orders.append(second)
    state, data = join_states(states), images.load(recipe.dataset, "train")
    for epoch in train_epochs(recipe, orders, state, data):
        print(f"{recipe.name}: epoch {epoch}/{recipe.epochs}, loss {float(state.loss.mean()):.4f}", file=sys.stderr)
    module = build_architecture(recipe.architecture, **recipe.arguments)
    table = symmetries(module, torch.zeros(2, recipe.preprocess.channels, *recipe.preprocess.size))
    test = images.load(recipe.dataset)
    pairs = []
    for run in range(runs):
        at = run * (1 + len(counts))
        first = {name: tensor[at] for name, tensor in state.params.items()}
        others = {name: tensor[at + 1 : at + 1 + len(counts)] for name, tensor in state.params.items()}
        pairs += _measure_pairs(recipe, table, test, run, counts, first, others)
    return pairs


def _measure_pairs(
    recipe: Recipe, table: Table, test: ImageData, run: int, counts: Sequence[int], first: Tensors, others: Tensors
) -> list[Pair]:
    permutations = match_weights(table, others, first).permutations
    aligned = permute(table, others, permutations)
    after = torch.stack([transpositions(p) for p in permutations.values()]).sum(0)
    distances = [squared_distance(table, params, first) for params in (others, aligned)]
    barriers = [
        [_loss_barrier(recipe, test, first, {n: t[i] for n, t in params.items()}) for i in range(len(counts))]
        for params in (others, aligned)
    ]
    return [
        Pair(run, count, int(after[i]), *(float(d[i]) for d in distances), *(b[i] for b in barriers))
        for i, count in enumerate(counts)
    ]


def _loss_barrier(recipe: Recipe, test: ImageData, first: Tensors, second: Tensors) -> float:
    """Return the largest loss on the line minus the mean of its ends, nats."""
    line = interpolate(first, second, torch.linspace(0, 1, POINTS))
    with torch.device("meta"):
        module = build_architecture(recipe.architecture, **recipe.arguments)
    labels = test.labels
    assert labels is not None
    with torch.inference_mode():
        logits: Tensor = Ensemble(module, line, list(range(POINTS)))(recipe.preprocess(test.images))
        losses = torch.stack([F.cross_entropy(point, labels) for point in logits])
    return float(losses.max() - (losses[0] + losses[-1]) / 2)


def draw_pairs(pairs: Sequence[Pair], path: Path) -> Path:
    """Draw the three figures of the study, mean and standard deviation over the runs; return the path."""
    from matplotlib.figure import Figure

    counts = sorted({pair.before for pair in pairs})

    def curve(name: str) -> tuple[list[float], list[float]]:
        values = [torch.tensor([float(getattr(p, name)) for p in pairs if p.before == count]) for count in counts]
        return [float(v.mean()) for v in values], [float(v.std()) for v in values]

    def figure() -> Figure:
        result = Figure(figsize=(13, 4), dpi=DPI, layout="constrained")
        panels = result.subplots(1, 3)
        for panel, title, lines in (
            (panels[0], "transpositions", {"after": ("after training", BLUE)}),
            (panels[1], "squared distance", {"distance": ("as trained", RED), "aligned_distance": ("matched", GREEN)}),
            (panels[2], "loss barrier (nats)", {"barrier": ("as trained", RED), "aligned_barrier": ("matched", GREEN)}),
        ):
            for name, (label, colour) in lines.items():
                means, spreads = curve(name)
                panel.errorbar(counts, means, yerr=spreads, label=label, color=colour, marker="o", capsize=3)
            panel.set_xlabel("transpositions at the start")
            panel.set_ylabel(title)
        panels[0].plot(counts, counts, color="black", linewidth=0.8, linestyle=":", label="as before")
        for panel in panels:
            panel.legend(frameon=False)
        return result

    return save_figure(figure, check_picture_path(path), "transpositions before and after training")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON file of the pairs.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="PNG", help="Draw it as well.")
@click.option("--runs", type=click.IntRange(min=1), default=RUNS, show_default=True, help="Initialisations.")
def main(out: Path, plot: Path | None, runs: int) -> None:
    """Train pairs from permuted initialisations of convnet-digits and measure them, which takes minutes."""
    recipe = replace(convnet_digits(), stack_width=runs * (1 + len(COUNTS)))
    try:
        if out.exists():
            pairs = read_pairs(out)
        else:
            pairs = train_and_measure(recipe, runs=runs)
            values = {"recipe": recipe.hash, "torch": str(torch.__version__), "pairs": [asdict(p) for p in pairs]}
            out.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        if plot:
            draw_pairs(pairs, plot)
    except ZooError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


def read_pairs(path: Path) -> list[Pair]:
    """Read the pairs of a study from its file; return them."""
    names = {field.name for field in fields(Pair)}
    pairs = json.loads(path.read_text(encoding="utf-8"))["pairs"]
    return [Pair(**{name: value for name, value in pair.items() if name in names}) for pair in pairs]


if __name__ == "__main__":
    main()
