"""`zoo-cli download`: members fetched to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option
from checkpoints_zoo.cli.options import OutputFolder, Selection, selection_options
from checkpoints_zoo.formats.row_checks import check_located
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import copying
from checkpoints_zoo.sources.finding import SelectedMembers


@click.command()
@selection_options
@click.option(
    "--dest", type=OutputFolder(), metavar="DIR",
    help="Copy the members into DIR, a source of its own.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print files and bytes, and fetch and write no weights.")
@format_option
def command(selection: Selection, dest: Path | None, dry_run: bool, out: Output) -> None:
    """Fetch members to this machine, and no other bytes.

    The members are stored in the member cache, where `zoo.load` and `zoo-cli` find them, also offline. With --dest the
    members are also copied into DIR, which `--source DIR` reads and `zoo-cli publish DIR` publishes. An interrupted run
    continues.
    """
    selected = selection.find()
    rows_with_weights = selected.rows.filter(selected.rows.column("path").is_valid())
    local_count = selected.source.count_local(selected.description, rows_with_weights)
    values: dict[str, Any] = {
        "citation": selected.citation,
        "members": selected.rows.num_rows,
        "files": len(set(rows_with_weights.column("path").to_pylist())),
        "bytes": selected.source.transfer_nbytes(rows_with_weights),
        "members_here": local_count,
        "members_fetched": 0 if dry_run else rows_with_weights.num_rows - local_count,
        "fetched": not dry_run,
    }
    if dest is None:
        check_located(selected.rows, selected.description.name)
    else:
        values |= _copy(selected, dest, dry_run, out)
    if dest is None and not dry_run:
        selected.source.locate(selected.description, selected.rows)
    sizes = {key: format_bytes(value) for key, value in values.items() if key.endswith("bytes")}
    out.data(values, fact_lines({**values, **sizes, "fetched": "no" if dry_run else "yes"}))


def _copy(selected: SelectedMembers, dest: Path, dry_run: bool, out: Output) -> dict[str, Any]:
    """Copy members into a folder, or only plan it; return the numbers of shards and bytes."""
    copy_plan = copying.plan_copy(selected, dest)
    if not dry_run:
        copying.copy_members(selected, dest, out.say)
    return {
        "dest": copy_plan.target.root,
        "shards": len(copy_plan.shards),
        "dest_bytes": copy_plan.nbytes,
        "cache_bytes": copy_plan.cached_nbytes,
    }
