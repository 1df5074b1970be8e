"""Search for the rows of a table that meet an SQL condition. DuckDB parses the condition, each node of the syntax tree
is checked, and then DuckDB runs the condition.

A condition is one expression on the table's columns, whose names are matched exactly. A condition runs only if the
lists below allow every node of its syntax tree. As in SQL, a comparison with null is neither true nor false, so that
the row is not selected. As in DuckDB, NaN equals itself and is greater than every other number. `/` divides whole
numbers to a fraction (`seed / 2 = 1.5` for seed 3), and a division by zero is null.

This is one file, because the forms that are allowed, and how each of them runs, belong together.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from checkpoints_zoo.errors import SelectionError
from checkpoints_zoo.formats.arrow_tables import numpy_values
from checkpoints_zoo.formats.text import did_you_mean

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# Largest number of characters of a condition, and largest depth of nested expressions (a chain of ANDs counts once).
LONGEST_CONDITION, LARGEST_DEPTH = 10_000, 100
_LARGEST_INTEGER = 2**63 - 1
LONGEST_PATTERN = 200  # largest number of characters of a LIKE pattern
ALLOWED_FUNCTIONS = ("abs", "coalesce", "contains", "ends_with", "length", "lower", "round", "starts_with", "upper")
_LIKE_OPERATORS = {"!~~*": "NOT ILIKE", "!~~": "NOT LIKE", "~~*": "ILIKE", "~~": "LIKE"}
_LIKE_NAMES = _LIKE_OPERATORS.keys() | {"like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape"}
_ALLOWED_FUNCTION_NAMES = {*ALLOWED_FUNCTIONS, *_LIKE_NAMES, *"+-*/%"}
_ALLOWED_NODE_CLASSES = {"BETWEEN", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT"}
_NULL_OPERATORS = {"OPERATOR_COALESCE", "OPERATOR_IS_NOT_NULL", "OPERATOR_IS_NULL"}
_OPERATORS_THAT_HANDLE_NULL = {"COMPARE_DISTINCT_FROM", "COMPARE_NOT_DISTINCT_FROM", *_NULL_OPERATORS}
_ALLOWED_OPERATORS = {"OPERATOR_NOT", "COMPARE_IN", "COMPARE_NOT_IN", *_NULL_OPERATORS}
_TIME_TYPES = {"DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}
_PLAIN_NAME_OF_SYNTAX = {
    "CASE": "CASE or if()", "LAMBDA": "a lambda", "POSITIONAL_REFERENCE": "a column by its position",
    "STAR": "a star or COLUMNS()", "SUBQUERY": "a sub-select", "WINDOW": "a window function",
    "count_star": "the function count()", "list_value": "a list in brackets", "row": "a tuple",
    "regexp_full_match": "a regular expression", "struct_pack": "a struct",
}  # fmt: skip
_DUCKDB_TYPE_OF_ARROW_TYPE = {"bool": "BOOLEAN", "date32[day]": "DATE", "double": "DOUBLE", "float": "FLOAT"}
_DUCKDB_TYPE_OF_ARROW_TYPE |= dict.fromkeys(("large_string", "null", "string"), "VARCHAR")
_CONTENTS_OF_TYPE = {"BOOLEAN": "true or false", "VARCHAR": "text"} | dict.fromkeys(_TIME_TYPES, "times")
# Each setting holds for the whole database, and so for each of its connections.
_DUCKDB_CONFIG: dict[str, Any] = {
    "threads": 1,
    "autoload_known_extensions": False,
    "enable_external_access": False,
    "python_enable_replacements": False,
}
_DUCKDB_SETTINGS = """SET GLOBAL TimeZone = 'UTC'; SET GLOBAL ieee_floating_point_ops = false;
SET lock_configuration = true"""
_local = threading.local()  # `database`: the database of the thread, once it has been opened
_EXAMPLE_TEXT = 'an SQL condition such as "test_accuracy > 0.76 AND seed < 10"'
_ALLOWED_TEXT = (
    f"columns, values, = < > + - * / %, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL, {', '.join(ALLOWED_FUNCTIONS)}"
)
# The condition is put at the end of one statement, and inside parentheses in another. Both statements must give the
# same syntax tree for the condition and the usual tree for the rest, which text that closes the parentheses early can't
# do. The tree from inside the parentheses is run.
_STATEMENT_TEMPLATES = {"where_clause": "SELECT 1 FROM rows WHERE {}", "select_list": "SELECT (\n{}\n) FROM rows"}


@dataclass(frozen=True)
class Condition:
    """A parsed and checked condition.

    Args:
        text: the condition as its author wrote it.
        statement: syntax tree of the statement that computes the condition.
        column_uses: (name, whether nulls are handled) of each used column.
    """

    text: str
    statement: Any
    column_uses: tuple[tuple[str, bool], ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse and check a condition; return it.

        Raises:
            SelectionError: the condition is not one expression of columns, constants, plain operators and
                `ALLOWED_FUNCTIONS`.

        >>> condition = Condition.parse("test_accuracy > 0.9 AND member < 2")
        >>> condition.column_names
        ('test_accuracy', 'member')
        >>> table = pa.table({"member": [0, 1, 2], "test_accuracy": [0.97, None, 0.98]})
        >>> condition.is_met(table, table.schema).tolist()
        [True, False, False]
        """
        with _connect() as connection:
            statement, column_uses = _parse_and_check(connection, text)
        return cls(text, statement, tuple(column_uses))

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns that the condition uses, in order, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.column_uses))

    def is_met(self, table: pa.Table, schema: pa.Schema) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Compute the condition; return for each row whether it meets the condition.

        Args:
            table: table that has those columns of the schema that the condition uses.
            schema: all columns that a condition may use.

        Raises:
            SelectionError: the condition names an unknown or empty column, or can't be computed.
        """
        import duckdb

        for name in self.column_names:
            _check_column(table, schema, self.text, name, (name, True) in self.column_uses)
        # Names that differ only in case are one column to DuckDB.
        if len({name.lower() for name in self.column_names}) < len(self.column_names):
            raise _condition_error(
                self.text, "names of columns that differ in more than case", ", ".join(self.column_names)
            )
        with _connect() as connection:
            try:
                _create_rows(connection, table, self.column_names)
                # The text of the statement gives good error messages; the syntax tree has the exact values of long
                # constants.
                result = connection.execute(_STATEMENT_TEMPLATES["select_list"].format(self.text))
                if not str(result.description[0][1]).lower().startswith("bool"):
                    raise _condition_error(
                        self.text, "true or false for each row", "a value", "Compare it, as in `lr > 0.1`"
                    )
                result.fetchnumpy()
                statement = json.dumps(self.statement).replace("'", "''")
                result = connection.execute(f"FROM json_execute_serialized_sql('{statement}')")
                (values,) = result.fetchnumpy().values()
                return np.asarray(np.ma.filled(values, False), bool)
            except duckdb.Error as error:
                found = _shorten_message(str(error).partition(": ")[2])
                contents_text = "; ".join(
                    f"{name} holds {_CONTENTS_OF_TYPE.get(_duckdb_type(schema, name), 'numbers')}"
                    for name in self.column_names
                )
                raise _condition_error(self.text, "values that fit the columns", found, contents_text) from error

    def no_row_error(self, table: pa.Table) -> SelectionError:
        """Return the error for a condition that no row of a table meets."""
        condition_tree = self.statement["statements"][0]["node"]["select_list"][0]
        range_texts = list(dict.fromkeys(_column_ranges(table, condition_tree)))
        if _has_division(condition_tree):
            range_texts.append("a division by zero is null")
        return _condition_error(self.text, "a row that meets it", f"none of {table.num_rows:,}", "; ".join(range_texts))

    def integer_intervals(self) -> dict[str, tuple[int, int]]:
        """Return, for columns that the condition compares with whole numbers, an interval that contains the column's
        value in every row that meets the condition.

        Comparisons below OR and NOT, and on computed values, are left out: the intervals of other columns are infinite.
        """
        interval_of_column: dict[str, tuple[int, int]] = {}
        for name, low, high in _integer_bounds(self.statement["statements"][0]["node"]["select_list"][0]):
            old_low, old_high = interval_of_column.get(name, (low, high))
            interval_of_column[name] = max(low, old_low), min(high, old_high)
        return interval_of_column


def _integer_bounds(node: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield (column, lowest value, highest value) for each comparison that must hold where a node is true."""
    node_type = node["type"]
    if node_type == "CONJUNCTION_AND":
        for child in node["children"]:
            yield from _integer_bounds(child)
        return
    if node["class"] == "BETWEEN" and node_type == "COMPARE_BETWEEN":
        column_node, constant_nodes = node["input"], [node["lower"], node["upper"]]
    elif node["class"] == "COMPARISON":
        column_node, constant_nodes = node["left"], [node["right"]]
    elif node_type == "COMPARE_IN":
        column_node, *constant_nodes = node["children"]
    else:
        return
    numbers_or_none = [_integer_constant(constant) for constant in constant_nodes]
    if column_node["class"] != "COLUMN_REF" or None in numbers_or_none:
        return
    numbers = [value for value in numbers_or_none if value is not None]
    low, high = {
        "COMPARE_GREATERTHAN": (numbers[0], _LARGEST_INTEGER),
        "COMPARE_GREATERTHANOREQUALTO": (numbers[0], _LARGEST_INTEGER),
        "COMPARE_LESSTHAN": (-_LARGEST_INTEGER, numbers[0]),
        "COMPARE_LESSTHANOREQUALTO": (-_LARGEST_INTEGER, numbers[0]),
        "COMPARE_EQUAL": (numbers[0], numbers[0]),
        "COMPARE_BETWEEN": (numbers[0], numbers[-1]),
        "COMPARE_IN": (min(numbers), max(numbers)),
    }.get(node_type, (-_LARGEST_INTEGER, _LARGEST_INTEGER))
    yield column_node["column_names"][0], low, high


