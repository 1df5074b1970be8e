"""What a folder of checkpoints can have wrong beside its tensors: values, links, the net, images."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import LeftOut, SourceNotFound, UsageError
from tests.support.commands import run, values
from tests.support.originals import tar

IMAGES: dict[str, Any] = {"like": "convnet-digits"}
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Net(nn.Module):
    """Takes grey images of any size.

    Args:
        classes: of its logits.
        channels: of its inputs.
    """

    def __init__(self, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3)
        self.head = nn.Linear(8, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(inputs).relu().mean((2, 3)))
        return logits


class Looking(Net):
    """Looks at values, which a net without memory has none of."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs * (1 if float(inputs.sum()) >= 0 else 2))


class Both(Net):
    """Gives two results."""

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs), inputs


def saved(folder: Path, count: int = 3) -> Path:
    """Save nets with names as DataParallel has them; return the folder."""
    folder.mkdir(parents=True)
    for seed in range(count):
        torch.manual_seed(seed)
        torch.save({f"module.{n}": t for n, t in Net().state_dict().items()}, folder / f"seed-{seed}.pt")
    return folder


def source_of(folder: Path, out: Path, architecture: Callable[[], nn.Module] = Net, **options: Any) -> zoo.Collection:
    return zoo.from_checkpoints(folder, architecture, out=out, name="mine", **options)


def test_values_that_changed_on_the_disk(tmp_path: Path) -> None:
    """torch.load does not look at the checksums that torch.save writes."""
    folder = saved(tmp_path / "in")
    raw = bytearray((folder / "seed-1.pt").read_bytes())
    at = raw.index(torch.load(folder / "seed-1.pt")["module.conv.weight"].numpy().tobytes())
    raw[at + 40] ^= 1
    (folder / "seed-1.pt").write_bytes(raw)
    assert torch.load(folder / "seed-1.pt", weights_only=True).keys()
    text = r"member 1 \(seed-1\.pt\): failed, values that differ from the saved ones, by the checksum of \S+/data/\d"
    with pytest.warns(LeftOut, match=text):
        assert source_of(folder, tmp_path / "out").ids == [0, 2]
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(Net().state_dict(), folder / "seed-1.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(Net().state_dict(), folder / "seed-2.pt", _use_new_zipfile_serialization=False)
    assert source_of(folder, tmp_path / "without").ids == [0, 1, 2]


@pytest.mark.parametrize(("target", "found"), [("none.pt", "No such file"), ("seed-9.pt", "Too many levels")])
def test_a_link_to_nothing(target: str, found: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "in")
    (folder / "seed-9.pt").symlink_to(target)
    with pytest.raises(SourceNotFound, match=rf"seed-9\.pt: expected a file that can be read; found a link, {found}"):
        source_of(folder, tmp_path / "out")
    with pytest.raises(SourceNotFound, match="expected a table; found Is a directory"):
        source_of(folder, tmp_path / "out", columns=folder)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Net(7), "classes of mine: expected 7, as many as the members' logits; found 10"),
        (
            lambda: Net(10, 3),
            r"architecture of mine: expected a net for inputs \(1, 8, 8\), the shape in its preprocessing",
        ),
        (Both, r"architecture of mine: expected a net that returns logits \(input, class\); found a tuple"),
    ],
)
def test_nets_and_descriptions_that_do_not_go_together(build: Any, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    torch.save(build().state_dict(), folder / "seed-0.pt")
    with pytest.raises(UsageError, match=text):
        source_of(folder, tmp_path / "out", build, **IMAGES)
    vectors = nn.utils.parameters_to_vector(build().parameters()).detach()[None]
    with pytest.raises(UsageError, match=text.replace("of mine", "of mine-vi")):
        zoo.from_samples(vectors, build, method="vi", out=tmp_path, name="mine-vi", order="parameters", **IMAGES)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents]


def test_a_net_that_looks_at_values(tmp_path: Path) -> None:
    assert len(source_of(saved(tmp_path / "in"), tmp_path / "out", Looking, **IMAGES)) == 3


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    folder, out = saved(tmp_path / "in"), tmp_path / "out"
    (folder / "seed-3.pt").write_bytes(b"")
    refused: list[dict[str, Any]] = [
        {}, {"files": "seed-[012].pt", "device": "gpu", "evaluate": "digits", **IMAGES},
        {"files": "seed-[012].pt", "evaluate": "photos", **IMAGES},
        {"files": "seed-[012].pt", "evaluate": zoo.images.of("digits", size=(9, 9)), **IMAGES},
    ]  # fmt: skip
    for options in refused:
        with pytest.raises(ValueError, match="expected"):
            source_of(folder, out, **options)
    assert not [path for path in out.rglob("*") if path.is_file()]


