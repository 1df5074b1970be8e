"""Plots as plotly's traces and layouts, in JSON values: SVG traces alone, and what is drawn is bounded.

Many values are counted in bars or cells, so that a page of a thousand members is no larger than one of ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from checkpoints_zoo.evaluation.drawing import BLUE, GREY, RED
from checkpoints_zoo.evaluation.metrics import Interval
from checkpoints_zoo.publishing.html_report.tags import in_plot

Trace = dict[str, Any]
Values = Sequence[float]

HEIGHT = 300  # pixels
DOTS = 3000  # that are drawn one by one; more are counted in cells
CELLS = 48  # on each side of such a count
BARS = 40  # of a histogram, at most
SIDE = 128  # of a matrix; larger ones are averaged in blocks
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
GRID = "#E4E4E4"


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis with a title, which may be plotly's markup."""
    return {
        "title": {"text": title, "standoff": 8}, "automargin": True, "showgrid": True, "gridcolor": GRID,
        "zeroline": False, "showline": True, "linecolor": "#8A8A8A", "ticks": "outside", "ticklen": 4,
        "tickcolor": "#8A8A8A", "exponentformat": "power", **more,
    }  # fmt: skip


def count_axis(title: str, heights: Values) -> dict[str, Any]:
    """Return an axis from 0 for counts, labelled at whole numbers."""
    return axis(title, rangemode="tozero", tickformat=",d", **({"dtick": 1} if max(heights) < 6 else {"nticks": 6}))


def layout(x: Mapping[str, Any], y: Mapping[str, Any], *, key: bool = True, **more: Any) -> dict[str, Any]:
    """Return the layout of a plot.

    Args:
        x, y: axes.
        key: whether it has a legend.
        more: of plotly's.
    """
    return {
        "xaxis": x, "yaxis": y, "height": HEIGHT, "margin": {"l": 52, "r": 14, "t": 12, "b": 44},
        "font": {"family": FONT, "size": 12, "color": "#222222"}, "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "showlegend": key, "hovermode": "closest", "bargap": 0,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom",
                   "font": {"size": 11.5}},
        "hoverlabel": {"font": {"family": FONT, "size": 12}}, "dragmode": "zoom",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#8A8A8A", "activecolor": BLUE}, **more,
    }  # fmt: skip


