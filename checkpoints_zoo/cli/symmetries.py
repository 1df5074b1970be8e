"""`zoo-cli symmetries`: the symmetries of a network, and the smallest mass of its members."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo.cli.main import Output, format_option, table
from checkpoints_zoo.cli.options import OutputFile, Selection, name_and_size, network_options
from checkpoints_zoo.errors import CollectionNotFound, UsageError
from checkpoints_zoo.evaluation.drawing import PICTURE_FORMATS
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.text import did_you_mean, format_bytes
from checkpoints_zoo.networks.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from checkpoints_zoo.collection.collection import Collection
    from checkpoints_zoo.populations.channel_exchangeability import Corollary
    from checkpoints_zoo.populations.mass import EpochMass
    from checkpoints_zoo.symmetry import Table
    from checkpoints_zoo.symmetry.canonical.mass import MinimalMass


@click.command()
@network_options
@click.option("--mass/--no-mass", default=None, help="Whether to read members and minimise their mass; yes if not "
              "given, unless a whole collection would be fetched.")  # fmt: skip
@click.option("--biases", is_flag=True, help="Count biases as mass too.")
@click.option("--approximate", is_flag=True, help="Rescale units before norms without running statistics too.")
@click.option("--along", is_flag=True, help="Follow the mass along training, over all snapshots.")
@click.option(
    "--corollary", "test_corollary", is_flag=True, help="Test whether all channels of a layer have one distribution."
)
@click.option("--tensors", is_flag=True, help="List the groups that permute and scale each tensor.")
@click.option(
    "--plot",
    type=OutputFile(*PICTURE_FORMATS),
    metavar="PICTURE",
    help="Draw the masses and the distribution of their excess.",
)
@click.option("--device", default="cpu", metavar="DEVICE", help="Device to minimise on, such as cuda.")
@click.option("--seed", default=0, metavar="SEED", help="Seed of the simulations of --corollary.")
@format_option
def symmetries_command(
    selection: Selection,
    mass: bool | None,
    biases: bool,
    approximate: bool,
    along: bool,
    test_corollary: bool,
    tensors: bool,
    plot: Path | None,
    device: str,
    seed: int,
    out: Output,
) -> None:
    """Show a network's symmetries, and the smallest mass that rescaling gives its members.

    NAME may be an architecture too, which has no members. Mass is the sum of squared weights. The excess is its
    distance to the minimum, in percent of the minimum; the balance residual certifies that the minimum was reached.
    """
    mass_options = {"--biases": biases, "--approximate": approximate, "--along": along, "--plot": plot is not None}
    if mass is False and any(mass_options.values()):
        set_options_text = ", ".join(option for option, is_set in mass_options.items() if is_set)
        raise click.UsageError(f"--no-mass can't be combined with {set_options_text}.")
    member_options = {"--mass": mass, **mass_options, "--corollary": test_corollary}
    symmetry_table, members = _open_table_and_members(
        selection, [option for option, is_set in member_options.items() if is_set]
    )
    values, blocks = _table_output(symmetry_table, tensors)
    if members is None:
        if mass is None and selection.name not in ARCHITECTURES:
            listing = catalog.find_listing(selection.name)
            _say_no_masses(out, listing.name, listing.members, listing.bytes)
        out.data(values, *blocks)
        return
    values = {"name": members.name, "citation": members.citation, **values}
    if mass is None and not any(mass_options.values()) and _would_fetch_all(selection, members):
        _say_no_masses(out, members.name, len(members), members.nbytes)
    elif mass is not False:
        snapshots = _all_snapshots(selection, members) if along else members
        options = {"biases": biases, "approximate": approximate, "device": device}
        more_values, more_blocks = _mass_output(snapshots, out, options, along, plot)
        values |= more_values
        blocks += more_blocks
    if test_corollary:
        more_values, more_blocks = _corollary_output(members, out, seed)
        values |= more_values
        blocks += more_blocks
    out.data(values, *blocks)


def _open_table_and_members(selection: Selection, member_options: list[str]) -> tuple[Table, Collection | None]:
    """Return the symmetry table of the architecture or collection NAME, and the members of a collection; None for the
    members of a collection in archives that no option asks for, so that nothing is fetched.

    Args:
        selection: NAME and the members.
        member_options: options of the command line that need members.
    """
    from checkpoints_zoo.symmetry import symmetries

    given_options = {key: value for key, value in asdict(selection).items() if key != "name" and value is not None}
    name = selection.name
    if name in ARCHITECTURES and name not in catalog.collections() and "source" not in given_options:
        if given_options or member_options:
            raise UsageError(
                f"architecture {name}",
                expected="a collection, which has members",
                found=", ".join(
                    [*(f"--{key}" if len(key) > 1 else f"-{key}" for key in given_options), *member_options]
                ),
                do="Leave these options out, or name a collection",
            )
        return symmetries(name), None
    listing = catalog.listing_of(name)
    if listing is not None and listing.stated is not None and not given_options and not member_options:
        return symmetries(name), None
    try:
        members = selection.load()
    except CollectionNotFound as error:
        if selection.source is None:
            error.expected += f", or an architecture ({', '.join(ARCHITECTURES)})"
            error.do = did_you_mean(name, [*ARCHITECTURES, *catalog.collections()], largest_count=3) or error.do
        raise
    return members.symmetry_table, members


def _say_no_masses(out: Output, name: str, member_count: int, nbytes: int) -> None:
    size_text = f"{member_count:,} members, {format_bytes(nbytes)}"
    out.say(f"{name}: no masses, since {size_text}, would be fetched; give -n N or --mass for them")


def _all_snapshots(selection: Selection, members: Collection) -> Collection:
    """Return all snapshots of the selected members; return a selection by epochs or by a citation unchanged."""
    from checkpoints_zoo.collection.collection import load
    from checkpoints_zoo.formats.selection import parse_citation

    if parse_citation(selection.name) or len(set(members.ids)) < len(members.ids):
        return members
    all_snapshots = load(selection.name, snapshots=True, source=selection.source)
    selected_ids = set(members.ids)
    return load(
        selection.name,
        members=",".join(
            f"{member}@{epoch}" for member, epoch in all_snapshots._snapshot_keys if member in selected_ids
        ),
        source=selection.source,
    )


def _would_fetch_all(selection: Selection, members: Collection) -> bool:
    selects_part = any(option is not None for option in (selection.n, selection.where, selection.members))
    return members.source.uses_cache and not selects_part and not selection.name.startswith("hf://")


def _table_output(symmetry_table: Table, list_tensors: bool) -> tuple[dict[str, Any], list[str]]:
    from checkpoints_zoo.symmetry.table import format_table

    log10_with_streams, log10_without_streams = (
        symmetry_table.log10_permutations(streams=streams) for streams in (True, False)
    )
    values = {
        "network": symmetry_table.network,
        "log10_permutations": log10_with_streams,
        "log10_permutations_without_streams": log10_without_streams,
        "scaling_freedom": symmetry_table.scaling_freedom,
        "approximate_scaling_freedom": symmetry_table.approximate_scaling_freedom,
        "groups": [asdict(group) for group in symmetry_table.groups.values()],
        "scales": [asdict(scale) for scale in symmetry_table.scales.values()],
        "dimension": symmetry_table.dimension,
        "signs": [asdict(sign) for sign in symmetry_table.signs.values()],
        "matrices": [asdict(matrix) | {"dimension": matrix.dimension} for matrix in symmetry_table.matrices.values()],
        "shifts": [
            {key: getattr(x, key) for key in ("name", "kind", "size", "dimension")}
            for x in symmetry_table.shifts.values()
        ],
        "unconfirmed": symmetry_table.unconfirmed or None,
        "tensors": {name: asdict(tensor_axes) for name, tensor_axes in symmetry_table.tensors.items()},
    }
    return values, [format_table(symmetry_table, tensors=list_tensors)]


def _mass_output(
    members: Collection, out: Output, mass_options: dict[str, Any], follow_training: bool, picture_path: Path | None
) -> tuple[dict[str, Any], list[str]]:
    from checkpoints_zoo.populations.mass import (
        along_training,
        last_snapshot_positions,
        mass_figure,
        minimal_mass,
        select_masses,
    )

    epochs = [int(epoch) for epoch in members.rows.column("epoch").to_pylist()]
    if follow_training and len(set(epochs)) < 2:
        found = f"only epoch {epochs[0]}" if epochs else "none"
        raise UsageError(f"snapshots of {members.name}", expected="two epochs or more", found=found)
    out.say(f"{name_and_size(members)}, minimising their mass …")
    masses = minimal_mass(members, **mass_options)
    final_masses = select_masses(masses, last_snapshot_positions(masses, epochs)) if follow_training else masses
    values: dict[str, Any] = {
        "mass": _mass_values(masses, epochs) | {k: v for k, v in mass_options.items() if k != "device"}
    }
    text_blocks = [str(final_masses)]
    if follow_training:
        epoch_masses = along_training(masses, epochs)
        values["along"] = [asdict(epoch_mass) for epoch_mass in epoch_masses]
        text_blocks.append(f"Along training:\n{table([_epoch_row(epoch_mass) for epoch_mass in epoch_masses])}")
    if picture_path:
        values["picture"] = mass_figure(
            masses, picture_path, collection_name=members.name, epochs=epochs if follow_training else None
        )
        out.say(f"picture: {values['picture']}")
    return values, text_blocks


def _mass_values(masses: MinimalMass, epochs: list[int]) -> dict[str, Any]:
    columns = {
        "member": list(masses.ids),
        "epoch": epochs,
        "mass": masses.before.tolist(),
        "minimum": masses.after.tolist(),
        "excess_percent": masses.excess.tolist(),
        "residual": masses.residual.tolist(),
        "unbounded": masses.unbounded.tolist(),
        "converged": masses.converged.tolist(),
        "sweeps": masses.sweeps.tolist(),
        "dead": [
            {name: list(unit_positions) for name, unit_positions in dead_units.items()} for dead_units in masses.dead
        ],
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    unit_positions = {name: list(unit_positions) for name, unit_positions in masses.degenerate.items()}
    return {"degenerate": unit_positions, "held": list(masses.held), "members": rows}


def _epoch_row(epoch_mass: EpochMass) -> dict[str, Any]:
    return {
        "epoch": epoch_mass.epoch,
        "members": epoch_mass.members,
        "mass": epoch_mass.mass,
        "minimum": epoch_mass.minimum,
        "excess (%)": epoch_mass.excess,
        "lowest (%)": epoch_mass.lowest,
        "highest (%)": epoch_mass.highest,
        "residual": f"{epoch_mass.residual:.1g}",
    }


def _corollary_output(members: Collection, out: Output, seed: int) -> tuple[dict[str, Any], list[str]]:
    from checkpoints_zoo.populations.channel_exchangeability import corollary

    out.say(f"{members.name}: testing whether channels have one distribution …")
    result: Corollary = corollary(members, seed=seed)
    layer_values = [{**asdict(x), "units": x.units.tolist(), "counts": x.counts.tolist()} for x in result.layers]
    values = {"p": result.p, "simulations": result.simulations, "seed": seed, "members": list(result.ids)}
    return {"corollary": {**values, "layers": layer_values}}, [str(result)]
