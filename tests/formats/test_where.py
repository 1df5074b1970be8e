"""Conditions on tables: against a plain evaluation row by row, hostile ones, and the texts of the errors."""

from __future__ import annotations

import contextlib
import datetime
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_zoo.errors import SelectionError
from checkpoints_zoo.formats.where import Condition
from tests.support.conditions import rows_where

Row = dict[str, Any]
Predicate = Callable[[Row], bool | None]

TEXTS = ["sgd", "adam", "o'clock", 'say "hi"', "back\\slash", "two\nlines", "héllo 🙂", "50% off_", "", None]
SCHEMA = pa.schema(
    {
        "member": pa.int32(),
        "final": pa.bool_(),
        "optimizer": pa.string(),
        "test_accuracy": pa.float64(),
        "test_nll": pa.float32(),
        "lr": pa.float64(),
        "sha256": pa.string(),
        "offset": pa.int64(),
        "created": pa.timestamp("s", tz="UTC"),
    }
)
ROWS: list[Row] = [
    {
        "member": member,
        "final": None if member % 7 == 6 else member % 3 == 0,
        "optimizer": TEXTS[member % len(TEXTS)],
        "test_accuracy": None if member % 5 == 4 else 0.9 + member / 537,
        "test_nll": None if member % 4 == 3 else member / 8,
        "lr": None,
        "sha256": None,
        "offset": 2**62 + member,
        "created": datetime.datetime(2026, 1, 1 + member % 28, 12, tzinfo=datetime.UTC),
    }
    for member in range(40)
]
TABLE = pa.Table.from_pylist(ROWS, schema=SCHEMA)


def selected(rows: list[Row], predicate: Predicate) -> list[int]:
    return [at for at, row in enumerate(rows) if predicate(row) is True]


def all_of(*values: bool | None) -> bool | None:
    """Return SQL's AND."""
    return False if False in values else None if None in values else True


def any_of(*values: bool | None) -> bool | None:
    """Return SQL's OR."""
    return True if True in values else None if None in values else False


def no(value: bool | None) -> bool | None:
    """Return SQL's NOT."""
    return None if value is None else not value


def strict(function: Callable[..., Any], *columns: str) -> Predicate:
    """Make a predicate that is null where one of its columns is."""
    return lambda row: None if None in (values := [row[c] for c in columns]) else function(*values)


