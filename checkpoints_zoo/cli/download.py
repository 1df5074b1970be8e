"""`zoo-cli download`: the members' bytes brought to this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from checkpoints_zoo.cli.common import Selection, finding
from checkpoints_zoo.cli.main import Output, facts, output
from checkpoints_zoo.formats.manifest import check_located, sum_of
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import copying
from checkpoints_zoo.sources.source import SelectedMembers


@click.command()
@finding
@click.option(
    "--dest", type=click.Path(path_type=Path), metavar="DIR",
    help="Make DIR a source of its own that has these members, or add them to the one there.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what it is about, and fetch and write no weights.")
@output
def command(selection: Selection, dest: Path | None, dry_run: bool, out: Output) -> None:
    """Bring members' bytes to this machine, and no others.

    They lie in the member cache then, where `zoo.load` and `zoo-cli` find them, offline too; with --dest also in DIR,
    which `--source DIR` reads and `zoo-cli publish DIR` publishes. Killed and run again, it goes on.
    """
    found = selection.find()
    about: dict[str, Any] = {
        "citation": found.citation,
        "members": found.rows.num_rows,
        "files": len(set(found.rows.column("path").drop_null().to_pylist())),
        "bytes": sum_of(found.rows, "nbytes"),
        "fetched": not dry_run,
    }
    if dest is None:
        check_located(found.rows, found.description.name)
    else:
        about |= _copied(found, dest, dry_run, out)
    if dest is None and not dry_run:
        found.source.locate(found.description, found.rows)
    sizes = {key: format_bytes(value) for key, value in about.items() if key.endswith("bytes")}
    out.data(about, facts({**about, **sizes, "fetched": "no" if dry_run else "yes"}))


def _copied(found: SelectedMembers, dest: Path, dry_run: bool, out: Output) -> dict[str, Any]:
    """Copy members into a folder, or only plan to; return what that needs: files and bytes there, bytes cached."""
    plan = copying.plan_copy(found, dest)
    if not dry_run:
        copying.copy_members(found, dest, out.say)
    return {
        "dest": plan.target.root,
        "shards": len(plan.shards),
        "dest_bytes": plan.nbytes,
        "cache_bytes": plan.cached,
    }
