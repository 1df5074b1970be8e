"""Join members of several collections of one network into one selection; no bytes of members are copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import LayoutError, SourceNotFound, UsageError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout, compare_shapes
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.source import SelectedMembers, Source

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
    repo: hub.Repo | None
    parts: tuple[SelectedMembers, ...]

    @property
    def display_name(self) -> str:
        return first_few(list(dict.fromkeys(part.source.display_name for part in self.parts)), 3)

    def split(self, rows: pa.Table) -> Iterator[SelectedMembers]:
        """Split joined rows into runs of rows of one part; yield each part with its rows, which have the part's own ids
        and layouts."""
        keys = rows.column("layout").to_pylist()
        for number, positions in groupby(range(len(keys)), key=lambda i: int(keys[i].partition("/")[0])):
            part = self.parts[number]
            run = manifest.take_rows(rows, list(positions))
            members = run.column(MEMBER_COLUMN).cast(part.rows.schema.field("member").type)
            layouts = pa.array([key.partition("/")[2] for key in run.column("layout").to_pylist()], pa.string())
            run = _replace_columns(run, {"member": members, "layout": layouts}).select(part.rows.schema.names)
            yield replace(part, rows=run)

    def locate(self, described: manifest.DescriptionWithLayouts, rows: pa.Table) -> list[Location]:
        ids = rows.column("member").to_pylist()
        locations = [x for part in self.split(rows) for x in part.source.locate(part.description, part.rows)]
        return [replace(x, member=id) for x, id in zip(locations, ids, strict=True)]

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
        for joined in selections
        for part in (joined.source.split(joined.rows) if isinstance(joined.source, JoinedSource) else [joined])
    ]
    first = parts_of_sources[0]
    for other in parts_of_sources[1:]:
        _check_compatible(first, other)
    part_sources = [(part.source.label, part.commit, part.description.name) for part in parts_of_sources]
    keys = [
        (part_source, key)
        for part_source, part in zip(part_sources, parts_of_sources, strict=True)
        for key in manifest.snapshot_keys(part.rows)
    ]
    for part_source, (member, epoch) in keys:
        if keys.count((part_source, (member, epoch))) > 1:
            raise UsageError(
                "members to join", expected="each member once", found=f"member {member} of {part_source[2]}, twice",
                do="Select members that are not in the other collection",
            )  # fmt: skip
    tables = [part.rows for part in parts_of_sources]
    if len(set(part_sources)) == 1:
        return replace(first, rows=pa.concat_tables(tables).combine_chunks())
    ids: dict[tuple[tuple[str, str, str], int], int] = {}
    for part_source, (member, _) in keys:
        ids.setdefault((part_source, member), len(ids))
    joined_ids = [ids[part_source, member] for part_source, (member, _) in keys]
    layouts = [f"{i}/{key}" for i, rows in enumerate(tables) for key in rows.column("layout").to_pylist()]
    rows = pa.concat_tables(tables, promote_options="default").combine_chunks()
    columns = {
        MEMBER_COLUMN: rows.column("member"),
        COLLECTION_COLUMN: pa.array([part_source[2] for part_source, _ in keys], pa.string()),
        "member": pa.array(joined_ids, rows.schema.field("member").type),
        "layout": pa.array(layouts, pa.string()),
    }
    return SelectedMembers(
        JoinedSource(Path(), "joined", None, tuple(parts_of_sources)),
        "",
        _describe_joined(parts_of_sources),
        _replace_columns(rows, columns),
        len(rows),
    )


def _replace_columns(rows: pa.Table, columns: dict[str, pa.Array | pa.ChunkedArray]) -> pa.Table:
    """Replace columns of a table, or append them; return the table."""
    for name, values in columns.items():
        column_index = rows.schema.get_field_index(name)
        rows = (
            rows.append_column(name, values)
            if column_index < 0
            else rows.set_column(column_index, rows.schema.field(column_index), values)
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
    return {p.name: p.default for p in parameters if p.default is not p.empty} | arguments


def _check_compatible(selection: SelectedMembers, other_selection: SelectedMembers) -> None:
    """Check that two selections have the same network, preprocessing and classes.

    Raises:
        UsageError, LayoutError: the networks, the preprocessing or the classes differ.
    """
    first, second = selection.description, other_selection.description
    names = f"{first.name} and {second.name}"

    def network_text(description: Description) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in _arguments_with_defaults(description).items())
        return f"{description.architecture}({arguments})"

    compared_texts = {
        "architecture": (network_text(first), network_text(second)),
        "classes": (", ".join(first.classes[:12]), ", ".join(second.classes[:12])),
        "preprocessing": (repr(dict(first.preprocessing)), repr(dict(second.preprocessing))),
    }
    same_fields = {"classes": first.classes == second.classes}
    for field_name, (expected, found) in compared_texts.items():
        if expected != found or not same_fields.get(field_name, True):
            raise UsageError(
                f"{field_name} of {names}, to join them",
                expected=f"{expected}, as {first.name} has",
                found=found,
                do="Join collections of one network, on the same inputs and classes",
            )
    shapes = [
        {t.name: t.shape for t in part.description.layouts[key].tensors}
        for part in (selection, other_selection)
        for key in sorted(set(part.rows.column("layout").to_pylist()) - {None})
    ]
    for shapes_of_layout in shapes[1:]:
        wrong_names, problem_text = compare_shapes(shapes_of_layout, shapes[0])
        if wrong_names:
            raise LayoutError(
                f"tensors of {names}, to join them",
                expected=f"the {len(shapes[0])} tensors of {first.name} by name and shape",
                found=problem_text,
                tensor=wrong_names[0],
            )
