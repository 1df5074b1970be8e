"""Search for the rows of a table that meet an SQL condition. DuckDB parses the condition, each node of its tree is
checked, then DuckDB runs it.

A condition is one expression on the table's columns, whose names are matched exactly. A condition runs only if the
lists below allow every node of its syntax tree. As in SQL, a comparison with null is neither true nor false, so the row
is not selected. As in DuckDB, NaN equals itself and is greater than every other number. `/` divides whole numbers to a
fraction (`seed / 2 = 1.5` for seed 3), and a division by zero is null.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from checkpoints_zoo.errors import SelectionError
from checkpoints_zoo.formats.text import did_you_mean

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# Limits of a condition: its number of characters, and the depth of nested expressions (a chain of ANDs counts once).
LONGEST, DEEPEST = 10_000, 100
LONGEST_PATTERN = 200  # characters of a pattern of LIKE
FUNCTIONS = ("abs", "coalesce", "contains", "ends_with", "length", "lower", "round", "starts_with", "upper")
_LIKE_OPERATORS = {"!~~*": "NOT ILIKE", "!~~": "NOT LIKE", "~~*": "ILIKE", "~~": "LIKE"}
_LIKE = _LIKE_OPERATORS.keys() | {"like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape"}
_CALLS = {*FUNCTIONS, *_LIKE, *"+-*/%"}
_CLASSES = {"BETWEEN", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT"}
_NULL = {"OPERATOR_COALESCE", "OPERATOR_IS_NOT_NULL", "OPERATOR_IS_NULL"}
_ASKS_NULL = {"COMPARE_DISTINCT_FROM", "COMPARE_NOT_DISTINCT_FROM", *_NULL}
_OPERATORS = {"OPERATOR_NOT", "COMPARE_IN", "COMPARE_NOT_IN", *_NULL}
_TIMES = {"DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}
_WORDS = {
    "CASE": "CASE or if()", "LAMBDA": "a lambda", "POSITIONAL_REFERENCE": "a column by its position",
    "STAR": "a star or COLUMNS()", "SUBQUERY": "a sub-select", "WINDOW": "a window function",
    "count_star": "the function count()", "list_value": "a list in brackets", "row": "a tuple",
    "regexp_full_match": "a regular expression", "struct_pack": "a struct",
}  # fmt: skip
_TYPES = {"bool": "BOOLEAN", "date32[day]": "DATE", "double": "DOUBLE", "float": "FLOAT"}
_TYPES |= dict.fromkeys(("large_string", "null", "string"), "VARCHAR")
_CONTENTS = {"BOOLEAN": "true or false", "VARCHAR": "text"} | dict.fromkeys(_TIMES, "times")
_SETTINGS = """SET threads = 1; SET TimeZone = 'UTC'; SET autoload_known_extensions = false;
SET GLOBAL ieee_floating_point_ops = false;
SET enable_external_access = false; SET python_enable_replacements = false; SET lock_configuration = true"""
_EXAMPLE = 'an SQL condition such as "test_accuracy > 0.76 AND seed < 10"'
_ALLOWED = f"columns, values, = < > + - * / %, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL, {', '.join(FUNCTIONS)}"
# The condition is put at the end of one statement and inside parentheses in another. Both statements must give the same
# tree for the condition and leave the rest unchanged; text that ends the parentheses early can't do that. The tree from
# inside
# the parentheses is run.
_FRAMES = {"where_clause": "SELECT 1 FROM rows WHERE {}", "select_list": "SELECT (\n{}\n) FROM rows"}


def rows_where(table: pa.Table, condition: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Find the rows that meet a condition and return their positions, ascending.

    Args:
        table: Arrow table whose columns hold numbers, text, true or false, or times.
        condition: an SQL expression that is true or false for each row.

    Raises:
        SelectionError: the condition is not one expression of columns, constants, plain operators and `FUNCTIONS`; or
            it names no column or only null columns, can't be computed, or selects no row.

    >>> table = pa.table({"member": [0, 1, 2], "test_accuracy": [0.97, None, 0.98]})
    >>> rows_where(table, "test_accuracy > 0.9 AND member < 2").tolist()
    [0]
    """
    import duckdb

    with _connect() as connection:
        tree, column_uses = _parsed(connection, condition)
        names = list(dict.fromkeys(name for name, _ in column_uses))
        for name in names:
            _check_column(table, condition, name, (name, True) in column_uses)
        # Names that differ only in case are one column to DuckDB.
        if len({name.lower() for name in names}) < len(names):
            raise _error(condition, "names of columns that differ in more than case", ", ".join(names))
        try:
            _create_rows(connection, table, names)
            # The statement as text gives good error messages; the tree holds long constants exactly.
            result = connection.execute(_FRAMES["select_list"].format(condition))
            if not str(result.description[0][1]).lower().startswith("bool"):
                raise _error(condition, "true or false for each row", "a value", "Compare it, as in `lr > 0.1`")
            result.fetchall()
            statement = json.dumps(tree).replace("'", "''")
            result = connection.execute(f"FROM json_execute_serialized_sql('{statement}')")
            is_met = [value is True for (value,) in result.fetchall()]
        except duckdb.Error as error:
            found = _shorten_message(str(error).partition(": ")[2])
            contents_text = "; ".join(
                f"{name} holds {_CONTENTS.get(_duckdb_type(table, name), 'numbers')}" for name in names
            )
            raise _error(condition, "values that fit the columns", found, contents_text) from error
    if not any(is_met):
        hints = list(dict.fromkeys(_column_ranges(table, tree)))
        if _has_division(tree):
            hints.append("a division by zero is null")
        do = "; ".join(hints)
        raise _error(condition, "a row that meets it", f"none of {table.num_rows:,}", do)
    return np.flatnonzero(is_met).astype(np.int64)


