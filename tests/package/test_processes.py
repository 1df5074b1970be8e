"""How many processes the tests run in: all cores for the whole suite, one for files that are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("named", "workers"), [((), {"gw0", "gw1"}), (("some",), {"main"}), (("-n0",), {"main"})])
def test_the_whole_suite_runs_in_one_process_a_core(tmp_path: Path, named: tuple[str, ...], workers: set[str]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = some\n")
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "conftest.py").write_text(
        "from tests.conftest import pytest_cmdline_main as pytest_cmdline_main\n"
    )
    (tmp_path / "some" / "test_some.py").write_text(
        "import os, pathlib, pytest\n"
        "@pytest.mark.parametrize('case', range(8))\n"
        "def test(case):\n"
        "    folder = pathlib.Path(os.environ['FOUND'], os.environ.get('PYTEST_XDIST_WORKER', 'main'))\n"
        "    folder.mkdir(exist_ok=True)\n"
        "    (folder / str(os.getpid())).touch()\n"
    )
    found = tmp_path / "found"
    found.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    more = {"PYTHONPATH": str(ROOT), "FOUND": str(found), "PYTEST_XDIST_AUTO_NUM_WORKERS": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *named]
    run = subprocess.run(command, cwd=tmp_path, env=own | more, text=True, capture_output=True, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "8 passed" in run.stdout
    assert {folder.name for folder in found.iterdir()} == workers
    assert [len(list(folder.iterdir())) for folder in found.iterdir()] == [1] * len(workers)  # One process each.
