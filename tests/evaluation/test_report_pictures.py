"""The picture of a report: what is drawn are the report's numbers, no text covers another, and nothing else changes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import get_cachedir
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import report as reports
from checkpoints_zoo.evaluation.tables import as_text
from tests.support.reports import Bounds, Drawn


def drawn(members: int, ood: bool = True) -> Drawn:
    return Drawn(members) if ood else Drawn(members, ood="", ood_inputs=0)


@cache
def sketched(members: int, ood: bool = True) -> tuple[Drawn, dict[str, Any]]:
    """A report and its axes by label, drawn once for all tests that only look at them."""
    report = drawn(members, ood)
    return report, axes_of(report)


def axes_of(report: Drawn) -> dict[str, Any]:
    return {axes.get_label(): axes for axes in reports.draw_report(report).axes}


@pytest.mark.slow
def test_a_png_of_the_expected_size(tmp_path: Path) -> None:
    path = Drawn(8).plot(tmp_path / "new" / "folder" / "report.png")
    assert path == tmp_path / "new" / "folder" / "report.png"
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (1650, 1260))
        assert image.info["Title"] == "convnet-digits, an ensemble of 8 members"
        assert image.info["Description"].endswith("/convnet-digits#0-7~01234567")
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    assert [p.name for p in path.parent.iterdir()] == ["report.png"]


@pytest.mark.parametrize(("members", "ood"), [(1, True), (3, False), (64, True)])
def test_reliability_holds_the_bins(members: int, ood: bool) -> None:
    report, axes = sketched(members, ood)
    accuracy, gap = axes["reliability"].containers
    inputs = report.drawing["reliability_inputs"]
    filled = [b for b, n in enumerate(inputs) if n]
    for at, b in enumerate(filled):
        assert accuracy[at].get_x() == pytest.approx(b / 15)
        assert accuracy[at].get_width() == pytest.approx(1 / 15)
        assert accuracy[at].get_height() == report.drawing["reliability_accuracy"][b]
        top = gap[at].get_y() + gap[at].get_height()
        assert gap[at].get_y() == report.drawing["reliability_accuracy"][b]
        assert top == pytest.approx(report.drawing["reliability_confidence"][b], abs=1e-12)
    shares = [bar.get_height() for bar in axes["counts"].patches]
    assert shares == pytest.approx([100 * inputs[b] / sum(inputs) for b in filled])
    shown = "ECE 0.0120 [0.0086, 0.0154]" if members >= 3 else "ECE 0.012"
    assert axes["reliability"].get_title(loc="right") == shown


@pytest.mark.slow
@pytest.mark.parametrize(("members", "ood"), [(1, True), (2, False), (3, False), (16, True), (65, True)])
@pytest.mark.parametrize(("name", "scale"), [("accuracy", 100), ("nll", 1)])
def test_curves_hold_the_figures(members: int, ood: bool, name: str, scale: float) -> None:
    report, panels = sketched(members, ood)
    axes = panels[name]
    sizes = list(report.curve)
    assert list(axes.lines[0].get_xdata()) == sizes
    assert list(axes.lines[0].get_ydata()) == [report.curve[s][name].value * scale for s in sizes]
    if name == "nll":
        assert [t.get_text() for t in axes.get_xticklabels()][-1] == str(members)
    if members < 3:
        assert not axes.collections
        return
    band, bar = axes.collections
    vertices = {tuple(v) for v in band.get_paths()[0].vertices}
    for size in sizes[:-1]:
        assert (size, report.curve[size][name].low * scale) in vertices
        assert (size, report.curve[size][name].high * scale) in vertices
    assert max(x for x, _ in vertices) == sizes[-2]
    full = report.curve[members][name]
    ((low, high),) = bar.get_segments()
    assert low == pytest.approx([members, full.low * scale])
    assert high == pytest.approx([members, full.high * scale])


@pytest.mark.parametrize("members", [1, 3, 16, 64])
def test_the_histogram_counts_the_members(members: int) -> None:
    report, panels = sketched(members)
    axes = panels["member accuracy"]
    for bar in axes.patches:
        left, right = bar.get_x() * 5, (bar.get_x() + bar.get_width()) * 5  # percent to inputs of 500
        assert bar.get_height() == sum(left < c < right for c in report.correct)
        assert left % 1 == pytest.approx(0.5)
    assert sum(bar.get_height() for bar in axes.patches) == members
    mean, everyone = (line.get_xdata()[0] for line in axes.lines)
    assert mean == pytest.approx(sum(report.correct) / members / 5)
    assert everyone == report.ensemble["accuracy"].value * 100
    assert axes.get_xlim()[0] < everyone < axes.get_xlim()[1]


def test_a_wide_population_has_bars_of_equally_many_values() -> None:
    report = Drawn(4)
    report.drawing["member_accuracy"] = [c / 500 for c in (100, 200, 300, 487)]
    widths = [bar.get_width() * 5 for bar in axes_of(report)["member accuracy"].patches]
    assert widths == pytest.approx([25] * 16)
    assert sum(bar.get_height() for bar in axes_of(report)["member accuracy"].patches) == 4


def shares(patch: Any) -> tuple[float, float, float]:
    """The sum of a step histogram's heights, its least and its greatest edge."""
    steps = {round(float(x), 15): float(y) for (x, y), (to, _) in itertools.pairwise(patch.get_xy()) if to > x}
    edges = [x for x, _ in patch.get_xy()]
    return sum(steps.values()), min(edges), max(edges)


