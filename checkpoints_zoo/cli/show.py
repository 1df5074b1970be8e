"""`zoo-cli show`: a collection's description, and its members."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, fact_lines, format_option, percent, table
from checkpoints_zoo.cli.options import Selection, selection_options
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.arrow_tables import is_null, sum_of
from checkpoints_zoo.formats.catalog import EPOCH_UNITS
from checkpoints_zoo.formats.text import did_you_mean, format_bytes
from checkpoints_zoo.sources.finding import SelectedMembers

if TYPE_CHECKING:
    import pyarrow as pa

MAIN_COLUMNS = (
    "member", "epoch", "status", "reason", "method", "run", "draw", "seed", "split",
    "test_accuracy", "test_nll", "test_brier", "test_ece",
)  # fmt: skip
# Main columns of a table with their usual values; a column with only usual values is left out.
USUAL_VALUES = {"status": {"ok"}, "method": {"independent"}}
SHARE_COLUMNS = ("train_accuracy", "test_accuracy")
LARGEST_ROW_COUNT = 20


@click.command()
@selection_options
@click.option("--columns", metavar="A,B", help="Columns of the manifest to show, such as member,seed.")
@click.option("--bibtex", is_flag=True, help="Print an entry for BibTeX that cites the selected members, and no more.")
@format_option
def command(selection: Selection, columns: str | None, bibtex: bool, out: Output) -> None:
    """Show a collection's description, and its members.

    A table has at most 20 rows; --format json gives all.
    """
    selected = selection.find()
    if bibtex:
        entry = selected.description.bibtex(selected.citation)
        out.data({"bibtex": entry}, entry)
        return
    column_names = None if columns is None else _check_columns([c.strip() for c in columns.split(",")], selected.rows)
    description = _description_values(selected)
    if out.format == "json":
        out.data({**description, "rows": _json_rows(selected.rows, column_names or selected.rows.column_names)})
        return
    members = f"{description['members']:,} of {description.pop('of'):,}"
    member_count = len(set(selected.rows.column("member").to_pylist()))
    if member_count < selected.rows.num_rows:
        members = f"{member_count}{members[members.index(' of') :]}, {selected.rows.num_rows:,} snapshots"
    description |= {"members": members, "bytes": format_bytes(description["bytes"])}
    rows = _json_rows(selected.rows.slice(0, LARGEST_ROW_COUNT), column_names or _informative_columns(selected.rows))
    omitted_count = selected.rows.num_rows - len(rows)
    out.data(
        None,
        fact_lines(description),
        table(
            [{name: _cell_value(name, value) for name, value in row.items()} for row in rows],
            right_aligned=SHARE_COLUMNS,
        ),
        f"… and {omitted_count:,} more (`--format json` gives all)" if omitted_count else "",
    )


def _informative_columns(rows: pa.Table) -> list[str]:
    """Return the main columns in which some of the rows have unusual values."""
    return [
        name
        for name in MAIN_COLUMNS
        if not is_null(rows, name)
        and (name not in USUAL_VALUES or set(rows.column(name).to_pylist()) != USUAL_VALUES[name])
    ]


def _cell_value(column: str, value: Any) -> Any:
    return percent(value) if column in SHARE_COLUMNS else value


def _description_values(selected: SelectedMembers) -> dict[str, Any]:
    x = selected.description
    return {
        "name": x.name,
        "title": x.title,
        "architecture": x.architecture,
        **({"epoch_unit": x.epoch_unit} if x.epoch_unit != EPOCH_UNITS[0] else {}),
        "dataset": x.dataset,
        "classes": list(x.classes),
        "members": selected.rows.num_rows,
        "of": selected.of,
        "bytes": sum_of(selected.rows, "nbytes"),
        "licence": x.licence,
        "cite_as": x.citation,
        "citation": selected.citation,
    }


def _check_columns(column_names: list[str], rows: pa.Table) -> list[str]:
    """Check that the manifest has columns of these names; return the names."""
    for name in column_names:
        if name not in rows.column_names:
            raise UsageError(
                f"column {name!r}",
                expected="a column of the manifest",
                found="none such",
                do=did_you_mean(name, rows.column_names, largest_count=3) or f"They are {', '.join(rows.column_names)}",
            )
    return column_names


def _json_rows(rows: pa.Table, column_names: list[str]) -> list[dict[str, Any]]:
    """Return rows as JSON values and datetimes."""
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(column_names):
        column = rows.column(name)
        if pa.types.is_timestamp(column.type):
            # Times are converted from seconds, because Arrow's own conversion needs a database of time zones.
            unix_times = column.cast(pa.int64()).to_pylist()
            columns[name] = [None if s is None else datetime.fromtimestamp(s, UTC) for s in unix_times]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
