"""A comparison as JSON, frame, LaTeX, text and picture: what goes in comes back, each number where it belongs."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.evaluation.figures import FIGURES, MONOTONE_FIGURES
from checkpoints_zoo.formats.text import escape_latex
from checkpoints_zoo.methods.comparing import comparison
from checkpoints_zoo.methods.comparing.comparison import Comparison, Row, format_estimate
from checkpoints_zoo.methods.comparing.equivalent_size import EquivalentSize
from checkpoints_zoo.methods.comparing.estimates import MMD_FIGURES, Estimate
from tests.support.few_draws import DRAWS, PERMUTATIONS, RUNS

LAYERS = ("conv1", "conv2", "fc1", "fc2")


@pytest.fixture(scope="module")
def found() -> Comparison:
    """Rows of made-up numbers, all different."""
    random = np.random.default_rng(0)

    def estimate(name: str, mode: str) -> Estimate:
        value, half = (float(x) for x in random.uniform(0.001, 0.9, 2))
        p = float(random.uniform()) if name in MMD_FIGURES else None
        runs = tuple(random.uniform(size=RUNS).tolist()) if mode == "one" else ()
        return Estimate(value, value - half / 9, value + half / 9, p, runs)

    def row(method: str, mode: str) -> Row:
        figures = {n: estimate(n, mode) for n in (*MMD_FIGURES, *FIGURES)}
        if method == "reference":
            figures |= {"mmd": Estimate(-0.0002, p=0.5), "disagreement": Estimate(math.nan)}
        layers = {n: {layer: estimate(n, mode) for layer in LAYERS} for n in MMD_FIGURES}
        sizes = dict(zip(MONOTONE_FIGURES, (0.0, 3.0, math.inf, 70.0, 1.5, 2.5, 4.5, 8.0, 64.0), strict=True))
        worth = {n: EquivalentSize(size, 0.0, math.inf, 64, 0.1) for n, size in sizes.items()}
        return Row(method, mode, RUNS, DRAWS, figures, layers, float(random.uniform()), {"conv1": 0.25}, worth)

    named = [(m, mode) for m in ("swag", "vi") for mode in ("one", "multi")]
    named += [("fresh", "members"), ("reference", "members")]
    return Comparison(
        "convnet-digits", "embedded@00/convnet-digits#0-63", 64, "digits/test 0123", "photos/test 4567",
        tuple(row(*name) for name in named), {"swag": {"fit": {"seconds": 1.5}}}, {"hmc": "no room."},
        {"permutations": PERMUTATIONS},
    )  # fmt: skip


def test_a_comparison_comes_back_from_its_json(found: Comparison) -> None:
    text = found.to_json()
    assert "NaN" not in text
    assert Comparison.from_json(text) == found
    for broken in ("", "[]", "{}", text.replace('"version": 1', '"version": 99')):
        with pytest.raises(FormatError, match=r"^comparison: expected "):
            Comparison.from_json(broken)
    values = json.loads(text)
    assert [(row["method"], row["mode"]) for row in values["rows"]] == [
        ("swag", "one"), ("swag", "multi"), ("vi", "one"), ("vi", "multi"), ("fresh", "members"),
        ("reference", "members"),
    ]  # fmt: skip
    assert values["settings"]["permutations"] == PERMUTATIONS
    with pytest.raises(UsageError, match=r"row \('hmc', 'one'\): expected one of \('swag', 'one'\), "):
        found["hmc", "one"]
    with pytest.raises(UsageError, match=r"figure 'speed': expected one of mmd, ns, accuracy, .*; found none such"):
        found["swag", "one"]["speed"]


def test_the_frame_has_a_line_a_figure_and_layer(found: Comparison) -> None:
    frame = found.to_frame()
    layers = ["conv1", "conv2", "fc1", "fc2"]
    one = frame[(frame["method"] == "vi") & (frame["mode"] == "one")]
    assert one[one["figure"] == "mmd"]["group"].tolist() == [*layers, "all"]
    assert one[one["figure"] == "nll"]["value"].tolist() == [found["vi", "one"]["nll"].value]
    assert set(one["figure"]) == {*found["vi", "one"].figures, "corollary"}
    assert one[one["figure"] == "brier"]["worth"].tolist() == [found["vi", "one"].worth["brier"].members]
    assert len(frame.columns) == 15


def test_latex_is_a_booktabs_table_with_a_row_a_method(found: Comparison) -> None:
    lines = found.to_latex().split("\n")
    header = next(line for line in lines if line.startswith("Method"))
    assert (
        header == r"Method & Mode & MMD & NS & Acc & ECE & ACE & Brier & NLL & AUPR & FPR95 & AUROC & ID MI & OOD MI \\"
    )
    assert [line for line in lines if line.startswith("\\")] == [
        r"\begin{tabular}{llrrrrrrrrrrrr}", r"\toprule", r"\midrule", r"\midrule", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    cells = next(line for line in lines if line.startswith("swag & one mode")).removesuffix(r" \\").split(" & ")
    accuracy = found["swag", "one"]["accuracy"]
    assert cells[4] == "$" + format_estimate(accuracy).replace("±", r" \pm ") + "$"
    assert float(cells[4][1:].split(" ")[0]) == pytest.approx(100 * accuracy.value, abs=0.06)
    assert all(line.count("&") == 13 for line in lines if line.endswith(r"\\"))
    assert escape_latex(r"a_b&c%d\e{f}") == r"a\_b\&c\%d\textbackslash{}e\{f\}"
    odd = replace(found, rows=(replace(found.rows[0], method="my_50%"), *found.rows[1:]))
    assert r"my\_50\% & one mode" in odd.to_latex()


def test_text_says_what_everything_means(found: Comparison) -> None:
    blocks = found.to_text().split("\n\n")
    assert [block.split("\n")[0][:40] for block in blocks] == [
        "All figures times 100: MMD² and NS (no u", "Worth as many independent members of the", "p-values:",
        "Measured on digits/test; OOD: photos/tes",
    ]  # fmt: skip
    lines = blocks[0].split("\n")
    assert lines[1].split()[:4] == ["method", "mode", "runs", "×"]
    assert lines[2].split()[:7] == [
        "swag",
        "one",
        "mode",
        str(RUNS),
        "×",
        str(DRAWS),
        format_estimate(found["swag", "one"]["mmd"]),
    ]
    assert "20 kernels; bandwidths from the reference's own pairs" in blocks[3]
    assert (format_estimate(Estimate(0.123456)), format_estimate(Estimate(math.nan)), format_estimate(None)) == (
        "12.3",
        "-",
        "-",
    )
    assert format_estimate(Estimate(0.9771, 0.9731, 0.9811)) == "97.7±0.4"
    assert format_estimate(Estimate(0.0002, -0.0011, 0.0015)) == "0.02±0.13"


@pytest.mark.slow
def test_the_picture_has_two_panels_a_figure(found: Comparison, tmp_path: Path) -> None:
    figure = comparison.draw_comparison(found)
    labels = [axes.get_label() for axes in figure.axes]
    assert labels[:4] == ["accuracy mmd", "accuracy ns", "nll mmd", "nll ns"]
    assert len(labels) == 20
    for axes in figure.axes:
        name, distance = str(axes.get_label()).split(" ")
        scale = 100 if name == "accuracy" else 1
        marks: list[Any] = [container[0] for container in axes.containers]
        drawn_at = [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks]
        expected = [(max(0.01, 100 * r[distance].value), r[name].value * scale) for r in found.rows[:-1]]
        np.testing.assert_allclose(drawn_at, expected, rtol=1e-12)
        fills = [mark.get_markerfacecolor() for mark in marks]
        assert [fill == "white" for fill in fills] == [r.mode == "one" for r in found.rows[:-1]]
    [key] = figure.legends
    texts = [text.get_text() for text in key.get_texts()]
    assert texts[:3] == ["swag", "vi", "fresh"]
    figure.set_dpi(50)
    FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
    boxes = [text.get_window_extent() for text in key.get_texts()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    with pytest.raises(UsageError, match=r"expected a comparison with draws of a method; found none"):
        replace(found, rows=found.rows[-1:]).plot(tmp_path / "c.png")
