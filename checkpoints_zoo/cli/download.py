"""`zoo-cli download`: the members' bytes brought to this machine."""

from __future__ import annotations

import click

from checkpoints_zoo.cli.output import Output, facts, in_bytes, output
from checkpoints_zoo.cli.selecting import Selection, selecting
from checkpoints_zoo.manifest import check_located, total


@click.command()
@selecting
@click.option("--dry-run", is_flag=True, help="Say what it is about, and fetch no weights.")
@output
def command(selection: Selection, dry_run: bool, out: Output) -> None:
    """Bring members' bytes to this machine, and no others.

    They lie in the member cache then, where `zoo.load` and `zoo-cli` find them, offline too.
    """
    found = selection.find()
    check_located(found.rows, found.description.name)
    about = {
        "citation": found.citation,
        "members": found.rows.num_rows,
        "files": len(set(found.rows.column("path").to_pylist())),
        "bytes": total(found.rows, "nbytes"),
        "fetched": not dry_run,
    }
    if not dry_run:
        found.source.locate(found.description, found.rows)
    out.data(about, facts({**about, "bytes": in_bytes(about["bytes"]), "fetched": "no" if dry_run else "yes"}))
