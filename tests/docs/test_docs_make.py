"""Pages are made by one command, stale ones are named, and the tracer counts function bodies alone."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.make import __main__ as make
from docs.make import architecture, pictures, rooms
from docs.make.marks import fill
from docs.make.trace import Tracer, trace
from docs.make.ways import WAYS, traced

MARKED = "before\n<!-- a -->\nold\n<!-- end of a -->\nafter\n"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder of two made pages, one of them stale."""
    for name, text in {"fresh.md": "new\n", "stale.md": "old\n"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(make, "PAGES", {"fresh.md": lambda: "new\n", "stale.md": lambda: "new\n"})
    return tmp_path


def test_stale_pages_are_named_and_left(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["--check"], pages) == 1
    assert capsys.readouterr().out == "stale.md is stale: run `python -m docs.make stale.md`\n"
    assert (pages / "stale.md").read_text() == "old\n"
    assert make.main(["fresh.md", "--check"], pages) == 0


def test_stale_pages_are_written(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main([], pages) == 0
    assert capsys.readouterr().out == "wrote stale.md\n"
    assert (pages / "stale.md").read_text() == "new\n"
    assert make.main(["--check"], pages) == 0


def test_a_page_that_nobody_makes(pages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make.main(["none.md"], pages)
    assert "no such page: none.md" in capsys.readouterr().err


def test_every_made_page_is_there() -> None:
    assert all((make.ROOT / path).is_file() for path in make.PAGES)


@pytest.mark.slow
def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    written = architecture.PAGE.read_text(encoding="utf-8")
    assert f"<!-- rooms -->\n{rooms.room_table()}\n<!-- end of rooms -->" in written
    assert architecture.PAGE.with_name("rooms.svg").read_text(encoding="utf-8") == rooms.draw_rooms(), "run `docs.make`"


@pytest.mark.slow
def test_the_pictures_are_drawn(tmp_path: Path) -> None:
    pictures.draw_pictures(tmp_path, subsets=5, lines=2)
    docs = architecture.PAGE.parent
    for path in sorted(tmp_path.iterdir()):
        drawn, written = (ElementTree.parse(folder / path.name).getroot() for folder in (tmp_path, docs))
        assert drawn.get("viewBox") == written.get("viewBox")
        assert any(f"({path.name})" in page.read_text(encoding="utf-8") for page in docs.glob("*.md"))
    assert {path.name for path in docs.glob("*.svg")} == {path.name for path in tmp_path.iterdir()} | {"rooms.svg"}


def test_parts_stand_between_marks() -> None:
    assert fill(MARKED, {"a": "new\n"}) == MARKED.replace("old", "new")
    assert fill(MARKED, {"a": "old"}) == MARKED
    for page in ("", MARKED * 2, MARKED.replace("end of", "")):
        with pytest.raises(ValueError, match="<!-- a --> and <!-- end of a --> once each"):
            fill(page, {"a": "new"})


FILES = {
    "__init__.py": "",
    "called.py": "def one():\n    return [x for x in (1, 2)]\ndef two():\n    return one()\n",
    "defined.py": "from traced_package.used import value\nclass A:\n    x = [value() for _ in 'ab']\n",
    "used.py": "def value():\n    return 1\n",
    "threaded.py": "def work():\n    pass\n",
    "made.py": "class Made:\n    def __init__(self):\n        self.all = list(x for x in (1, 2))\n",
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a package to trace; what this session has imported of it is forgotten in the end."""
    folder = tmp_path / "traced_package"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("docs.make.trace.PACKAGE", "traced_package")
    for name in FILES:
        monkeypatch.delitem(sys.modules, f"traced_package.{name.removesuffix('.py')}", raising=False)
    return folder


def test_bodies_of_functions_are_counted_in_their_order(package: Path) -> None:
    code = "from traced_package import called, made\nmade.Made()\ncalled.two()\ncalled.one()"
    assert list(trace(code).items()) == [("made.py", "Made.__init__"), ("called.py", "two")]


def test_what_an_import_runs_is_not_counted(package: Path) -> None:
    """Class bodies, comprehensions in them, and functions that these call."""
    assert trace("import traced_package.defined") == {}
    assert trace("traced_package.used.value()", "import traced_package.used") == {"used.py": "value"}


def test_threads_are_counted(package: Path) -> None:
    code = "t = threading.Thread(target=work)\nt.start()\nt.join()"
    ready = "import threading\nfrom traced_package.threaded import work"
    assert trace(code, ready) == {"threaded.py": "work"}


def test_a_tracer_stops(package: Path) -> None:
    before, tracer = sys.getprofile(), Tracer()
    with pytest.raises(ZeroDivisionError), tracer.tracing():
        1 / 0  # noqa: B018
    assert sys.getprofile() is None or sys.getprofile() is before


PROJECT = """
[tool.importlinter]
root_package = "checkpoints_zoo"
[[tool.importlinter.contracts]]
name = "rooms"
type = "layers"
layers = ["checkpoints_zoo.cli", "checkpoints_zoo.images | (checkpoints_zoo.symmetry)", "checkpoints_zoo.errors"]
"""


def test_the_order_of_rooms_is_that_of_the_contract() -> None:
    assert rooms.order(PROJECT) == [["errors"], ["images", "symmetry"], ["cli"]]
    with pytest.raises(LookupError, match="a contract of the type layers"):
        rooms.order("[project]")


def test_the_picture_leaves_out_implied_arrows(tmp_path: Path) -> None:
    for name, text in {
        "errors.py": '"""The errors. All of them."""\n',
        "images/__init__.py": '"""Image data,\nby name.\n\nMore."""\n',
        "images/named.py": "from checkpoints_zoo.errors import ZooError\n",
        "symmetry/__init__.py": "",
        "cli/__init__.py": "def f():\n    import checkpoints_zoo.errors\n    from checkpoints_zoo import images\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    layers = rooms.order(PROJECT)
    arrows = rooms.imports(tmp_path, layers)
    assert arrows == {"errors": set(), "images": {"errors"}, "symmetry": set(), "cli": {"errors", "images"}}
    drawn = rooms.picture(layers, rooms.reduced(arrows))
    boxes = ElementTree.fromstring(drawn).iterfind("{*}text")
    places = {box.text: (box.get("x"), int(box.get("y", ""))) for box in boxes}
    assert places["errors"][1] > places["images"][1] > places["cli"][1]
    assert places["symmetry"][1] == places["errors"][1]  # it imports nothing
    assert drawn.count('class="arrow"') == 2  # from cli to images, from images to errors
    assert rooms.says(tmp_path, "errors") == "The errors."
    assert rooms.says(tmp_path, "images") == "Image data, by name."


@pytest.mark.slow
def test_the_ways_of_a_datum_are_those_of_the_page() -> None:
    written = architecture.PAGE.read_text(encoding="utf-8")
    for name, files in zip(WAYS, traced(*WAYS.values()), strict=True):
        assert f"<!-- {name} -->\n{architecture.table(files)}\n<!-- end of {name} -->" in written, name


def test_the_page_says_what_is_traced() -> None:
    written = architecture.PAGE.read_text(encoding="utf-8")
    assert all(f"`{way.title}`" in written for way in WAYS.values())
