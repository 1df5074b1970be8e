"""Colours and style of all pictures; functions that turn pictures into files and into elements of a page.

Pictures are drawn with matplotlib's default settings on figures of their own: the caller's backend and style are
neither used nor changed, and the same figure gives the same bytes.

This is one file, because every picture passes all of it.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.text import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 150
MOST_BARS = 20  # Largest number of bars of a histogram.
# Colour-blind readers can distinguish these colours: all but GREY are from Okabe & Ito, Color universal design (2008).
BLUE, RED, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#606060"
MATPLOTLIB_STYLE: Any = {
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold", "font.size": 9.5,
    "grid.color": "#E4E4E4", "legend.fontsize": 9, "legend.frameon": False, "savefig.bbox": None,
    "text.parse_math": False,  # A dollar sign in a name is printed as such, not read as mathematics.
}  # fmt: skip
# Ending of a picture's name -> matplotlib's backend, and metadata without a date, so that the same figure gives the
# same bytes.
PICTURE_FORMATS: Mapping[str, tuple[str, Mapping[str, str | None]]] = {
    ".png": ("agg", {"Software": "checkpoints_zoo"}),
    ".pdf": ("pdf", {"Creator": "checkpoints_zoo", "CreationDate": None}),
    ".svg": ("svg", {"Creator": "checkpoints_zoo", "Date": None}),
}
MOST_MARKS = 500  # Largest number of marks of one kind in an SVG; more marks are drawn as an image.
MOST_LETTERS = 400  # Largest number of letters of a line of text in a picture.
# Colours of SVG elements that differ between light and dark pages -> CSS variable of the page.
_TEXT_COLOUR, _EDGE_COLOUR = "#222222", "#8a8a8a"
_PAGE_COLOURS = {
    _TEXT_COLOUR: "var(--ink)", _EDGE_COLOUR: "var(--soft)", GREY: "var(--soft)",
    MATPLOTLIB_STYLE["grid.color"]: "var(--grid)", "#ffffff": "var(--paper)",
}  # fmt: skip
_SVG_STYLE: Any = {
    **MATPLOTLIB_STYLE, "font.size": 9, "legend.fontsize": 8.5, "axes.titlesize": 9, "text.color": _TEXT_COLOUR,
    "axes.labelcolor": _TEXT_COLOUR, "xtick.color": _EDGE_COLOUR, "ytick.color": _EDGE_COLOUR,
    "xtick.labelcolor": _TEXT_COLOUR, "ytick.labelcolor": _TEXT_COLOUR,
    "axes.edgecolor": _EDGE_COLOUR, "svg.fonttype": "none",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_POWER_MARKUP = re.compile(r"\$\\mathdefault\{(-?)(?:([\d.]+)\\times)?(\d+)\^\{(-?[\d.]+)\}\}\$")


def check_picture_path(path: str | Path) -> Path:
    """Check that the name of a picture ends in .png, .pdf or .svg; return its path.

    Raises:
        UsageError: the name has another ending.
    """
    path = Path(path).expanduser()
    if path.suffix.lower() not in PICTURE_FORMATS:
        expected = f"a name that ends in {' or '.join(PICTURE_FORMATS)}"
        raise UsageError(f"picture {path}", expected=expected, found=repr(path.name), path=path)
    return path


def save_figure(make_figure: Callable[[], Figure], path: Path, title: str, citation: str = "") -> Path:
    """Draw a figure in the package's style; write the picture under a temporary name, rename the file, and return its
    path.

    Args:
        make_figure: function that draws the figure.
        path: path of the PNG, PDF or SVG file; its folder is made if missing.
        title: title of the figure in the file's metadata.
        citation: citation of the members for the file's metadata; "" for none.

    Raises:
        UsageError: the file can't be written.
    """
    kind = path.suffix.lower()
    backend, metadata = PICTURE_FORMATS[kind]
    style = {**MATPLOTLIB_STYLE, "svg.hashsalt": title, "pdf.fonttype": 42}
    try:
        with replace_file(path, "wb") as file, _drawing_style(style):
            metadata = {**metadata, "Title": _printable_text(title)}
            if citation:
                metadata["Subject" if kind == ".pdf" else "Description"] = citation
            figure = _lay_out(_make_texts_printable(make_figure()))
            figure.savefig(file, format=kind[1:], backend=backend, metadata=metadata)
    except OSError as error:
        expected, found = "a place that can be written to", error.strerror or str(error)
        raise UsageError(
            f"picture {path}", expected=expected, found=found, do="Give another path", path=path
        ) from error
    return path


def png_bytes(make_figure: Callable[[], Figure], title: str) -> bytes:
    """Draw a figure in the package's style; return a PNG.

    Args:
        make_figure: function that draws the figure.
        title: title of the figure in the file's metadata.
    """
    backend, metadata = PICTURE_FORMATS[".png"]
    file = io.BytesIO()
    with _drawing_style(MATPLOTLIB_STYLE):
        figure = _lay_out(_make_texts_printable(make_figure()))
        figure.savefig(file, format="png", backend=backend, metadata={**metadata, "Title": title})
    return file.getvalue()


def svg_element(draw_panel: Callable[[Axes], None], panel_name: str, panel_size: tuple[float, float]) -> str:
    """Draw one panel; return an SVG element for an HTML page. Equal panels give equal elements.

    Letters stay text, not outlines. Colours of text, axes and grid are the page's CSS variables: --ink, --soft, --grid,
    --paper. The page writes the panel's title itself. If the panel has labels but no legend, a legend is added above
    the axes.

    Args:
        draw_panel: function that draws the panel into matplotlib axes.
        panel_name: name of the panel; ids in the element begin with this name.
        panel_size: width and height of the panel in inches.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator

    with _drawing_style({**_SVG_STYLE, "svg.hashsalt": panel_name}):
        figure = Figure(figsize=panel_size, dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        draw_panel(axes)
        for location in ("left", "center", "right"):
            axes.set_title("", loc=location)
        handles, labels = axes.get_legend_handles_labels()
        if axes.get_legend() is None and handles:
            figure.legend(handles, labels, loc="outside upper left", ncols=2, handlelength=1.6, columnspacing=1.4)
        _rasterize_dense_marks(figure)
        # The layout must not choose other ticks, which could have wider labels.
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), MaxNLocator):
                axis.set_major_locator(FixedLocator(list(axis.get_majorticklocs())))
        text = io.StringIO()
        _lay_out(_make_texts_printable(figure)).savefig(
            text, format="svg", backend="svg", transparent=True, metadata={"Date": None}
        )
    return _inline_element(text.getvalue(), panel_name)


