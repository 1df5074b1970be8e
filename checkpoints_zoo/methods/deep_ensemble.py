"""Deep ensembles: independently trained members of the recipe that the reference collection does not contain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.methods.method import Run, check_settings
from checkpoints_zoo.methods.modes import FIRST_SEED
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.export import train_into
from checkpoints_zoo.training.recipe import Recipe
from checkpoints_zoo.workers import InProcess


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
        """Train members, which are the problem's modes; return a run of one draw for each member.

        Args:
            problem: the network and its training images.
            runs: number of members.
            draws: number of draws of each run, which must be 1.
            seed: ignored, since the seeds of members are fixed numbers.

        Raises:
            UsageError: more than one draw per run is requested, or a loss was not finite.
        """
        check_settings(self, runs, draws)
        if draws != 1:
            raise UsageError("draws of a deep ensemble", expected="1: a run is a member", found=str(draws))
        params, buffers = problem.modes(runs)
        all_tensors = problem.add_tied_names(
            {name: t for name, t in {**params, **buffers}.items() if not is_counter(name)}
        )
        return [Run({name: t[at : at + 1].detach().cpu() for name, t in all_tensors.items()}) for at in range(runs)]

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the only setting that a search tries: the recipe's own."""
        return [cls()]


def train_members(
    recipe: Recipe,
    out: Path,
    collection_name: str,
    member_count: int,
    device: str = "cpu",
    say: Callable[[str], object] = lambda text: None,
) -> None:
    """Train members with seeds from 1,000,000 on into a folder; members that the folder already has stay.

    If a call was killed, the next call continues where the killed call stopped. The rows of the members have the same
    columns as the rows of other trained members: seed, recipe, hash, figures.

    Args:
        recipe: recipe of the members; only its name is replaced.
        out: folder of the source.
        collection_name: name of the collection.
        member_count: number of members that the folder has in the end.
        device: device to train on.
        say: function that is called with lines of text on the progress.

    Raises:
        UsageError: the network can't be trained, or the folder has members of another recipe under this name.
        LockedError, StorageError: another process is training into the folder, or the disk is full.
    """
    named_recipe = replace(
        recipe, name=collection_name, members=member_count, made_from=recipe.made_from or recipe.name
    )
    train_into(named_recipe, range(FIRST_SEED, FIRST_SEED + member_count), out, InProcess(device), say)


def check_no_shared_members(members: Collection, reference: Collection) -> None:
    """Check by content hashes that no member is in a reference population.

    Args:
        members: members of the ensemble.
        reference: population whose hashes are compared with the members'.

    Raises:
        UsageError: the reference contains some of the members, or rows lack hashes.
    """
    reference_hashes = [row["sha256"] for row in reference.rows.select(["sha256"]).to_pylist()]
    rows = members.rows.select(["member", "sha256"]).to_pylist()
    if None in reference_hashes or any(row["sha256"] is None for row in rows):
        raise UsageError(
            f"members of {members.name} and {reference.name}",
            expected="hashes of all",
            found="rows without",
            do="`zoo-cli import --hash` fills them in",
        )
    if shared_members := [row["member"] for row in rows if row["sha256"] in set(reference_hashes)]:
        raise UsageError(
            f"members of {members.name}",
            expected=f"none that are in {reference.name}",
            found=f"the same weights as {format_ids([(member, None) for member in shared_members])} there",
            collection=members.name,
        )
