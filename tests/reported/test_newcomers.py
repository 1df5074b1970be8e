"""What four kinds of new users met, from a fresh clone and from the wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pyarrow as pa
import pytest
from PIL import Image

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import COMMANDS, main
from checkpoints_zoo.sources import hub as hub_room
from tests.hub import Hub
from tests.support.commands import ROOT, ZOO, run, values
from tests.support.remote import ADDRESS, published
from tests.support.scenarios import SCHEMA, build
from tests.support.tiny import stored

CLAIMS = SCHEMA.append(pa.field("eval_data", pa.string()))
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


def checks(*arguments: str | Path) -> dict[str, object]:
    """Return what `zoo-cli verify` tells of the one collection that it checked."""
    (line,) = values(run("verify", *arguments, "--format", "json"))["checked"]
    return {key: line[key] for key in ("members", "read", "hashed", "measured", "impossible", "problems")}


def test_verify_tells_what_it_checked_and_what_it_could_not(tmp_path: Path) -> None:
    """Case 28."""
    assert checks("convnet-digits", "--sample", "3") == {
        "members": 64, "read": 64, "hashed": 64, "measured": 3, "impossible": {}, "problems": 0,
    }  # fmt: skip
    built = build(tmp_path, members=range(5))
    for row in built.rows[:2]:
        row["test_accuracy"] = None
    built.rows[2]["sha256"] = None
    built.rows[2]["eval_data"] = built.rows[3]["eval_data"] = "mine/test"
    built.rows[4]["eval_data"] = "digits/test"
    built.write(CLAIMS)
    no_accuracy = "accuracy, since the rows have none"
    no_images = "accuracy, since the package does not have the images 'mine/test' (give them as data)"
    result = checks("tiny", "--source", tmp_path)
    assert result["impossible"] == {no_accuracy: 2, "hash, since the rows have none": 1, no_images: 2}
    assert (result["members"], result["read"], result["hashed"], result["measured"]) == (5, 5, 4, 1)
    text = run("verify", "tiny", "--source", tmp_path).stdout
    assert "tiny: checked bytes and values 5 of 5, hash 4 of 5, accuracy 1 of 5\n" in text
    assert f"tiny: not checked: {no_images}: 2 members\n" in text
    built.description["architecture"] = "unknown"
    built.rows[2]["eval_data"] = built.rows[3]["eval_data"] = "digits/test"
    built.write(CLAIMS)
    no_network = "accuracy, since the package does not have the network 'unknown' (give it as architecture)"
    assert checks("tiny", "--source", tmp_path)["impossible"] == {
        no_accuracy: 2, "hash, since the rows have none": 1, no_network: 3,
    }  # fmt: skip


def test_verify_measures_on_images_that_the_package_lacks(tmp_path: Path) -> None:
    """Case 28. The images are named as the manifest's claims name them."""
    built = build(tmp_path / "source", members=range(2))
    digits = zoo.images.load("digits")
    members = zoo.load("tiny", source=built.root)
    logits = members.ensemble()(members.preprocess(digits.images))
    for row, right in zip(built.rows, logits.argmax(-1) == digits.labels, strict=True):
        row |= {"eval_data": "mine/test", "test_accuracy": right.double().mean().item()}
    built.write(CLAIMS)
    for at, (image, label) in enumerate(zip(digits.images, digits.labels, strict=True)):
        path = tmp_path / "images" / str(int(label)) / f"{at:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(path)
    arguments = ("tiny", "--source", tmp_path / "source", "--data", tmp_path / "images")
    assert checks(*arguments)["measured"] == 2
    built.rows[1]["test_accuracy"] += 0.1
    built.write(CLAIMS)
    result = run("verify", *arguments)
    assert result.exit_code == 1
    assert "member 1 of tiny: accuracy: expected test accuracy " in result.stdout


def test_a_cut_shard_is_named_once(tmp_path: Path) -> None:
    build(tmp_path, members=range(6), per_shard=3)
    first, _ = sorted((tmp_path / "shards" / "tiny").iterdir())
    first.write_bytes(first.read_bytes()[:-20_000])
    result = run("verify", "tiny", "--source", tmp_path, "--sample", "0")
    assert result.exit_code == 1
    assert result.stdout.count(first.name) == 1
    assert "tiny: bytes: members 0-2: tensor " in result.stdout
    assert checks("tiny", "--source", tmp_path)["read"] == 3


def test_offline_verify_keeps_what_it_has_found(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    published(hub)
    assert run("download", "tiny", "--members", "2,15", "--source", ADDRESS).exit_code == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("verify", "tiny", "--source", ADDRESS, "--sample", "0")
    assert result.exit_code == 5
    assert "tiny: checked bytes and values 2 of 20, hash 2 of 20, accuracy 0 of 20\n" in result.stdout
    assert "tiny: not checked: bytes, since they could not be fetched: 18 members\n" in result.stdout
    assert "expected them in the cache, since HF_HUB_OFFLINE is set" in result.stderr
    assert "No problems" not in result.stdout


def test_python_m_runs_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "checkpoints_zoo", "show", "none"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (3, "")
