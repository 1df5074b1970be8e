"""Exports: pieces give what the whole gives, failed members keep their row, another recipe is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import SelectionError, UsageError
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.training.packing import split_of_run
from checkpoints_zoo.training.population import TrainedMember
from checkpoints_zoo.training.recipes import RECIPES
from tests.support.tiny import export

TIMES = ["created", "wall_time_s"]


def trained(name: str, members: Sequence[int], failed: Sequence[int] = ()) -> list[TrainedMember]:
    """Members whose weights are drawn, not trained."""
    recipe, found = RECIPES[name](), []
    for member in members:
        torch.manual_seed(member)
        state = build_architecture(recipe.architecture, **recipe.arguments).state_dict()
        state = {n: t.detach() for n, t in state.items() if not n.endswith("num_batches_tracked")}
        bad = member in failed
        found.append(
            TrainedMember(member, member, "failed" if bad else "ok", "the loss" if bad else "", state, 1.0, 0.5)
        )
    return found


def files(out: Path) -> dict[str, bytes]:
    found = [p for p in sorted(out.rglob("*")) if p.is_file() and p.suffix != ".parquet"]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet-digits", "resnet8-digits"])
def test_pieces_in_any_order_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]()
    export(recipe, trained(name, range(5)), tmp_path / "whole")
    for piece in ([3, 1], [4], [0, 2], [2]):  # the last one again, as after a kill
        export(recipe, trained(name, piece), tmp_path / "pieces")
    assert files(tmp_path / "pieces") == files(tmp_path / "whole")
    whole, pieces = (zoo.load(name, source=tmp_path / part).rows.drop_columns(TIMES) for part in ("whole", "pieces"))
    assert pieces.equals(whole)
    assert zoo.load(name, source=tmp_path / "pieces").ids == list(range(5))
    assert zoo.verify(zoo.load(name, source=tmp_path / "pieces")) == []


def test_the_shard_holds_the_weights(tmp_path: Path) -> None:
    (member,) = trained("resnet8-digits", [7])
    export(RECIPES["resnet8-digits"](), [member], tmp_path)
    (path,) = (tmp_path / "shards" / "resnet8-digits").iterdir()
    stored = load_file(path)
    for name, tensor in member.state.items():
        kept = tensor if "running" in name else tensor.half()
        assert torch.equal(stored[f"000007/{name}"], kept), name


def test_a_failed_member_keeps_its_row(tmp_path: Path) -> None:
    name = "convnet-digits"
    export(RECIPES[name](), trained(name, [0, 1, 2], failed=[1]), tmp_path)
    assert zoo.load(name, source=tmp_path).ids == [0, 2]
    failed = zoo.load(name, source=tmp_path, where="status = 'failed'")
    row = failed.rows.to_pylist()[0]
    assert (row["member"], row["reason"], row["path"], row["sha256"]) == (1, "the loss", None, None)
    with pytest.raises(
        SelectionError, match=r"member 1 of convnet-digits: expected weights; found a row without weights"
    ):
        failed.stack()
    export(RECIPES[name](), trained(name, [5], failed=[5]), tmp_path / "all")
    assert zoo.load(name, source=tmp_path / "all", where="status = 'failed'").ids == [5]


def test_another_recipe_of_the_name_is_refused(tmp_path: Path) -> None:
    name = "convnet-digits"
    recipe = RECIPES[name]()
    export(recipe, trained(name, [0]), tmp_path)
    before = files(tmp_path)
    with pytest.raises(UsageError, match=f"with hash .*; found members of {recipe.hash}. Give another folder"):
        export(dataclasses.replace(recipe, lr=0.1), trained(name, [1]), tmp_path)
    assert files(tmp_path) == before


def test_splits_of_runs() -> None:
    splits = [split_of_run(f"{i:016x}") for i in range(4000)]
    for split, share in (("train", 0.7), ("validation", 0.15), ("test", 0.15)):
        assert splits.count(split) / 4000 == pytest.approx(share, abs=0.03)
