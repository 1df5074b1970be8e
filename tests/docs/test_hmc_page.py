"""docs/hmc.md says what its files say; its draws are the shipped ones, and its code runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.training.recipes import mlp_digits
from docs.make import hmc

NAME = "mlp-digits-hmc"


def test_the_page_says_what_its_files_say() -> None:
    assert hmc.page() == hmc.PAGE.read_text(encoding="utf-8"), "run `python -m docs.make docs/hmc.md`"


def test_the_code_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", hmc.PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, "hmc.md", "exec"), scope)
    values = json.loads(hmc.DRAWS.read_text(encoding="utf-8"))
    assert scope["halves"]["total_variation"].value == pytest.approx(values["halves"]["total_variation"], abs=1e-4)


def test_the_shipped_draws_are_small_and_of_the_recipe() -> None:
    draws, recipe, listing = zoo.load(NAME), mlp_digits(), catalog.find_listing(NAME)
    root = Path(zoo.__file__).parent / "embedded"
    files = [*(root / "manifests").glob(f"{NAME}.*"), *(root / "shards" / NAME).iterdir()]
    assert len(files) == 3
    assert sum(path.stat().st_size for path in files) < 1_000_000
    rows = draws.rows.to_pylist()
    assert {row["recipe_hash"] for row in rows} == {recipe.hash}
    assert {(row["run"], row["draw"]) for row in rows} == {(run, draw) for run in range(8) for draw in range(8)}
    assert (listing.members, listing.bytes) == (len(rows), draws.nbytes)
    for fact in ("title", "architecture", "dataset", "licence"):
        assert getattr(listing, fact) == getattr(draws.description, fact), fact


@pytest.mark.slow
def test_the_shipped_draws_are_sound() -> None:
    assert zoo.verify(zoo.load(NAME), sample=8) == []