def _integer_constant(node: dict[str, Any]) -> int | None:
    """Return the whole number that a node of the syntax tree stands for; None if it is another node."""
    value = node.get("value", {})
    is_integer = node["class"] == "CONSTANT" and value["type"]["id"] in ("INTEGER", "BIGINT") and not value["is_null"]
    return value["value"] if is_integer else None


def _condition_error(condition: str, expected: str, found: str, do: str = "") -> SelectionError:
    condition_text = condition if len(condition) <= 200 else f"{condition[:200]}…"
    return SelectionError(f"where {condition_text!r}", expected=expected, found=found, do=do)


def _shorten_message(message: str) -> str:
    """Shorten an error message of DuckDB to the part that helps the author of the condition; return this part."""
    helpful_part = re.split(r"\n|\. You might| - an explicit| when casting|, expected format", message)[0]
    for symbol, word in _LIKE_OPERATORS.items():
        helpful_part = helpful_part.replace(f"'{symbol}(", f"'{word}(")
    return (helpful_part if len(helpful_part) <= 200 else f"{helpful_part[:200]}…").rstrip(".! ")


@contextlib.contextmanager
def _connect() -> Iterator[DuckDBPyConnection]:
    """Yield a connection to this thread's database in memory, which has no access to files, network, extensions or
    Python variables; drop the table `rows` at the end."""
    import duckdb

    # Opening a database takes about 100 times as long as connecting to it.
    if not hasattr(_local, "database"):
        _local.database = duckdb.connect(":memory:", config=_DUCKDB_CONFIG).execute(_DUCKDB_SETTINGS)
    with _local.database.cursor() as connection:
        try:
            yield connection
        finally:
            connection.execute("DROP TABLE IF EXISTS rows")