CASES: dict[str, Predicate] = {
    "test_accuracy > 0.95": strict(lambda a: a > 0.95, "test_accuracy"),
    "0.95 < test_accuracy": strict(lambda a: a > 0.95, "test_accuracy"),
    "NOT test_accuracy > 0.95": strict(lambda a: not a > 0.95, "test_accuracy"),
    "test_accuracy >= 0.93 AND test_nll <> 2": lambda r: all_of(
        strict(lambda a: a >= 0.93, "test_accuracy")(r), strict(lambda a: a != 2, "test_nll")(r)
    ),
    "test_accuracy > 0.95 OR test_nll < 1": lambda r: any_of(
        strict(lambda a: a > 0.95, "test_accuracy")(r), strict(lambda a: a < 1, "test_nll")(r)
    ),
    "NOT (test_accuracy > 0.95 AND final)": lambda r: no(
        all_of(strict(lambda a: a > 0.95, "test_accuracy")(r), r["final"])
    ),
    "final": lambda r: r["final"],
    "NOT final": lambda r: no(r["final"]),
    "final = FALSE": lambda r: no(r["final"]),
    "final IS TRUE": lambda r: r["final"] is True,
    "final IS NOT TRUE": lambda r: r["final"] is not True,
    "test_accuracy IS NULL": lambda r: r["test_accuracy"] is None,
    "test_accuracy is not null and member<9": lambda r: r["test_accuracy"] is not None and r["member"] < 9,
    "lr IS NULL": lambda r: True,
    "lr IS NULL OR lr > 0.1": lambda r: True,
    "coalesce(lr, test_nll, 7) = 7": lambda r: r["test_nll"] is None or r["test_nll"] == 7,
    "lr IS DISTINCT FROM 0.1": lambda r: True,
    "optimizer IS NOT DISTINCT FROM NULL": lambda r: r["optimizer"] is None,
    "member IN (1, 5, 99)": lambda r: r["member"] in (1, 5, 99),
    "member NOT IN (1, 5)": lambda r: r["member"] not in (1, 5),
    "test_nll IN (0.125, NULL)": lambda r: True if r["test_nll"] == 0.125 else None,
    "optimizer IN ('sgd', 'adam')": lambda r: r["optimizer"] in ("sgd", "adam"),
    "member BETWEEN 3 AND 5": lambda r: 3 <= r["member"] <= 5,
    "test_nll NOT BETWEEN 1 AND 4": strict(lambda a: not 1 <= a <= 4, "test_nll"),
    "optimizer = 'o''clock'": lambda r: r["optimizer"] == "o'clock",
    "optimizer = 'back\\slash'": lambda r: r["optimizer"] == "back\\slash",
    "optimizer = 'two\nlines'": lambda r: r["optimizer"] == "two\nlines",
    "optimizer = E'two\\nlines'": lambda r: r["optimizer"] == "two\nlines",
    "optimizer = 'héllo 🙂'": lambda r: r["optimizer"] == "héllo 🙂",
    'optimizer = $$say "hi"$$': lambda r: r["optimizer"] == 'say "hi"',
    "optimizer <> ''": strict(lambda a: a != "", "optimizer"),
    "optimizer LIKE '%o%'": strict(lambda a: "o" in a, "optimizer"),
    "optimizer NOT LIKE '%o%'": strict(lambda a: "o" not in a, "optimizer"),
    "optimizer LIKE 'a__m'": lambda r: r["optimizer"] == "adam",
    "optimizer ILIKE 'SGD'": lambda r: r["optimizer"] == "sgd",
    "optimizer NOT ILIKE 'S%'": strict(lambda a: not a.startswith("s"), "optimizer"),
    "optimizer LIKE '50!% off!_' ESCAPE '!'": lambda r: r["optimizer"] == "50% off_",
    "upper(optimizer) = 'SGD' OR lower('ADAM') = optimizer": lambda r: r["optimizer"] in ("sgd", "adam"),
    "length(optimizer) = 7": strict(lambda a: len(a) == 7, "optimizer"),
    "starts_with(optimizer, 's') OR ends_with(optimizer, 'm')": strict(
        lambda a: a.startswith("s") or a.endswith("m"), "optimizer"
    ),
    "contains(optimizer, '''')": strict(lambda a: "'" in a, "optimizer"),
    "abs(20 - member) <= 2": lambda r: abs(20 - r["member"]) <= 2,
    "-member * 2 + 1 > -7": lambda r: -r["member"] * 2 + 1 > -7,
    "member % 7 = 3": lambda r: r["member"] % 7 == 3,
    "member / 2 = 1.5": lambda r: r["member"] == 3,
    "round(test_accuracy, 2) = 0.95": strict(lambda a: math.floor(a * 100 + 0.5) == 95, "test_accuracy"),
    "member < 1e1": lambda r: r["member"] < 10,
    "member > 1_0": lambda r: r["member"] > 10,
    "member * 2147483647 > 8000000000": lambda r: r["member"] > 3,
    '"offset" = 4611686018427387909': lambda r: r["member"] == 5,
    '"member" == 4': lambda r: r["member"] == 4,
    "created >= '2026-01-21'": lambda r: r["created"].day >= 21,
    "created < DATE '2026-01-03'": lambda r: r["created"].day < 3,
    "created = TIMESTAMP '2026-01-05 12:00:00'": lambda r: r["created"].day == 5,
    "created = TIMESTAMPTZ '2026-01-05 13:00:00+01'": lambda r: r["created"].day == 5,
    "TRUE": lambda r: True,
    "1 = 1": lambda r: True,
    "member /* which */ > 30 -- the last": lambda r: r["member"] > 30,
    "\n\tmember\u00a0> 30\r\n": lambda r: r["member"] > 30,
    "((((member > 30))))": lambda r: r["member"] > 30,
}


