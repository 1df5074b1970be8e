"""`zoo-cli show`: what a collection is, and its members."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.common import Selection, finding
from checkpoints_zoo.cli.main import Output, facts, output, percent, table
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.manifest import is_null, sum_of
from checkpoints_zoo.formats.text import did_you_mean, format_bytes
from checkpoints_zoo.sources.source import SelectedMembers

if TYPE_CHECKING:
    import pyarrow as pa

MAIN = (
    "member", "epoch", "status", "reason", "method", "seed", "split",
    "test_accuracy", "test_nll", "test_brier", "test_ece",
)  # fmt: skip
# Not worth a column where every row says so.
USUAL = {"status": {"ok"}, "method": {"independent"}}
SHARES = ("train_accuracy", "test_accuracy")
MOST_ROWS = 20


@click.command()
@finding
@click.option("--columns", metavar="A,B", help="Columns of the manifest to show.")
@output
def command(selection: Selection, columns: str | None, out: Output) -> None:
    """Show what a collection is, and its members.

    A table has at most 20 rows; --format json gives all of them.
    """
    found = selection.find()
    names = None if columns is None else _known([c.strip() for c in columns.split(",")], found.rows)
    about = _about(found)
    if out.format == "json":
        out.data({**about, "rows": _rows(found.rows, names or found.rows.column_names)})
        return
    about |= {"members": f"{about['members']:,} of {about.pop('of'):,}", "bytes": format_bytes(about["bytes"])}
    rows = _rows(found.rows.slice(0, MOST_ROWS), names or _telling(found.rows))
    more = found.rows.num_rows - len(rows)
    out.data(
        None,
        facts(about),
        table([{name: _cell(name, value) for name, value in row.items()} for row in rows], right=SHARES),
        f"… and {more:,} more (`--format json` gives all)" if more else "",
    )


def _telling(rows: pa.Table) -> list[str]:
    """Return the main columns that say something about these rows."""
    return [
        name
        for name in MAIN
        if not is_null(rows, name) and (name not in USUAL or set(rows.column(name).to_pylist()) != USUAL[name])
    ]


def _cell(name: str, value: Any) -> Any:
    return percent(value) if name in SHARES else value


def _about(found: SelectedMembers) -> dict[str, Any]:
    x = found.description
    return {
        "name": x.name,
        "title": x.title,
        "architecture": x.architecture,
        "dataset": x.dataset,
        "classes": list(x.classes),
        "members": found.rows.num_rows,
        "of": found.of,
        "bytes": sum_of(found.rows, "nbytes"),
        "licence": x.licence,
        "cite_as": x.citation,
        "citation": found.citation,
    }


def _known(names: list[str], rows: pa.Table) -> list[str]:
    """Check names of columns; return them."""
    for name in names:
        if name not in rows.column_names:
            raise UsageError(
                f"column {name!r}",
                expected="a column of the manifest",
                found="none such",
                do=did_you_mean(name, rows.column_names, most=3) or f"They are {', '.join(rows.column_names)}",
            )
    return names


def _rows(rows: pa.Table, names: list[str]) -> list[dict[str, Any]]:
    """Return rows as JSON values and datetimes."""
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(names):
        column = rows.column(name)
        if pa.types.is_timestamp(column.type):
            # By seconds: Arrow's own conversion wants a database of time zones.
            seconds = column.cast(pa.int64()).to_pylist()
            columns[name] = [None if s is None else datetime.fromtimestamp(s, UTC) for s in seconds]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