def columns_in(condition: str) -> tuple[str, ...]:
    """Return the names of the columns that a condition uses, in order, each once.

    Raises:
        SelectionError: the condition is no single expression, or uses anything that is not allowed.

    >>> columns_in("test_accuracy > 0.9 AND seed IN (1, 2) AND test_accuracy < 1")
    ('test_accuracy', 'seed')
    """
    with _connect() as connection:
        return tuple(dict.fromkeys(name for name, _ in _parsed(connection, condition)[1]))


def _error(condition: str, expected: str, found: str, do: str = "") -> SelectionError:
    shown = condition if len(condition) <= 200 else f"{condition[:200]}…"
    return SelectionError(f"where {shown!r}", expected=expected, found=found, do=do)


def _shorten_message(message: str) -> str:
    """Shorten an error message of DuckDB to the part that helps the author of the condition; return it."""
    first = re.split(r"\n|\. You might| - an explicit| when casting|, expected format", message)[0]
    for symbol, word in _LIKE_OPERATORS.items():
        first = first.replace(f"'{symbol}(", f"'{word}(")
    return (first if len(first) <= 200 else f"{first[:200]}…").rstrip(".! ")


def _connect() -> DuckDBPyConnection:
    """Open a database in memory without access to files, network, extensions or Python variables; return it."""
    import duckdb

    return duckdb.connect(":memory:").execute(_SETTINGS)


def _parsed(connection: DuckDBPyConnection, condition: str) -> tuple[Any, list[tuple[str, bool]]]:
    """Parse and check a condition; return the statement to run, and each used column as `_column_uses` yields it."""
    if not isinstance(condition, str):
        raise SelectionError("where", expected=_EXAMPLE, found=type(condition).__name__)
    if len(condition) > LONGEST:
        raise _error(condition, f"at most {LONGEST:,} characters", f"{len(condition):,}", "Pass `members`")
    if not condition.strip():
        raise _error(condition, _EXAMPLE, "nothing")
    # DuckDB stops reading at a NUL character, and reads only valid UTF-8.
    if re.search("[\0\ud800-\udfff]", condition):
        raise _error(condition, _EXAMPLE, "a NUL or half a surrogate pair")
    try:
        (bare_frame, tree), (condition_frame, inside) = (_parse_frame(connection, part, condition) for part in _FRAMES)
        message = bare_frame["error_message"] if bare_frame["error"] and bare_frame["error_type"] == "parser" else ""
        if message.startswith(("Max expression depth", "memory exhausted")):
            raise RecursionError
        if message:
            # `offset` is the only column of the manifest whose name is a reserved word of SQL.
            do = 'Write the column "offset" with double quotes' if 'near "offset"' in message.lower() else ""
            raise _error(condition, _EXAMPLE, _shorten_message(message), do)
        if inside != [tree] or [bare_frame, condition_frame] != [
            _parse_frame(connection, part, "TRUE")[0] for part in _FRAMES
        ]:
            found = "a parameter, a second statement, or a clause such as ORDER BY or LIMIT"
            raise _error(condition, "one expression, alone", found)
        condition_frame["statements"][0]["node"]["select_list"] = inside
        return condition_frame, list(_column_uses(tree, condition))
    except RecursionError:
        raise _error(condition, f"at most {DEEPEST} expressions inside each other", "more") from None


