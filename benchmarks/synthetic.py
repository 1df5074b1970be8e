"""Random members, images that can be learnt, and training timed on them: for gpu.py and its workers."""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.catalog import Description, write_json
from checkpoints_zoo.formats.manifest import build_manifest, write_manifest
from checkpoints_zoo.images import ImageData, of
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.recipe_files import vary_recipe
from checkpoints_zoo.training.recipes import recipe_by_name

GATHERING_S = 180  # for workers to be ready


def made(inputs: int, classes: int, size: int, device: torch.device, seed: int = 0, channels: int = 3) -> ImageData:
    """Make images of classes: a smooth pattern for each, moved by up to an eighth of the image, under noise.

    Args:
        inputs: how many.
        classes, size, channels: of the images.
        device: that they are made on; the pixels come back to the CPU, where a user's are.
        seed: of positions and noise; the patterns are the same for all.
    """
    patterns = torch.randn(classes, channels, 6, 6, generator=torch.Generator(device).manual_seed(0), device=device)
    patterns = F.interpolate(patterns, size=(size + size // 4,) * 2, mode="bicubic")
    drawn = torch.Generator(device).manual_seed(1 + seed)
    labels = torch.randint(classes, (inputs,), generator=drawn, device=device)
    top, left = torch.randint(size // 4 + 1, (2, inputs), generator=drawn, device=device)
    across = torch.arange(size, device=device)
    pixels = torch.empty(inputs, channels, size, size, dtype=torch.uint8, device=device)
    for some in torch.split(torch.arange(inputs, device=device), 4096):
        rows, columns = top[some, None] + across, left[some, None] + across
        seen = patterns[labels[some]]
        seen = seen.gather(2, rows[:, None, :, None].expand(-1, channels, -1, seen.shape[3]))
        seen = seen.gather(3, columns[:, None, None, :].expand(-1, channels, size, -1))
        noise = torch.randn(seen.shape, generator=drawn, device=device)
        pixels[some] = (128 + 40 * seen + 50 * noise).clamp(0, 255).to(torch.uint8)
    return of((pixels, labels), classes=[str(c) for c in range(classes)], name="synthetic")


def short(name: str, changes: tuple[str, ...]) -> Recipe:
    """Return a recipe that comes with the package, with changes, that goes on until it is stopped."""
    return dataclasses.replace(vary_recipe(recipe_by_name(name), changes), epochs=100_000, eval_every=0)


def data_of(recipe: Recipe, steps: int, device: torch.device) -> ImageData:
    """Make images for so many steps an epoch."""
    size, classes = recipe.preprocess.size[0], recipe.arguments["classes"]
    return made(steps * recipe.batch_size, classes, size, device, channels=recipe.preprocess.channels)


def wait(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Rate:
    """What was timed: seconds of the first epoch, images trained on after it, and the seconds of that."""

    first_s: float
    images: int
    seconds: float


def timed(
    recipe: Recipe, data: ImageData, device: torch.device, seconds: float, ready: Path | None = None, count: int = 1
) -> Rate:
    """Train a stack by the loop that users run, for an epoch and then for some seconds; return what was timed.

    Args:
        recipe: of `short`.
        data: an epoch of it.
        device: to train on.
        seconds: at least one more epoch.
        ready: folder in which workers wait for each other after the first epoch.
        count: of the workers.
    """
    members = list(range(recipe.stack_width))
    state = initial_state(recipe, members).to(device)
    each = len(data) // recipe.batch_size * recipe.batch_size * recipe.stack_width
    begun = time.perf_counter()
    first_s = began = 0.0
    for epoch in train_epochs(recipe, members, state, data):
        wait(device)
        if epoch == 1:
            first_s = time.perf_counter() - begun
            if ready is not None:
                _gather(ready, count)
            began = time.perf_counter()
        elif (spent := time.perf_counter() - began) >= seconds:
            return Rate(first_s, each * (epoch - 1), spent)
    raise RuntimeError("no loss was finite")


def _gather(ready: Path, count: int) -> None:
    (ready / f"{os.getpid()}").touch()
    end = time.monotonic() + GATHERING_S
    while len(list(ready.iterdir())) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"{count} workers were not ready after {GATHERING_S} s")
        time.sleep(0.01)


@dataclass(frozen=True)
class Side:
    """Work for an engine: times a stack, at the same time as other workers.

    Args:
        name, changes: of the recipe.
        steps, seconds: as in `data_of` and `timed`.
        ready: folder that is empty at first.
        count: workers.
    """

    name: str
    changes: tuple[str, ...]
    steps: int
    seconds: float
    ready: Path
    count: int

    def __call__(self, job: int, device: str) -> Rate:
        recipe, on = short(self.name, self.changes), torch.device(device)
        return timed(recipe, data_of(recipe, self.steps, on), on, self.seconds, self.ready, self.count)


def random_members(folder: Path, count: int, tiny: bool) -> Collection:
    """Write a source of random ResNet-18s in float16; return its members."""
    name, arguments = ("resnet8", {}) if tiny else ("resnet18", {"classes": 100})
    size = {"size": [8, 8], "channels": 1} if tiny else {"size": [32, 32], "channels": 3}
    first = build_architecture(name, **arguments).state_dict()
    layout = modules.layout_of(first, torch.float16)
    members = []
    for i in range(count):
        torch.manual_seed(i)
        state = {n: torch.randn(t.shape) * 0.05 if t.is_floating_point() else t for n, t in first.items()}
        state |= {n: t.abs() + 0.5 for n, t in state.items() if n.endswith("running_var")}
        members.append((shard_files.tensor_prefix(i), modules.pack_member(state, layout)))
    path = shard_files.write_shard(folder / "shards" / "nets", 0, layout, members)
    begin = shard_files.first_offset(layout, [key for key, _ in members])
    rows = [
        {"member": i, "epoch": 1, "final": True, "status": "ok", "path": f"shards/nets/{path.name}",
         "offset": begin + i * layout.nbytes, "nbytes": layout.nbytes, "layout": "f16", "dtype": "F16"}
        for i in range(count)
    ]  # fmt: skip
    classes = tuple(map(str, range(10 if tiny else 100)))
    preprocessing = {**size, "mean": [0.5] * size["channels"], "std": [0.25] * size["channels"]}  # type: ignore[operator]
    description = Description(
        "nets", "random nets", name, arguments, "none", classes, preprocessing, {"f16": layout}, "none", "none"
    )
    write_json(description.to_json(), folder / "manifests" / "nets.json")
    write_manifest(build_manifest(rows), folder / "manifests" / "nets.parquet")
    return load("nets", source=folder)
