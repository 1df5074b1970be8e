"""`zoo-cli symmetries` and `zoo-cli align`: a network's symmetries, and its members matched by them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.common import Selection, selecting
from checkpoints_zoo.cli.main import Output, facts, output, table
from checkpoints_zoo.cli.measure import png
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.text import in_bytes

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.populations.alignment_table import Alignment
    from checkpoints_zoo.populations.channel_exchangeability import Corollary
    from checkpoints_zoo.populations.loss_barrier import Barriers
    from checkpoints_zoo.populations.mass import MassAt
    from checkpoints_zoo.symmetry import Table
    from checkpoints_zoo.symmetry.canonical.mass import MinimalMass

MOST = 16  # members that a table shows


@click.command()
@selecting
@click.option("--mass/--no-mass", default=None, help="Whether to read members and minimise their mass: yes, unless "
              "that would fetch all of a collection.")  # fmt: skip
@click.option("--biases", is_flag=True, help="Count biases as mass too.")
@click.option("--approximate", is_flag=True, help="Scale before norms without running statistics too.")
@click.option("--along", is_flag=True, help="Follow the mass along training, over all snapshots.")
@click.option("--corollary", "tested", is_flag=True, help="Test whether all channels of a layer are alike.")
@click.option("--tensors", is_flag=True, help="Show what each tensor is moved and scaled by.")
@click.option("--plot", metavar="PNG", callback=png, help="Draw the masses and the distribution of their excess.")
@click.option("--device", default="cpu", metavar="DEVICE", help="Where to minimise, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Of the simulations behind --corollary.")
@output
def symmetries_command(
    selection: Selection,
    mass: bool | None,
    biases: bool,
    approximate: bool,
    along: bool,
    tested: bool,
    tensors: bool,
    plot: str | None,
    device: str,
    seed: int,
    out: Output,
) -> None:
    """Show a network's symmetries, and the smallest mass that rescaling gives its members.

    NAME may also be that of an architecture, which has no members. The excess is how far they are above their minimum,
    in percent of it; the balance residual is the minimum's certificate.
    """
    of_mass = {"--biases": biases, "--approximate": approximate, "--along": along, "--plot": plot is not None}
    if mass is False and any(of_mass.values()):
        raise click.UsageError(f"--no-mass leaves nothing to {', '.join(o for o, given in of_mass.items() if given)}.")
    asked = {"--mass": mass, **of_mass, "--corollary": tested}
    found, members = _opened(selection, [option for option, given in asked.items() if given])
    values, blocks = _table(found, tensors)
    if members is None:
        out.data(values, *blocks)
        return
    values = {"name": members.name, "citation": members.citation, **values}
    if mass is None and not any(of_mass.values()) and _fetches_all(selection, members):
        size = f"{len(members):,} members, {in_bytes(members.nbytes)}"
        out.say(f"{members.name}: mass left out, as {size}, would be fetched; -n N or --mass asks for it")
    elif mass is not False:
        some = _snapshots(selection, members) if along else members
        more = _masses(some, out, {"biases": biases, "approximate": approximate, "device": device}, along, plot)
        values |= more[0]
        blocks += more[1]
    if tested:
        more = _tested(members, out, seed)
        values |= more[0]
        blocks += more[1]
    out.data(values, *blocks)


def _opened(selection: Selection, asked: list[str]) -> tuple[Table, Collection | None]:
    """Return the table of what NAME means, with the members if it is a collection."""
    from checkpoints_zoo.formats import catalog
    from checkpoints_zoo.networks.architectures import ARCHITECTURES
    from checkpoints_zoo.symmetry import symmetries

    chosen = {key: value for key, value in asdict(selection).items() if key != "name" and value is not None}
    name = selection.name
    if name in ARCHITECTURES and name not in catalog.collections() and "source" not in chosen:
        if chosen or asked:
            raise UsageError(
                f"architecture {name}",
                expected="a collection, which has members",
                found=", ".join([*(f"--{key}" if len(key) > 1 else f"-{key}" for key in chosen), *asked]),
                do="Leave these out, or name a collection",
            )
        return symmetries(name), None
    members = selection.load()
    return members.symmetry_table, members


def _snapshots(selection: Selection, members: Collection) -> Collection:
    """Return all snapshots of the selected members; where epochs or a citation were given, what these name."""
    from checkpoints_zoo.collection.collection import load
    from checkpoints_zoo.formats.selection import parse_citation

    if parse_citation(selection.name) or len(set(members.ids)) < len(members.ids):
        return members
    every = load(selection.name, snapshots=True, source=selection.source)
    wanted = set(members.ids)
    return load(
        selection.name,
        members=",".join(f"{member}@{epoch}" for member, epoch in every._keys if member in wanted),
        source=selection.source,
    )


def _fetches_all(selection: Selection, members: Collection) -> bool:
    chosen = any(x is not None for x in (selection.n, selection.where, selection.members))
    return members.source.repo is not None and not chosen and not selection.name.startswith("hf://")


def _table(found: Table, tensors: bool) -> tuple[dict[str, Any], list[str]]:
    from checkpoints_zoo.symmetry.table import format_table

    every, inner = (found.log10_permutations(streams=streams) for streams in (True, False))
    values = {
        "network": found.network,
        "log10_permutations": every,
        "log10_permutations_without_streams": inner,
        "scaling_freedom": found.scaling_freedom,
        "approximate_scaling_freedom": found.approximate_scaling_freedom,
        "groups": [asdict(group) for group in found.groups.values()],
        "scales": [asdict(scale) for scale in found.scales.values()],
        "tensors": {name: asdict(axes) for name, axes in found.tensors.items()},
    }
    return values, [format_table(found, tensors=tensors)]


def _masses(
    members: Collection, out: Output, options: dict[str, Any], along: bool, plot: str | None
) -> tuple[dict[str, Any], list[str]]:
    from checkpoints_zoo.populations.mass import (
        along_training,
        last_snapshots,
        mass_figure,
        minimal_mass,
        select_masses,
    )

    epochs = [int(epoch) for epoch in members.rows.column("epoch").to_pylist()]
    if along and len(set(epochs)) < 2:
        found = f"only epoch {epochs[0]}" if epochs else "none"
        raise UsageError(f"snapshots of {members.name}", expected="two epochs or more", found=found)
    out.say(f"{members.name}: {len(members)} members, {in_bytes(members.nbytes)}, minimising their mass …")
    every = minimal_mass(members, **options)
    last = select_masses(every, last_snapshots(every, epochs)) if along else every
    values: dict[str, Any] = {"mass": _values(every, epochs) | {k: v for k, v in options.items() if k != "device"}}
    blocks = [str(last)]
    if along:
        steps = along_training(every, epochs)
        values["along"] = [asdict(step) for step in steps]
        blocks.append(f"Along training:\n{table([_step(step) for step in steps])}")
    if plot:
        values["picture"] = mass_figure(every, plot, name=members.name, epochs=epochs if along else None)
        out.say(f"picture: {values['picture']}")
    return values, blocks


def _values(found: MinimalMass, epochs: list[int]) -> dict[str, Any]:
    columns = {
        "member": list(found.ids),
        "epoch": epochs,
        "mass": found.before.tolist(),
        "minimum": found.after.tolist(),
        "excess_percent": found.excess.tolist(),
        "residual": found.residual.tolist(),
        "unbounded": found.unbounded.tolist(),
        "converged": found.converged.tolist(),
        "sweeps": found.sweeps.tolist(),
        "dead": [{name: list(units) for name, units in dead.items()} for dead in found.dead],
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    units = {name: list(units) for name, units in found.degenerate.items()}
    return {"degenerate": units, "held": list(found.held), "members": rows}


def _step(step: MassAt) -> dict[str, Any]:
    return {
        "epoch": step.epoch,
        "members": step.members,
        "mass": step.mass,
        "minimum": step.minimum,
        "excess (%)": step.excess,
        "lowest (%)": step.lowest,
        "highest (%)": step.highest,
        "residual": f"{step.residual:.1g}",
    }


def _tested(members: Collection, out: Output, seed: int) -> tuple[dict[str, Any], list[str]]:
    from checkpoints_zoo.populations.channel_exchangeability import corollary

    out.say(f"{members.name}: testing whether channels are alike …")
    found: Corollary = corollary(members, seed=seed)
    layers = [{**asdict(x), "units": x.units.tolist(), "counts": x.counts.tolist()} for x in found.layers]
    values = {"p": found.p, "simulations": found.simulations, "seed": seed, "members": list(found.ids)}
    return {"corollary": {**values, "layers": layers}}, [str(found)]


def _reference(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """Read what to align to; return a member's id, "mean", or None for the first selected member."""
    if value is None:
        return None
    if value == "mean" or value.isdecimal():
        return value if value == "mean" else int(value)
    raise click.BadParameter(f"{value!r} is neither a member's id nor mean.", context, parameter)


