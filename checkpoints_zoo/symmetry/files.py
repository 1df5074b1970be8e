"""Files of symmetries: Parquet with one row for each member, and one column for each group, scale, sign, matrix and
shift.

Version 2 has signs, version 3 matrices and shifts; a file has the lowest version that suffices.
"""

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

FORMAT_VERSIONS = (b"1", b"2", b"3")
_IDENTITY_COLUMNS = {"member": pa.int32(), "epoch": pa.int32(), "sha256": pa.string()}


def write_symmetries(path: Path, rows: pa.Table, element: Element, view: str) -> None:
    """Write symmetries into a Parquet file. The file is written under a temporary name, then renamed.

    Args:
        path: path of the Parquet file. The folder of the file is made if missing.
        rows: manifest rows of the members.
        element: one symmetry for each member, in the order of the rows.
        view: text that describes the symmetries and is stored in the file.
    """
    columns = {name: rows.column(name).cast(kind) for name, kind in _IDENTITY_COLUMNS.items()}
    for name, p in element.permutations.items():
        columns[f"permutation {name}"] = _list_column(p.cpu().numpy().astype(np.int32))
    for name, s in element.scales.items():
        columns[f"scale {name}"] = _list_column(s.cpu().numpy().astype(np.float64))
    for name, s in element.signs.items():
        columns[f"sign {name}"] = _list_column(s.cpu().numpy().astype(np.int8))
    for name, m in element.matrices.items():
        count, size = m.shape[-3:-1]
        columns[f"matrix {count} {size} {name}"] = _list_column(m.flatten(-3).cpu().numpy().astype(np.float64))
    for name, vector in element.shifts.items():
        columns[f"shift {name}"] = _list_column(vector.cpu().numpy().astype(np.float64))
    version = FORMAT_VERSIONS[2 if element.matrices or element.shifts else bool(element.signs)]
    table = pa.table(columns).replace_schema_metadata({b"checkpoints_zoo_symmetries": version, b"view": view.encode()})
    manifest.write_manifest(table, path, table.schema)


def _list_column(values: np.ndarray) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, max(1, values.shape[1]))


def read_symmetries(path: Path, rows: pa.Table) -> tuple[dict[tuple[int, int], int], Element]:
    """Read symmetries; return (member, epoch) -> row of the element, and the element with one symmetry in each row.

    Args:
        path: path of the Parquet file.
        rows: manifest rows of the members that use the symmetries.

    Raises:
        SourceNotFound: the file does not exist.
        FormatError: the file has another format or a newer version.
        DamagedError: the file is damaged, or has the symmetries of other weights.
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
    if (table.schema.metadata or {}).get(b"checkpoints_zoo_symmetries") not in FORMAT_VERSIONS:
        raise FormatError(
            f"symmetries {path}",
            expected=f"a file that write_symmetries wrote, version {FORMAT_VERSIONS[-1].decode()} or older",
            found="another",
            path=path,
        )
    if table.schema.names[:3] != list(_IDENTITY_COLUMNS):
        raise FormatError(
            f"symmetries {path}", expected=f"columns {', '.join(_IDENTITY_COLUMNS)} first", found="others"
        )
    keys = list(zip(*(table.column(c).to_pylist() for c in ("member", "epoch")), strict=True))
    _check_hashes(path, dict(zip(keys, table.column("sha256").to_pylist(), strict=True)), rows)
    kinds = dict.fromkeys(("permutation ", "scale ", "sign ", "matrix ", "shift "), torch.float64)
    kinds["permutation "] = torch.int64
    tensors: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
    for name in table.schema.names[3:]:
        kind = next((k for k in kinds if name.startswith(k)), None)
        if kind is None or not pa.types.is_fixed_size_list(table.schema.field(name).type):
            raise FormatError(
                f"column {name!r} of {path}",
                expected="permutations, scales, signs, matrices or shifts",
                found="another",
            )
        column = table.column(name).combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False).reshape(len(keys), -1)
        tensors[kind][name.removeprefix(kind)] = torch.tensor(values, dtype=kinds[kind])
    tensors["matrix "] = dict(_to_matrices(path, name, flat) for name, flat in tensors["matrix "].items())
    return {key: i for i, key in enumerate(keys)}, Element(*tensors.values())


def _to_matrices(path: Path, column: str, flat: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Return the name of a group of matrices and its matrices (member, copy, unit, unit), from a column
    "<copies> <units> <name>" with flat values (member, entry)."""
    words = column.split(" ", 2)
    if len(words) == 3 and all(word.isascii() and word.isdigit() and 0 < len(word) < 10 for word in words[:2]):
        count, size = int(words[0]), int(words[1])
        if flat.shape[1] == count * size * size:
            return words[2], flat.reshape(-1, count, size, size)
    raise FormatError(
        f"column {'matrix ' + column!r} of {path}", expected="the number and the size of its matrices", found="others"
    )


def _check_hashes(symmetries_path: Path, stored_hashes: dict[tuple[int, int], str | None], rows: pa.Table) -> None:
    names = ("member", "epoch", "sha256")
    identities: Sequence[tuple[int, int, str | None]] = list(
        zip(*(rows.column(c).to_pylist() for c in names), strict=True)
    )
    for member, epoch, sha in identities:
        stored = stored_hashes.get((member, epoch))
        if sha is not None and stored is not None and sha != stored:
            raise DamagedError(
                f"symmetries {symmetries_path}",
                expected=f"symmetries of member {member} with weights {sha[:8]}",
                found=f"symmetries of weights {stored[:8]}",
                do="Write them again for these members",
                member=member,
                path=symmetries_path,
            )
