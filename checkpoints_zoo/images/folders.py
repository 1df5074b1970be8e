"""Folders of image files: one folder a class, or images alone, which have no labels.

Classes and files come in the order of torchvision's ImageFolder: folder names sorted, then paths as they are walked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from checkpoints_zoo.errors import FormatError, SourceNotFound
from checkpoints_zoo.images import parquet
from checkpoints_zoo.images.pixels import Gathered, Wanted
from checkpoints_zoo.images.sets import SPLITS, Found, choose_split


def read(folder: Path, split: str | None, wanted: Wanted) -> Found:
    """Read the images below a folder, one file at a time; return them.

    Args:
        folder: has a folder a class, or images, or a folder a split ("train", "test").
        split: which of these, None for the only one or "test".
        wanted: what images are made into.

    Raises:
        SourceNotFound: no images there, or a file that can't be read.
        UsageError: no such split.
        FormatError: images beside class folders, a class without any, or a file that is none.
    """
    inside = sorted(each.name for each in _listing(folder) if each.is_dir())
    if inside and all(name in SPLITS for name in inside) and not list(_pictures([folder], deep=False)):
        chosen = choose_split(inside, split, f"folder {folder}")
        return _read(folder / chosen, chosen, wanted)
    return _read(folder, "", wanted)


def _read(folder: Path, split: str, wanted: Wanted) -> Found:
    where = f"folder {folder}"
    classes = sorted(each.name for each in _listing(folder) if each.is_dir())
    flat = list(_pictures([folder], deep=False))
    if not classes and not flat:
        found = f"none among {len(_listing(folder)):,} files" if _listing(folder) else "an empty folder"
        raise SourceNotFound(where, expected="PNG or JPEG images, or Parquet files", found=found, path=folder)
    if classes and flat:
        raise FormatError(
            where,
            expected="a folder for each class, or images alone",
            found=f"folders ({', '.join(classes[:4])}{', …' if len(classes) > 4 else ''}) beside {flat[0].name}",
            path=folder,
        )
    of_class = [flat] if flat else [list(_pictures([folder / name], deep=True)) for name in classes]
    empty = [name for name, files in zip(classes, of_class, strict=not flat) if not files]
    if empty and not flat:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise FormatError(where, expected="images in the folder of every class", found=f"none in {empty[0]!r}{more}")
    gathered = Gathered(wanted, sum(map(len, of_class)), where)
    for files in of_class:
        for file in files:
            parquet.add(file, gathered, f"image {file}")
    labels = None if flat else [at for at, files in enumerate(of_class) for _ in files]
    return Found(gathered.done(), labels, () if flat else tuple(classes), split)


def has_images(folder: Path) -> bool:
    """Say whether there is an image in a folder or below it."""
    return next(_pictures([folder], deep=True), None) is not None


def parquets(folder: Path) -> list[Path]:
    """Return the Parquet files below a folder, in order."""
    return sorted(p for p in _files([folder], deep=True) if p.suffix.lower() == ".parquet")


def _pictures(roots: list[Path], *, deep: bool) -> Iterator[Path]:
    for file in _files(roots, deep):
        if file.suffix.lower() in parquet.SUFFIXES:
            yield file
        elif file.suffix.lower() in parquet.OTHERS:
            do = "Convert it to PNG, which loses nothing, or take it out"
            raise FormatError(f"image {file}", expected="PNG or JPEG", found=file.suffix, do=do, path=file)


def _files(roots: list[Path], deep: bool) -> Iterator[Path]:
    """Yield files in order, hidden ones aside; behind links as well, but no folder twice."""
    seen = set()
    for root in roots:
        for at, inside, names in os.walk(root, followlinks=True):
            stat = Path(at).stat()
            if (stat.st_dev, stat.st_ino) in seen:
                inside[:] = []
                continue
            seen.add((stat.st_dev, stat.st_ino))
            inside[:] = sorted(name for name in inside if not name.startswith(".")) if deep else []
            yield from (Path(at, name) for name in sorted(names) if not name.startswith("."))


def _listing(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if not each.name.startswith(".")]
    except OSError as error:
        expected = "a folder that can be read"
        raise SourceNotFound(f"folder {folder}", expected=expected, found=f"{error.strerror}", path=folder) from error
