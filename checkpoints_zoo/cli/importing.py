"""`zoo-cli import`: checkpoints that lie anywhere become a collection."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from checkpoints_zoo.cli.common import imported
from checkpoints_zoo.cli.main import Output, facts, output
from checkpoints_zoo.cli.measure import PLACES
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.text import in_bytes
from checkpoints_zoo.interop.ingest import ImportPlan, NetSpec, ingest, user_columns


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option("--collection", "name", required=True, metavar="NAME", help="What to call the collection.")
@click.option(
    "--out", "target", metavar="DIR", help="Where to write the manifest; the files themselves, if local, lie in it."
)
@click.option("--reshard", metavar="OUT", help="Copy the members into shards in this folder, a source of its own.")
@click.option("--hash", "hashed", is_flag=True, help="Read every member once: hashes, values that are not finite, "
              "duplicates.")  # fmt: skip
@click.option("--evaluate", metavar="IMAGES", help=f"Test images to measure every member on: {PLACES}; hashes come "
              "with it.")  # fmt: skip
@click.option("--like", metavar="NAME", help="A collection of the catalog whose images, classes and preprocessing "
              "these members are for.")  # fmt: skip
@click.option("--dataset", metavar="IMAGES", help="The images that the members were trained on.")
@click.option("--classes-from", metavar="IMAGES", help="The images whose classes the logits have, in their order.")
@click.option("--facts", "file", type=click.Path(), metavar="FILE", help="JSON with title, dataset, classes, "
              "preprocessing, licence or citation.")  # fmt: skip
@click.option("--architecture", metavar="NAME", help="The package's net that the members are, where it can't be told; "
              "or MODULE:FUNCTION, which builds your own (the module is imported, so its code runs).")  # fmt: skip
@click.option("--argument", "arguments", multiple=True, metavar="KEY=JSON", help="Of that net, such as classes=10.")
@click.option("--architecture-name", "custom_name", metavar="TEXT", help="What to call a net of your own.")
@click.option("--strip-prefix", "prefix", default="", metavar="TEXT", help="What to take off all names of tensors.")
@click.option("--key", default="", metavar="KEY", help="Under what files of torch.save have the state dict (ema, or "
              "model/state_dict), where several fit.")  # fmt: skip
@click.option("--files", metavar="PATTERN", help="Which files of a folder are meant, such as '*.pt'.")
@click.option("--columns", metavar="FILE", help="CSV with columns of the manifest (seed, lr, …) by the column 'file'.")
@click.option("--strict", is_flag=True, help="Refuse a folder with damaged files, or of another net, in place of "
              "marking these.")  # fmt: skip
@click.option("--device", default="cpu", metavar="DEVICE", help="What to measure the members on, such as cuda.")
@click.option("--dry-run", is_flag=True, help="Say what it is about; write nothing, and read no weights.")
@output
def command(
    sources: tuple[str, ...],
    name: str,
    hashed: bool,
    file: str | None,
    dataset: str | None,
    classes_from: str | None,
    architecture: str | None,
    arguments: tuple[str, ...],
    custom_name: str | None,
    prefix: str,
    key: str,
    columns: str | None,
    target: str | None,
    out: Output,
    **options: Any,
) -> None:
    """Make a collection of checkpoints that lie anywhere.

    A manifest is written for them as they lie, or they are copied into shards. A SOURCE is an archive, a folder of
    archives, of safetensors files or of torch.save's; or a place on the Hub, hf://datasets/ORG/NAME[@REVISION][/PATH].
    Cut off anywhere and started again it goes on.
    """
    given: dict[str, Any] = _read(file) if file is not None else {}
    if dataset is not None:
        given["dataset"] = dataset
    if classes_from is not None:
        from checkpoints_zoo.interop.checkpoints import facts_to_json

        given |= facts_to_json({"classes": classes_from})
    named, build = dict(_argument(text) for text in arguments), None
    if architecture is not None and ":" in architecture:
        build = partial(imported(architecture), **named)
        architecture, named, custom_name = None, {}, custom_name or _called(build)
    net = NetSpec(architecture, named, custom_name, prefix, key)
    told = (
        None
        if columns is None
        else user_columns.make_reader(user_columns.read_csv(Path(columns)), options["evaluate"] is not None)
    )
    done = ingest(
        sources, name, out=target, hash=hashed, given=given, net=net, build=build, columns=told, say=out.say, **options
    )
    values = asdict(done)
    shown = (
        {**values, "bytes": in_bytes(done.bytes), "read": in_bytes(done.read)}
        if isinstance(done, ImportPlan)
        else values
    )
    out.data(values, facts(shown))


def _read(file: str) -> dict[str, Any]:
    facts: Any = catalog.read_json(Path(file))
    if not isinstance(facts, dict):
        raise UsageError(f"file {file}", expected="a JSON object", found=type(facts).__name__)
    return facts


def _called(build: Callable[[], Any]) -> str | None:
    from checkpoints_zoo.interop.checkpoints import choose_net

    return choose_net(build, None).custom_name


def _argument(text: str) -> tuple[str, Any]:
    """Read KEY=JSON; return both."""
    key, equals, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        found = text if equals else f"{text}, without '='"
        raise UsageError("--argument", expected="KEY=JSON, such as classes=10", found=found) from None
