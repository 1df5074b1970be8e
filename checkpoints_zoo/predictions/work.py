"""Members run on images and their logits packed: what `predict` has done here, or in other processes.

Axes: logits are (member, input, class).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoints_zoo.errors import DamagedError, UsageError
from checkpoints_zoo.executor import Job
from checkpoints_zoo.formats import member_bytes
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.networks.tensors import pack
from checkpoints_zoo.predictions.parts import Key
from checkpoints_zoo.predictions.prediction_sets import LOGITS, Facts
from checkpoints_zoo.predictions.running import Members, by_members, group_size

GROUP_BYTES = 2**27  # of logits in float32 that are held before they are stored
JOB_MEMBERS = 16  # in one job on CPUs, where a member's logits depend on no other
JOBS = 16  # that work is divided into at least, as far as there are members

Packed = tuple[int, bytearray]  # position among the members, logits as they are stored


@dataclass(frozen=True, eq=False)
class Running:
    """What is run on what.

    Args:
        members, inside: the members and the images.
        facts: of the set that the logits are for.
        hashes: what each member's weights must hash to.
        dtype, batch: as in `predict`.
    """

    members: Members
    inside: ImageData
    facts: Facts
    hashes: Mapping[Key, str]
    dtype: torch.dtype
    batch: int

    def __call__(self, some: range, device: str) -> list[Packed]:
        """Run the members at some positions; return the position and the stored bytes of each."""
        return list(self.packed(some, device))

    @property
    def most(self) -> int:
        """How many members' logits are held at a time."""
        return max(1, GROUP_BYTES // (4 * self.facts.inputs * len(self.facts.classes)))

    def jobs(self, runs: Sequence[range], device: str | torch.device) -> list[Job[range]]:
        """Divide members into jobs whose results are those of one process, bit for bit; return these.

        On a GPU a member's last bits may depend on the group that it is run in: there the groups are the same.

        Args:
            runs: positions that follow each other.
            device: what the jobs will run on.
        """
        found = []
        wanted = sum(len(run) for run in runs)
        for run in runs:
            size = group_size(self.members[run.start : run.stop], self.most)
            if torch.device(device).type == "cpu":
                size = min(size, JOB_MEMBERS, -(-wanted // JOBS))
            for at in range(run.start, run.stop, size):
                some = range(at, min(at + size, run.stop))
                ids = self.members.ids[some.start], self.members.ids[some.stop - 1]
                found.append(Job(f"members {ids[0]} to {ids[1]}" if len(some) > 1 else f"member {ids[0]}", some))
        return found

    def packed(self, some: range, device: str | torch.device) -> Iterator[Packed]:
        """Run members and round their logits; yield position and bytes of each.

        Raises:
            UsageError: images that the members can't take, or logits of other classes.
            DamagedError: weights that are not what their rows say, or logits that float16 can't hold.
        """
        members, facts = self.members[some.start : some.stop], self.facts
        at = 0
        for ids, found in by_members(members, self.inside, device, self.dtype, self.batch, self.most):
            if found.shape[-1] != len(facts.classes):
                raise UsageError(
                    f"predictions {facts.name}",
                    expected=f"logits of {len(facts.classes)} classes, as the collection has",
                    found=f"{found.shape[-1]}",
                    collection=facts.collection,
                )
            group = members[at : at + len(ids)]
            for key, digest in zip(group.keys, member_bytes.hash_members(group.locations()), strict=True):
                if digest != self.hashes[key]:
                    raise DamagedError(
                        f"member {key[0]} of {members.name}",
                        expected=f"weights of sha256 {self.hashes[key][:16]}…, as its row says",
                        found=f"{digest[:16]}…",
                        do="`zoo-cli verify` lists all that are not what their rows say",
                        collection=members.name,
                        member=key[0],
                    )
            for i, logits in enumerate(found):
                try:
                    yield some.start + at + i, pack({LOGITS: logits}, facts.layouts[LOGITS])
                except DamagedError as error:
                    error.thing, error.member = f"logits of member {ids[i]} on {facts.data}/{facts.split}", ids[i]
                    error.do = "Leave the member out"
                    raise
            at += len(ids)
