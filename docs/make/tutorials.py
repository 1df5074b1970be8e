"""The tutorials as notebooks: each page of docs/tutorials is turned into one, and run from its top to its end.

`python -m docs.make --measure tutorials` writes the notebooks anew, with what their cells give. A publication
goes to a Hub on the loopback interface.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
LONGEST_CELL = 300  # seconds, on a busy machine


def pages() -> list[Path]:
    """Return the tutorials' Markdown pages."""
    return sorted(FOLDER.glob("*.md"))


def convert(page: Path) -> nbformat.NotebookNode:
    """Turn a Markdown page into a notebook that has not run; return the notebook. Equal pages give equal notebooks."""
    book: nbformat.NotebookNode = jupytext.reads(page.read_text(encoding="utf-8"), fmt="md")
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"
    return book


def run(book: nbformat.NotebookNode) -> None:
    """Run a notebook in an empty folder, and keep what its cells give.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    from tests.hub import WRITER, Server

    with TemporaryDirectory() as folder, Server(Path(folder) / "hub") as hub:
        home, work = Path(folder) / "home", Path(folder) / "work"
        work.mkdir()
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        client = NotebookClient(
            book, timeout=LONGEST_CELL, record_timing=False, coalesce_streams=True,
            resources={"metadata": {"path": str(work)}},
        )  # fmt: skip
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{folder}/kernel"  # files, not ports that other programs can reach
        client.execute(env=environment)
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        if cell.cell_type == "code":  # warnings and progress name folders of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]


def write_notebooks() -> None:
    """Run all tutorials, and write the notebooks beside their pages."""
    for page in pages():
        book = convert(page)
        run(book)
        nbformat.write(book, page.with_suffix(".ipynb"))  # type: ignore[no-untyped-call]
