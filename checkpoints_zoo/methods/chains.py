"""Chains of all runs, advanced together by a sampler's update: their draws, and what they say of themselves.

Axes: stacked parameters are (run, *shape), draws (draw, *shape).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.diagnostics import effective_size, rhat
from checkpoints_zoo.methods.method import Run
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.product import Batch
from checkpoints_zoo.training.seeds import derive, seeded

Update = Callable[[Any, Batch], tuple[Any, Tensor]]
WATCHED = 10_000  # parameters, spread evenly, that R-hat and effective sizes are computed of


def run_chains(
    problem: Problem,
    name: str,
    update: Update,
    state: Any,
    kept: Sequence[int],
    batch_size: int,
    seed: int,
    friction: float | None = None,
) -> Sequence[Run]:
    """Advance the chains of all runs together, and keep draws; return the runs in order.

    A run's facts: `log_posterior`, of the whole data, in nats, mean over the draws; a draw's is the mean of the
    estimates in the steps since the draw before. With 4 draws or more: `rhat_log_posterior`, the split R-hat of that;
    `rhat` and `ess`, the median parameter's, as `methods.diagnostics` has them. `kinetic_temperature` is the mean
    squared momentum times 1 − friction / 2, which is T where the step is small.

    Args:
        problem: that they sample.
        name: of the method.
        update: posteriors' own, for the product of all runs; what it gives beside the state is each run's log density.
        state: of all chains.
        kept: after how many steps each draw is taken, rising.
        batch_size: images a step, each run its own.
        seed: of everything random.
        friction: share of the momenta lost in a step; None for chains without.

    Raises:
        UsageError: chains that leave for infinity.
    """
    runs = len(next(iter(state.params.values())))
    batches = problem.batches(batch_size, [derive(seed, f"{name} run {run}") for run in range(runs)])
    window: deque[Tensor] = deque(maxlen=min((later - one for one, later in pairwise(kept)), default=kept[0]))
    drawn: list[Tensors] = []
    levels: list[Tensor] = []
    heat: list[Tensor] = []
    with seeded(derive(seed, f"{name} noise"), problem.device):
        for step in range(1, kept[-1] + 1):
            state, level = update(state, next(batches))
            window.append(level)
            if step == kept[len(drawn)]:
                drawn.append({n: p.cpu() for n, p in state.params.items()})
                levels.append(torch.stack(list(window)).mean(0).cpu())
                if friction is not None:
                    heat.append((1 - friction / 2) * _mean_square(state.momenta))
                _check_finite(name, drawn[-1], step)

    level = torch.stack(levels).double()
    made = []
    for run in range(runs):
        params = {n: torch.stack([draw[n][run] for draw in drawn]) for n in drawn[0]}
        flat = torch.cat([p.flatten(1) for p in params.values()], 1)
        flat = flat[:, :: math.ceil(flat.shape[1] / WATCHED)]
        facts = {"log_posterior": float(level[:, run].mean())}
        if len(drawn) >= 4:
            facts["rhat_log_posterior"] = float(rhat(level[None, :, run, None]))
            facts["rhat"] = float(rhat(flat[None]).nanmedian())
            facts["ess"] = float(effective_size(flat[None]).nanmedian())
        if heat:
            facts["kinetic_temperature"] = float(torch.stack(heat).mean(0)[run])
        made.append(Run(problem.finish(params), facts))
    return made


def _mean_square(momenta: Tensors) -> Tensor:
    """Return the mean squared momentum of each run, (run,)."""
    return torch.cat([m.flatten(1) for m in momenta.values()], 1).square().mean(1).cpu()


def _check_finite(name: str, params: Tensors, step: int) -> None:
    finite = torch.stack([p.isfinite().flatten(1).all(1) for p in params.values()]).all(0)
    if not bool(finite.all()):
        raise UsageError(
            f"chains of {name}",
            expected="finite parameters",
            found=f"others in run {int((~finite).nonzero()[0])} at step {step:,}",
            do="Lower lr: the step has to be small for the largest curvature",
        )
