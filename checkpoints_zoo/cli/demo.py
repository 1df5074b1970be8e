"""`zoo-cli demo`: 64 networks of the package, from the manifest to an ensemble and its uncertainty."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from checkpoints_zoo.cli.main import Output, format_option
from checkpoints_zoo.cli.measure import report_values
from checkpoints_zoo.cli.options import OutputFolder
from checkpoints_zoo.formats.text import format_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.images import ImageData

COLLECTION_NAME, ENSEMBLE_SIZES, PICTURE_NAME = "convnet-digits", (1, 8, 64), "zoo-demo.png"
SHOWN_FIGURES = ("accuracy", "nll", "brier", "ece", "mi_id", "mi_ood", "auroc", "fpr95")


@click.command()
@click.option(
    "--out", "folder", default=".", type=OutputFolder(), metavar="DIR", help=f"The folder for {PICTURE_NAME}."
)
@format_option
def command(folder: Path, out: Output) -> None:
    """Load, ensemble and measure 64 networks that come with the package.

    Nothing is downloaded, and only one picture is written.
    """
    out.say("Importing torch …")
    from checkpoints_zoo import images
    from checkpoints_zoo.collection.collection import load
    from checkpoints_zoo.evaluation.evaluating import evaluate
    from checkpoints_zoo.sources.folder_source import EMBEDDED

    members = load(COLLECTION_NAME, source=EMBEDDED)
    out.say(_manifest_text(members))
    _show_stacking(members, out)
    _show_ensemble(members, images.load("digits"), out)
    out.say("\nMeasuring random ensembles of 1 to 64 members on digits, with patches of photographs as OOD …")
    start_time = time.perf_counter()
    report = evaluate(members, "digits", ood="photos")
    out.say(f"  {time.perf_counter() - start_time:.1f} s\n")
    picture_path = report.plot(folder / PICTURE_NAME)
    shown_sizes = [size for size in ENSEMBLE_SIZES if size in report.curve]
    out.data({**report_values(report), "picture": picture_path}, report.to_text(shown_sizes, SHOWN_FIGURES))
    out.say(f"\nPicture: {picture_path}\nThese members: {report.citation}\nNext: zoo-cli show {COLLECTION_NAME}")


def _manifest_text(members: Collection) -> str:
    """Return the text on the manifest and on the bytes of some members."""
    description = members.description
    lines = [
        f"\nThe manifest of {members.name}: {len(members)} members,"
        f" {description.architecture} on {description.dataset}.",
        "No weights are read so far. A row names the safetensors file and the byte range of a member:",
    ]
    columns = [members.rows.column(c).to_pylist() for c in ("member", "path", "offset", "nbytes", "test_accuracy")]
    rows = list(zip(*columns, strict=True))
    for row_position in sorted({0, 1, len(rows) - 1}):
        if row_position == len(rows) - 1:
            lines.append("  …")
        member, path, offset, nbytes, accuracy = rows[row_position]
        accuracy_text = "" if accuracy is None else f", test accuracy {accuracy:.2%}"
        lines.append(f"  member {member:2}: {path}, bytes {offset:,} to {offset + nbytes:,}{accuracy_text}")
    return "\n".join(lines)


def _show_stacking(members: Collection, out: Output) -> None:
    start_time = time.perf_counter()
    stacked_tensors = members.stack()
    milliseconds = (time.perf_counter() - start_time) * 1000
    tensor_name, stacked_tensor = next(iter(stacked_tensors.items()))
    shard_count = len(set(members.rows.column("path").to_pylist()))
    out.say(
        f"\nStacking them from {shard_count} shard{'s' if shard_count > 1 else ''}: {format_bytes(members.nbytes)},"
        f" {len(stacked_tensors)} tensors, {milliseconds:.1f} ms; {tensor_name} is now {tuple(stacked_tensor.shape)}."
    )


def _show_ensemble(members: Collection, data: ImageData, out: Output) -> None:
    import torch

    from checkpoints_zoo.networks.device import one_thread

    ensemble = members.ensemble()
    inputs = members.preprocess(data.images)
    with torch.inference_mode(), one_thread():
        ensemble(inputs[:1])
        start_time = time.perf_counter()
        logits = ensemble(inputs)
        milliseconds = (time.perf_counter() - start_time) * 1000
    out.say(
        f"\nOne ensemble of all of them on {len(data)} images: logits {tuple(logits.shape)} in {milliseconds:.0f} ms."
    )
