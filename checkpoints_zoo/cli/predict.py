"""`zoo-cli predict`: members run once on images, their logits stored."""

from __future__ import annotations

from pathlib import Path

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, facts, output
from checkpoints_zoo.cli.measure import PLACES
from checkpoints_zoo.formats.text import format_bytes


@click.command()
@selecting
@click.option("--data", required=True, metavar="IMAGES", help=f"Images: {PLACES}.")
@click.option(
    "-o", "--out", "folder", required=True, metavar="DIR", help="A folder: they go into predictions/NAME/ in it."
)
@click.option("--as", "kind", metavar="SET", help="Name of the set; that of the images and split if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run on; several: cuda:0,cuda:1.")
@click.option("--batch", type=click.IntRange(min=1), default=512, metavar="N", help="Images a forward pass.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes at a time; one a device if not given."
)
@click.option("--ray", metavar="CLUSTER", help="Run on a Ray cluster: auto, local, or an address.")
@output
def command(
    selection: Selection,
    data: str,
    folder: str,
    kind: str | None,
    device: str,
    batch: int,
    workers: int | None,
    ray: str | None,
    out: Output,
) -> None:
    """Run members on images and store their logits, in float16.

    Stored predictions are read back by `members.predictions`, measured without any weights, and published with their
    folder. Members that are there already are not run again: a run that was cut off goes on. Several processes, or a
    cluster, store the same bytes as one.
    """
    members = selection.load()
    out.say(f"{members.name}: {len(members)} members, {format_bytes(members.nbytes)}, on {data} …")
    from checkpoints_zoo.predictions import predict

    devices = [each.strip() for each in device.split(",")]
    found = predict(
        members, data, folder, name=kind, devices=devices, batch=batch, workers=workers, ray=ray, say=out.say
    )
    count, inputs, classes = found.shape
    path = Path(folder).absolute() / Path(found.rows.column("path").to_pylist()[0]).parent
    size = count * found.facts.layouts["logits"].nbytes
    values = {
        "predictions": found.name,
        "members": count,
        "inputs": inputs,
        "classes": classes,
        "bytes": size,
        "labelled": found.labels is not None,
        "path": path,
        "citation": found.citation,
    }
    out.data(values, facts({**values, "bytes": format_bytes(size)}))