@contextmanager
def _drawing_style(style: Any) -> Iterator[None]:
    """While the `with` block runs, draw with matplotlib's defaults and a style, without warnings about letters that the
    font lacks."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s)Glyph .* missing from", UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(style)
        yield


def _lay_out(figure: Figure) -> Figure:
    """Give the parts of a figure their final places; return the figure.

    If a figure that is saved still has a layout engine, matplotlib draws it twice.
    """
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
        figure.set_layout_engine(None)
    return figure


def _make_texts_printable(figure: Figure) -> Figure:
    """Make every text of a figure printable, and write powers of ten without mathematical markup; return the figure.

    Names in a figure come from files that anyone may have written.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(_printable_text(text.get_text()))
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            _make_tick_labels_printable(axis)
    return figure


def _printable_text(text: str) -> str:
    """Return a text for a picture: without control characters, and with lines of at most `MOST_LETTERS` characters."""
    return "\n".join(
        line if line.isprintable() and len(line) <= MOST_LETTERS else one_line(line, MOST_LETTERS)
        for line in text.split("\n")
    )


def _make_tick_labels_printable(axis: Axis) -> None:
    """Make an axis write powers of ten as 10⁻², and all other labels without control characters."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter, LogFormatterMathtext, LogFormatterSciNotation

    class PowerFormatter(LogFormatterSciNotation):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return _POWER_MARKUP.sub(_power_text, super().__call__(x, pos))

    formatter = axis.get_major_formatter()
    if isinstance(axis.get_minor_formatter(), LogFormatterMathtext):
        axis.set_minor_formatter(PowerFormatter(axis.get_transform().base))  # type: ignore[attr-defined]
    if isinstance(formatter, LogFormatterMathtext):
        axis.set_major_formatter(PowerFormatter(axis.get_transform().base))  # type: ignore[attr-defined]
    elif isinstance(formatter, FixedFormatter):
        axis.set_major_formatter(FixedFormatter([_printable_text(label) for label in formatter.seq]))
    elif isinstance(formatter, FuncFormatter):
        format_label = formatter.func
        formatter.func = lambda x, pos: _printable_text(format_label(x, pos))


def _power_text(power_match: re.Match[str]) -> str:
    sign, factor, base, exponent = power_match.groups()
    return f"{sign}{f'{factor} × ' if factor else ''}{base}{exponent.translate(_SUPERSCRIPTS)}"


def _rasterize_dense_marks(figure: Figure) -> None:
    """Mark the parts of a figure that become images in an SVG: colour scales, and series of more than 500 marks."""
    import numpy as np
    from matplotlib.collections import QuadMesh

    for axes in figure.axes:
        for line in axes.lines:
            if line.get_marker() not in ("None", "", " ", None) and np.size(line.get_xdata()) > MOST_MARKS:
                line.set_rasterized(True)
        for marks in axes.collections:
            if isinstance(marks, QuadMesh) or np.size(marks.get_offsets()) > 2 * MOST_MARKS:
                marks.set_rasterized(True)


def _inline_element(svg: str, panel_name: str) -> str:
    """Turn matplotlib's SVG document into a short element for an HTML page; return it.

    The element has no prologue, metadata or global style; it has unique ids, the page's colours, and coordinates with
    two decimals.
    """
    root = ElementTree.fromstring("".join(c for c in svg if c.isprintable() or c == "\n"))
    values = [value for element in root.iter() for value in element.attrib.values()]
    references = (match[1] for value in values if (match := re.fullmatch(r"(?:url\()?#(.+?)\)?", value)))
    new_ids = {old_id: f"{panel_name}-{i}" for i, old_id in enumerate(dict.fromkeys(references))}
    _shorten_element(root, new_ids)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.tail = None
    return ElementTree.tostring(root, encoding="unicode")


def _shorten_element(element: ElementTree.Element, new_ids: dict[str, str]) -> None:
    """Shorten an SVG element and what is inside it, in place."""
    element.tag = element.tag.rpartition("}")[2]
    element.text = (element.text or "").strip() if element.tag in ("text", "tspan") else None
    short_attributes = {}
    for key, value in element.attrib.items():
        key = key.rpartition("}")[2]
        if key == "id":
            if value not in new_ids:
                continue
            value = new_ids[value]
        elif key == "href" and value.startswith("#"):
            value = f"#{new_ids[value[1:]]}"
        elif value.startswith("url(#"):
            value = f"url(#{new_ids[value[5:-1]]})"
        elif key == "style":
            value = _adapt_style_to_page(value)
        elif key == "href":
            value = value.replace("\n", "")
        else:
            value = " ".join(
                re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), value).split()
            )
        if not value.startswith("rotate(-0 "):
            short_attributes[key] = value
    element.attrib = short_attributes
    for child in list(element):
        tag = child.tag.rpartition("}")[2]
        is_invisible = tag == "path" and child.get("style") == "fill: none"
        if (
            is_invisible
            or tag in ("metadata", "style")
            or (tag == "defs" and all(c.tag.endswith("}style") for c in child))
        ):
            element.remove(child)
            continue
        _shorten_element(child, new_ids)
        child.tail = None
    if element.tag in ("g", "svg"):
        element[:] = [
            kept_child
            for child in element
            for kept_child in (child if child.tag == "g" and not child.attrib else [child])
        ]


def _adapt_style_to_page(style: str) -> str:
    """Write an SVG element's style with the page's colours and the page's font; return it."""
    style = re.sub(
        r"font: (?:(\w+) )?([\d.]+px)[^;]*",
        lambda m: f"font-size: {m[2]}" + (f"; font-weight: {m[1]}" if m[1] else ""),
        style,
    )
    style = re.sub(r"font-family: [^;]*;? ?", "", style)
    for colour, css_variable in _PAGE_COLOURS.items():
        style = re.sub(re.escape(colour), css_variable, style, flags=re.IGNORECASE)
    return style.replace(": ", ":").replace("; ", ";")