@pytest.mark.parametrize("condition", CASES)
def test_the_rows_are_those_of_a_plain_evaluation(condition: str) -> None:
    positions = rows_where(TABLE, condition)
    assert positions.dtype == np.int64
    assert positions.tolist() == selected(ROWS, CASES[condition])


def test_nan_equals_itself_and_is_the_greatest_number() -> None:
    table = pa.table({"test_nll": [0.1, math.nan, math.inf, -math.inf, None]})
    assert rows_where(table, "test_nll > 1").tolist() == [1, 2]
    assert rows_where(table, "test_nll = 'nan'").tolist() == [1]
    assert rows_where(table, "test_nll < 1").tolist() == [0, 3]


def test_every_type_a_column_may_have() -> None:
    kinds = [pa.int8(), pa.uint16(), pa.int64(), pa.uint64(), pa.float32(), pa.float64()]
    for kind in kinds:
        assert rows_where(pa.table({"x": pa.array([1, None, 3], kind)}), "x > 1.5").tolist() == [2]
    for kind in (pa.string(), pa.large_string()):
        assert rows_where(pa.table({"x": pa.array(["a", None, "c"], kind)}), "x > 'b'").tolist() == [2]
    days = [datetime.date(2026, 1, 1), None, datetime.date(2026, 1, 3)]
    assert rows_where(pa.table({"x": pa.array(days)}), "x > '2026-01-02'").tolist() == [2]
    for kind in (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ms", "Europe/Paris")):
        assert rows_where(pa.table({"x": pa.array(days).cast(kind)}), "x > '2026-01-02'").tolist() == [2]
    assert rows_where(pa.table({"x": pa.nulls(2)}), "x IS NULL").tolist() == [0, 1]


def test_names_of_columns_are_data_too() -> None:
    names = ['a"b', "a b", "select", "é", "rows", "x'); DROP TABLE rows; --", "two\nlines"]
    table = pa.table({name: [at, at + 1] for at, name in enumerate(names)})
    for at, name in enumerate(names):
        quoted = '"' + name.replace('"', '""') + '"'
        assert rows_where(table, f"{quoted} = {at + 1}").tolist() == [1]
        assert Condition.parse(f"{quoted} = {at + 1}").column_names == (name,)


def test_chunks_and_slices_keep_their_positions() -> None:
    table = pa.concat_tables([TABLE.slice(0, 7), TABLE.slice(7, 5), TABLE.slice(20, 20)]).slice(3)
    rows = [*ROWS[3:12], *ROWS[20:]]
    condition = "test_accuracy > 0.92 AND optimizer <> 'sgd'"
    expected = selected(rows, strict(lambda a, o: a > 0.92 and o != "sgd", "test_accuracy", "optimizer"))
    assert rows_where(table, condition).tolist() == expected


def test_many_rows_come_in_order() -> None:
    numbers = np.random.default_rng(0).integers(0, 1000, 50_000)
    table = pa.table({"x": numbers})
    assert np.array_equal(rows_where(table, "x >= 500"), np.flatnonzero(numbers >= 500))


# Hypothesis: random rows, and random conditions built as SQL and as Python side by side.

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 1),
    st.integers(0, 1797).map(lambda correct: correct / 1797),
    st.sampled_from([0.0, 0.1, 0.25, 1.0]),
)
WHOLE = st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1)
WORDS = st.sampled_from(["a", "b", "A", "a'b", "%", "_", "\\", '"', ""]) | st.text(CHARACTERS, max_size=6)
COLUMNS = {"x": NUMBERS, "k": WHOLE, "s": WORDS, "b": st.booleans()}
ARROW = {"x": pa.float64(), "k": pa.int32(), "s": pa.string(), "b": pa.bool_()}
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b,
    "<>": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def sortable(value: Any) -> Any:
    """Return what DuckDB compares texts by: their UTF-8."""
    return value.encode() if isinstance(value, str) else value


