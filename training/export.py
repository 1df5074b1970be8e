"""Finished members become a source: shards, manifest rows, description. What is already there stays."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo import architectures, catalog, images, manifest, measuring, pieces, shard, writing
from checkpoints_zoo.catalog import Description
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.layout import Layout
from checkpoints_zoo.source import Source
from training.population import Trained
from training.recipes import Recipe, initial_seed
from training.seeds import derive

STORAGE = {"float16": torch.float16, "float32": torch.float32}


def export(recipe: Recipe, trained: Sequence[Trained], out: Path) -> None:
    """Add finished members to a source: whole shards first, then the description, the manifest last.

    Killed at any moment, what was there before is still there and readable; called again with the same members it
    gives the same bytes. Members that are there already are replaced.

    Args:
        recipe: that trained them.
        trained: the members.
        out: folder of the source.
    """
    out.mkdir(parents=True, exist_ok=True)
    source = Source(out.absolute(), out.absolute().as_uri())
    kept = [r for r in _rows(source, recipe) if r["member"] not in {t.member for t in trained}]
    layout = layout_of(recipe)
    description = _description(recipe, layout)
    packed = {t.member: shard.pack(t.state, layout) for t in trained if t.status == "ok"}
    rows = _write_shards(source, recipe, layout, [*kept, *(_row(recipe, t) for t in trained)], packed)
    measured = _measure(source, description, [r for r in rows if r["member"] in packed])
    rows = [{**r, **measured.get(r["member"], {})} for r in rows]
    table = manifest.table(rows)
    manifest.validate(table, description, source.manifest_path(recipe.name))
    catalog.write_json(description.to_json(), source.description_path(recipe.name))
    manifest.write(table, source.manifest_path(recipe.name))
    _drop_unnamed(source, recipe.name, {r["path"] for r in rows})


def members_of(recipe: Recipe, out: Path) -> set[int]:
    """Return the ids of the members that a source holds already, failed ones too."""
    return {r["member"] for r in _rows(Source(out.absolute(), "out"), recipe)}


def _rows(source: Source, recipe: Recipe) -> list[dict[str, Any]]:
    """Read the rows that are there; members of another recipe under this name are refused."""
    if not source.manifest_path(recipe.name).exists():
        return []
    rows: list[dict[str, Any]] = source.read(recipe.name)[1].to_pylist()
    others = {r["recipe_hash"] for r in rows} - {recipe.hash}
    if others:
        raise UsageError(
            f"folder {source.root}",
            expected=f"members of recipe {recipe.name!r} with hash {recipe.hash}",
            found=f"members of {', '.join(map(str, others))}",
            do="Give another folder, or name the changed recipe differently",
        )
    return rows


def layout_of(recipe: Recipe) -> Layout:
    """Lay out a member's tensors as the recipe stores them; return the layout."""
    with torch.device("meta"):
        state = architectures.build(recipe.architecture, **recipe.arguments).state_dict()
    return shard.layout_of(state, STORAGE[recipe.storage])


