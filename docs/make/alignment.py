"""The page on alignment: its words are here, its numbers in the files of `docs/studies`.

`python -m docs.make --measure alignment docs/alignment.md` measures the shipped collections anew.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import checkpoints_zoo as zoo
from checkpoints_zoo.populations.alignment_table import alignment
from checkpoints_zoo.populations.loss_barrier import barrier
from checkpoints_zoo.symmetry.canonical.distances import along
from docs.studies.transpositions import Pair, read

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "docs" / "studies" / "transpositions.json"
MEASURED = ROOT / "docs" / "studies" / "alignment.json"
POINTS = 25
NAMES = ("convnet-digits", "resnet8-digits")

WORDS = """# Alignment

Units of a layer have no order: a network and its permuted copies compute the same function. `members.align(to=0)`
permutes the units of each member, as it is read, so that its weights match those of a reference: weight matching
(Ainsworth et al. 2023, [Git Re-Basin](https://arxiv.org/abs/2209.04836)), a linear assignment for one group of units
after the other until nothing gains. Groups, residual streams and grouped convolutions come from the symmetry table
([symmetries.md](symmetries.md)).

```python
import checkpoints_zoo as zoo

members = zoo.load("convnet-digits", n=8)
aligned = members.align(to=0)  # a view: a member is matched when it is first read
found = zoo.alignment(members, to=0)  # what that does: (‖W₀ − P·W‖², transpositions) a member
print(found.to_frame())
element = aligned.symmetry(3)  # the permutations of the member at position 3; zoo.symmetry.inverse undoes them
aligned.write_symmetries("symmetries/convnet-digits.parquet")  # beside a manifest
again = members.transform("symmetries/convnet-digits.parquet")  # and read back, without matching anything
before, after = zoo.barrier(members), zoo.barrier(aligned)  # loss on the lines from member 0 to all others
print(before.mean, after.mean)
```

`to="mean"` matches all members to their running mean; `to=` also takes a member of another selection. On the command
line:

```bash
zoo-cli align convnet-digits --to 0 --barrier --plot align.png
```

## The shipped collections

All members aligned to member 0. The number of transpositions (NoT) is units minus cycles, summed over groups; a
permutation drawn at random has about as many as trained members need. The loss barrier is the largest loss of 25
points on the straight line minus the mean of its ends, on the test set, with batch norm statistics estimated anew at
each point from the training set; the interval is a bootstrap over the members.

| | {names} |
|---|{lines}|
{rows}

Alignment takes a third off the squared distances and most of the barriers, and does not remove them: these networks
are narrow, and Ainsworth et al. see barriers vanish only for wide ones.

Transpositions do not grow evenly on the way from one member to another. The mean over the 63 lines (1 − λ)·W₀ + λ·W of
`convnet-digits`, each point matched back to W₀ (`checkpoints_zoo.symmetry.canonical.distances.along`); in {falls} of
the {steps} steps between the 25 points of a line the number falls:

{along}

## Does a permuted start end permuted?

The study of Xiao, Liu, Bamler 2023 ([arXiv 2401.00611](https://arxiv.org/abs/2401.00611)): two members start from one
initialisation, the second one's units permuted by some transpositions, and are trained on the same images in other
orders. (In the same order the second ends as the first, permuted: SGD is equivariant.) Then the second is matched to
the first. Mean and standard deviation over {runs} initialisations of `convnet-digits`' recipe, whose {units} units
allow {most} transpositions:

| before training | after | ‖W₀ − W‖² | ‖W₀ − P·W‖² | barrier (nats) | barrier, matched |
|---|---|---|---|---|---|
{study}

The transpositions that the start was permuted by are still there after training; distance and barrier grow with them,
and matching takes both back to about what they are without any: training did not leave the basin that it started in.
The paper draws the same three figures for its networks and gives no numbers to compare with.

`zoo-cli train convnet-digits --init-seed 0 --init-permutation 16 --members 0-4 --out out/` trains such members
as a collection; `python -m docs.studies.transpositions --out study.json --plot study.png` makes this
table's figures anew ([its file](studies/transpositions.json)).

![Transpositions, distance and barrier after training against the transpositions before](studies/transpositions.png)
"""


def page() -> str:
    """Return the page."""
    pairs, measured = read(STUDY), json.loads(MEASURED.read_text(encoding="utf-8"))
    columns = [_column(measured[name]) for name in NAMES]
    table = symmetries_of("convnet-digits")
    return WORDS.format(
        names=" | ".join(f"`{name}`" for name in NAMES),
        lines="---|" * len(columns[:-1]) + "---",
        rows="\n".join(f"| {label} | {' | '.join(c[label] for c in columns)} |" for label in columns[0]),
        runs=len({pair.run for pair in pairs}),
        units=sum(table),
        most=sum(table) - len(table),
        study=study(pairs),
        along=_along(measured["convnet-digits"]["along"]),
        falls=sum(b < a for line in measured["convnet-digits"]["along"] for a, b in itertools.pairwise(line)),
        steps=sum(len(line) - 1 for line in measured["convnet-digits"]["along"]),
    )


def symmetries_of(name: str) -> list[int]:
    """Return how many units the groups of a collection's network have."""
    return [group.size for group in zoo.symmetries(name).groups.values()]


def study(pairs: list[Pair]) -> str:
    """Lay out the study's pairs, one row a count of transpositions."""
    rows = []
    for count in sorted({pair.before for pair in pairs}):
        some = [pair for pair in pairs if pair.before == count]
        cells = [
            _spread([getattr(pair, name) for pair in some], digits)
            for name, digits in (
                ("after", 1), ("distance", 1), ("aligned_distance", 1), ("barrier", 3), ("aligned_barrier", 3),
            )
        ]  # fmt: skip
        rows.append(f"| {count} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def measure(name: str) -> dict[str, Any]:
    """Align a collection's members to member 0; return their transpositions, distances and barriers."""
    members = zoo.load(name)
    found = alignment(members, to=0)
    lines = {when: barrier(view) for when, view in (("before", members), ("after", members.align(to=0)))}
    return {
        "along": along_lines(members),
        "expected": found.expected,
        "members": found.rows()[1:],
        "barriers": {when: line.barriers.tolist() for when, line in lines.items()},
        "mean": {when: [line.mean.value, line.mean.low, line.mean.high] for when, line in lines.items()},
    }


def along_lines(members: zoo.Collection) -> list[list[int]]:
    """Return the transpositions of all groups, a line to each member but the first and a point, matched to member 0."""
    first = members[0].state_dict()
    return [along(members.symmetry_table, first, other.state_dict(), POINTS).total.tolist() for other in members[1:]]


def _along(lines: list[list[int]]) -> str:
    """Lay out the mean transpositions at every fourth point."""
    means = [f"{mean(values):.1f}" for values in list(zip(*lines, strict=True))[::4]]
    lambdas = [f"{i / (POINTS - 1):.2g}" for i in range(0, POINTS, 4)]
    head = f"| λ | {' | '.join(lambdas)} |"
    return f"{head}\n|---|{'---|' * len(lambdas)}\n| NoT | {' | '.join(means)} |"


def _column(measured: dict[str, Any]) -> dict[str, str]:
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


def measure_anew() -> None:
    """Measure all collections; write the file of numbers."""
    MEASURED.write_text(json.dumps({name: measure(name) for name in NAMES}, indent=1) + "\n", encoding="utf-8")
