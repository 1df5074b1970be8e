"""Join members of several collections of one network into one selection; no bytes of members are copied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import LayoutError, SourceNotFound, UsageError
from checkpoints_zoo.formats import arrow_tables, layout, manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout, compare_shapes
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.sources import hub_addresses
from checkpoints_zoo.sources.finding import SelectedMembers
from checkpoints_zoo.sources.source import Source

COLLECTION_COLUMN, MEMBER_COLUMN = "collection", "member_of_collection"
"""Columns of joined rows: a member's collection, and its id there."""


@dataclass(frozen=True)
class JoinedSource(Source):
    """The sources of joined members. The layout "1/main" of a joined row is the layout "main" of the second part.

    Args:
        root, label, repo: "", "joined" and None, since joined members have no place of their own.
        parts: the joined selections.
    """

    root: Path
    label: str
    repo: hub_addresses.Repo | None
    parts: tuple[SelectedMembers, ...]

    @property
    def display_name(self) -> str:
        return first_few(list(dict.fromkeys(part.source.display_name for part in self.parts)), 3)

    def split(self, rows: pa.Table) -> Iterator[SelectedMembers]:
        """Split joined rows into runs of rows of one part; yield each part with its rows, which have the part's own ids
        and layouts."""
        joined_layout_keys = rows.column("layout").to_pylist()
        for part_number, run_positions in groupby(
            range(len(joined_layout_keys)), key=lambda i: int(joined_layout_keys[i].partition("/")[0])
        ):
            part = self.parts[part_number]
            run_rows = arrow_tables.take_rows(rows, list(run_positions))
            part_ids = run_rows.column(MEMBER_COLUMN).cast(part.rows.schema.field("member").type)
            part_layout_keys = pa.array(
                [key.partition("/")[2] for key in run_rows.column("layout").to_pylist()], pa.string()
            )
            run_rows = _replace_columns(run_rows, {"member": part_ids, "layout": part_layout_keys}).select(
                part.rows.schema.names
            )
            yield replace(part, rows=run_rows)

    def locate(self, described: layout.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        joined_ids = rows.column("member").to_pylist()
        locations = [
            location for part in self.split(rows) for location in part.source.locate(part.description, part.rows)
        ]
        return [replace(location, member=joined_id) for location, joined_id in zip(locations, joined_ids, strict=True)]

    def locate_tensors(
        self, described: layout.DescriptionWithLayouts, rows: pa.Table, names: Iterable[str]
    ) -> dict[str, list[Location]]:
        joined_ids, name_list = rows.column("member").to_pylist(), list(names)
        parts = [part.source.locate_tensors(part.description, part.rows, name_list) for part in self.split(rows)]
        locations_of_name = {name: [location for part in parts for location in part[name]] for name in name_list}
        return {
            name: [replace(location, member=i) for location, i in zip(locations, joined_ids, strict=True)]
            for name, locations in locations_of_name.items()
        }

    def citation(self, rows: pa.Table) -> str:
        """Return the citation of joined rows: the citations of their parts, joined by " + "."""
        parts = (replace(p, rows=p.source.updated_rows(p.description.name, p.rows)) for p in self.split(rows))
        return " + ".join(part.citation for part in parts)

    def collections(self) -> list[str]:
        return []

    def commit(self, name: str) -> str:
        return ""

    def read_collection(self, name: str) -> tuple[Description, pa.Table]:
        raise self._no_manifest(f"manifest of {name}")

    def list_files(self, folder: str) -> list[str]:
        return []

    def local_path(self, inside: str) -> Path:
        raise self._no_manifest(f"file {inside}")

    def _no_manifest(self, fact_name: str) -> SourceNotFound:
        return SourceNotFound(
            fact_name,
            expected="members of one source",
            found=f"members joined from {self.display_name}",
            do="Do this with each of the joined collections",
        )


def join(selections: Sequence[SelectedMembers]) -> SelectedMembers:
    """Join selections of one network; return one selection.

    If all members are of one collection, they keep their ids. Members of several collections get the ids 0, 1, 2, …,
    and the columns `collection` and `member_of_collection`.

    Args:
        selections: two or more selections; selections that are joined already are split into their parts first.

    Raises:
        UsageError: architectures, classes or preprocessing differ, or a member occurs twice.
        LayoutError: the names or shapes of tensors differ.
    """
    parts_of_sources = [
        part
        for selection in selections
        for part in (
            selection.source.split(selection.rows) if isinstance(selection.source, JoinedSource) else [selection]
        )
    ]
    first_part = parts_of_sources[0]
    for other_part in parts_of_sources[1:]:
        _check_compatible(first_part, other_part)
    part_sources = [(part.source.label, part.commit, part.description.name) for part in parts_of_sources]
    keys_with_source = [
        (part_source, snapshot_key)
        for part_source, part in zip(part_sources, parts_of_sources, strict=True)
        for snapshot_key in manifest.snapshot_keys(part.rows)
    ]
    for part_source, (member, epoch) in keys_with_source:
        if keys_with_source.count((part_source, (member, epoch))) > 1:
            raise UsageError(
                "members to join", expected="each member once", found=f"member {member} of {part_source[2]}, twice",
                do="Select members that are not in the other collection",
            )  # fmt: skip
    rows_of_parts = [part.rows for part in parts_of_sources]
    if len(set(part_sources)) == 1:
        return replace(first_part, rows=pa.concat_tables(rows_of_parts).combine_chunks())
    new_id_of_member: dict[tuple[tuple[str, str, str], int], int] = {}
    for part_source, (member, _) in keys_with_source:
        new_id_of_member.setdefault((part_source, member), len(new_id_of_member))
    joined_ids = [new_id_of_member[part_source, member] for part_source, (member, _) in keys_with_source]
    joined_layout_keys = [
        f"{i}/{layout_key}"
        for i, part_rows in enumerate(rows_of_parts)
        for layout_key in part_rows.column("layout").to_pylist()
    ]
    joined_rows = pa.concat_tables(rows_of_parts, promote_options="default").combine_chunks()
    new_columns = {
        MEMBER_COLUMN: joined_rows.column("member"),
        COLLECTION_COLUMN: pa.array([part_source[2] for part_source, _ in keys_with_source], pa.string()),
        "member": pa.array(joined_ids, joined_rows.schema.field("member").type),
        "layout": pa.array(joined_layout_keys, pa.string()),
    }
    return SelectedMembers(
        JoinedSource(Path(), "joined", None, tuple(parts_of_sources)),
        "",
        _describe_joined(parts_of_sources),
        _replace_columns(joined_rows, new_columns),
    )


def _replace_columns(rows: pa.Table, new_columns: dict[str, pa.Array | pa.ChunkedArray]) -> pa.Table:
    """Replace columns of a table, or append them; return the table."""
    for name, new_values in new_columns.items():
        column_index = rows.schema.get_field_index(name)
        rows = (
            rows.append_column(name, new_values)
            if column_index < 0
            else rows.set_column(column_index, rows.schema.field(column_index), new_values)
        )
    return rows


def _describe_joined(selections: Sequence[SelectedMembers]) -> Description:
    """Describe joined members."""
    first = selections[0].description
    names, datasets, licences, citations = (
        list(dict.fromkeys(getattr(part.description, field) for part in selections))
        for field in ("name", "dataset", "licence", "citation")
    )
    layouts: dict[str, Layout] = {}
    for i, part in enumerate(selections):
        layouts |= {f"{i}/{key}": layout for key, layout in part.description.layouts.items()}
    return replace(
        first,
        name="-and-".join(names)[:96],
        title=f"Joined: {first_few(names, 6)}",
        dataset=datasets[0] if len(datasets) == 1 else "",
        licence=" AND ".join(licences),
        citation="\n".join(citations),
        layouts=layouts,
        base="",
    )


def _arguments_with_defaults(description: Description) -> dict[str, Any]:
    """Return the arguments of a description's architecture, including default values that the description leaves
    out."""
    arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in description.arguments.items()}
    if description.architecture not in ARCHITECTURES:
        return arguments
    parameters = signature(ARCHITECTURES[description.architecture]).parameters.values()
    return {
        parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
    } | arguments


