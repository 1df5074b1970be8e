"""Collections: rows of a manifest and the bytes they name, selected, stacked and made into an ensemble."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from checkpoints_zoo import predictions
from checkpoints_zoo.collection import store
from checkpoints_zoo.collection.dataset import WeightDataset, label_table
from checkpoints_zoo.collection.member import Member
from checkpoints_zoo.collection.viewed import Viewed
from checkpoints_zoo.collection.views import View
from checkpoints_zoo.errors import MemberNotFound, SelectionError, UsageError
from checkpoints_zoo.formats import manifest, selection
from checkpoints_zoo.images import Given
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.predictions import Predictions
from checkpoints_zoo.sources import copying
from checkpoints_zoo.sources.finding import Found


class Collection(Viewed):
    """Selected members of a collection: rows at hand, weights read when they are needed.

    The arguments are those of `Selected`.
    """

    def __iter__(self) -> Iterator[Member]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        what = f"{self.description.architecture} on {self.description.dataset}"
        view = "".join(f", {step}" for step in self.view.steps)
        return f"Collection({self.name!r}, {len(self)} members, {what}, from {self.source.shown}{view})"

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
        return self.at(position)

    def at(self, position: int) -> Member:
        """Take the member at a position; return it.

        Raises:
            MemberNotFound, UsageError: no such position.
        """
        one = self._of([self._position(position)])
        row = one.rows.to_pylist()[0]
        return Member(self.name, row, one)

    def _position(self, position: int) -> int:
        """Return a position counted from the first member.

        Raises:
            MemberNotFound, UsageError: no such position.
        """
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
        return at % len(self)

    def _of(self, positions: list[int], view: View | None = None) -> Collection:
        rows = self.rows if positions == list(range(len(self))) else manifest.take(self.rows, positions)
        with_view = self.view if view is None else view
        part = Collection(
            self.source, self.commit, self.description, rows, self._architecture, self._skeletons, with_view
        )
        if len(part) and "symmetry_table" in vars(self):  # derived once, not for each batch
            part.symmetry_table = self.symmetry_table
        return part

    def take(self, positions: Iterable[int]) -> Collection:
        """Take members by position, in any order; return them as a collection.

        Raises:
            MemberNotFound, UsageError: no such position.
        """
        return self._of([self._position(position) for position in positions])

    def member(self, id: int) -> Member:
        """Take a selected member by its id (its last selected snapshot); return it.

        Raises:
            MemberNotFound: it is not among the selected ones.
        """
        if selection.whole(id) not in self.ids:
            raise selection.member_not_found(self.rows, f"this selection of {self.name}", id)
        return self[len(self) - 1 - self.ids[::-1].index(id)]

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
        return Collection(found.source, found.commit, found.description, found.rows, self._architecture, view=self.view)

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
        return self.read(check_device(device), dtype, names, check=False)

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
        on = check_device(device)
        starts = range(0, len(self), step)
        # All members are fetched in one go before the first batch is read.
        where = self.locations()
        parts = [self._of(list(range(len(self)))[at : at + step]) for at in starts]

        def read(i: int) -> dict[str, Tensor]:
            at = starts[i]
            return parts[i].read(on, dtype, locations=where[at : at + step])

        return zip([part.ids for part in parts], store.ahead(read, len(parts)), strict=True)

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
        return WeightDataset(chosen, label_table(chosen.rows, names, self.name), names, dtype)

    def ensemble(
        self,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        execution: str | None = None,
        compile: bool = False,
        chunk: int | None = None,
    ) -> Ensemble:
        """Stack the members into one module; return it: `ens(members.preprocess(images))` gives their logits.

        Args:
            device: where it is to be.
            dtype: that it computes in. float32 agrees with the members' modules to 1e-5 of the largest logit; on the
                collections that ship bfloat16 is 0.008 of it away at most, float16 0.0011, and 1 in 5,000 arg-maxes
                changes (measured by `benchmarks/ensemble.py --errors`).
            execution: how members run: "loop", "grouped", "vmap", "graph" or "module" (through its own code, bit for
                bit); None chooses by device and sizes.
            compile: whether to use torch.compile: seconds to minutes at the first call, quicker ones afterwards;
                as exact as without.
            chunk: how many members are read at a time, at every call anew; None holds them all, or as many as fit.

        Raises:
            DamagedError: a weight is not finite, or the bytes are not what the manifest says.
            TooLargeError: more than the memory that is free, even one by one.
            UsageError: no such device, execution or chunk.
        """
        skeleton, on, where = self.skeleton(), check_device(device), self.locations()

        def read(some: range, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
            part = self if len(some) == len(self) else self._of(list(some))
            return part.read(device, dtype, locations=where[some.start : some.stop])

        return Ensemble.reading(
            skeleton,
            read,
            self.ids,
            device=on,
            dtype=dtype,
            chunk=chunk,
            execution=execution,
            compile=compile,
        )

    def predict(self, data: Given, out: str | Path | None = None, **options: Any) -> Predictions:
        """Run the members on images and store their logits in float16 beside the manifest; return these predictions.

        Members that the set has already are not run again.

        Args:
            data: images: their name ("digits", "digits/train"), their place, or whatever `images.of` takes.
            out: a folder of a source; None for the one that the members lie in.
            options: name, device, dtype and batch of `predictions.predict`.

        Raises:
            UsageError, DamagedError, LockedError, StorageError, NetworkError, AccessError: as there.
        """
        return predictions.predict(self, data, out, **options)

    def predictions(self, name: str, **options: Any) -> Predictions:
        """Find stored predictions of these members, reading no logits yet; return them.

        Args:
            name: of the set ("digits-test").
            options: source and data of `predictions.predictions_of`.

        Raises:
            SourceNotFound, MemberNotFound, UsageError, FormatError, DamagedError, NetworkError: as there.
        """
        return predictions.predictions_of(self, name, **options)
