"""What a reader found: pixels, labels as they were written, the names of the classes where the data has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from checkpoints_zoo.errors import UsageError

SPLITS = ("test", "train", "validation", "valid", "val", "eval", "dev")


@dataclass(frozen=True)
class Found:
    """Images as they were read.

    Args:
        images: pixels or inputs, (input, channel, height, width).
        labels: a number or a name each, all -1 or None for none.
        classes: names in the order of the numbers, () where the data does not say.
        split, revision: of the place, "" where it has none.
    """

    images: Tensor
    labels: Sequence[int] | Sequence[str] | None = None
    classes: tuple[str, ...] = ()
    split: str = ""
    revision: str = ""


@dataclass(frozen=True)
class Columns:
    """Which columns have the images and the labels; None for those that say so themselves."""

    image: str | None = None
    label: str | None = None

    def choose(self, kinds: Mapping[str, str], where: str) -> tuple[str, str | None]:
        """Choose a column of images and one of labels; return their names, None for no labels.

        Args:
            kinds: what each column says it is: "Image", "ClassLabel", or anything else.
            where: what to call the data in errors.

        Raises:
            UsageError: none is said to be it, or several are.
        """
        image = self._one(self.image, "Image", "image", kinds, where)
        if image is None:
            raise UsageError(
                where,
                expected="a column of kind Image, or one called 'image'",
                found=_listed(kinds),
                do='Say which it is: `zoo.images.of(…, image="…", label="…")`',
            )
        return image, self._one(self.label, "ClassLabel", "label", kinds, where)

    def _one(self, said: str | None, kind: str, usual: str, kinds: Mapping[str, str], where: str) -> str | None:
        if said is not None:
            if said not in kinds:
                raise UsageError(where, expected=f"a column {said!r}", found=_listed(kinds))
            return said
        known = [column for column, of in kinds.items() if of == kind]
        if len(known) > 1:
            raise UsageError(
                where,
                expected=f"one column of kind {kind}",
                found=_listed(known),
                do=f'Say which: `zoo.images.of(…, {usual}="{known[0]}")`',
            )
        return known[0] if known else usual if usual in kinds else None


def _listed(columns: Iterable[str]) -> str:
    names = list(columns)
    return (", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")) or "no columns"


def choose_split(there: Iterable[str], wanted: str | None, where: str) -> str:
    """Choose a split of those that a place has; return it: the one wanted, the only one, or "test".

    Args:
        there: their names.
        wanted: None for none in particular.
        where: what to call the place in errors.

    Raises:
        UsageError: it is not there, or none is called "test".
    """
    names = sorted(set(there))
    if wanted is None and len(names) == 1:
        return names[0]
    chosen = "test" if wanted is None else wanted
    if chosen not in names:
        do = f'Give one of them: `split="{names[0]}"`' if wanted is None else ""
        raise UsageError(
            f"split {chosen!r} of {where}", expected=f"one of {', '.join(names)}", found="none such", do=do
        )
    return chosen
