"""Make HTML for use inside a sentence of the page, such as bold text; the template makes all other HTML."""

from __future__ import annotations

from markupsafe import Markup, escape

from checkpoints_zoo.formats.text import one_line

LARGEST_TEXT_LENGTH = 4000  # longest piece of text, in characters


def clean(text: object) -> str:
    """Put text on one line without control characters; return the text. A space at its start or end is kept.

    A `Markup` is returned unchanged.

    >>> clean(" a\\nb")
    ' a b'
    """
    if isinstance(text, Markup):
        return text
    original = str(text)
    line = one_line(original, LARGEST_TEXT_LENGTH)
    if not line:
        return " " if original else ""
    space_before, space_after = (" " if original[end_position].isspace() else "" for end_position in (0, -1))
    return f"{space_before}{line}{space_after}"


def markup(template: str, *texts: str) -> Markup:
    """Fill escaped texts into an HTML template; return the HTML.

    >>> markup("<b>{}</b>", "a < b")
    Markup('<b>a &lt; b</b>')
    """
    return Markup(template).format(*(clean(text) for text in texts))


def bold(text: str) -> Markup:
    """Return text in bold, as HTML."""
    return markup("<b>{}</b>", text)


def whole_line(text: str, largest_length: int) -> Markup:
    """Return a text on one line as HTML; it may be longer than `LARGEST_TEXT_LENGTH`."""
    return Markup(escape(one_line(text, largest_length)))
