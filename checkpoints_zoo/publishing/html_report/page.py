"""A page: parts with charts, tables and notes, put into one HTML file that needs nothing else.

Text is plain unless it is `Html`. The same parts give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.publishing.html_report.definitions import definitions
from checkpoints_zoo.publishing.html_report.tags import Html, embedded, escape, join, tag

Text = Sequence[str]  # pieces; those that are no Html are escaped
_HERE = Path(__file__).parent
ORIGIN = "How this page was made"
LONGEST_CITATION = 2**20  # characters of a citation, which may name thousands of members one by one
SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class Page:
    """A report as one HTML file.

    Args:
        title, subtitle: of the page.
        parts: in reading order.
        origin: what the page was made of and with: a word and what it is, each.
        numbers: the figures, "evaluation", "pairwise", "mmd" and "ns": JSON values, as these reports have them.
        path: where it was saved, None for nowhere yet.
    """

    title: str
    subtitle: str
    parts: Sequence[Part]
    origin: Mapping[str, str]
    numbers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    path: Path | None = field(default=None, compare=False)

    @property
    def panels(self) -> Mapping[str, Panel]:
        """Name -> plot, in reading order."""
        charts = [block for part in self.parts for block in part.blocks if isinstance(block, Chart)]
        return {panel.name: panel for chart in charts for panel in chart.panels}

    @cached_property
    def html(self) -> str:
        """The file's text."""
        plots = {name: {"data": panel.traces, "layout": panel.layout} for name, panel in self.panels.items()}
        library, script = f"\n{get_plotlyjs()}\n", (_HERE / "script.js").read_text(encoding="utf-8")
        # No script but these two runs, whatever a name in the page may hold, and nothing is fetched.
        allowed = " ".join(f"'sha256-{_digest(text)}'" for text in (library, script))
        policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
        named = {**{part.name: part.title for part in self.parts}, "definitions": "Definitions", "origin": ORIGIN}
        contents = [tag("li", tag("a", title, href=f"#{name}")) for name, title in named.items()]
        numbers = _Numbers()
        return Template((_HERE / "template.html").read_text(encoding="utf-8")).substitute(
            policy=policy, generator="checkpoints_zoo", title=escape(self.title), subtitle=escape(self.subtitle),
            style=(_HERE / "style.css").read_text(encoding="utf-8"), contents=join(contents),
            parts=join([*(_part(part, numbers) for part in self.parts), _definitions(), _origin(self.origin)], "\n"),
            plots=embedded(plots), library=library, script=script,
        )  # fmt: skip

    def values(self) -> dict[str, Any]:
        """Return what the page holds, and the figures, as JSON values."""
        place = {} if self.path is None else {"path": str(self.path)}
        size = {"bytes": len(self.html.encode())}
        parts = {"parts": [part.values() for part in self.parts]}
        return {**place, **size, "title": self.title, **self.origin, **parts, **self.numbers}

    def save(self, path: str | Path) -> Path:
        """Write the page, by temporary name and rename; return its path.

        Args:
            path: of the file; its folder is made.

        Raises:
            UsageError: a name that is no page's, or a place that can't be written to.
        """
        path = path_of(path)
        try:
            with replace_file(path) as file:
                file.write(self.html)
        except OSError as error:
            found = error.strerror or str(error)
            raise UsageError(
                f"page {path}",
                expected="a place that can be written to",
                found=found,
                do="Give another path",
                path=path,
            ) from error
        return path


@dataclass(frozen=True)
class Part:
    """A part of a page.

    Args:
        name: of its element.
        title: its heading.
        blocks: in reading order.
    """

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    def values(self) -> dict[str, Any]:
        """Return what the part holds, as JSON values."""
        charts = [block for block in self.blocks if isinstance(block, Chart)]
        return {
            "part": self.name,
            "title": self.title,
            "figures": [panel.name for chart in charts for panel in chart.panels],
            "tables": [block.name for block in self.blocks if isinstance(block, Facts | Rows)],
            "left_out": ["".join(b.text) for b in self.blocks if isinstance(b, Note) and b.missing],
        }


@dataclass(frozen=True)
class Chart:
    """A figure of one or more panels.

    Args:
        name: of its element.
        panels: in reading order.
        caption: what is shown, of how many, on which data, and what intervals mean.
        across: panels beside each other where there is room.
        behind: the numbers, to be unfolded.
    """

    name: str
    panels: Sequence[Panel]
    caption: Text
    across: int = 2
    behind: Rows | None = None


@dataclass(frozen=True)
class Panel:
    """One plot.

    Args:
        name: of its element.
        title: above it.
        told: what it shows, for those who can't see it.
        traces, layout: plotly's, JSON values.
    """

    name: str
    title: str
    told: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]


