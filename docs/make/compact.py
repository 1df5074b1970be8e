"""The tables of docs/compact.md, from the numbers of docs/compact.json.

`python -m docs.make --measure compact docs/compact.md` measures the numbers anew, in some minutes. Tests compare the
page with the numbers, and some of the numbers with fresh ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.evaluation.metrics import Interval, bootstrap_mean
from checkpoints_zoo.evaluation.tables import as_text
from checkpoints_zoo.methods.comparing.compact_comparison import compact
from checkpoints_zoo.populations.gaussian import fit_gaussian
from checkpoints_zoo.populations.loss_barrier import Barriers, barrier
from checkpoints_zoo.populations.untrained_networks import make_evaluator
from docs.make.marks import fill

DOCS = Path(__file__).resolve().parents[1]
NUMBERS = DOCS / "compact.json"
NAMES = ("convnet-digits", "resnet8-digits")
REFERENCES = 8
POINTS = 25
# Table 1 of Xiao, Liu & Bamler 2023 (arXiv 2401.00611): HMC sample, q_d, q_r; ensemble sample, q_d, q_r.
PAPER = {
    "agreement": ("1", "0.1212", "0.8249", "0.9931", "0.5239", "0.9868"),
    "total_variation": ("0", "0.8641", "0.6570", "0.0229", "0.7210", "0.0495"),
    "sample_accuracy": ("98.43", "11.11", "82.34", "98.66", "52.25", "97.72"),
    "mean_accuracy": ("-", "28.06", "92.25", "-", "86.40", "97.97"),
}
ROWS = {
    "agreement": ("agreement (0..1)", 1), "total_variation": ("total variation (0..1)", 1),
    "sample_accuracy": ("accuracy of samples (%)", 100), "mean_accuracy": ("accuracy of the mean (%)", 100),
}  # fmt: skip


def center_accuracies(members: zoo.Collection, to: int | str) -> tuple[float, float]:
    """Measure the network of the means before and after alignment; return its two test accuracies."""
    judge = make_evaluator(members, None, None, "cpu", 512)
    stacks = (members.stack(dtype=torch.float32), members.align(to=to).stack(dtype=torch.float32))
    before, after = (float(judge.accuracies(judge.log_probs(fit_gaussian(stacked).center))) for stacked in stacks)
    return before, after


def _barriers(before: Barriers, after: Barriers) -> dict[str, Any]:
    middle = POINTS // 2
    values: dict[str, Any] = {"points": POINTS, "pairs": len(before), "statistics_images": before.statistics_images}
    for name, found in (("before", before), ("after", after)):
        values[name] = {
            "mean": asdict(found.mean),
            "middle_accuracy": float(found.accuracies[:, middle].mean()),
            "barriers": found.barriers.tolist(),
            "first_losses": found.losses[0].tolist(),
        }
    fall = before.barriers - after.barriers
    ends = (before.losses[:, [0, -1]] - before.stored).abs()
    return {
        **values,
        "fall": asdict(bootstrap_mean(fall)),
        "fell": int((fall > 0).sum()),
        "ends_change": float(ends.mean()),
    }


def measure() -> dict[str, Any]:
    """Measure everything; return it as JSON values."""
    found = {}
    for name in NAMES:
        members = zoo.load(name)
        values = compact(members).values()
        values.pop("citation")
        gains = [after - before for before, after in (center_accuracies(members, i) for i in members.ids[:REFERENCES])]
        before, after = center_accuracies(members, "mean")
        found[name] = {
            "compact": values,
            "gains": gains,
            "gain_to_mean": after - before,
            "barrier": _barriers(barrier(members), barrier(members.align(to=members.ids[0]))),
        }
    return found


def _interval(values: Mapping[str, Any], scale: float = 1) -> str:
    return as_text(Interval(values["value"], values["low"], values["high"]), scale)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(r)} |" for r in (header, ("---",) * len(header), *rows)]


def _collection(name: str, values: Mapping[str, Any]) -> list[str]:
    own = values["compact"]
    columns = ("members", "q_d", "q_r")
    rows = [
        (text, *(_interval(own["table"][c][row], scale) if row in own["table"][c] else "-" for c in columns))
        for row, (text, scale) in ROWS.items()
    ]
    halves = [
        (f"{ROWS[row][0]}, half against half", *(_interval(own["held_out"][c][row]) for c in columns))
        for row in ("agreement", "total_variation")
    ]
    sigma = own["sigma"]
    gains = [100 * g for g in values["gains"]]
    statistics = ""
    if own["statistics_images"]:
        statistics = f" Running statistics: {own['statistics_images']:,} images of {own['statistics'].split(' ')[0]}."
    pruned = []
    for rule, words in (("sigma", "lowest σ kept"), ("snr", "largest \\|μ\\|/σ kept")):
        for q in ("q_d", "q_r"):
            at = dict(zip(own["pruning"]["levels"], own["pruning"][rule][q], strict=True))
            pruned.append((f"{q}, {words}", *(f"{100 * at[level]:.1f}" for level in (0, 0.05, 0.25, 0.5, 0.75, 0.95))))
    return [
        f"### {name}",
        "",
        f"{own['members']} members, {own['weights']:,} weights, {own['inputs']} test images, {own['samples']} samples"
        f" of each Gaussian, {own['splits']} random halves, aligned to {own['to']}.{statistics}",
        "",
        *_table(("", "members", "q_d", "q_r"), rows + halves),
        "",
        f"- Accuracy of the aligned mean minus that of the unaligned mean: **{_interval(own['gain'], 100)} points**.",
        f"- With each of the first {len(gains)} members as the reference: {min(gains):.1f} to {max(gains):.1f} points,"
        f" mean {sum(gains) / len(gains):.1f}; with the mean as the reference: {100 * values['gain_to_mean']:.1f}.",
        f"- Accuracy of the ensemble: {_interval(own['ensemble_accuracy'], 100)} %.",
        f"- Median σ of a weight: {sigma['q_d']['0.5']:.4f} before, {sigma['q_r']['0.5']:.4f} after alignment; smallest"
        f" {sigma['q_d']['0']:.4f} and {sigma['q_r']['0']:.4f}.",
        "",
        "Test accuracy (%) of the mean with shares of its weights set to 0:",
        "",
        *_table(("weights set to 0", "0 %", "5 %", "25 %", "50 %", "75 %", "95 %"), pruned),
        "",
    ]


def _barrier_rows(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, values in found.items():
        b = values["barrier"]
        rows.append(
            (
                name, str(b["pairs"]), _interval(b["before"]["mean"]), _interval(b["after"]["mean"]),
                _interval(b["fall"]), f"{b['fell']} of {b['pairs']}",
                f"{100 * b['before']['middle_accuracy']:.1f} / {100 * b['after']['middle_accuracy']:.1f}",
                f"{b['ends_change']:.4f}",
            )
        )  # fmt: skip
    header = (
        "", "lines", "before (nats)", "after (nats)", "fall (nats)", "lines that fell", "accuracy at λ = ½ (%)",
        "ends, statistics anew (nats)",
    )  # fmt: skip
    return _table(header, rows)


def text(found: Mapping[str, Any], page: str) -> str:
    """Write the tables into a page, between their marks; return it."""
    paper = _table(
        ("", "HMC", "HMC q_d", "HMC q_r", "ensemble", "ensemble q_d", "ensemble q_r"),
        [(ROWS[row][0], *values) for row, values in PAPER.items()],
    )
    collections = [line for name in NAMES for line in _collection(name, found[name])]
    parts = {"paper": paper, "collections": collections, "barriers": _barrier_rows(found)}
    return fill(page, {name: "\n".join(lines) for name, lines in parts.items()})


def page() -> str:
    """Return the page, its tables made from the file of numbers."""
    numbers = json.loads(NUMBERS.read_text(encoding="utf-8"))
    return text(numbers, (DOCS / "compact.md").read_text(encoding="utf-8"))


def measure_anew() -> None:
    """Measure all collections; write the file of numbers."""
    NUMBERS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
