"""Members whose weights are viewed through symmetries: canonical, aligned, transformed."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Self

from checkpoints_zoo.collection.member import Member
from checkpoints_zoo.collection.selected import Selected
from checkpoints_zoo.collection.views import Aligned, AlignedToMean, Canonical, Step, Transformed, View
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.symmetry import Element, files
from checkpoints_zoo.symmetry.applying import check_element
from checkpoints_zoo.symmetry.canonical import maps


class Viewed(Selected):
    """Selected members, and the ways to view them through symmetries."""

    @abstractmethod
    def _of(self, positions: list[int], view: View | None = None) -> Self:
        """Return the members at some positions, with this view or another one."""

    @abstractmethod
    def at(self, position: int) -> Member:
        """Return the member at a position."""

    @abstractmethod
    def member(self, id: int) -> Member:
        """Return a member by its id."""

    def canonicalize(
        self,
        *,
        scale: str | None = None,
        permute: str | None = None,
        streams: bool = False,
        approximate: bool = False,
    ) -> Self:
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
            UsageError: another word for scale or permute; norms as keys where scaling has made them equal.
            SymmetryError: an architecture whose symmetries can't be derived.

        >>> import checkpoints_zoo as zoo
        >>> members = zoo.load("convnet-digits", n=2).canonicalize(permute="norm")
        >>> first = members.stack()["conv1.weight"].flatten(2).norm(dim=2)[0].flatten()
        >>> bool((first.diff() <= 0).all())
        True
        """
        maps.check_words(scale, permute)
        # What can't be is refused here, not at the first batch; so is an architecture without a table.
        table = self.symmetry_table
        if scale is not None and permute == "norm":
            maps.check_norms(table, streams, approximate)
        return self._viewed(Canonical(scale, permute, streams, approximate))

    def align(self, to: int | str | Member = 0) -> Self:
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
        >>> both = members.stack()["conv1.weight"], members.align(to=0).stack()["conv1.weight"]
        >>> apart = [float(weight.diff(dim=0).norm()) for weight in both]
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

    def transform(self, symmetries: Element | str | Path) -> Self:
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
            rows, element = files.read(Path(symmetries), self.rows)
            origin = Path(symmetries).name
        check_element(self.symmetry_table, element, len(rows))
        return self._viewed(Transformed(rows, element, origin))

    def symmetry(self, position: int) -> Element:
        """Return what this view applies to the member at a position: permutations (unit), scales (value).

        `zoo.symmetry.inverse` undoes it: `apply(table, weights, inverse(table, element))` gives the stored weights,
        those that were rescaled up to rounding. The table is `members.symmetry_table`.

        Raises:
            MemberNotFound, UsageError: no such position.
        """
        one = self.at(position)
        element = self._of([self.keys.index((one.id, one.epoch))]).symmetries()
        permutations = {name: p[0] for name, p in element.permutations.items()}
        return Element(permutations, {name: s[0] for name, s in element.scales.items()})

    def before(self) -> Self:
        """Return these members without the last step of their view; the same members if there is none."""
        return self._of(list(range(len(self))), View(self.view.steps[:-1]))

    def _viewed(self, step: Step) -> Self:
        return self._of(list(range(len(self))), View((*self.view.steps, step)))
