"""The tables of docs/gpu.md, from the measurements in docs/studies/gpu-h200.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints_zoo.training.recipes import recipe_by_name
from docs.make.marks import fill

DOCS = Path(__file__).resolve().parents[1]
NUMBERS = DOCS / "studies" / "gpu-h200.json"
TRAINING_IMAGES = 50_000
COLLECTIONS = ("resnet18-cifar10", "resnet18-cifar100", "resnet20-frn-silu-cifar10")


def ensembles(numbers: dict[str, Any]) -> str:
    lines = ["| members | batch | dtype | way | ms | times as fast |", "|---|---|---|---|---|---|"]
    loop_ms = 0.0
    for row in numbers["ensembles"]:
        if row["way"] == "loop over modules":
            loop_ms = row["ms"]
        members = f"{row['members']:,} {row['net']}"
        times = f"{row['ms']:,.1f} | {loop_ms / row['ms']:.1f}"
        lines.append(f"| {members} | {row['batch']} | {row['dtype']} | {row['way']} | {times} |")
    return "\n".join(lines)


def steps(numbers: dict[str, Any]) -> str:
    lines = ["| recipe | kernels one by one, ms | one CUDA graph, ms | times as fast |", "|---|---|---|---|"]
    exact = [row for row in numbers["steps"] if row["deterministic"]]
    for row in exact:
        captured = [
            r for r in exact if r["captured"] and (r["recipe"], r["changes"]) == (row["recipe"], row["changes"])
        ]
        if not row["captured"] and captured:
            changes = ", ".join(f"{key}={value}" for key, value in row["changes"].items())
            name = f"`{row['recipe']}`" + (f", {changes}" if changes else "")
            ms = captured[0]["ms"]
            lines.append(f"| {name} | {row['ms']:.1f} | {ms:.1f} | {row['ms'] / ms:.1f} |")
    return "\n".join(lines)


def hours(numbers: dict[str, Any]) -> str:
    """Return the hours of whole collections on the card; resnet18-cifar100 has the steps of resnet18-cifar10."""
    lines = [
        "| collection | steps of all members | hours as the recipe says | with `--set compile=true` |",
        "|---|---|---|---|",
    ]
    for name in COLLECTIONS:
        recipe = recipe_by_name(name)
        step_count = recipe.members // recipe.stack_width * (TRAINING_IMAGES // recipe.batch_size) * recipe.epochs
        measured = name.replace("cifar100", "cifar10")
        ms = {
            bool(row["changes"]): row["ms"]
            for row in numbers["steps"]
            if row["recipe"] == measured
            and row["captured"]
            and row["deterministic"]
            and row["changes"] in ({}, {"compile": True})
        }
        own, compiled = (step_count * ms[is_compiled] / 3.6e6 for is_compiled in (False, True))
        lines.append(f"| `{name}`, {recipe.members:,} members | {step_count:,} | {own:.0f} | {compiled:.0f} |")
    return "\n".join(lines)


def convolutions(numbers: dict[str, Any]) -> str:
    ways = ("grouped", "grouped channels_last", "joined to 64 channels, channels_last", "unfold and products")
    rows = [row for row in numbers["convolutions"] if not row["backward"] and row["members"] in (1024, 256)]
    shapes = list(dict.fromkeys((r["members"], r["batch"], r["channels"], r["height"], r["dtype"]) for r in rows))
    lines = [f"| members | batch | channels | dtype | {' | '.join(ways)} |", "|---|---|---|---|" + "---|" * len(ways)]
    for shape in shapes:
        ms = {
            r["way"]: r["ms"]
            for r in rows
            if tuple(r[k] for k in ("members", "batch", "channels", "height", "dtype")) == shape
        }
        members, batch, channels, height, dtype = shape
        cells = " | ".join(f"{ms[way]:.2f}" for way in ways)
        lines.append(f"| {members:,} | {batch} | {channels} of {height} × {height} | {dtype} | {cells} |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of docs/gpu.md."""
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    card = f"{numbers['card']}, torch {numbers['torch']}, cuDNN {numbers['cudnn']}, {numbers['date']}"
    parts = {
        "card": f"Measured on one {card}.",
        "ensembles": ensembles(numbers),
        "steps": steps(numbers),
        "hours": hours(numbers),
        "convolutions": convolutions(numbers),
    }
    return fill((DOCS / "gpu.md").read_text(encoding="utf-8"), parts)
