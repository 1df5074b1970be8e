"""What comes from files stays text: in Markdown as markdown-it reads it, in YAML as PyYAML does."""

from __future__ import annotations

import re
import unicodedata

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from checkpoints_zoo.formats import text as markup

# Whole pieces of markup, the characters it is made of, and anything else that is text.
PIECES = (
    *("|", "`", "``", "```", "\\", "\\|", "\\`", "*", "**", "_", "~~", "$", "$$", "<", ">", "&lt;", "&#124;", "#", "-"),
    *("\n---\n", "---", "\n- a: b", ": ", "\n\n", "\r\n", "\t", "'", '"', "{", "}", "${name}", "$name", "!", "@me"),
    *("<script>alert(1)</script>", "<!-- ", " -->", "<b>", "</details>", "[a](b)", "![a](b)", "http://a.b", "www.a.b"),
    *("\u202e", "\u2028", "\x00", "\x85", "\ufeff", "é", "漢", "\U0001f600", "word", "1. ", "# ", "> ", "    "),
)
HOSTILE = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)
READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])  # as GitHub and the Hub


def tokens(text: str) -> list[Token]:
    """Everything Markdown sees in a text, what is within lines too."""
    return [t for block in READER.parse(text) for t in (block, *(block.children or []))]


def seen(text: str, limit: int = markup.LONGEST_LINE) -> str:
    """The text on one line as a reader should see it, by Unicode's categories."""
    kept = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text)
    line = re.sub(" +", " ", kept).strip(" ")
    return line if len(line) <= limit else line[: limit - 1].rstrip(" ") + "…"


def cells(line: str) -> int:
    """Cells of a table's line, by GitHub's rule: a backslash takes the character after it along."""
    return len(re.findall(r"\||$", re.sub(r"\\.", "", line))) - 2


@given(HOSTILE)
def test_plain_text_is_nothing_but_text(text: str) -> None:
    within = tokens(f"Title: {markup.markdown_text(text)} end")
    assert {t.type for t in within} <= {"paragraph_open", "inline", "text", "text_special", "paragraph_close"}
    shown = "".join(t.content for t in within if t.type in {"text", "text_special"})
    assert shown == f"Title: {seen(text)} end"


@pytest.mark.parametrize(
    "mark", ["*a*", "_a_", "~~a~~", "`a`", "[a](b)", "<b>", "&lt;", "a | b", "\\*", "$a$", ":a:", "@a", "#1"]
)
def test_each_mark_is_escaped(mark: str) -> None:
    """Also those that only GitHub or the Hub reads: formulas, emojis, mentions and numbers of issues."""
    escaped = markup.markdown_text(mark)
    assert not set(re.sub(r"\\.", "", escaped)) & set("\\`*_[]<>|~&$:@#")
    assert "".join(t.content for t in tokens(f"x{escaped}") if t.type in {"text", "text_special"}) == f"x{mark}"


@given(HOSTILE)
@example("a`")
@example("`a")
def test_code_is_the_text(text: str) -> None:
    inside = [
        t for t in tokens(f"Value: {markup.markdown_code(text)}.") if t.type not in {"text", "text_special", "inline"}
    ]
    wanted = seen(text)
    if not wanted or "|" in wanted:
        assert [t.type for t in inside] == ["paragraph_open", "paragraph_close"]
    else:
        assert [t.content for t in inside if t.type == "code_inline"] == [wanted]
        assert len(inside) == 3


@given(HOSTILE, HOSTILE)
def test_a_cell_holds_the_whole_text(first: str, second: str) -> None:
    line = f"| {markup.markdown_code(first)} | {markup.markdown_text(second)} | end |"
    assert cells(line) == 3
    found = tokens(f"| a | b | c |\n|---|---|---|\n{line}")
    assert [t.type for t in found if t.type.startswith("html")] == []
    bodies = [t for t in found if t.type == "inline"][3:]
    shown = ["".join(c.content for c in t.children or []) for t in bodies]
    assert shown == [seen(first) or "(empty)", seen(second), "end"]


@given(HOSTILE)
def test_a_block_ends_where_it_should(text: str) -> None:
    found = READER.parse(f"{markup.markdown_block(text)}\n\nafter\n")
    assert [t.type for t in found] == ["fence", "paragraph_open", "inline", "paragraph_close"]
    kept = ["".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in line) for line in text.splitlines()]
    assert [x.split() for x in found[0].content.split("\n") if x.strip()] == [x.split() for x in kept if x.strip()]


@given(HOSTILE, HOSTILE)
def test_yaml_reads_the_text(first: str, second: str) -> None:
    block = f"a: {markup.yaml_string(first)}\nb: [{markup.yaml_string(second)}]\n"
    assert len(block.splitlines()) == 2
    assert yaml.safe_load(block) == {"a": seen(first), "b": [seen(second)]}


def test_long_text_is_cut() -> None:
    assert markup.one_line("a" * 400) == "a" * 299 + "…"
    assert yaml.safe_load(markup.yaml_string("é" * 400)) == "é" * 299 + "…"


def test_links_are_not_made() -> None:
    reader = MarkdownIt("gfm-like", {"linkify": False})
    assert markup.markdown_text("see http://a.b, www.a.b") == r"see http\://a.b, www\.a.b"
    assert "href" not in reader.render(f"x {markup.markdown_text('[a](b) <http://a.b> ~~c~~')}")
