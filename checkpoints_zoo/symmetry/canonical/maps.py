"""Canonical maps: the scaled, then sorted network that stands for all that symmetries make of it.

Laurent et al. 2024 (arXiv 2310.08287): scale first, then sort.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry.applying import members_of
from checkpoints_zoo.symmetry.canonical.permutation import KEYS, sort
from checkpoints_zoo.symmetry.canonical.scaling import unit_norm
from checkpoints_zoo.symmetry.elements import Element
from checkpoints_zoo.symmetry.table import Table

SCALES = ("unit-norm",)


def canonicalize(
    table: Table,
    params: Mapping[str, Tensor],
    *,
    scale: str | None = None,
    permute: str | None = None,
    streams: bool = False,
    approximate: bool = False,
) -> tuple[dict[str, Tensor], Element]:
    """Scale, then sort members' units; return the tensors, and the symmetry that was applied.

    `symmetry.apply` of the element to the parameters gives the tensors again, but for rounding where scales take
    part, and of its `symmetry.inverse` to the tensors the parameters.

    Args:
        table: of the network.
        params: name -> (member, *shape), or one member's (*shape).
        scale: "unit-norm", see `scaling.unit_norm`; None: nothing is scaled, and all dtypes stay.
        permute: sorted by "first" weight, "max" weight or "norm" of a unit's row, see `permutation.sort`; None: nothing
            moves. Not "norm" where scaling has made all norms 1.
        streams: whether units of residual streams are sorted as well, or only inner channels.
        approximate: whether scales before norms without running statistics change as well.

    Raises:
        UsageError: another word for `scale` or `permute`, or "norm" of rows that have norm 1.
        LayoutError: a tensor that is missing, or that the table lacks, or of another shape.

    >>> import torch
    >>> from torch import nn
    >>> from checkpoints_zoo.symmetry import symmetries
    >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    >>> weights = {"0.weight": torch.tensor([[-4.0], [2.0]]), "2.weight": torch.tensor([[1.0, 3.0]])}
    >>> tensors, element = canonicalize(symmetries(net, torch.zeros(1, 1)), weights, scale="unit-norm", permute="first")
    >>> tensors["0.weight"].tolist(), tensors["2.weight"].tolist()
    ([[1.0], [-1.0]], [[6.0, 4.0]])
    >>> element.permutations["0"].tolist(), element.scales["0"].tolist()
    ([1, 0], [0.25, 0.5])
    """
    check_words(scale, permute)
    members = members_of(table, params)
    if scale is not None and permute == "norm":
        check_norms(table, streams, approximate)
    tensors = dict(params) if members is not None else {n: t[None] for n, t in params.items()}
    permutations: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    if scale is not None:
        tensors, scales, _ = unit_norm(table, tensors, approximate=approximate)
    if permute is not None:
        tensors, permutations = sort(table, tensors, permute, streams)
    if members is None:
        tensors = {n: t[0] for n, t in tensors.items()}
        permutations, scales = ({n: v[0] for n, v in found.items()} for found in (permutations, scales))
    return tensors, Element(permutations, scales)


def check_words(scale: str | None, permute: str | None) -> None:
    """Check the words for what is scaled and how is sorted.

    Raises:
        UsageError: another word.
    """
    for name, word, words in (("scale", scale, SCALES), ("permute", permute, KEYS)):
        if word is not None and word not in words:
            raise UsageError(name, expected=f"{', '.join(map(repr, words))}, or None", found=repr(word))


def check_norms(table: Table, streams: bool, approximate: bool) -> None:
    """Refuse to sort by norms that scaling makes equal: rounding errors would decide."""
    scaled = {s.writers[0]: s.size for s in table.scales.values() if s.exact or approximate}
    for group in table.groups.values():
        if group.writers and (streams or not group.stream) and scaled.get(group.writers[0], 1) > 1:
            raise UsageError(
                "permute",
                expected=f"'first' or 'max': the rows of {group.writers[0][0]} all have norm 1 once they are scaled",
                found="'norm'",
            )
