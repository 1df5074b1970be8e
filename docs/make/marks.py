"""Generated parts of a page that is written by hand, between marks: `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations

from collections.abc import Mapping


def fill(page: str, parts: Mapping[str, str]) -> str:
    """Put texts between their marks in a page; return the page.

    Args:
        page: the whole page, with marks.
        parts: the texts, by the names of their marks.

    Raises:
        ValueError: the page lacks a mark, or has it more than once.
    """
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"expected {begin} and {end} once each in the page")
        before, _, rest = page.partition(begin)
        after = rest.partition(end)[2]
        page = f"{before}{begin}\n{text.rstrip()}\n{end}{after}"
    return page
