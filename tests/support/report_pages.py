"""Report pages and what is read from them, shared by their tests."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest
import torch
from matplotlib.axes import Axes

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation.drawing import svg_element
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.publishing.html_report import Page
from checkpoints_zoo.publishing.html_report.page import FigureBlock, TableBlock
from tests.support.few_digits import some


def draw_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leave the panels of pages without a picture, but those of some names: a picture takes a fifth of a second."""

    def drawn(draw: Callable[[Axes], None], name: str, size: tuple[float, float]) -> str:
        return svg_element(draw, name, size) if name in names else "<svg></svg>"

    monkeypatch.setattr("checkpoints_zoo.publishing.html_report.page.svg_element", drawn)


@cache
def digits_page() -> Page:
    return zoo.report_page(zoo.load("convnet-digits", n=6), some("test", 90), photos(), subsets=4)


@cache
def photos() -> ImageData:
    whole = zoo.images.load("photos")
    return replace(whole, images=whole.images[:200])


def few(seed: int = 0, labels: bool = True) -> ImageData:
    pixels = torch.randint(256, (24, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    classes = tuple("0123456789") if labels else ()
    return ImageData("few" if labels else "far", "test", pixels, torch.arange(24) % 10 if labels else None, classes)


def table(page: Page, name: str) -> TableBlock:
    blocks = [block for part in page.parts for block in part.blocks]
    tables = [t for block in blocks for t in (block.tables if isinstance(block, FigureBlock) else [block])]
    return next(t for t in tables if isinstance(t, TableBlock) and t.name == name)


def column(page: Page, name: str, header: str) -> list[float]:
    """The numbers in a column of a table."""
    found = table(page, name)
    at = found.header.index(header)
    return [float(plain(row[at]).replace(",", "")) for row in found.rows]


def plain(cell: str) -> str:
    return html.unescape(re.sub("<[^>]*>", "", cell)).replace("−", "-")


class Tree(HTMLParser):
    """The elements of a page, which must nest."""

    VOID = frozenset({"br", "col", "hr", "img", "link", "meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def left_out(page: Page) -> dict[str, list[str]]:
    return {p.name: found for p in page.parts if (found := p.values()["left_out"])}