def test_a_source_in_the_folder_of_the_checkpoints(tmp_path: Path) -> None:
    folder = saved(tmp_path / "in")
    first = source_of(folder, folder).rows
    assert source_of(folder, folder).rows.equals(first)


def test_a_collection_by_a_number(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="collection name 5: expected lower-case letters"):
        zoo.from_checkpoints(saved(tmp_path / "in"), Net, out=tmp_path / "out", name=5)  # type: ignore[arg-type]


@pytest.mark.slow
def test_members_are_measured_on_all_kinds_of_images(tmp_path: Path) -> None:
    """A folder whose classes are in another order, its address on the command line, tensors and prepared inputs."""
    digits, folder = zoo.images.load("digits"), saved(tmp_path / "in")
    assert digits.labels is not None
    for at in range(60):
        file = tmp_path / "words" / WORDS[digits.labels[at]] / f"{at}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.images[at, 0].numpy()).save(file)
    shutil.copytree(tmp_path / "words", tmp_path / "numbers")
    for number, word in enumerate(WORDS):
        (tmp_path / "numbers" / word).rename(tmp_path / "numbers" / f"{number}")
    logits = [Net() for _ in range(3)]
    for seed, net in enumerate(logits):
        net.load_state_dict({n.removeprefix("module."): t for n, t in torch.load(folder / f"seed-{seed}.pt").items()})
    preprocess = zoo.load("convnet-digits").preprocess
    inputs, labels = preprocess(digits.images[:60]), digits.labels[:60]
    right = [float((net(inputs).argmax(1) == labels).double().mean()) for net in logits]
    renamed = dict(zip(WORDS, digits.classes, strict=True))
    kinds: dict[str, Any] = {
        "words": zoo.images.of(tmp_path / "words", renamed=renamed),
        "numbers": str(tmp_path / "numbers"),
        "dataset": zoo.images.of(TensorDataset(digits.images[:60], labels), classes=digits.classes),
        "inputs": zoo.images.prepared((inputs, labels), classes=digits.classes),
    }
    for kind, images in kinds.items():
        found = source_of(folder, tmp_path / "out" / kind, evaluate=images, **IMAGES)
        assert np.allclose(found.rows["test_accuracy"].to_pylist(), right, atol=1e-6)
    assert set(found.rows["eval_data"].to_pylist()) == {"inputs/test"}
    with pytest.raises(UsageError, match=r"images 'words' for mine: expected labels .* found 'eight', 'five', 'four'"):
        source_of(folder, tmp_path / "out" / "other", evaluate=tmp_path / "words", **IMAGES)


def test_a_net_of_ones_own_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    members = source_of(saved(tmp_path / "in"), tmp_path / "out", evaluate="digits", **IMAGES)
    command = ("evaluate", "mine", "--source", "out", "--data", "digits", "--format", "json")
    text = r"architecture 'Net' of mine: expected one of .*, or a function for it; found neither\. Give .*=build"
    assert re.search(text, run(*command).output)
    net = ("--architecture", f"{__name__}:Net")
    accuracy = zoo.evaluate(members, "digits")["accuracy"].value
    figures = {(x["of"], x["members"], x["figure"]): x["value"] for x in values(run(*command, *net))["figures"]}
    assert figures["ensemble", 3, "accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert run("verify", "out").exit_code == 0  # it says that the accuracies were not measured
    assert run("verify", "out", *net).exit_code == 0
    assert run("show", "mine", "--source", "out", *net).exit_code == 2


def test_columns_of_an_archive_have_no_files(tmp_path: Path) -> None:
    states = [{n: t.clone() for n, t in Net().state_dict().items()} for _ in range(2)]
    folder, out = tar(tmp_path / "in", states), tmp_path / "out"
    with pytest.raises(UsageError, match=r"^columns by file: expected members that are files of their own; found arch"):
        zoo.from_checkpoints(folder, Net, out=out, name="mine", columns={"lr": 0.1})
    assert not (out / "manifests").exists()


@pytest.mark.parametrize("seeds", [{30, 1, 17}, [np.array([1, 2]), 2, 3], [torch.zeros(2), 2, 3]])
def test_columns_that_say_not_which_number_is_whose(seeds: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^column 'seed' of member 0: expected a whole number in"):
        zoo.from_checkpoints(saved(tmp_path / "in"), Net, out=tmp_path / "out", name="mine", columns={"seed": seeds})
