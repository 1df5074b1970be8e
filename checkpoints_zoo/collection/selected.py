"""Selected members: rows of a manifest, the bytes they name, the module and the symmetries they have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from checkpoints_zoo.collection import store
from checkpoints_zoo.collection.views import View
from checkpoints_zoo.errors import FormatError, SelectionError, UsageError
from checkpoints_zoo.formats import manifest, safetensors, selection
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.images import Preprocess
from checkpoints_zoo.networks import architectures, modules
from checkpoints_zoo.symmetry import Element, Table, files, symmetries
from checkpoints_zoo.symmetry.canonical import alignment

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from checkpoints_zoo.formats.catalog import Description
    from checkpoints_zoo.sources.source import Source


STORED = View()


class Selected:
    """Members of a collection, as rows; weights are read when they are needed.

    Args:
        source: where manifest and shards lie.
        commit: what pins the source.
        description: the source's JSON on this collection.
        rows: the selected rows of the manifest.
        architecture: builds the module; None for the one the description names.
        skeletons: layout -> module built already, shared by all selections of one collection.
        view: what is done to the weights as they are read.
    """

    def __init__(
        self,
        source: Source,
        commit: str,
        description: Description,
        rows: pa.Table,
        architecture: Callable[[], nn.Module] | None = None,
        skeletons: dict[str, nn.Module] | None = None,
        view: View = STORED,
    ) -> None:
        self.source = source
        self.commit = commit
        self.description = description
        self.rows = rows
        self._architecture = architecture
        self._skeletons = {} if skeletons is None else skeletons
        self.view = view

    @property
    def name(self) -> str:
        return self.description.name

    @cached_property
    def ids(self) -> list[int]:
        """Member ids, in order."""
        return [int(m) for m in self.rows.column("member").to_pylist()]

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the logits."""
        return self.description.classes

    @cached_property
    def preprocess(self) -> Preprocess:
        """What turns uint8 images (batch, channel, height, width) into the members' inputs.

        Raises:
            FormatError: the collection's description has none.
        """
        if not self.description.preprocessing:
            raise FormatError(
                f"preprocessing of {self.name}",
                expected="what turns pixels into the members' inputs",
                found="none in its description",
                do="Whoever makes the source gives it: preprocessing=, like=, or `zoo-cli import --like NAME`",
                collection=self.name,
            )
        return Preprocess.from_json(dict(self.description.preprocessing))

    @property
    def manifest(self) -> pd.DataFrame:
        """The selected rows as a DataFrame with pyarrow dtypes, so that integers with nulls stay integers."""
        import pandas as pd

        frame: pd.DataFrame = self.rows.to_pandas(types_mapper=pd.ArrowDtype)
        return frame

    @property
    def citation(self) -> str:
        """Text that names this selection; `zoo.load` gives it back."""
        self._check_some()
        rows = self.source.renewed(self.name, self.rows)
        return selection.cite(self.source.label, self.commit, self.name, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the members as they are stored."""
        return manifest.total(self.rows, "nbytes")

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def member_nbytes(self) -> int:
        """Bytes of one member as it is stored, on average; 1 or more."""
        return max(1, self.nbytes // max(1, len(self)))

    def held_by(self, nbytes: int) -> int:
        """Return how many members so many bytes hold, for `batches`: one or more, and all at most."""
        return max(1, min(len(self), nbytes // self.member_nbytes))

    def _check_some(self) -> None:
        if not len(self):
            raise SelectionError(
                f"selection of {self.name}",
                expected="one member or more",
                found="none",
                do="A slice beyond the last position is empty",
                collection=self.name,
            )

    def locations(self) -> list[Location]:
        """Return where the members' bytes lie on this machine; from the Hub, what is missing is fetched in one go.

        Raises:
            SelectionError: no members, or one without weights.
            DamagedError, SourceNotFound: a file outside the source, or none.
            NetworkError, AccessError, StorageError: a source on the Hub that can't be read, or not be kept.
        """
        self._check_some()
        manifest.check_located(self.rows, self.name)
        return self.source.locate(self.description, self.rows)

    def skeleton(self) -> nn.Module:
        """Build the members' module without memory for parameters, checked against the layout; return it.

        Raises:
            SelectionError: no members, or one without weights.
            UsageError, LayoutError: no architecture of that name, or one whose tensors are others.
        """
        self._check_some()
        manifest.check_located(self.rows, self.name)
        key = min(self.rows.column("layout").to_pylist())
        if key not in self._skeletons:
            description = self.description
            if self._architecture is None and description.architecture not in architectures.ARCHITECTURES:
                raise UsageError(
                    f"architecture {description.architecture!r} of {self.name}",
                    expected=f"one of the package's ({', '.join(architectures.ARCHITECTURES)}), or what builds it",
                    found="neither",
                    do="Give what builds it: zoo.load(…, architecture=build), or --architecture MODULE:FUNCTION",
                )
            build = self._architecture or (
                lambda: architectures.build(description.architecture, **description.arguments)
            )
            self._skeletons[key] = modules.skeleton(build, description.layouts[key], self.name)
        return self._skeletons[key]

    @cached_property
    def symmetry_table(self) -> Table:
        """The permutation and scaling symmetries of the members' network.

        Raises:
            SymmetryError: an architecture whose symmetries can't be derived.
            SelectionError, UsageError, LayoutError: as in `skeleton`.
        """
        preprocess = self.preprocess
        return symmetries(self.skeleton(), torch.zeros(2, preprocess.channels, *preprocess.size))

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Member id and epoch of each selected snapshot."""
        columns = (self.rows.column(name).to_pylist() for name in ("member", "epoch"))
        return list(zip(*columns, strict=True))

    def read(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        names: Iterable[str] | None = None,
        *,
        check: bool = True,
        locations: list[Location] | None = None,
    ) -> dict[str, Tensor]:
        """Read stacked weights as this selection's view has them; return name -> (member, …).

        Args:
            device, dtype, names: as in `store.stack`.
            check: whether the values of a view of a file are looked at too.
            locations: of the members, where they are known.
        """
        where = self.locations() if locations is None else locations
        if not self.view:
            return store.stack(where, device, dtype, names, check=check)
        chosen = None if names is None else list(names)
        return self.view.stack(self.symmetry_table, self.keys, where, device, dtype, chosen)

    def symmetries(self) -> Element:
        """Return what this view applies to each member: permutations (member, unit), scales (member, value)."""
        return self.view.elements(self.symmetry_table, self.keys, self.locations())

    def write_symmetries(self, path: str | Path) -> Path:
        """Write what this view applies to each member; return the file's path. `transform` takes it.

        Args:
            path: of a Parquet file with one row a member.

        Raises:
            UsageError: a view that changes nothing.
            StorageError: it can't be written.
        """
        if not self.view:
            raise UsageError(
                f"symmetries of {self.name}",
                expected="a view",
                found="weights as they are stored",
                do="Call canonicalize() or align() first",
            )
        what = "; ".join(str(step) for step in self.view.steps)
        element = self.symmetries()
        with safetensors.writing_into(Path(path).parent):
            files.write(Path(path), self.rows, element, what)
        return Path(path)

    def match_mean(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        """Match all members to their mean; return (member, epoch) -> group -> permutation (unit)."""
        stacked = self.read(torch.device("cpu"), None)
        found = alignment.match_mean(self.symmetry_table, stacked)[0].permutations
        return {key: {name: p[row].cpu() for name, p in found.items()} for row, key in enumerate(self.keys)}