@st.composite
def leaves(draw: st.DrawFn) -> tuple[str, Predicate]:
    name = draw(st.sampled_from(list(COLUMNS)))
    values = COLUMNS[name]
    form = draw(st.sampled_from(["compare", "compare", "turned", "between", "in", "null", "not null"]))
    if form in ("null", "not null"):
        return f"{name} IS {form}", lambda row: (row[name] is None) == (form == "null")
    if form in ("compare", "turned"):
        sign, value = draw(st.sampled_from(list(COMPARE))), draw(values)
        compare, constant = COMPARE[sign], sortable(value)
        if form == "compare":
            return f"{name} {sign} {literal(value)}", strict(lambda a: compare(sortable(a), constant), name)
        return f"{literal(value)} {sign} {name}", strict(lambda a: compare(constant, sortable(a)), name)
    if form == "between":
        low, high = draw(values), draw(values)
        return f"{name} BETWEEN {literal(low)} AND {literal(high)}", strict(
            lambda a: sortable(low) <= sortable(a) <= sortable(high), name
        )
    options = draw(st.lists(values, min_size=1, max_size=4))
    return f"{name} IN ({', '.join(map(literal, options))})", strict(lambda a: a in options, name)


def joined(parts: st.SearchStrategy[tuple[str, Predicate]]) -> st.SearchStrategy[tuple[str, Predicate]]:
    pairs = st.tuples(parts, parts)
    return st.one_of(
        parts.map(lambda p: (f"NOT ({p[0]})", lambda row: no(p[1](row)))),
        pairs.map(lambda p: (f"({p[0][0]}) AND ({p[1][0]})", lambda row: all_of(p[0][1](row), p[1][1](row)))),
        pairs.map(lambda p: (f"({p[0][0]}) OR ({p[1][0]})", lambda row: any_of(p[0][1](row), p[1][1](row)))),
    )


ROW = st.fixed_dictionaries({name: st.none() | values for name, values in COLUMNS.items()})
FULL = {"x": 0.5, "k": 1, "s": "a", "b": True}  # so that no column is all null


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(ROW, max_size=8), st.recursive(leaves(), joined, max_leaves=5))
def test_random_conditions_on_random_rows(rows: list[Row], pair: tuple[str, Predicate]) -> None:
    condition, predicate = pair
    rows = [*rows, FULL]
    expected = selected(rows, predicate)
    table = pa.Table.from_pylist(rows, schema=pa.schema(ARROW))
    if expected:
        assert rows_where(table, condition).tolist() == expected
    else:
        with pytest.raises(SelectionError, match="expected a row that meets it"):
            rows_where(table, condition)


@pytest.mark.slow
@settings(max_examples=40)
@given(NUMBERS)
def test_a_number_copied_from_the_table_finds_its_row(number: float) -> None:
    table = pa.table({"x": [number]})
    assert rows_where(table, f"x = {number!r}").tolist() == [0]
    assert rows_where(table, f"x >= {number:.25f}" if 1e-6 < number < 1 else "TRUE").tolist() == [0]


@pytest.mark.slow
@settings(max_examples=20)
@given(st.text(max_size=30) | st.text("()'\"-;/*%$?,ab1=<>[] \n\\E", max_size=30))
def test_any_text_is_met(condition: str) -> None:
    table = pa.table({"a": [1, 2], "b": ["x", None]})
    with contextlib.suppress(SelectionError):
        assert set(rows_where(table, condition).tolist()) <= {0, 1}


