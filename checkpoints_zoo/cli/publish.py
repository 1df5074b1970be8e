"""`zoo-cli publish`: a folder checked and put on the Hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from checkpoints_zoo.cli.main import Output, facts, output, printable
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.publishing.publisher import Plan, publish

SHOWN = 20


@click.command()
@click.argument("folder", metavar="DIR")
@click.option("--repo", required=True, metavar="ORG/NAME", help="The data set repo; it is made if there is none.")
@click.option("--dry-run", is_flag=True, help="Check what needs no torch, say what would be done, and upload nothing.")
@click.option("--private", is_flag=True, help="Make the repo a private one.")
@click.option("--create-pr", is_flag=True, help="Put everything into a pull request, in place of main.")
@click.option("--tag", metavar="NAME", help="Tag the commit, once all is there.")
@click.option("--sample", default=8, metavar="N", help="Members a collection whose accuracy to measure again.")
@output
def command(folder: str, repo: str, sample: int, out: Output, **options: Any) -> None:
    """Check a folder and put it on the Hub.

    Weights go up first, then the manifests and the card in one commit.

    Cut off anywhere and started again it goes on; run twice it does nothing. Nothing in the repo is deleted.
    """
    done = publish(folder, repo, sample=sample, say=out.say, **options)
    if isinstance(done, Plan):
        out.data(done.to_json(), _facts(done))
    else:
        out.data(asdict(done), facts({**asdict(done), "bytes": format_bytes(done.bytes)}))


def _facts(plan: Plan) -> str:
    """Lay out a plan for people; return the text."""
    values = plan.to_json()
    lists = ("upload", "there", "unnamed", "ignored", "to_come")
    lines = {key: value for key, value in values.items() if key not in (*lists, "there_bytes")}
    lines |= {
        "bytes": format_bytes(plan.bytes),
        "there": f"{len(plan.there)} files, {format_bytes(values['there_bytes'])}",
    }
    titles = {
        "upload": "to upload:",
        "unnamed": "in the repo, and named by no row any more (they stay):",
        "ignored": "in the folder, and not published:",
        "to_come": "checks still to come, which a dry run leaves out:",
    }
    return "\n\n".join([facts(lines), *(_listed(titles[key], values[key]) for key in titles if values[key])])


def _listed(title: str, lines: list[str]) -> str:
    more = [f"  and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    return "\n".join([title, *(f"  {printable(line)}" for line in lines[:SHOWN]), *more])
