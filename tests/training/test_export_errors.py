"""What goes wrong for a producer: networks with mistakes, edited files, full disks, lost shards, impatience."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import shlex
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import Output, main
from checkpoints_zoo.errors import DamagedError, StorageError, TooLargeError, UsageError
from checkpoints_zoo.training import population
from checkpoints_zoo.training.export import Export, train_into
from checkpoints_zoo.training.merge import merge
from checkpoints_zoo.training.recipe_files import read_recipe
from checkpoints_zoo.training.state import training_lock
from tests.support.tiny import (  # noqa: F401 (fixtures)
    TINY,
    add_finished,
    contents,
    finished,
    no_waiting_for_the_disk,
    stored,
    two_a_shard,
)

pytestmark = pytest.mark.usefixtures("two_a_shard", "no_waiting_for_the_disk")
ROOT = Path(__file__).parents[2]

FILE = """
from dataclasses import replace
import torch
from torch import nn
from checkpoints_zoo.training.recipes import convnet_digits

def RECIPE():
    return replace(convnet_digits(), name="mine", architecture="mine", arguments={}, build=build, epochs=1,
                   batch_size=250, stack_width=2)

def build():
"""
LOGITS = "expected float32 logits (2, 10) for images (2, 1, 8, 8)"
MISTAKES = {  # what build() does -> what is said
    "return nn.Linear(64, 'ten')": "function `build` of recipe 'mine': expected a module; found TypeError: empty()",
    "return nn.Sequential(nn.Flatten(), nn.Linear(65, 10))": f"{LOGITS}; found RuntimeError: ",
    "return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))": f"{LOGITS}; found torch.float32 (2, 9).",
    "return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).half()": f"{LOGITS}; found RuntimeError: ",
    "return nn.LSTM(8, 10)": f"{LOGITS}; found ",
    "return nn.Flatten()": f"{LOGITS}; found torch.float32 (2, 64).",
}


def written(folder: Path, body: str) -> Path:
    path = folder / "mine.py"
    path.write_text(f"{FILE}    {body}\n")
    return path


def command(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["train", *(str(a) for a in arguments)], catch_exceptions=False)


# Networks and files


@pytest.mark.parametrize("body", MISTAKES)
def test_a_network_with_a_mistake_is_refused_and_mended_in_place(tmp_path: Path, body: str) -> None:
    path = written(tmp_path, body)
    before = torch.get_rng_state()
    done = command(path, "--members", "0", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert MISTAKES[body] in done.stderr
    assert torch.equal(torch.get_rng_state(), before)
    if body.startswith("return nn.Linear"):
        assert done.stderr.endswith(f" (in line 12 of {path}).\n")


def test_the_first_try_does_not_bind_a_folder(tmp_path: Path) -> None:
    """A network that only its first step finds out, then mended: the folder takes it. Once one is trained, no other."""
    dropping = "return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10))"
    arguments = (written(tmp_path, dropping), "--members", "0", "--out", tmp_path / "out")
    assert "Set stack_width=1" in command(*arguments).stderr
    written(tmp_path, dropping.replace("nn.Dropout(), ", ""))
    assert command(*arguments).exit_code == 0
    written(tmp_path, dropping.replace("Dropout", "ReLU"))
    assert "Give another folder, or name the changed recipe differently" in command(*arguments).stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def build(:", "expected Python that runs; found SyntaxError: "),
        ("import nowhere", "found ModuleNotFoundError"),
    ],
)
def test_a_file_that_does_not_run(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"\n{text}\n")
    with pytest.raises(UsageError) as error:
        read_recipe(str(path))
    assert found in str(error.value)
    assert str(error.value).endswith(f" (in line 2 of {path}).")


def test_an_edited_file_changes_nothing_of_a_run_that_goes_on(tmp_path: Path) -> None:
    recipe = read_recipe(str(written(tmp_path, "return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))")))
    was = recipe.hash

    def edit(text: str) -> None:
        written(tmp_path, "return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))")

    train_into(recipe, range(4), tmp_path / "out", say=edit)
    rows = zoo.load("mine", source=tmp_path / "out").rows.to_pylist()
    assert {row["recipe_hash"] for row in rows} == {was}
    assert read_recipe(str(tmp_path / "mine.py")).hash != was


def test_too_little_memory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total …")

    monkeypatch.setattr(population, "train_stack", full)
    with pytest.raises(TooLargeError) as error:
        train_into(TINY, [0], tmp_path)
    assert str(error.value) == (
        "a stack of 3 members on cpu: expected room for it in the device's memory; found CUDA out of memory."
        " Give the device fewer workers, or set a smaller stack_width or batch_size: that is another recipe."
    )


# Disks


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next file is the one too many, each time one later: it is said, and what is there is gone on with."""
    stored([0, 1, 2], tmp_path / "whole")
    for moment in itertools.count():
        left = itertools.count()

        def full(descriptor: int, left: Any = left, moment: int = moment) -> None:
            if next(left) == moment:
                raise OSError(ENOSPC, os.strerror(ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            try:
                train_into(TINY, [0, 1, 2], tmp_path / "full")
                break
            except StorageError as error:
                said = str(error)
        assert "expected a folder with free space that can be written to; found No space left on device" in said
    assert moment > 3
    train_into(TINY, [0, 1, 2], tmp_path / "full")
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")
    assert not list((tmp_path / "full").rglob("*.tmp")) + list((tmp_path / "full").rglob("*.partial"))


def test_a_folder_that_can_not_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match="expected a folder with free space that can be written to; found Not a directory"
    ):
        train_into(TINY, [0], tmp_path / "file" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_lost_shard_is_made_again(tmp_path: Path, damage: str) -> None:
    out = stored(range(4), tmp_path / "out")
    whole = contents(out)
    path = sorted((out / "shards" / "tiny").iterdir())[1]  # of members 2 and 3
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-4])
    lost = [2, 3] if damage == "gone" else [3]
    listed = "2-3" if damage == "gone" else "3"
    wanted = (
        f"members {listed} of tiny in folder {out}: expected their bytes in shards; found rows in the manifest alone."
    )
    with pytest.raises(DamagedError) as error:
        train_into(TINY, [0, 1], out)
    assert str(error.value) == f"{wanted} Put the shards back, or train these members as well: --members {listed}."
    with pytest.raises(DamagedError) as error:
        merge([out], tmp_path / "merged")
    assert str(error.value) == f"{wanted} Put the shards back, or train these members into that folder again."
    said: list[str] = []
    assert train_into(TINY, range(4), out, say=said.append) == len(lost)
    assert f"tiny: the bytes of {len(lost)} members are gone; these are trained again" in said
    assert contents(out) == whole