def _parse_frame(connection: DuckDBPyConnection, part: str, condition: str) -> tuple[dict[str, Any], Any]:
    """Parse a condition inside one of the two statements; return the tree of the statement around it, and the
    condition's own tree."""
    # The statement is passed in base64, so that it can't change this query; a bound parameter would make DuckDB import
    # pandas.
    text = base64.b64encode(_FRAMES[part].format(condition).encode()).decode()
    rows = connection.execute(f"SELECT json_serialize_sql(decode(from_base64('{text}')))").fetchall()
    tree = json.loads(rows[0][0], object_pairs_hook=_without_positions)
    return tree, None if tree["error"] else tree["statements"][0]["node"].pop(part, None)


def _without_positions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a node of the tree without its position in the text, which differs between the two statements."""
    node = {key: value for key, value in pairs if key != "query_location"}
    kind = node.get("type")
    if isinstance(kind, dict) and kind["id"] == "DECIMAL":
        number, scale = node["value"], kind["type_info"]["scale"]
        digits = number["upper"] * 2**64 + number["lower"] if isinstance(number, dict) else number
        if abs(digits) > 2**53 or scale > 22:  # DuckDB would read a DOUBLE that is slightly wrong.
            return node | {"type": {"id": "DOUBLE", "type_info": None}, "value": float(f"{digits}e-{scale}")}
    return node


def _column_uses(
    node: Any, condition: str, depth: int = 0, inside_null_test: bool = False
) -> Iterator[tuple[str, bool]]:
    """Check a node and all nodes below it; yield the name of each used column, and whether the condition handles its
    nulls."""
    if depth > DEEPEST:
        raise RecursionError
    if "class" in node:
        if refused_part := _forbidden_part(node):
            do = "For more, choose ids from `Collection.manifest` and pass them as `members`"
            raise _error(condition, _ALLOWED, refused_part, do)
        if node["class"] == "COLUMN_REF":
            yield node["column_names"][0], inside_null_test
        depth, inside_null_test = depth + 1, inside_null_test or node["type"] in _ASKS_NULL
    for child in _children(node):
        yield from _column_uses(child, condition, depth, inside_null_test)


def _children(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the direct child nodes of a node of DuckDB's JSON, in order."""
    return [x for v in node.values() for x in (v if isinstance(v, list) else [v]) if isinstance(x, dict)]


def _forbidden_part(node: dict[str, Any]) -> str:
    """Describe a node that is not allowed in plain words; return "" if the node is allowed."""
    kind, name, operands = node["class"], node.get("function_name", ""), node.get("children", [])
    if node["alias"]:
        return f"a value with a name, {node['alias'][:80]}"
    if kind == "COLUMN_REF" and len(node["column_names"]) > 1:
        return f"a name with a dot, {'.'.join(node['column_names'])[:80]}"
    if kind == "CAST":  # In DuckDB's tree, TRUE and IS TRUE are casts to BOOLEAN.
        to, constant = node["cast_type"]["id"], node["child"]["class"] == "CONSTANT"
        return "" if to == "BOOLEAN" or (to in _TIMES and constant) else f"a cast to {to}"
    if kind in _CLASSES or node["type"] in _OPERATORS:
        return ""
    if kind != "FUNCTION":
        return _WORDS.get(kind, f"the expression {node['type'].lower().replace('_', ' ')}")
    if name not in _CALLS or node["schema"] not in ("", "main") or node["catalog"]:
        full = f"{node['schema']}.{name}()".removeprefix("main").removeprefix(".")
        call = f"operator {name.removesuffix('__postfix')}" if node["is_operator"] else f"function {full}"
        return _WORDS.get(name, f"the {call}")
    if node["filter"] or node["distinct"] or node["order_bys"]["orders"] or node["export_state"]:
        return f"{name}() with DISTINCT, ORDER BY or FILTER"
    # The time of LIKE grows as the text's length to the power of the number of % signs, and with the pattern's length.
    pattern = operands[1].get("value", {}).get("value") if name in _LIKE and len(operands) > 1 else ""
    is_allowed = isinstance(pattern, str) and pattern.count("%") < 4 and len(pattern) <= LONGEST_PATTERN
    problem = f"LIKE with a pattern that is no text, has more than three %, or over {LONGEST_PATTERN} characters"
    return "" if is_allowed else problem


