"""The report page in a browser, as wide as a desktop's and a phone's window: figures are drawn, values can be seen."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.images import ImageData
from tests.conftest import CI
from tests.support.report_pages import draw_only
from tests.support.scenarios import build

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 300
EVIL = "</script><script>document.title='pwned';throw 1</script><b>\"&'$\\frac$"
CONSOLE = re.compile(r'CONSOLE[:(]\d+\)?\] "(.*?)", source:', re.DOTALL)
# A page that shows another one in frames of two widths, and writes down what their measurements say.
FRAMES = """<!doctype html><meta charset="utf-8"><title>frames</title><pre id="said"></pre>
<iframe src="{0}" style="width:1400px;height:900px"></iframe>
<iframe src="{0}" style="width:390px;height:800px"></iframe>
<script>addEventListener("message", (e) => {{ document.getElementById("said").append(e.data + "\\n"); }});</script>"""
MEASURE = """
addEventListener("load", () => {
  const wide = document.documentElement.clientWidth, plots = {}, tables = {}, sorted = {};
  for (const details of document.querySelectorAll("details")) details.open = true;
  for (const plot of document.querySelectorAll(".plot")) {
    const svg = plot.querySelector("svg"), box = svg.getBoundingClientRect(), cut = [];
    const texts = Array.from(svg.querySelectorAll("text"), (t) => [t.textContent, t.getBoundingClientRect()]);
    for (const [text, at] of texts)
      if (at.left < box.left - 6 || at.right > box.right + 6 || at.top < box.top - 6 || at.bottom > box.bottom + 6)
        cut.push([text, at.left - box.left, at.right - box.right, at.top - box.top, at.bottom - box.bottom]);
    plots[plot.id] = { width: box.width, right: box.right, cut, texts: texts.map(([text]) => text),
                       marks: svg.querySelectorAll("path, use, image").length };
  }
  for (const table of document.querySelectorAll("table")) {
    const cells = Array.from(table.tBodies[0].rows).filter((row) => row.cells.length > 1).map((row) => {
      const cell = Array.from(row.cells).find((c, i) => i > 0 && !c.classList.contains("words")) || row.cells[1];
      const range = document.createRange();
      range.selectNodeContents(cell);
      return range.getBoundingClientRect().right;
    });
    tables[table.id] = Math.max(...cells);
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const column = table.tHead.rows[0].cells.length - 1;
    table.tHead.rows[0].cells[column].querySelector("button").click();
    sorted[table.id] = Array.from(table.tBodies[0].rows, (row) => row.cells[column].textContent);
  }
  parent.postMessage(JSON.stringify({ wide, over: document.documentElement.scrollWidth, plots, tables, sorted,
    title: document.title, text: document.body.innerText, scripts: document.scripts.length }), "*");
});
"""


def browser() -> str:
    """Find a browser; without one the test is skipped, or fails where CI=true."""
    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        why = f"the report page can't be opened: no browser ({', '.join(BROWSERS)}) is on the PATH"
        if CI:
            pytest.fail(f"{why}, and no test may be skipped for that when CI=true")
        pytest.skip(why)
    return path


class Said(HTMLParser):
    """The text of the element that messages are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.text = False, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = dict(attrs).get("id") == "said"

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""

    def handle_endtag(self, tag: str) -> None:
        self.inside = False


