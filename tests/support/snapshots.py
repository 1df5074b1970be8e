"""A source with snapshots along training: `python -m tests.support.snapshots OUT` trains 16 members of convnet-digits.

Recipes keep the end of a run alone; here what the training loop yields is stored after some of its epochs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints_zoo import images
from checkpoints_zoo.formats import catalog, manifest, shard_files
from checkpoints_zoo.networks import modules
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.packing import description_of, layout_of
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipes import RECIPES

EPOCHS = (0, 1, 2, 5, 10, 20)  # and the last one


def make(out: Path, recipe: Recipe, members: Sequence[int], epochs: Sequence[int] = EPOCHS) -> None:
    """Train members and write a source that has their weights after some epochs, and after the last.

    Args:
        out: the folder of the source.
        recipe: of the members.
        members: ids.
        epochs: to keep, 0 for the initialisation.
    """
    layout = layout_of(recipe)
    state = initial_state(recipe, members)
    kept: dict[tuple[int, int], bytearray] = {}

    def keep(epoch: int) -> None:
        for i, member in enumerate(members):
            own = {n: t[i] for n, t in (state.params | state.buffers).items()}
            kept[member, epoch] = modules.pack_member(own, layout)

    if 0 in epochs:
        keep(0)
    for epoch in train_epochs(recipe, members, state, images.load(recipe.dataset, "train")):
        if epoch in epochs or epoch == recipe.epochs:
            keep(epoch)

    ordered = sorted(kept)
    prefixes = [shard_files.tensor_prefix(m) if e == recipe.epochs else f"{m:06d}@{e}/" for m, e in ordered]
    source = FolderSource(out.absolute(), "out")
    path = shard_files.write_shard(
        out / "shards" / recipe.name, 0, layout, [(p, kept[key]) for p, key in zip(prefixes, ordered, strict=True)]
    )
    first = shard_files.first_offset(layout, prefixes)
    rows: list[dict[str, Any]] = [
        {
            "member": member, "epoch": epoch, "final": epoch == recipe.epochs, "status": "ok", "method": "independent",
            "path": path.relative_to(out).as_posix(), "offset": first + at * layout.nbytes, "nbytes": layout.nbytes,
            "layout": recipe.storage, "dtype": layout.dtype, "recipe": recipe.name, "epochs": recipe.epochs,
        }
        for at, (member, epoch) in enumerate(ordered)
    ]  # fmt: skip
    source.manifest_path(recipe.name).parent.mkdir(parents=True, exist_ok=True)
    description = description_of(recipe, layout)
    catalog.write_json(description.to_json(), source.description_path(recipe.name))
    manifest.write_manifest(manifest.build_manifest(rows), source.manifest_path(recipe.name))


if __name__ == "__main__":
    make(Path(sys.argv[1]), RECIPES["convnet-digits"](), range(16))
