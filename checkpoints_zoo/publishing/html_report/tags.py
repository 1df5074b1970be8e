"""HTML made of text: what is not HTML already stays text, in elements, attributes and plots."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints_zoo.formats.text import one_line

LONGEST = 4000  # characters of one piece of text
DIGITS = 6  # of a number in a plot
EMPTY = frozenset({"br", "col", "hr", "meta"})


class Html(str):
    """Text that is HTML already. What is joined or formatted with it is plain text again."""

    __slots__ = ()


def escape(text: str, longest: int = LONGEST) -> Html:
    """Write text for an element or an attribute, on one line, without control characters; return it as HTML.

    >>> escape("a<b & 'c'")
    'a&lt;b &amp; &#x27;c&#x27;'
    """
    return text if isinstance(text, Html) else Html(html.escape(_kept_apart(text, longest)))


def _kept_apart(text: str, longest: int) -> str:
    """Put text on one line, but keep a space at its start or end; return it."""
    kept = one_line(text, longest)
    if not kept:
        return " " if text else ""
    before, after = (" " if text[at].isspace() else "" for at in (0, -1))
    return f"{before}{kept}{after}"


def join(pieces: Sequence[str], between: str = "") -> Html:
    """Join pieces, those that are no HTML escaped; return HTML.

    >>> join(["<", Html("<br>")])
    '&lt;<br>'
    """
    return Html(escape(between).join(escape(piece) for piece in pieces))


def tag(name: str, *children: str, **attributes: str | None) -> Html:
    """Make an element; return it.

    Args:
        name: of the element.
        children: text, or HTML.
        attributes: text; `class_` is class, `aria_label` aria-label; None leaves one out.

    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    given = {key.strip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    inside = "".join(f' {key}="{html.escape(one_line(value, LONGEST))}"' for key, value in given.items())
    if name in EMPTY:
        return Html(f"<{name}{inside}>")
    return Html(f"<{name}{inside}>{join(children)}</{name}>")


def in_plot(text: str, longest: int = 60) -> str:
    """Write text for a title, tick or hover label of plotly, which takes tags in text for markup; return it.

    >>> in_plot("<b>conv1</b>")
    '&lt;b&gt;conv1&lt;/b&gt;'
    """
    return html.escape(one_line(text, longest), quote=False)


def embedded(values: Any) -> Html:
    """Write values as JSON that no browser takes for markup, numbers in six digits; return it.

    What is not finite becomes null.

    >>> embedded({"a": "</script>", "b": [1 / 3, float("nan")]})
    '{"a":"\\\\u003c/script\\\\u003e","b":[0.333333,null]}'
    """
    text = json.dumps(_short(values), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(text)


def _short(values: Any) -> Any:
    """Return values with their numbers rounded."""
    if isinstance(values, Mapping):
        return {key: _short(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_short(value) for value in values]
    if isinstance(values, float):
        if not math.isfinite(values):
            return None
        short = float(f"{values:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    return values
