"""Tiny sources with known answers, written by hand: struct, json, hashlib, numpy and pyarrow, none of our code.

A source built here is what the format's description says, so that reading it tests the reader and not that reader
and writer agree.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.networks.modules import build_architecture

State = dict[str, Tensor]
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
NAMES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PREPROCESSING = {"size": [8, 8], "channels": 1, "mean": [0.3], "std": [0.4]}
SCHEMA = pa.schema(
    {
        "member": pa.int32(), "epoch": pa.int32(), "final": pa.bool_(), "status": pa.string(), "reason": pa.string(),
        "seed": pa.int32(), "run_id": pa.string(), "split": pa.string(), "test_accuracy": pa.float64(),
        "sha256": pa.string(), "path": pa.string(), "offset": pa.int64(), "nbytes": pa.int64(),
        "layout": pa.string(), "dtype": pa.string(),
    }
)  # fmt: skip


class Mlp(nn.Module):
    """A net the package lacks: tied weights, statistics, a scalar, a bool mask, integers, and nothing at all."""

    mask: Tensor
    order: Tensor

    def __init__(self, width: int = 5, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inside = nn.Linear(64, width)
        self.norm = nn.BatchNorm1d(width)
        self.again = nn.Linear(width, width)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.again.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, 3))
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))
        self.register_buffer("order", torch.arange(width))
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.inside(images.flatten(1))).relu()
        x = self.tied(self.again(x).relu()) * self.scale * self.mask
        logits: Tensor = self.out(x[:, self.order])
        return logits


NETS: dict[str, Callable[[], nn.Module]] = {
    "convnet": lambda: build_architecture("convnet"),
    "resnet8": lambda: build_architecture("resnet8"),
    "mlp": Mlp,
}
OWN = "my-mlp"  # what a source calls the architecture of Mlp, which the package lacks
NETS[OWN] = Mlp


@cache
def new_state(build: Callable[[], nn.Module]) -> State:
    """Return the state dict of a network that a function builds, always the same one: it is read alone."""
    return dict(build().state_dict())


def random_state(net: str, seed: int) -> State:
    """Draw a member's state dict in float32; statistics are large, variances positive, tied weights tied."""
    generator = torch.Generator().manual_seed(seed)
    new, drawn = new_state(NETS[net]), dict[int, Tensor]()  # address of a new network's tensor -> what was drawn
    for name, tensor in new.items():
        last = name.rpartition(".")[2]
        if last == "running_var":
            drawn[tensor.data_ptr()] = torch.rand(tensor.shape, generator=generator) * 2 + 0.5
        elif tensor.is_floating_point():
            drawn[tensor.data_ptr()] = torch.randn(tensor.shape, generator=generator) * 0.3
        elif last == "order":
            drawn[tensor.data_ptr()] = torch.randperm(len(tensor), generator=generator)
        elif last == "mask":
            drawn[tensor.data_ptr()] = torch.rand(tensor.shape, generator=generator) < 0.7
        else:
            drawn[tensor.data_ptr()] = tensor.clone()
    return {name: drawn[tensor.data_ptr()] for name, tensor in new.items()}


def stored(state: Mapping[str, Tensor], weights: torch.dtype) -> State:
    """Round a state dict as the format stores it, in its order: falling item size, the module's order within."""
    kept = {}
    for name, tensor in state.items():
        last = name.rpartition(".")[2]
        if last != "num_batches_tracked":
            wanted = torch.float32 if last in ("running_mean", "running_var") else weights
            kept[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    return dict(sorted(kept.items(), key=lambda pair: -pair[1].dtype.itemsize))


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def file_bytes(tensors: Mapping[str, tuple[str, Sequence[int], bytes]], metadata: bool = True) -> bytes:
    """Write a safetensors file by hand, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    at, body = 0, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(values)]}
        at, body = at + len(values), body + values
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text + body


def hash_of(state: Mapping[str, Tensor]) -> str:
    """The content hash, from its definition."""
    digest = hashlib.sha256()
    for name in sorted(state):
        if name.endswith("num_batches_tracked"):
            continue
        tensor = state[name].float() if state[name].dtype in (torch.float16, torch.bfloat16) else state[name]
        shape = ",".join(str(s) for s in tensor.shape)
        digest.update(f'[{json.dumps(name)},"{NAMES[tensor.dtype]}",[{shape}]]\n'.encode())
        digest.update(raw(tensor))
    return digest.hexdigest()


def opened(path: Path) -> State:
    """All tensors of a file by safetensors' own reader."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def digest_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file below a folder: its path, hash and time."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        p.relative_to(folder).as_posix(): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
        for p in files
    }


@dataclass
class Built:
    """A source on disk, and what it holds.

    Args:
        root: its folder.
        name: of the collection.
        states: (member, epoch) -> tensors as they are stored.
        rows: of the manifest.
        description: the JSON beside it.
    """

    root: Path
    name: str
    states: dict[tuple[int, int], State] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def manifest(self) -> Path:
        return self.root / "manifests" / f"{self.name}.parquet"

    @property
    def json(self) -> Path:
        return self.manifest.with_suffix(".json")

    @property
    def shard(self) -> Path:
        """The first row's file."""
        return self.root / str(self.rows[0]["path"])

    def write(self, schema: pa.Schema = SCHEMA, version: bytes | None = b"1", **options: Any) -> None:
        """Write manifest and description, as they stand in `rows` and `description`; options are pyarrow's."""
        self.manifest.parent.mkdir(parents=True, exist_ok=True)
        columns = [pa.array([r.get(f.name) for r in self.rows], f.type) for f in schema]
        table = pa.table(columns, schema=schema)
        if version is not None:
            table = table.replace_schema_metadata({"schema_version": version})
        with self.manifest.open("wb") as file:
            pq.write_table(table, file, **options)
        self.json.write_text(json.dumps(self.description))


