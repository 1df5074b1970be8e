"""The tutorials cannot go stale: the notebooks have the cells of their pages, are small, and run from top to bottom."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import nbformat
import pytest

from docs.make.tutorials import convert, pages, run

LARGEST_NOTEBOOK = 300_000  # bytes
PAGES = {page.stem: page for page in pages()}
# Five random ensembles of each size, and a page without its thirty pictures, which other pages' tests draw.
LITTLE = """
from checkpoints_zoo.evaluation import evaluating
from checkpoints_zoo.publishing.html_report import page
evaluating.evaluate.__kwdefaults__["subsets"] = 5
page.svg_element = lambda draw, name, size: "<svg></svg>"
"""


def code(book: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in book.cells if cell.cell_type == "code"]


def test_there_are_three() -> None:
    assert list(PAGES) == ["first-ensemble", "weights", "your-checkpoints"]


@pytest.mark.parametrize("name", PAGES)
def test_the_notebook_is_its_page(name: str) -> None:
    path = PAGES[name].with_suffix(".ipynb")
    written, made = nbformat.read(path, as_version=4), convert(PAGES[name])
    assert [(cell.cell_type, cell.source) for cell in written.cells] == [
        (cell.cell_type, cell.source) for cell in made.cells
    ], "run `python -m docs.make --measure tutorials`"
    assert path.stat().st_size < LARGEST_NOTEBOOK
    assert all(cell.execution_count for cell in written.cells if cell.cell_type == "code")
    text = path.read_text(encoding="utf-8")
    assert str(Path.home()) not in text
    assert "/tmp/" not in text


@pytest.mark.slow
def test_the_notebooks_run() -> None:
    """In one kernel, which forgets all names between two of them and measures little; a cell that fails raises an error
    here."""
    books = [convert(page) for page in PAGES.values()]
    for number, book in enumerate(books):
        book.cells.insert(0, nbformat.v4.new_code_cell("%reset -f" if number else LITTLE.strip()))
    whole = nbformat.from_dict({**books[0], "cells": [cell for book in books for cell in book.cells]})
    for number, cell in enumerate(whole.cells):
        cell.id = f"cell-{number}"
    written = code(whole)
    run(whole)
    assert code(whole) == written
    cells = iter(whole.cells)
    for book in books:
        assert any(cell.get("outputs") for cell in islice(cells, len(book.cells)))
