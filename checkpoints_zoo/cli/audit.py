"""`zoo-cli audit`: whether the files of a repo or a folder are what they should be."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from checkpoints_zoo.cli.failures import DONE, FOUND
from checkpoints_zoo.cli.output import Output, facts, output, printable
from checkpoints_zoo.formats.text import in_bytes
from checkpoints_zoo.publishing.auditing import Finding, audit

SHOWN = 20  # of one kind


@click.command()
@click.argument("place", metavar="ADDRESS|DIR")
@output
def command(place: str, out: Output) -> int:
    """Look for what is wrong with any repo or folder, from hashes, sizes and first bytes.

    ADDRESS is hf://datasets/ORG/NAME[@REVISION]. Found are files and members with one content under several names,
    pickles, LFS pointers and web pages where weights should be, empty and damaged files, rows of manifests whose bytes
    are not there, and stored predictions of other weights. No weights are fetched and nothing is unpickled. Exit code
    1: something was found.
    """
    found = audit(place)
    about = {
        "source": found.source,
        "files": found.files,
        "bytes": found.bytes,
        "looked_into": found.read,
        "collections": found.collections,
        "members": found.members,
        "predictions": found.predictions,
    }
    listed = {"findings": [asdict(f) for f in found.findings], "notes": [asdict(f) for f in found.notes]}
    out.data(
        about | listed,
        facts({**about, "bytes": in_bytes(found.bytes)}),
        "\n".join(_lines(found.findings)) or "Nothing is wrong with them.",
        "\n".join(f"note: {line}" for line in _lines(found.notes)),
    )
    return FOUND if found.findings else DONE


def _lines(findings: list[Finding]) -> list[str]:
    """Write findings for people, of each kind the first few; return the lines."""
    lines, counts = [], Counter[str]()
    for one in findings:
        counts[one.kind] += 1
        if counts[one.kind] <= SHOWN:
            lines.append(printable(str(one)))
    more = [
        f"{count - SHOWN:,} more: {kind} (--format json lists all)" for kind, count in counts.items() if count > SHOWN
    ]
    return lines + more
