"""docs/alignment.md says what its files say, they say what is measured, and its code runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.populations.alignment_table import alignment
from checkpoints_zoo.populations.loss_barrier import barrier
from checkpoints_zoo.training.loop import initial_state
from checkpoints_zoo.training.recipes import convnet_digits
from docs.make.alignment import MEASURED, NAMES, ROOT, STUDY, page, transpositions_of_lines
from docs.studies import transpositions
from docs.studies.transpositions import COUNTS, RUNS, draw_pairs, join_states, read_pairs, train_and_measure

PAGE = (ROOT / "docs" / "alignment.md").read_text(encoding="utf-8")


def test_the_page_is_the_generated_one() -> None:
    assert page() == PAGE, "run `python -m docs.make`"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_the_collections(name: str) -> None:
    told = json.loads(MEASURED.read_text(encoding="utf-8"))[name]
    members = zoo.load(name, n=4)
    found = alignment(members, to=0)
    for row, other in zip(found.rows()[1:], told["members"][:3], strict=True):
        assert row["transpositions"] == other["transpositions"]
        assert row["before"] == pytest.approx(other["before"], rel=1e-9)
        assert row["after"] == pytest.approx(other["after"], rel=1e-9)
    assert transpositions_of_lines(members[:2])[0] == told["along"][0]
    aligned = members.align(to=0)
    for when, view in (("before", members), ("after", aligned)):
        again = barrier(view[0], view[1], points=5)  # of the 25 the middle one is the largest, and among these too
        assert float(again.barriers[0]) == pytest.approx(told["barriers"][when][0], rel=1e-3, abs=1e-4)


def test_alignment_lowers_distances_and_barriers() -> None:
    for told in json.loads(MEASURED.read_text(encoding="utf-8")).values():
        assert all(row["after"] < row["before"] for row in told["members"])
        assert told["mean"]["after"][2] < told["mean"]["before"][1]  # the intervals don't meet


@pytest.mark.slow
def test_the_page_s_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(compile(code[0].replace("n=8", "n=4"), "alignment.md", "exec"), scope)
    direct, again = scope["aligned"].stack(), scope["again"].stack()  # type: ignore[attr-defined]
    assert all(torch.equal(direct[n], again[n]) for n in direct)


def test_the_study_s_file_is_of_the_recipe() -> None:
    told = json.loads(STUDY.read_text(encoding="utf-8"))
    width = RUNS * (1 + len(COUNTS))
    assert told["recipe"] == replace(convnet_digits(), stack_width=width).hash
    pairs = read_pairs(STUDY)
    assert sorted((p.run, p.before) for p in pairs) == sorted((r, c) for r in range(RUNS) for c in COUNTS)


@pytest.mark.slow
def test_a_short_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transpositions, "POINTS", 5)
    recipe = replace(convnet_digits(), epochs=1, batch_size=300)
    pairs = train_and_measure(recipe, counts=(0, 20), runs=2)
    assert [(p.run, p.before) for p in pairs] == [(0, 0), (0, 20), (1, 0), (1, 20)]
    for pair in pairs:
        # A few steps leave what was permuted as it was: it is found again, and distances are those of the plain pair.
        assert pair.after == pair.before
        assert pair.aligned_distance <= pair.distance + 1e-9
    assert pairs[1].distance > 2 * pairs[1].aligned_distance
    assert pairs[1].aligned_distance < 1e-3  # other orders of four batches
    assert draw_pairs(pairs, tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_states_are_joined_in_order() -> None:
    recipe = convnet_digits()
    both = join_states([initial_state(recipe, [3]), initial_state(recipe, [4])])
    together = initial_state(recipe, [3, 4])
    assert all(torch.equal(both.params[n], t) for n, t in together.params.items())
    assert both.loss.shape == both.failed_step.shape == (2,)
