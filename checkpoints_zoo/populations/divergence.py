"""The mutual information of every pair of members, as one product of matrices.

The mutual information of a pair is the Jensen-Shannon divergence of its two predictions. A table turns probabilities
into vectors whose squared distances are the Jensen-Shannon divergences, so that all pairs cost one matrix product.

Axes: predictions (member, input, class), results (member, member).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.device import check_device

Array = npt.NDArray[np.float64]
PredictionKind = Literal["logits", "probabilities"]

TOLERANCE = 1e-6  # Largest error of a pair's information in nats, without float32's rounding.
TABLE_BITS = 9  # The table has 2^9 rows per octave of probabilities, and is linear between rows.
CACHED_PROBABILITIES = 1 << 16  # Number of probabilities whose vectors fit into a CPU's cache.
SUM_TOLERANCE = 1e-3  # Largest error of a sum of probabilities that are rounded to float16.
PRODUCT_DEPTH = 4096  # Number of terms of a float32 product: a longer sum loses 1e-5 of its value to rounding.
PRODUCT_MEMBERS = 256  # Number of members of a product: larger blocks compute more pairs twice.


@dataclass(frozen=True)
class Pairs:
    """Two figures of every pair of members, (member, member), float64 on the CPU, symmetric with a zero diagonal.

    Args:
        information: mutual information H((p + q) / 2) - (H(p) + H(q)) / 2 in nats, mean over inputs.
        disagreement: share of inputs whose arg-max differs (if values are equal, the first class counts).
        inputs: number of inputs over which figures are averaged.
    """

    information: Tensor
    disagreement: Tensor
    inputs: int

    def __len__(self) -> int:
        return len(self.information)


def compare_pairs(
    predictions: Tensor | Iterable[Tensor],
    kind: PredictionKind = "logits",
    *,
    device: str | torch.device = "cpu",
    memory: int = 1 << 27,
) -> Pairs:
    """Compare all pairs of members on all inputs, in one pass; return their mutual information and disagreement.

    The error of a pair's mutual information is below 1e-6 nats. Products are float32, sums float64.

    Args:
        predictions: logits or probabilities (member, input, class) of any float dtype; or blocks of inputs, each with
            all members in order.
        kind: kind of predictions, which can't be guessed from values, as logits may lie within [0, 1].
        device: torch device for the computation; blocks of predictions are moved to the device.
        memory: bytes of working memory, beside the predictions and a few (member, member) matrices.

    Raises:
        UsageError: there are no predictions or only one member's, a block has another shape than the first, or values
            are no predictions.

    >>> import torch
    >>> pairs = compare_pairs(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]]), kind="probabilities")
    >>> [round(x, 4) for x in pairs.information[0].tolist()]  # log 2 = 0.6931
    [0.0, 0.6931, 0.6931]
    """
    if kind not in ("logits", "probabilities"):
        raise UsageError("kind of predictions", expected="'logits' or 'probabilities'", found=repr(kind))
    torch_device, sums, inputs = check_device(device), None, 0
    with _exact_products():
        for block in [predictions] if isinstance(predictions, Tensor) else predictions:
            shape = _check_shape(block, None if sums is None else (len(sums.products), sums.classes))
            sums = sums or _PairSums(*shape, torch_device)
            size = max(1, memory // (4 * shape[0] * shape[1] * (sums.embedding.table.shape[1] + 2)))
            for piece in torch.split(block, size, dim=1) if block.shape[1] else ():
                sums.add(piece, kind)
            inputs += block.shape[1]
    if sums is None or not inputs:
        raise UsageError("predictions", expected="an input or more", found="none")
    return Pairs(*sums.means(inputs), inputs)


class _PairSums:
    """For all pairs of members: squared distances of embedded predictions, and agreements of predicted classes, added
    up over inputs."""

    def __init__(self, member_count: int, class_count: int, device: torch.device) -> None:
        self.classes, self.device = class_count, device
        self.embedding = find_embedding(class_count).to(device)
        # Apple's Metal backend has no float64.
        self.sum_device = torch.device("cpu") if device.type == "mps" else device
        shape = (member_count, member_count)
        self.products, self.agreements = (
            torch.zeros(shape, dtype=torch.float64, device=self.sum_device) for _ in range(2)
        )
        self.values_at_once = CACHED_PROBABILITIES if device.type == "cpu" else 64 * CACHED_PROBABILITIES

    def add(self, predictions: Tensor, kind: PredictionKind) -> None:
        """Add the predictions for further inputs, (member, input, class)."""
        members, inputs, classes = predictions.shape
        vectors = torch.empty(
            members, inputs * classes * self.embedding.table.shape[1], dtype=torch.float32, device=self.device
        )
        votes = torch.zeros(members, inputs, classes, dtype=torch.float32, device=self.device)
        centre: Tensor | None = None
        step = max(1, self.values_at_once // (inputs * classes))
        for start in range(0, members, step):
            values = predictions[start : start + step].to(self.device)
            values = values if values.dtype == torch.float64 else values.float()
            votes[start : start + step].scatter_(-1, values.argmax(-1, keepdim=True), 1.0)
            probs = (values.softmax(-1) if kind == "logits" else values).float()
            _check_probabilities(probs, start, kind)
            embedded_probs = self.embedding(probs.reshape(-1)).view(len(values), -1)
            # Distances do not depend on the subtracted centre; a centre near the members makes their rounding small.
            centre = embedded_probs.mean(0) if centre is None else centre
            torch.sub(embedded_probs, centre, out=vectors[start : start + step])
        self._add_products(vectors, self.products)
        self._add_products(votes.view(members, -1), self.agreements)

    def _add_products(self, vectors: Tensor, product_sums: Tensor) -> None:
        """Add vectors @ vectors.T to a sum: the upper triangle, and the pairs below the diagonal that blocks of members
        contain."""
        for part in torch.split(vectors, PRODUCT_DEPTH, dim=1):
            for start in range(0, len(part), PRODUCT_MEMBERS):
                product = torch.mm(part[start : start + PRODUCT_MEMBERS], part[start:].T)
                product_sums[start : start + PRODUCT_MEMBERS, start:] += product.to(self.sum_device)

    def means(self, input_count: int) -> tuple[Tensor, Tensor]:
        """Return the complete matrices of mean divergences and disagreements, on the CPU."""
        mean_products, mean_agreements = (
            (t.triu() + t.triu(1).T).cpu() / input_count for t in (self.products, self.agreements)
        )
        norms = mean_products.diagonal()
        information = (norms[:, None] + norms - 2 * mean_products).clamp_(min=0).fill_diagonal_(0)
        return information, (1 - mean_agreements).fill_diagonal_(0)


@contextmanager
def _exact_products() -> Iterator[None]:
    """Compute float32 products in full float32, whatever precision the caller has allowed elsewhere."""
    caller_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(caller_precision)


def _check_shape(block: Tensor, earlier_counts: tuple[int, int] | None) -> tuple[int, int]:
    """Return the numbers of members and classes of a block.

    Raises:
        UsageError: the block has another shape than (member, input, class), or than the earlier blocks.
    """
    shape = f"{str(block.dtype).removeprefix('torch.')} of shape {tuple(block.shape)}"
    if block.ndim != 3 or not block.is_floating_point() or block.shape[0] < 2 or block.shape[2] < 2:
        expected = "(member, input, class) floats, of two members and two classes or more"
        raise UsageError("predictions", expected=expected, found=shape)
    members, _, classes = block.shape
    if earlier_counts not in (None, (members, classes)):
        raise UsageError(
            "block of predictions", expected=f"{earlier_counts[0]} members, {earlier_counts[1]} classes", found=shape
        )
    return members, classes


def _check_probabilities(probs: Tensor, first_position: int, kind: PredictionKind) -> None:
    """Check that the values of members are predictions.

    Args:
        probs: probabilities (member, input, class).
        first_position: position of the first member.
        kind: kind of the predictions from which the probabilities were computed.

    Raises:
        UsageError: the values are no predictions.
    """
    class_sums = probs.sum(-1)
    if kind == "logits":
        is_wrong, expected = ~class_sums.isfinite().all(-1), "finite logits, or −inf for a probability of 0"
    else:
        is_wrong_input = ((class_sums - 1).abs() > SUM_TOLERANCE) | (probs.amin(-1) < 0) | ~class_sums.isfinite()
        is_wrong, expected = is_wrong_input.any(-1), "no negative one, and a sum of 1 over the classes"
    if bool(is_wrong.any()):
        member = first_position + int(is_wrong.nonzero()[0, 0])
        found = f"others for the member at position {member}"
        do = "" if kind == "logits" else "Logits need kind='logits'"
        raise UsageError(kind, expected=expected, found=found, do=do)


@dataclass(frozen=True)
class Embedding:
    """Maps a probability to a vector, so that squared distances of vectors are divergences.

    Args:
        table: vectors (row, component) in float32 of the probabilities 2^-octaves (1 + i / 2^TABLE_BITS), up to 1.
        octaves: number of octaves below 1 that the table covers; smaller probabilities get the first row.
        bound: the largest error of a divergence, in nats, over all pairs of distributions.
    """

    table: Tensor
    octaves: int
    bound: float

    def __call__(self, probs: Tensor) -> Tensor:
        """Look up probabilities in the table; return their vectors (probability, component).

        Args:
            probs: probabilities, (probability,) float32.
        """
        # A float32's bits are linear in its value within an octave: the upper bits give the row, the lower bits the
        # position between two rows.
        float_bits = probs.clamp(2.0**-self.octaves, 1.0).view(torch.int32) - ((127 - self.octaves) << 23)
        rows, shares = float_bits.new_empty(len(float_bits), 2), probs.new_empty(len(float_bits), 2)
        torch.bitwise_right_shift(float_bits, 23 - TABLE_BITS, out=rows[:, 0])
        torch.add(rows[:, 0], 1, out=rows[:, 1])
        torch.mul(float_bits & ((1 << (23 - TABLE_BITS)) - 1), 2.0 ** (TABLE_BITS - 23), out=shares[:, 1])
        torch.sub(1.0, shares[:, 1], out=shares[:, 0])
        return torch.nn.functional.embedding_bag(rows, self.table, mode="sum", per_sample_weights=shares)

    def to(self, device: torch.device) -> Embedding:
        return replace(self, table=self.table.to(device))


@lru_cache(maxsize=8)
def find_embedding(class_count: int) -> Embedding:
    """Find the fewest components for which every divergence is within the tolerance; return the embedding.

    The error of a class is bounded on a grid, as a share of (p + q) / 2 + 1 / classes, whose sum is at most 2.

    Args:
        class_count: number of classes, whose probabilities sum to one.
    """
    highest_scale_exponent = math.ceil(math.log2(class_count / TOLERANCE))
    # The scales s run from s·p near 0 to s·p above 0 for the smallest probability; the two ends count double.
    s = 2.0 ** np.arange(-20, highest_scale_exponent + 1)
    width = math.log(2) / s
    width[[0, -1]] *= 2

    def vectors_of(p: Array) -> Array:
        values: Array = -np.expm1(-np.outer(p, s)) * np.sqrt(width) / 2
        return values

    octaves = highest_scale_exponent + 8
    rows = np.arange((octaves << TABLE_BITS) + 2)
    table_probs = 2.0 ** ((rows >> TABLE_BITS) - octaves) * (1 + (rows & ((1 << TABLE_BITS) - 1)) / (1 << TABLE_BITS))
    grid = torch.tensor([0.0, *np.logspace(-12, 0, 180)], dtype=torch.float32)
    p = grid.double().numpy()
    table, exact_vectors = vectors_of(table_probs), vectors_of(p)
    for component_count in range(9 + int(3 * math.log10(class_count)), len(s)):  # Fewer components are never enough.
        weight = 1 / np.sqrt(p + 1 / class_count)
        for _ in range(3):  # Rows with larger errors get larger weights.
            axes = np.linalg.svd(exact_vectors * weight[:, None], full_matrices=False)[2][:component_count]
            squared_errors = ((exact_vectors - exact_vectors @ axes.T @ axes) ** 2).sum(1) * weight**2
            weight = weight * np.maximum(squared_errors / squared_errors.max(), 1e-3) ** 0.25
        result = Embedding(torch.tensor(table @ axes.T, dtype=torch.float32), octaves, math.inf)
        bound = _largest_divergence_error(result(grid).double().numpy(), p, class_count)
        if bound <= TOLERANCE:
            break
    return replace(result, bound=bound)


def _largest_divergence_error(vectors: Array, p: Array, class_count: int) -> float:
    """Return the largest error of a divergence that is computed by the vectors, over a grid of probabilities."""
    x, y = p[:, None], p[None]
    z = x + y
    entropy_terms = [-a * np.log(np.where(a > 0, a, 1)) for a in (z / 2, x, y)]
    exact_divergences = entropy_terms[0] - (entropy_terms[1] + entropy_terms[2]) / 2
    norms = (vectors**2).sum(1)
    divergences = norms[:, None] + norms - 2 * vectors @ vectors.T
    return float(2 * (np.abs(divergences - exact_divergences) / (z / 2 + 1 / class_count)).max())
