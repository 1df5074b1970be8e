"""A page: parts with figures, tables and notes, put into one HTML file that needs nothing else.

Text that is not `Markup` is escaped. Pages with the same parts have the same bytes.

This is one file, because a page consists of the blocks that are defined here.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import svg_element
from checkpoints_zoo.formats.catalog import LONGEST_CITATION
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.publishing.html_report.definitions import TERMS
from checkpoints_zoo.publishing.html_report.markup import clean, whole_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Text = Sequence[str]  # pieces of text; a piece that is not `Markup` is escaped
_PAGE_FOLDER = Path(__file__).parent
PAGE_SUFFIXES = (".html", ".htm")
HALF_WIDTH_INCHES, THIRD_WIDTH_INCHES = (
    (4.4, 3.1),
    (3.6, 2.5),
)  # width and height in inches of a panel, if two or three are in a row
LARGEST_ROW_COUNT = 2500  # largest number of rows in a table


@dataclass(frozen=True, repr=False)
class Page(PrintedResult):
    """A report as one HTML file.

    Args:
        title, subtitle: title and subtitle of the page.
        parts: parts of the page in reading order.
        origin: facts on the page's origin, name -> value: data, members, versions.
        numbers: name of a report ("evaluation", "pairwise", "mmd", "ns") -> its figures, as JSON values.
        path: path of the saved file; None if it is not saved yet.
    """

    title: str
    subtitle: str
    parts: Sequence[Part]
    origin: Mapping[str, str]
    numbers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    path: Path | None = field(default=None, compare=False)

    def _one_line(self) -> str:
        return f"{self.title!r}, {len(self.parts)} parts, {'not saved' if self.path is None else self.path}"

    def to_text(self) -> str:
        """Return the page's parts and the path of its file as a table in plain text."""
        rows = [{"part": part.title, "blocks": len(part.blocks)} for part in self.parts]
        saved_sentence = "It is not saved: .save(path) writes it." if self.path is None else f"Saved at {self.path}."
        heading = f"{self.title}: {self.subtitle}" if self.subtitle else self.title
        return f"{heading}\n\n{text_table(rows)}\n\n{saved_sentence}"

    @property
    def panels(self) -> Mapping[str, Panel]:
        """The panels of all figures, name -> panel, in reading order."""
        figures = [block for part in self.parts for block in part.blocks if isinstance(block, FigureBlock)]
        return {panel.name: panel for figure in figures for panel in figure.panels}

    @cached_property
    def html(self) -> str:
        """The text of the HTML file."""
        script, style = ((_PAGE_FOLDER / name).read_text(encoding="utf-8") for name in ("script.js", "style.css"))
        # No other script runs, whatever a name in the page may hold, and nothing is fetched.
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
        template = _templates().get_template("page.html.jinja")
        return template.render(
            page=self, policy=Markup(policy), style=Markup(style), script=Markup(script), terms=TERMS,
            whole_line=partial(whole_line, largest_length=LONGEST_CITATION),
        )  # fmt: skip

    def values(self) -> dict[str, Any]:
        """Return the names of the page's blocks, and its figures, as JSON values."""
        path_entry = {} if self.path is None else {"path": str(self.path)}
        size_entry = {"bytes": len(self.html.encode())}
        parts_entry = {"parts": [part.values() for part in self.parts]}
        return {**path_entry, **size_entry, "title": self.title, **self.origin, **parts_entry, **self.numbers}

    def save(self, path: str | Path) -> Path:
        """Write the page to a temporary file that is then renamed; return its path.

        Args:
            path: path of the file; its folder is created.

        Raises:
            UsageError: the path does not end in .html or .htm, or can't be written to.
        """
        path = path_of(path)
        try:
            with replace_file(path) as file:
                file.write(self.html)
        except OSError as error:
            raise UsageError(
                f"page {path}",
                expected="a place that can be written to",
                found=error.strerror or str(error),
                do="Give another path",
                path=path,
            ) from error
        return path


@dataclass(frozen=True)
class Part:
    """A part of a page.

    Args:
        name: id of the part's HTML element.
        title: heading of the part.
        blocks: blocks of the part in reading order.
    """

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    def values(self) -> dict[str, Any]:
        """Return the names of the part's blocks as JSON values."""
        figures = [block for block in self.blocks if isinstance(block, FigureBlock)]
        return {
            "part": self.name,
            "title": self.title,
            "figures": [panel.name for figure in figures for panel in figure.panels],
            "tables": [block.name for block in self.blocks if isinstance(block, FactsBlock | TableBlock)],
            "left_out": ["".join(b.text) for b in self.blocks if isinstance(b, NoteBlock) and b.missing],
        }