@click.command()
@selecting
@click.option(
    "--to", callback=_reference, metavar="ID|mean", help="The member to align to, or mean; the first one if not given."
)
@click.option("--barrier", is_flag=True, help="Measure the loss on the lines between members as well.")
@click.option("--save", metavar="PARQUET", help="Write the permutations, one row a member; members.transform reads it.")
@click.option("--plot", metavar="PNG", callback=png, help="Draw distances and transpositions.")
@output
def align_command(
    selection: Selection, to: int | str | None, barrier: bool, save: str | None, plot: str | None, out: Output
) -> None:
    """Align members by permuting their units, and say what that does.

    For each member the transpositions of its permutation, and its squared distance to the reference before and after.
    With --barrier the loss on the straight lines to the reference, before and after; batch norm statistics are
    estimated anew at each point.
    """
    if barrier and isinstance(to, str):
        raise click.UsageError("--barrier needs a member to draw lines from, not the mean.")
    from checkpoints_zoo.populations.alignment_table import measure_alignment

    members = selection.load()
    if to is None and len(members):
        to = members.ids[0]
    out.say(f"{members.name}: {len(members)} members, {in_bytes(members.nbytes)}, aligned to {to} …")
    aligned = members.align(to)
    found = measure_alignment(aligned)
    values: dict[str, Any] = json.loads(found.to_json())
    lines = None
    if barrier:
        from checkpoints_zoo.populations.loss_barrier import barrier as measure_barrier

        lines = [measure_barrier(view, to=to if isinstance(to, int) else None) for view in (members, aligned)]
        values["barrier"] = {
            when: json.loads(line.to_json()) for when, line in zip(("before", "after"), lines, strict=True)
        }
    if save:
        out.say(f"permutations: {aligned.write_symmetries(save)}")
    if plot:
        out.say(f"picture: {found.plot(plot, lines)}")
    out.data(values, *_blocks(found, lines))


