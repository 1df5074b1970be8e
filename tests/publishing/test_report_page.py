"""The report page in a browser: every figure is drawn, nothing is said on the console, names stay text."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.publishing.html_report import Page
from tests.conftest import CI
from tests.support.scenarios import build

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120
EVIL = "</script><script>document.title='pwned';throw 1</script><b>\"&'"
CONSOLE = re.compile(r'CONSOLE[:(]\d+\)?\] "(.*?)", source:', re.DOTALL)


def browser() -> str:
    """Find a browser; without one the test is skipped, or fails where CI=true."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        why = f"the report page can't be opened: no browser ({', '.join(BROWSERS)}) is on the PATH"
        if CI:
            pytest.fail(f"{why}, and no test may be skipped for that when CI=true")
        pytest.skip(why)
    return found


@dataclass
class Element:
    """What lies inside an element of the page after its scripts have run."""

    classes: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str) -> int:
        return sum(name in c.split() for c in self.classes)


class Seen(HTMLParser):
    """The classes of elements inside each plot, and their texts by the class of the element they are in."""

    VOID = frozenset({"br", "col", "hr", "img", "input", "link", "meta"})

    def __init__(self, plots: list[str]) -> None:
        super().__init__()
        self.plots = {name: Element() for name in plots}
        self.open: list[tuple[str, str, str]] = []  # tag, class, plot
        self.scripts = 0
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        inside = self.open[-1][2] if self.open else ""
        name = given.get("id") if given.get("id") in self.plots else inside
        self.scripts += tag == "script"
        if inside:
            self.plots[inside].classes.append(given.get("class") or "")
        if tag not in self.VOID:
            self.open.append((tag, given.get("class") or "", name or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1][0] in {"script", "style"}:
            return
        _, kind, plot = self.open[-1]
        self.text += data
        if plot:
            named = kind or next((c for _, c, _ in reversed(self.open) if c), "")
            self.plots[plot].texts.setdefault(named, []).append(data)


def shown(file: Path, folder: Path, plots: list[str]) -> tuple[Seen, list[str]]:
    """Open a file in a browser of its own; return what it shows, and what was said on its console."""
    command = [
        browser(), "--headless=new", "--no-sandbox",  # the page is ours, and root and most containers have no sandbox
        "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--no-first-run",
        "--virtual-time-budget=5000", "--window-size=1100,1000", "--enable-logging=stderr", "--v=0", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        out, said = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said.decode(errors="replace")[-2000:]
    seen = Seen(plots)
    seen.feed(out.decode())
    return seen, CONSOLE.findall(said.decode(errors="replace"))


def problems(page: Page, seen: Seen, messages: list[str]) -> Iterator[str]:
    """Yield what is wrong with a page in the browser, a sentence each."""
    yield from (f"console: {message}" for message in messages)
    for name, panel in page.panels.items():
        found = seen.plots[name]
        if not found.count("main-svg"):
            yield f"{name}: not drawn"
            continue
        for axis, kind in (("xaxis", "xtitle"), ("yaxis", "ytitle")):
            wanted, drawn = panel.layout[axis]["title"]["text"], "".join(found.texts.get(kind, []))
            if wanted != drawn:
                yield f"{name}: {axis} is named {drawn!r}, not {wanted!r}"
        marks = sum(
            len(t["x"])
            for t in panel.traces
            if t["type"] == "bar" or "markers" in t.get("mode", "")  # a bar or a dot each
        )
        marks -= sum(t["type"] == "bar" and y is None for t in panel.traces for y in t.get("y", ()))
        if found.count("point") + found.count("points") < marks and found.count("point") < marks:
            yield f"{name}: {found.count('point')} marks drawn, not {marks}"
        lines = sum(t["type"] == "scatter" and "lines" in t["mode"] for t in panel.traces)
        if found.count("js-line") < lines:
            yield f"{name}: {found.count('js-line')} lines drawn, not {lines}"
        if any(t["type"] == "heatmap" for t in panel.traces) and not found.count("hm"):
            yield f"{name}: no cells drawn"
        keys = [t["name"] for t in panel.traces if panel.layout["showlegend"] and t.get("showlegend", True)]
        if found.count("legendtext") != len(keys):
            yield f"{name}: {found.count('legendtext')} keys drawn, not {len(keys)}"


def hostile(root: Path, members: int, count: int) -> tuple[zoo.Collection, ImageData, ImageData]:
    """Write members whose files say what a page must not run; return them, and images of both kinds."""
    built = build(root, members=range(members))
    built.description |= {"title": EVIL, "licence": EVIL, "citation": EVIL}
    built.description["classes"] = [f"{EVIL}{c}" for c in range(10)]
    built.write()
    pixels = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inside = ImageData(EVIL, EVIL, pixels, torch.arange(count) % 10, tuple(built.description["classes"]))
    return zoo.load("tiny", source=built.root), inside, ImageData(EVIL, "other", 255 - pixels)


@pytest.mark.slow
def test_every_figure_is_drawn_and_what_files_say_stays_text(tmp_path: Path) -> None:
    members, inside, ood = hostile(tmp_path / "out", 8, 60)
    page = zoo.report(members, inside, ood, subsets=4, path=tmp_path / "report.html")
    assert page.path is not None
    seen, messages = shown(page.path, tmp_path, list(page.panels))
    assert list(problems(page, seen, messages)) == []
    assert seen.scripts == 3
    assert seen.text.count(EVIL) >= 5
    assert "<title>tiny: a population of 8 networks</title>" in page.html

    assert len(page.panels) == 30
    assert seen.plots["curve-accuracy"].texts["ytitle"] == ["accuracy (%)"]
    assert seen.plots["curve-accuracy"].texts["xtick"] == ["1", "2", "4", "8"]
    assert seen.plots["mass-minimum"].count("point") == 8
    assert seen.plots["pairs-scatter"].count("point") == 28
    assert set(seen.plots["halves-apart"].texts["ytick"]) == {"conv1", "conv2", "fc1", "fc2", "all"}


BARE = """<!doctype html><meta charset="utf-8"><p>Text.</p><script>{}</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("nonsense();", "Uncaught ReferenceError: nonsense is not defined"),
        ("Promise.reject(new Error('late'));", "Uncaught (in promise) Error: late"),
        ("setTimeout(() => { throw new Error('later'); }, 50);", "Uncaught Error: later"),
    ],
    ids=["error", "promise", "timer"],
)
def test_a_broken_page_would_be_noticed(tmp_path: Path, script: str, said: str) -> None:
    file = tmp_path / "broken.html"
    file.write_text(BARE.format(script))
    _, messages = shown(file, tmp_path, [])
    assert messages == [said]


@pytest.mark.slow
def test_a_page_with_a_broken_figure_or_a_changed_script_would_be_noticed(tmp_path: Path) -> None:
    page = zoo.report(zoo.load("convnet-digits", n=1), ood=None)
    broken = tmp_path / "broken.html"
    wrong = '"mass-excess":{"data":[{"type":"bar"'
    assert page.html.count(wrong) == page.html.count('"use strict";\n(function () {') == 1
    broken.write_text(page.html.replace(wrong, '"mass-excess":{"data":[{"type":"scattergl"'))
    found = list(problems(page, *shown(broken, tmp_path, list(page.panels))))
    assert found
    assert all(what.startswith(("mass-excess: ", "console: ")) for what in found)

    broken.write_text(page.html.replace('"use strict";\n(function () {', '"use strict";\n(function () { '))
    found = list(problems(page, *shown(broken, tmp_path, list(page.panels))))
    assert [what for what in found if what.endswith(": not drawn")] == [f"{name}: not drawn" for name in page.panels]
    assert any("Content Security Policy" in what for what in found)
