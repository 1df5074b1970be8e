"""The site builds without a warning; its pages can be found, its links lead somewhere, and it needs no network."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import checkpoints_zoo as zoo

ROOT = Path(__file__).parents[2]
INDEX = "docs/index.html"
MOST_CLICKS = 3
MADE_BY_SPHINX = {"index.html", "genindex.html", "py-modindex.html", "search.html"}


class Page(HTMLParser):
    """The ids, the links, and the loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.append(values["href"])


def build(folder: Path) -> dict[str, Page]:
    """Build the site; return its pages by their paths."""
    html = folder / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", "-c", "docs"]
    command += ["-d", str(folder / "doctrees"), ".", str(html)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = [path for path in html.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(html).as_posix(): Page(path.read_text(encoding="utf-8")) for path in paths}


def targets(site: dict[str, Page], page: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the anchor of each link of a page that stays in the site."""
    for link in site[page].links:
        parts = urlsplit(link)
        if not parts.scheme and not parts.netloc:
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path)) if parts.path else page
            yield unquote(path), unquote(parts.fragment)


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """Built once for all checks."""
    site = build(tmp_path)
    clicks, waiting = {INDEX: 0}, deque([INDEX])
    while waiting:
        page = waiting.popleft()
        for path, _ in targets(site, page):
            if path in site and path not in clicks:
                clicks[path] = clicks[page] + 1
                waiting.append(path)
    assert set(site) - set(clicks) <= MADE_BY_SPHINX
    assert {page: count for page, count in clicks.items() if count > MOST_CLICKS} == {}
    lost = {
        (page, path, anchor)
        for page in site
        for path, anchor in targets(site, page)
        if path.endswith(".html") and (path not in site or (anchor and anchor not in site[path].ids))
    }
    assert lost == set()
    assert {link for page in site.values() for link in page.loaded if urlsplit(link).netloc} == set()


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("## What the functions return")[0]
    named = {name.split(".")[-1] for name in re.findall(r"^   (\w[\w.]*)$", page, flags=re.MULTILINE)}
    neighbours = set(zoo.interop.__all__) - {"loader"}
    assert named - neighbours == set(zoo.__all__)