@pytest.mark.slow
@pytest.mark.parametrize("ood", [True, False])
def test_histograms_of_information_sum_to_one(ood: bool) -> None:
    report, panels = sketched(16, ood)
    axes = panels["information"]
    names = ["mi_id", "mi_ood"] if ood else ["mi_id"]
    assert len(axes.patches) == len(names)
    values = np.concatenate([report.drawing[n] for n in names])
    for patch, name in zip(axes.patches, names, strict=True):
        total, least, greatest = shares(patch)
        assert total == pytest.approx(1), name
        assert least == pytest.approx(10 ** np.floor(np.log10(np.quantile(values, 0.01))))
        assert greatest >= values.max()
    key = [text.get_text() for text in axes.get_legend().get_texts()]
    assert key[0] == "in distribution, mean 0.0200 [0.0190, 0.0210]"
    assert key[1:] == (
        ["out of distribution, mean 0.400 [0.370, 0.430]", "AUROC 0.9912 [0.9871, 0.9953], by 1 − largest probability"]
        if ood
        else ["no out-of-distribution inputs were given"]
    )
    assert ("first bar" in axes.get_xlabel()) == (values.min() < axes.get_xlim()[0] * 1.1)


def test_one_member_has_no_information() -> None:
    axes = sketched(1)[1]["information"]
    assert [text.get_text() for text in axes.texts] == ["one member has none"]
    agreeing = Drawn(4)
    agreeing.drawing |= {"mi_id": [0.0] * 500, "mi_ood": [1e-9] * 2000}
    assert [t.get_text() for t in axes_of(agreeing)["information"].texts] == ["none: the members agree on all inputs"]


def test_the_note_names_the_members_without_the_folder() -> None:
    report = Drawn(5)
    foot = str(reports.draw_report(report).get_supxlabel())
    assert foot.endswith("\nMembers: convnet-digits#0-4")
    assert "home" not in foot
    report.citation = f"embedded@{'4' * 40}/convnet-digits#{','.join(map(str, range(0, 900, 2)))}~01234567"
    foot = str(reports.draw_report(report).get_supxlabel())
    assert "…" in foot
    assert foot.endswith(",898")
    assert "4444" not in foot
    assert max(map(len, foot.split("\n"))) < 180


def inked(text: Text) -> Bbox:
    """A text's box, without the empty line that a title ends in to make room for the line below it."""
    box = text.get_window_extent()
    return Bbox([[box.x0, (box.y0 + box.y1) / 2], [box.x1, box.y1]]) if text.get_text().endswith("\n") else box


