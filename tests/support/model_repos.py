"""Replicas of populations in model repos: GPT-NeoX checkpoints as virtual files, a branch a step, on the test Hub."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tests.hub.hub import Hub
from tests.hub.virtual import Virtual, joined, noise

SIZES = {"F32": 4, "F16": 2, "U8": 1, "I64": 8}
LARGEST_HASHED = 2**22  # bytes
Tensors = dict[str, tuple[str, tuple[int, ...]]]
STEPS = [0, *(2**i for i in range(10)), *range(1000, 144_000, 1000)]  # the 154 steps of Pythia
EMBEDDING = "gpt_neox.embed_in.weight"


def neox(hidden: int = 32, layers: int = 2, vocabulary: int = 256, dtype: str = "F16", extras: bool = False) -> Tensors:
    """Return the tensors of a GPT-NeoX checkpoint, name -> (dtype, shape), with the buffers that old versions saved."""
    tensors: Tensors = {EMBEDDING: (dtype, (vocabulary, hidden))}
    for i in range(layers):
        name = f"gpt_neox.layers.{i}"
        if extras:
            tensors[f"{name}.attention.bias"] = "U8", (1, 1, 640, 640)
            tensors[f"{name}.attention.masked_bias"] = dtype, ()
            tensors[f"{name}.attention.rotary_emb.inv_freq"] = dtype, (4,)
        for part, rows, columns in (
            ("attention.dense", hidden, hidden), ("attention.query_key_value", 3 * hidden, hidden),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden), ("mlp.dense_h_to_4h", 4 * hidden, hidden),
        ):  # fmt: skip
            tensors[f"{name}.{part}.bias"] = dtype, (rows,)
            tensors[f"{name}.{part}.weight"] = dtype, (rows, columns)
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.bias"] = tensors[f"{name}.{part}.weight"] = dtype, (hidden,)
    tensors["embed_out.weight"] = dtype, (vocabulary, hidden)
    tensors["gpt_neox.final_layer_norm.bias"] = tensors["gpt_neox.final_layer_norm.weight"] = dtype, (hidden,)
    # The library writes wide dtypes first, and equal ones by name.
    return dict(sorted(tensors.items(), key=lambda item: (-SIZES[item[1][0]], item[0])))


def config(tensors: Tensors) -> str:
    """Return the config.json of a GPT-NeoX checkpoint."""
    vocabulary, hidden = tensors[EMBEDDING][1]
    layers = sum(name.endswith("attention.dense.weight") for name in tensors)
    values = {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "vocab_size": vocabulary, "max_position_embeddings": 64, "rotary_pct": 0.25, "use_parallel_residual": True,
        "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0",
    }  # fmt: skip
    return json.dumps(values)


def nbytes(tensors: Tensors) -> int:
    return sum(SIZES[dtype] * math.prod(shape) for dtype, shape in tensors.values())


def checkpoint(tensors: Tensors, seed: int) -> Virtual:
    """Return a safetensors file: a header written by hand, and finite pseudo-random values of a seed."""
    header, start = {"__metadata__": {"format": "pt"}}, 0
    places = {}
    for name, (dtype, shape) in tensors.items():
        end = start + SIZES[dtype] * math.prod(shape)
        places[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps({**header, **places}).encode()
    text += b" " * (-len(text) % 8)
    file = joined(struct.pack("<Q", len(text)), text, noise(seed, start, odd=0xBF))
    # Only what is fetched whole is compared with its hash.
    return (
        replace(file, sha=hashlib.sha256(file.read(0, file.size)).hexdigest()) if file.size < LARGEST_HASHED else file
    )


def shards(tensors: Tensors, seed: int, count: int = 2) -> dict[str, Virtual | str]:
    """Return the files of a sharded checkpoint, and its index file."""
    names, files, weight_map = list(tensors), dict[str, Virtual | str](), dict[str, str]()
    for i in range(count):
        part = names[len(names) * i // count : len(names) * (i + 1) // count]
        path = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        files[path] = checkpoint({name: tensors[name] for name in part}, 1000 * seed + i)
        weight_map |= dict.fromkeys(part, path)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map})
    return files


def publish(
    hub: Hub, repo: str, steps: Iterable[int] = STEPS, tensors: Tensors | None = None, seed: int = 0,
    files: Mapping[int, Mapping[str, Virtual | str | bytes]] | None = None, sharded: bool = False,
) -> None:  # fmt: skip
    """Publish a model repo with a branch for each step.

    Args:
        seed: the values of step s are those of the seed 1,000,000 · seed + s.
        files: step -> files of its branch, in place of a checkpoint.
    """
    tensors = neox() if tensors is None else tensors
    readme = "---\nlicense: apache-2.0\n---\n"
    for step in steps:
        own = dict((files or {}).get(step, {}))
        if not own:
            value = 1_000_000 * seed + step
            own = dict(shards(tensors, value)) if sharded else {"model.safetensors": checkpoint(tensors, value)}
        hub.commit(
            repo, {"config.json": config(tensors), "README.md": readme, **own}, branch=f"step{step}", kind="models"
        )
