"""Checkpoints as people keep them, small: archives, folders of safetensors, folders of torch.save's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.interop.ingest import Imported, ingest
from tests.support.archives import local_tar
from tests.support.scenarios import State, hash_of

SHAPES = {"conv1.weight": (2, 1, 4, 4), "conv2.weight": (10, 1, 5, 5), "linear.bias": (10,), "linear.weight": (10, 10)}
OURS = {"linear.bias": "fc.bias", "linear.weight": "fc.weight"}


def states(count: int, seed: int = 0) -> list[State]:
    """Draw OptuNets in float16, under upstream's names."""
    generator = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=generator).half() for n, s in SHAPES.items()} for _ in range(count)]


def ours(state: Mapping[str, Tensor]) -> State:
    return {OURS.get(name, name): tensor for name, tensor in state.items()}


def hashes(made: list[State]) -> list[str]:
    """The content hashes, from their definition."""
    return [hash_of(ours(state)) for state in made]


def tar(folder: Path, made: list[State], mode: str = "w") -> Path:
    """Lay members into a tar called .tgz, in the order of text; return the folder."""
    order = sorted(range(len(made)), key=str)
    files = [(f"nets/version_{i}.safetensors", save(made[i])) for i in order]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nets-0.tgz").write_bytes(local_tar(files, mode=mode))
    return folder


def gzipped(folder: Path, made: list[State]) -> Path:
    return tar(folder, made, "w:gz")


def files(folder: Path, made: list[State]) -> Path:
    """Lay members into safetensors files of one name, in folders of their own; return the folder."""
    for i, state in enumerate(made):
        path = folder / f"run_{i}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(save(state))
    return folder


def pickles(folder: Path, made: list[State]) -> Path:
    """Lay members into Lightning's checkpoints, wrapped as it does; return the folder."""
    folder.mkdir(parents=True)
    for i, state in enumerate(made):
        wrapped = {f"model.{name}": tensor for name, tensor in state.items()}
        torch.save({"epoch": 3, "state_dict": wrapped, "lr_schedulers": []}, folder / f"net{i}.ckpt")
    return folder


KINDS: dict[str, Callable[[Path, list[State]], Path]] = {
    "tar": tar, "gzip": gzipped, "files": files, "pickles": pickles,
}  # fmt: skip


def members_in(shards: Path) -> dict[int, State]:
    """Read all members of a folder of shards with the safetensors library; return id -> tensors."""
    found: dict[int, State] = {}
    for path in shards.iterdir():
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                member, _, name = key.partition("/")
                if name != "_pad":
                    found.setdefault(int(member), {})[name] = file.get_tensor(key)
    return found


def imported(*arguments: Any, **options: Any) -> Imported:
    done = ingest(*arguments, **options)
    assert isinstance(done, Imported)
    return done


def rows_of(folder: Path, name: str = "nets") -> list[dict[str, Any]]:
    """All rows of a collection, whatever their status."""
    found: list[dict[str, Any]] = zoo.load(name, source=folder, where="status != ''").rows.to_pylist()
    return found
