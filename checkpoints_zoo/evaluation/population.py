"""The figures of any subset of a population, from logits that need not fit into memory.

The logits are walked over in blocks of inputs: once for what does not depend on the subset, and once for each group of
subsets whose mean probabilities `MEMORY` holds (the calibration of each class sorts all inputs).

Axes: logits and probabilities (member, input, class).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.evaluation import metrics
from checkpoints_zoo.evaluation.figures import FIGURES, OOD_FIGURES, SCALED, TEMPERATURE
from checkpoints_zoo.evaluation.sides import Logits, Side

MEMORY = 2**27  # bytes of mean probabilities that are held
TOGETHER = 512  # subsets in a walk over the inputs out of distribution, of which a few numbers an input are held


class Population:
    """Predictions of all members, and the figures of any subset of them.

    Args:
        logits: on inputs with labels.
        labels: (input,).
        ood_logits: on inputs out of distribution, None without any.
        held_out: logits on other inputs, and their labels (input,): each subset's temperature is fitted to them. None
            for no temperature scaling.
    """

    def __init__(
        self,
        logits: Tensor | Logits,
        labels: Tensor,
        ood_logits: Tensor | Logits | None,
        held_out: tuple[Tensor | Logits, Tensor] | None = None,
    ) -> None:
        self.members = logits.shape[0]
        self.labels = labels
        self.inside = Side(logits, labels)
        self.outside = None if ood_logits is None else Side(ood_logits, None)
        self.held_out = None if held_out is None else Side(*held_out)
        ood_inputs = 0 if self.outside is None else self.outside.logits.shape[1]
        self.is_ood = torch.arange(len(labels) + ood_inputs) >= len(labels)
        self.names = [n for n in FIGURES if self.outside is not None or n not in OOD_FIGURES]
        self.scaled_names: list[str] = []
        if self.held_out is not None:
            self.scaled_names = [n for n in SCALED if n == TEMPERATURE or n in self.names]

    def measure(self, subsets: Sequence[Tensor]) -> Tensor:
        """Measure the ensembles of some members each; return (subset, figure) float64.

        The figures are those of `names`, and after temperature scaling those of `scaled_names`.

        Args:
            subsets: positions of members, (k,) each; of equal ones, one is measured.
        """
        order = {tuple(subset.tolist()): subset for subset in subsets}
        found = {key: self._single(int(subset)) for key, subset in order.items() if len(key) == 1}
        rest = [key for key in order if len(key) > 1]
        size = _at_a_time(self.inside)
        for at in range(0, len(rest), TOGETHER):
            some = [order[key] for key in rest[at : at + TOGETHER]]
            weights = torch.zeros(len(some), self.members)
            for row, subset in zip(weights, some, strict=True):
                row[subset] = 1
            temperatures = self._temperatures(some, weights)
            outside = None if self.outside is None else _Outside.of_subsets(self.outside, weights, temperatures)
            for i in range(0, len(some), size):
                probs = self.inside.all_means(weights[i : i + size])
                for j, subset in enumerate(some[i : i + size]):
                    own = None if temperatures is None else temperatures[i + j]
                    found[tuple(subset.tolist())] = self._row(subset, probs[j], own, outside, i + j)
                del probs  # or the next group's are held beside them
        return torch.stack([found[tuple(subset.tolist())] for subset in subsets])

    def _single(self, at: int) -> Tensor:
        """Return the figures of one member."""
        own = None
        if self.held_out is not None and self.held_out.labels is not None:
            log_probs = self.held_out.logits.one(at).to(self.held_out.kind).log_softmax(-1)
            own = metrics.temperature(log_probs, self.held_out.labels, check=False)
        outside = None if self.outside is None else _Outside.of_member(self.outside, at, own)
        probs = self.inside.logits.one(at).to(self.inside.kind).softmax(-1)
        return self._row(torch.tensor([at]), probs, own, outside, 0)

    def _temperatures(self, subsets: Sequence[Tensor], weights: Tensor) -> Tensor | None:
        """Fit the temperature of each subset to the inputs held out; return them (subset,) float64, None without such.

        Args:
            subsets: positions of members.
            weights: (subset, member), 1 for those that are in it.
        """
        side = self.held_out
        if side is None or side.labels is None:
            return None
        found = torch.empty(len(subsets), dtype=torch.float64)
        size = _at_a_time(side)
        for i in range(0, len(subsets), size):
            probs = side.all_means(weights[i : i + size])
            for j, subset in enumerate(subsets[i : i + size]):
                found[i + j] = metrics.temperature(side.log_probs(subset, probs[j]), side.labels, check=False)
            del probs
        return found

    def _row(
        self, subset: Tensor, probs: Tensor, temperature: Tensor | None, outside: _Outside | None, at: int
    ) -> Tensor:
        """Return the figures of a subset before and after scaling, (figure,) float64.

        Args:
            subset: positions of the members.
            probs: their mean probabilities, (input, class).
            temperature: theirs, None for no scaling.
            outside: what the subsets measured with it say of the inputs out of distribution.
            at: the subset's place among those.
        """
        inside, labels = self.inside, self.labels
        figures = self._of_probs(probs, None if outside is None else outside.largest[at])
        figures["nll"] = -inside.log_probs_of_labels(subset).double().mean()
        figures["mi_id"] = (metrics.entropy(probs, check=False).double().mean() - inside.entropy[subset].mean()).clamp(
            min=0
        )
        figures["disagreement"] = inside.disagreement(subset)
        if outside is not None and self.outside is not None:
            figures["mi_ood"] = (outside.entropy[at].double() - self.outside.entropy[subset].mean()).clamp(min=0)
        row = [figures[n] for n in self.names]
        if temperature is not None:
            log_probs = metrics.tempered(inside.log_probs(subset, probs), temperature.to(probs.dtype))
            figures = self._of_probs(log_probs.exp(), None if outside is None else outside.scaled[at])
            figures["nll"] = metrics.nll(log_probs, labels, check=False)
            figures[TEMPERATURE] = temperature
            row += [figures[n] for n in self.scaled_names]
        return torch.stack([x.double() for x in row])

    def _of_probs(self, probs: Tensor, largest: Tensor | None) -> dict[str, Tensor]:
        """Return the figures that probabilities alone decide.

        Args:
            probs: (input, class).
            largest: the largest probability of each input out of distribution, (input,).
        """
        labels = self.labels
        found = {
            "accuracy": metrics.accuracy(probs, labels, check=False),
            "brier": metrics.brier(probs, labels, check=False),
            "ece": metrics.ece(probs, labels, check=False),
            "adaptive_ece": metrics.adaptive_ece(probs, labels, check=False),
            "ace": metrics.ace(probs, labels, check=False),
            "aurc": metrics.aurc(probs, labels, check=False),
        }
        if largest is not None:
            scores = -torch.cat([probs.amax(-1), largest])
            found["auroc"] = metrics.auroc(scores, self.is_ood, check=False)
            found["aupr"] = metrics.aupr(scores, self.is_ood, check=False)
            found["fpr95"] = metrics.fpr95(scores, self.is_ood, check=False)
        return found

    def drawing(self, temperature: float | None = None) -> dict[str, Any]:
        """Return what a picture needs: bins of a reliability diagram, information of each input.

        Args:
            temperature: of all members, for the bins after scaling.
        """
        probs = self.inside.everyone
        drawn = _bars("reliability", probs, self.labels)
        if temperature is not None:
            log_probs = self.inside.log_probs(torch.arange(self.members), probs)
            drawn |= _bars("scaled_reliability", metrics.tempered(log_probs, temperature).exp(), self.labels)
        drawn["mi_id"] = self.inside.information.tolist()
        if self.outside is not None:
            drawn["mi_ood"] = self.outside.information.tolist()
        return drawn


@dataclass(frozen=True)
class _Outside:
    """What subsets say of the inputs out of distribution.

    Args:
        largest: mean probability, (subset, input).
        entropy: mean over the inputs, (subset,).
        scaled: `largest` after temperature scaling.
    """

    largest: Tensor
    entropy: Tensor
    scaled: Tensor

    @classmethod
    def of_subsets(cls, side: Side, weights: Tensor, temperatures: Tensor | None) -> _Outside:
        """Walk over the inputs once for some subsets; return what they say.

        Args:
            side: those inputs.
            weights: (subset, member), 1 for those that are in it.
            temperatures: (subset,), None for no scaling.
        """
        largest = torch.empty(len(weights), side.logits.shape[1], dtype=side.kind)
        scaled = torch.empty_like(largest) if temperatures is not None else largest
        entropy = torch.zeros(len(weights), dtype=torch.float64)
        for here, means in side.means(weights):
            largest[:, here] = means.amax(-1)
            entropy += metrics.entropy(means, check=False).double().sum(1)
            if temperatures is not None:
                log_probs = means.clamp_min_(torch.finfo(means.dtype).tiny).log_()
                scaled[:, here] = (
                    metrics.tempered(log_probs, temperatures.to(means.dtype)[:, None, None]).amax(-1).exp()
                )
        return cls(largest, entropy / largest.shape[1], scaled)

    @classmethod
    def of_member(cls, side: Side, at: int, temperature: Tensor | None) -> _Outside:
        """Return what the member at a position says, as a single subset; arguments as in `of_subsets`."""
        logits = side.logits.one(at).to(side.kind)
        probs = logits.softmax(-1)  # as in `_single`: equal inputs in and out of distribution are to be level
        largest = probs.amax(-1)[None]
        scaled = largest
        if temperature is not None:
            scaled = metrics.tempered(logits.log_softmax(-1), temperature.to(side.kind)).exp().amax(-1)[None]
        return cls(largest, metrics.entropy(probs, check=False).double().mean()[None], scaled)


def _at_a_time(side: Side) -> int:
    """Return how many subsets' mean probabilities on a set of inputs are held."""
    _, inputs, classes = side.logits.shape
    return max(1, MEMORY // (4 * inputs * classes))


def _bars(name: str, probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return the bars of a reliability diagram, with a name before each."""
    bins = metrics.reliability(probs, labels)
    return {f"{name}_{n}": getattr(bins, n).tolist() for n in ("confidence", "accuracy", "inputs")}