@pytest.mark.slow
@pytest.mark.parametrize(("members", "ood"), [(1, True), (2, False), (5, True), (65, True)])
def test_no_text_covers_another(members: int, ood: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = []
    draw_report = reports.draw_report
    monkeypatch.setattr(reports, "draw_report", lambda report: figures.append(draw_report(report)) or figures[0])
    drawn(members, ood).plot(tmp_path / "r.png")
    figure = figures[0]
    page = figure.bbox
    # Matplotlib keeps labels of ticks outside the limits, and does not draw them.
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        least, most = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {t.label1 for t in ticks if not least * 0.9999 <= t.get_loc() <= most * 1.0001}
    shown = [
        (text.get_text().strip(), inked(text))
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text not in hidden
    ]
    labels = {words for words, _ in shown}
    assert {"accuracy (%)", "NLL (nats)", "inputs (%)", "members in the ensemble"} <= labels
    for (one, a), (other, b) in itertools.combinations(shown, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(across, along) < 3, (one, other)
    for words, box in shown:
        assert box.x0 > 0, words
        assert box.x1 < page.x1, words
        assert box.y0 >= 0, words
        assert box.y1 < page.y1, words


@pytest.mark.parametrize(
    ("figure", "scale", "text"),
    [
        (Bounds(0.24555, 0.21792, 0.27318), 1, "0.246 [0.218, 0.273]"),
        (Bounds(0.948148, 0.925182, 0.971111), 100, "94.8 [92.5, 97.1]"),
        (Bounds(0.998431, 0.998011, 0.998851), 1, "0.9984 [0.9980, 0.9989]"),
        (Bounds(0.2, -0.1, 0.5), 1, "0.20 [-0.10, 0.50]"),
        (Bounds(2.345678), 1, "2.346"),
        (Bounds(1.0, 1.0, 1.0), 100, "100"),
        (Bounds(3e-9, 2e-9, 4e-9), 1, "0"),
        (Bounds(1234.6, 1200.0, 1269.0), 1, "1235 [1200, 1269]"),
        (Bounds(float("nan"), None, None), 1, "-"),
    ],
)
def test_a_figure_has_the_digits_its_interval_allows(figure: Bounds, scale: float, text: str) -> None:
    assert as_text(figure, scale) == text


@pytest.mark.slow
def test_paths_that_can_not_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, found in ((tmp_path / "file" / "r.png", "File exists"), (tmp_path / f"{'x' * 300}.png", "File name")):
        with pytest.raises(UsageError) as caught:
            Drawn(3).plot(path)
        assert str(caught.value).startswith(f"picture {path}: expected a place that can be written to; found {found}")
        assert str(caught.value).endswith(". Give another path.")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="expected a place that can be written to; found Is a directory"):
        Drawn(3).plot(tmp_path / "folder.png")
    with pytest.raises(UsageError) as caught:
        Drawn(3).plot(tmp_path / "r.jpg")
    assert (
        str(caught.value)
        == f"picture {tmp_path}/r.jpg: expected a name that ends in .png or .pdf or .svg; found 'r.jpg'."
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.slow
def test_an_older_picture_stays_if_drawing_fails(tmp_path: Path) -> None:
    path = Drawn(3).plot(tmp_path / "r.png")
    before = path.read_bytes()
    broken = Drawn(3)
    broken.drawing.pop("member_accuracy")
    with pytest.raises(KeyError):
        broken.plot(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.png"]


UNTOUCHED = """
import sys
import matplotlib
matplotlib.rcParams.update({"font.size": 31, "text.usetex": True, "savefig.dpi": 20, "axes.titlesize": 3})
def settings():
    # Reading "backend" would choose one.
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
before = settings()
from tests.support.reports import Drawn
Drawn(3).plot(sys.argv[1])
assert settings() == before
assert matplotlib.get_backend(auto_select=False) is None
assert "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.slow
def test_the_callers_settings_are_neither_used_nor_changed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", UNTOUCHED, str(tmp_path / "r.png")], cwd=root, capture_output=True, text=True,
        env={"PATH": "", "HOME": str(tmp_path), "MPLCONFIGDIR": get_cachedir()}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r.png").read_bytes() == Drawn(3).plot(tmp_path / "again.png").read_bytes()
