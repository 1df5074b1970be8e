"""Snapshot ensembles: SGD visits one minimum after another, and each minimum is a draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from checkpoints_zoo.methods.method import Run, check_settings
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.methods.sgd import continue_training


@dataclass(frozen=True)
class Snapshot:
    """SGD with a cosine rate that starts anew, and a draw at the end of each cycle (Huang et al. 2017).

    The first cycle is the recipe's own training: the first draw of a run is its mode. Draws keep the running statistics
    of the training. If `lr` is the recipe's, the draws equal the snapshots of the recipe with schedule
    "cosine-restarts", except that momentum starts at zero after the first cycle.

    Args:
        lr: learning rate at the start of each further cycle.
        cycle: number of epochs of each further cycle.
    """

    lr: float = 0.05
    cycle: int = 1

    name: ClassVar[str] = "snapshot"
    title: ClassVar[str] = "Snapshot ensembles"
    source: ClassVar[str] = "Huang et al. 2017, Snapshot ensembles: train 1, get M for free (arXiv 1704.00109)"
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = False

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Continue the training of each mode; return the runs.

        The first draw is the mode; each other draw is taken at the end of a cycle.

        Args:
            problem: the network and its training images.
            runs: number of runs.
            draws: number of draws of each run.
            seed: seed of the order of images in the further cycles.

        Raises:
            UsageError: a setting is out of its range, or a loss was not finite.
        """
        check_settings(self, runs, draws)
        epochs_after_mode = range(0, draws * self.cycle, self.cycle)
        ends = list(
            continue_training(
                problem, runs, seed, schedule="cosine-restarts", lr=self.lr, epochs_after_mode=epochs_after_mode
            ).values()
        )
        stacked = {name: torch.stack([end[name] for end in ends], 1) for name in ends[0]}  # (run, draw, *shape)
        return [
            Run(problem.add_tied_names({name: tensor[run] for name, tensor in stacked.items()})) for run in range(runs)
        ]

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries: cycles of one epoch, rates from 1/4 to 4 times the recipe's."""
        return [cls(lr=problem.recipe.lr * times) for times in (0.25, 0.5, 1.0, 2.0, 4.0)]
