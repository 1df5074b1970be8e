"""What a page is made of: parts with charts, tables and notes. Text is plain unless it is `Html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Text = Sequence[str]  # pieces; those that are no Html are escaped


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
class Note:
    """A paragraph.

    Args:
        text: of it.
        missing: whether it says why something is not there.
    """

    text: Text
    missing: bool = False


Block = Chart | Facts | Rows | Note


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