def test_a_changed_shard_is_not_copied(tmp_path: Path) -> None:
    out, whole = stored([0], tmp_path / "out"), contents(stored([0, 1], tmp_path / "whole"))
    (path,) = (out / "shards" / "tiny").iterdir()
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with (
        training_lock(out),
        pytest.raises(DamagedError, match=r"The members trained now are kept\. Delete that file, and train"),
    ):
        add_finished(Export(TINY, out), finished([1]))
    path.unlink()
    assert train_into(TINY, [0, 1], out) == 1
    assert contents(out) == whole


def test_exporting_into_a_source_with_lost_shards_is_refused(tmp_path: Path) -> None:
    out = stored([0], tmp_path)
    next((out / "shards" / "tiny").iterdir()).unlink()
    with pytest.raises(DamagedError, match="members 0 of tiny"):
        stored([], out)


# The command


def test_help_starts_without_torch() -> None:
    for name in ("train", "train-merge", "recipes"):
        code = (
            "import sys\n"
            "from checkpoints_zoo.cli.main import main\n"
            f"try: main([{name!r}, '--help'])\n"
            "except SystemExit: sys.exit(bool({'torch', 'pandas', 'pyarrow'} & set(sys.modules)))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Usage: zoo-cli {name} ")


def test_the_lines_of_the_first_page_can_be_given() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "start.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    given = [shlex.split(line)[1:] for line in lines if line.startswith("zoo-cli ")]
    assert {"recipes", "train", "train-merge", "verify"} <= {name for name, *_ in given}
    for name, *arguments in given:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        command.make_context(name, arguments)


def test_interrupted_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = written(tmp_path, "return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"), tmp_path / "out"
    said: list[str] = []

    def say(output: Output, text: str) -> None:
        said.append(text)
        if "epoch 1/3" in text:
            raise KeyboardInterrupt

    arguments = (path, "--members", "0-1", "--out", out, "--set", "epochs=3", "--set", "save_every=1")
    with monkeypatch.context() as patched:
        patched.setattr(Output, "say", say)
        done = command(*arguments)
    assert (done.exit_code, said[-1]) == (130, "the same command goes on where it was")
    done = command(*arguments)
    assert done.exit_code == 0
    assert "epoch 2/3" in done.stderr
    assert "epoch 1/3" not in done.stderr


def test_a_second_process_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".training").mkdir()
    with (tmp_path / ".training" / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = command("convnet-digits", "--members", "0", "--out", tmp_path)
    assert done.exit_code == 3
    assert done.stderr.startswith(
        f"zoo-cli: error: folder {tmp_path}: expected no other process training into it; found a lock on "
    )


def test_a_bug_of_ours_has_an_exit_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("impossible")

    monkeypatch.setattr("checkpoints_zoo.training.export.train_into", broken)
    done = command("convnet-digits", "--members", "0", "--out", tmp_path)
    assert done.exit_code == 70
    assert "RuntimeError: impossible\nzoo-cli: error: a bug of ours (RuntimeError in " in done.stderr


@pytest.mark.parametrize("ids", ["3,3", "2147483648", "5@1", "4-2", "-1", "0-999999,999999", "٣"])
def test_ids_that_can_not_be(tmp_path: Path, ids: str) -> None:
    done = command("convnet-digits", f"--members={ids}", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "expected" in done.stderr
    assert not (tmp_path / "out").exists()


def test_ids_in_any_order_and_names_in_any_script(tmp_path: Path) -> None:
    path, out = written(tmp_path, "return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"), tmp_path / "Größe 模型"
    assert command(path, "--members", "2147483647,3,1", "--out", out).exit_code == 0
    members = zoo.load("mine", source=out, architecture=read_recipe(str(path)).module)
    assert members.ids == [1, 3, 2147483647]
    assert zoo.verify(members) == []
