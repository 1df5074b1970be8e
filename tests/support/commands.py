"""Running `zoo-cli` in tests, within this process and as one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from checkpoints_zoo.cli.main import main
from tests.support.scenarios import Built, build

ROOT = Path(__file__).resolve().parents[2]
ZOO = (sys.executable, "-c", "from checkpoints_zoo.cli.main import main; main()")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def values(result: Result) -> Any:
    """What a command printed, as strict JSON."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout, parse_constant=refuse)


def process(
    *arguments: str | Path, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(
        [*ZOO, *map(str, arguments)], cwd=ROOT, text=True, encoding="utf-8", check=False,
        env={**os.environ, **(environment or {})}, **streams,
    )  # fmt: skip


def two_collections(root: Path) -> Built:
    """Write a folder with two collections of random weights, `tiny` of 5 members and `wide` of 23; return `tiny`."""
    build(root, "convnet", range(23), name="wide")
    return build(root, "convnet", range(5), name="tiny")


def catalog_of(built: Built, folder: Path) -> Path:
    """Write a catalog that says where the source's collection `tiny` lies; return its folder."""
    values = {
        "format_version": 1, "name": "tiny", "title": "Tiny", "architecture": "convnet", "dataset": "digits",
        "members": 5, "bytes": 73160, "licence": "Apache-2.0", "sources": [str(built.root)],
    }  # fmt: skip
    folder.mkdir()
    (folder / "tiny.json").write_text(json.dumps(values))
    return folder
