"""The options of a measurement, and its report as a table: the same for every command that measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.output import in_bytes, table
from checkpoints_zoo.cli.selecting import Selection, selecting
from checkpoints_zoo.plots import stated

if TYPE_CHECKING:
    from checkpoints_zoo.cli.output import Output
    from checkpoints_zoo.evaluation import Report

NAMES = {
    "accuracy": "accuracy (%)", "nll": "NLL (nats)", "brier": "Brier (0..2)", "ece": "ECE (0..1)",
    "adaptive_ece": "adaptive ECE (0..1)", "ace": "ACE (0..1)", "aurc": "AURC (0..1)",
    "mi_id": "mutual information, ID (nats)", "disagreement": "disagreement (0..1)",
    "mi_ood": "mutual information, OOD (nats)", "auroc": "AUROC (0..1)", "aupr": "AUPR (0..1)",
    "fpr95": "FPR95 (0..1)",
}  # fmt: skip
MOST_SIZES = 3


def _whole(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read sizes of ensembles, whole numbers with commas between them; return them."""
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers such as 1,8,64.", context, parameter) from None


def png(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Check a picture's name before anything is measured; return it."""
    if value is not None and not value.lower().endswith(".png"):
        raise click.BadParameter(f"{value!r} does not end in .png.", context, parameter)
    return value


@dataclass(frozen=True)
class Measurement:
    """Members and what to measure them on: the arguments of `zoo.evaluate`."""

    selection: Selection
    data: str | None
    ood: str | None
    sizes: tuple[int, ...] | None
    device: str
    seed: int
    stored: str | None

    def report(self, out: Output) -> Report:
        """Evaluate the members, saying so; return the report."""
        members = self.selection.load()
        on = f"{self.data or members.description.dataset}{f' against {self.ood}' if self.ood else ''}"
        from checkpoints_zoo.evaluation import evaluate

        if self.stored is not None:
            from checkpoints_zoo.predictions import predictions_of

            name = self.data or f"{members.description.dataset}-test"
            out.say(f"{members.name}: stored predictions of {len(members)} members, {name} …")
            inside = predictions_of(members, name, source=self.stored)
            outside = None if self.ood is None else predictions_of(members, self.ood, source=self.stored)
            return evaluate(inside, None, outside, sizes=self.sizes, seed=self.seed)
        out.say(f"{members.name}: {len(members)} members, {in_bytes(members.nbytes)}, on {on} …")
        return evaluate(members, self.data, self.ood, sizes=self.sizes, device=self.device, seed=self.seed)


def measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a measurement, and pass it the Measurement as `measurement`."""

    @selecting
    @click.option("--data", metavar="IMAGES", help="Labelled images; the collection's own test set if not given.")
    @click.option("--ood", metavar="IMAGES", help="Images out of distribution, such as photos.")
    @click.option("--sizes", callback=_whole, metavar="1,8,…", help="Sizes of ensembles; powers of two if not given.")
    @click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
    @click.option("--seed", default=0, metavar="SEED", help="Of the random ensembles behind the intervals.")
    @click.option(
        "--stored", metavar="SOURCE", help="Measure predictions stored there: --data and --ood name sets (digits-test)."
    )
    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        own = {field.name: options.pop(field.name) for field in fields(Measurement)}
        return command(*args, measurement=Measurement(**own), **options)

    return wrapped


def values_of(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    values: dict[str, Any] = json.loads(report.to_json())
    return values


def table_of(report: Report, sizes: Iterable[int], figures: Iterable[str] = NAMES) -> str:
    """Lay out a report, one figure a row and one size of ensemble a column, and what the intervals mean."""
    columns = {f"{size:,}": report.curve[size] for size in sizes}
    rows = []
    for name in (name for name in figures if name in report.ensemble):
        scale = 100 if name == "accuracy" else 1
        rows.append({"ensemble of": NAMES[name]} | {k: stated(c[name], scale) for k, c in columns.items()})
    return f"{table(rows, right=list(rows[0])[1:])}\n\n{_meaning(report)}"


def few(sizes: Iterable[int]) -> list[int]:
    """Return the sizes that a table has room for: first, middle and last of many."""
    ordered = sorted(sizes)
    return ordered if len(ordered) <= MOST_SIZES else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def _meaning(report: Report) -> str:
    on = f"{report.data.split(' ')[0]}, {report.inputs:,} inputs"
    if report.ood:
        on += f"; OOD: {report.ood.split(' ')[0]}, {report.ood_inputs:,} inputs"
    meaning = "[ ]: where 95 % of fresh ensembles of that size fall; for all members, their 95 % jackknife interval."
    if report.members < 3:
        meaning = "Fewer than 3 members say nothing about intervals."
    return f"Measured now on {on}.\n{meaning}"
