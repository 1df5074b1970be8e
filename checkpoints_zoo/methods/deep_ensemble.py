"""Deep ensembles: independent members of the recipe, none of them in the collection that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.methods.method import Run, check_settings
from checkpoints_zoo.methods.modes import FIRST_SEED, Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.export import run
from checkpoints_zoo.training.loop import StackState, train_epochs
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.training.seeds import derive
from checkpoints_zoo.workers import Here


@dataclass(frozen=True)
class DeepEnsemble:
    """Members of the recipe itself, each from its own seed (Lakshminarayanan et al. 2017): a run is a member."""

    name: ClassVar[str] = "deep-ensemble"
    title: ClassVar[str] = "Deep ensembles"
    source: ClassVar[str] = (
        "Lakshminarayanan et al. 2017, Simple and scalable predictive uncertainty estimation using deep ensembles "
        "(arXiv 1612.01474)"
    )
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = True

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Train members, the problem's modes; return a run of one draw for each.

        Args:
            problem: the network and its training images.
            runs: members.
            draws: 1.
            seed: not used: a member's seed is its number.

        Raises:
            UsageError: more than one draw a run, or losses that were not finite.
        """
        check_settings(self, runs, draws)
        if draws != 1:
            raise UsageError("draws of a deep ensemble", expected="1: a run is a member", found=str(draws))
        params, buffers = problem.modes(runs)
        whole = problem.whole({name: t for name, t in {**params, **buffers}.items() if not is_counter(name)})
        return [Run({name: t[at : at + 1].detach().cpu() for name, t in whole.items()}) for at in range(runs)]

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the one that there is: the recipe's own settings."""
        return [cls()]


