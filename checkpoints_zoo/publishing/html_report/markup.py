"""HTML inside a sentence of the page, and text that goes into it; the template makes everything else."""

from __future__ import annotations

from markupsafe import Markup, escape

from checkpoints_zoo.formats.text import one_line

LONGEST = 4000  # characters of one piece of text


def clean(text: object) -> str:
    """Put text on one line without control characters, with a space at its start or end if it had one; return it.

    Markup stays as it is.

    >>> clean(" a\\nb")
    ' a b'
    """
    if isinstance(text, Markup):
        return text
    original = str(text)
    line = one_line(original, LONGEST)
    if not line:
        return " " if original else ""
    before, after = (" " if original[at].isspace() else "" for at in (0, -1))
    return f"{before}{line}{after}"


def markup(template: str, *texts: str) -> Markup:
    """Fill texts, which stay texts, into an HTML template; return the markup.

    >>> markup("<b>{}</b>", "a < b")
    Markup('<b>a &lt; b</b>')
    """
    return Markup(template).format(*(clean(text) for text in texts))


def bold(text: str) -> Markup:
    """Write text in bold; return the markup."""
    return markup("<b>{}</b>", text)


def whole_line(text: str, longest: int) -> Markup:
    """Write a text longer than others may be on one line; return the markup."""
    return Markup(escape(one_line(text, longest)))
