"""Texts for people, with counts, sizes, lists and columns; and the escaping of texts for Markdown, YAML and LaTeX.

Anyone may have written names, titles, reasons and licences. Escaped text can't begin a table cell, a link, a tag or a
key, unless it is at the start of a line.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST_LINE = 300
SHORTEST_PART_OF_NAME = 3  # Smallest number of characters by which a longer name is suggested.
LARGEST_LISTED_COUNT = 5  # Largest number of values that a shortened list shows.
# Characters that have a meaning in Markdown, tables, HTML, formulas, links or mentions.
_MARKDOWN_CHARACTERS = re.compile(r"(?<=www)\.|[\\`*_\[\]<>|~&$:@#]", re.IGNORECASE)
_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def one_line(text: str, largest_length: int = LONGEST_LINE) -> str:
    """Put a text on one line, without control, private and invisible characters; return the text, shortened if it is
    too long.

    >>> one_line("a\\n---\\tb\\u202e")
    'a --- b'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= largest_length else f"{line[: largest_length - 1].rstrip()}…"


def printable(text: str) -> str:
    """Replace control, private and invisible characters, except line ends, by their codes; return text that is safe for
    a terminal.

    Without this, texts of a source could change colours, title, cursor and reading direction of a terminal.

    >>> printable("a\\x1b[31m\\u202e\\n\\tb")
    'a\\\\x1b[31m\\\\u202e\\n b'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else ascii(c)[1:-1] for c in text)


def markdown_text(text: str, largest_length: int = LONGEST_LINE) -> str:
    """Escape a text for a paragraph or table cell in Markdown; return one line, which must not be put at the start of a
    line.

    >>> markdown_text("a|b <script> *c*")
    'a\\\\|b \\\\<script\\\\> \\\\*c\\\\*'
    """
    return _MARKDOWN_CHARACTERS.sub(r"\\\g<0>", one_line(text, largest_length))


def markdown_code(text: str, largest_length: int = LONGEST_LINE) -> str:
    """Write a text as inline code in Markdown; return the code, or escaped text if the text contains a `|`, which would
    split a table cell.

    >>> markdown_code("lr=0.1"), markdown_code("a`b"), markdown_code("a|b")
    ('`lr=0.1`', '``a`b``', 'a\\\\|b')
    """
    line = one_line(text, largest_length)
    if not line:
        return "(empty)"
    if "|" in line:
        return markdown_text(text, largest_length)
    fence = _backtick_fence(line, 1)
    fence_space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{fence_space}{line}{fence_space}{fence}"


def markdown_block(text: str) -> str:
    """Write a text as a block of code in Markdown; return the block."""
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines()]
    block_text = "\n".join(lines).strip("\n")
    fence = _backtick_fence(block_text, 3)
    return f"{fence}text\n{block_text}\n{fence}"


def _backtick_fence(text: str, fewest_backticks: int) -> str:
    """Return a row of backticks that is longer than any row of backticks in the text."""
    return "`" * max(fewest_backticks, *(len(run) + 1 for run in re.findall("`+", text)), 0)


def yaml_string(text: str, largest_length: int = LONGEST_LINE) -> str:
    """Write a text as a YAML string on one line; return the string with its quotes.

    >>> yaml_string('a: "b"')
    '"a: \\\\"b\\\\""'
    """
    return '"' + re.sub(r'["\\]', r"\\\g<0>", one_line(text, largest_length)) + '"'


def escape_latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped.

    >>> escape_latex("a_b & 5 %")
    'a\\\\_b \\\\& 5 \\\\%'
    """
    return "".join(_LATEX_ESCAPES.get(c, c) for c in text)


