"""docs/your-collection.md, from recipe to published repo, run as it stands; then what the Hub gives is counted."""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import main
from checkpoints_zoo.training.packing import device_name, split_threads
from tests.hub import Hub
from tests.support.publications import quick
from tests.support.reports import measure_few

PAGE = (Path(__file__).parents[2] / "docs" / "your-collection.md").read_text(encoding="utf-8")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FILES = {"## A recipe": "my_recipe.py", "## Images of your own": "colours.py"}


def run(line: str) -> None:
    """Run a line of a shell, in this process."""
    program, *arguments = shlex.split(line)
    assert program == "zoo-cli"
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, f"{line}\n{done.output}"


def run_page(folder: Path) -> dict[str, Any]:
    """Run all blocks of the page in their order; return the names that they leave."""
    scope: dict[str, Any] = {"__name__": "page"}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for part in re.split(r"^(?=## )", PAGE, flags=re.MULTILINE):
        file = FILES.get(part.splitlines()[0])
        for language, code in re.findall(r"```(\w+)\n(.*?)```", part, flags=re.DOTALL):
            if language == "bash":
                for line in code.splitlines():
                    run(line)
            elif file is not None:
                (folder / file).write_text(code, encoding="utf-8")
                file = None
            elif ">>>" in code:
                test = doctest.DocTestParser().get_doctest(code, scope, "your-collection.md", "your-collection.md", 0)
                found: list[str] = []
                runner.run(test, out=found.append, clear_globs=False)
                assert not found, "".join(found)
                scope |= test.globs
            else:
                exec(compile(code, "your-collection.md", "exec"), scope)
    return scope


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, from which modules are imported."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in ("my_recipe", "colours"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_page(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    measure_few(monkeypatch)
    quick(monkeypatch, waits)
    scope = run_page(folder)

    # The Hub's rows against images counted with the package's net and torch alone.
    theirs, digits = scope["theirs"], zoo.images.load("digits")
    assert theirs.ids == list(range(12))
    rows = pq.read_table(folder / "pebbles" / "manifests" / "pebble-digits.parquet").to_pylist()
    module = scope["Pebble"](width=8).eval()
    inputs = (digits.images.float() / 255 - 0.3065) / 0.3759
    report = zoo.evaluate(theirs, "digits", sizes=[1])
    counted = []
    for position, row in enumerate(rows):
        assert split_threads(row["device"])[0] == device_name()  # the build that is recorded is this one
        assert row["torch_version"] == str(torch.__version__)
        module.load_state_dict(theirs[position].state_dict())
        with torch.no_grad():
            right = int((module(inputs).argmax(1) == digits.labels).sum())
        assert right == round(row["test_accuracy"] * len(digits))
        assert row["test_accuracy"] * len(digits) == pytest.approx(right, abs=1e-9)
        counted.append(right)
    assert len(set(counted)) > 1
    assert report.member["accuracy"].value * 12 * len(digits) == pytest.approx(sum(counted), abs=0.01)  # float32
    asked = [request.path for request in hub.log.select("/resolve/", method="GET")]
    assert any("/datasets/alice/pebbles/" in path for path in asked)
