"""What the posters' tables say, and tables of docs/comparison.md that set the digits' results beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import stats

from checkpoints_zoo.evaluation.figures import MONOTONE_FIGURES
from checkpoints_zoo.methods.comparing.comparison import (
    COLUMN_NAMES,
    MODE_TITLES,
    REFERENCE,
    Comparison,
    Row,
    format_estimate,
)
from checkpoints_zoo.methods.comparing.estimates import COLUMN_TITLES

Table = Mapping[tuple[str, str], Mapping[str, float]]
COLUMNS = ("mmd", "ns", "accuracy", "ece", "ace", "brier", "aupr", "fpr95", "mi_id", "mi_ood")
TITLES = {
    "dropout": "Dropout", "vi": "viBNN", "swag": "SWAG", "laplace": "Laplace", "sghmc": "SGHMC", "deep-ensemble": "DE",
}  # fmt: skip
POSTERS: dict[str, dict[str, str]] = {
    "CIFAR-100": {
        "dropout one": "4.5 7.5 74.2 14.7 3.2 38.8 76.4 47.7 5.7 9.1",
        "vi one": "9.0 10.2 57.9 24.6 3.0 63.7 60.9 79.1 2.7 4.2",
        "swag one": "6.7 7.2 70.9 2.3 1.2 38.9 86.2 48.0 2.4 6.3",
        "laplace one": "5.7 7.0 75.1 0.9 0.9 34.6 81.3 42.4 27.6 63.3",
        "sghmc one": "7.5 7.9 73.7 4.9 1.0 36.2 79.4 62.3 0.2 0.5",
        "dropout multi": "0.7 4.5 79.5 4.3 1.0 29.2 78.2 48.1 20.5 46.3",
        "vi multi": "6.1 5.6 66.5 2.8 2.0 45.3 71.9 71.7 45.5 81.1",
        "swag multi": "5.0 5.4 72.8 1.5 1.1 36.9 89.1 50.6 6.5 19.7",
        "laplace multi": "0.6 4.3 78.9 6.9 0.8 30.3 82.9 41.3 44.1 98.5",
        "deep-ensemble members": "0.0 0.0 79.5 1.6 0.6 28.7 81.1 45.6 22.5 58.0",
    },
    "TinyImageNet": {
        "dropout one": "9.5 4.9 63.2 16.4 2.4 53.9 48.8 81.1 8.3 8.4",
        "swag one": "9.1 3.9 66.4 10.5 0.7 46.2 61.9 57.7 3.0 4.5",
        "laplace one": "5.5 6.1 33.1 6.0 3.6 77.1 48.8 77.7 200.7 228.0",
        "sghmc one": "9.8 5.3 58.3 2.6 1.0 54.1 56.3 72.7 0.24 0.30",
        "dropout multi": "4.3 1.8 70.2 9.9 1.2 42.1 74.8 58.2 34.1 60.0",
        "swag multi": "6.7 5.4 69.3 3.6 0.6 41.3 96.5 55.9 17.6 32.1",
        "laplace multi": "0.5 3.1 37.0 10.9 3.3 75.1 48.4 72.5 219.5 254.7",
        "deep-ensemble members": "0.0 0.0 70.3 6.5 0.7 40.9 86.3 50.2 38.4 83.4",
    },
}  # fmt: skip
LOWER = {"mmd", "ns", "ece", "ace", "brier", "fpr95"}  # the better; of accuracy and AUPR the higher
JUDGED = tuple(name for name in COLUMNS if name not in ("mi_id", "mi_ood"))


def poster(name: str) -> Table:
    """Read a poster's table; return (method, mode) -> figure -> value."""
    found = {}
    for key, values in POSTERS[name].items():
        method, mode = key.split(" ")
        found[method, mode] = dict(zip(COLUMNS, map(float, values.split(" ")), strict=True))
    return found


def values_of(found: Comparison) -> Table:
    """Return a comparison as a poster has one: all times 100, without the reference."""
    return {
        (row.method, row.mode): {n: 100 * x.value for n, x in row.figures.items() if math.isfinite(x.value)}
        for row in found.rows
        if row.method != REFERENCE
    }


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 2) -> str:
    """Lay out a Markdown table, its first columns to the left."""
    rules = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rules, *rows))


def digits_table(found: Comparison) -> str:
    """Lay out the figures with half their intervals."""
    columns = [n for n in COLUMN_TITLES if any(n in row.figures for row in found.rows)]
    rows = [
        (row.method, MODE_TITLES[row.mode], *(format_estimate(row.figures.get(n)) for n in columns))
        for row in found.rows
    ]
    return markdown(("method", "mode", *(COLUMN_TITLES[n] for n in columns)), rows)


def poster_table(name: str) -> str:
    """Lay out a poster's table as it stands there."""
    rows = []
    for key, values in POSTERS[name].items():
        method, mode = key.split(" ")
        rows.append((TITLES[method], MODE_TITLES["multi" if mode == "members" else mode], *values.split(" ")))
    return markdown(("method", "mode", *(COLUMN_TITLES[n] for n in COLUMNS)), rows)


def worth_table(found: Comparison) -> str:
    """Lay out how many independent members each row's figures are worth."""
    placed = [n for n in MONOTONE_FIGURES if any(n in row.worth for row in found.rows)]
    rows = [
        (row.method, MODE_TITLES[row.mode], *(str(row.worth[n]) if n in row.worth else "-" for n in placed))
        for row in found.rows
        if row.worth and row.method != REFERENCE
    ]
    return markdown(("method", "mode", *(COLUMN_NAMES[n] for n in placed)), rows)


