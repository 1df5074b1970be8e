"""What four kinds of new users met, from a fresh clone and from the wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import COMMANDS, main
from checkpoints_zoo.images import DATASETS
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.publishing import cards
from checkpoints_zoo.sources import hub as hub_room
from tests.hub import Hub
from tests.publishing.test_cards import ABOUT, ALL, REPO, some
from tests.support.commands import ROOT, ZOO, run
from tests.support.remote import ADDRESS, published
from tests.support.scenarios import build
from tests.support.tiny import stored

WRITERS = {  # commands that write a file -> the option that names it
    "demo": ("demo", "--out", "{place}"),
    "report": ("report", "convnet-digits", "--out", "{place}/page.html"),
    "plot": ("plot", "convnet-digits", "--out", "{place}/figures.png"),
    "evaluate": ("evaluate", "convnet-digits", "--plot", "{place}/figures.png"),
    "pairwise": ("pairwise", "convnet-digits", "--out", "{place}/pairs.csv"),
    "pairwise picture": ("pairwise", "convnet-digits", "--plot", "{place}/pairs.png"),
    "mmd": ("mmd", "convnet-digits", "--plot", "{place}/mmd.png"),
    "symmetries": ("symmetries", "convnet-digits", "--plot", "{place}/mass.png"),
    "align": ("align", "convnet-digits", "--save", "{place}/permutations.parquet"),
    "compact": ("compact", "convnet-digits", "--plot", "{place}/compact.png"),
    "compact-table": ("compact-table", "mlp-digits", "--latex", "{place}/table.tex"),
    "compare": ("compare", "convnet-digits", "--json", "{place}/compared.json"),
    "predict": ("predict", "convnet-digits", "--data", "digits", "--out", "{place}"),
    "download": ("download", "convnet-digits", "--dest", "{place}"),
    "train": ("train", "convnet-digits", "--members", "0", "--out", "{place}"),
    "import": ("import", "{source}", "--collection", "x", "--reshard", "{place}"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_place_that_can_not_be_written_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 33. A file stands where a folder is needed, which root meets as other users do."""

    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("the command began its work")

    for function in (
        "collection.collection.load", "cli.options.select_members", "training.recipes.choose_recipe",
        "interop.ingest.ingest",
    ):  # fmt: skip
        monkeypatch.setattr(f"checkpoints_zoo.{function}", work)
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "out"
    result = run(*(word.format(place=place, source=tmp_path) for word in WRITERS[name]))
    assert (result.exit_code, result.stdout) == (3, ""), result.stderr
    assert "expected a place that can be written to; found Not a directory: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_merging_a_folder_that_is_missing_is_an_error(tmp_path: Path) -> None:
    """Case 29."""
    there = stored([0], tmp_path / "there")
    result = run("train-merge", there, tmp_path / "missing", "--out", tmp_path / "out")
    assert result.exit_code == 3
    assert f"folder {tmp_path / 'missing'}: expected members that were trained; found nothing there" in result.stderr
    (tmp_path / "empty").mkdir()
    result = run("train-merge", there, tmp_path / "empty", "--out", tmp_path / "out")
    assert (result.exit_code, f"folder {tmp_path / 'empty'}: expected members" in result.stderr) == (3, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_defaults_and_an_example(name: str) -> None:
    """Case 38."""
    text = run(name, "-h").stdout
    assert text == run(name, "--help").stdout
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for option in command.params:
        if isinstance(option.default, str | int) and not isinstance(option.default, bool):
            assert f"[default: {option.default}" in " ".join(text.split()), option.opts
    for line in COMMANDS[name].examples:
        assert f"\n    {line}\n" in f"{text}\n"
        program, first, *arguments = shlex.split(line)
        assert (program, first) == ("zoo-cli", name)
        command.make_context(name, arguments)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """Case 38."""
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert f"_ZOO_CLI_COMPLETE={shell}_source zoo-cli" in page
    words = {"COMP_WORDS": "zoo-cli ev", "COMP_CWORD": "1" if shell != "fish" else "ev"}
    environment = {**os.environ, **words, "_ZOO_CLI_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(ZOO, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "evaluate" in done.stdout


def test_bars_of_other_packages_do_not_flood_a_log(hub: Hub, tmp_path: Path) -> None:
    """Case 38."""
    published(hub)
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    command = [*ZOO, "show", "tiny", "--source", ADDRESS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--source", ADDRESS),
        ("show", "tiny", "--source", ADDRESS),
        ("verify", ADDRESS),
        ("audit", ADDRESS),
        ("evaluate", "convnet-digits", "-n", "2", "--data", "cifar10"),
        ("download", "tiny", "--source", ADDRESS, "--dry-run"),
        ("import", ADDRESS, "--collection", "x", "--out", "{folder}", "--dry-run"),
        ("publish", "{folder}/source", "--repo", "alice/zoo", "--dry-run"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_a_network_the_error_comes_at_once(
    arguments: tuple[str, ...],
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case 38. Nothing waits, and the client's own lines of retries are not shown."""

    def no_wait(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s")

    build(tmp_path / "source", members=range(2))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", no_wait)
    monkeypatch.setattr(hub_room, "_connected", set())
    result = run(*(word.format(folder=tmp_path) for word in arguments))
    assert result.exit_code == 5, result.stderr
    assert "expected an answer from 127.0.0.1:9; found ConnectionError: [Errno 111] Connection refused" in result.stderr
    assert not caplog.records


@pytest.mark.parametrize("name", ["evaluate", "pairwise"])
def test_no_images_out_of_distribution_by_name(name: str) -> None:
    """`--ood none` means the same in all commands."""
    arguments = (name, "convnet-digits", "-n", "3", "--format", "json")
    result = run(*arguments, "--ood", "none")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == run(*arguments).stdout


def test_python_m_runs_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "checkpoints_zoo", "show", "none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize(
    ("net", "images", "needs"),
    [("mine", "digits", "`mine`"), ("mlp", "scans", "`scans`"), ("mlp", "digits", "")],
    ids=["net", "images", "neither"],
)
def test_the_card_says_what_members_of_ones_own_need(net: str, images: str, needs: str) -> None:
    """Case 32. An example that fails for the reader is not shown; no index is promised."""
    text = cards.card(some(ALL, about=replace(ABOUT, architecture=net, dataset=images)), REPO)
    assert ("zoo.evaluate(members)" in text) == (not needs)
    assert ("as `architecture=`" in text) == (net == "mine")
    assert ("`zoo.images.of` makes" in text) == (images == "scans")
    assert needs in text.split("## `some`")[0]
    assert "pip install checkpoints-zoo" not in text


def test_the_card_knows_the_networks_and_images_of_the_package() -> None:
    """Case 32."""
    assert tuple(sorted(ARCHITECTURES)) == cards.NETS
    assert tuple(sorted(DATASETS)) == cards.IMAGE_SETS


@pytest.mark.parametrize("accuracies", [[1.0] * 3, [0.99, 1.0], [0.97, 0.98, 0.995]])
def test_the_axis_of_accuracies_ends_at_100_percent(accuracies: list[float]) -> None:
    """Case 32: beyond it there is no more than half of the last bar."""
    section = cards.Section("some", *some(*[ALL | {"test_accuracy": a} for a in accuracies])["some"])
    axes = cards.draw(section).axes[0]
    last = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    assert axes.get_xlim()[1] <= max(100, last)


@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg"])
def test_pictures_for_papers(ending: str, tmp_path: Path) -> None:
    """Case 34: the same bytes each time, and no hash on the picture."""
    report = zoo.evaluate(zoo.load("convnet-digits", n=3), "digits", subsets=2)
    first, second = (report.plot(tmp_path / f"{i}{ending}").read_bytes() for i in range(2))
    assert first == second
    assert first.startswith({".png": b"\x89PNG", ".pdf": b"%PDF-", ".svg": b"<?xml"}[ending])
