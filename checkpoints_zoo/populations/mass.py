"""The mass (sum of squared weights) of a collection's members, and the least mass that rescaling can give each."""

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
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.evaluation.drawing import (
    BLUE,
    DPI,
    GREEN,
    GREY,
    RED,
    check_picture_path,
    histogram_edges,
    save_figure,
)
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.device import SMALL_MEMBER_BYTES, check_device, one_thread
from checkpoints_zoo.symmetry.canonical import mass
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BYTES_AT_ONCE = 1 << 28  # Bytes of members that are read at once.
PANEL_SIZE = (4.8, 4.0)  # Width and height of a panel in inches.


def minimal_mass(
    members: Collection,
    *,
    biases: bool = False,
    hold: abc.Collection[str] = (),
    approximate: bool = False,
    device: str | torch.device = "cpu",
) -> MinimalMass:
    """Minimise each member's sum of squared weights over all scales that keep its function; return both masses.

    Args:
        members: members of one architecture; each snapshot counts as a member.
        biases, hold, approximate: same arguments as in `canonical.mass.minimal_mass`.
        device: torch device for the computation.

    Raises:
        SymmetryError: the architecture's symmetries can't be derived.
        SelectionError, DamagedError, LayoutError, NetworkError: some members have no weights, or can't be read.
        UsageError: a scale or the device does not exist.

    >>> import checkpoints_zoo as zoo
    >>> masses = zoo.minimal_mass(zoo.load("convnet-digits", n=4))
    >>> bool((masses.excess > 5).all()), bool((masses.residual < 1e-3).all())
    (True, True)

    Where snapshots are kept, `zoo.load(name, snapshots=True)` gives the masses along training, and `along_training`
    gathers them by epoch.
    """
    arguments.check_collection(members)
    torch_device = check_device(device)
    module, table = members._skeleton(), members.symmetry_table
    tied = modules.superseded_names(module)
    parts = []
    with one_thread(members._member_nbytes < SMALL_MEMBER_BYTES and torch_device.type == "cpu"):
        batches = members.batches(members._member_count_within(_BYTES_AT_ONCE), torch_device)
        for _, params in progress(batches, len(members), f"{members.name}: mass", size=lambda batch: len(batch[0])):
            parts.append(mass.minimal_mass(table, params, biases=biases, hold=hold, approximate=approximate, same=tied))
    return mass.join_masses(parts, members.ids, parts[0].held)


