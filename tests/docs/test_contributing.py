"""CONTRIBUTING.md's steps, followed in a copy of the package: what is new is one file, and a line in a table or two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints_zoo as zoo

ROOT = Path(__file__).parents[2]

NEW_FILES = {
    "networks/architectures/one_layer.py": """
from __future__ import annotations
from torch import Tensor, nn

class OneLayer(nn.Module):
    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.flatten, self.relu = nn.Flatten(), nn.ReLU()
        self.hidden, self.out = nn.Linear(64 * channels, hidden), nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.relu(self.hidden(self.flatten(images))))

def one_layer(channels: int = 1, hidden: int = 6, classes: int = 10) -> nn.Module:
    return OneLayer(channels, hidden, classes)
""",
    "methods/jitter.py": '''
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
import torch
from checkpoints_zoo.methods.method import POSITIVE_RANGE, Run, check_settings

@dataclass(frozen=True)
class Jitter:
    """Equal noise on all weights of a mode."""

    width: float = 0.01
    name: ClassVar[str] = "jitter"
    title: ClassVar[str] = "Jitter"
    source: ClassVar[str] = "nobody"
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = False

    def fit(self, problem, runs, draws, seed):
        check_settings(self, runs, draws, width=POSITIVE_RANGE)
        generator = torch.Generator().manual_seed(seed)
        modes, _ = problem.modes(runs)
        return [Run(problem.finish({
            name: tensor[run] + self.width * torch.randn(draws, *tensor.shape[1:], generator=generator)
            for name, tensor in modes.items()
        })) for run in range(runs)]

    @classmethod
    def grid(cls, problem):
        return [cls(0.01), cls(0.1)]
''',
    "evaluation/metrics/margins.py": '''
from __future__ import annotations
from torch import Tensor

def margin(probs: Tensor, labels: Tensor, *, check: bool = True) -> Tensor:
    """Return the mean difference of the two largest probabilities."""
    first, second = probs.topk(2).values.unbind(-1)
    return (first - second).mean()
''',
    "sources/shelf_source.py": '''
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path
from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.formats.manifest import snapshot_keys
from checkpoints_zoo.formats.shard_files import Location, tensor_prefix
from checkpoints_zoo.sources.source import ManifestSource

@dataclass(frozen=True)
class ShelfSource(ManifestSource):
    """A folder that is named by an address."""

    def collections(self):
        return sorted(path.stem for path in (self.root / "manifests").glob("*.parquet"))

    def collection_paths(self, name):
        manifest_path = self.root / "manifests" / f"{name}.parquet"
        for path in (manifest_path, manifest_path.with_suffix(".json")):
            if not path.is_file():
                raise self.missing_file_error(path, name)
        return manifest_path, manifest_path.with_suffix(".json")

    def locate(self, described, rows):
        columns = (rows.column(name).to_pylist() for name in ("path", "offset", "layout"))
        return [
            Location(key[0], tensor_prefix(*key), self.local_path(path), offset, described.layouts[layout])
            for key, path, offset, layout in zip(snapshot_keys(rows), *columns, strict=True)
        ]

    def list_files(self, folder):
        return sorted(str(p.relative_to(self.root)) for p in (self.root / folder).rglob("*") if p.is_file())

    def local_path(self, source_path):
        path = (self.root / source_path).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise DamagedError(f"path {source_path}", expected="a file inside the source", found=str(path))
        return path
''',
}
# File, text in it -> lines that are added before the text.
NEW_LINES = {
    (
        "networks/architectures/__init__.py",
        '    "vit": ',
    ): '    "one-layer": _Place("one_layer", "one_layer", (1, 8, 8)),\n',
    (
        "methods/fitting.py",
        "from checkpoints_zoo.methods.laplace",
    ): "from checkpoints_zoo.methods.jitter import Jitter\n",
    ("methods/fitting.py", '    "swag": Swag,'): '    "jitter": Jitter,\n',
    ("evaluation/metrics/__init__.py", "from checkpoints_zoo.evaluation.metrics.scaling"): (
        "from checkpoints_zoo.evaluation.metrics.margins import margin\n"
    ),
    ("evaluation/figures.py", '    "accuracy": Figure('): """    "margin": Figure(
        "0..1",
        "",
        input_kind=PROBABILITIES,
        group=CALIBRATION,
        title="margin",
        definition="Mean difference of the two largest mean probabilities.",
    ),