def train_members(
    recipe: Recipe,
    out: Path,
    name: str,
    members: int,
    device: str = "cpu",
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Train members with seeds from 1,000,000 on into a folder; those that are there already are left alone.

    A killed run goes on where it was. The rows are those of any trained member: seeds, recipe and its hash, figures.

    Args:
        recipe: of the members, as it is but for its name.
        out: folder of the source.
        name: of the collection.
        members: how many there are to be.
        device: to train on.
        say: told of the progress.

    Raises:
        UsageError: a network that can't be trained, or a folder with members of another recipe under this name.
        LockedError, StorageError: as `training.export.run`.
    """
    named = replace(recipe, name=name, members=members, made_from=recipe.made_from or recipe.name)
    run(named, range(FIRST_SEED, FIRST_SEED + members), out, Here(device), say)


def check_fresh(members: Collection, reference: Collection) -> None:
    """Check by their content that members are not among a reference's.

    Args:
        members: of the ensemble.
        reference: what they are compared with.

    Raises:
        UsageError: members that both have, or rows without hashes.
    """
    hashes = [row["sha256"] for row in reference.rows.select(["sha256"]).to_pylist()]
    own = members.rows.select(["member", "sha256"]).to_pylist()
    if None in hashes or any(row["sha256"] is None for row in own):
        raise UsageError(
            f"members of {members.name} and {reference.name}",
            expected="hashes of all",
            found="rows without",
            do="`zoo-cli import --hash` fills them in",
        )
    if both := [row["member"] for row in own if row["sha256"] in set(hashes)]:
        raise UsageError(
            f"members of {members.name}",
            expected=f"none that are in {reference.name}",
            found=f"the same weights as {format_ids([(member, None) for member in both])} there",
            collection=members.name,
        )


# SGD that goes on from the modes, and the weights on its way: what snapshot ensembles and SWAG are made of.


def passed(
    problem: Problem, runs: int, seed: int, *, schedule: str, lr: float, after: Sequence[int]
) -> dict[int, Tensors]:
    """Train the modes on; return what they are after some epochs: epoch -> parameters and buffers, (run, *shape).

    Momentum is zero at first. Batches, augmentation, momentum and decay are the recipe's.

    Args:
        problem: whose modes they are.
        runs: how many.
        seed: of the order that each run sees the images in.
        schedule: "constant", or "cosine-restarts" with a cycle up to each of the epochs.
        lr: highest rate.
        after: epochs since the mode, rising; 0 for the mode itself.

    Raises:
        UsageError: a loss that was not finite.
    """
    first, alone = problem.recipe.epochs, problem.recipe.stack_width == 1
    at = [first + epoch for epoch in after]
    recipe = replace(
        problem.recipe,
        schedule=schedule,
        lr=lr,
        schedule_unit="step",
        milestones=tuple(sorted({first, *at[:-1]})) if schedule == "cosine-restarts" else (),
        epochs=at[-1],
        snapshots=tuple(at[:-1]),
        stack_width=1 if alone else runs,
        warmup_epochs=0,
        averaging="none",
        eval_every=0,
    )
    ids, modes = [derive(seed, f"run {run}") for run in range(runs)], problem.trained_state(runs)
    size = 1 if alone else runs
    found: list[dict[int, Tensors]] = []
    for start in range(0, runs, size):
        state = _part(modes, slice(start, start + size))
        state.epoch, state.snapshots[first] = first, _copied(state)
        for _ in train_epochs(recipe, ids[start : start + size], state, problem.images):
            pass
        if bool((state.failed_step >= 0).any()):
            raise UsageError(
                f"rate {lr:g} from a mode of {recipe.name!r}",
                expected="finite losses",
                found="others",
                do="Lower the rate",
            )
        found.append({**state.snapshots, at[-1]: _copied(state)})
    names = [name for name in found[0][first] if not is_counter(name)]
    return {e - first: {name: torch.cat([part[e][name] for part in found]) for name in names} for e in at}


def _copied(state: StackState) -> Tensors:
    return {name: t.detach().cpu().clone() for name, t in {**state.params, **state.buffers}.items()}


def _part(modes: StackState, some: slice) -> StackState:
    """Copy some of a stack: steps are taken in place."""

    def of(tensors: Tensors) -> Tensors:
        return {name: tensor[some].clone() for name, tensor in tensors.items()}

    return StackState(
        of(modes.params),
        of(modes.momentum),
        of(modes.buffers),
        modes.loss[some].clone(),
        modes.failed_step[some].clone(),
        scaling=of(modes.scaling),
    )


# Snapshot ensembles: SGD falls into one minimum after another, and each is a draw.


@dataclass(frozen=True)
class Snapshot:
    """SGD with a cosine rate that starts anew, and a draw at the end of each cycle (Huang et al. 2017).

    The first cycle is the recipe's own training: the first draw of a run is its mode. Running statistics are those of
    the training. With `lr` as in the recipe this is the recipe with schedule "cosine-restarts" and its milestones as
    snapshots, but that momentum starts at zero after the first cycle.

    Args:
        lr: at the start of each further cycle.
        cycle: epochs of each further cycle.
    """

    lr: float = 0.05
    cycle: int = 1

    name: ClassVar[str] = "snapshot"
    title: ClassVar[str] = "Snapshot ensembles"
    source: ClassVar[str] = "Huang et al. 2017, Snapshot ensembles: train 1, get M for free (arXiv 1704.00109)"
    needs: ClassVar[tuple[str, ...]] = ()
    independent: ClassVar[bool] = False

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Train each mode on for a cycle a draw, but for the first draw, the mode itself; return the runs.

        Args:
            problem: the network and its training images.
            runs: how many.
            draws: of each run.
            seed: of the order that images come in after the mode.

        Raises:
            UsageError: settings out of their range, or losses that were not finite.
        """
        check_settings(self, runs, draws)
        after = range(0, draws * self.cycle, self.cycle)
        ends = list(passed(problem, runs, seed, schedule="cosine-restarts", lr=self.lr, after=after).values())
        stacked = {name: torch.stack([end[name] for end in ends], 1) for name in ends[0]}  # (run, draw, *shape)
        return [Run(problem.whole({name: tensor[run] for name, tensor in stacked.items()})) for run in range(runs)]

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return cycles of one epoch from a quarter of the recipe's rate to four times as much."""
        return [cls(lr=problem.recipe.lr * times) for times in (0.25, 0.5, 1.0, 2.0, 4.0)]