@dataclass(frozen=True)
class Rows:
    """A table.

    Args:
        name: of its element.
        header: of the columns; the first has the names of the rows.
        rows: cells of text, each a piece or several; a row of one cell is a heading over those below it.
        caption: what it shows.
        words: positions of columns whose cells are words, not numbers.
    """

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: Text
    words: Sequence[int] = (0,)


@dataclass(frozen=True)
class Facts:
    """A table of words and what each is.

    Args:
        name: of the element.
        rows: a word and what it is, each.
        caption: what they are of.
    """

    name: str
    rows: Sequence[tuple[str, str]]
    caption: Text


@dataclass(frozen=True)
class Note:
    """A paragraph.

    Args:
        text: of it.
        missing: whether it says why something is not there.
    """

    text: Text
    missing: bool = False


Block = Chart | Facts | Rows | Note


def path_of(path: str | Path) -> Path:
    """Check the name that a page is to have; return its path.

    Raises:
        UsageError: a name that is no page's.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"page {path}", expected="a name that ends in .html", found=repr(path.name), path=path)
    return path


class _Numbers:
    """Counts figures and tables."""

    def __init__(self) -> None:
        self.figures = self.tables = 0

    def figure(self) -> Html:
        self.figures += 1
        return tag("b", f"Figure {self.figures}.")

    def table(self) -> Html:
        self.tables += 1
        return tag("b", f"Table {self.tables}.")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(part: Part, numbers: _Numbers) -> Html:
    blocks = [_block(block, numbers) for block in part.blocks]
    return tag("section", tag("h2", part.title), *blocks, id=part.name, aria_label=part.title)


def _block(block: Block, numbers: _Numbers) -> Html:
    if isinstance(block, Note):
        return tag("p", *block.text, class_="missing" if block.missing else None)
    if isinstance(block, Rows | Facts):
        caption = tag("figcaption", numbers.table(), " ", *block.caption, id=f"{block.name}-caption")
        rows = _table(block) if isinstance(block, Rows) else _facts(block)
        return tag("figure", caption, rows, class_="table")
    single = len(block.panels) == 1
    panels = [_panel(panel, "" if single else chr(ord("a") + i)) for i, panel in enumerate(block.panels)]
    behind = [] if block.behind is None else [tag("details", tag("summary", "Numbers"), _table(block.behind))]
    drawn = tag("div", *panels, class_=f"panels across-{block.across}")
    caption = tag("figcaption", numbers.figure(), " ", *block.caption)
    return join([tag("figure", drawn, caption, id=block.name), *behind])


def _panel(panel: Panel, letter: str) -> Html:
    named = [tag("span", letter, class_="letter")] if letter else []
    height = f"min-height:{panel.layout.get('height', 300)}px"
    plot = tag("div", class_="plot", id=panel.name, role="img", aria_label=panel.told, style=height)
    return tag("div", tag("h3", *named, panel.title), plot, class_="panel")


def _table(rows: Rows) -> Html:
    def kind(at: int) -> str | None:
        return "words" if at in rows.words else None

    head = [tag("th", cell, scope="col", class_=kind(i)) for i, cell in enumerate(rows.header)]
    body = []
    for cells in rows.rows:
        if len(cells) == 1:
            body.append(tag("tr", tag("th", cells[0], colspan=str(len(rows.header)), scope="colgroup"), class_="over"))
            continue
        first = tag("th", cells[0], scope="row", class_=kind(0))
        body.append(tag("tr", first, *(tag("td", cell, class_=kind(i)) for i, cell in enumerate(cells[1:], 1))))
    named = any(rows.header)
    label = f"{rows.name}-caption" if rows.caption else None
    table = tag(
        "table",
        *([tag("thead", tag("tr", *head))] if named else []),
        tag("tbody", *body),
        id=rows.name,
        aria_labelledby=label,
    )
    return tag("div", table, class_="wide", tabindex="0", role="region", aria_labelledby=rows.name)


def _facts(facts: Facts) -> Html:
    rows = [tag("div", tag("dt", name), tag("dd", told)) for name, told in facts.rows]
    return tag("dl", *rows, class_="facts", id=facts.name, aria_labelledby=f"{facts.name}-caption")


def _definitions() -> Html:
    return tag("section", tag("h2", "Definitions"), definitions(), id="definitions", aria_label="Definitions")


def _origin(origin: Mapping[str, str]) -> Html:
    rows = []
    for name, text in origin.items():
        shown = (
            tag("pre", tag("code", escape(text, LONGEST_CITATION))) if name in ("command", "citation") else escape(text)
        )
        rows += [tag("dt", name), tag("dd", shown)]
    return tag("section", tag("h2", ORIGIN), tag("dl", *rows), id="origin", aria_label=ORIGIN)
