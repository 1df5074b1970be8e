"""The picture on a card: its bars are the members, the same rows give the same bytes, no accuracy gives no picture."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from PIL import Image

from checkpoints_zoo.evaluation.drawing import MOST_BARS, histogram_edges
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.publishing import card_pictures
from checkpoints_zoo.publishing.card_sections import Section

LAYOUT = Layout.of([("w", "F32", (2, 3))])
ABOUT = Description("some", "Some", "net", {}, "digits", ("a", "b"), {}, {"only": LAYOUT}, "MIT", "")


def section(accuracies: Sequence[float | None], losses: Sequence[float | None] = (), **same: Any) -> Section:
    """Rows with these figures; `same` is in each of them."""
    found = [*losses, *[None] * (len(accuracies) - len(losses))]
    known = {"epoch": 1, "final": True, "status": "ok", **same}
    rows = [{"member": i, "test_accuracy": a, "test_nll": found[i], **known} for i, a in enumerate(accuracies)]
    return Section("some", ABOUT, manifest.build_manifest(rows))


def panels(shown: Section) -> dict[str, Any]:
    return {axes.get_label(): axes for axes in card_pictures.draw_histograms(shown).axes}


def bars(axes: Any) -> list[tuple[float, float, int]]:
    """(left, right, height) of each bar."""
    return [(b.get_x(), b.get_x() + b.get_width(), int(b.get_height())) for b in axes.containers[0]]


def test_bars_count_members_and_the_line_is_their_mean() -> None:
    accuracies, losses = [0.95, 0.95, 0.96, 0.99], [0.1, 0.2, 0.3, 0.9]
    axes = panels(section(accuracies, losses))
    assert list(axes) == ["test_accuracy", "test_nll"]
    for name, values in (("test_accuracy", [100 * a for a in accuracies]), ("test_nll", losses)):
        assert sum(height for *_, height in bars(axes[name])) == 4
        for left, right, height in bars(axes[name]):
            last = right == bars(axes[name])[-1][1]
            assert height == sum(left <= v < right or (last and v == right) for v in values)
        assert axes[name].lines[0].get_xdata()[0] == pytest.approx(statistics.fmean(values))
        assert list(axes[name].lines[1].get_xdata()) == [min(values), max(values)]
    legend = [t.get_text() for t in axes["test_accuracy"].get_legend().get_texts()]
    # By hand: 96.25; squares of -1.25, -1.25, -0.25, 2.75 sum to 10.75; sqrt(10.75 / 3) = 1.893.
    assert legend == ["mean 96.2, standard deviation 1.9", "lowest 95.0, highest 99.0"]


def test_only_members_that_are_loaded_are_drawn() -> None:
    rows = [
        {"member": m, "epoch": e, "final": f, "status": s, "test_accuracy": a, "eval_data": "digits/test"}
        for m, e, f, s, a in (
            *((0, 9, True, "ok", 0.9), (0, 3, False, "ok", 0.1), (1, 9, True, "failed", 0.1)),
            *((2, 9, True, "excluded", 0.2), (3, 9, True, "ok", None), (4, 9, True, "ok", float("nan"))),
        )
    ]
    shown = Section("some", ABOUT, manifest.build_manifest(rows))
    figure = card_pictures.draw_histograms(shown)
    assert figure.get_suptitle() == "some: 1 member on digits/test"
    assert [height for *_, height in bars(figure.axes[0])] == [1]


@pytest.mark.slow
def test_a_png_of_the_same_bytes_whatever_the_caller_draws_with() -> None:
    shown = section([0.5, 0.25, 0.75], [1.0, 2.0, 0.5], eval_data="digits/test")
    first = card_pictures.picture("some", shown.rows, ABOUT)
    with pyplot.style.context("dark_background"):
        assert card_pictures.picture("some", shown.rows, ABOUT) == first
    assert first is not None
    with Image.open(io.BytesIO(first)) as image:
        assert (image.format, image.size) == ("PNG", (1440, 525))
        assert image.info["Title"] == "some: test figures of its members"
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


@pytest.mark.parametrize("accuracies", [[], [None, None], [float("nan")], [float("inf"), None], [1e6]])
def test_no_accuracy_no_picture(accuracies: list[float | None]) -> None:
    assert card_pictures.picture("some", section(accuracies, [0.1][: len(accuracies)]).rows, ABOUT) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "shown",
    [
        section([0.98]),
        section([1.0] * 5, [0.0] * 5),
        section([0.0, 9e5], [9e5, -9e5]),
        section([0.1, *[0.76] * 200], [2.3, *[0.9] * 200]),
        section([0.1, 0.2], eval_data=r"$\frac{"),
        section([0.1, 0.2], eval_data="漢字/test"),
    ],
    ids=["one", "equal", "absurd", "outlier", "formula", "letters"],
)
def test_whatever_the_figures_are_it_is_drawn(shown: Section) -> None:
    assert card_pictures.picture("a" * 96, shown.rows, ABOUT) is not None  # warnings are errors


def test_the_title_fits() -> None:
    figure = card_pictures.draw_histograms(Section("w" * 96, ABOUT, section([0.1, 0.2], eval_data="w" * 60).rows))
    figure.canvas.draw()
    (title,) = [t for t in figure.texts if t.get_text()]
    box = title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.slow
@given(st.integers(10, 20_000), st.data())
def test_a_bar_has_as_many_possible_values_as_its_neighbour(images: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(0, images - 1))
    apart = data.draw(st.integers(1, min(images - low, 300)))
    correct = [low, low + 1, low + apart, *data.draw(st.lists(st.integers(low, low + apart), max_size=20))]
    edges = histogram_edges([100 * c / images for c in correct])
    held = [sum(a <= 100 * k / images < b for k in range(images + 2 * apart + 3)) for a, b in pairwise(edges)]
    assert len(set(held)) == 1
    assert edges[0] < 100 * min(correct) / images <= 100 * max(correct) / images < edges[-1]
    assert len(held) <= MOST_BARS


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_every_value_is_in_a_bar(values: list[float]) -> None:
    edges = histogram_edges(values)
    assert all(a < b for a, b in pairwise(edges))
    assert sum(np.histogram(values, edges)[0]) == len(values)
