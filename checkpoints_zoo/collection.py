"""Collections: rows of a manifest and the bytes they name, selected, stacked and made into an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from checkpoints_zoo import architectures, copying, manifest, modules, selection, store
from checkpoints_zoo.dataset import WeightDataset, label_table
from checkpoints_zoo.device import check_device
from checkpoints_zoo.ensemble import Ensemble
from checkpoints_zoo.errors import MemberNotFound, SelectionError, UsageError
from checkpoints_zoo.finding import Found
from checkpoints_zoo.images import Preprocess
from checkpoints_zoo.member import Member
from checkpoints_zoo.pieces import Location

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from checkpoints_zoo.catalog import Description
    from checkpoints_zoo.source import Source


class Collection:
    """Selected members of a collection: rows at hand, weights read when they are needed.

    Args:
        source: where manifest and shards lie.
        commit: what pins the source.
        description: the source's JSON on this collection.
        rows: the selected rows of the manifest.
        architecture: builds the module; None for the one the description names.
        skeletons: layout -> module built already, shared by all selections of one collection.
    """

    def __init__(
        self,
        source: Source,
        commit: str,
        description: Description,
        rows: pa.Table,
        architecture: Callable[[], nn.Module] | None = None,
        skeletons: dict[str, nn.Module] | None = None,
    ) -> None:
        self.source = source
        self.commit = commit
        self.description = description
        self.rows = rows
        self._architecture = architecture
        self._skeletons = {} if skeletons is None else skeletons

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
        """What turns uint8 images (batch, channel, height, width) into the members' inputs."""
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

    def __iter__(self) -> Iterator[Member]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        what = f"{self.description.architecture} on {self.description.dataset}"
        return f"Collection({self.name!r}, {len(self)} members, {what}, from {self.source.shown})"

    @overload
    def __getitem__(self, position: int) -> Member: ...
    @overload
    def __getitem__(self, position: slice) -> Collection: ...

    def __getitem__(self, position: int | slice) -> Member | Collection:
        """Take by position: an int gives a Member, a slice a Collection.

        Raises:
            MemberNotFound: no such position.
        """
        if isinstance(position, slice):
            return self._of(list(range(len(self)))[position])
        at = selection.whole(position)
        if at is None:
            raise UsageError("position of a member", expected="a whole number or a slice", found=repr(position)[:80])
        if not -len(self) <= at < len(self):
            raise MemberNotFound(
                f"position {position} of {self.name}",
                expected=f"one of the {len(self)} selected members, from 0",
                found=str(at),
                do="`.member(id)` takes a member by its id",
                collection=self.name,
            )
        one = self._of([at % len(self)])
        row = one.rows.to_pylist()[0]
        return Member(self.name, row, lambda: one.locations()[0], one.skeleton, lambda: one.citation)

    def _of(self, positions: list[int]) -> Collection:
        rows = manifest.take(self.rows, positions)
        return Collection(self.source, self.commit, self.description, rows, self._architecture, self._skeletons)

    def member(self, id: int) -> Member:
        """Take a selected member by its id (its last selected snapshot); return it.

        Raises:
            MemberNotFound: it is not among the selected ones.
        """
        if selection.whole(id) not in self.ids:
            raise selection.member_not_found(self.rows, f"this selection of {self.name}", id)
        return self[len(self) - 1 - self.ids[::-1].index(id)]

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

    def download(self, dest: str | Path | None = None) -> Collection:
        """Bring all members to this machine, those that are missing in one go; return them as they lie there then.

        Without `dest` that is the member cache, and nothing happens for a folder. Progress goes to stderr.

        Args:
            dest: a folder that becomes a source of its own, or gets the members added: their shards and rows, with
                the hashes they have. Other collections in it stay.

        Raises:
            NetworkError, AccessError, StorageError: they can't be had, or not be kept.
            DamagedError, SourceNotFound: as in `locations`; a member that is not what its row says.
            UsageError: a folder that has other members under these ids, or another collection under this name.
        """
        if dest is None:
            self.locations()
            return self
        self._check_some()
        found = copying.copy(Found(self.source, self.commit, self.description, self.rows, len(self)), Path(dest))
        return Collection(found.source, found.commit, found.description, found.rows, self._architecture)

    def stack(
        self,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        names: Iterable[str] | None = None,
    ) -> dict[str, Tensor]:
        """Read the members' weights and statistics into stacked tensors; return name -> (member, …).

        On the CPU in the stored dtype this is a view of the file where it can be (writing to it changes no file),
        whose values nobody has looked at yet; all other ways to get weights refuse those that are not finite.

        Args:
            device: where the tensors are to be.
            dtype: of the weights; None for the stored one. Statistics stay float32 or wider.
            names: which tensors; None for all.

        Raises:
            DamagedError, LayoutError, SourceNotFound: the bytes are not what the manifest says.
            TooLargeError: more than the memory that is free; use `batches`.
        """
        return store.stack(self.locations(), device, dtype, names)

    def batches(
        self, size: int, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Stream the members: yield (ids, stacked tensors) of `size` members each, the next being read meanwhile.

        Args:
            size: members a batch.
            device, dtype: as in `stack`.

        Raises:
            UsageError: a size that is none.
            DamagedError, LayoutError, SourceNotFound, TooLargeError: as in `stack`; non-finite values always.
        """
        step = selection.whole(size)
        if step is None or step < 1:
            raise UsageError("size of a batch of members", expected="a whole number from 1", found=repr(size))
        groups = [self.ids[at : at + step] for at in range(0, len(self), step)]
        return zip(groups, store.stream(self.locations(), step, check_device(device), dtype), strict=True)

    def dataset(
        self,
        labels: Iterable[str] = ("test_accuracy",),
        split: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> WeightDataset:
        """Return a torch Dataset of flat weight vectors (weight,) and labels (label,).

        Args:
            labels: numeric columns of the manifest.
            split: "train", "validation" or "test" (all snapshots of a run are in one of them); None for all.
            dtype: of the vectors.

        Raises:
            UsageError: a label that is no numeric column or is null somewhere.
            SelectionError: no member in that split.
        """
        chosen = self
        if split is not None:
            splits = self.rows.column("split").to_pylist()
            chosen = self._of([i for i, s in enumerate(splits) if s == split])
            if not len(chosen):
                found = ", ".join(sorted({str(s) for s in splits}))
                raise SelectionError(f"split of {self.name}", expected=f"members in {split!r}", found=f"only {found}")
        names = (labels,) if isinstance(labels, str) else tuple(labels)
        return WeightDataset(chosen.locations(), label_table(chosen.rows, names, self.name), names, dtype)

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
            build = self._architecture or (
                lambda: architectures.build(description.architecture, **description.arguments)
            )
            self._skeletons[key] = modules.skeleton(build, description.layouts[key], self.name)
        return self._skeletons[key]

    def ensemble(self, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Ensemble:
        """Stack the members into one module; return it: `ens(members.preprocess(images))` gives their logits.

        Args:
            device: where it is to be.
            dtype: that it computes in.

        Raises:
            DamagedError: a weight is not finite, or the bytes are not what the manifest says.
            TooLargeError: more than the memory that is free.
        """
        skeleton = self.skeleton()
        return Ensemble(skeleton, store.stack(self.locations(), device, dtype, check=True), self.ids)
