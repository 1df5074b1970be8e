"""`zoo-cli cache`: members that were fetched and are stored on this machine."""

from __future__ import annotations

from dataclasses import asdict

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.hub_cache import cache_root


@click.command()
@click.option(
    "--drop",
    metavar="ORG/NAME",
    help="Delete the members of this repo (models/ORG/NAME of a model repo); `all` for every repo.",
)
@click.option("--dry-run", is_flag=True, help="With --drop: list what would be deleted, and delete nothing.")
@format_option
def command(drop: str | None, dry_run: bool, out: Output) -> None:
    """List the members that were fetched from the Hub, or delete some.

    Whole files are stored by the Hub's own client, and listed by `hf cache ls`.
    """
    cached_repos = cache.cached_repos()
    if drop is not None:
        cached_repos = [cached_repo for cached_repo in cached_repos if drop in ("all", cached_repo.repo)]
        if not cached_repos and drop != "all":
            raise SourceNotFound(
                f"repo {drop}", expected=f"a repo with members in {cache_root()}", found="no members of it",
                do="`zoo-cli cache` lists the repos",
            )  # fmt: skip
        if not dry_run:
            for cached_repo in cached_repos:
                cache.delete_members(cached_repo.repo)
    repo_rows = [asdict(cached_repo) for cached_repo in cached_repos]
    out.data(
        repo_rows,
        table(
            [{**repo_row, "bytes": format_bytes(repo_row["bytes"])} for repo_row in repo_rows], right_aligned=["bytes"]
        ),
    )
    message_start = "" if drop is None else "would be deleted: " if dry_run else "deleted: "
    out.say(f"{message_start}{format_bytes(sum(cached_repo.bytes for cached_repo in cached_repos))} in {cache_root()}")
