"""`zoo-cli predict`: members run once on images, their logits stored."""

from __future__ import annotations

from pathlib import Path

import click

from checkpoints_zoo.cli.output import Output, facts, in_bytes, output
from checkpoints_zoo.cli.selecting import Selection, selecting


@click.command()
@selecting
@click.option("--data", required=True, metavar="IMAGES", help="Images by name, such as digits or digits/train.")
@click.option(
    "-o", "--out", "folder", required=True, metavar="DIR", help="A folder: they go into predictions/NAME/ in it."
)
@click.option("--as", "kind", metavar="SET", help="Name of the set; that of the images and split if not given.")
@click.option("--device", default="cpu", metavar="DEVICE", help="What to run the members on, such as cuda.")
@click.option("--batch", default=512, metavar="N", help="Images a forward pass.")
@output
def command(
    selection: Selection, data: str, folder: str, kind: str | None, device: str, batch: int, out: Output
) -> None:
    """Run members on images and store their logits, in float16.

    Stored predictions are read back by `members.predictions`, measured without any weights, and published with their
    folder. Members that are there already are not run again: a run that was cut off goes on.
    """
    members = selection.load()
    out.say(f"{members.name}: {len(members)} members, {in_bytes(members.nbytes)}, on {data} …")
    from checkpoints_zoo.predictions import predict

    found = predict(members, data, folder, name=kind, device=device, batch=batch, say=out.say)
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
    out.data(values, facts({**values, "bytes": in_bytes(size)}))
