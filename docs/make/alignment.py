"""The page on alignment: its words are here, its numbers in the files of `docs/studies`.

`python -m docs.make --measure alignment docs/alignment.md` measures the shipped collections anew.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.populations.alignment_table import alignment
from checkpoints_zoo.populations.loss_barrier import barrier
from checkpoints_zoo.symmetry import Table
from checkpoints_zoo.symmetry.canonical.alignment import match_weights
from checkpoints_zoo.symmetry.canonical.distances import transpositions
from docs.studies.transpositions import Pair, read_pairs

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "transpositions.json"
MEASURED = ROOT / "docs" / "studies" / "alignment.json"
POINTS = 25
NAMES = ("convnet-digits", "resnet8-digits")

WORDS = """# Alignment

Units of a layer have no order: a network and its permuted copies compute the same function. `members.align(to=0)`
permutes the units of each member when it is read, so that its weights match the weights of a reference. The method is
weight matching (Ainsworth et al. 2023, [Git Re-Basin](https://arxiv.org/abs/2209.04836)): a linear assignment for one
group of units after the other, until no group can gain. Groups, residual streams and grouped convolutions come from
the symmetry table ([Symmetries](symmetries.md)).

```python
import checkpoints_zoo as zoo

members = zoo.load("convnet-digits", n=8)
aligned = members.align(to=0)  # a view: a member is matched when it is first read
found = zoo.alignment(members, to=0)  # (‖W₀ − P·W‖², transpositions) of each member
print(found.to_frame())
element = aligned.symmetry(3)  # the permutations of the member at position 3; zoo.symmetry.inverse undoes them
aligned.write_symmetries("symmetries/convnet-digits.parquet")  # beside a manifest
again = members.transform("symmetries/convnet-digits.parquet")  # and read back, without matching anything
before, after = zoo.barrier(members), zoo.barrier(aligned)  # loss on the lines from member 0 to all others
print(before.mean, after.mean)
```

`to="mean"` matches all members to their running mean; `to=` also takes a member of another selection. Networks with
attention are aligned by [matrices](transformers.md) too. On the command line:

```bash
zoo-cli align convnet-digits --to 0 --barrier --plot align.png
```

## The shipped collections

All members aligned to member 0. The number of transpositions (NoT) is units minus cycles, summed over groups. Random
permutations have about as many transpositions as the permutations that align trained members. The loss barrier is the
largest loss of 25 points on the straight line between two members, minus the mean loss of its ends, on the test set.
Batch norm statistics are estimated at each point from the training set. The interval is a bootstrap over the members.

| | {names} |
|---|{lines}|
{rows}

Alignment lowers the squared distances by a third, and most of the barriers; it does not remove the barriers. These
networks are narrow, and in Ainsworth et al. barriers vanish only for wide networks.

Transpositions do not grow evenly on the way from one member to another. This is the mean over the 63
lines (1 − λ)·W₀ + λ·W of `convnet-digits`, each point matched back to W₀ (`transpositions_along` in
`docs/make/alignment.py`). The number falls in {falls} of the {steps} steps between the 25 points of a line:

{along}

## Does a permuted start end permuted?

The study of Xiao, Liu, Bamler 2023 ([arXiv 2401.00611](https://arxiv.org/abs/2401.00611)): two members start from one
initialisation, but the units of the second one are permuted by some transpositions. Both are trained on the same
images in different orders. (With the same order, the second would end as the first one, permuted: SGD is equivariant.)
Then the second is matched to the first. Mean and standard deviation over {runs} initialisations of the recipe of
`convnet-digits`, whose {units} units allow {most} transpositions:

| before training | after | ‖W₀ − W‖² | ‖W₀ − P·W‖² | barrier (nats) | barrier, matched |
|---|---|---|---|---|---|
{study}

The transpositions of the start are still present after training. Distance and barrier grow with them, and matching
lowers both to about their values without transpositions: training did not leave the basin of its start. The paper
draws the same three figures for its networks, without numbers to compare with.

`zoo-cli train convnet-digits --init-seed 0 --init-permutation 16 --members 0-4 --out out/` trains such members
as a collection; `python -m docs.studies.transpositions --out study.json --plot study.png` computes the
numbers of this table again ([file](studies/transpositions.json)).

![Transpositions, distance and barrier after training against the transpositions before](studies/transpositions.png)
"""


def page() -> str:
    """Return the page."""
    pairs, measured = read_pairs(STUDY), json.loads(MEASURED.read_text(encoding="utf-8"))
    columns = [_collection_column(measured[name]) for name in NAMES]
    table = group_sizes("convnet-digits")
    return WORDS.format(
        names=" | ".join(f"`{name}`" for name in NAMES),
        lines="---|" * len(columns[:-1]) + "---",
        rows="\n".join(f"| {label} | {' | '.join(c[label] for c in columns)} |" for label in columns[0]),
        runs=len({pair.run for pair in pairs}),
        units=sum(table),
        most=sum(table) - len(table),
        study=study_rows(pairs),
        along=_along_rows(measured["convnet-digits"]["along"]),
        falls=sum(b < a for line in measured["convnet-digits"]["along"] for a, b in itertools.pairwise(line)),
        steps=sum(len(line) - 1 for line in measured["convnet-digits"]["along"]),
    )


def group_sizes(name: str) -> list[int]:
    """Return how many units the groups of a collection's network have."""
    return [group.size for group in zoo.symmetries(name).groups.values()]


def study_rows(pairs: list[Pair]) -> str:
    """Lay out the study's pairs, one row a count of transpositions."""
    rows = []
    for count in sorted({pair.before for pair in pairs}):
        some = [pair for pair in pairs if pair.before == count]
        cells = [
            _mean_and_deviation([getattr(pair, name) for pair in some], digits)
            for name, digits in (
                ("after", 1), ("distance", 1), ("aligned_distance", 1), ("barrier", 3), ("aligned_barrier", 3),
            )
        ]  # fmt: skip
        rows.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _mean_and_deviation(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def measure_collection(name: str) -> dict[str, Any]:
    """Align a collection's members to member 0; return their transpositions, distances and barriers."""
    members = zoo.load(name)
    found = alignment(members, to=0)
    lines = {when: barrier(view) for when, view in (("before", members), ("after", members.align(to=0)))}
    return {
        "along": transpositions_of_lines(members),
        "expected": found.expected,
        "members": found.rows()[1:],
        "barriers": {when: line.barriers.tolist() for when, line in lines.items()},
        "mean": {when: [line.mean.value, line.mean.low, line.mean.high] for when, line in lines.items()},
    }


def transpositions_of_lines(members: zoo.Collection) -> list[list[int]]:
    """Return the transpositions (line, point) on the lines from the first member to each of the others."""
    first, table = members[0].state_dict(), members.symmetry_table
    return [transpositions_along(table, first, other.state_dict()) for other in members[1:]]


def transpositions_along(table: Table, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> list[int]:
    """Match each point of the line between two networks back to its start; return the transpositions, one a point.

    Args:
        table: of the network.
        start, end: name -> (*shape). Integers do not count.
    """
    shares = torch.linspace(0, 1, POINTS, dtype=torch.float64).tolist()
    floats = {name: tensor for name, tensor in start.items() if tensor.is_floating_point()}
    line = {name: torch.stack([t.lerp(end[name], share) for share in shares]) for name, t in floats.items()}
    permutations = match_weights(table, line, floats).permutations
    return torch.stack([transpositions(p) for p in permutations.values()]).sum(0).tolist()


def _along_rows(lines: list[list[int]]) -> str:
    """Lay out the mean transpositions at every fourth point."""
    means = [f"{mean(values):.1f}" for values in list(zip(*lines, strict=True))[::4]]
    lambdas = [f"{i / (POINTS - 1):.2g}" for i in range(0, POINTS, 4)]
    head = f"| λ | {' | '.join(lambdas)} |"
    return f"{head}\n|---|{'---|' * len(lambdas)}\n| NoT | {' | '.join(means)} |"


def _collection_column(measured: dict[str, Any]) -> dict[str, str]:
    others = measured["members"]
    intervals = ["{:.2f} [{:.2f}, {:.2f}]".format(*measured["mean"][when]) for when in ("before", "after")]
    return {
        "members": str(len(others) + 1),
        "mean NoT": f"{mean(r['transpositions'] for r in others):.1f}",
        "NoT of a random permutation": f"{measured['expected']:.1f}",
        "mean squared distance": f"{mean(r['before'] for r in others):.1f}",
        "aligned": f"{mean(r['after'] for r in others):.1f}",
        "mean barrier (nats)": intervals[0],
        "barrier aligned": intervals[1],
    }


def measure_collections() -> None:
    """Measure all collections; write the file of numbers."""
    MEASURED.write_text(
        json.dumps({name: measure_collection(name) for name in NAMES}, indent=1) + "\n", encoding="utf-8"
    )
