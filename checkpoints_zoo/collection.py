"""Collections: rows of a manifest and the bytes they name, selected, stacked and made into an ensemble."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from checkpoints_zoo import copying, manifest, selection, store, symmetry_files
from checkpoints_zoo.canonical import maps
from checkpoints_zoo.dataset import WeightDataset, label_table
from checkpoints_zoo.device import check_device
from checkpoints_zoo.ensemble import Ensemble
from checkpoints_zoo.errors import MemberNotFound, SelectionError, UsageError
from checkpoints_zoo.finding import Found
from checkpoints_zoo.member import Member
from checkpoints_zoo.selected import Selected
from checkpoints_zoo.symmetry import Element
from checkpoints_zoo.symmetry.applying import check_element
from checkpoints_zoo.views import Aligned, AlignedToMean, Canonical, Given, Step, View


class Collection(Selected):
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
        return Member(self.name, row, one)

    def _of(self, positions: list[int], view: View | None = None) -> Collection:
        rows = self.rows if positions == list(range(len(self))) else manifest.take(self.rows, positions)
        with_view = self.view if view is None else view
        return Collection(
            self.source, self.commit, self.description, rows, self._architecture, self._skeletons, with_view
        )

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

    def canonicalize(
        self,
        *,
        scale: str | None = None,
        permute: str | None = None,
        streams: bool = False,
        approximate: bool = False,
    ) -> Collection:
        """Remove symmetries from the weights as they are read, scales first; return the same members so viewed.

        Two members that differ by a symmetry of the network alone get the same weights. Scaled weights are float32 or
        wider, whatever is stored.

        Args:
            scale: "unit-norm" gives each unit's incoming row the norm 1, and gains 1 or -1; None leaves scales.
            permute: sorts the units of each layer, in descending order, by their "first" weight, by the largest
                ("max") or by their norm ("norm"); None leaves them.
            streams: whether the units of residual streams are sorted too, or inner channels only.
            approximate: whether to scale rows before norms without running statistics as well, which changes the
                function by the order of their eps.

        Raises:
            UsageError: another word for scale or permute.
            SymmetryError: an architecture whose symmetries can't be derived.

        >>> import checkpoints_zoo as zoo
        >>> members = zoo.load("convnet-digits", n=2).canonicalize(permute="norm")
        >>> first = members.stack()["0.weight"].flatten(2).norm(dim=2)[0].flatten()
        >>> bool((first.diff() <= 0).all())
        True
        """
        maps.check_words(scale, permute)
        self.symmetry_table  # noqa: B018 - an architecture that has none is refused here, not at the first batch
        return self._viewed(Canonical(scale, permute, streams, approximate))

    def align(self, to: int | str | Member = 0) -> Collection:
        """Permute the members' units so that they match a reference, as they are read; return them so viewed.

        Each member is matched when it is first read, and what was found is kept for this view and its slices.

        Args:
            to: id of a selected member (its last selected snapshot), a `Member` of the same architecture, or "mean":
                the mean of all selected members, aligned; for that all are held in memory once.

        Raises:
            MemberNotFound: no such member is selected.
            UsageError: neither an id nor a member nor "mean".
            SymmetryError: an architecture whose symmetries can't be derived.

        >>> import checkpoints_zoo as zoo
        >>> members = zoo.load("convnet-digits", n=2)
        >>> apart = [float(w["0.weight"].diff(dim=0).norm()) for w in (members.stack(), members.align(to=0).stack())]
        >>> apart[1] < apart[0]
        True
        """
        self.symmetry_table  # noqa: B018
        if isinstance(to, str):
            if to != "mean":
                raise UsageError("align", expected="a member's id, a member or 'mean'", found=repr(to)[:80])
            return self._viewed(AlignedToMean(self.match_mean))
        reference = to if isinstance(to, Member) else self.member(to)
        same = frozenset() if isinstance(to, Member) else frozenset([(reference.id, reference.epoch)])
        words = f"member {reference.id}" + (f" of {to.collection}" if isinstance(to, Member) else "")
        return self._viewed(Aligned(words, reference.state_dict, same))

    def transform(self, symmetries: Element | str | Path) -> Collection:
        """Apply given symmetries to the weights as they are read; return the members so viewed.

        Args:
            symmetries: one a member, in the members' order, or a file that `write_symmetries` wrote.

        Raises:
            UsageError: no symmetries of this network, or not one a member.
            SourceNotFound, FormatError, DamagedError: no such file, another kind of file, or for other weights.
        """
        if isinstance(symmetries, Element):
            rows, element, origin = {key: i for i, key in enumerate(self.keys)}, symmetries, "the caller"
        else:
            rows, element = symmetry_files.read(Path(symmetries), self.rows)
            origin = Path(symmetries).name
        check_element(self.symmetry_table, element, len(rows))
        return self._viewed(Given(rows, element, origin))

    def symmetry(self, position: int) -> Element:
        """Return what this view applies to the member at a position: permutations (unit), scales (value).

        `zoo.symmetry.inverse` undoes it: `apply(table, weights, inverse(table, element))` gives the stored weights,
        those that were rescaled up to rounding. The table is `members.symmetry_table`.

        Raises:
            MemberNotFound, UsageError: no such position.
        """
        one = self[position]
        element = self._of([self.keys.index((one.id, one.epoch))]).symmetries()
        permutations = {name: p[0] for name, p in element.permutations.items()}
        return Element(permutations, {name: s[0] for name, s in element.scales.items()})

    def _viewed(self, step: Step) -> Collection:
        return self._of(list(range(len(self))), View((*self.view.steps, step)))

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
        return Ensemble(skeleton, self.read(check_device(device), dtype), self.ids)