def p_values_table(found: Comparison) -> str:
    """Lay out p-values: of MMD, NS, and the corollary, all layers together and by layer."""
    layers = list(dict.fromkeys(layer for row in found.rows for layer in row.corollary_layers))
    rows = [
        (row.method, MODE_TITLES[row.mode], *(p_of(row, n) for n in ("mmd", "ns")), small(row.corollary),
         *(small(row.corollary_layers.get(layer)) for layer in layers))
        for row in found.rows
    ]  # fmt: skip
    return markdown(("method", "mode", "MMD", "NS", "corollary", *(f"`{layer}`" for layer in layers)), rows)


def p_of(row: Row, name: str) -> str:
    x = row.figures.get(name)
    return "-" if x is None else small(x.p)


def small(p: float | None) -> str:
    """Write a p-value; return the text.

    >>> small(0.0123), small(1e-9), small(None)
    ('0.012', '< 1e-04', '-')
    """
    return "-" if p is None else "< 1e-04" if p < 1e-4 else f"{p:.2g}"


def spearman(one: Sequence[float], other: Sequence[float], permutations: int = 9999) -> tuple[float, float] | None:
    """Return Spearman's rank correlation and its two-sided p-value by random permutations; None of fewer than four."""
    if len(one) < 4 or len(set(one)) < 2 or len(set(other)) < 2:
        return None
    first, second = stats.rankdata(one), stats.rankdata(other)
    first, second = (x - x.mean() for x in (first, second))
    scale = math.sqrt(float(first @ first) * float(second @ second))
    observed = float(first @ second) / scale
    shuffled = np.random.default_rng(0).permuted(np.tile(second, (permutations, 1)), axis=1)
    as_far = np.abs(shuffled @ first) / scale >= abs(observed) - 1e-12
    return observed, (1 + int(as_far.sum())) / (1 + permutations)


def correlation(found: tuple[float, float] | None) -> str:
    return "-" if found is None else f"{found[0]:+.2f} ({small(found[1])})"


def shared(one: Table, other: Table, column: str) -> tuple[list[float], list[float]]:
    """Return a column of two tables, on the rows that both have."""
    keys = [k for k in other if k in one and column in one[k] and column in other[k]]
    return [one[k][column] for k in keys], [other[k][column] for k in keys]


def ranks_table(tables: Mapping[str, Table]) -> str:
    """Lay out, for each column, how the rows' order on digits and on each poster agree."""
    digits, *posters = tables
    pairs = [(digits, name) for name in posters] + [(posters[0], posters[1])]
    counts = {pair: len(set(tables[pair[0]]) & set(tables[pair[1]])) for pair in pairs}
    rows = [
        (COLUMN_TITLES[column], *(correlation(spearman(*shared(tables[a], tables[b], column))) for a, b in pairs))
        for column in COLUMNS
    ]
    return markdown(("", *(f"{a} and {b}, {counts[a, b]} rows" for a, b in pairs)), rows, left=1)


def ranks_say(tables: Mapping[str, Table], level: float = 0.05) -> str:
    """Say in which columns orders on digits agree with the posters' beyond chance, and in which they are opposite."""
    digits, *posters = tables
    said = []
    for name in posters:
        found = {c: spearman(*shared(tables[digits], tables[name], c)) for c in COLUMNS}
        agree = [COLUMN_TITLES[c] for c, x in found.items() if x is not None and x[0] > 0 and x[1] < level]
        opposite = [COLUMN_TITLES[c] for c, x in found.items() if x is not None and x[0] < 0 and x[1] < level]
        told = sum(x is not None for x in found.values())
        said.append(
            f"With {name} the order on {digits} agrees beyond chance (p < {level:g}) in {len(agree)} of {told} columns"
            f" ({', '.join(agree) or 'none'}) and is opposite in {len(opposite)} ({', '.join(opposite) or 'none'});"
            " of the others nothing can be said."
        )
    return " ".join(said)


def quality_table(tables: Mapping[str, Table]) -> str:
    """Lay out how MMD and NS go with each figure, over the rows of each table."""
    rows = []
    for column in COLUMNS[2:]:
        cells = []
        for table in tables.values():
            for distance in ("mmd", "ns"):
                having = [x for x in table.values() if distance in x and column in x]
                cells.append(correlation(spearman([x[distance] for x in having], [x[column] for x in having])))
        rows.append((COLUMN_TITLES[column], *cells))
    header = [f"{name}, {COLUMN_TITLES[distance]}" for name in tables for distance in ("mmd", "ns")]
    return markdown(("", *header), rows, left=1)


def counted(table: Table, column: str, sign: int) -> str:
    """Count the methods whose multi mode has the higher (sign 1) or lower (-1) value of a column; return "k of n"."""
    both = [method for method, mode in table if mode == "one" and (method, "multi") in table]
    pairs = [(table[m, "one"][column], table[m, "multi"][column]) for m in both
             if column in table[m, "one"] and column in table[m, "multi"]]  # fmt: skip
    return f"{sum(sign * multi > sign * one for one, multi in pairs)} of {len(pairs)}"


def order(table: Table, mode: str, column: str) -> str:
    """Return the methods of a mode from the lowest value of a column to the highest."""
    rows = sorted((x[column], method) for (method, m), x in table.items() if m == mode and column in x)
    return ", ".join(f"{method} {value:.3g}" for value, method in rows)


def best(table: Table, column: str) -> str:
    """Return the row that a column is best in."""
    sign = 1 if column in LOWER else -1
    rows = [(sign * x[column], method, mode) for (method, mode), x in table.items() if column in x]
    if not rows:
        return "-"
    value, method, mode = min(rows)
    others = sum(r[0] == value for r in rows) - 1
    return f"{method}, {MODE_TITLES[mode]}{f' and {others} more' if others else ''}"