def edges_of(values: Values, bars: int = BARS, step: float = 0.0) -> list[float]:
    """Cut the range of values into bars; return their edges.

    Args:
        values: one or more, finite.
        bars: at most.
        step: what values are multiples of; bars then hold as many possible values each.
    """
    low, high = min(values), max(values)
    if step:
        width = step * math.ceil((round((high - low) / step) + 1) / bars)
        count = 1 + int((high - low + step / 2) // width)
        return [low - step / 2 + width * i for i in range(count + 1)]
    if high - low <= 1e-9 * max(abs(high), 1e-9):
        half = max(abs(high) / 20, 1e-6)
        return [low - half, high + half]
    count = min(bars, max(5, math.ceil(2 * len(values) ** 0.5)))
    return [low + (high - low) * i / count for i in range(count)] + [high]


def counts(values: Values, edges: Values) -> list[int]:
    """Count values between edges; return the counts."""
    found: list[int] = np.histogram(np.asarray(values, np.float64), np.asarray(edges))[0].tolist()
    return found


def bars(edges: Values, heights: Values, name: str, colour: str, noun: str) -> Trace:
    """Return bars between edges."""
    pairs = list(pairwise(edges))
    return {
        "type": "bar", "name": name, "x": [(a + b) / 2 for a, b in pairs], "width": [b - a for a, b in pairs],
        "y": list(heights), "customdata": [list(pair) for pair in pairs],
        "marker": {"color": colour, "opacity": 0.85, "line": {"color": "white", "width": 0.6}},
        "hovertemplate": f"%{{customdata[0]:.4g}} to %{{customdata[1]:.4g}}: %{{y:.4g}} {noun}<extra></extra>",
    }  # fmt: skip


def stairs(edges: Values, heights: Values, name: str, colour: str) -> Trace:
    """Return the outline of a histogram, filled, so that one may lie over another, on any axis."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": [e for edge in edges for e in (edge, edge)],
        "y": [0, *(h for height in heights for h in (height, height)), 0], "fill": "tozeroy",
        "fillcolor": faint(colour, 0.28), "line": {"color": colour, "width": 1.5},
        "hovertemplate": f"{name}<br>at %{{x:.4g}}: %{{y:.2%}} of inputs<extra></extra>",
    }  # fmt: skip


def line(x: Values, y: Values, name: str, colour: str, dash: str = "solid", **more: Any) -> Trace:
    """Return a line."""
    drawn = {"color": colour, "width": 1.8, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": drawn, **more}


def upright(at: float, top: float, name: str, colour: str, dash: str = "solid") -> Trace:
    """Return an upright line that says in the key what is there."""
    return line([at, at], [0, top], name, colour, dash, hovertemplate=f"{name}<extra></extra>")


def dots(x: Values, y: Values, names: Sequence[str], name: str, colour: str, told: str) -> list[Trace]:
    """Return a dot for each pair of values; of many, how many lie in each cell of a grid.

    Args:
        x, y: of the dots.
        names: of each, on hover.
        name: of all in the key.
        colour: of the dots.
        told: plotly's template for the values on hover.
    """
    if len(x) <= DOTS:
        marker = {"color": colour, "size": 6, "opacity": 0.65, "line": {"color": "white", "width": 0.5}}
        return [{
            "type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y),
            "text": [in_plot(n) for n in names], "marker": marker,
            "hovertemplate": f"%{{text}}<br>{told}<extra></extra>",
        }]  # fmt: skip
    found, across, up = np.histogram2d(np.asarray(x), np.asarray(y), CELLS)
    shown = np.where(found > 0, np.log10(np.maximum(found, 1)), np.nan).T
    top = max(1, math.floor(math.log10(found.max())))
    return [{
        "type": "heatmap", "name": name, "x": ((across[:-1] + across[1:]) / 2).tolist(),
        "y": ((up[:-1] + up[1:]) / 2).tolist(), "z": _cells(shown), "customdata": found.T.astype(int).tolist(),
        "colorscale": [[0, "#CFE3F1"], [1, "#003A5D"]],
        "colorbar": {**_colorbar("pairs"), "tickvals": list(range(top + 1)),
                     "ticktext": [f"{10**i:,}" for i in range(top + 1)]},
        "hovertemplate": f"%{{customdata}} here<br>{told}<extra></extra>",
    }]  # fmt: skip


def matrix(values: np.ndarray[Any, np.dtype[np.float64]], unit: str, told: str) -> tuple[Trace, int]:
    """Return a matrix as colours, and how many rows are averaged in one of what is drawn.

    Args:
        values: square, NaN where there is none.
        unit: of them, beside the scale.
        told: plotly's template on hover.
    """
    block = math.ceil(len(values) / SIDE)
    if block > 1:
        at = np.arange(len(values)) // block
        known = ~np.isnan(values)
        shape = (int(at[-1]) + 1,) * 2
        sums, found = np.zeros(shape), np.zeros(shape)
        np.add.at(sums, (at[:, None], at[None]), np.where(known, values, 0))
        np.add.at(found, (at[:, None], at[None]), known)
        values = np.where(found > 0, sums / np.maximum(found, 1), np.nan)
    places = [block * i + (block - 1) / 2 for i in range(len(values))]
    return {
        "type": "heatmap", "x": places, "y": places, "z": _cells(values), "colorscale": "Viridis",
        "colorbar": _colorbar(unit), "hovertemplate": f"{told}<extra></extra>", "hoverongaps": False,
    }, block  # fmt: skip


def _cells(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[list[float | None]]:
    """Return a matrix as lists, None where it is NaN."""
    return [[None if math.isnan(v) else v for v in row] for row in values.tolist()]


def _colorbar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0, "len": 0.95}


def sizes(curve: Mapping[int, Interval], everyone: int, scale: float) -> list[Trace]:
    """Return a figure over the sizes of ensembles: a band for fresh ones, a bar for all members.

    Args:
        curve: size -> figure.
        everyone: how many members there are.
        scale: what to multiply by.
    """
    known = [(s, f.value * scale) for s, f in sorted(curve.items()) if math.isfinite(f.value)]
    band = [
        (s, f.low * scale, f.high * scale)
        for s, f in sorted(curve.items())
        if s < everyone and f.low is not None and f.high is not None
    ]
    traces: list[Trace] = []
    if band:
        at, low, high = (list(column) for column in zip(*band, strict=True))
        traces.append(line(at, high, "", BLUE, hoverinfo="skip") | {"line": {"width": 0}})
        filled = {"fill": "tonexty", "fillcolor": faint(BLUE, 0.18), "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(line(at, low, "a fresh ensemble", BLUE) | filled)
    bounds = {s: f" [{low:.4g}, {high:.4g}]" for s, low, high in band}
    traces.append({
        "type": "scatter", "mode": "lines+markers", "name": "mean of that size", "x": [s for s, _ in known],
        "y": [v for _, v in known], "line": {"color": BLUE, "width": 1.8}, "marker": {"color": BLUE, "size": 6},
        "text": [bounds.get(s, "") for s, _ in known],
        "hovertemplate": "%{x} members: %{y:.4g}%{text}<extra></extra>",
    })  # fmt: skip
    whole = curve[everyone]
    if whole.low is not None and whole.high is not None:
        traces.append({
            "type": "scatter", "mode": "markers", "name": "all members", "x": [everyone], "y": [whole.value * scale],
            "marker": {"color": RED, "size": 8, "symbol": "diamond"},
            "error_y": {"type": "data", "symmetric": False, "array": [(whole.high - whole.value) * scale],
                        "arrayminus": [(whole.value - whole.low) * scale], "color": RED, "thickness": 1.6, "width": 5},
            "text": [f" [{whole.low * scale:.4g}, {whole.high * scale:.4g}]"],
            "hovertemplate": "all %{x} members: %{y:.4g}%{text}<extra></extra>",
        })  # fmt: skip
    return traces


def size_axis(sizes: Sequence[int]) -> dict[str, Any]:
    """Return a logarithmic axis over sizes of ensembles, labels left out where there is no room for them."""
    room = max(0.09 * math.log2(max(sizes) / min(sizes)), 1e-9)
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or math.log2(kept[-1] / size) >= room:
            kept.append(size)
    ends = [math.log10(min(sizes) / 1.25), math.log10(max(sizes) * 1.25)]
    ticks = {"tickvals": kept[::-1], "ticktext": [f"{size:,}" for size in kept[::-1]], "tickangle": 0}
    return axis("members in the ensemble", type="log", range=ends, **ticks)


def faint(colour: str, opacity: float) -> str:
    """Return a colour (#RRGGBB) with an opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def diagonal(low: float, high: float, name: str) -> Trace:
    """Return the line on which both axes are equal."""
    return line([low, high], [low, high], name, GREY, "dash", hoverinfo="skip")
