"""What images and their classes are called, and labels against the names of the classes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from checkpoints_zoo.errors import FormatError, UsageError
from checkpoints_zoo.images.loading import DATASETS
from checkpoints_zoo.images.sets import Found

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")


def facts(
    found: Found,
    name: str,
    split: str | None,
    classes: Sequence[str] | None,
    renamed: Mapping[str, str] | None,
) -> dict[str, Any]:
    """Check labels against the names of their classes; return the fields of ImageData.

    Args:
        found: what was read.
        name: of the images.
        split, classes, renamed: as in `of`.

    Raises:
        UsageError: classes that contradict those that the data names, or that have no labels.
        FormatError: a label that numbers no class.
    """
    where, labels, own = f"images {name!r}", found.labels, found.classes
    if labels is not None and all(label == -1 for label in labels):  # as `datasets` marks what has none
        labels = None
    for thing, names in (("classes", classes), ("renamed", renamed)):
        if names is not None and labels is None:
            raise UsageError(f"{thing} of {where}", expected="no such argument, since they have no labels", found="one")
    if classes is not None:
        names = tuple(classes) if not isinstance(classes, str) else ()
        if not names or not all(type(name) is str for name in names):
            raise UsageError(
                f"classes of {where}", expected="names, in the order of the labels", found=repr(classes)[:80]
            )
        if own and names != own:
            raise UsageError(
                f"classes of {where}",
                expected=f"the names that the data has, {', '.join(own[:6])}{', …' if len(own) > 6 else ''}",
                found=f"{', '.join(names[:6])}{', …' if len(names) > 6 else ''}",
                do="Give `renamed={…}`, from the data's names to others: then the order can't be wrong",
            )
        own = names
    numbers, own = _numbered(labels, own, where)
    own = _renamed(own, renamed, where)
    return {
        "name": name,
        "split": _plain(found.split) or ("test" if split is None else split_of(split)),
        "images": found.images,
        "labels": None if numbers is None else torch.tensor(numbers),
        "classes": () if numbers is None else own,
        "revision": found.revision,
    }


def _numbered(
    labels: Sequence[int] | Sequence[str] | None, own: tuple[str, ...], where: str
) -> tuple[list[int] | None, tuple[str, ...]]:
    """Return labels as numbers, and the names of the classes that they number; () where nothing names these."""
    if labels is None:
        return None, own
    if isinstance(labels[0], str):
        own = own or tuple(sorted({str(label) for label in labels}))
        positions = {name: at for at, name in enumerate(own)}
        numbers = [positions.get(label, -1) if isinstance(label, str) else -1 for label in labels]
    else:
        numbers = [label if isinstance(label, int) else -1 for label in labels]
    wrong = next((at for at, x in enumerate(numbers) if not 0 <= x < (len(own) or 2**63)), None)
    if wrong is None:
        return numbers, own
    names = f"{own[0]!r} to {own[-1]!r}" if isinstance(labels[0], str) else f"numbers from 0 to {len(own) - 1}"
    raise FormatError(
        f"labels of {where}",
        expected=f"{names}, of {len(own)} classes" if own else "numbers from 0",
        found=f"{labels[wrong]!r:.80} for input {wrong:,}",
    )


def _renamed(own: tuple[str, ...], renamed: Mapping[str, str] | None, where: str) -> tuple[str, ...]:
    unknown = [theirs for theirs in renamed or {} if theirs not in own]
    if unknown:
        expected = f"names that the data has ({', '.join(own[:12]) or 'none'})"
        raise UsageError(f"renamed classes of {where}", expected=expected, found=repr(unknown[0])[:80])
    if others := [ours for ours in (renamed or {}).values() if type(ours) is not str]:
        raise UsageError(f"renamed classes of {where}", expected="names", found=repr(others[0])[:80])
    names = tuple((renamed or {}).get(name, name) for name in own)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"classes of {where}", expected="each name once", found=f"{twice[0]!r} more than once")
    return names


def name_of(said: str | None, stem: str) -> str:
    """Return what to call images: as said, or a name from that of their place.

    Raises:
        UsageError: a name that no file could have, or that is another set's.
    """
    if said is None:
        stem = _plain(stem) or "images"
        return f"own-{stem}" if stem in DATASETS else stem
    if type(said) is not str or not _NAME.fullmatch(said) or said in DATASETS:
        expected = "lower-case letters, digits, '.', '_' and '-', at most 80; and no name of another set"
        raise UsageError("name of images", expected=expected, found=repr(said)[:100])
    return said


def split_of(split: str) -> str:
    """Check what to call a split; return it.

    Raises:
        UsageError: a name that no file could have.
    """
    if type(split) is not str or not _NAME.fullmatch(split):
        expected = "lower-case letters, digits, '.', '_' and '-'"
        raise UsageError("split of images", expected=expected, found=repr(split)[:80])
    return split


def _plain(stem: str) -> str:
    """Make a name of ours from any; return it, "" where nothing is left."""
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:72]