def count_with_noun(number: int, noun: str) -> str:
    """Write a number with its noun in singular or plural ("3 members"); return the text.

    >>> count_with_noun(1, "member"), count_with_noun(1024, "member")
    ('1 member', '1,024 members')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(nbytes: int) -> str:
    """Write a number of bytes; return the text.

    >>> format_bytes(512), format_bytes(936_448), format_bytes(23_000_000_000)
    ('512 B', '936.4 kB', '23 GB')
    """
    for unit, unit_nbytes in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= unit_nbytes:
            return f"{nbytes / unit_nbytes:.4g} {unit}"
    return f"{nbytes} B"


def summarize_values(values: Sequence[Any], noun: str = "member") -> str:
    """Write one value, a few values with their counts, or the range of many values; return the text.

    >>> summarize_values([0.1, 0.1, None]), summarize_values([1, 2, 1]), summarize_values([*range(100)])
    ('`0.1` (1 member without)', '`1` (2 members), `2` (1 member)', '`0` to `99`')
    """
    count_of_value = Counter(v for v in values if v is not None)
    sorted_values = sorted(count_of_value)
    missing_count = len(values) - count_of_value.total()
    missing_text = f" ({count_with_noun(missing_count, noun)} without)" if missing_count else ""
    if len(sorted_values) == 1:
        return f"{markdown_code(_value_text(sorted_values[0]))}{missing_text}"
    if len(sorted_values) <= LARGEST_LISTED_COUNT:
        return (
            ", ".join(
                f"{markdown_code(_value_text(v))} ({count_with_noun(count_of_value[v], noun)})" for v in sorted_values
            )
            + missing_text
        )
    smallest_text, largest_text = (markdown_code(_value_text(sorted_values[i])) for i in (0, -1))
    return f"{smallest_text} to {largest_text}{missing_text}"


def _value_text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def first_values(values: Sequence[Any]) -> str:
    """Write the first few values, and an ellipsis for the rest; return the text."""
    return ", ".join(
        [
            *(markdown_code(_value_text(v)) for v in values[:LARGEST_LISTED_COUNT]),
            *(["…"] if len(values) > LARGEST_LISTED_COUNT else []),
        ]
    )


def first_few(names: Sequence[str], largest_count: int) -> str:
    """Write the first few names, and the number of the other names; return the text.

    >>> first_few(["a", "b", "c"], 3), first_few(["a", "b", "c"], 1)
    ('a, b, c', 'a and 2 more')
    """
    rest_text = f" and {len(names) - largest_count:,} more" if len(names) > largest_count else ""
    return f"{', '.join(names[:largest_count])}{rest_text}"


def nearest_name(name: str, known_names: Iterable[str]) -> str:
    """Return the known name that is most similar to a given name, even if the similarity is low.

    >>> nearest_name("resnet", ["convnet", "resnet18"])
    'resnet18'
    """
    return get_close_matches(name, known_names, n=1, cutoff=0.0)[0]


def did_you_mean(
    name: str,
    known_names: Iterable[str],
    largest_count: int = 1,
    cutoff: float = 0.5,
    text_of_name: Callable[[str], str] = str,
) -> str:
    """Return a question that suggests known names which are similar to an unknown name, or else up to three that
    contain it; "" if there are none.

    Args:
        name: the unknown name.
        known_names: all known names.
        largest_count: largest number of names that are suggested.
        cutoff: smallest similarity of a suggested name, in [0, 1].
        text_of_name: function that returns the text of one suggested name.

    >>> did_you_mean("convent", ["convnet", "resnet18"])
    'Did you mean convnet?'
    >>> did_you_mean("acc", ["test_accuracy", "test_nll"])
    'Did you mean test_accuracy?'
    """
    names = list(known_names)
    similar_names = get_close_matches(name, names, n=largest_count, cutoff=cutoff)
    if not similar_names and len(name) >= SHORTEST_PART_OF_NAME:
        similar_names = [known_name for known_name in names if name in known_name][:3]
    return f"Did you mean {' or '.join(map(text_of_name, similar_names))}?" if similar_names else ""


def finite_or_null(values: Any) -> Any:
    """Replace numbers that are not finite by null, and tuples by lists; return the JSON values.

    >>> finite_or_null({"a": (1.5, float("nan"))})
    {'a': [1.5, None]}
    """
    if isinstance(values, Mapping):
        return {key: finite_or_null(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite_or_null(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def align_columns(rows: Sequence[Sequence[str]], right_aligned: Container[int] = ()) -> str:
    """Write rows as aligned columns for a terminal; return the text.

    Args:
        rows: text cells of each row; all rows have the same number of cells, and the first row is the header.
        right_aligned: positions of the columns that are aligned to the right.

    >>> print(align_columns([["name", "members"], ["a", "64"]], right_aligned={1}))
    name  members
    a          64
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [
            cell.rjust(w) if column in right_aligned else cell.ljust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def whole_number(value: object) -> int | None:
    """Convert a whole number of Python, numpy or torch to an int; return None for anything else, including True and
    False."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None
