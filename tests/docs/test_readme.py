"""The README cannot go stale: its tour runs, the commands it names exist, the demo's command is the one that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tour, uncertainty, symmetries, archives = blocks("python")
    assert (
        'zoo.load("resnet18-cifar100", n=3, source="Checkpoints/")' in archives
    )  # tests/sources/test_archived_collections.py runs these
    assert 12 <= len([line for line in tour.splitlines() if line.strip()]) <= 20
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(compile(tour, "README.md", "exec"), scope)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert tuple(scope["logits"].shape) == (16, 540, 10)  # type: ignore[attr-defined]
    for more in (uncertainty, symmetries):
        exec(compile(more, "README.md", "exec"), scope)


@pytest.mark.slow
def test_the_commands_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from checkpoints_zoo.cli.main import main

    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("zoo-cli")]
    shown = {"show", "evaluate", "verify", "import", "report", "symmetries", "align", "compare"}
    training = {"recipes", "train", "train-merge"}
    assert {c[0] for c in commands} == shown | training
    monkeypatch.chdir(tmp_path)
    for command in commands:
        # These take hours, or need what the line before them makes, or upstream's archives.
        if command[0] == "train" or {"out/", "index/"} & set(command):
            continue
        # Fitting all methods takes a quarter of an hour.
        result = CliRunner().invoke(main, [*command, *(["--dry-run"] if command[0] == "compare" else [])])
        assert result.exit_code == 0, result.output


def test_the_two_commands_come_first() -> None:
    first = blocks("bash")[0]
    assert "pip install uv && uv run --no-dev zoo-cli demo" in first
    assert "uv run pytest" in first


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).is_file(), target
