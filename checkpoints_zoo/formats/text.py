"""Texts for people: counts, sizes, lists and columns; and the escaping of texts for Markdown and YAML.

Names, titles, reasons and licences come from files that anyone may have written. Escaped text can't begin a table
cell, a link, a tag or a key, as long as it does not stand at the start of a line.
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
MOST_LISTED = 5  # Largest number of values that a shortened list shows.
# Characters that have a meaning in Markdown, tables, HTML, formulas, links or mentions.
_SPECIAL = re.compile(r"(?<=www)\.|[\\`*_\[\]<>|~&$:@#]", re.IGNORECASE)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Put a text on one line, without control, private and invisible characters; return it, shortened if too long.

    >>> one_line("a\\n---\\tb\\u202e")
    'a --- b'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= longest else f"{line[: longest - 1].rstrip()}…"


def printable(text: str) -> str:
    """Write control, private and invisible characters as codes, except ends of lines; return text for a terminal.

    Strings of a source could steer a terminal otherwise: colours, titles, the cursor, right-to-left marks.

    >>> printable("a\\x1b[31m\\u202e\\n\\tb")
    'a\\\\x1b[31m\\\\u202e\\n b'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else " " if c == "\t" else ascii(c)[1:-1] for c in text)


def markdown_text(text: str, longest: int = LONGEST_LINE) -> str:
    """Escape a text for a paragraph or table cell in Markdown; return one line, which must not begin a line of the
    file.

    >>> markdown_text("a|b <script> *c*")
    'a\\\\|b \\\\<script\\\\> \\\\*c\\\\*'
    """
    return _SPECIAL.sub(r"\\\g<0>", one_line(text, longest))


def markdown_code(text: str, longest: int = LONGEST_LINE) -> str:
    """Write a text as inline code in Markdown; if it contains a `|`, which would split a table cell, return it escaped
    instead.

    >>> markdown_code("lr=0.1"), markdown_code("a`b"), markdown_code("a|b")
    ('`lr=0.1`', '``a`b``', 'a\\\\|b')
    """
    line = one_line(text, longest)
    if not line:
        return "(empty)"
    if "|" in line:
        return markdown_text(text, longest)
    ticks = _backtick_fence(line, 1)
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{padding}{line}{padding}{ticks}"


def markdown_block(text: str) -> str:
    """Write a text as a block of code in Markdown; return the block."""
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.splitlines()]
    block = "\n".join(lines).strip("\n")
    ticks = _backtick_fence(block, 3)
    return f"{ticks}text\n{block}\n{ticks}"


def _backtick_fence(text: str, fewest: int) -> str:
    """Return a row of backticks that is longer than any in the text."""
    return "`" * max(fewest, *(len(run) + 1 for run in re.findall("`+", text)), 0)


def yaml_string(text: str, longest: int = LONGEST_LINE) -> str:
    """Write a text as a YAML string on one line; return it with its quotes.

    >>> yaml_string('a: "b"')
    '"a: \\\\"b\\\\""'
    """
    return '"' + re.sub(r'["\\]', r"\\\g<0>", one_line(text, longest)) + '"'


def counted(number: int, noun: str) -> str:
    """Write a number with its noun in singular or plural ("3 members"); return the text.

    >>> counted(1, "member"), counted(1024, "member")
    ('1 member', '1,024 members')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: int) -> str:
    """Write a number of bytes; return the text.

    >>> format_bytes(512), format_bytes(936_448), format_bytes(23_000_000_000)
    ('512 B', '936.4 kB', '23 GB')
    """
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def summarize_values(values: Sequence[Any], noun: str = "member") -> str:
    """Write one value, a few values with their counts, or the range of many values; return the text.

    >>> summarize_values([0.1, 0.1, None]), summarize_values([1, 2, 1]), summarize_values([*range(100)])
    ('`0.1` (1 member without)', '`1` (2 members), `2` (1 member)', '`0` to `99`')
    """
    counts = Counter(v for v in values if v is not None)
    ordered = sorted(counts)
    missing_count = len(values) - counts.total()
    missing = f" ({counted(missing_count, noun)} without)" if missing_count else ""
    if len(ordered) == 1:
        return f"{markdown_code(_value(ordered[0]))}{missing}"
    if len(ordered) <= MOST_LISTED:
        return ", ".join(f"{markdown_code(_value(v))} ({counted(counts[v], noun)})" for v in ordered) + missing
    return f"{markdown_code(_value(ordered[0]))} to {markdown_code(_value(ordered[-1]))}{missing}"


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def first_values(values: Sequence[Any]) -> str:
    """Write the first few values, and an ellipsis for the rest; return the text."""
    return ", ".join(
        [*(markdown_code(_value(v)) for v in values[:MOST_LISTED]), *(["…"] if len(values) > MOST_LISTED else [])]
    )


def first_few(names: Sequence[str], most: int) -> str:
    """Write the first few names, and how many more there are; return the text.

    >>> first_few(["a", "b", "c"], 3), first_few(["a", "b", "c"], 1)
    ('a, b, c', 'a and 2 more')
    """
    remainder = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{remainder}"


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a given name, even if the similarity is low.

    >>> nearest_name("resnet", ["convnet", "resnet18"])
    'resnet18'
    """
    return get_close_matches(name, known, n=1, cutoff=0.0)[0]


def did_you_mean(
    name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.5, shown: Callable[[str], str] = str
) -> str:
    """Return a question that suggests known names similar to an unknown one, "" if none is similar.

    Args:
        name: the unknown name.
        known: all names.
        most: largest number of names that are suggested.
        cutoff: smallest similarity of a suggested name, in [0, 1].
        shown: function that returns the text of one suggested name.

    >>> did_you_mean("convent", ["convnet", "resnet18"])
    'Did you mean convnet?'
    """
    near = get_close_matches(name, known, n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(shown, near))}?" if near else ""


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


def align_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Write rows as aligned columns for a terminal; return the text.

    Args:
        rows: cells of each row, equally many in all rows; the first row is the header.
        right: indices of the columns that are aligned to the right.

    >>> print(align_columns([["name", "members"], ["a", "64"]], right={1}))
    name  members
    a          64
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        [
            cell.rjust(w) if column in right else cell.ljust(w)
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
