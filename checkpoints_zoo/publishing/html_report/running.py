"""Members run once, their logits held in memory as predictions that every figure is then made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.evaluation import measuring, metrics
from checkpoints_zoo.evaluation.evaluating import SMALL_LOGITS
from checkpoints_zoo.evaluation.metrics import Reliability
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.networks.device import SMALL_MEMBER, one_thread
from checkpoints_zoo.predictions import Predictions
from checkpoints_zoo.predictions.sets import LOGITS, Facts, PredictionSet, layout_of


class Held(Predictions):
    """Predictions that were computed just now, in float32.

    Args:
        members: whose.
        inside: the images they are on.
        values: (member, input, class) logits.
        labels: (input,), None for images without.
    """

    def __init__(self, members: Collection, inside: ImageData, values: Tensor, labels: Tensor | None) -> None:
        _, inputs, classes = values.shape
        facts = Facts(
            collection=members.name, set=f"{inside.name}-{inside.split}", data=inside.name, split=inside.split,
            revision=inside.revision, fingerprint=inside.fingerprint, inputs=inputs, classes=members.classes,
            preprocessing=dict(members.description.preprocessing), computed="float32",
            view="; ".join(map(str, members.view.steps)), version="", citation="",
            layouts={LOGITS: layout_of(inputs, classes, "F32")},
            labels=None if labels is None else tuple(labels.tolist()),
        )  # fmt: skip
        super().__init__(PredictionSet(members.source, facts, members.rows), members.rows, ("", members.commit))
        self.members, self.inside, self.values, self.truth = members, inside, values, labels

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def citation(self) -> str:
        return self.members.citation

    @property
    def keys(self) -> list[tuple[int, int, str]]:
        hashes = self.rows.column("sha256").to_pylist()
        return [(*key, digest or "") for key, digest in zip(self.members.keys, hashes, strict=True)]

    def block(self, begin: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values[:, begin:end].to(dtype)

    def one(self, at: int) -> Tensor:
        return self.values[at]

    def _of(self, positions: list[int]) -> Predictions:
        if not positions:
            return super()._of(positions)
        near = slice(positions[0], positions[-1] + 1)  # the values of neighbours are not copied
        some = near if positions == list(range(near.start, near.stop)) else positions
        return Held(self.members._of(positions), self.inside, self.values[some], self.truth)


def run(members: Collection, inside: ImageData, device: str | torch.device, *, labelled: bool) -> Predictions:
    """Run members on images; return their predictions.

    Args:
        members: whose.
        inside: the images.
        device: what the members run on, in float32.
        labelled: whether labels are needed.

    Raises:
        UsageError: images without labels of the members' classes where they are needed, or of a size that the members
            can't take.
        DamagedError: members whose weights or logits are not finite.
    """
    labels = None
    if labelled:
        inside, labels = measuring.labelled(inside, members.description)
    with one_thread(members.member_nbytes < SMALL_MEMBER):
        return Held(members, inside, predictions.logits(members, inside, device), labels)


@dataclass(frozen=True)
class Said:
    """What all members say of each input, and each member of all of them.

    Args:
        largest: (input,) largest mean probability.
        nll: (member,) mean negative log-likelihood of the labels in nats; empty without labels.
        pooled: the bars of a reliability diagram over the inputs of all single members; None without labels.
    """

    largest: Tensor
    nll: Tensor
    pooled: Reliability | None


def walk(found: Predictions, labels: Tensor | None, some: Tensor | None = None) -> Said:
    """Walk over predictions once, in blocks of inputs; return what members say.

    Args:
        found: the predictions.
        labels: (input,), None for images without.
        some: positions of the inputs that count, rising; None for all.
    """
    members = found.shape[0]
    nll = torch.zeros(members, dtype=torch.float64)
    largest: list[Tensor] = []
    bars: list[Reliability] = []
    at = count = 0
    with one_thread(math.prod(found.shape) < SMALL_LOGITS):
        for block in found.blocks():
            here = torch.arange(at, at + block.shape[1])
            at += block.shape[1]
            if some is not None:
                kept = torch.isin(here, some)
                here, block = here[kept], block[:, kept]
            count += len(here)
            if not len(here):
                continue
            log_probs = block.log_softmax(-1)
            probs = log_probs.exp()
            largest.append(probs.mean(0).amax(-1))
            if labels is not None:
                true = labels[here].expand(members, -1)
                nll -= log_probs.gather(-1, true.unsqueeze(-1)).squeeze(-1).double().sum(1)
                bars.append(metrics.reliability(probs.flatten(0, 1), true.flatten(), check=False))
    pooled = None if labels is None else _pooled(bars)
    return Said(torch.cat(largest), nll / count if labels is not None else nll[:0], pooled)


def _pooled(bars: Sequence[Reliability]) -> Reliability:
    """Join the bars of blocks of inputs."""
    count = torch.stack([b.inputs for b in bars]).sum(0)
    confidence = torch.stack([torch.nan_to_num(b.confidence).double() * b.inputs for b in bars]).sum(0)
    accuracy = torch.stack([torch.nan_to_num(b.accuracy).double() * b.inputs for b in bars]).sum(0)
    return Reliability(confidence / count, accuracy / count, count)