HOSTILE = [
    "member > 1) OR (1 = 1", "member > 1) UNION ALL SELECT (TRUE",
    "member > 1) FROM rows; DROP TABLE rows; SELECT (1", ") OR (1 = 1", "member > 1 --\n) OR (TRUE",
    "member > 1 /*", "*/ TRUE /*", "--", "member > 1;", "member > 1; SELECT TRUE",
    "member > 1; DROP TABLE rows", "; ATTACH '/tmp/x.db'", "member > 1 ORDER BY member",
    "member > 1 LIMIT 1", "member > 1 OFFSET 2", "member > 1 GROUP BY ALL", "member > 1 HAVING TRUE",
    "member > 1 QUALIFY TRUE", "member > 1 USING SAMPLE 1", "member > 1 WINDOW w AS (PARTITION BY random())",
    "member > 1 UNION SELECT TRUE", "member > 1 EXCEPT SELECT TRUE", "member > 1 FOR UPDATE",
    "member > 1 AS x", "member > 1, TRUE", "SELECT TRUE", "(SELECT TRUE)", "FROM rows",
    "EXISTS (FROM read_csv('/etc/passwd'))", "member IN (SELECT member FROM rows)",
    "member = ANY (SELECT 1)", "member > (SELECT max(member) FROM rows)", "read_text('/etc/passwd') IS NULL",
    "random() < 0.5", "getenv('HOME') = 'x'", "current_setting('threads') = '1'", "now() > created",
    "current_date > created", "version() = 'x'", "set_config('threads', '9') = 'x'", "nextval('x') > 1",
    "query_table('rows') IS NULL", "sum(member) > 1", "count(*) > 1",
    "list_filter([1], lambda x: x > 0) = [1]", "[x for x in [1]] = [1]", "member -> member",
    "row_number() OVER () > 1", "lower(optimizer) OVER () = 'x'", "lower(DISTINCT optimizer) = 'x'",
    "lower(optimizer ORDER BY member) = 'x'", "lower(optimizer) FILTER (WHERE TRUE) = 'x'",
    "lower(x := optimizer) = 'x'", "other.lower(optimizer) = 'x'", "system.main.lower(optimizer) = 'x'",
    "optimizer.lower() = 'x'", "member > ?", "member > $1", "member > $name", "#1 > 1", "*",
    "COLUMNS(*) > 1", "COLUMNS('m.*') > 1", "unnest([TRUE])", "rows IS NULL", "rowid > 1", "rows.member > 1",
    "main.rows.member > 1", "member::VARCHAR = '1'", "TRY_CAST(optimizer AS INTEGER) > 1", "TRY(member > 1)",
    "'rows'::REGCLASS IS NULL", "CASE WHEN member > 1 THEN TRUE END", "if(member > 1, TRUE, FALSE)",
    "member[1] = 1", "(member, 1) = (1, 1)", "{'a': 1} = {'a': 1}", "optimizer COLLATE nocase = 'x'",
    "optimizer || 'x' = 'x'", "optimizer ~ '(a+)+'", "optimizer SIMILAR TO '(a+)+'", "optimizer GLOB '*'",
    "optimizer LIKE optimizer", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' LIKE '%a_%a_%a_%a_%a_%a_%a_%a_%b'",
    "member ** 2 > 1", "member << 2 > 1", "member > INTERVAL 1 DAY", "DEFAULT", "GROUPING(member) = 1",
    "member > 1\0 OR TRUE", "optimizer = '\ud800'", "optimizer = 'x", 'member > 1 AND "', "optimizer = $$x",
    "PRAGMA version", "COPY rows TO '/tmp/x'", "INSTALL httpfs",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("condition", HOSTILE)
def test_hostile_conditions_are_refused(condition: str) -> None:
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE, condition)
    assert "WHERE" not in str(caught.value).replace(repr(condition), "")
    assert "FROM" not in str(caught.value).replace(repr(condition), "").replace('near "FROM"', "")


