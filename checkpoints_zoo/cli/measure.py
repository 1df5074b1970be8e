"""`zoo-cli evaluate` and `zoo-cli plot`: the figures of an ensemble, as a table and as a picture.

The options of a measurement and its table are those of other commands too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.evaluation.figures import KNOWN
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.formats.text import format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.evaluation.evaluating import Report
    from checkpoints_zoo.predictions import Predictions

    Shown = str | Predictions | None

MOST_SIZES = 3
PLACES = "a name, a folder, a Parquet file, or hf://datasets/ORG/NAME"


def _whole(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read sizes of ensembles, whole numbers with commas between them; return them."""
    try:
        return None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers such as 1,8,64.", context, parameter) from None


def _held_out(context: click.Context, parameter: click.Parameter, value: str | None) -> float | str | None:
    """Read a share, or leave the name or place of images; return it."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def _within(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Read FIGURE=DISTANCE; return the distances by figure, as they are."""
    found: dict[str, str] = {}
    for value in values:
        figure, given, distance = value.partition("=")
        if not given:
            raise click.BadParameter(f"{value!r} is no FIGURE=DISTANCE such as nll=0.01.", context, parameter)
        if figure in found:
            raise click.BadParameter(f"{figure} has two distances: one each.", context, parameter)
        found[figure] = distance
    return found


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
    temperature: bool
    held_out: float | str | None
    within: dict[str, float | str]

    def report(self, out: Output) -> Report:
        """Evaluate the members, saying so; return the report."""
        from checkpoints_zoo.evaluation.evaluating import evaluate

        members = self.selection.load()
        if self.stored is None:
            on = f"{self.data or members.description.dataset}{f' against {self.ood}' if self.ood else ''}"
            out.say(f"{members.name}: {len(members)} members, {format_bytes(members.nbytes)}, on {on} …")
        else:
            out.say(f"{members.name}: stored predictions of {len(members)} members, {self._set_of(members)} …")
        data, ood, held_out = self.shown(members, self.ood)
        return evaluate(
            members, data, ood, sizes=self.sizes, temperature=self.temperature, held_out=held_out,
            within=self.within, device=self.device, seed=self.seed,
        )  # fmt: skip

    def shown(self, members: Collection, ood: str | None) -> tuple[Shown, Shown, float | Shown]:
        """Return what members are measured on, OOD and held out: names of images, or with --stored predictions.

        Args:
            members: whose.
            ood: name of the images out of distribution, None for none.

        Raises:
            UsageError, SourceNotFound: no such predictions.
        """
        if self.stored is None:
            return self.data, ood, self.held_out
        from checkpoints_zoo.predictions import predictions_of

        def read(name: str) -> Predictions:
            return predictions_of(members, name, source=self.stored)

        held_out = read(self.held_out) if isinstance(self.held_out, str) else self.held_out
        return read(self._set_of(members)), None if ood is None else read(ood), held_out

    def _set_of(self, members: Collection) -> str:
        """Return the name of the set of stored predictions that is measured."""
        return self.data or f"{members.description.dataset}-test"


def measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a measurement, and pass it the Measurement as `measurement`."""

    @selecting
    @click.option("--data", metavar="IMAGES", help=f"Labelled images: {PLACES}; its own test set if none.")
    @click.option("--ood", metavar="IMAGES", help="Images out of distribution, likewise, such as photos.")
    @click.option("--sizes", callback=_whole, metavar="1,8,…", help="Sizes of ensembles; powers of two if not given.")
    @click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
    @click.option("--seed", default=0, metavar="SEED", help="Of the random ensembles behind the intervals.")
    @click.option(
        "--stored", metavar="SOURCE", help="Measure predictions stored there: --data and --ood name sets (digits-test)."
    )
    @click.option("--temperature", is_flag=True, help="Measure everything again after temperature scaling.")
    @click.option(
        "--held-out",
        callback=_held_out,
        metavar="SHARE|IMAGES",
        help="What to fit the temperature to: a share of the images (0.2 if not given), which is left out of the"
        " figures, or others.",
    )
    @click.option(
        "--within",
        callback=_within,
        multiple=True,
        metavar="FIGURE=DISTANCE",
        help="Say how many members it takes to come so near the limit, such as nll=0.01 or brier=5%.",
    )
    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        chosen = {field.name: options.pop(field.name) for field in fields(Measurement)}
        return command(*args, measurement=Measurement(**chosen), **options)

    return wrapped


def values_of(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    values: dict[str, Any] = json.loads(report.to_json())
    return values


def table_of(report: Report, sizes: Iterable[int], figures: Iterable[str] = KNOWN) -> str:
    """Lay out a report, one figure a row and one size of ensemble a column, and what the intervals mean."""
    chosen, names, shown = list(sizes), list(figures), []
    for scaled, curve in (
        (False, report.curve),
        (True, None if report.calibrated is None else report.calibrated.curve),
    ):
        for name in names:
            if curve is None or name not in curve[report.members]:
                continue
            label = f"{KNOWN[name].label}{', scaled' if scaled and name != 'temperature' else ''}"
            scale = KNOWN[name].scale
            shown.append({"ensemble of": label} | {f"{size:,}": as_text(curve[size][name], scale) for size in chosen})
    blocks = [table(shown, right=list(shown[0])[1:]), "\n".join(_needed(report)), _meaning(report)]
    return "\n\n".join(block for block in blocks if block)


def _needed(report: Report) -> Iterator[str]:
    """Say how many members are needed for what was asked; yield the lines."""
    for kind, found in report.answers():
        growths = report.calibrated.growth if kind and report.calibrated is not None else report.growth
        scale = KNOWN[found.figure].scale
        name, _, unit = KNOWN[found.figure].label.removesuffix(")").rpartition(" (")
        within = f"{found.within * scale:.4g}{'' if '..' in unit else f' {unit}'}"
        limit = as_text(growths[found.figure].limit, scale)
        yield f"members needed for {name}{f', {kind},' if kind else ''} within {within} of its limit {limit}: {found}"


def few(sizes: Iterable[int]) -> list[int]:
    """Return the sizes that a table has room for: first, middle and last of many."""
    ordered = sorted(sizes)
    return ordered if len(ordered) <= MOST_SIZES else [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def _meaning(report: Report) -> str:
    on = f"{report.data.split(' ')[0]}, {report.inputs:,} inputs"
    if report.ood:
        on += f"; OOD: {report.ood.split(' ')[0]}, {report.ood_inputs:,} inputs"
    meaning = "[ ]: where 95 % of fresh ensembles of that size fall; for all members, their 95 % jackknife interval."
    if report.calibrated is not None:
        on += (
            f". Temperature fitted to {report.calibrated.inputs:,} inputs of {report.calibrated.held_out.split(' ')[0]}"
        )
        if report.calibrated.at_bound:
            on += ", on which none is best: it is at its bound"
    if report.members < 3:
        meaning = "Fewer than 3 members say nothing about intervals."
    return f"Measured now on {on}.\n{meaning}"


@click.command()
@measuring
@click.option("--plot", metavar="PNG", callback=png, help="Draw the figures as well.")
@output
def evaluate_command(measurement: Measurement, plot: str | None, out: Output) -> None:
    """Measure an ensemble: accuracy, calibration, diversity, out-of-distribution detection.

    Figures come with intervals over the members. Without --sizes a table shows at most three of them; --format
    json has all.
    """
    report = measurement.report(out)
    if plot:
        out.say(f"picture: {report.plot(plot)}")
    out.data(values_of(report), table_of(report, report.curve if measurement.sizes else few(report.curve)))


@click.command()
@measuring
@click.option(
    "--figures",
    metavar="NAME,…",
    help="Draw these over ensemble size instead, such as brier,auroc; all draws every one.",
)
@click.option("-o", "--out", "path", required=True, metavar="PNG", callback=png, help="Where to draw to.")
@output
def plot_command(measurement: Measurement, figures: str | None, path: str, out: Output) -> None:
    """Measure an ensemble and draw the figures into a PNG.

    Reliability, accuracy and NLL against ensemble size, the members' accuracies, mutual information.
    """
    report = measurement.report(out)
    if figures is None:
        drawn = report.plot(path)
    else:
        drawn = report.plot_curves(path, None if figures == "all" else [name.strip() for name in figures.split(",")])
    out.data({"path": drawn}, str(drawn))