def _duckdb_type(table: pa.Table, name: str) -> str:
    """Return the DuckDB type of a column, "" if conditions can't use columns of this type."""
    kind = table.schema.field(name).type
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE" if kind.tz else "TIMESTAMP"
    return "BIGINT" if pa.types.is_integer(kind) else _TYPES.get(str(kind), "")


def _check_column(table: pa.Table, condition: str, name: str, asks_null: bool) -> None:
    if name not in table.column_names:
        known = {column.lower(): column for column in table.column_names}
        near = did_you_mean(name.lower(), known, cutoff=0.6, shown=known.__getitem__)
        do = f"{near} " if near else ""
        do += f"Text takes single quotes: {name!r}. " if f'"{name}"' in condition else ""
        do += "`Collection.manifest.columns` has all names"
        raise _error(condition, "names of columns", repr(name[:80]), do)
    if not _duckdb_type(table, name):
        found = f"{name} of type {table.schema.field(name).type}"
        raise _error(condition, "columns of numbers, text, true or false, or times", found)
    if not asks_null and table.num_rows and table.column(name).null_count == table.num_rows:
        import_option = {"sha256": "--hash"}.get(name, "--evaluate DATA" if name.startswith(("eval_", "test_")) else "")
        do = f"`zoo-cli import SOURCE {import_option}` fills it" if import_option else "Choose rows by another column"
        raise SelectionError(f"column {name} is null in every row of this source", do=do)


def _create_rows(connection: DuckDBPyConnection, table: pa.Table, names: list[str]) -> None:
    """Copy columns into the table `rows` of the database."""
    # The rows are passed as JSON: for an Arrow table, DuckDB would import pyarrow.dataset, which imports pandas.
    columns = [f"unnest(range({table.num_rows}))"]
    for name in names:
        kind, column, title = _duckdb_type(table, name), table.column(name), name.replace('"', '""')
        values = json.dumps((column.cast(pa.string()) if kind in _TIMES else column).to_pylist())
        quoted_values = values.replace("'", "''")
        columns.append(f"""unnest(from_json_strict('{quoted_values}', '["{kind}"]')) AS "{title}\"""")
    connection.execute(f"CREATE TABLE rows AS SELECT {', '.join(columns)}")


def _has_division(node: dict[str, Any]) -> bool:
    """Say whether a condition divides, or takes a remainder."""
    return node.get("function_name") in ("/", "%") or any(_has_division(child) for child in _children(node))


def _column_ranges(table: pa.Table, node: dict[str, Any]) -> Iterator[str]:
    """Yield the range of each numeric column that the condition compares with constants."""
    if node.get("class") in ("BETWEEN", "COMPARISON") or node.get("type") in ("COMPARE_IN", "COMPARE_NOT_IN"):
        names = [name for name, _ in _column_uses(node, "")]
        if len(names) == 1 and any(part.get("class") == "COLUMN_REF" for part in _children(node)):
            values = [v for v in table.column(names[0]).to_pylist() if v is not None and v == v]
            if values and _duckdb_type(table, names[0]) not in _CONTENTS:
                yield f"{names[0]} runs from {min(values)} to {max(values)}"
    for child in _children(node):
        yield from _column_ranges(table, child)