@dataclass(frozen=True)
class FigureBlock:
    """A figure of one or more panels, with the numbers that it draws.

    Args:
        name: id of the block's HTML element.
        panels: panels of the figure in reading order.
        caption: text below the figure: shown quantity, number of members, data, and meaning of the intervals.
        tables: sortable tables of the drawn numbers.
        panels_per_row: largest number of panels in a row.
    """

    kind: ClassVar[str] = "figure"
    name: str
    panels: Sequence[Panel]
    caption: Text
    tables: Sequence[TableBlock]
    panels_per_row: int = 2


@dataclass(frozen=True)
class Panel:
    """One drawing.

    Args:
        name: id of the block's HTML element.
        title: title above the panel.
        description: description of the panel in words, for readers who can't see it.
        svg: the drawing, an SVG element.
    """

    name: str
    title: str
    description: str
    svg: Markup = field(repr=False)


@dataclass(frozen=True)
class TableBlock:
    """A table.

    Args:
        name: id of the block's HTML element.
        header: names of the columns; the first column has the names of the rows.
        rows: rows of text cells; a row of one cell is a heading over the rows below it.
        caption: text that describes the content of the table.
        text_columns: positions of the columns that hold text, not numbers.
        sortable: whether a click on a column's header sorts the table.
    """

    kind: ClassVar[str] = "table"
    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: Text
    text_columns: Sequence[int] = (0,)
    sortable: bool = False


@dataclass(frozen=True)
class FactsBlock:
    """A table of names and values.

    Args:
        name: id of the block's HTML element.
        rows: pairs of a name and its value.
        caption: text that describes the subject of the facts.
    """

    kind: ClassVar[str] = "facts"
    name: str
    rows: Sequence[tuple[str, str]]
    caption: Text


@dataclass(frozen=True)
class NoteBlock:
    """A paragraph.

    Args:
        text: text of the note.
        missing: whether the note states why a figure is missing.
    """

    kind: ClassVar[str] = "note"
    text: Text
    missing: bool = False


Block = FigureBlock | FactsBlock | TableBlock | NoteBlock


def draw_panel(
    element_id: str,
    title: str,
    description: str,
    draw: Callable[[Axes], None],
    size_inches: tuple[float, float] = HALF_WIDTH_INCHES,
) -> Panel:
    """Draw a panel of a figure as SVG; return the panel.

    Args:
        element_id: id of the block's HTML element.
        title: title above the panel.
        description: description of the panel in words, for readers who can't see it.
        draw: function that draws into the matplotlib axes.
        size_inches: width and height of the panel in inches.
    """
    return Panel(element_id, title, description, Markup(svg_element(draw, element_id, size_inches)))


def number_table(
    element_id: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
    text_columns: Sequence[int] = (),
) -> TableBlock:
    """Return the numbers of a figure as a sortable table of at most 2,500 rows.

    Args:
        element_id: id of the block's HTML element.
        header: names of the columns.
        rows: cells of text.
        caption: text that describes the content of the table.
        text_columns: positions of the columns that hold text, not numbers.
    """
    rest_note = f" The first {LARGEST_ROW_COUNT:,} of {len(rows):,} rows." if len(rows) > LARGEST_ROW_COUNT else ""
    return TableBlock(
        element_id, header, rows[:LARGEST_ROW_COUNT], (f"{caption}{rest_note}",), text_columns, sortable=True
    )


def path_of(page_path: str | Path) -> Path:
    """Check that a page's file name ends in .html or .htm; return the path.

    Raises:
        UsageError: the file name ends differently.
    """
    page_path = Path(page_path).expanduser()
    if page_path.suffix.lower() not in PAGE_SUFFIXES:
        raise UsageError(
            f"page {page_path}", expected="a name that ends in .html", found=repr(page_path.name), path=page_path
        )
    return page_path


@cache
def _templates() -> Environment:
    """Return jinja2's environment for the templates; it escapes every text that is not `Markup`."""
    return Environment(
        loader=FileSystemLoader(_PAGE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
