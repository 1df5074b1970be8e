"""`zoo-cli predict`: the logits of members, computed once and stored."""

from __future__ import annotations

from pathlib import Path

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option
from checkpoints_zoo.cli.options import IMAGES_HELP, OutputFolder, Selection, name_and_size, network_options
from checkpoints_zoo.formats.text import format_bytes


@click.command()
@network_options
@click.option("--data", required=True, metavar="IMAGES", help=f"Images: {IMAGES_HELP}.")
@click.option(
    "-o",
    "--out",
    "folder",
    type=OutputFolder(),
    required=True,
    metavar="DIR",
    help="The folder: logits are stored in its predictions/NAME/.",
)
@click.option("--as", "set_name", metavar="SET", help="Name of the set of predictions; IMAGES-SPLIT if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="Devices to run on, such as cuda, or cuda:0,cuda:1.")
@click.option("--batch", type=click.IntRange(min=1), default=512, metavar="N", help="Images in a forward pass.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes at a time; one a device if not given."
)
@click.option("--ray", metavar="CLUSTER", help="Run on a Ray cluster: auto, local, or an address.")
@format_option
def command(
    selection: Selection,
    data: str,
    folder: Path,
    set_name: str | None,
    device: str,
    batch: int,
    workers: int | None,
    ray: str | None,
    out: Output,
) -> None:
    """Run members on images and store their logits, in float16.

    `members.predictions` reads stored predictions, the commands with --stored measure them without weights, and
    `zoo-cli publish` publishes them with their folder. An interrupted run continues: members that have predictions
    already are not run again. Several processes, or a cluster, store the same bytes as one process.
    """
    members = selection.load()
    out.say(f"{name_and_size(members)}, on {data} …")
    from checkpoints_zoo.predictions import predict

    devices = [device_name.strip() for device_name in device.split(",")]
    stored_predictions = predict(
        members, data, folder, name=set_name, devices=devices, batch=batch, workers=workers, ray=ray, say=out.say
    )
    member_count, input_count, class_count = stored_predictions.shape
    path = folder.absolute() / Path(stored_predictions.rows.column("path").to_pylist()[0]).parent
    nbytes = member_count * stored_predictions.facts.layouts["logits"].nbytes
    values = {
        "predictions": stored_predictions.name,
        "members": member_count,
        "inputs": input_count,
        "classes": class_count,
        "bytes": nbytes,
        "labelled": stored_predictions.labels is not None,
        "path": path,
        "citation": stored_predictions.citation,
    }
    out.data(values, fact_lines({**values, "bytes": format_bytes(nbytes)}))