@pytest.mark.parametrize(
    "condition",
    [
        "(" * 10_000,
        "NOT " * 2400 + "final",
        "- " * 4900 + "member > 1",
        "abs(" * 1600 + "member" + ")" * 1600 + " > 1",
        "abs(" * 150 + "member" + ")" * 150 + " > 1",
        "final AND (member > 1 OR (" * 150 + "final" + "))" * 150,
        "member" + "+1" * 4000 + " > 1",
        "[" * 4000 + "]" * 4000,
    ],
    ids=lambda condition: condition[:12],
)
def test_deep_conditions_are_refused(condition: str) -> None:
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE, condition[:10_000])
    assert str(caught.value).endswith("expected at most 100 expressions inside each other; found more.")
    assert len(str(caught.value)) < 400


def test_wide_and_wrapped_conditions_are_fine() -> None:
    assert rows_where(TABLE, "(" * 4990 + "final" + ")" * 4990).tolist()[:2] == [0, 3]
    wide = " OR ".join(f"member = {member}" for member in range(0, 1000, 2))
    assert rows_where(TABLE, wide).tolist() == list(range(0, 40, 2))
    assert rows_where(TABLE, "(" * 500 + "member > 37" + ")" * 500).tolist() == [38, 39]
    assert rows_where(TABLE, "member" + "+1" * 90 + " > 127").tolist() == [38, 39]


EXAMPLE = 'expected an SQL condition such as "test_accuracy > 0.76 AND seed < 10"; found'
PARTS = (
    "expected columns, values, = < > + - * / %, AND, OR, NOT, IN, BETWEEN, LIKE, IS NULL, abs, coalesce, "
    "contains, ends_with, length, lower, round, starts_with, upper; found"
)
MORE = "For more, choose ids from `Collection.manifest` and pass them as `members`."
ALONE = "expected one expression only; found a parameter, a second statement, or a clause such as ORDER BY or LIMIT."
NAMES = "expected names of columns; found"
ALL_NAMES = "`zoo-cli show NAME --format json` and `Collection.manifest.columns` have all names."
FIT = "expected values that fit the columns; found"
VALUE = "expected true or false for each row; found a value. Compare it, as in `lr > 0.1`."
NULL = "is null in every row of this source."
NONE = "expected a row that meets it; found none of 40."

