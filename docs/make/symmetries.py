"""The tables of `docs/symmetries.md`, computed from the architectures and collections that ship."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import ceil, floor
from pathlib import Path

import torch
from torch import Tensor

import checkpoints_zoo as zoo
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.populations.mass import along_training, select_masses
from checkpoints_zoo.symmetry.canonical.mass import MinimalMass
from docs.make.marks import fill

PAGE = Path(__file__).resolve().parents[1] / "symmetries.md"
BINS = {"convnet-digits": 1.0, "resnet8-digits": 0.25}  # percent
POSTER = {
    "network, data": "OptuNet, MNIST", "members": "", "mass": "about 125 to 250", "minimum": "about 95 to 240",
    "excess (%)": "0 to 60; modes near 28 to 30 and 10", "members above their minimum": "all", "residual": "not given",
    "smallest excess / residual": "", "units without a minimum": "",
}  # fmt: skip


def format_rows(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Lay out a Markdown table; return it."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines) + "\n"


def count_rows() -> str:
    """Return what the tables of the package's architectures count."""
    rows = []
    for name in ARCHITECTURES:
        table = zoo.symmetries(name)
        every, inner = (table.log10_permutations(streams=streams) for streams in (True, False))
        signs = sum(sign.size for sign in table.signs.values())
        freedom = tuple(f"{n:,}" for n in (table.scaling_freedom, table.approximate_scaling_freedom, signs))
        logs = (f"{inner:.1f}", f"{every:.1f}") if every > 10 else (f"{inner:.2f}", f"{every:.2f}")
        rows.append((f"`{name}`", str(len(table.groups)), *logs, *freedom))
    header = (
        "architecture",
        "groups",
        "log10 permutations, inner",
        "with streams",
        "exact scales",
        "approximate",
        "signs",
    )
    return format_rows(header, rows)


def format_spread(values: Tensor) -> str:
    return f"{float(values.mean()):.4g} ({float(values.min()):.4g} to {float(values.max()):.4g})"


def mass_rows(masses: Mapping[str, MinimalMass]) -> str:
    """Return the masses of collections beside the poster's."""
    columns = {}
    for name, mass in masses.items():
        members = zoo.load(name, n=1)
        certain = mass.excess / 100 / mass.residual.clamp(min=torch.finfo(torch.float64).eps)
        columns[name] = {
            "network, data": f"{members.description.architecture}, {members.description.dataset}",
            "members": str(len(mass)),
            "mass": format_spread(mass.before),
            "minimum": format_spread(mass.after),
            "excess (%)": format_spread(mass.excess),
            "members above their minimum": str(int((mass.before > mass.after).sum())),
            "residual": f"at most {max(1e-12, float(mass.residual.max())):.1g}",
            "smallest excess / residual": f"over {min(10**6, 10 ** floor(torch.log10(certain.min()))):,}",
            "units without a minimum": str(sum(map(len, mass.degenerate.values()))),
        }
    header = ("", *(f"`{name}`" for name in columns), "poster")
    return format_rows(header, [(row, *(c[row] for c in columns.values()), POSTER[row]) for row in POSTER])


def distribution_rows(mass: MinimalMass) -> str:
    """Return how many members have which excess."""
    name = next(n for n in BINS if len(zoo.load(n)) == len(mass))
    width, excess = BINS[name], mass.excess.tolist()
    first, last = floor(min(excess) / width), ceil(max(excess) / width)
    rows = []
    for i in range(first, last):
        count = sum(i * width <= e < (i + 1) * width for e in excess)
        rows.append((f"{i * width:g} to {(i + 1) * width:g}", str(count), "█" * count))
    return format_rows((f"`{name}`: excess (%)", "members", ""), rows)


def epoch_row(mass: MinimalMass) -> str:
    """Return the line of the last epoch of the first sixteen members of convnet-digits."""
    (end,) = along_training(select_masses(mass, range(16)), [40] * 16)
    cells = (str(end.epoch), f"{end.mass:.4g}", f"{end.minimum:.4g}", f"{end.excess:.3g}")
    return f"| {' | '.join(cells)} | {end.lowest:.3g} to {end.highest:.3g} |\n"


def layer_rows(name: str) -> str:
    """Return the p-values of a collection's layers."""
    tested = zoo.corollary(zoo.load(name))
    rows = [
        (f"`{x.tensor}`", str(len(x.counts)), str(int(x.counts.max())), f"{x.chi_squared:.3g}", str(x.freedom),
         f"{x.p:.2f}", f"{x.adjusted:.2f}")
        for x in tested.layers
    ]  # fmt: skip
    return format_rows((f"`{name}`", "units", "most often", "χ²", "freedom", "p", "p (Holm)"), rows)


def minimal_masses() -> dict[str, MinimalMass]:
    """Return the minimal masses of the collections that ship."""
    return {name: zoo.minimal_mass(zoo.load(name)) for name in BINS}


def page() -> str:
    """Return the page, all its tables computed anew."""
    return fill_page(minimal_masses(), PAGE.read_text(encoding="utf-8"))


def fill_page(masses: Mapping[str, MinimalMass], page: str) -> str:
    """Write the tables into a page, between their marks; return it."""
    parts = {
        "counts": count_rows(),
        "masses": mass_rows(masses),
        "distributions": "\n".join(map(distribution_rows, masses.values())),
        "layers": "\n".join(map(layer_rows, BINS)),
    }
    # The other epochs are those of `tests.support.snapshots`, which takes a minute of training.
    return re.sub(r"^\| 40 \|.*\n", epoch_row(masses["convnet-digits"]), fill(page, parts), flags=re.MULTILINE)