def open_file(file: Path, folder: Path) -> tuple[str, list[str]]:
    """Open a file in a browser of its own; return its DOM after its scripts have run, and the console's messages."""
    command = [
        browser(), "--headless=new", "--no-sandbox",  # the page is ours, and root and most containers have no sandbox
        "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--no-first-run",
        "--virtual-time-budget=10000", "--window-size=1900,1000", "--enable-logging=stderr", "--v=0", "--dump-dom",
        file.as_uri(),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        out, log = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, log.decode(errors="replace")[-2000:]
    return out.decode(), CONSOLE.findall(log.decode(errors="replace"))


def measure(page: str, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Show a page in frames of 1,400 and 390 pixels; return their measurements, and the console's messages."""
    policy = re.sub(r"script-src 'sha256-[^']*'", r"\g<0> 'unsafe-hashes' 'nonce-test'", page)
    assert policy != page
    (folder / "measured.html").write_text(policy.replace("</body>", f'<script nonce="test">{MEASURE}</script></body>'))
    (folder / "frames.html").write_text(FRAMES.format("measured.html"))
    text, messages = open_file(folder / "frames.html", folder)
    said = Said()
    said.feed(text)
    frames = [json.loads(line) for line in said.text.splitlines()]
    return sorted(frames, key=lambda frame: -frame["wide"]), messages


def hostile(root: Path, members: int, count: int) -> tuple[zoo.Collection, ImageData, ImageData]:
    """Write members whose files say what a page must not run; return them, and images of both kinds."""
    built = build(root, members=range(members))
    built.description |= {"title": EVIL, "licence": EVIL, "citation": EVIL}
    built.description["classes"] = [f"{EVIL}{c}" for c in range(10)]
    built.write()
    pixels = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inside = ImageData(EVIL, EVIL, pixels, torch.arange(count) % 10, tuple(built.description["classes"]))
    return zoo.load("tiny", source=built.root), inside, ImageData(EVIL, "other", 255 - pixels)


def number(text: str) -> float:
    return float(text.split(" ")[0].replace(",", "").replace("−", "-").replace("–", "inf"))


@pytest.mark.slow
def test_figures_and_tables_in_wide_and_narrow_windows(tmp_path: Path) -> None:
    members, inside, ood = hostile(tmp_path / "out", 8, 60)
    page = zoo.report_page(members, inside, ood, subsets=4, path=tmp_path / "report.html")
    frames, messages = measure(page.html, tmp_path)
    assert messages == []
    assert [frame["wide"] for frame in frames] == [pytest.approx(1400, abs=16), pytest.approx(390, abs=16)]
    for frame in frames:
        assert frame["over"] <= frame["wide"], "the page is wider than its window"
        assert frame["title"] == "tiny: a population of 8 networks"
        assert frame["scripts"] == 2
        assert frame["text"].count(EVIL) >= 5
        assert list(frame["plots"]) == list(page.panels)
        for name, plot in frame["plots"].items():
            assert plot["cut"] == [], name
            assert plot["marks"] > 5, name
            assert 250 < plot["width"] <= 500, name
            assert plot["right"] <= frame["wide"], name
        beyond = {name: right for name, right in frame["tables"].items() if right > frame["wide"]}
        assert beyond == {}, "tables whose first column of numbers begins outside the window"
        for name, cells in frame["sorted"].items():
            try:
                assert [number(cell) for cell in cells] == sorted(map(number, cells)), name
            except ValueError:  # words
                assert len(cells) > 0
    texts = frames[0]["plots"]["curve-accuracy"]["texts"]
    assert {"accuracy (%)", "members in the ensemble", "1", "2", "4", "8"} <= set(texts)
    assert {"conv1", "conv2", "fc1", "fc2", "all"} <= set(frames[0]["plots"]["halves-apart"]["texts"])


@pytest.mark.slow
def test_a_changed_script_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    page = zoo.report_page(zoo.load("convnet-digits", n=1), ood=None)
    (tmp_path / "plain.html").write_text(page.html)
    text, messages = open_file(tmp_path / "plain.html", tmp_path)
    assert messages == []
    assert text.count("<button") > 5
    assert page.html.count('"use strict";') == 1
    (tmp_path / "broken.html").write_text(page.html.replace('"use strict";', '"use strict"; '))
    text, messages = open_file(tmp_path / "broken.html", tmp_path)
    assert "<button" not in text
    assert any("Content Security Policy" in message for message in messages)


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
    assert open_file(file, tmp_path)[1] == [said]
