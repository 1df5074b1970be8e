"""docs/formats.md says what the bytes are: its reader reads the weights that safetensors reads."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints_zoo as zoo
from docs.make.formats import SHARD, SOURCE, page

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert page() == PAGE, "run `python -m docs.make docs/formats.md`"


def test_its_reader_reads_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").symlink_to(SOURCE)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "formats.md", "exec"), scope)
    stored, weights = load_file(SHARD), scope["weights"]
    assert {f"000000/{name}" for name in weights} == {name for name in stored if name.startswith("000000/")}
    assert scope["at"] == scope["row"]["nbytes"]
    for name, values in weights.items():
        np.testing.assert_array_equal(values, stored[f"000000/{name}"])
        np.testing.assert_array_equal(values, zoo.load("convnet-digits", n=1)[0].state_dict()[name].numpy())


def test_its_numbers_are_those_of_the_file() -> None:
    data = SHARD.read_bytes()
    dump = re.findall(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} ){15}[0-9a-f]{2})  ", PAGE, flags=re.MULTILINE)
    assert len(dump) == 3
    for offset, line in dump:
        assert data[int(offset, 16) :][:16] == bytes.fromhex(line)
    for name, first, count in re.findall(
        r"^\| `(000000/\S+)` \|.*\| ([\d,]+) \| ([\d,]+) \|$", PAGE, flags=re.MULTILINE
    ):
        begin = int(first.replace(",", ""))
        assert data[begin : begin + int(count.replace(",", ""))] == load_file(SHARD)[name].tobytes()
    assert hashlib.sha256(data).hexdigest().startswith(SHARD.stem.partition("-")[2])
