"""The picture of all pairs: what is drawn are their numbers, and no text covers another."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.text import Text
from PIL import Image

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import MATPLOTLIB_STYLE
from checkpoints_zoo.populations import pairwise_information
from checkpoints_zoo.populations.divergence import Pairs
from checkpoints_zoo.populations.pairwise_information import Pairwise, summarise_pairs


@cache
def pairs(members: int, ood: bool = True) -> Pairwise:
    random = np.random.default_rng(members)

    def matrix(low: float, spread: float) -> torch.Tensor:
        half = torch.tensor(random.gamma(9, spread, (members, members))).triu(1) + low
        return (half.triu(1) + half.triu(1).T).double()

    sets = [Pairs(matrix(0.1, 0.001), matrix(0.2, 0.01), 10_000), Pairs(matrix(0.16, 0.01), matrix(0.5, 0.01), 26_032)]
    found = summarise_pairs(*sets[: 1 + ood], ids=range(100, 100 + members))
    names = {"collection": "resnet18-cifar100", "data": "cifar100/test 0123", "ood": "svhn/test 4567" if ood else ""}
    return Pairwise(**(found.__dict__ | names))


@cache
def sketched(members: int, ood: bool = True) -> tuple[Pairwise, dict[str, Any]]:
    found = pairs(members, ood)
    return found, {axes.get_label(): axes for axes in pairwise_information.draw_pairwise(found).axes}


def upper(matrix: torch.Tensor) -> np.ndarray:
    return matrix.numpy()[np.triu_indices(len(matrix), 1)]


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 3, 12, 90])
def test_histograms_hold_every_pair(members: int) -> None:
    found, axes = sketched(members)
    assert found.outside is not None
    for name, matrix in (("id", found.inside), ("ood", found.outside)):
        bars, values = axes[name].patches, upper(matrix.information)
        sides = [values.min() - 1e-9, *(bar.get_x() for bar in bars[1:]), values.max() + 1e-9]
        assert [bar.get_height() for bar in bars] == np.histogram(values, sides)[0].tolist()
        assert sum(bar.get_height() for bar in bars) == len(values)
        assert axes[name].lines[0].get_xdata()[0] == pytest.approx(values.mean())
        assert axes[name].get_legend().get_texts()[0].get_text().startswith("mean 0.")


@pytest.mark.parametrize("members", [3, 12])
def test_dots_are_pairs(members: int) -> None:
    found, axes = sketched(members)
    assert found.outside is not None
    dots = axes["scatter"].lines[0]
    np.testing.assert_array_equal(dots.get_xdata(), upper(found.inside.information))
    np.testing.assert_array_equal(dots.get_ydata(), upper(found.outside.information))
    r = np.corrcoef(dots.get_xdata(), dots.get_ydata())[0, 1]
    text = axes["scatter"].get_legend().get_texts()[0].get_text()
    assert float(text.split(" ")[1]) == pytest.approx(r, abs=0.06)


def test_many_pairs_are_counted() -> None:
    counted = sketched(90)[1]["scatter"].collections[0].get_array()
    assert counted.sum() == 90 * 89 / 2
    assert len(sketched(90)[1]["scatter"].lines) == 1  # the key's


@pytest.mark.parametrize("ood", [True, False])
def test_the_matrix_is_the_disagreement(ood: bool) -> None:
    found, axes = sketched(12, ood)
    image = axes["disagreement"].images[0]
    drawn = np.ma.filled(image.get_array(), np.nan)
    off = ~np.eye(12, dtype=bool)
    np.testing.assert_allclose(drawn[off], 100 * found.inside.disagreement.numpy()[off])
    assert np.isnan(drawn[~off]).all()
    assert image.get_clim() == pytest.approx((drawn[off].min(), drawn[off].max()))
    assert set(axes) - {"<colorbar>"} == ({"id", "ood", "scatter", "disagreement"} if ood else {"id", "disagreement"})


def test_the_title_and_the_foot_say_what_it_is() -> None:
    figure = pairwise_information.draw_pairwise(pairs(12))
    assert figure.get_suptitle() == "resnet18-cifar100: 66 pairs of 12 members"
    assert figure.get_supxlabel() == (
        "cifar100/test, 10,000 inputs; out of distribution: svhn/test, 26,032 inputs."
        " [ ]: 95 % intervals by a jackknife over members."
    )
    few = pairwise_information.draw_pairwise(summarise_pairs(pairs(2).inside))
    assert few.get_suptitle() == "1 pair of 2 members"
    assert few.get_supxlabel() == "10,000 inputs. Too few or too like members for intervals."


def test_pairs_that_are_all_alike() -> None:
    same = torch.zeros(4, 4, dtype=torch.float64)
    axes = {
        a.get_label(): a
        for a in pairwise_information.draw_pairwise(summarise_pairs(Pairs(same, same, 5), Pairs(same, same, 5))).axes
    }
    assert [bar.get_height() for bar in axes["id"].patches] == [6]
    assert axes["scatter"].get_legend().get_texts()[0].get_text() == "correlation -"


@pytest.mark.slow
@pytest.mark.parametrize(("members", "ood"), [(2, True), (5, False), (90, True)])
def test_no_text_covers_another(members: int, ood: bool) -> None:
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(MATPLOTLIB_STYLE)
        figure = pairwise_information.draw_pairwise(pairs(members, ood))
        figure.draw_without_rendering()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        least, most = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {t.label1 for t in ticks if not least <= t.get_loc() <= most}
        hidden |= {t.label2 for t in ticks if not least <= t.get_loc() <= most}
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
def test_a_png_of_the_same_bytes_each_time(tmp_path: Path) -> None:
    found = pairs(12, ood=False)
    path = found.plot(tmp_path / "new" / "pairs.png")
    assert path == tmp_path / "new" / "pairs.png"
    assert path.read_bytes() == found.plot(tmp_path / "again.png").read_bytes()
    with Image.open(path) as image:
        assert (image.format, image.size) == ("PNG", (1470, 675))
        assert image.info["Title"] == "resnet18-cifar100: 66 pairs of 12 members"


def test_what_can_not_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        pairs(12).plot(tmp_path / "pairs.jpg")
    assert str(error.value) == (
        f"picture {tmp_path}/pairs.jpg: expected a name that ends in .png or .pdf or .svg; found 'pairs.jpg'."
    )
    one = Pairwise(**(pairs(2).__dict__ | {"ids": (0,)}))
    with pytest.raises(UsageError) as error:
        one.plot(tmp_path / "pairs.png")
    assert str(error.value) == f"picture {tmp_path}/pairs.png: expected two members or more; found 1."
    assert not list(tmp_path.iterdir())
