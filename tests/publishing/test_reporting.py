"""A report page: one well-formed file, the same bytes each time, that says why what is missing is not there."""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.populations.discrepancy import mmd, ns
from checkpoints_zoo.predictions import predict, predictions_of
from checkpoints_zoo.publishing.html_report import Page, markup, measurements, origin
from checkpoints_zoo.publishing.html_report.measurements import Scaling
from checkpoints_zoo.publishing.html_report.page import FigureBlock, NoteBlock
from tests.support.commands import run, values
from tests.support.report_pages import Tree, column, digits_page, draw_only, few, left_out, plain, table
from tests.support.scenarios import Built, build, load


@pytest.mark.slow
def test_every_figure_is_drawn_and_has_its_numbers_beneath() -> None:
    page = digits_page()
    figures = [block for part in page.parts for block in part.blocks if isinstance(block, FigureBlock)]
    assert [f.name for f in figures if not f.tables or not all(t.rows and t.sortable for t in f.tables)] == []
    assert len(page.panels) == 30
    for name, panel in page.panels.items():
        svg = ElementTree.fromstring(panel.svg)
        elements = list(svg.iter())
        assert {e.tag for e in elements} <= {"svg", "g", "defs", "path", "use", "text", "clipPath", "rect", "image"}
        assert all(e.attrib["id"].startswith(f"{name}-") for e in elements if "id" in e.attrib)
        assert all(e.attrib["href"].startswith(("#", "data:image/png;base64,")) for e in elements if "href" in e.attrib)
        assert len([e for e in elements if e.tag == "text" and e.text]) >= 6
        assert panel.svg.isprintable()


def test_the_page_is_one_well_formed_file() -> None:
    page = digits_page()
    tree = Tree(page.html)
    names = [given["id"] for _, given in tree.elements if "id" in given]
    assert Counter(names).most_common(1)[0][1] == 1
    links = [given["href"] or "" for tag, given in tree.elements if tag == "a"]
    assert {link.removeprefix("#") for link in links} <= set(names)
    assert all(link.startswith("#") for link in links)
    assert not any(key in given for _, given in tree.elements for key in ("src", "srcset", "onload", "onerror", "data"))
    assert not any(tag in {"link", "img", "iframe", "object", "base", "form"} for tag, _ in tree.elements)
    assert Counter(tag for tag, _ in tree.elements)["script"] == 1
    plots = [given for _, given in tree.elements if given.get("class") == "plot"]
    assert [p["id"] for p in plots] == list(page.panels)
    assert all(p["role"] == "img" and len(p["aria-label"] or "") > 20 for p in plots)
    policy = next(g["content"] for _, g in tree.elements if g.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "<!--" not in page.html
    assert len(page.html) < 5e5


def test_captions_say_what_is_shown_on_what() -> None:
    page = digits_page()
    figures = re.findall(r"<figcaption[^>]*>(.*?)</figcaption>", page.html)
    texts = [plain(f) for f in figures]
    assert [t.split(".")[0] for t in texts if t.startswith("Figure")] == [f"Figure {i}" for i in range(1, 9)]
    assert [t.split(".")[0] for t in texts if t.startswith("Table")] == [f"Table {i}" for i in range(1, 9)]
    assert texts[0].startswith(
        "Table 1. All figures. On digits/test, n = 90 inputs; out of distribution: photos/test, n = 200 inputs. [ ]:"
    )
    assert all("n = " in t for t in texts if t.startswith(("Figure 1", "Figure 2", "Figure 3", "Figure 4", "Figure 6")))
    # Means of 6 members have no interval, so no caption speaks of a bootstrap.
    assert not any("[" in row[2] for row in table(page, "all-figures").rows if len(row) > 1)
    assert not any("bootstrap" in t for t in texts)


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 32])
def test_captions_explain_the_intervals_that_are_shown(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    page = zoo.report_page(zoo.load("convnet-digits", n=members), few(), None, sizes=[1], subsets=2)
    captions = {
        number: plain(text)
        for number, text in re.findall(r"<figcaption[^>]*>(?:<b>)?(Table 1|Figure [13])\.(.*?)</figcaption>", page.html)
    }
    assert len(captions) == 3
    has_intervals = members == 32
    assert ("of the mean of members, its 95 % bootstrap interval" in captions["Table 1"]) == has_intervals
    assert ("by a bootstrap and a jackknife over members" in captions["Figure 1"]) == has_intervals
    assert ("diamond: all members" in captions["Figure 3"]) == has_intervals
    assert has_intervals or not any("[ ]" in text or "%" in text for text in captions.values())


def test_a_page_without_a_subtitle_has_no_dangling_colon() -> None:
    text = Page("mine: a population of 5 networks", "", (), {}).to_text()
    assert text.splitlines()[0] == "mine: a population of 5 networks"


SOME_PANELS = ("curve-nll", "reliability-diagram", "member-accuracy", "correlation-id")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Page]:
    """Four members, and their page, of which some panels are drawn."""
    built = build(tmp_path_factory.mktemp("four") / "out", members=range(4))
    with pytest.MonkeyPatch.context() as patch:
        draw_only(patch, *SOME_PANELS)
        patch.delenv("SOURCE_DATE_EPOCH", raising=False)
        return built, zoo.report_page(load(built), few(), few(1, labels=False), subsets=2)


