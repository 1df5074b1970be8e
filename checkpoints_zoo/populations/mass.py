"""The mass of a collection's members beside the smallest that rescaling can give them."""

from __future__ import annotations

import dataclasses
from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, histogram_edges, path_of, save
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import SMALL_MEMBER, check_device, one_thread
from checkpoints_zoo.symmetry.canonical import mass
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_BATCH = 1 << 28  # bytes of members that are read at once


def minimal_mass(
    members: Collection,
    *,
    biases: bool = False,
    hold: abc.Collection[str] = (),
    approximate: bool = False,
    device: str | torch.device = "cpu",
) -> MinimalMass:
    """Minimise each member's sum of squared weights over all scales that leave its function as it is; return both.

    Args:
        members: of one architecture; with snapshots, each is a member of its own.
        biases, hold, approximate: as in `canonical.mass.minimal_mass`.
        device: where to compute.

    Raises:
        SymmetryError: an architecture whose symmetries can't be derived.
        SelectionError, DamagedError, LayoutError, NetworkError: members that are none, or can't be read.
        UsageError: no such scale or device.

    >>> import checkpoints_zoo as zoo
    >>> found = zoo.minimal_mass(zoo.load("convnet-digits", n=4))
    >>> bool((found.excess > 5).all()), bool((found.residual < 1e-3).all())
    (True, True)

    Where snapshots are kept, `zoo.load(name, snapshots=True)` gives the masses along training, and `along_training`
    gathers them by epoch.
    """
    on = check_device(device)
    module, table = members._skeleton(), members.symmetry_table
    tied = modules.tied(module)
    parts = []
    with one_thread(members._member_nbytes < SMALL_MEMBER and on.type == "cpu"):
        for _, params in members.batches(members._held_by(_BATCH), on):
            parts.append(mass.minimal_mass(table, params, biases=biases, hold=hold, approximate=approximate, same=tied))
    return mass.join(parts, members.ids, parts[0].held)


@dataclass(frozen=True)
class MassAt:
    """The mass of members after one epoch.

    Args:
        epoch: of the snapshots.
        members: how many there are.
        mass, minimum, excess: their means; the last in percent of the minimum.
        lowest, highest: the smallest and largest excess in percent.
        residual: the largest certificate of the minima.
    """

    epoch: int
    members: int
    mass: float
    minimum: float
    excess: float
    lowest: float
    highest: float
    residual: float


def along_training(found: MinimalMass, epochs: Sequence[int]) -> tuple[MassAt, ...]:
    """Gather snapshots by epoch; return how mass, minimum and excess change along training.

    Args:
        found: of snapshots.
        epochs: of each.

    Raises:
        UsageError: another number of epochs.
    """
    _check_epochs(found, epochs)
    result = []
    for epoch in sorted(set(epochs)):
        at = [i for i, e in enumerate(epochs) if e == epoch]
        excess = found.excess[at]
        mass, minimum, mean = (float(values[at].mean()) for values in (found.before, found.after, found.excess))
        bounds = float(excess.min()), float(excess.max())
        result.append(MassAt(int(epoch), len(at), mass, minimum, mean, *bounds, float(found.residual[at].max())))
    return tuple(result)


def ends(found: MinimalMass, epochs: Sequence[int]) -> list[int]:
    """Find each member's last snapshot; return their positions.

    Raises:
        UsageError: another number of epochs.
    """
    _check_epochs(found, epochs)
    last: dict[int, int] = {}
    for i, (member, epoch) in enumerate(zip(found.ids, epochs, strict=True)):
        if member not in last or epoch > epochs[last[member]]:
            last[member] = i
    return sorted(last.values())


def take(found: MinimalMass, positions: Sequence[int]) -> MinimalMass:
    """Return the masses of some members or snapshots."""
    at = list(positions)
    return dataclasses.replace(
        found,
        ids=tuple(found.ids[i] for i in at),
        before=found.before[at],
        after=found.after[at],
        unbounded=found.unbounded[at],
        residual=found.residual[at],
        converged=found.converged[at],
        sweeps=found.sweeps[at],
        history=found.history[:, at],
        scales={name: values[at] for name, values in found.scales.items()},
        dead=tuple(found.dead[i] for i in at),
    )


def _check_epochs(found: MinimalMass, epochs: Sequence[int]) -> None:
    if len(epochs) != len(found):
        raise UsageError("epochs", expected=f"{len(found)}, one of each snapshot", found=str(len(epochs)))


