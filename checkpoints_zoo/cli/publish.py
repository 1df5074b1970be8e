"""`zoo-cli publish`: a folder checked and uploaded to the Hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.publishing.publisher import Plan, publish

LARGEST_SHOWN_COUNT = 20


@click.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "--repo", required=True, metavar="ORG/NAME", help="The data set repo, which is made if it does not exist."
)
@click.option("--dry-run", is_flag=True, help="Make the checks that need no torch, print the plan, and upload nothing.")
@click.option("--private", is_flag=True, help="Make a new repo private.")
@click.option("--create-pr", is_flag=True, help="Upload to a pull request instead of main.")
@click.option("--tag", metavar="NAME", help="Tag the commit after the upload.")
@click.option("--sample", default=8, metavar="N", help="Members of each collection whose accuracy is measured again.")
@format_option
def command(folder: str, repo: str, sample: int, out: Output, **options: Any) -> None:
    """Check a folder and upload it to the Hub.

    Weights are uploaded first, then the manifests and the card in one commit. An interrupted run continues; a second
    run does nothing. Nothing in the repo is deleted.
    """
    result = publish(folder, repo, sample=sample, say=out.say, **options)
    if isinstance(result, Plan):
        out.data(result.to_json(), _plan_text(result))
    else:
        out.data(asdict(result), fact_lines({**asdict(result), "bytes": format_bytes(result.bytes)}))


def _plan_text(plan: Plan) -> str:
    """Return a plan as text for people."""
    values = plan.to_json()
    list_keys = ("upload", "there", "unnamed", "ignored", "to_come")
    facts = {key: value for key, value in values.items() if key not in (*list_keys, "there_bytes")}
    facts |= {
        "bytes": format_bytes(plan.bytes),
        "there": f"{len(plan.there)} files, {format_bytes(values['there_bytes'])}",
    }
    title_of_list = {
        "upload": "to upload:",
        "unnamed": "in the repo, but in no manifest any more (they stay):",
        "ignored": "in the folder, but not published:",
        "to_come": "checks that a dry run leaves out:",
    }
    return "\n\n".join(
        [fact_lines(facts), *(_list_text(title_of_list[key], values[key]) for key in title_of_list if values[key])]
    )


def _list_text(title: str, lines: list[str]) -> str:
    more_lines = [f"  and {len(lines) - LARGEST_SHOWN_COUNT:,} more"] if len(lines) > LARGEST_SHOWN_COUNT else []
    return "\n".join([title, *(f"  {line}" for line in lines[:LARGEST_SHOWN_COUNT]), *more_lines])
