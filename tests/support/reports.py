"""Reports written by hand, to be drawn: their numbers are none of our code's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from checkpoints_zoo.evaluation.report import Report


def measure_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure few random ensembles of each size where the caller says nothing."""
    from checkpoints_zoo.evaluation import evaluating
    from checkpoints_zoo.populations import predictives

    for function in (evaluating.evaluate, predictives.compare_predictives):
        assert function.__kwdefaults__ is not None
        monkeypatch.setitem(function.__kwdefaults__, "subsets", 5)


def draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save pictures without content, where others test what is drawn: one takes half a second."""
    from checkpoints_zoo.evaluation import drawing

    monkeypatch.setattr(drawing, "_lay_out", lambda figure: figure)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **options: None)


@dataclass
class Bounds:
    """A figure with bounds, as `metrics.Interval` is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class Drawn:
    """A report written by hand: the members' accuracies are counts of 500 inputs, and so known exactly."""

    members: int
    ood: str = "photos/test 0123456789abcdef"
    collection: str = "convnet-digits"
    data: str = "digits/test 89abcdef01234567"
    has_members: bool = True
    inputs: int = 500
    ood_inputs: int = 2000
    citation: str = ""
    correct: list[int] = field(default_factory=list)
    ensemble: dict[str, Bounds] = field(default_factory=dict)
    member: dict[str, Bounds] = field(default_factory=dict)
    curve: dict[int, dict[str, Bounds]] = field(default_factory=dict)
    drawing: dict[str, Any] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)
    calibrated: Any = None
    asked: list[Any] = field(default_factory=list)

    plot = Report.plot
    remarks = Report.remarks

    def answers(self) -> list[Any]:
        return self.asked

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.members)
        self.citation = f"file:///home/me/out@{'4' * 40}/convnet-digits#0-{self.members - 1}~01234567"
        self.correct = [int(c) for c in draw.integers(478, 491, self.members)]
        sizes = sorted({*(2**i for i in range(self.members.bit_length())), self.members})
        for size in sizes:
            accuracy, nll, half = 0.985 - 0.012 / size, 0.06 + 0.03 / size, 0.02 / (1 + size)
            bands = [(accuracy, half), (nll, half), (0.012, 0.0034), (0.02, 0.001), (0.4, 0.03), (0.9912, 0.0041)]
            self.curve[size] = {
                name: Bounds(v, v - h, v + h) if self.members >= 3 else Bounds(v)
                for name, (v, h) in zip(("accuracy", "nll", "ece", "mi_id", "mi_ood", "auroc"), bands, strict=True)
            }
        self.ensemble = self.curve[self.members]
        mean = sum(self.correct) / self.members / 500
        self.member = {"accuracy": Bounds(mean, mean - 0.002, mean + 0.002)}
        inputs = [0] * 5 + [1, 2, 3, 5, 9, 10, 20, 50, 100, 300]
        nothing = float("nan")
        self.drawing = {
            "member_accuracy": [c / 500 for c in self.correct],
            "reliability_inputs": inputs,
            "reliability_confidence": [(b + 0.6) / 15 if n else nothing for b, n in enumerate(inputs)],
            "reliability_accuracy": [min(1.0, (b + 2) / 15) if n else nothing for b, n in enumerate(inputs)],
            "mi_id": [0.0] * 500 if self.members == 1 else (10 ** draw.normal(-2, 0.7, 500)).clip(max=2).tolist(),
        }
        if self.ood:
            values = [0.0] * 2000 if self.members == 1 else (10 ** draw.normal(-0.4, 0.2, 2000)).clip(max=2).tolist()
            self.drawing["mi_ood"] = values