# The picture of minimal masses: trained members against their minimum, and how far above it they are.


PANEL = (4.8, 4.0)  # inches


def mass_figure(found: MinimalMass, path: str | Path, *, name: str = "", epochs: Sequence[int] | None = None) -> Path:
    """Draw masses beside their minima into a PNG, by temporary name and rename; return its path.

    Args:
        found: of members, or of their snapshots.
        path: of the PNG; its folder is made.
        name: of the collection, for the title.
        epochs: of each snapshot, to draw the masses along training as well; the other panels show the last ones then.

    Raises:
        UsageError: no members, a number of epochs that is not theirs, or a place that can't be written to.
    """
    path = path_of(path)
    if not len(found) or (epochs is not None and len(epochs) != len(found)):
        epoch_count = "" if epochs is None else f" and {len(epochs)} epochs"
        raise UsageError(
            f"picture {path}",
            expected="members, and an epoch of each or none",
            found=f"{len(found)} members{epoch_count}",
        )
    return save(lambda: draw(found, name, epochs), path, f"{name}: mass and minimal mass".lstrip(": "))


def draw(found: MinimalMass, name: str, epochs: Sequence[int] | None) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by what they show."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    last = list(range(len(found))) if epochs is None else ends(found, epochs)
    panels = 2 if epochs is None else 3
    spaced = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(PANEL[0] * panels, PANEL[1]), dpi=DPI, layout=spaced)
    title = f"{name}: {len(last)} member{'s' * (len(last) != 1)}".lstrip(": ")
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    if float(found.unbounded.max()) > 0:
        units = sum(map(len, found.degenerate.values()))
        note = f"without the mass of units that can shrink without limit: {units} in every member"
        figure.supxlabel(f"{note}, mean {float(found.unbounded.mean()):.4g}", fontsize=8, color=GREY)
    grid = figure.add_gridspec(1, panels)
    before, after = ([float(values[i]) for i in last] for values in (found.before, found.after))
    _masses(figure.add_subplot(grid[0], label="mass"), before, after)
    _excess(figure.add_subplot(grid[1], label="excess"), [float(found.excess[i]) for i in last])
    if epochs is not None:
        _training(figure.add_subplot(grid[2], label="training"), found, epochs)
    return figure


def _masses(axes: Axes, before: Sequence[float], after: Sequence[float]) -> None:
    low, high = min(after), max(before)
    margin = 0.06 * (high - low) or 0.06 * high or 1.0
    ends = [low - margin, high + margin]
    axes.plot(ends, ends, color=GREY, linewidth=1.2, linestyle="--", label="mass = its minimum")
    axes.plot(before, after, "o", color=BLUE, markersize=5, alpha=0.75, markeredgecolor="white", label="a member")
    axes.set(title="Mass and its minimum", xlabel="mass as trained", ylabel="minimum over scales", xlim=ends, ylim=ends)
    axes.set_aspect("equal")
    axes.legend(loc="upper left")


def _excess(axes: Axes, excess: Sequence[float]) -> None:
    mean = sum(excess) / len(excess)
    heights, *_ = axes.hist(excess, histogram_edges(excess), color=BLUE, alpha=0.85, edgecolor="white")
    text = f"mean {mean:.3g}, from {min(excess):.3g} to {max(excess):.3g}"
    axes.axvline(mean, ymax=0.75, color=RED, linewidth=2, label=text)
    axes.set(title="Excess", xlabel="mass above its minimum (%)", ylabel="members", ylim=(0, max(heights) / 0.75))
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=7)
    axes.legend(loc="upper left")


def _training(axes: Axes, found: MinimalMass, epochs: Sequence[int]) -> None:
    mean = along_training(found, epochs)
    known = [at.epoch for at in mean]
    lines = (
        (found.before, [at.mass for at in mean], BLUE, "mass"),
        (found.after, [at.minimum for at in mean], GREEN, "its minimum"),
    )
    for values, means, colour, label in lines:
        for member in sorted(set(found.ids)):
            own = sorted((e, float(values[i])) for i, e in enumerate(epochs) if found.ids[i] == member)
            axes.plot([e for e, _ in own], [v for _, v in own], color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(known, means, "o-", color=colour, linewidth=2, markersize=4, label=label)
    axes.set(title="Along training", xlabel="epoch", ylabel="mass (mean over members)", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()
