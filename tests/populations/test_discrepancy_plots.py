"""The picture of an MMD: what is drawn are its numbers, each layer in its row, and no text covers another."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, MATPLOTLIB_STYLE, RED, _make_texts_printable
from checkpoints_zoo.populations import discrepancy
from checkpoints_zoo.populations.discrepancy import MMD, NS, Discrepancy

CITED = "hf://datasets/me/zoo@{0}/{1}#0-99~12345678"


def made(layers: int, shift: float, names: tuple[str, str] = ("resnet18-cifar100", "resnet18-cifar100")) -> MMD:
    drawn = random.Random(layers + shift)

    def group() -> Discrepancy:
        return Discrepancy(100, (("gaussian", 1.0),), (0.0,), drawn.gauss(shift, 0.01), drawn.uniform(0.001, 1))

    groups = {f"layer{i // 8}.{i % 8 // 2}.conv{i % 2}": group() for i in range(layers)} | {"all": group()}
    first, second = (CITED.format("0" * 40, name) for name in names)
    return MMD(first, second, (100, 1000), 999, groups)


@cache
def found(layers: int) -> NS:
    return NS(made(layers, 0.2), made(layers, 0.0), "unit-norm", "first", streams=False)


def axes_of(before: MMD, after: MMD | None) -> dict[Any, Any]:
    return {axes.get_label(): axes for axes in discrepancy.draw_mmd(before, after).axes}


@pytest.mark.parametrize("layers", [1, 21, 80])
def test_marks_are_the_groups(layers: int) -> None:
    both = found(layers)
    axes = axes_of(both.mmd, both.ns)
    # Beside the marks a line at 0 and one above "all", or one at the level.
    for panel, figure, count in (("mmd", "value", 4), ("p", "p_value", 3)):
        lines = axes[panel].lines
        assert len(lines) == count
        for line, of, colour in zip(lines[:2], (both.mmd, both.ns), (RED, BLUE), strict=True):
            assert list(line.get_xdata()) == [getattr(group, figure) for group in of.groups.values()]
            assert list(line.get_ydata()) == list(range(layers + 1))
            assert to_hex(line.get_color()).upper() == colour
    names = list(both.mmd.groups)
    ticks = {round(at): label.get_text() for at, label in zip(axes["mmd"].get_yticks(), axes["mmd"].get_yticklabels())}  # noqa: B905
    assert all(names[at] == text for at, text in ticks.items())
    assert ticks[layers] == "all"
    assert len(ticks) == layers + 1 if layers < 60 else 40 < len(ticks) < layers
    assert axes["mmd"].yaxis_inverted()
    low, high = axes["p"].get_xlim()
    assert low < 1 / 1000 < 1 < high


def test_as_stored_alone_and_what_the_texts_say() -> None:
    axes = axes_of(made(4, 0.1), None)
    assert [text.get_text() for text in axes["mmd"].get_legend().get_texts()] == ["as stored"]
    axes = axes_of(found(4).mmd, found(4).ns)
    assert [text.get_text() for text in axes["mmd"].get_legend().get_texts()] == ["as stored", "symmetries removed"]
    assert [text.get_text() for text in axes["p"].get_legend().get_texts()] == ["p = 0.05"]
    figure = discrepancy.draw_mmd(made(4, 0.1))
    assert figure.get_suptitle() == "resnet18-cifar100: 100 members against 1,000"
    assert figure.get_supxlabel() == (
        "MMD²: unbiased, mean over kernels. p: 999 permutations; not adjusted for many layers."
    )
    other = made(4, 0.1, ("resnet18-cifar100", "resnet18-cifar100-swag"))
    assert discrepancy.figure_title(other) == "resnet18-cifar100 (100 members) against resnet18-cifar100-swag (1,000)"
    assert discrepancy.figure_title(MMD("", "", (5, 7), 9, {})) == "5 members against 7"


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 21, 80])
def test_no_text_covers_another(layers: int) -> None:
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(MATPLOTLIB_STYLE)
        figure = _make_texts_printable(discrepancy.draw_mmd(found(layers).mmd, found(layers).ns))
        figure.draw_without_rendering()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        least, most = sorted(axis.get_view_interval())
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            hidden |= {tick.label2} if least <= tick.get_loc() <= most else {tick.label1, tick.label2}
    texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in hidden]
    boxes = [text.get_window_extent() for text in texts]
    for (a, one), (b, other) in itertools.combinations(zip(texts, boxes, strict=True), 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        along = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, along) < 3, (a.get_text(), b.get_text())
    for text, box in zip(texts, boxes, strict=True):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1, text.get_text()


@pytest.mark.slow
def test_a_png_of_the_same_bytes_each_time_or_a_refusal(tmp_path: Path) -> None:
    path = found(4).plot(tmp_path / "new" / "mmd.png")
    assert path.read_bytes() == found(4).plot(tmp_path / "again.png").read_bytes()
    with Image.open(path) as image:
        assert image.info["Title"] == "resnet18-cifar100: 100 members against 1,000"
    assert path.read_bytes() != found(4).mmd.plot(tmp_path / "one.png").read_bytes()
    with pytest.raises(UsageError) as error:
        found(4).plot(tmp_path / "mmd.jpg")
    assert (
        str(error.value)
        == f"picture {tmp_path}/mmd.jpg: expected a name that ends in .png or .pdf or .svg; found 'mmd.jpg'."
    )