@pytest.mark.slow
def test_the_remarks_of_the_report_stand_in_the_summary(four: tuple[Built, Page]) -> None:
    built, page = four
    remarks = zoo.evaluate(load(built), few(), few(1, labels=False), subsets=2).remarks
    assert remarks[0].startswith("No intervals of limits")
    (summary,) = [part for part in page.parts if part.name == "summary"]
    notes = [plain(str(block.text[0])) for block in summary.blocks if isinstance(block, NoteBlock)]
    assert notes[-len(remarks) :] == remarks


@pytest.mark.slow
def test_the_same_bytes_each_time_and_the_day_that_is_given(
    four: tuple[Built, Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, first = four
    draw_only(monkeypatch, *SOME_PANELS)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    second = zoo.report_page(load(built), few(), few(1, labels=False), subsets=2, path=tmp_path / "new" / "a.html")
    first.save(tmp_path / "b.htm")
    assert (tmp_path / "new" / "a.html").read_bytes() == (tmp_path / "b.htm").read_bytes()
    assert (tmp_path / "b.htm").read_bytes() == first.html.encode() == second.html.encode()
    assert first == second
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.htm", "new"]
    assert "page made" not in first.origin
    assert str(built.root.parent) not in first.html
    draw_only(monkeypatch)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert zoo.report_page(load(built, n=1), few(), None).origin["page made"] == "2023-11-14"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UsageError) as error:
        zoo.report_page(load(built, n=1), few(), None)
    assert str(error.value) == "SOURCE_DATE_EPOCH: expected seconds since 1970, as a whole number; found 'yesterday'."


@pytest.mark.slow
def test_one_member_and_no_images_out_of_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    page = zoo.report_page(load(build(tmp_path, members=[3])), few(), None)
    assert page.title == "tiny: a population of 1 network"
    assert left_out(page) == {
        "summary": ["Fewer than 3 members say nothing about intervals."],
        "sizes": ["Curves over sizes need two members or more."],
        "ood": ["No images out of distribution were given: --ood NAME (such as photos, svhn) draws these figures."],
        "pairs": ["Pairs need two members or more."],
        "symmetry": ["Two halves of the members need four members or more.", "One member has none to be aligned to."],
    }
    assert list(page.panels) == [
        "member-accuracy", "member-nll", "reliability-diagram", "confidences", "mass-minimum", "mass-excess",
    ]  # fmt: skip
    assert table(page, "all-figures").header == ("", "unit", "the member")
    Tree(page.html)


@pytest.mark.slow
def test_stored_predictions_need_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "out", members=range(4))
    members = load(built)
    for images in (few(), few(1, labels=False)):
        predict(members, images, tmp_path / "said")
    draw_only(monkeypatch, *SOME_PANELS)
    for file in (tmp_path / "out" / "shards" / "tiny").iterdir():
        file.unlink()
    inside, ood = (predictions_of(load(built), name, source=tmp_path / "said") for name in ("few-test", "far-test"))
    page = zoo.report_page(load(built), inside, ood)
    weights = "Weights were not read, as stored predictions were given; without --stored this part is here."
    assert left_out(page) == {"symmetry": [weights], "mass": [weights]}
    assert page.origin["command"] == (
        "zoo-cli report tiny --members 0-3 --source out --stored said --data few-test --ood far-test --out report.html"
    )
    report = zoo.evaluate(inside, None, ood)
    assert plain(table(page, "all-figures").rows[1][-1]) == as_text(report["accuracy"], 100)

    alone = zoo.report_page(inside, ood=ood)
    assert alone.panels == page.panels
    assert "How the members were trained is in their manifest, not in their predictions." in alone.html
    assert "command" not in alone.origin

    monkeypatch.chdir(tmp_path)
    draw_only(monkeypatch)
    stored = ("--source", "out", "--stored", "said", "--data", "few-test", "-o", "r.html", "--format", "json")
    result = run("report", "tiny", *stored, "--ood", "far-test")
    assert values(result)["command"] == page.origin["command"]
    assert result.stderr.splitlines() == [
        "tiny/few-test: stored predictions of 4 members …", "tiny: random ensembles of every size …",
        "tiny: pairs of members …",
    ]  # fmt: skip
    assert "ood" in {p["part"] for p in values(run("report", "tiny", *stored))["parts"] if p["left_out"]}


