"""Nothing waits for ever, and nothing that a machine lacks is a bare error of a library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300  # a hang fails the test; nothing is timed

JOBS = """
import sys
from dataclasses import dataclass
from checkpoints_zoo.workers import Job, Processes
from tests.support.works import squared

@dataclass(frozen=True)
class Long:
    padding: bytes = bytes(200_000)  # more than a pipe holds

    def __call__(self, x, device):
        return x * x

def run(work):
    print(sorted(job.argument for job, _ in Processes(2, say=print).run(work, [Job(str(x), x) for x in range(3)])))
"""


def script(tmp_path: Path, text: str, how: str = "file", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a file, or from standard input; return the process once it has ended."""
    file = tmp_path / "script.py"
    file.write_text(text)
    path = os.pathsep.join(filter(None, (environment.pop("PYTHONPATH", ""), str(ROOT))))
    return subprocess.run(
        [sys.executable, str(file) if how == "file" else "-"], input=None if how == "file" else text,
        env={**os.environ, "PYTHONPATH": path, **environment}, cwd=tmp_path, timeout=TIMEOUT_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_work_of_a_module_needs_no_guard(tmp_path: Path, how: str) -> None:
    """Cases 17 and 27: workers do not import the main script, so that a plain one just works."""
    ended = script(tmp_path, JOBS + "print('top')\nrun(squared)", how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "top\n[0, 1, 2]\n", "")


@pytest.mark.parametrize("how", ["file", "stdin"])
def test_work_of_a_script_without_guard_runs_in_its_process(tmp_path: Path, how: str) -> None:
    """Case 17: workers that died at their start were waited for, if the work had more than 64 KiB."""
    ended = script(tmp_path, JOBS + "print('top')\nrun(Long())", how)
    assert (ended.returncode, ended.stdout) == (0, "top\n[0, 1, 2]\n")
    assert 'UserWarning: main script: expected `if __name__ == "__main__":` around its calls; found ' in ended.stderr
    assert ended.stderr.count("Warning") == 1


def test_work_of_a_script_with_guard_runs_in_workers(tmp_path: Path) -> None:
    ended = script(tmp_path, JOBS + "print('top')\nif __name__ == '__main__':\n    run(Long())")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.replace("top\n", "") == "[0, 1, 2]\n"
    assert ended.stderr == ""


def test_arguments_of_a_script_without_guard(tmp_path: Path) -> None:
    jobs = "[Job('a', Long()), Job('b', b'12')]"
    call = f"print(sorted(length for _, length in Processes(2).run(measured, {jobs})))"
    ended = script(tmp_path, f"{JOBS}from tests.support.works import measured\n{call}")
    assert (ended.returncode, ended.stdout) == (0, "[2, 200000]\n"), ended.stderr
    assert ended.stderr.count("Warning") == 1


def test_a_call_beside_the_guard_is_an_error(tmp_path: Path) -> None:
    ended = script(tmp_path, JOBS + "if __name__ == '__main__':\n    print('main')\nrun(Long())")
    assert ended.returncode == 1
    assert "UsageError: jobs in several processes: found calls at the top of the main script." in ended.stderr


@pytest.mark.parametrize("end", ["raise SystemExit(7)", "raise ImportError('none')"])
def test_a_script_that_can_not_be_imported_is_an_error(tmp_path: Path, end: str) -> None:
    text = JOBS + f"if __name__ == '__main__':\n    run(Long())\nelse:\n    {end}"
    ended = script(tmp_path, text)
    assert ended.returncode == 1
    assert "UsageError: main script: expected that workers can import it; found " in ended.stderr


@pytest.mark.parametrize(("end", "cause"), [("os._exit(3)", "exit code 3"), ("raise SystemExit(4)", "exit code ")])
def test_workers_that_die_at_their_start_are_an_error(tmp_path: Path, end: str, cause: str) -> None:
    """Case 17: whatever ends them, here Python's own start."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        f"import os, sys\nif '--multiprocessing-fork' in sys.orig_argv: {end}\n"
    )
    text = JOBS + "if __name__ == '__main__':\n    run(Long())"
    ended = script(tmp_path, text, PYTHONPATH=str(tmp_path / "broken"))
    assert ended.returncode == 1
    assert f"WorkerError: a worker process: expected one that starts; found {cause}" in ended.stderr
    assert ended.stdout.count("was ended by") <= 2  # one for each of two workers: no second try
