"""Trained members become stored snapshots: packed into bytes, measured from these bytes, with rows of the manifest."""

from __future__ import annotations

import hashlib
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.evaluation import arguments, single_members
from checkpoints_zoo.formats import disk, manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.networks import modules
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.training.population import TrainedMember
from checkpoints_zoo.training.recipe import STORAGE_DTYPES, VARIABLE_FIELDS, Recipe, initial_seed
from checkpoints_zoo.training.seeds import derive_seed, deterministic

SnapshotKey = tuple[int, int]  # Member and epoch.
ManifestRow = dict[str, Any]


@dataclass(frozen=True, eq=False)
class PackedSnapshot:
    """A snapshot, ready to be stored.

    Args:
        row: row of the manifest, without the location of the bytes.
        raw: the snapshot's bytes in the recipe's layout; None for a member that failed.
    """

    row: ManifestRow
    raw: bytearray | None

    @property
    def key(self) -> SnapshotKey:
        return member_and_epoch(self.row)


def member_and_epoch(row: Mapping[str, Any]) -> SnapshotKey:
    """Return the member and the epoch of a row."""
    return row["member"], row["epoch"]


def tensor_prefix(row: Mapping[str, Any]) -> str:
    """Return the prefix of the tensor names of a row's snapshot in its shard."""
    return shard_files.tensor_prefix(row["member"], None if row["final"] else row["epoch"])


def pack_members(recipe: Recipe, trained_members: Sequence[TrainedMember], device: str) -> list[PackedSnapshot]:
    """Pack and measure trained members; return their snapshots in order.

    Args:
        recipe: recipe by which the members were trained.
        trained_members: members after their training.
        device: torch device on which the stored weights are evaluated, in float32.
    """
    layout = layout_of(recipe)
    fingerprint = recipe.split("train").fingerprint
    snapshots = {
        (t.member, epoch): PackedSnapshot(
            _manifest_row(recipe, t, epoch, fingerprint),
            modules.pack_member(state, layout) if t.status == "ok" else None,
        )
        for t in trained_members
        for epoch, state in {**t.snapshots, recipe.epochs: t.state}.items()
    }
    sorted_snapshots = [snapshots[key] for key in sorted(snapshots)]
    figures_by_key = _measure_snapshots(
        recipe, layout, [f for f in sorted_snapshots if f.raw is not None], torch.device(device)
    )
    for snapshot in sorted_snapshots:
        snapshot.row.update(figures_by_key.get(snapshot.key, {}))
    return sorted_snapshots


def layout_of(recipe: Recipe) -> Layout:
    """Return the layout in which the recipe stores a member's tensors."""
    return modules.layout_of(recipe.skeleton().state_dict(), STORAGE_DTYPES[recipe.storage])


def _measure_snapshots(
    recipe: Recipe, layout: Layout, snapshots: Sequence[PackedSnapshot], device: torch.device
) -> dict[SnapshotKey, dict[str, Any]]:
    """Measure snapshots in float32 from their bytes in a temporary shard; return key -> figures and hash."""
    if not snapshots:
        return {}
    with tempfile.TemporaryDirectory(prefix="zoo-training-") as folder:
        root = Path(folder)
        members = [(tensor_prefix(f.row), f.raw) for f in snapshots if f.raw is not None]
        with disk.translate_write_errors(root):
            path = shard_files.write_shard(root, 0, layout, members)
        first = shard_files.first_offset(layout, [prefix for prefix, _ in members])
        rows = [
            f.row | {"path": path.name, "offset": first + at * layout.nbytes, "nbytes": layout.nbytes,
                     "layout": recipe.storage, "dtype": layout.dtype}
            for at, f in enumerate(snapshots)
        ]  # fmt: skip
        with deterministic(device):
            return _measure_temporary_shard(
                recipe, FolderSource(root, "training"), description_of(recipe, layout), rows, device
            )