# What follows "where '…': ", by condition.
ERRORS = {
    "": f"{EXAMPLE} nothing.",
    " \n": f"{EXAMPLE} nothing.",
    "test_accuracy >": f"{EXAMPLE} syntax error at end of input.",
    "test_accuracy 0.5": f'{EXAMPLE} syntax error at or near "0.5".',
    "lr > 'x": f'{EXAMPLE} unterminated quoted string at or near "\'x".',
    "member > 1) OR (1 = 1": f'{EXAMPLE} syntax error at or near ")".',
    "offset > 1": (f'{EXAMPLE} syntax error at or near "offset". Write the column "offset" with double quotes.'),
    "member > 1\0": f"{EXAMPLE} a NUL or half a surrogate pair.",
    "member > 1; SELECT 2": ALONE,
    "member > 1 ORDER BY member": ALONE,
    "test_acuracy > 0.5": f"{NAMES} 'test_acuracy'. Did you mean test_accuracy? {ALL_NAMES}",
    "acc > 0.5": f"{NAMES} 'acc'. Did you mean test_accuracy? {ALL_NAMES}",
    "MEMBER > 1": f"{NAMES} 'MEMBER'. Did you mean member? {ALL_NAMES}",
    'optimizer = "sgd"': f"{NAMES} 'sgd'. Text takes single quotes: 'sgd'. {ALL_NAMES}",
    "random() < 0.5": f"{PARTS} the function random(). {MORE}",
    "a.b.lower() = 'x'": f"{PARTS} the function b.lower(). {MORE}",
    "(SELECT 1) = 1": f"{PARTS} a sub-select. {MORE}",
    "COLUMNS(*) > 1": f"{PARTS} a star or COLUMNS(). {MORE}",
    "count(*) > 1": f"{PARTS} the function count(). {MORE}",
    "rank() OVER () = 1": f"{PARTS} a window function. {MORE}",
    "lower(DISTINCT optimizer) = 'x'": f"{PARTS} lower() with DISTINCT, ORDER BY or FILTER. {MORE}",
    "lower(x := optimizer) = 'x'": f"{PARTS} a value with a name, x. {MORE}",
    "rows.member = 1": f"{PARTS} a name with a dot, rows.member. {MORE}",
    "member ** 2 = 1": f"{PARTS} the operator **. {MORE}",
    "member! = 1": f"{PARTS} the operator !. {MORE}",
    "member[1] = 1": f"{PARTS} the expression array extract. {MORE}",
    "member::DOUBLE = 1": f"{PARTS} a cast to DOUBLE. {MORE}",
    "optimizer LIKE '%a%b%c%'": (
        f"{PARTS} LIKE with a pattern that is not text, has more than three %, or over 200 characters. {MORE}"
    ),
    "test_accuracy > 'abc'": (f"{FIT} Could not convert string 'abc' to DOUBLE. test_accuracy holds numbers."),
    "optimizer > 5": (f"{FIT} Cannot compare values of type VARCHAR and type INTEGER_LITERAL. optimizer holds text."),
    "optimizer = 5": (f"{FIT} Could not convert string 'sgd' to INT32. optimizer holds text."),
    "member LIKE '1' AND final": (
        f"{FIT} No function matches the given name and argument types 'LIKE(BIGINT, STRING_LITERAL)'. "
        "member holds numbers; final holds true or false."
    ),
    "created > 'soon'": (f'{FIT} invalid timestamp field format: "soon". created holds times.'),
    "member": VALUE,
    "created": VALUE,
    "NULL": VALUE,
    "member = 40": f"{NONE} member runs from 0 to 39.",
    "2 < test_accuracy AND (member BETWEEN 50 AND -1 OR NOT test_nll IN (0, 1) OR member = 77)": (
        f"{NONE} test_accuracy runs from 0.9 to 0.9707635009310988; member runs from 0 to 39; "
        "test_nll runs from 0.0 to 4.75."
    ),
    "optimizer = 'lion'": NONE,
    "1 = 2": NONE,
}


@pytest.mark.parametrize("condition", ERRORS)
def test_the_texts_of_the_errors(condition: str) -> None:
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE, condition)
    assert str(caught.value) == f"where {condition!r}: {ERRORS[condition]}"
    assert isinstance(caught.value, ValueError)


def test_an_accuracy_that_nobody_measured() -> None:
    table = pa.table({"member": [0, 1], "test_accuracy": pa.nulls(2, pa.float64())})
    text = f"column test_accuracy {NULL} `zoo-cli import SOURCE --evaluate DATA` fills it."
    for condition in ("test_accuracy > 0.5", "NOT test_accuracy > 0.5", "TRUE OR abs(test_accuracy) > 0.5"):
        with pytest.raises(SelectionError) as caught:
            rows_where(table, condition)
        assert str(caught.value) == text
    for condition in ("sha256 = 'x'", "lr IS NULL OR member > 3 OR sha256 IN ('x')"):
        with pytest.raises(SelectionError) as caught:
            rows_where(TABLE, condition)
        assert str(caught.value) == f"column sha256 {NULL} `zoo-cli import SOURCE --hash` fills it."
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE, "lr > 0.1")
    assert str(caught.value) == f"column lr {NULL} Choose rows by another column."
    assert rows_where(table, "test_accuracy IS NULL AND member = 1").tolist() == [1]
    assert rows_where(table, "coalesce(test_accuracy, 1) > 0.5").tolist() == [0, 1]


