"""The leaderboard: methods in order, intervals, equivalent sizes and citations, in one well-formed file."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.comparing.comparison import Comparison, Row
from checkpoints_zoo.methods.comparing.equivalent_size import EquivalentSize
from checkpoints_zoo.methods.comparing.estimates import Estimate


def row(method: str, mode: str, variation: float) -> Row:
    figures = {
        "total_variation": Estimate(variation, variation - 0.01, variation + 0.01), "agreement": Estimate(0.9),
        "accuracy": Estimate(0.985, 0.98, 0.99), "nll": Estimate(0.051), "mmd": Estimate(0.2, p=0.01),
    }  # fmt: skip
    return Row(method, mode, 4, 24, figures, worth={"nll": EquivalentSize(2.4, 1.1, 80.0, 64, 0.04)})


COMPARISON = Comparison(
    "mlp-digits", "hf://datasets/me/zoo@" + "a" * 40 + "/mlp-digits-hmc#0-63~00000000", 64, "digits/test 0123", "",
    (row("swag", "multi", 0.3), row("<b>mine</b>", "one", 0.1), row("reference", "members", 0.02)),
    methods={"swag": {"title": "SWAG", "source": "Maddox et al. 2019", "draws": "0123/swag#0-9~12345678"},
             "<b>mine</b>": {"draws": "mine#1", "cite_as": "Me, 2026"}},
    settings={"cite_as": "Izmailov et al. 2021", "permutations": 9, "versions": {"torch": "2"}},
)  # fmt: skip


class Cells(HTMLParser):
    """The texts of all table rows of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.within = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        self.within = tag in ("td", "th") or (self.within and tag == "small")
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.within = self.within and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.within:
            self.rows[-1][-1] += data


def test_methods_stand_in_the_order_of_their_total_variation(tmp_path: Path) -> None:
    page = zoo.leaderboard_page(COMPARISON, tmp_path / "a" / "page.html")
    assert page.title == "Methods against 64 members of mlp-digits-hmc"
    assert page.path is not None
    html = page.path.read_text()
    rows = Cells(html).rows
    assert rows[0] == ["method", "mode", "runs × draws", "TV (%) ↓", "Agr (%) ↑", "MMD ↓", "Acc (%) ↑", "NLL ↓"]
    assert [cells[0] for cells in rows[1:4]] == ["<b>mine</b>", "swag", "reference"]
    assert rows[1] == [
        "<b>mine</b>",
        "one mode",
        "4 × 24",
        "10.00 [9.00, 11.00]",
        "90",
        "0.2",
        "98.50 [98.00, 99.00]",
        "0.051",
    ]
    assert rows[4][-1] == "NLL"
    assert rows[5][-1] == "2.4 [1.1, >64]"
    assert "<b>mine</b>" not in html
    for text in ("Izmailov et al. 2021", "SWAG, Maddox et al. 2019; draws 0123/swag#0-9~12345678", "Me, 2026; mine#1"):
        assert text in html
    assert zoo.leaderboard_page(COMPARISON).html == html


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a name that ends in .html"):
        zoo.leaderboard_page(COMPARISON, tmp_path / "page.txt")
