"""Pictures as SVG elements: the same bytes, ids of their own, images for many marks, and names that stay names."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from checkpoints_zoo.evaluation.drawing import MOST_MARKS, svg_element

SIZE = (3.0, 2.0)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def tags(svg: str) -> list[str]:
    return [element.tag for element in ElementTree.fromstring(svg).iter()]


def dots(count: int) -> str:
    return svg_element(lambda axes: axes.plot(range(count), range(count), "o"), "dots", SIZE)


def test_the_same_drawing_gives_the_same_bytes_and_another_name_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dots(3)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert dots(3) == first
    other = svg_element(lambda axes: axes.plot(range(3), range(3), "o"), "other", SIZE)
    ids = [{e.attrib["id"] for e in ElementTree.fromstring(svg).iter() if "id" in e.attrib} for svg in (first, other)]
    assert ids[0]
    assert ids[0].isdisjoint(ids[1])
    assert other.replace("other-", "dots-") == first


@pytest.mark.slow
def test_many_marks_become_an_image() -> None:
    few, many = dots(MOST_MARKS), dots(MOST_MARKS + 1)
    assert tags(few).count("use") > MOST_MARKS
    assert "image" not in tags(few)
    assert tags(many).count("image") == 1
    assert tags(many).count("use") < 50
    scatter = svg_element(lambda axes: axes.scatter(range(600), range(600)), "scatter", SIZE)
    assert tags(scatter).count("image") == 1

    def heat_map(axes: Axes) -> None:
        assert isinstance(axes.figure, Figure)
        axes.figure.colorbar(axes.imshow([[0.0, 1.0], [2.0, 3.0]]), ax=axes)

    assert tags(svg_element(heat_map, "heat", SIZE)).count("image") == 2


def test_powers_are_plain_text() -> None:
    def draw(axes: Axes) -> None:
        axes.plot([1e-9, 1], [2, 3])
        axes.set(xscale="log", yscale="log")

    found = texts(svg_element(draw, "powers", SIZE))
    assert "10⁻⁸" in found
    assert "2 × 10⁰" in found
    assert not [text for text in found if "$" in text]


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.text(st.characters(codec=None, exclude_characters="\n"), max_size=30))  # lone surrogates too
def test_a_name_is_drawn_as_it_is(name: str) -> None:
    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], label=f"key {name} end")
        axes.set(xlabel=f"axis {name} end", title="left to the page")
        axes.set_xticks([0, 1], [f"tick {name} end", "other"])

    found = texts(svg_element(draw, "names", SIZE))
    shown = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    for kind in ("key", "axis", "tick"):
        words = next(text for text in found if text.startswith(kind))
        assert " ".join(words.split()) == " ".join(f"{kind} {shown} end".split())
    assert "left to the page" not in found
