"""`zoo-cli audit`: files of a repo or folder, and revisions of model repos, checked for damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from checkpoints_zoo.cli.main import DONE, PROBLEMS, Output, fact_lines, format_option, table
from checkpoints_zoo.formats.text import first_few, format_bytes, one_line
from checkpoints_zoo.publishing.auditing import Finding, audit
from checkpoints_zoo.publishing.revision_audit import RevisionFinding, audit_revisions
from checkpoints_zoo.sources.revisions import expand_braces, parse_model_address

LARGEST_ROW_COUNT = 8  # largest number of findings of one kind in the table of revisions
LARGEST_LINE_COUNT = 20  # largest number of findings of one kind that are printed


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="ADDRESS|DIR…")
@click.option("--revisions", multiple=True, metavar="GLOB", help="Compare these branches and tags of model repos, such "
              "as 'step*'; may be given again.")  # fmt: skip
@click.option("--epoch-rule", metavar="REGEX", help="With model repos: a pattern whose first group is the step in a "
              "branch's name.")  # fmt: skip
@format_option
def audit_command(places: tuple[str, ...], revisions: tuple[str, ...], epoch_rule: str | None, out: Output) -> int:
    """Check the files of any repo or folder for damage by hashes, sizes and first bytes.

    ADDRESS is hf://datasets/ORG/NAME[@REVISION]. The command finds files and members with the same content under
    several names; pickles, LFS pointers and web pages in place of weights; empty and damaged files; manifest rows whose
    bytes are missing; and stored predictions of other weights. No weights are fetched and nothing is unpickled. Exit
    code 1: faults were found.

    Of model repos, hf://ORG/NAME, all revisions that match --revisions are compared with each other: the same weights
    under two names, shards of another model, missing tensors and steps, sizes that jump. Braces are written out:
    'hf://ORG/NAME-seed{1..9}'. Listings and headers are read; an audit that was stopped goes on.
    """
    if revisions or epoch_rule or any(parse_model_address(address) for p in places for address in expand_braces(p)[:1]):
        return _audit_revisions(places, revisions, epoch_rule, out)
    if len(places) > 1:
        raise click.UsageError("Give one folder or address; several only of model repos.")
    place = places[0]
    result = audit(place)
    summary = {
        "source": result.source,
        "files": result.files,
        "bytes": result.bytes,
        "looked_into": result.read,
        "collections": result.collections,
        "members": result.members,
        "predictions": result.predictions,
    }
    finding_values = {
        "findings": [asdict(finding) for finding in result.findings],
        "notes": [asdict(finding) for finding in result.notes],
    }
    out.data(
        summary | finding_values,
        fact_lines({**summary, "bytes": format_bytes(result.bytes)}),
        "\n".join(_finding_lines(result.findings)) or "Nothing is wrong with them.",
        "\n".join(f"note: {line}" for line in _finding_lines(result.notes)),
    )
    return PROBLEMS if result.findings else DONE


def _audit_revisions(
    addresses: tuple[str, ...], revision_patterns: tuple[str, ...], epoch_rule: str | None, out: Output
) -> int:
    """Compare the revisions of model repos, and print the faults; return the exit code."""
    result = audit_revisions(addresses, revision_patterns or ("*",), epoch_rule, out.say)
    facts = {name: value for name, value in asdict(result).items() if name not in ("findings", "notes")}
    facts["faulty_revisions"] = result.faulty_revisions
    count_of_kind = Counter(finding.kind for finding in result.findings)
    rows, more_lines, compare_lines = list[dict[str, Any]](), list[str](), list[str]()
    for kind, count in sorted(count_of_kind.items(), key=lambda item: item[1]):  # a kind of few findings is not buried
        findings = [finding for finding in result.findings if finding.kind == kind]
        rows += [
            {"kind": kind, "revisions": first_few(list(x.revisions), 3), "found": one_line(x.text, 160)}
            for x in findings[:LARGEST_ROW_COUNT]
        ]
        if count > LARGEST_ROW_COUNT:
            more_lines.append(f"{count - LARGEST_ROW_COUNT:,} more: {kind} (--format json lists all)")
        compare_lines.append(f"{kind}: compare {findings[0].compare}")
    out.data(
        asdict(result) | facts,
        fact_lines({**facts, "bytes": format_bytes(result.bytes)}),
        table(rows) or "Nothing is wrong with them.",
        "\n".join(more_lines),
        "\n".join(compare_lines),
        "\n".join(f"note: {line}" for line in _finding_lines(result.notes)),
    )
    return PROBLEMS if result.findings else DONE


def _finding_lines(findings: Sequence[Finding | RevisionFinding]) -> list[str]:
    """Return findings as lines of text, with only the first few of each kind."""
    lines, count_of_kind = [], Counter[str]()
    for finding in findings:
        count_of_kind[finding.kind] += 1
        if count_of_kind[finding.kind] <= LARGEST_LINE_COUNT:
            lines.append(str(finding))
    more_lines = [
        f"{count - LARGEST_LINE_COUNT:,} more: {kind} (--format json lists all)"
        for kind, count in count_of_kind.items()
        if count > LARGEST_LINE_COUNT
    ]
    return lines + more_lines
