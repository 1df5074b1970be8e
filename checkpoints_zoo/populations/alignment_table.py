"""Distances of members to a reference before and after alignment, and the transpositions of each alignment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection, Member
from checkpoints_zoo.collection.views import Aligned, AlignedToMean
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, check_picture_path, save_figure
from checkpoints_zoo.formats.printing import PrintedResult, text_table
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, one_thread
from checkpoints_zoo.populations.loss_barrier import Barriers
from checkpoints_zoo.symmetry.canonical.distances import squared_distance, transpositions

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Params = dict[str, Tensor]
_BYTES_AT_ONCE = 1 << 28  # Bytes of members that are read at once.
PANEL_SIZE = (4.6, 4.0)  # Width and height of a panel in inches.


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(PrintedResult):
    """The distance ‖W₀ − P·W‖² of each member to a reference and the number of transpositions NoT, the pair that Xiao,
    Liu, Bamler 2023 (arXiv 2401.00611) report.

    Args:
        collection: name of the collection.
        to: description of the reference that members are aligned to.
        keys: id and epoch of each member.
        sizes: group -> number of its units.
        transpositions: group -> number of transpositions (NoT) of the permutation that aligns each member, (member,).
        before, after: squared distance of each member to the reference before and after alignment, (member,); running
            statistics do not count. If the reference is the mean, `before` is to the mean of the stored members, and
            `after` to the mean of the aligned members.
    """

    collection: str
    to: str
    keys: tuple[tuple[int, int], ...]
    sizes: Mapping[str, int]
    transpositions: Mapping[str, Tensor]
    before: Tensor
    after: Tensor

    def _one_line(self) -> str:
        return f"{self.collection!r}, {len(self)} members aligned to {self.to}"

    def to_text(self) -> str:
        """Return a table with one row per member."""
        note = f"Aligned to {self.to}; random permutations need {self.expected:.4g} transpositions on average."
        return f"{text_table(self.rows())}\n\n{note}"

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def moved(self) -> Tensor:
        """Whether each member differs from the reference, (member) bool; the reference itself is at distance 0."""
        return self.before > 0

    @property
    def total(self) -> Tensor:
        """Total number of transpositions over all groups, (member)."""
        zeros = torch.zeros(len(self), dtype=torch.int64)
        return sum(self.transpositions.values(), start=zeros)

    @property
    def expected(self) -> float:
        """Number of transpositions to expect of random permutations: n − (1 + 1/2 + … + 1/n) for n units, added up over
        the groups."""
        return sum(size - sum(1 / k for k in range(1, size + 1)) for size in self.sizes.values())

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per member: member, epoch, transpositions, and squared distance before and after."""
        columns = (self.total.tolist(), self.before.tolist(), self.after.tolist())
        return [
            {"member": member, "epoch": epoch, "transpositions": count, "before": before, "after": after}
            for (member, epoch), count, before, after in zip(self.keys, *columns, strict=True)
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a DataFrame, with one column of transpositions per group."""
        import pandas as pd

        groups = {f"transpositions of {name}": counts.tolist() for name, counts in self.transpositions.items()}
        return pd.DataFrame(self.rows()).assign(**groups)

    def to_json(self) -> str:
        """Return the result as JSON text."""
        values = {
            "collection": self.collection,
            "to": self.to,
            "expected_of_random": self.expected,
            "members": self.rows(),
            "groups": [
                {"group": name, "units": self.sizes[name], "transpositions": counts.tolist()}
                for name, counts in self.transpositions.items()
            ],
        }
        return json.dumps(values, indent=1)

    def plot(self, path: str | Path, lines: Sequence[Barriers] | None = None) -> Path:
        """Draw distances before and after, transpositions, and losses on the lines into a PNG; return its path.

        Args:
            path: path of the PNG file; its folder is created. The file is written under a temporary name and renamed.
            lines: losses before and after alignment, for a third panel.

        Raises:
            UsageError: the path does not end in .png, or the file can't be written.
        """
        return save_figure(
            lambda: draw_alignment(self, lines), check_picture_path(path), f"{self.collection}: aligned to {self.to}"
        )


def alignment(members: Collection, to: int | str | Member | None = None, *, using: str | None = None) -> Alignment:
    """Align members by weight matching; return the transpositions, and the distances before and after.

    `members.align(to)` gives the aligned weights themselves.

    Args:
        members: members of one architecture.
        to: reference of the alignment, as in `Collection.align`.
        using: the symmetries in use, as in `Collection.align`.

    Raises:
        MemberNotFound, UsageError, SymmetryError: as in `Collection.align`.
        SelectionError, DamagedError, LayoutError, NetworkError: some members have no weights, or can't be read.

    >>> import checkpoints_zoo as zoo
    >>> result = zoo.alignment(zoo.load("convnet-digits", n=3), to=0)
    >>> result.total[0].item(), bool((result.after[1:] < result.before[1:]).all())
    (0, True)
    """
    arguments.check_collection(members)
    return measure_alignment(members.align(to, using=using))


def measure_alignment(aligned: Collection) -> Alignment:
    """Measure an alignment that a view already has, without matching members again; see `alignment`.

    Args:
        aligned: members that `Collection.align` returned, or some of them.

    Raises:
        UsageError: the last step of the members' view is no alignment.
        SelectionError, DamagedError, LayoutError, NetworkError: as in `alignment`.
    """
    step = aligned._view.steps[-1] if aligned._view.steps else None
    if not isinstance(step, Aligned | AlignedToMean):
        raise UsageError(
            f"alignment of {aligned.name}",
            expected="members that were aligned last",
            found=str(step or "weights as they are stored"),
            do="Give members.align(...)",
        )
    members, table = aligned._without_last_step(), aligned.symmetry_table
    size = members._member_count_within(_BYTES_AT_ONCE)

    def aligned_batches() -> Iterator[tuple[Params, Params, Mapping[str, Tensor]]]:
        title = f"{members.name}: alignment"
        batches = progress(members.batches(size), len(members), title, size=lambda batch: len(batch[0]))
        for batch_number, (_, params) in enumerate(batches):
            keys = members._snapshot_keys[batch_number * size : (batch_number + 1) * size]
            aligned_params, element = step(table, keys, params)
            yield params, aligned_params, element.permutations

    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES):
        if isinstance(step, Aligned):
            stored_reference = reference = dict(step.read_reference())
        else:
            stored_reference, reference = _mean_weights(aligned_batches(), len(members))
        before, after, counts = [], [], []
        for params, aligned_params, permutations in aligned_batches():
            before.append(squared_distance(table, params, stored_reference))
            after.append(squared_distance(table, aligned_params, reference))
            counts.append({name: transpositions(p) for name, p in permutations.items()})
    return Alignment(
        collection=members.name,
        to=str(step).removeprefix("aligned to "),
        keys=tuple(members._snapshot_keys),
        sizes={name: table.groups[name].size for name in counts[0]},
        transpositions={name: torch.cat([part[name] for part in counts]) for name in counts[0]},
        before=torch.cat(before),
        after=torch.cat(after),
    )


def _mean_weights(
    aligned_batches: Iterable[tuple[Params, Params, Mapping[str, Tensor]]], member_count: int
) -> tuple[Params, Params]:
    """Return the mean weights of the stored members and of the aligned members, name -> (*shape) float64."""
    sums: list[Params] = [{}, {}]
    for params, aligned_params, _ in aligned_batches:
        for total, part in zip(sums, (params, aligned_params), strict=True):
            for name, tensor in part.items():
                total[name] = total.get(name, torch.zeros(())) + tensor.double().sum(0)
    mean_stored, mean_aligned = ({name: tensor / member_count for name, tensor in total.items()} for total in sums)
    return mean_stored, mean_aligned


def draw_alignment(alignment: Alignment, lines: Sequence[Barriers] | None) -> Figure:
    """Draw the panels; return the figure, whose axes have the names of the panels as labels."""
    from matplotlib.figure import Figure

    panel_count = 3 if lines else 2
    figure = Figure(figsize=(PANEL_SIZE[0] * panel_count, PANEL_SIZE[1]), dpi=DPI, layout="constrained")
    title = f"{alignment.collection}: {len(alignment)} member{'s' * (len(alignment) != 1)} aligned to {alignment.to}"
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    axes = figure.subplots(1, panel_count)
    draw_distances(axes[0], alignment)
    draw_transpositions(axes[1], alignment)
    if lines:
        _draw_losses(axes[2], lines)
    return figure


def draw_distances(axes: Axes, alignment: Alignment) -> None:
    """Draw the squared distance of each member but the reference, before and after alignment."""
    is_moved = alignment.moved
    axes.scatter(
        alignment.before[is_moved].tolist(),
        alignment.after[is_moved].tolist(),
        s=14,
        color=BLUE,
        edgecolors="none",
    )
    axis_limit = float(max(alignment.before.max(), alignment.after.max())) * 1.05 or 1.0
    axes.plot([0, axis_limit], [0, axis_limit], color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, axis_limit)
    axes.set_ylim(0, axis_limit)
    axes.set_title("Distance to the reference")
    axes.set_xlabel("squared distance as stored")
    axes.set_ylabel("squared distance aligned")


def draw_transpositions(axes: Axes, alignment: Alignment) -> None:
    """Draw one box for each group: its transpositions as a share of the largest possible number.

    The reference is left out: its own permutation is the identity.
    """
    groups = [name for name, size in alignment.sizes.items() if size > 1]
    shares = [
        (alignment.transpositions[name][alignment.moved] / (alignment.sizes[name] - 1)).tolist() for name in groups
    ]
    if groups:
        axes.boxplot(shares, orientation="horizontal", widths=0.6, flierprops={"markersize": 3})
        axes.set_yticks(range(1, len(groups) + 1), [f"{n} ({alignment.sizes[n]})" for n in groups], parse_math=False)
        axes.invert_yaxis()
    axes.set_xlim(-0.03, 1.03)
    axes.set_title("Transpositions")
    axes.set_xlabel("share of the largest possible number")


def _draw_losses(axes: Axes, lines: Sequence[Barriers]) -> None:
    for line, label, colour in zip(lines, ("as stored", "aligned"), (RED, GREEN), strict=True):
        lambdas = line.lambdas.tolist()
        for losses in line.losses.tolist():
            axes.plot(lambdas, losses, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot(lambdas, line.losses.mean(0).tolist(), color=colour, linewidth=2, label=label)
    axes.set_title("Loss on the lines")
    axes.set_xlabel("λ, from the reference to a member")
    axes.set_ylabel("negative log-likelihood (nats)")
    axes.legend()
