"""Nothing that a manifest or a description says becomes markup or code on the card, whatever it says."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from jinja2.meta import find_undeclared_variables
from markdown_it.token import Token

from checkpoints_zoo.publishing import cards
from checkpoints_zoo.publishing.card_sections import Section
from tests.formats.test_text import HOSTILE, cells, seen, tokens
from tests.publishing.test_cards import ABOUT, ALL, REPO, body, front, some, tables

TEXTS = ("title", "architecture", "dataset", "licence", "citation")
IN_ROWS = ("reason", "method", "split", "eval_data", "optimizer", "schedule", "recipe", "device", "augmentation")


@cache
def usual_tokens() -> list[Token]:
    return tokens(body(cards.card(some(ALL, ALL, {"status": "failed"}), REPO)))


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.fixed_dictionaries(dict.fromkeys(TEXTS, HOSTILE)),
    st.fixed_dictionaries(dict.fromkeys(IN_ROWS, HOSTILE)),
    HOSTILE,
)
def test_text_from_files_is_never_markup(about: dict[str, str], row: dict[str, str], other: str) -> None:
    description = replace(
        ABOUT, **about, classes=(other, "b"), preprocessing={other: other, "size": [1]}, arguments={other: [other]}
    )
    row = {n: text.encode("utf-8", "replace").decode() for n, text in row.items()}  # Arrow takes nothing else
    broken = {"status": "failed", "path": f"shards/{other.encode('utf-8', 'replace').decode()}.safetensors"}
    text = cards.card(some(ALL | row, ALL | {"path": broken["path"]}, broken | row, about=description), REPO)
    assert cards.is_generated(text)
    assert text.encode().decode() == text

    metadata = front(text)
    assert set(metadata) - {"license_name", "license_link"} == {
        "pretty_name",
        "license",
        "tags",
        "size_categories",
        "configs",
    }
    assert metadata["pretty_name"] == (seen(about["title"]) or "some")
    assert metadata["configs"] == [{"config_name": "some", "data_files": "manifests/some.parquet"}]
    assert len(metadata["tags"]) == 7

    plain = tokens(body(text))
    usual = usual_tokens()
    for kind in ("heading_open", "image", "html_block", "link_open"):
        assert [t.type for t in plain].count(kind) == [t.type for t in usual].count(kind), kind
    assert {t.type for t in plain} - {t.type for t in usual} <= {"text_special"}
    assert [t.content.strip()[:4] for t in plain if t.type.startswith("html")] == ["<!--"]
    unfenced = re.sub(
        r"^(`{3,})text\n.*?^\1$", "", body(text), flags=re.MULTILINE | re.DOTALL
    )  # a citation may be "| |"
    for line in unfenced.splitlines():
        if line.startswith("| "):
            assert cells(line) in (2, 3, 6, 7)
    overview = tables(text)[0]
    assert cells(next(x for x in text.splitlines() if x.startswith("| `some`"))) == 7
    assert overview[1][2:4] == [seen(about["architecture"]) or "(empty)", seen(about["dataset"]) or "(empty)"]
    training = dict(tables(text)[2][1:])
    assert training["optimizer"].startswith(seen(row["optimizer"]) or "(empty)")
    for block in (t.content for t in plain if t.type == "fence" and t.info == "python"):
        compile(block, "README.md", "exec")


def test_every_name_of_the_templates_is_filled_in_and_none_in_vain() -> None:
    """A template and the parts written for it name the same things."""
    shown = Section("some", *some(ALL)["some"])
    written = {
        "source": {*cards.source_texts([shown], REPO, None), "marker"},
        "loading": set(cards.loading_texts(shown, REPO, None)),
        "collection": set(cards.collection_texts(shown)),
    }
    folder = Path(cards.__file__).parents[1] / "cards"
    for name, parts in written.items():
        template = Environment(autoescape=True).parse((folder / f"{name}.md").read_text(encoding="utf-8"))
        assert find_undeclared_variables(template) == parts
    assert {p.name for p in folder.iterdir()} == {"README.md", "licences.txt", *(f"{name}.md" for name in written)}
    licences = (folder / "licences.txt").read_text().split()
    assert licences == sorted(set(licences))
