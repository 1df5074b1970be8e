"""Symmetries of members as a Parquet file beside their manifest: one row a member, one column a group and a scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.symmetry.elements import Element

VERSION = b"1"
_IDENTITY = {"member": pa.int32(), "epoch": pa.int32(), "sha256": pa.string()}


def write(path: Path, rows: pa.Table, element: Element, what: str) -> None:
    """Write symmetries by rename.

    Args:
        path: of the file; its folder is made.
        rows: the members' rows of the manifest.
        element: one symmetry a member, in the rows' order.
        what: words for what the symmetries do, kept in the file.
    """
    columns = {name: rows.column(name).cast(kind) for name, kind in _IDENTITY.items()}
    for name, p in element.permutations.items():
        columns[f"permutation {name}"] = _lists(p.cpu().numpy().astype(np.int32))
    for name, s in element.scales.items():
        columns[f"scale {name}"] = _lists(s.cpu().numpy().astype(np.float64))
    table = pa.table(columns).replace_schema_metadata({b"checkpoints_zoo_symmetries": VERSION, b"view": what.encode()})
    manifest.write(table, path, table.schema)


def _lists(values: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, max(1, values.shape[1]))


def read(path: Path, rows: pa.Table) -> tuple[dict[tuple[int, int], int], Element]:
    """Read symmetries; return (member, epoch) -> row of the element, and the element.

    Args:
        path: of the file.
        rows: of the manifest, of the members that it is for.

    Raises:
        SourceNotFound: no such file.
        FormatError: a file of another kind, or of a newer version.
        DamagedError: a file that is cut, or symmetries of other weights than the members'.
    """
    if not path.is_file():
        raise SourceNotFound(f"symmetries {path}", expected="a file", found="none", path=path)
    try:
        with path.open("rb") as file:
            table = pq.read_table(file, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(
            f"symmetries {path}", expected="a Parquet file", found=str(error).split("\n")[0], path=path
        ) from error
    if (table.schema.metadata or {}).get(b"checkpoints_zoo_symmetries") != VERSION:
        raise FormatError(
            f"symmetries {path}",
            expected=f"a file that write_symmetries wrote, version {VERSION.decode()}",
            found="another",
            path=path,
        )
    if table.schema.names[:3] != list(_IDENTITY):
        raise FormatError(f"symmetries {path}", expected=f"columns {', '.join(_IDENTITY)} first", found="others")
    keys = list(zip(*(table.column(c).to_pylist() for c in ("member", "epoch")), strict=True))
    _check_hashes(path, dict(zip(keys, table.column("sha256").to_pylist(), strict=True)), rows)
    kinds = {"permutation ": torch.int64, "scale ": torch.float64}
    found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
    for name in table.schema.names[3:]:
        kind = next((k for k in kinds if name.startswith(k)), None)
        if kind is None or not pa.types.is_fixed_size_list(table.schema.field(name).type):
            raise FormatError(f"column {name!r} of {path}", expected="permutations or scales", found="another")
        column = table.column(name).combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(keys), -1)
        found[kind][name.removeprefix(kind)] = torch.tensor(values, dtype=kinds[kind])
    return {key: i for i, key in enumerate(keys)}, Element(found["permutation "], found["scale "])


def _check_hashes(path: Path, claimed: dict[tuple[int, int], str | None], rows: pa.Table) -> None:
    names = ("member", "epoch", "sha256")
    mine: Sequence[tuple[int, int, str | None]] = list(zip(*(rows.column(c).to_pylist() for c in names), strict=True))
    for member, epoch, sha in mine:
        other = claimed.get((member, epoch))
        if sha is not None and other is not None and sha != other:
            raise DamagedError(
                f"symmetries {path}",
                expected=f"those of weights {sha[:8]} of member {member}",
                found=f"those of {other[:8]}",
                do="Write them again for these members",
                member=member,
                path=path,
            )
