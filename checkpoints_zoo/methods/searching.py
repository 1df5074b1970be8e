"""Choose a method's settings on training images that are held out: the search, and what it tried."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.methods.method import Method
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import PIECE, Problem
from checkpoints_zoo.networks.ensemble import Ensemble

HELD_OUT = 250  # images, where nothing else is said


@dataclass(frozen=True)
class Tried:
    """Settings that a search tried, and how their draws did on the images held out.

    Args:
        method: its name.
        settings: of it.
        accuracy, nll: of the mean probabilities of one run's draws, mean over the runs; NLL in nats.
        seconds: that the fit took.
        failed: why there are no figures; "" if there are.
    """

    method: str
    settings: Mapping[str, Any]
    accuracy: float
    nll: float
    seconds: float
    failed: str = ""


def search(
    kind: type[Method], problem: Problem, *, runs: int = 2, draws: int = 50, seed: int = 0
) -> tuple[Method, Sequence[Tried]]:
    """Fit a method with each of its grid's settings; return the one with the least NLL, and all that was tried.

    Args:
        kind: the method.
        problem: with images held out.
        runs, draws: of each fit.
        seed: of the fits.

    Raises:
        UsageError: no images held out, or no settings with finite figures.
    """
    if problem.held_out is None:
        raise UsageError("problem of a search", expected="images held out", found="none", do="Problem.of(…, held_out=)")
    tried, methods = [], list(kind.grid(problem))
    for method in methods:
        began = time.monotonic()
        try:
            fitted = method.fit(problem, runs, draws, seed)
            figures = [judged(problem, run.states) for run in fitted]
            accuracy, nll = (sum(values) / len(values) for values in zip(*figures, strict=True))
            failed = ""
        except UsageError as error:
            accuracy = nll = float("nan")
            failed = str(error)
        settings = asdict(method)
        tried.append(Tried(method.name, settings, accuracy, nll, time.monotonic() - began, failed))
    finite = [at for at, t in enumerate(tried) if t.nll == t.nll and abs(t.nll) != float("inf")]
    if not finite:
        raise UsageError(
            f"search for settings of {kind.name}",
            expected="a finite NLL of some",
            found=f"none of {len(tried)}{f': {tried[0].failed}' if tried and tried[0].failed else ''}",
        )
    best = min(finite, key=lambda at: tried[at].nll)
    return methods[best], tried


def judged(problem: Problem, states: Tensors) -> tuple[float, float]:
    """Return the accuracy and the NLL (nats) of draws' mean probabilities on a problem's images held out.

    Args:
        problem: with images held out.
        states: name -> (draw, *shape).
    """
    held = problem.held_out
    if held is None or held.labels is None:
        raise UsageError("problem", expected="labelled images held out", found="none")
    draws = len(next(iter(states.values())))
    ensemble = Ensemble(problem.network().eval().requires_grad_(False), states, range(draws))
    with torch.inference_mode():
        parts = [ensemble(problem.recipe.preprocess(some)).double() for some in torch.split(held.images, PIECE)]
    log_probs = torch.cat(parts, 1).log_softmax(-1).logsumexp(0) - math.log(draws)
    accuracy = metrics.accuracy(log_probs.exp(), held.labels, check=False)  # NaN says that settings are none
    return float(accuracy), float(metrics.nll(log_probs, held.labels, check=False))