def _check_compatible(selection: SelectedMembers, other_selection: SelectedMembers) -> None:
    """Check that two selections have the same network, preprocessing and classes.

    Raises:
        UsageError, LayoutError: the networks, the preprocessing or the classes differ.
    """
    first, second = selection.description, other_selection.description
    names_text = f"{first.name} and {second.name}"

    def network_text(description: Description) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in _arguments_with_defaults(description).items())
        return f"{description.architecture}({arguments})"

    compared_texts = {
        "architecture": (network_text(first), network_text(second)),
        "classes": (", ".join(first.classes[:12]), ", ".join(second.classes[:12])),
        "preprocessing": (repr(dict(first.preprocessing)), repr(dict(second.preprocessing))),
    }
    fields_agree = {"classes": first.classes == second.classes}
    for field_name, (expected, found) in compared_texts.items():
        if expected != found or not fields_agree.get(field_name, True):
            raise UsageError(
                f"{field_name} of {names_text}, to join them",
                expected=f"{expected}, as {first.name} has",
                found=found,
                do="Join collections of one network, on the same inputs and classes",
            )
    shapes_of_layouts = [
        {t.name: t.shape for t in part.description.layouts[key].tensors}
        for part in (selection, other_selection)
        for key in sorted(set(part.rows.column("layout").to_pylist()) - {None})
    ]
    for shapes_of_layout in shapes_of_layouts[1:]:
        wrong_names, problem_text = compare_shapes(shapes_of_layout, shapes_of_layouts[0])
        if wrong_names:
            raise LayoutError(
                f"tensors of {names_text}, to join them",
                expected=f"the {len(shapes_of_layouts[0])} tensors of {first.name} by name and shape",
                found=problem_text,
                tensor=wrong_names[0],
            )