def _blocks(found: Alignment, lines: list[Barriers] | None) -> list[str]:
    rows = found.rows()
    shown = [
        {"member": r["member"], "transpositions": r["transpositions"], "squared distance": r["before"],
         "aligned": r["after"], "nearer by": f"{100 * (1 - r['after'] / r['before']) if r['before'] else 0:.1f} %"}
        for r in rows[:MOST]
    ]  # fmt: skip
    others = [r for r in rows if r["before"]]
    summary: dict[str, Any] = {
        "aligned to": found.to,
        "units": sum(found.sizes.values()),
        "transpositions of a random permutation": round(found.expected, 1),
    }
    if others:
        summary |= {
            "mean transpositions": _mean(r["transpositions"] for r in others),
            "mean squared distance": _mean(r["before"] for r in others),
            "mean squared distance, aligned": _mean(r["after"] for r in others),
        }
    for when, line in zip(("", ", aligned"), lines, strict=True) if lines else ():
        mean = line.mean
        interval = "" if mean.low is None else f" [{mean.low:.3f}, {mean.high:.3f}]"
        summary[f"mean loss barrier{when} (nats)"] = f"{mean.value:.3f}{interval}"
    rest = f"… and {len(rows) - MOST} more; --format json has all." if len(rows) > MOST else ""
    return [table(shown, right=["nearer by"]), rest, facts(summary)]


def _mean(values: Any) -> float:
    listed = list(values)
    return float(sum(listed) / len(listed))
