"""README.md and the pages that begin the docs cannot go stale: their code runs, and the commands they name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.report_pages import draw_only
from tests.support.reports import measure_few

ROOT = Path(__file__).parents[2]
README, START, ARCHIVES = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/start.md", "docs/archives.md")
)
PAGES = {"README.md": README, **{f"docs/{page.name}": page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")}}
NUMBER = re.compile(r"\d+\.\d+")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_the_eight_lines_print_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    [code], [output] = blocks(README, "python"), blocks(README, "text")
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "print"))]) <= 8
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert tuple(scope["logits"].shape) == (32, 540, 10)  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", output)
    numbers = [[float(x) for x in NUMBER.findall(text)] for text in (printed, output)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.01)


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)
    tour, *more = blocks(START, "python")
    assert len(more) == 2
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(compile(tour, "start.md", "exec"), scope)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert tuple(scope["logits"].shape) == (16, 540, 10)  # type: ignore[attr-defined]
    for code in more:
        exec(compile(code, "start.md", "exec"), scope)


@pytest.mark.slow
def test_the_commands_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_few(monkeypatch)
    from click.testing import CliRunner

    from checkpoints_zoo.cli.main import main

    lines = [
        line.split("#")[0].strip() for page in (START, ARCHIVES) for line in "".join(blocks(page, "bash")).splitlines()
    ]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("zoo-cli")]
    shown = {"show", "evaluate", "verify", "import", "report", "symmetries", "align", "compare"}
    training = {"recipes", "train", "train-merge"}
    assert {c[0] for c in commands} == shown | training
    monkeypatch.chdir(tmp_path)
    draw_only(monkeypatch)  # the tour draws them
    for command in commands:
        # These take hours, or need what the line before them makes, or upstream's archives.
        if command[0] in ("train", "import") or "out/" in command:
            continue
        # Fitting all methods takes a quarter of an hour.
        result = CliRunner().invoke(main, [*command, *(["--dry-run"] if command[0] == "compare" else [])])
        assert result.exit_code == 0, result.output


def test_the_archives_code_is_run_elsewhere() -> None:
    """tests/sources/test_archived_collections.py loads from an archive on the Hub and from a folder of archives."""
    [code] = blocks(ARCHIVES, "python")
    assert 'zoo.load("resnet18-cifar100", n=3, source="Checkpoints/")' in code


def test_the_readme_is_short_and_its_two_commands_come_first() -> None:
    assert len(README.splitlines()) <= 120
    first = blocks(README, "bash")[0]
    assert "pip install uv && uv run --no-dev zoo-cli demo" in first
    assert "uv run pytest" in first


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[name]):
        assert (ROOT / name).parent.joinpath(target).exists(), target
