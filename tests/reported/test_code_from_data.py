"""No string of a source is run: a file runs because a person typed its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.training.retrain import retrain
from tests.support.scenarios import build

HOSTILE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
raise SystemExit("the file of a manifest ran")
"""


@pytest.mark.parametrize("form", ["{name}.py", "./{name}.py", "{path}", "{path}:recipe", "{name}", "{name} lr=0.1"])
def test_the_recipe_of_a_row_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    built = build(tmp_path / "source")
    for row in built.rows:
        row["recipe"] = form.format(name="hostile", path=tmp_path / "hostile.py")
    built.write()
    with pytest.raises(UsageError, match="expected one of the package's in its rows"):
        retrain(zoo.load("tiny", source=tmp_path / "source"), count=1)
    assert not (tmp_path / "ran").exists()
    assert "hostile" not in sys.modules
