"""`zoo-cli evaluate` and `zoo-cli plot`: the figures of an ensemble, as a table and as a picture.

Other commands use this module's options and table too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, format_option
from checkpoints_zoo.cli.options import IMAGES_HELP, NONE_WORD, OutputFile, Selection, name_and_size, network_options
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS
from checkpoints_zoo.formats.text import count_with_noun

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.evaluation.evaluating import Report
    from checkpoints_zoo.predictions import Predictions

    ImagesOrPredictions = str | Predictions | None


def _parse_sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse the sizes of ensembles, which are whole numbers separated by commas; return the list."""
    try:
        return None if value is None else tuple(int(size_text) for size_text in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers such as 1,8,64.", context, parameter) from None


def _parse_held_out(context: click.Context, parameter: click.Parameter, value: str | None) -> float | str | None:
    """Parse the value of --held-out; return a share of the images as a number, or the name of an image set."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def _parse_distances(
    context: click.Context, parameter: click.Parameter, option_values: tuple[str, ...]
) -> dict[str, str]:
    """Parse FIGURE=DISTANCE; return the distance of each figure, as text."""
    distance_of_figure: dict[str, str] = {}
    for option_value in option_values:
        figure, equals, distance = option_value.partition("=")
        if not equals:
            raise click.BadParameter(f"{option_value!r} is no FIGURE=DISTANCE such as nll=0.01.", context, parameter)
        if figure in distance_of_figure:
            raise click.BadParameter(f"{figure} has two distances. Give one.", context, parameter)
        distance_of_figure[figure] = distance
    return distance_of_figure


@dataclass(frozen=True)
class EvaluationRequest:
    """The members, the images and the other arguments of `zoo.evaluate`, as the command line gives them."""

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
        """Evaluate the members; return the report."""
        members = self.selection.load()
        from checkpoints_zoo.evaluation.evaluating import evaluate

        if self.stored is None:
            ood_name = self.ood_name()
            images_text = f"{self.data or members.description.dataset}{f' against {ood_name}' if ood_name else ''}"
            out.say(f"{name_and_size(members)}, on {images_text} …")
        else:
            out.say(
                f"{members.name}: stored predictions of {count_with_noun(len(members), 'member')}, "
                f"{self._prediction_set_name(members)} …"
            )
        data, ood, held_out = self.data_sets(members)
        return evaluate(
            members, data, ood, sizes=self.sizes, temperature=self.temperature, held_out=held_out,
            within=self.within, device=self.device, seed=self.seed,
        )  # fmt: skip

    def ood_name(self, default_name: str | None = None) -> str | None:
        """Return the name of the images out of distribution; None if there are none.

        Args:
            default_name: name of the images that are used if --ood is not given.
        """
        return None if self.ood == NONE_WORD else self.ood or default_name

    def data_sets(
        self, members: Collection, default_ood: str | None = None
    ) -> tuple[ImagesOrPredictions, ImagesOrPredictions, float | ImagesOrPredictions]:
        """Return three data sets: in distribution, out of distribution, and held out. Each data set is a name, or with
        --stored stored predictions.

        Args:
            members: members whose stored predictions are read.
            default_ood: name of the images out of distribution that are used if --ood is not given.

        Raises:
            UsageError, SourceNotFound: the predictions do not exist.
        """
        ood = self.ood_name(default_ood)
        if self.stored is None:
            return self.data, ood, self.held_out
        from checkpoints_zoo.predictions import predictions_of

        def read_predictions(images_name: str) -> Predictions:
            return predictions_of(members, images_name, source=self.stored)

        held_out = read_predictions(self.held_out) if isinstance(self.held_out, str) else self.held_out
        return (
            read_predictions(self._prediction_set_name(members)),
            None if ood is None else read_predictions(ood),
            held_out,
        )

    def _prediction_set_name(self, members: Collection) -> str:
        """Return the name of the set of stored predictions that the command measures."""
        return self.data or f"{members.description.dataset}-test"


def measurement_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a request, and pass it the EvaluationRequest as `request`."""

    @network_options
    @click.option(
        "--data", metavar="IMAGES", help=f"Labelled images: {IMAGES_HELP}; the collection's test set if not given."
    )
    @click.option("--ood", metavar="IMAGES|none", help="Images out of distribution, likewise, such as photos.")
    @click.option(
        "--sizes", callback=_parse_sizes, metavar="1,8,…", help="Sizes of ensembles; powers of two if not given."
    )
    @click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
    @click.option("--seed", default=0, metavar="SEED", help="Seed of the random ensembles behind the intervals.")
    @click.option(
        "--stored",
        metavar="SOURCE",
        help="Measure predictions that this source has: --data and --ood name sets (digits-test).",
    )
    @click.option("--temperature", is_flag=True, help="Measure everything again after temperature scaling.")
    @click.option(
        "--held-out",
        callback=_parse_held_out,
        metavar="SHARE|IMAGES",
        help="The images that the temperature is fitted to: a share of --data (0.2 if not given), which is left out of"
        " the figures, or other images.",
    )
    @click.option(
        "--within",
        callback=_parse_distances,
        multiple=True,
        metavar="FIGURE=DISTANCE",
        help="Print how many members are needed to come within this distance of the limit: nll=0.01 or brier=5%.",
    )
    @wraps(command)
    def run_command(*args: Any, **options: Any) -> Any:
        arguments = {field.name: options.pop(field.name) for field in fields(EvaluationRequest)}
        return command(*args, request=EvaluationRequest(**arguments), **options)

    return run_command


def report_values(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    values: dict[str, Any] = json.loads(report.to_json())
    return values


@click.command()
@measurement_options
@click.option("--plot", type=OutputFile(*PICTURE_FORMATS), metavar="PICTURE", help="Draw the figures too.")
@format_option
def evaluate_command(request: EvaluationRequest, plot: Path | None, out: Output) -> None:
    """Measure an ensemble: accuracy, calibration, diversity, out-of-distribution detection.

    Figures have intervals over the members. Without --sizes the table shows at most three sizes; --format json gives
    all.
    """
    report = request.report(out)
    if plot:
        out.say(f"picture: {report.plot(plot)}")
    out.data(report_values(report), report.to_text(report.curve if request.sizes else None))


@click.command()
@measurement_options
@click.option(
    "--figures",
    metavar="NAME,…",
    help="Draw these figures against ensemble size instead, such as brier,auroc, or all.",
)
@click.option(
    "-o",
    "--out",
    "path",
    type=OutputFile(*PICTURE_FORMATS),
    required=True,
    metavar="PICTURE",
    help="The picture to write.",
)
@format_option
def plot_command(request: EvaluationRequest, figures: str | None, path: Path, out: Output) -> None:
    """Measure an ensemble and draw the figures into a PNG, PDF or SVG.

    Reliability, accuracy and NLL against ensemble size, the members' accuracies, mutual information.
    """
    report = request.report(out)
    if figures is None:
        picture_path = report.plot(path)
    else:
        picture_path = report.plot_curves(
            path, None if figures == "all" else [name.strip() for name in figures.split(",")]
        )
    out.data({"path": picture_path}, str(picture_path))