def _measure_temporary_shard(
    recipe: Recipe, source: FolderSource, description: Description, rows: Sequence[ManifestRow], device: torch.device
) -> dict[SnapshotKey, dict[str, Any]]:
    architecture = recipe.skeleton if recipe.build is not None else None
    members = Collection(source, "", description, manifest.build_manifest(rows), architecture)
    train, test = recipe.split("train"), recipe.split("test")
    figures: dict[SnapshotKey, dict[str, Any]] = {}
    for row, digest, (_, train_figures), (_, test_figures) in zip(
        members.rows.to_pylist(),
        shard_files.hash_members(members._locations()),
        single_members.member_figures(members, train, device),
        single_members.member_figures(members, test, device),
        strict=True,
    ):
        figures[member_and_epoch(row)] = {
            "sha256": digest,
            "train_accuracy": train_figures["accuracy"],
            "train_loss": train_figures["nll"],
            **{f"test_{name}": value for name, value in test_figures.items()},
            "eval_data": arguments.manifest_image_name(test),
        }
    return figures


def _manifest_row(
    recipe: Recipe, trained_member: TrainedMember, epoch: int, training_fingerprint: str
) -> dict[str, Any]:
    """Return the manifest row of a snapshot, without figures, hash and location.

    Args:
        recipe, trained_member: the recipe and its trained member.
        epoch: number of epochs trained.
        training_fingerprint: fingerprint of the images of the training split.
    """
    run_id = hashlib.sha256(f"{recipe.hash}|{trained_member.seed}".encode()).hexdigest()[:16]
    member_recipe = recipe.of_member(trained_member.member)
    return {
        **dict.fromkeys(SCHEMA.names),
        "member": trained_member.member,
        "epoch": epoch,
        "final": epoch == recipe.epochs,
        "status": trained_member.status,
        "reason": trained_member.reason or None,
        "method": "independent",
        "seed": trained_member.seed,
        "seed_init": initial_seed(recipe, trained_member.seed),
        **{f"seed_{purpose}": derive_seed(trained_member.seed, purpose) for purpose in ("order", "augment")},
        "run_id": run_id,
        "split": split_of_run(run_id),
        **{n: getattr(member_recipe, n) for n in ("epochs", *VARIABLE_FIELDS, "precision", "stack_width")},
        "recipe": recipe.made_from or recipe.name,
        "recipe_hash": recipe.hash,
        "data_fingerprint": training_fingerprint,
        "code_version": version("checkpoints-zoo"),
        "torch_version": str(torch.__version__),
        "device": device_and_threads(trained_member.device),
        "wall_time_s": round(trained_member.wall_time_s, 3),
        "created": datetime.now(UTC).replace(microsecond=0),
    }  # fmt: skip


def split_of_run(run_id: str) -> str:
    """Return the split of a run: 70/15/15 by the first 32 bits of sha256("split|RUN_ID")."""
    share = int(hashlib.sha256(f"split|{run_id}".encode()).hexdigest()[:8], 16) / 2**32
    return "train" if share < 0.7 else "validation" if share < 0.85 else "test"


def device_and_threads(device: torch.device) -> str:
    """Return the name of a device; for a processor, the name and the number of threads that torch uses in this
    process."""
    name, threads = device_name(device), torch.get_num_threads()
    return name if device.type != "cpu" else f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def split_threads(device_text: str) -> tuple[str, str]:
    """Split the text of `device_and_threads`; return the device and the threads, "" if there are none in the text.

    >>> split_threads("Some CPU, AVX512, 2 threads"), split_threads("Some GPU")
    (('Some CPU, AVX512', '2 threads'), ('Some GPU', ''))
    """
    name, _, threads = device_text.rpartition(", ")
    return (name, threads) if re.fullmatch(r"[0-9]+ threads?", threads) else (device_text, "")


def device_name(device: torch.device = torch.device("cpu")) -> str:  # noqa: B008 (it can't be changed)
    """Return the name of a device; for a processor, the name and the instruction set that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def description_of(recipe: Recipe, layout: Layout) -> Description:
    """Return the description of a recipe's collection."""
    return Description(
        name=recipe.name,
        title=recipe.title,
        architecture=recipe.architecture,
        arguments={n: list(v) if isinstance(v, tuple) else v for n, v in recipe.arguments.items()},
        dataset=recipe.dataset,
        classes=recipe.split("test").classes,
        preprocessing=recipe.preprocess.to_json(),
        layouts={recipe.storage: layout},
        licence=recipe.licence,
        citation=f"checkpoints_zoo, collection {recipe.name}, recipe {recipe.hash}",
    )
