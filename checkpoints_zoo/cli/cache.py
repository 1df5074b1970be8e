"""`zoo-cli cache`: members that were fetched and lie on this machine."""

from __future__ import annotations

from dataclasses import asdict

import click

from checkpoints_zoo.cli.main import Output, output, table
from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import cache


@click.command()
@click.option("--drop", metavar="ORG/NAME", help="Delete the members of that repo; `all` for every repo's.")
@click.option("--dry-run", is_flag=True, help="With --drop: say what would go, and delete nothing.")
@output
def command(drop: str | None, dry_run: bool, out: Output) -> None:
    """List the members that were fetched from the Hub, or delete some.

    Whole files that the Hub's own client keeps are not listed: `hf cache ls` shows them.
    """
    kept = cache.cached_repos()
    if drop is not None:
        kept = [line for line in kept if drop in ("all", line.repo)]
        if not kept and drop != "all":
            raise SourceNotFound(
                f"repo {drop}", expected=f"one that {cache.cache_root()} holds members of", found="none of it",
                do="`zoo-cli cache` lists them",
            )  # fmt: skip
        if not dry_run:
            for line in kept:
                cache.delete_members(line.repo)
    rows = [asdict(line) for line in kept]
    out.data(rows, table([{**row, "bytes": format_bytes(row["bytes"])} for row in rows], right=["bytes"]))
    verb = "" if drop is None else "would be deleted: " if dry_run else "deleted: "
    out.say(f"{verb}{format_bytes(sum(line.bytes for line in kept))} in {cache.cache_root()}")