class Odd(nn.Module):
    """A net whose symmetries are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2).flatten(1)
        out: torch.Tensor = self.fc2(torch.sort(self.fc1(x), -1).values)
        return out


@pytest.mark.slow
def test_a_page_on_vision_transformers_leaves_out_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    page = zoo.report_page(zoo.load("vit-digits", n=4), few(), few(1, labels=False), subsets=2)
    assert left_out(page) == {}


@pytest.mark.slow
def test_a_network_without_known_symmetries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    built = build(tmp_path, members=range(4))
    page = zoo.report_page(zoo.load("tiny", source=tmp_path, architecture=Odd), few(), None, subsets=2)
    found = left_out(page)
    assert found["symmetry"][0].startswith("The symmetries of this network can't be derived. ")
    assert "sort" in found["symmetry"][0]
    assert len(found["mass"]) == 1
    before = mmd(load(built))
    assert table(page, "halves").header == ("layer", "weights", "MMD² (10⁻³)", "p")
    assert table(page, "halves").rows[-1][3] == f"{before.p_value:.3f}"
    with pytest.raises(UsageError):
        ns(zoo.load("tiny", source=tmp_path, architecture=Odd)[:2], load(built)[2:])


@pytest.mark.slow
def test_weights_of_many_members_are_those_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    monkeypatch.setattr(measurements, "LARGEST_MEMBER_COUNT", 5)
    members = load(build(tmp_path, members=range(7)))
    page = zoo.report_page(members, few(), None, subsets=2)
    assert "Of the first 5 of 7 members." in page.html
    assert column(page, "mass-numbers", "member") == [0, 1, 2, 3, 4]
    monkeypatch.setattr(measurements, "LARGEST_WEIGHT_BYTES", 3 * members._member_nbytes)
    assert len(measurements.measure_weights(members, "cpu", 0, print).members) == 3


@given(st.text())
def test_text_stays_text(text: str) -> None:
    shown = markup.one_line(text, markup.LARGEST_TEXT_LENGTH)
    written = markup.markup('<p title="{0}">{0}</p>', text)
    inside = written.removeprefix('<p title="').removesuffix("</p>")
    assert not set("<'") & set(inside)
    assert inside.count('"') == inside.count(">") == 1
    assert html.unescape(inside.partition('">')[2]).strip(" ") == shown
    assert markup.clean(written) is written
    assert markup.clean(text).isprintable()


def test_what_can_not_be_made(tmp_path: Path) -> None:
    built = build(tmp_path / "out", members=range(2))
    with pytest.raises(UsageError) as error:
        zoo.report_page(load(built), path="r.pdf")
    assert str(error.value) == "page r.pdf: expected a name that ends in .html; found 'r.pdf'."
    result = run("report", "tiny", "--source", built.root, "-o", "r.pdf")
    assert result.exit_code == 2
    assert "'r.pdf' does not end in .html or .htm." in result.stderr
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="expected a place that can be written to"):
        Page("", "", [], {}).save(tmp_path / "file" / "r.html")
    inside = predict(load(built), few(), tmp_path / "said")
    with pytest.raises(UsageError) as error:
        zoo.report_page(load(built), inside, few(1))
    assert str(error.value) == (
        "images for predictions tiny/few-test: expected stored predictions on them, since no members are run; found "
        "images. Give predictions for all, or images for all."
    )
    with pytest.raises(UsageError) as error:
        zoo.report_page(load(built, n=1), inside)
    assert str(error.value) == (
        "predictions tiny/few-test for tiny: expected those of the same members with the same weights, in the same "
        "order; found members 0-1. Take both with `members.predictions(…)` from one selection of members."
    )
    with pytest.raises(UsageError, match="labels of the classes"):
        zoo.report_page(load(built), few(labels=False))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"within": {"nonsense": 0.1}}, "limit of figure 'nonsense': expected one of accuracy, nll, "),
        ({"within": {"auroc": 0.1}}, "limit of figure 'auroc': expected one of accuracy, nll, "),
        ({"within": {"nll": -1}}, "distance of nll from its limit: expected a number above 0, or "),
        ({"held_out": 0.2}, "held_out: expected temperature=True with it; found temperature=False."),
        ({"temperature": True, "held_out": 1.5}, "share of the inputs held out: expected above 0 and below 1; found"),
        ({"temperature": True, "held_out": "digits/train"}, "images digits/train held out for the temperature: exp"),
        ({"sizes": [0]}, "size of an ensemble: expected a whole number from 1 to 2; found 0."),
        ({"sizes": 5}, "sizes of ensembles: expected several, such as [1, 8]; found 5."),
        ({"subsets": 1}, "subsets: expected a whole number from 2; found 1."),
        ({"seed": 0.5}, "seed: expected a whole number of at most 64 bits; found 0.5."),
        ({"device": "nonsense"}, "device 'nonsense': expected a device of this machine; found "),
    ],
)
def test_what_can_not_be_measured_is_refused_before_anything_is_run(
    tmp_path: Path, asked: dict[str, Any], text: str
) -> None:
    said: list[str] = []
    with pytest.raises(UsageError) as error:
        zoo.report_page(load(build(tmp_path, members=range(2))), few(), None, **asked, say=said.append)
    assert str(error.value).startswith(text)
    assert said == []


@pytest.mark.slow
def test_the_command_makes_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch, "member-accuracy")
    page = zoo.report_page(zoo.load("convnet-digits", n=2), ood=None, sizes=[1], seed=5)
    command = page.origin["command"]
    assert command.startswith("zoo-cli report 'embedded@")
    assert command.endswith("' --ood none --sizes 1 --seed 5 --out report.html")
    words = [w.strip("'") for w in command.split()[2:]]
    result = run("report", *words[:-1], tmp_path / "a.html")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].split() == ["part", "figures", "tables", "left", "out"]
    complete = replace(digits_page(), path=tmp_path / "b.html")
    assert not any(left_out(complete).values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("checkpoints_zoo.publishing.html_report.report_page", lambda *_, **__: complete)
        table_lines = run("report", "convnet-digits", "--out", tmp_path / "b.html").stdout.splitlines()
    assert table_lines[0].split() == ["part", "figures", "tables"]
    assert result.stdout.splitlines()[-1].startswith(f"{tmp_path}/a.html, ")
    assert (tmp_path / "a.html").read_bytes() == page.html.encode()


def test_the_command_names_the_device_and_not_what_it_has_no_option_for() -> None:
    members, asked = zoo.load("convnet-digits", n=2), Scaling(False, None, None)

    def written(subsets: int, device: torch.device) -> str:
        return origin.command_of(members, None, "photos", None, asked, subsets, device, 0)

    plain = written(100, torch.device("cpu"))
    assert plain.endswith("' --ood photos --out report.html")
    assert written(100, torch.device("cuda", 1)) == plain.replace(" --out", " --device cuda:1 --out")
    assert written(99, torch.device("cpu")) == ""