""",
    ("sources/finding.py", "    if web.is_web_address(address):"): """    if address.startswith("shelf://"):
        from checkpoints_zoo.sources.shelf_source import ShelfSource
        return ShelfSource(Path(address.removeprefix("shelf://")), address, None)
""",
}

# Uses each of them, as a user does.
USE = """
import dataclasses, json, sys
import torch
import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.jitter import Jitter
from checkpoints_zoo.publishing.html_report import report_page
from checkpoints_zoo.training.recipes import convnet_digits

found = {"table": str(zoo.symmetries("one-layer"))}
recipe = dataclasses.replace(
    convnet_digits(), name="layer-digits", architecture="one-layer", arguments={"hidden": 5}, epochs=1, batch_size=250
)
draws = fitting.fit(Jitter(0.02), recipe, out="draws", runs=2, draws=3)
try:
    fitting.fit(Jitter(-1.0), recipe, out="draws", runs=1)
except UsageError as error:
    found["error"] = str(error)
shelf = zoo.load(draws.name, n=4, source="shelf://" + sys.argv[1] + "/draws")
again = zoo.load(shelf.citation)
found["members"] = [member.id for member in again]
found["equal"] = all(
    torch.equal(tensor, one.state_dict()[name])
    for one, other in zip(again, draws)
    for name, tensor in other.state_dict().items()
)
members = zoo.load("convnet-digits", n=4)
report = zoo.evaluate(members, "digits", sizes=[1, 2], subsets=3)
found["margin"] = report["margin"].value
found["limit"] = report.limits["margin"].value
found["accuracy"] = report["accuracy"].value
found["text"], found["member_accuracy"] = str(report), report.drawing["member_accuracy"]
report_page(members, "digits", path="page.html", sizes=[2])
json.dump(found, open("found.json", "w"))
"""


@pytest.mark.slow
def test_something_new_is_a_file_and_a_line(tmp_path: Path) -> None:
    copy = tmp_path / "checkpoints_zoo"
    shutil.copytree(
        ROOT / "checkpoints_zoo", copy, ignore=lambda folder, names: {"embedded", "cards", "manifests", "__pycache__"}
    )
    for name in ("embedded", "cards", "manifests"):
        (copy / name).symlink_to((ROOT / "checkpoints_zoo" / name).resolve())
    for name, text in NEW_FILES.items():
        (copy / name).write_text(text)
    for (name, place), lines in NEW_LINES.items():
        text = (copy / name).read_text()
        assert text.count(place) == 1, (name, place)
        (copy / name).write_text(text.replace(place, lines + place))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)], cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "found.json").read_text())

    assert "6 exact scale factors" in found["table"]
    assert "10^2.9 permutations in 1 group" in found["table"]  # 6! = 720
    assert found["error"] == "width of jitter: expected a number above 0; found -1.0."
    assert (found["members"], found["equal"]) == ([0, 1, 2, 3], True)
    members = zoo.load("convnet-digits", n=4)
    digits = zoo.images.load("digits")
    assert digits.labels is not None
    labels = digits.labels.numpy()
    with torch.no_grad():
        inputs = members.preprocess(digits.images)
        probs = np.stack([member.model()(inputs).softmax(-1).numpy() for member in members])
    two = np.sort(probs.mean(0))[:, -2:]
    assert found["margin"] == pytest.approx((two[:, 1] - two[:, 0]).mean(), abs=1e-6)
    assert found["limit"] < found["margin"]  # The mean of more members is less sure.
    assert found["member_accuracy"] == pytest.approx([(p.argmax(-1) == labels).mean() for p in probs])
    assert "margin" in found["text"]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Mean difference of the two largest mean probabilities." in page
