"""The scripts for a GPU: they import, explain themselves, and take their steps on small numbers on the CPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> None:
    sys.argv = [name, *arguments]
    runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch-uncertainty's imports
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gpu_load.py", {"pinned", "to_stored", "to_stacked", "to_canonical", "peak_mb", "overlap", "card"}),
        ("gpu_ensemble.py", {"worst", "grid", "card"}),
        ("gpu_train.py", {"hours", "gain", "exact", "member", "grid", "card", "peak", "gflops_an_image"}),
    ],
)
def test_a_script_runs_on_small_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, keys: set[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [])
    try:
        with pytest.raises(SystemExit) as stop:
            run(name, "--help")
        assert stop.value.code == 0
        assert "--device" in capsys.readouterr().out
        run(name, "--device", "cpu", "--tiny")
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
    finally:
        for neighbour in ("ensemble", "synthetic"):
            sys.modules.pop(neighbour, None)
    assert keys <= set(found)
    assert found["card"] == "cpu"
    assert [row["failed"] for row in found["grid"] if "failed" in row] == [] if "grid" in found else True
