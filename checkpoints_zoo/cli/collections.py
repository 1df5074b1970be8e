"""`zoo-cli list`: which collections there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from checkpoints_zoo.cli import main
from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.errors import ZooError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.source import Source, collection_source, open_source


@click.command()
@click.option(
    "--source", metavar="SOURCE", help="A folder or hf://datasets/ORG/NAME[@REVISION], in place of the catalog."
)
@output
def command(out: Output, source: str | None) -> None:
    """List the collections of the catalog, or of a folder."""
    broken: list[ZooError] = []
    listed = list(_catalog() if source is None else _of(open_source(source, ""), broken))
    shown = [{**row, "bytes": format_bytes(row["bytes"])} for row in listed]
    out.data(listed, table(shown, right=["bytes"]))
    if str(source or "").startswith(hub.SCHEME) and _offline():
        out.say("HF_HUB_OFFLINE is set: only collections whose manifest is in the cache are listed")
    if not listed and not broken:
        out.say("no collections")
    for error in broken[1:]:
        main.explain(error)
    if broken:
        raise broken[0]


def _catalog() -> Iterator[dict[str, Any]]:
    for x in catalog.collections().values():
        yield _row(x.name, x.members, x.architecture, x.dataset, x.bytes, x.licence, x.sources[0])


def _of(source: Source, broken: list[ZooError]) -> Iterator[dict[str, Any]]:
    """Yield a row for each collection of a folder; a damaged one does not hide the others."""
    for name in source.collections():
        try:
            x, rows = collection_source(name, source).read_collection(name)
        except ZooError as error:
            broken.append(error)
            continue
        members = len(set(rows.column("member").to_pylist()))
        size = manifest.sum_of(rows, "nbytes")
        yield _row(name, members, x.architecture, x.dataset, size, x.licence, source.label)


def _row(
    name: str, members: int, architecture: str, dataset: str, size: int, licence: str, source: str
) -> dict[str, Any]:
    return {
        "name": name, "members": members, "architecture": architecture, "dataset": dataset, "bytes": size,
        "licence": licence, "source": source,
    }  # fmt: skip


def _offline() -> bool:
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())