def test_errors_about_tables() -> None:
    with pytest.raises(SelectionError) as caught:
        rows_where(pa.table({"x": [[1]]}), "x = 1")
    assert str(caught.value) == (
        "where 'x = 1': expected columns of numbers, text, true or false, or times; found x of type list<item: int64>."
    )
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE.slice(0, 0), "member > 1")
    assert str(caught.value) == "where 'member > 1': expected a row that meets it; found none of 0."
    cases = pa.table({"seed": [1], "Seed": [2]})
    assert rows_where(cases, "Seed = 2").tolist() == [0]
    with pytest.raises(SelectionError) as caught:
        rows_where(cases, "seed = Seed")
    assert str(caught.value) == (
        "where 'seed = Seed': expected names of columns that differ in more than case; found seed, Seed."
    )
    with pytest.raises(SelectionError, match="expected values that fit the columns"):
        rows_where(pa.table({"x": pa.array([2**64 - 1], pa.uint64())}), "x > 1")


def test_a_condition_is_text_of_a_sensible_length() -> None:
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE, 5)  # type: ignore[arg-type]
    assert str(caught.value) == f"where: {EXAMPLE} int."
    with pytest.raises(SelectionError) as caught:
        rows_where(TABLE, "member > 1 OR " * 1000 + "final")
    assert str(caught.value) == (
        f"where {('member > 1 OR ' * 15)[:200] + '…'!r}: expected at most 10,000 characters; found 14,005. "
        "Pass `members`."
    )


def test_the_columns_of_a_condition() -> None:
    condition = Condition.parse("b > 1 AND (a = 'x' OR b < 9) AND NOT lower(c) IN ('u', d) AND \"E\" IS NULL")
    assert condition.column_names == ("b", "a", "c", "d", "E")
    assert Condition.parse("x BETWEEN y AND z").column_names == ("x", "y", "z")
    assert Condition.parse("1 = 1").column_names == ()
    for condition in ("random() > 0.5", "a > 1; SELECT 1", "a > 1) OR (TRUE", "a >", ""):
        with pytest.raises(SelectionError):
            Condition.parse(condition)


PURE = """
import sys
import numpy as np
import pyarrow as pa

from tests.support.conditions import rows_where

assert "duckdb" not in sys.modules
numbers = pa.Array.from_buffers(pa.float64(), 4, [None, pa.py_buffer(np.arange(4.0))])
ends = pa.py_buffer(np.arange(5, dtype=np.int32))
words = pa.Array.from_buffers(pa.string(), 4, [None, ends, pa.py_buffer(b"abcd")])
times = pa.Array.from_buffers(pa.timestamp("s", "UTC"), 4, [None, pa.py_buffer(np.arange(4))])
table = pa.Table.from_arrays([numbers, words, times], ["x", "s", "t"])
print(rows_where(table, "x > 0 AND s <> 'c' AND t < '2000-01-01'").tolist())
try:
    rows_where(table, "x > 9")
except ValueError as error:
    print(error)
print(sorted({"pandas", "torch", "polars", "pyarrow.dataset"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_neither_pandas_nor_torch_is_imported() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PURE], cwd=root, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[1, 3]",
        "where 'x > 9': expected a row that meets it; found none of 4. x runs from 0.0 to 3.0.",
        "[]",
    ]


def test_the_database_reaches_nothing(tmp_path: Any) -> None:
    import duckdb

    from checkpoints_zoo.formats.where import _connect

    (tmp_path / "x.csv").write_text("a\n1\n")
    secret = pa.table({"a": [1]})  # a Python variable, which DuckDB would find by its name
    with _connect() as connection:
        for statement in (
            f"FROM read_csv('{tmp_path / 'x.csv'}')",
            f"COPY (SELECT 1) TO '{tmp_path / 'y.csv'}'",
            f"ATTACH '{tmp_path / 'z.db'}'",
            "FROM secret",
            "SET enable_external_access = true",
            "INSTALL httpfs",
        ):
            with pytest.raises(duckdb.Error):
                connection.execute(statement).fetchall()
    assert secret.num_rows == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
