"""Members trained again from their rows: bit for bit on this machine, by accuracy elsewhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import checkpoints_zoo as zoo
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import SelectionError, UsageError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.training.retrain import difference_half_width, retrain
from tests.support.commands import run
from tests.support.tiny import TINY, no_waiting_for_the_disk, stored  # noqa: F401 (a fixture)

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")
FILE = """
from dataclasses import replace
from checkpoints_zoo.training.recipes import convnet_digits
RECIPE = replace(convnet_digits(), name="tiny", epochs=1, batch_size=250, stack_width=3, save_every=1)
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(range(6), tmp_path_factory.mktemp("out"))


def changed(members: Collection, **columns: Any) -> Collection:
    """Give the members with other values in their rows."""
    rows = manifest.build_manifest([row | columns for row in members.rows.to_pylist()])
    return Collection(members.source, members._commit, members.description, rows)


@pytest.mark.slow
def test_the_same_bytes_here_and_accuracies_elsewhere(out: Path) -> None:
    members = zoo.load("tiny", source=out)
    found = retrain(members, 2, TINY)
    assert [(x.member, x.compared, x.same) for x in found] == [(0, "bytes", True), (2, "bytes", True)]
    row = members.member(2).row
    assert found[1].text == f"sha256 {row['sha256'][:16]}…"
    # The rest of the paths share one stack trained once each.
    other = retrain(changed(members, device="another"), 1, TINY)
    assert [(x.compared, x.same) for x in other] == [("accuracy", True)]
    before = members.member(0).row["test_accuracy"]
    assert other[0].text.startswith(f"{before:.4f} before, {before:.4f} now, ± 0.")
    assert f"(trained by torch {row['torch_version']} on another, here " in other[0].text
    far = retrain(changed(members, torch_version="1.0", test_accuracy=before + 0.2), 1, TINY)
    assert [(x.compared, x.same) for x in far] == [("accuracy", False)]


@pytest.mark.slow
def test_what_can_not_be_trained_again(out: Path) -> None:
    members = zoo.load("tiny", source=out)
    with pytest.raises(UsageError, match=r"recipe of member 0 of tiny: expected hash .*; found .* of recipe 'tiny'\."):
        retrain(members, 1, dataclasses.replace(TINY, lr=0.1))
    with pytest.raises(UsageError, match=r"recipe of tiny: expected one of the package.s in its rows .*; found none"):
        retrain(changed(members, recipe=None), 1)
    with pytest.raises(UsageError, match="'tiny'"):
        retrain(members, 1)
    failed = zoo.load("tiny", source=out, where="status = 'failed'")
    with pytest.raises(SelectionError, match="members of tiny to train again: expected one or more; found none"):
        retrain(failed, 1)


def test_the_command(out: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(FILE)
    command = ["verify", "tiny", "--retrain", "1", "--recipe", tmp_path / "tiny.py", "--source"]
    done = run(*command, out)
    assert done.exit_code == 0, done.output
    assert "member 0 of tiny, trained again: bytes agree: sha256 " in done.stdout
    # One that claims other weights.
    other = stored([0], tmp_path / "other")
    members = zoo.load("tiny", source=other)
    manifest.write_manifest(changed(members, sha256="0" * 64).rows, other / "manifests" / "tiny.parquet")
    done = run(*command, other)
    assert done.exit_code == 1
    assert f"member 0 of tiny: retraining: expected sha256 {'0' * 16}…; found " in done.stdout
    assert run("verify", "none", "--retrain", "--source", out).exit_code == 3
    refused = run("verify", "tiny", "--recipe", tmp_path / "tiny.py", "--source", out)
    assert (refused.exit_code, "--recipe and --set need --retrain." in refused.stderr) == (2, True)


@pytest.mark.parametrize(("share", "inputs"), [(0.5, 100), (0.9, 540), (0.98, 10_000)])
def test_the_interval_covers_99_of_100(share: float, inputs: int) -> None:
    """By summing both binomials: 0.985 to 0.999 of two fair draws lie within it."""
    counts = range(inputs + 1)
    weights = stats.binom.pmf(counts, inputs, share)
    near = [k for k in counts if weights[k] > 1e-7]
    covered = sum(
        weights[one] * weights[other]
        for one in near
        for other in near
        if abs(one - other) / inputs <= difference_half_width(one / inputs, other / inputs, inputs)
    )
    assert 0.985 < covered < 0.999