@dataclass(frozen=True)
class EpochMass:
    """The mass of members after one epoch.

    Args:
        epoch: epoch of the snapshots.
        members: number of members.
        mass, minimum, excess: means over the members; excess in percent of the minimum.
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


def along_training(masses: MinimalMass, epochs: Sequence[int]) -> tuple[EpochMass, ...]:
    """Gather snapshots by epoch; return how mass, minimum and excess change along training.

    Args:
        masses: masses of snapshots.
        epochs: epoch of each snapshot.

    Raises:
        UsageError: the number of epochs differs from the number of snapshots.
    """
    _check_epochs(masses, epochs)
    result = []
    for epoch in sorted(set(epochs)):
        positions_of_epoch = [i for i, e in enumerate(epochs) if e == epoch]
        excess = masses.excess[positions_of_epoch]
        trained, minimum, mean = (
            float(values[positions_of_epoch].mean()) for values in (masses.before, masses.after, masses.excess)
        )
        bounds = float(excess.min()), float(excess.max())
        result.append(
            EpochMass(
                int(epoch),
                len(positions_of_epoch),
                trained,
                minimum,
                mean,
                *bounds,
                float(masses.residual[positions_of_epoch].max()),
            )
        )
    return tuple(result)


def last_snapshot_positions(masses: MinimalMass, epochs: Sequence[int]) -> list[int]:
    """Find each member's last snapshot; return the positions of the last snapshots.

    Raises:
        UsageError: the number of epochs differs from the number of snapshots.
    """
    _check_epochs(masses, epochs)
    position_by_member: dict[int, int] = {}
    for i, (member, epoch) in enumerate(zip(masses.ids, epochs, strict=True)):
        if member not in position_by_member or epoch > epochs[position_by_member[member]]:
            position_by_member[member] = i
    return sorted(position_by_member.values())


def select_masses(masses: MinimalMass, positions: Sequence[int]) -> MinimalMass:
    """Select members or snapshots from a result of `minimal_mass` by their positions; return the selected result."""
    selected = list(positions)
    return dataclasses.replace(
        masses,
        ids=tuple(masses.ids[i] for i in selected),
        before=masses.before[selected],
        after=masses.after[selected],
        unbounded=masses.unbounded[selected],
        residual=masses.residual[selected],
        converged=masses.converged[selected],
        sweeps=masses.sweeps[selected],
        history=masses.history[:, selected],
        scales={name: values[selected] for name, values in masses.scales.items()},
        dead=tuple(masses.dead[i] for i in selected),
    )


def _check_epochs(masses: MinimalMass, epochs: Sequence[int]) -> None:
    if len(epochs) != len(masses):
        raise UsageError("epochs", expected=f"{len(masses)}, one of each snapshot", found=str(len(epochs)))


def mass_figure(
    masses: MinimalMass, path: str | Path, *, collection_name: str = "", epochs: Sequence[int] | None = None
) -> Path:
    """Draw masses beside their minima into a PNG file; return its path.

    Args:
        masses: masses of members, or of their snapshots.
        path: path of the PNG file; its folder is created.
        collection_name: name of the collection, for the title.
        epochs: epoch of each snapshot; adds a panel of masses along training; other panels show each member's last
            snapshot.

    Raises:
        UsageError: there are no members, the number of epochs is wrong, or the file can't be written.
    """
    path = check_picture_path(path)
    if not len(masses) or (epochs is not None and len(epochs) != len(masses)):
        epochs_text = "" if epochs is None else f" and {len(epochs)} epochs"
        raise UsageError(
            f"picture {path}",
            expected="members, and an epoch of each or none",
            found=f"{len(masses)} members{epochs_text}",
        )
    return save_figure(
        lambda: draw_mass(masses, collection_name, epochs),
        path,
        f"{collection_name}: mass and minimal mass".lstrip(": "),
    )


def draw_mass(masses: MinimalMass, collection_name: str, epochs: Sequence[int] | None) -> Figure:
    """Draw the panels; return the figure, whose axes have the names of the panels as labels."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    last_positions = list(range(len(masses))) if epochs is None else last_snapshot_positions(masses, epochs)
    panel_count = 2 if epochs is None else 3
    layout_engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03)
    figure = Figure(figsize=(PANEL_SIZE[0] * panel_count, PANEL_SIZE[1]), dpi=DPI, layout=layout_engine)
    title = f"{collection_name}: {len(last_positions)} member{'s' * (len(last_positions) != 1)}".lstrip(": ")
    figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    if float(masses.unbounded.max()) > 0:
        units = sum(map(len, masses.degenerate.values()))
        note = f"without the mass of units that can shrink without limit: {units} in every member"
        figure.supxlabel(f"{note}, mean {float(masses.unbounded.mean()):.4g}", fontsize=8, color=GREY)
    grid = figure.add_gridspec(1, panel_count)
    before, after = ([float(values[i]) for i in last_positions] for values in (masses.before, masses.after))
    draw_masses(figure.add_subplot(grid[0], label="mass"), before, after)
    draw_excess(figure.add_subplot(grid[1], label="excess"), [float(masses.excess[i]) for i in last_positions])
    if epochs is not None:
        _draw_training(figure.add_subplot(grid[2], label="training"), masses, epochs)
    return figure


def draw_masses(axes: Axes, before: Sequence[float], after: Sequence[float]) -> None:
    low, high = min(after), max(before)
    margin = 0.06 * (high - low) or 0.06 * high or 1.0
    axis_limits = [low - margin, high + margin]
    axes.plot(axis_limits, axis_limits, color=GREY, linewidth=1.2, linestyle="--", label="mass = its minimum")
    axes.plot(before, after, "o", color=BLUE, markersize=5, alpha=0.75, markeredgecolor="white", label="a member")
    axes.set(
        title="Mass and its minimum",
        xlabel="mass as trained",
        ylabel="minimum over scales",
        xlim=axis_limits,
        ylim=axis_limits,
    )
    axes.set_aspect("equal")
    axes.legend(loc="upper left")


def draw_excess(axes: Axes, excess: Sequence[float]) -> None:
    mean = sum(excess) / len(excess)
    heights, *_ = axes.hist(excess, histogram_edges(excess), color=BLUE, alpha=0.85, edgecolor="white")
    text = f"mean {mean:.3g}, from {min(excess):.3g} to {max(excess):.3g}"
    axes.axvline(mean, ymax=0.75, color=RED, linewidth=2, label=text)
    axes.set(title="Excess", xlabel="mass above its minimum (%)", ylabel="members", ylim=(0, max(heights) / 0.75))
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=7)
    axes.legend(loc="upper left")


def _draw_training(axes: Axes, masses: MinimalMass, epochs: Sequence[int]) -> None:
    mean = along_training(masses, epochs)
    epochs_with_masses = [epoch_mass.epoch for epoch_mass in mean]
    lines = (
        (masses.before, [epoch_mass.mass for epoch_mass in mean], BLUE, "mass"),
        (masses.after, [epoch_mass.minimum for epoch_mass in mean], GREEN, "its minimum"),
    )
    for values, means, colour, label in lines:
        for member in sorted(set(masses.ids)):
            path = sorted((e, float(values[i])) for i, e in enumerate(epochs) if masses.ids[i] == member)
            axes.plot([e for e, _ in path], [v for _, v in path], color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(epochs_with_masses, means, "o-", color=colour, linewidth=2, markersize=4, label=label)
    axes.set(title="Along training", xlabel="epoch", ylabel="mass (mean over members)", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.legend()