def panels_figure(panel_count: int, panel_size: tuple[float, float], title: str, note: str) -> Figure:
    """Make a figure for panels side by side, with a title above and a note below; return it.

    Args:
        panel_count: number of panels.
        panel_size: width and height of one panel in inches.
        title, note: text above the panels, and text below them.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout_engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(panel_size[0] * panel_count, panel_size[1]), dpi=DPI, layout=layout_engine)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.supxlabel(note, fontsize=8, color=GREY)
    return figure


def histogram_edges(values: Sequence[float]) -> list[float]:
    """Choose the edges of a histogram's bars; return the edges. Each bar covers equally many possible values.

    If the values are multiples of a step (accuracies are multiples of 1 / images), the edges lie between multiples.

    >>> [round(e, 2) for e in histogram_edges([98.0, 98.5, 99.5])]
    [97.75, 98.25, 98.75, 99.25, 99.75]
    """
    low, high = min(values), max(values)
    magnitude = max(abs(low), abs(high))
    if high - low <= 1e-9 * magnitude:
        half_width = max(magnitude / 2000, 1e-6)
        return [low - half_width, high + half_width]
    distinct_values = sorted(set(values))
    step = min(b - a for a, b in pairwise(distinct_values))
    steps = (high - low) / step
    if steps <= 10_000 and all(abs((v - low) / step - round((v - low) / step)) < 1e-3 for v in distinct_values):
        steps_per_bar = math.ceil((round(steps) + 1) / MOST_BARS)
        return [low + step * (steps_per_bar * i - 0.5) for i in range(2 + round(steps) // steps_per_bar)]
    bar_count = min(MOST_BARS, max(5, math.ceil(math.sqrt(len(values)))))
    return [low + (high - low) * i / bar_count for i in range(bar_count)] + [high]
