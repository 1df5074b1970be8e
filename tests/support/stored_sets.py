"""Small sources with stored predictions, shared by their tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from checkpoints_zoo.formats import catalog, manifest, shard_files
from checkpoints_zoo.formats.layout import content_hash
from checkpoints_zoo.formats.shard_files import tensor_prefix
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.predictions import Predictions, predict, prediction_sets
from checkpoints_zoo.predictions.prediction_sets import LOGITS_TENSOR, SCHEMA, SetDescription
from checkpoints_zoo.sources.folder_source import FolderSource
from tests.support.scenarios import Built, build, hand_made, load

INSIDE = "predictions/tiny/few-test"


def few(count: int = 9, seed: int = 0) -> ImageData:
    """Some small images with labels of the ten digits."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return ImageData("few", "test", pixels, labels, tuple("0123456789"))


def six(root: Path) -> tuple[Built, Predictions]:
    """Write six members with snapshots in two shards, and the predictions of the final ones."""
    built = build(root, members=range(6), per_shard=3, snapshots=(20,))
    return built, predict(load(built), few(), built.root)


def by_loop(built: Built, member: int, data: ImageData) -> torch.Tensor:
    """A member's logits by its module alone."""
    with torch.no_grad():
        logits: torch.Tensor = hand_made(built, member)(load(built).preprocess(data.images))
    return logits


def given(root: Path, name: str, logits: torch.Tensor, labels: torch.Tensor | None = None) -> Predictions:
    """Store logits (member, input, class) as they are, in float16, as a set of a collection without weights."""
    members, inputs, classes = logits.shape
    folder, layout = root / prediction_sets.folder_of_set("given", name), prediction_sets.logits_layout(inputs, classes)
    raw = [member.half().numpy().tobytes() + bytes(layout.pad) for member in logits]
    prefixes = [tensor_prefix(i) for i in range(members)]
    path = shard_files.stream_shard(folder, 0, layout, prefixes, raw)
    first = shard_files.first_offset(layout, prefixes)
    rows = [
        {
            "member": i, "epoch": 1, "final": True, "status": "ok", "sha256": content_hash(layout, raw[i]),
            "weights_sha256": hashlib.sha256(str(i).encode()).hexdigest(), "path": "/".join(path.parts[-4:]),
            "offset": first + i * layout.nbytes, "nbytes": layout.nbytes, "layout": LOGITS_TENSOR,
            "dtype": layout.dtype,
        }
        for i in range(members)
    ]  # fmt: skip
    facts = SetDescription(
        collection="given", set=name, data=name, split="test", revision="", fingerprint="0" * 16, inputs=inputs,
        classes=tuple(f"class{i}" for i in range(classes)), preprocessing={}, computed="float32", view="", version="",
        citation="", layouts={LOGITS_TENSOR: layout}, labels=None if labels is None else tuple(labels.tolist()),
    )  # fmt: skip
    catalog.write_json(facts.to_json(), folder / prediction_sets.DESCRIPTION_FILE)
    manifest.write_manifest(manifest.build_manifest(rows, SCHEMA), folder / prediction_sets.MANIFEST_FILE, SCHEMA)
    stored = prediction_sets.read_set(FolderSource(root, root.as_uri()), "given", name)
    return Predictions(stored, stored.rows, (root.as_uri(), "0" * 40))
