"""`zoo-cli import`: a collection made of existing checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option
from checkpoints_zoo.cli.options import IMAGES_HELP, OutputFolder, import_function
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.catalog import EPOCH_UNITS
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.interop.ingest import ImportPlan, NetSpec, ingest, user_columns
from checkpoints_zoo.sources.hub_addresses import ADDRESS_SCHEME


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@click.option("--collection", "name", required=True, metavar="NAME", help="Name of the collection.")
@click.option(
    "--out",
    "target",
    type=OutputFolder(),
    metavar="DIR",
    help="Folder to write the manifest to; local files must be inside this folder.",
)
@click.option(
    "--reshard",
    type=OutputFolder(),
    metavar="OUT",
    help="Copy the members into shards in this folder, which becomes a source.",
)
@click.option("--hash", "hashed", is_flag=True, help="Read every member once, for hashes, values that are not finite, "
              "and duplicates.")  # fmt: skip
@click.option(
    "--evaluate",
    metavar="IMAGES",
    help=f"Test images to measure every member on: {IMAGES_HELP}. Members are hashed too.",
)
@click.option("--like", metavar="NAME", help="A collection of the catalog with the same images, classes and "
              "preprocessing.")  # fmt: skip
@click.option("--dataset", metavar="IMAGES", help="The images that the members were trained on.")
@click.option(
    "--classes-from", metavar="IMAGES", help="Images whose classes are those of the logits, in the same order."
)
@click.option("--facts", "file", type=click.Path(), metavar="FILE", help="JSON with title, dataset, classes, "
              "preprocessing, licence or citation.")  # fmt: skip
@click.option("--architecture", metavar="NAME", help="The members' architecture, if tensors do not tell: a name of the "
              "package, or MODULE:FUNCTION, which builds a network of your own (its code runs).")  # fmt: skip
@click.option(
    "--argument",
    "arguments",
    multiple=True,
    metavar="KEY=JSON",
    help="An argument of the architecture, such as classes=10; may be given again.",
)
@click.option("--architecture-name", "custom_name", metavar="TEXT", help="Name of a network of your own.")
@click.option(
    "--strip-prefix", "prefix", default="", metavar="TEXT", help="Prefix to remove from the names of all tensors."
)
@click.option("--key", default="", metavar="KEY", help="Key of the state dict in files of torch.save (ema, or "
              "model/state_dict), if several keys have one.")  # fmt: skip
@click.option("--files", metavar="PATTERN", help="Files of the folder to import, such as '*.pt'.")
@click.option(
    "--columns", metavar="FILE", help="CSV file with a column 'file' and columns of the manifest (seed, lr, …)."
)
@click.option("--strict", is_flag=True, help="Refuse a folder with files that are damaged or of another network, "
              "instead of marking them as failed.")  # fmt: skip
@click.option("--device", default="cpu", metavar="DEVICE", help="What to measure the members on, such as cuda.")
@click.option("--revisions", multiple=True, metavar="GLOB", help="Of model repos: the branches and tags that are the "
              "snapshots, such as 'step*'; may be given again.")  # fmt: skip
@click.option("--epoch-rule", metavar="REGEX", help="Of model repos: a pattern whose first group is the epoch in a "
              "branch's name.")  # fmt: skip
@click.option("--epoch-unit", type=click.Choice(EPOCH_UNITS), metavar="|".join(EPOCH_UNITS),
              help="Of model repos: what the epochs count.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would be imported; write nothing, and read no weights.")
@format_option
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
    target: Path | None,
    revisions: tuple[str, ...],
    epoch_rule: str | None,
    epoch_unit: str | None,
    dry_run: bool,
    out: Output,
    **options: Any,
) -> None:
    """Make a collection of existing checkpoints.

    A manifest is written that points into the files; with --reshard the members are copied into shards. A SOURCE is an
    archive, or a folder of archives, of safetensors files or of files of torch.save; or an address on the Hub,
    hf://datasets/ORG/NAME[@REVISION][/PATH]. An interrupted run continues.

    Model repos, hf://ORG/NAME, are indexed: each is a member, each branch that matches --revisions a snapshot. Braces
    are written out: 'hf://ORG/NAME-seed{1..9}'. Listings and headers are read, and no weights.
    """
    user_facts: dict[str, Any] = _read_facts(file) if file is not None else {}
    if dataset is not None:
        user_facts["dataset"] = dataset
    if classes_from is not None:
        from checkpoints_zoo.interop.checkpoints import facts_to_json

        user_facts |= facts_to_json({"classes": classes_from})
    if revisions or epoch_rule or epoch_unit or any(map(_is_model_repo, sources)):
        from checkpoints_zoo.interop.ingest.model_repos import index_model_repos

        given = {"--architecture": architecture, "--columns": columns, "--strip-prefix": prefix, "--key": key}
        given |= {f"--{option}": value for option, value in options.items() if option != "device"} | {"--hash": hashed}
        if wrong := [option for option, value in given.items() if value]:
            raise UsageError("import of model repos", expected="--out, --revisions, --facts", found=", ".join(wrong))
        if target is None:
            raise UsageError(
                "import of model repos", expected="a folder for the manifest", found="none", do="Give --out"
            )
        result = index_model_repos(
            sources, name, target, revision_patterns=revisions, epoch_rule=epoch_rule, epoch_unit=epoch_unit,
            user_facts=user_facts, dry_run=dry_run, say=out.say,
        )  # fmt: skip
        out.data(asdict(result), fact_lines(asdict(result)))
        return
    network_arguments, build = dict(_parse_argument(argument_text) for argument_text in arguments), None
    if architecture is not None and ":" in architecture:
        build = partial(import_function(architecture), **network_arguments)
        architecture, network_arguments, custom_name = None, {}, custom_name or _network_name(build)
    net_spec = NetSpec(architecture, network_arguments, custom_name, prefix, key)
    columns_reader = (
        None
        if columns is None
        else user_columns.column_reader_of_table(user_columns.read_csv(Path(columns)), options["evaluate"] is not None)
    )
    import_result = ingest(
        sources,
        name,
        out=target,
        hash=hashed,
        user_facts=user_facts,
        net=net_spec,
        build=build,
        columns=columns_reader,
        dry_run=dry_run,
        say=out.say,
        **options,
    )
    values = asdict(import_result)
    printed_values = (
        {**values, "bytes": format_bytes(import_result.bytes), "read": format_bytes(import_result.read)}
        if isinstance(import_result, ImportPlan)
        else values
    )
    out.data(values, fact_lines(printed_values))


def _is_model_repo(source: str) -> bool:
    from checkpoints_zoo.sources.revisions import parse_model_address

    return (
        source.startswith(ADDRESS_SCHEME)
        and parse_model_address(source.replace("{", "0").replace("}", "0")) is not None
    )


def _read_facts(file: str) -> dict[str, Any]:
    facts: Any = catalog.read_json(Path(file))
    if not isinstance(facts, dict):
        raise UsageError(f"file {file}", expected="a JSON object", found=type(facts).__name__)
    return facts


def _network_name(build: Callable[[], Any]) -> str | None:
    from checkpoints_zoo.interop.checkpoints import net_from_argument

    return net_from_argument(build, None).custom_name


def _parse_argument(argument_text: str) -> tuple[str, Any]:
    """Parse KEY=JSON; return the key and the value."""
    key, equals_sign, value = argument_text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        found_text = argument_text if equals_sign else f"{argument_text}, without '='"
        raise UsageError("--argument", expected="KEY=JSON, such as classes=10", found=found_text) from None