def _write_shards(
    source: Source,
    recipe: Recipe,
    layout: Layout,
    rows: Iterable[Mapping[str, Any]],
    packed: Mapping[int, bytearray],
) -> list[dict[str, Any]]:
    """Write every shard that has a new member, the old ones' bytes taken over; return the rows with their places."""
    per_shard = writing.members_per_shard(layout)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: r["member"]):
        groups.setdefault(row["member"] // per_shard, []).append(dict(row))
    for number, group in groups.items():
        stored = [r for r in group if r["status"] == "ok"]
        if not any(r["member"] in packed for r in stored):
            continue
        members = [(shard.prefix(r["member"]), packed.get(r["member"]) or _old(source, layout, r)) for r in stored]
        path = writing.write_shard(source.root / "shards" / recipe.name, number, layout, members)
        offset = writing.first_offset(layout, [key for key, _ in members])
        for at, row in enumerate(stored):
            row |= {
                "path": path.relative_to(source.root).as_posix(),
                "offset": offset + at * layout.nbytes,
                "nbytes": layout.nbytes,
                "layout": recipe.storage,
                "dtype": layout.dtype,
            }
    return [row for group in groups.values() for row in group]


def _old(source: Source, layout: Layout, row: Mapping[str, Any]) -> bytes:
    """Read a member's bytes from the shard it lies in now."""
    prefix = shard.prefix(row["member"])
    location = pieces.Location(row["member"], prefix, source.file(row["path"]), row["offset"], layout)
    return b"".join(bytes(raw) for _, raw in pieces.read([location]))


def _measure(source: Source, description: Description, rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Measure members by their stored bytes, in float32; return member -> figures and hash."""
    if not rows:
        return {}
    members = Collection(source, "", description, manifest.table(rows))
    found: dict[int, dict[str, Any]] = {r["member"]: {} for r in rows}
    for member, digest in zip(members.ids, pieces.hash_members(members.locations()), strict=True):
        found[member]["sha256"] = digest
    for member, train in measuring.figures(members, images.load(description.dataset, "train")):
        found[member] |= {"train_accuracy": train["accuracy"], "train_loss": train["nll"]}
    for member, columns in measuring.measured(members, images.load(description.dataset, "test")).items():
        found[member] |= columns
    return found


def _row(recipe: Recipe, t: Trained) -> dict[str, Any]:
    """Write down what is known of a member before its bytes are stored."""
    run_id = hashlib.sha256(f"{recipe.hash}|{t.seed}".encode()).hexdigest()[:16]
    return {
        "member": t.member,
        "epoch": recipe.epochs,
        "final": True,
        "status": t.status,
        "reason": t.reason or None,
        "method": "independent",
        "seed": t.seed,
        "seed_init": initial_seed(recipe, t.seed),
        **{f"seed_{purpose}": derive(t.seed, purpose) for purpose in ("order", "augment")},
        "run_id": run_id,
        "split": split_of(run_id),
        **{n: getattr(recipe, n) for n in ("epochs", "optimizer", "lr", "momentum", "weight_decay", "batch_size",
                                           "schedule", "augmentation", "precision", "stack_width")},
        "recipe": recipe.name,
        "recipe_hash": recipe.hash,
        "data_fingerprint": images.load(recipe.dataset, "train").fingerprint,
        "code_version": version("checkpoints-zoo"),
        "torch_version": str(torch.__version__),
        "device": device_name(),
        "wall_time_s": round(t.wall_time_s, 3),
        "created": datetime.now(UTC).replace(microsecond=0),
        "path": None,
    }  # fmt: skip


def split_of(run_id: str) -> str:
    """Return the split of a run: 70/15/15 by the first 32 bits of sha256("split|RUN_ID")."""
    at = int(hashlib.sha256(f"split|{run_id}".encode()).hexdigest()[:8], 16) / 2**32
    return "train" if at < 0.7 else "validation" if at < 0.85 else "test"


def device_name() -> str:
    """Return the processor's name and the instruction set that torch uses on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _description(recipe: Recipe, layout: Layout) -> Description:
    return Description(
        name=recipe.name,
        title=recipe.title,
        architecture=recipe.architecture,
        arguments={n: list(v) if isinstance(v, tuple) else v for n, v in recipe.arguments.items()},
        dataset=recipe.dataset,
        classes=images.load(recipe.dataset, "test").classes,
        preprocessing=recipe.preprocess.to_json(),
        layouts={recipe.storage: layout},
        licence=recipe.licence,
        citation=f"checkpoints_zoo, collection {recipe.name}, recipe {recipe.hash}",
    )


def _drop_unnamed(source: Source, name: str, named: set[str | None]) -> None:
    """Remove shards that no row names any more, and what a kill left of a shard being written."""
    for path in (source.root / "shards" / name).glob("*"):
        if path.suffix == ".tmp" or path.relative_to(source.root).as_posix() not in named:
            path.unlink()