def layout_json(net: str, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The JSON of a layout, from the format's description."""
    tensors = [[name, NAMES[t.dtype], list(t.shape)] for name, t in state.items()]
    size = sum(t.nbytes for t in state.values())
    counters = [n for n in new_state(NETS[net]) if n.endswith("num_batches_tracked")]
    return {"tensors": tensors, "counters": counters, "pad": -size % 8}


def build(
    root: Path,
    net: str = "convnet",
    members: Sequence[int] = (0, 1, 2, 3),
    *,
    name: str = "tiny",
    weights: torch.dtype = torch.float32,
    per_shard: int = 100,
    snapshots: Sequence[int] = (),
    change: Callable[[int, State], None] = lambda member, state: None,
) -> Built:
    """Write a source by hand; return it.

    Args:
        root: its folder.
        net: a key of `NETS`.
        members: ids.
        name: of the collection.
        weights: the stored dtype.
        per_shard: members a shard.
        snapshots: epochs before the final one, 40.
        change: alters a member's tensors before they are stored.
    """
    built = Built(root, name)
    for start in range(0, len(members), per_shard):
        tensors: dict[str, tuple[str, Sequence[int], bytes]] = {}
        keys = [(m, e) for m in members[start : start + per_shard] for e in (*snapshots, 40)]
        for member, epoch in keys:
            state = random_state(net, 1000 * member + epoch)
            change(member, state)
            state = built.states[member, epoch] = stored(state, weights)
            prefix = f"{member:06d}/" if epoch == 40 else f"{member:06d}@{epoch}/"
            tensors |= {prefix + n: (NAMES[t.dtype], t.shape, raw(t)) for n, t in state.items()}
            layout = layout_json(net, state)
            if layout["pad"]:
                tensors[prefix + "_pad"] = ("U8", [layout["pad"]], bytes(layout["pad"]))
        content = file_bytes(tensors)
        short = hashlib.sha256(content).hexdigest()[:8]
        inside = f"shards/{name}/{start // per_shard:05d}-{short}.safetensors"
        (root / inside).parent.mkdir(parents=True, exist_ok=True)
        (root / inside).write_bytes(content)
        nbytes = sum(t.nbytes for t in state.values()) + layout["pad"]
        first = len(content) - nbytes * len(keys)
        for at, (member, epoch) in enumerate(keys):
            built.rows.append(
                {
                    "member": member, "epoch": epoch, "final": epoch == 40, "status": "ok", "seed": member % 1000 + 7,
                    "run_id": f"run{member}", "split": ("train", "validation", "test")[member % 3],
                    "test_accuracy": 0.9 + member / 1000, "sha256": hash_of(built.states[member, epoch]),
                    "path": inside, "offset": first + at * nbytes, "nbytes": nbytes, "layout": "only",
                    "dtype": NAMES[weights],
                }
            )  # fmt: skip
    built.description = {
        "format_version": 1, "name": name, "title": "Tiny", "architecture": OWN if net == "mlp" else net,
        "arguments": {}, "dataset": "digits", "classes": [str(c) for c in range(10)], "preprocessing": PREPROCESSING,
        "layouts": {"only": layout}, "licence": "Apache-2.0", "citation": "none",
    }  # fmt: skip
    built.write()
    return built


def by_hand(net: str, state: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a module and load tensors into it strictly, as any torch user would."""
    module = NETS[net]().eval().to(dtype)
    counters = {n: torch.zeros((), dtype=torch.int64) for n in module.state_dict() if n.endswith("num_batches_tracked")}
    module.load_state_dict({**state, **counters}, strict=True)
    return module


def five(root: Path, net: str) -> Built:
    """Write five members in two shards, float16 but for the statistics; the convnet in float32."""
    weights = torch.float32 if net == "convnet" else torch.float16
    return build(root, net, range(5), weights=weights, per_shard=3)


def load(built: Built, **selection: Any) -> zoo.Collection:
    """Load a source's members with the package; of the user's own net with its architecture."""
    architecture = Mlp if built.description.get("architecture") == OWN else None
    return zoo.load(built.name, source=built.root, architecture=architecture, **selection)


def hand_made(built: Built, member: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load a member's module strictly from what safetensors' own reader sees."""
    path = built.root / next(str(r["path"]) for r in built.rows if r["member"] == member)
    prefix = f"{member:06d}/"
    tensors = {n.removeprefix(prefix): t for n, t in opened(path).items() if n.startswith(prefix)}
    tensors.pop("_pad", None)
    return by_hand(built.description["architecture"], tensors, dtype)


def inputs(count: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    """Images as a net takes them, (batch, channel, height, width)."""
    values = np.random.default_rng(0).normal(size=(count, 1, 8, 8))
    return torch.from_numpy(values).to(dtype)
