"""Networks to match, and a plain descent that matches them and shares no code with what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from checkpoints_zoo.symmetry import Table, symmetries
from checkpoints_zoo.symmetry.canonical.alignment import Matching
from tests.support.symmetry_nets import EVERY, randomised

Params = dict[str, Tensor]


def state_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> Params:
    """Draw the parameters of a net of `EVERY`."""
    state = randomised(EVERY[name][0](), seed).state_dict()
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}


def stack_members(*members: Mapping[str, Tensor]) -> Params:
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}


def add_noise(params: Mapping[str, Tensor], share: float, seed: int) -> Params:
    """Add noise, in standard deviations of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in params.items()}
    return {n: t + share * t.std(correction=0) * drawn[n] if t.is_floating_point() else t for n, t in params.items()}


def counted_tensors(table: Table) -> list[str]:
    return [n for n, axes in table.tensors.items() if axes.moves and axes.role not in ("mean", "variance")]


def inner_product(table: Table, params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> np.ndarray:
    """Write the objective out: (member)."""
    parts = [(params[n].double().numpy(), reference[n].double().numpy()) for n in counted_tensors(table)]
    total: np.ndarray = sum((a * b).reshape(len(a), -1).sum(1) for a, b in parts)
    return total


def match_by_descent(table: Table, reference: Params, params: Params, seed: int) -> tuple[dict[str, list[int]], int]:
    """Match as git-re-basin does, in numpy: every group at every sweep, all of its tensors permuted anew."""
    fixed, own = ({n: t[n].double().numpy() for n in counted_tensors(table)} for t in (reference, params))
    moves = {n: [(m.axis, m.group, m.span) for m in table.tensors[n].moves] for n in fixed}
    found = {name: np.arange(group.size) for name, group in table.groups.items()}
    order, sweeps, progress = np.random.default_rng(seed), 0, True
    while progress:
        sweeps, progress = sweeps + 1, False
        for group in (list(found)[i] for i in order.permutation(len(found))):
            size = table.groups[group].size
            gains = np.zeros((size, size))
            for name, axis in ((n, a) for n, known in moves.items() for a, g, _ in known if g == group):
                moved = own[name]
                for other, by, span in moves[name]:
                    if other != axis:
                        moved = moved.take((found[by][:, None] * span + np.arange(span)).ravel(), other)
                rows = [np.moveaxis(t, axis, 0).reshape(size, -1) for t in (fixed[name], moved)]
                gains += rows[0] @ rows[1].T
            best = linear_sum_assignment(gains, maximize=True)[1]
            before, after = (gains[np.arange(size), p].sum() for p in (found[group], best))
            progress = progress or after > before + 1e-12
            found[group] = best
    return {name: p.tolist() for name, p in found.items()}, sweeps


def check_equal(one: Matching, other: Matching) -> None:
    """Check that two matchings are the same, bit for bit."""
    assert all(torch.equal(p, other.permutations[group]) for group, p in one.permutations.items())
    assert one.objective.tolist() == other.objective.tolist()


def mlp(*widths: int) -> tuple[Table, nn.Module]:
    """Build an MLP and its table."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    return symmetries(net, torch.zeros(1, widths[0])), net


def count_swaps(permutation: list[int]) -> int:
    """Count the swaps of a selection sort, which for permutations is the least number there can be."""
    values, count = list(permutation), 0
    for i in range(len(values)):
        while values[i] != i:
            j = values[i]
            values[i], values[j] = values[j], values[i]
            count += 1
    return count