def _parse_and_check(connection: DuckDBPyConnection, condition: str) -> tuple[Any, list[tuple[str, bool]]]:
    """Parse and check a condition; return the statement to run, and (name, whether nulls are handled) of each used
    column."""
    if not isinstance(condition, str):
        raise SelectionError("where", expected=_EXAMPLE_TEXT, found=type(condition).__name__)
    if len(condition) > LONGEST_CONDITION:
        raise _condition_error(
            condition, f"at most {LONGEST_CONDITION:,} characters", f"{len(condition):,}", "Pass `members`"
        )
    if not condition.strip():
        raise _condition_error(condition, _EXAMPLE_TEXT, "nothing")
    # DuckDB stops reading at a NUL character, and reads only valid UTF-8.
    if re.search("[\0\ud800-\udfff]", condition):
        raise _condition_error(condition, _EXAMPLE_TEXT, "a NUL or half a surrogate pair")
    try:
        (where_statement, condition_tree), (select_statement, select_list_trees) = (
            _parse_in_template(connection, template_name, condition) for template_name in _STATEMENT_TEMPLATES
        )
        message = (
            where_statement["error_message"]
            if where_statement["error"] and where_statement["error_type"] == "parser"
            else ""
        )
        if message.startswith(("Max expression depth", "memory exhausted")):
            raise RecursionError
        if message:
            # `offset` is the only column of the manifest whose name is a reserved word of SQL.
            do = 'Write the column "offset" with double quotes' if 'near "offset"' in message.lower() else ""
            raise _condition_error(condition, _EXAMPLE_TEXT, _shorten_message(message), do)
        if select_list_trees != [condition_tree] or [where_statement, select_statement] != [
            _parse_in_template(connection, template_name, "TRUE")[0] for template_name in _STATEMENT_TEMPLATES
        ]:
            found = "a parameter, a second statement, or a clause such as ORDER BY or LIMIT"
            raise _condition_error(condition, "one expression only", found)
        select_statement["statements"][0]["node"]["select_list"] = select_list_trees
        return select_statement, list(_column_uses(condition_tree, condition))
    except RecursionError:
        raise _condition_error(condition, f"at most {LARGEST_DEPTH} expressions inside each other", "more") from None


