"""Cells of a comparison outlive the process: read back, checked, measured anew where they are damaged."""

# ruff: noqa: F811 (fixtures are imported, and asked for by name)

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo import predictions
from checkpoints_zoo.methods.comparing import stored_logits
from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.result_files import CellMeasurer
from checkpoints_zoo.methods.comparing.study import prepare_comparison
from tests.support.few_draws import PERMUTATIONS, RUNS, asked, draws, few_images, members  # noqa: F401 (fixtures)
from tests.support.kills import forked_workers  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def few(asked: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, for one method and fewer figures."""
    return asked | {"draws": {"vi": asked["draws"]["vi"]}, "ood": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def found(members: zoo.Collection, few: dict[str, Any], folder: Path) -> Comparison:
    return zoo.compare(members[:8], out=folder, **few)


def cells_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted((folder / "cells").iterdir())}


@pytest.mark.slow
def test_a_second_run_measures_nothing_and_a_damaged_cell_alone_is_measured_anew(
    found: Comparison, members: zoo.Collection, few: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, said, measured = cells_of(folder), list[str](), list[str]()
    assert len(before) == 3 * RUNS + 4 + 4
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(found.to_json())
    whole = CellMeasurer.__call__

    def watched(self: CellMeasurer, task: Any, device: str) -> dict[str, Any]:
        measured.append(task.name)
        return whole(self, task, device)

    monkeypatch.setattr(CellMeasurer, "__call__", watched)
    assert zoo.compare(members[:8], out=folder, **few, say=said.append) == found
    assert (measured, said, cells_of(folder)) == ([], [], before)
    for damage in ("{", "[]", None):
        name = next(n for n in before if n.startswith("vi-multi-uncertainty"))
        path = folder / "cells" / name
        changed = json.loads(before[name][0])
        changed["values"]["figures"]["nll"]["value"] += 1e-6
        path.write_text(json.dumps(changed) if damage is None else damage)
        said.clear()
        measured.clear()
        assert zoo.compare(members[:8], out=folder, **few, say=said.append) == found
        assert measured == ["vi multi uncertainty"]
        assert said[0] == f"{path} is damaged: measured anew"
        assert path.read_bytes() == before[name][0]
    # Another seed, other permutations, other images: other cells.
    more = few | {"permutations": PERMUTATIONS + 1}
    prepared = prepare_comparison(members[:8], out=folder, **more)
    assert {name.split(" ")[2] for name in prepared.remaining_work().cells} == {"closeness"}
    other = prepare_comparison(members[:8], out=folder, **(few | {"ood": few_images()[1]})).remaining_work()
    assert {name.split(" ")[2] for name in other.cells} == {"uncertainty"}
    assert other.found == len(before) - len(other.cells)


@pytest.mark.slow
def test_cells_of_version_0_1_are_used_where_their_figures_are_defined_as_today(
    found: Comparison, members: zoo.Collection, few: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "cells").mkdir()
    for path in (folder / "cells").iterdir():
        content = json.loads(path.read_text())
        key = {name: value for name, value in content["key"].items() if name not in ("exchanged", "figures")}
        digest, checksum = (
            hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
            for values in (key, [key, content["values"]])
        )
        old_path = tmp_path / "cells" / f"{key['method']}-{key['mode']}-{key['measured']}-{digest[:12]}.json"
        old_path.write_text(json.dumps({"key": key, "values": content["values"], "sha256": checksum}))
    work = prepare_comparison(members[:8], out=tmp_path, **few).remaining_work()
    # 0.1 exchanged single draws of a method, and had other intervals.
    assert {name.split(" ")[2] for name in work.cells if name.startswith("reference")} == {"uncertainty"}
    assert {name.split(" ")[2] for name in work.cells} == {"closeness", "corollary", "uncertainty"}
    assert work.found == len(cells_of(folder)) - len(work.cells)


@pytest.mark.slow
def test_figures_are_measured_again_from_stored_logits(
    found: Comparison, members: zoo.Collection, few: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in (folder / "logits").iterdir()}
    assert len(before) == 3 + RUNS + 1  # The reference and its halves, each run, and some draws of all runs.
    damaged = sorted(before)[0]
    damaged.write_bytes(before[damaged][:-1] + b"x")
    calls: list[int] = []
    whole = predictions.logits
    monkeypatch.setattr(stored_logits.predictions, "logits", lambda *given: calls.append(1) or whole(*given))
    again = prepare_comparison(members[:8], out=folder, **few).run(from_logits=True)
    assert again == found
    assert len(calls) == 1  # The damaged file is computed anew.
    assert {path: path.read_bytes() for path in (folder / "logits").iterdir()} == before


@pytest.mark.slow
def test_a_run_that_is_cut_off_goes_on(
    found: Comparison, members: zoo.Collection, few: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = CellMeasurer.__call__, list[str]()

    def cut(self: CellMeasurer, task: Any, device: str) -> dict[str, Any]:
        calls.append(task.name)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return whole(self, task, device)

    monkeypatch.setattr(CellMeasurer, "__call__", cut)
    with pytest.raises(KeyboardInterrupt):
        zoo.compare(members[:8], out=tmp_path, **few)
    monkeypatch.undo()
    first = cells_of(tmp_path)
    assert len(first) == 7
    assert not (tmp_path / "comparison.json").exists()
    assert zoo.compare(members[:8], out=tmp_path, **few) == found
    after = cells_of(tmp_path)
    assert {name: after[name] for name in first} == first
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_several_processes_give_the_same(
    found: Comparison, members: zoo.Collection, few: dict[str, Any], tmp_path: Path
) -> None:
    assert zoo.compare(members[:8], out=tmp_path, **(few | {"workers": 2})) == found
