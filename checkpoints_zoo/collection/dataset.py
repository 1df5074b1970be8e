"""Weights as a torch Dataset: one flat vector a member, with labels from the manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import Dataset

from checkpoints_zoo.collection.reading import LocatedTensors, check_finite, read_vectors
from checkpoints_zoo.collection.views import Key, View
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.symmetry import Table


def label_table(rows: pa.Table, column_names: Sequence[str], collection: str) -> Tensor:
    """Take labels from a manifest's rows; return a float64 tensor (member, label).

    Args:
        rows: manifest rows of the members.
        column_names: names of numeric columns of the manifest.
        collection: name of the collection, for error texts.

    Raises:
        UsageError: a name is no numeric column, or the column is null in a row.
    """
    numeric_columns = [field.name for field in rows.schema if str(field.type) in ("int32", "int64", "double", "bool")]
    table = torch.empty(rows.num_rows, len(column_names), dtype=torch.float64)
    for column, name in enumerate(column_names):
        if name not in numeric_columns:
            raise UsageError(
                f"label {name!r}", expected=f"a numeric column ({', '.join(numeric_columns)})", found="none such"
            )
        values = rows.column(name).to_pylist()
        if None in values:
            raise UsageError(
                f"label {name!r} of {collection}",
                expected="a value for each member",
                found=f"null for member {rows.column('member')[values.index(None)]}",
                do=f'Select with where="{name} is not null"',
            )
        table[:, column] = torch.tensor(values, dtype=torch.float64)
    return table


class WeightDataset(Dataset[tuple[Tensor, Tensor]]):
    """Flat weight vectors and labels; a member is read when it is indexed.

    Args:
        located: the tensors that a vector is made of, in this order, and where they are.
        view: steps that change the weights as they are read.
        member_keys: (id, epoch) of each member.
        table: symmetry table of the network; None for a view that changes nothing.
        labels: labels of the members, (member, label), float64.
        label_names: names of the labels.
        dtype: dtype of the weight vectors.
    """

    def __init__(
        self,
        located: Sequence[LocatedTensors],
        view: View,
        member_keys: Sequence[Key],
        table: Table | None,
        labels: Tensor,
        label_names: Sequence[str],
        dtype: torch.dtype,
    ) -> None:
        # The dataset holds only what it needs to read, so that it can be sent to other processes.
        self._located, self._view, self._snapshot_keys, self._table = located, view, member_keys, table
        self.labels = labels
        self.label_names = tuple(label_names)
        self.dtype = dtype
        shapes: dict[str, tuple[int, ...]] = {}
        for tensors in located:
            all_shapes = tensors.locations[0].layout.shapes
            shapes |= all_shapes if tensors.names is None else {n: all_shapes[n] for n in tensors.names}
        self.spans: dict[str, slice] = {}
        span_start = 0
        for name, shape in shapes.items():
            self.spans[name] = slice(span_start, span_start + math.prod(shape))
            span_start += math.prod(shape)
        self._shapes = shapes
        self.width = span_start

    @property
    def locations(self) -> Sequence[Location]:
        """Locations of the members' bytes, or of their first tensor's."""
        return self._located[0].locations

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Return a member's vector (weight,) and labels (label,)."""
        if not -len(self) <= position < len(self):
            raise IndexError(f"position {position}: expected one of {len(self)} members.")
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several members' vectors and labels, read together (DataLoader calls this)."""
        located = [tensors.at(positions) for tensors in self._located]
        if self._table is None:
            vectors = torch.cat([read_vectors(x.locations, self.dtype, x.names) for x in located], dim=1)
        else:
            locations = located[0].locations
            member_keys = [self._snapshot_keys[i] for i in positions]
            stacked = self._view.stack(
                self._table, member_keys, locations, torch.device("cpu"), self.dtype, located[0].names
            )
            flat_tensors = {
                n: stacked[n].to(self.dtype).reshape(len(positions), s.stop - s.start) for n, s in self.spans.items()
            }
            # Running statistics may be too large for the dtype of the vector.
            check_finite({n: t for n, t in flat_tensors.items() if stacked[n].dtype != self.dtype}, locations)
            vectors = torch.cat(list(flat_tensors.values()), dim=1)
        return [(vector, self.labels[i]) for vector, i in zip(vectors, positions, strict=True)]

    def unflatten(self, vectors: Tensor) -> dict[str, Tensor]:
        """Cut flat vectors (…, weight) into the tensors that they were made of; return name -> `(…, *shape)`.

        Raises:
            UsageError: the vectors have another number of weights.
        """
        if vectors.shape[-1] != self.width:
            raise UsageError("weight vectors", expected=f"{self.width:,} weights", found=f"{vectors.shape[-1]:,}")
        return {
            name: vectors[..., span].reshape((*vectors.shape[:-1], *self._shapes[name]))
            for name, span in self.spans.items()
        }
