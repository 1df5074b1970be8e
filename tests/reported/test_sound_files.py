"""Sound checkpoints are imported: what lies beside the net, links, tied weights, older names."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.interop.ingest import ingest
from checkpoints_zoo.interop.ingest.networks import NetSpec

State = dict[str, Tensor]


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def state_of(seed: int) -> State:
    torch.manual_seed(seed)
    return build().state_dict()


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def averaged(seed: int) -> State:
    torch.manual_seed(seed)
    return AveragedModel(build()).state_dict()


BESIDE: dict[str, tuple[Callable[[int], State], dict[str, Any]]] = {
    "a loss": (lambda i: prefixed("model.", state_of(i)) | {"criterion.weight": torch.ones(2)}, {}),
    "a teacher": (
        lambda i: prefixed("teacher.", state_of(9)) | prefixed("student.", state_of(i)),
        {"prefix": "student."},
    ),
    "an average": (
        lambda i: prefixed("model.", state_of(i)) | prefixed("ema_model.", state_of(i + 9)),
        {"prefix": "model."},
    ),
    "AveragedModel": (averaged, {}),
}


@pytest.mark.parametrize("save", [torch.save, save_file])
@pytest.mark.parametrize("kind", BESIDE)
def test_weights_beside_the_nets(tmp_path: Path, kind: str, save: Callable[[State, Path], None]) -> None:
    """Case 24: tensors under other prefixes than the net's are left out; the net's are all there."""
    make, options = BESIDE[kind]
    suffix = "pt" if save is torch.save else "safetensors"
    (tmp_path / "in").mkdir()
    for seed in range(3):
        save({name: tensor.clone() for name, tensor in make(seed).items()}, tmp_path / "in" / f"seed-{seed}.{suffix}")
    members = zoo.from_checkpoints(tmp_path / "in", build, out=tmp_path / "out", name="mine", **options)
    assert members.ids == [0, 1, 2]
    for seed, member in enumerate(members):
        expected = {n: t for n, t in state_of(seed).items() if t.is_floating_point()}
        found = member.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert zoo.verify(members) == []


def test_two_nets_in_one_state_dict(tmp_path: Path) -> None:
    """Case 24: if two prefixes fit, the user chooses; weights without a prefix beside others are no other net's."""
    both = prefixed("teacher.", state_of(9)) | prefixed("student.", state_of(0))
    torch.save(both, tmp_path / "seed-0.pt")
    with pytest.raises(UsageError, match=r"2 prefixes that fit, 'student\.', 'teacher\.'\. Choose one with prefix="):
        zoo.from_checkpoints(tmp_path, build, out=tmp_path / "out", name="mine")
    larger = state_of(0) | {"3.weight": torch.ones(2, 2)}
    for extra in (larger, prefixed("model.", larger) | {"criterion.weight": torch.ones(2)}):
        torch.save(extra, tmp_path / "seed-0.pt")
        with pytest.raises(LayoutError, match="extra "):
            zoo.from_checkpoints(tmp_path, build, out=tmp_path / "out", name="mine")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs))
        return outputs


def test_tied_weights_stored_once(tmp_path: Path) -> None:
    """Case 24: safetensors' save_model stores a tied tensor under one of its names."""
    net = Tied()
    save_model(net, str(tmp_path / "seed-0.safetensors"))
    members = zoo.from_checkpoints(tmp_path, Tied, out=tmp_path / "out", name="mine")
    model, inputs = members[0].model(), torch.randn(5, 3)
    assert torch.equal(model(inputs), net(inputs))
    wrapped = {f"module.{name}": tensor for name, tensor in net.state_dict().items() if name != "last.weight"}
    (tmp_path / "wrapped").mkdir()
    torch.save(wrapped, tmp_path / "wrapped" / "seed-0.pt")
    again = zoo.from_checkpoints(tmp_path / "wrapped", Tied, out=tmp_path / "out", name="again")
    assert torch.equal(again[0].model()(inputs), net(inputs))