def _parse_in_template(
    connection: DuckDBPyConnection, template_name: str, condition: str
) -> tuple[dict[str, Any], Any]:
    """Parse a condition inside one of the two statements; return the syntax tree of the statement without the
    condition, and the tree of the condition."""
    # The statement is passed in base64, so that its text can't change this query; a bound parameter would make DuckDB
    # import pandas.
    encoded_statement = base64.b64encode(_STATEMENT_TEMPLATES[template_name].format(condition).encode()).decode()
    result_rows = connection.execute(
        f"SELECT json_serialize_sql(decode(from_base64('{encoded_statement}')))"
    ).fetchall()
    statement_tree = json.loads(result_rows[0][0], object_pairs_hook=_without_positions)
    return statement_tree, None if statement_tree["error"] else statement_tree["statements"][0]["node"].pop(
        template_name, None
    )


def _without_positions(key_value_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a node of the syntax tree without its position in the text, which differs between the two statements."""
    node = {key: value for key, value in key_value_pairs if key != "query_location"}
    node_type = node.get("type")
    if isinstance(node_type, dict) and node_type["id"] == "DECIMAL":
        number, scale = node["value"], node_type["type_info"]["scale"]
        digits = number["upper"] * 2**64 + number["lower"] if isinstance(number, dict) else number
        if abs(digits) > 2**53 or scale > 22:  # DuckDB would convert such a number inexactly.
            return node | {"type": {"id": "DOUBLE", "type_info": None}, "value": float(f"{digits}e-{scale}")}
    return node


def _column_uses(
    node: Any, condition: str, depth: int = 0, inside_null_test: bool = False
) -> Iterator[tuple[str, bool]]:
    """Check a node of a syntax tree and all nodes below it; yield the name of each used column, and whether the
    condition handles nulls of the column."""
    if depth > LARGEST_DEPTH:
        raise RecursionError
    if "class" in node:
        if refused_part := _forbidden_part(node):
            do = "For more, choose ids from `Collection.manifest` and pass them as `members`"
            raise _condition_error(condition, _ALLOWED_TEXT, refused_part, do)
        if node["class"] == "COLUMN_REF":
            yield node["column_names"][0], inside_null_test
        depth, inside_null_test = depth + 1, inside_null_test or node["type"] in _OPERATORS_THAT_HANDLE_NULL
    for child in _children(node):
        yield from _column_uses(child, condition, depth, inside_null_test)


def _children(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the direct child nodes of a node of DuckDB's JSON, in order."""
    return [x for v in node.values() for x in (v if isinstance(v, list) else [v]) if isinstance(x, dict)]


def _forbidden_part(node: dict[str, Any]) -> str:
    """Describe a node of a syntax tree that is not allowed; return a phrase, "" if the node is allowed."""
    node_class, name, operands = node["class"], node.get("function_name", ""), node.get("children", [])
    if node["alias"]:
        return f"a value with a name, {node['alias'][:80]}"
    if node_class == "COLUMN_REF" and len(node["column_names"]) > 1:
        return f"a name with a dot, {'.'.join(node['column_names'])[:80]}"
    if node_class == "CAST":  # In DuckDB's tree, TRUE and IS TRUE are casts to BOOLEAN.
        target_type, is_constant = node["cast_type"]["id"], node["child"]["class"] == "CONSTANT"
        return (
            ""
            if target_type == "BOOLEAN" or (target_type in _TIME_TYPES and is_constant)
            else f"a cast to {target_type}"
        )
    if node_class in _ALLOWED_NODE_CLASSES or node["type"] in _ALLOWED_OPERATORS:
        return ""
    if node_class != "FUNCTION":
        return _PLAIN_NAME_OF_SYNTAX.get(node_class, f"the expression {node['type'].lower().replace('_', ' ')}")
    if name not in _ALLOWED_FUNCTION_NAMES or node["schema"] not in ("", "main") or node["catalog"]:
        full_name = f"{node['schema']}.{name}()".removeprefix("main").removeprefix(".")
        operation_text = (
            f"operator {name.removesuffix('__postfix')}" if node["is_operator"] else f"function {full_name}"
        )
        return _PLAIN_NAME_OF_SYNTAX.get(name, f"the {operation_text}")
    if node["filter"] or node["distinct"] or node["order_bys"]["orders"] or node["export_state"]:
        return f"{name}() with DISTINCT, ORDER BY or FILTER"
    # The time of LIKE grows as the text's length to the power of the number of % signs, and with the pattern's length.
    like_pattern = operands[1].get("value", {}).get("value") if name in _LIKE_NAMES and len(operands) > 1 else ""
    is_allowed = isinstance(like_pattern, str) and like_pattern.count("%") < 4 and len(like_pattern) <= LONGEST_PATTERN
    problem = f"LIKE with a pattern that is not text, has more than three %, or over {LONGEST_PATTERN} characters"
    return "" if is_allowed else problem


def _duckdb_type(schema: pa.Schema, name: str) -> str:
    """Return the DuckDB type of a column, "" if conditions can't use columns of this type."""
    arrow_type = schema.field(name).type
    if pa.types.is_timestamp(arrow_type):
        return "TIMESTAMP WITH TIME ZONE" if arrow_type.tz else "TIMESTAMP"
    return "BIGINT" if pa.types.is_integer(arrow_type) else _DUCKDB_TYPE_OF_ARROW_TYPE.get(str(arrow_type), "")


def _check_column(table: pa.Table, schema: pa.Schema, condition: str, column_name: str, is_null_handled: bool) -> None:
    if column_name not in schema.names:
        name_of_lowercase = {column.lower(): column for column in schema.names}
        suggestion = did_you_mean(
            column_name.lower(), name_of_lowercase, cutoff=0.6, text_of_name=name_of_lowercase.__getitem__
        )
        do = f"{suggestion} " if suggestion else ""
        do += f"Text takes single quotes: {column_name!r}. " if f'"{column_name}"' in condition else ""
        do += "`zoo-cli show NAME --format json` and `Collection.manifest.columns` have all names"
        raise _condition_error(condition, "names of columns", repr(column_name[:80]), do)
    if not _duckdb_type(schema, column_name):
        found = f"{column_name} of type {schema.field(column_name).type}"
        raise _condition_error(condition, "columns of numbers, text, true or false, or times", found)
    if not is_null_handled and table.num_rows and table.column(column_name).null_count == table.num_rows:
        import_option = {"sha256": "--hash"}.get(
            column_name, "--evaluate DATA" if column_name.startswith(("eval_", "test_")) else ""
        )
        do = f"`zoo-cli import SOURCE {import_option}` fills it" if import_option else "Choose rows by another column"
        raise SelectionError(f"column {column_name} is null in every row of this source", do=do)


def _create_rows(connection: DuckDBPyConnection, table: pa.Table, names: Sequence[str]) -> None:
    """Copy columns of an Arrow table into the table `rows` of the database."""
    # Numbers are passed as numpy arrays, and each distinct text once, as JSON: for an Arrow table, or for numpy arrays
    # of texts, DuckDB would import pandas.
    arrays, column_expressions, join_clauses = {"position": np.arange(table.num_rows)}, ["arrays.position"], ""
    for column_number, name in enumerate(names):
        duckdb_type, column = _duckdb_type(table.schema, name), table.column(name)
        is_valid = numpy_values(column.is_valid())
        if duckdb_type in ("BIGINT", "BOOLEAN", "DOUBLE", "FLOAT") and column.type != pa.uint64():
            arrays |= {f"value{column_number}": numpy_values(column), f"valid{column_number}": is_valid}
            expression = f"value{column_number}::{duckdb_type}"
            if duckdb_type in ("DOUBLE", "FLOAT"):  # DuckDB reads a NaN of a numpy array as null.
                arrays[f"nan{column_number}"] = np.isnan(arrays[f"value{column_number}"])
                expression = f"CASE WHEN nan{column_number} THEN 'nan'::{duckdb_type} ELSE {expression} END"
            expression = f"CASE WHEN valid{column_number} THEN {expression} END"
        else:
            encoded_column = column.cast(pa.string()).dictionary_encode().unify_dictionaries().combine_chunks()
            texts_as_json = json.dumps(encoded_column.dictionary.to_pylist()).replace("'", "''")
            connection.execute(
                f"CREATE TEMP TABLE texts{column_number} AS "
                f"SELECT unnest(range({len(encoded_column.dictionary)})) AS code, "
                f"""unnest(from_json_strict('{texts_as_json}', '["{duckdb_type}"]')) AS text"""
            )
            arrays[f"code{column_number}"] = np.where(
                is_valid, numpy_values(pa.chunked_array([encoded_column.indices])), -1
            )
            join_clauses += f" LEFT JOIN texts{column_number} ON code{column_number} = texts{column_number}.code"
            expression = f"texts{column_number}.text"
        quoted_name = name.replace('"', '""')
        column_expressions.append(f'{expression} AS "{quoted_name}"')
    columns = ", ".join(column_expressions[1:] or column_expressions)
    order = " ORDER BY arrays.position" if join_clauses else ""
    connection.register("arrays", arrays)
    connection.execute(f"CREATE OR REPLACE TABLE rows AS SELECT {columns} FROM arrays{join_clauses}{order}")


def _has_division(node: dict[str, Any]) -> bool:
    """Say whether a condition contains a division or a remainder."""
    return node.get("function_name") in ("/", "%") or any(_has_division(child) for child in _children(node))


def _column_ranges(table: pa.Table, node: dict[str, Any]) -> Iterator[str]:
    """Yield the range of each numeric column that the condition compares with constants."""
    if node.get("class") in ("BETWEEN", "COMPARISON") or node.get("type") in ("COMPARE_IN", "COMPARE_NOT_IN"):
        names = [name for name, _ in _column_uses(node, "")]
        if len(names) == 1 and any(part.get("class") == "COLUMN_REF" for part in _children(node)):
            values = [v for v in table.column(names[0]).to_pylist() if v is not None and v == v]
            if values and _duckdb_type(table.schema, names[0]) not in _CONTENTS_OF_TYPE:
                yield f"{names[0]} runs from {min(values)} to {max(values)}"
    for child in _children(node):
        yield from _column_ranges(table, child)
