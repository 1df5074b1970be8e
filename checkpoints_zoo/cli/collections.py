"""`zoo-cli list`: the collections of the catalog, or of a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkpoints_zoo.cli import main
from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.text import format_bytes


@click.command()
@click.option(
    "--source", metavar="SOURCE", help="A folder or hf://datasets/ORG/NAME[@REVISION], in place of the catalog."
)
@format_option
def command(out: Output, source: str | None) -> None:
    """List the collections of the catalog, or of a folder."""
    errors: list[ZooError] = []
    rows = list(_catalog_rows() if source is None else _source_rows(source, errors))
    out.data(
        rows,
        table(
            [{**row, "bytes": None if row["bytes"] is None else format_bytes(row["bytes"])} for row in rows],
            right_aligned=["bytes"],
        ),
    )
    if source is not None and _is_offline_address(source):
        out.say("HF_HUB_OFFLINE is set: only collections whose manifest is in the cache are listed")
    if not rows and not errors:
        out.say("no collections")
    for error in errors[1:]:
        main.report_error(error)
    if errors:
        raise errors[0]


def _catalog_rows() -> Iterator[dict[str, Any]]:
    for listing in catalog.collections().values():
        yield _row(
            listing.name, listing.members, listing.architecture, listing.dataset, listing.bytes or None,
            listing.licence, listing.sources[0],
        )  # fmt: skip


def _source_rows(place: str, errors: list[ZooError]) -> Iterator[dict[str, Any]]:
    """Yield a row for each collection of a source, and append the errors of damaged collections."""
    # Imported here, since the catalog is listed without them.
    from checkpoints_zoo.formats import arrow_tables
    from checkpoints_zoo.sources.finding import collection_source, open_source

    source = open_source(place, "")
    for name in source.collections():
        try:
            description, manifest_rows = collection_source(name, source).read_collection(name)
        except ZooError as error:
            errors.append(error)
            continue
        member_count = len(set(manifest_rows.column("member").to_pylist()))
        nbytes = arrow_tables.sum_of(manifest_rows, "nbytes")
        yield _row(
            name, member_count, description.architecture, description.dataset, nbytes, description.licence, source.label
        )


def _row(
    collection: str, member_count: int, architecture: str, dataset: str, nbytes: int | None, licence: str, source: str
) -> dict[str, Any]:
    return {
        "name": collection, "members": member_count, "architecture": architecture, "dataset": dataset, "bytes": nbytes,
        "licence": licence, "source": source,
    }  # fmt: skip


def _is_offline_address(place: str) -> bool:
    from checkpoints_zoo.sources.hub_addresses import ADDRESS_SCHEME

    if not place.startswith(ADDRESS_SCHEME):
        return False
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())