def test_older_names_of_weight_norm(tmp_path: Path) -> None:
    """Case 24: weight_g and weight_v are original0 and original1 of the parametrization that replaced them."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.Sequential(old_weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))

    def new() -> nn.Sequential:
        return nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))

    torch.save(prefixed("module.", old.state_dict()), tmp_path / "seed-0.pt")
    members = zoo.from_checkpoints(tmp_path, new, out=tmp_path / "out", name="mine")
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(members[0].model()(inputs), old(inputs), rtol=1e-6, atol=1e-6)


def test_run_folders_that_are_links(tmp_path: Path) -> None:
    """Case 6: links to folders are followed, each folder once, and loops end."""
    real, runs = tmp_path / "store", tmp_path / "runs"
    for seed in range(3):
        (real / f"job{seed}").mkdir(parents=True)
        torch.save(state_of(seed), real / f"job{seed}" / "model.pt")
    runs.mkdir()
    for seed in range(3):
        (runs / f"run_{seed}").symlink_to(real / f"job{seed}")
    (runs / "latest").symlink_to(runs / "run_2")
    (runs / "loop").symlink_to(runs)
    members = zoo.from_checkpoints(runs, build, out=tmp_path / "out", name="mine")
    assert len(members) == 3
    found = {member.state_dict()["0.weight"].sum().item() for member in members}
    assert found == {state_of(seed)["0.weight"].sum().item() for seed in range(3)}


def test_seeds_of_32_bits(tmp_path: Path) -> None:
    """Case 24: Lightning and numpy take seeds in [0, 2^32)."""
    for seed in range(2):
        torch.save(state_of(seed), tmp_path / f"seed-{seed}.pt")
    columns: dict[str, Any] = {"seed": [2**32 - 1, 2**31]}
    members = zoo.from_checkpoints(tmp_path, build, out=tmp_path / "out", name="mine", columns=columns)
    assert members.manifest["seed"].tolist() == [2**32 - 1, 2**31]
    assert zoo.load("mine", source=tmp_path / "out", where="seed > 3000000000").ids == [0]
    with pytest.raises(UsageError, match=r"column 'seed' of member 0: expected a whole number in \[0, 2³²\); found"):
        zoo.from_checkpoints(tmp_path, build, out=tmp_path / "out", name="other", columns={"seed": [2**32, 1]})


def _folder_of(folder: Path, names: Sequence[str], suffix: str) -> dict[str, State]:
    """Save a random net under each name; return name -> its state dict."""
    folder.mkdir(exist_ok=True)
    states = {}
    for name in names:
        torch.manual_seed(zlib.crc32(name.encode()))
        states[name] = build().state_dict()
        save = save_file if suffix == ".safetensors" else torch.save
        save(states[name], folder / f"{name}{suffix}")
    return states


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("first", "added", "ids"),
    [
        (["seed-3", "seed-12"], ["seed-7", "seed-40"], {"seed-3": 3, "seed-12": 12, "seed-7": 7, "seed-40": 40}),
        (["b", "d"], ["a", "c"], {"b": 0, "d": 1, "a": 2, "c": 3}),
    ],
    ids=["numbers", "names"],
)
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "in place"])
def test_files_added_to_a_folder_extend_its_collection(
    tmp_path: Path, suffix: str, first: list[str], added: list[str], ids: dict[str, int], copied: bool
) -> None:
    """Issue 16, item 6: members keep their ids, weights and columns; the new files get ids of their own."""
    if suffix == ".pt" and not copied:
        return  # such files are always copied
    folder, out = tmp_path / "in", tmp_path / "out"

    def import_folder() -> zoo.Collection:
        if copied:
            return zoo.from_checkpoints(folder, build, out=out, name="mine")
        ingest([folder], "mine", hash=True, net=NetSpec(custom_name="Net"), build=build)
        return zoo.load("mine", source=folder, architecture=build)

    states = _folder_of(folder, first, suffix)
    before = import_folder()
    assert import_folder().manifest.equals(before.manifest)
    states |= _folder_of(folder, added, suffix)
    after = import_folder()
    assert sorted(after.ids) == sorted(ids.values())
    for name, member in ids.items():
        stored = next(m for m in after if m.id == member).state_dict()
        assert all(torch.equal(stored[key], tensor) for key, tensor in states[name].items())
    assert zoo.verify(after) == []
    assert import_folder().manifest.equals(after.manifest)
    if copied:
        shards = {path.relative_to(out).as_posix() for path in (out / "shards" / "mine").iterdir()}
        assert shards == set(after.manifest["path"])


def test_a_file_that_changed_is_another_import(tmp_path: Path) -> None:
    """Issue 16, item 6: only files that are new extend a collection."""
    _folder_of(tmp_path / "in", ["a", "b"], ".pt")
    zoo.from_checkpoints(tmp_path / "in", build, out=tmp_path / "out", name="mine")
    _folder_of(tmp_path / "in", ["c"], ".pt")
    torch.save({key: tensor + 1 for key, tensor in build().state_dict().items()}, tmp_path / "in" / "a.pt")
    os.utime(tmp_path / "in" / "a.pt", (1, 1))
    with pytest.raises(UsageError, match="found one of other files, of files that changed, or of another net"):
        zoo.from_checkpoints(tmp_path / "in", build, out=tmp_path / "out", name="mine")
