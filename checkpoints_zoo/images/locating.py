"""Names, paths and addresses of images: which one a text is, and what lies there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from checkpoints_zoo.errors import FormatError, SourceNotFound, UsageError
from checkpoints_zoo.images import decoding, folders, loading, places, tables
from checkpoints_zoo.images.image_data import ImageData
from checkpoints_zoo.images.pixels import Wanted
from checkpoints_zoo.images.sets import Columns, Found
from checkpoints_zoo.sources import hub

PLACES = "a folder of images or of Parquet files, a Parquet file, or hf://datasets/ORG/NAME[@REVISION][/PATH]"


def place_of(given: str | os.PathLike[str]) -> str | Path | None:
    """Tell a place from a name; return an address as it is, a path as a Path, None for a name.

    Names win: `digits` and `digits/train` are the set's, `./digits` is a folder. A path has a slash or is there.

    >>> place_of("digits/train"), place_of("hf://datasets/me/mine")
    (None, 'hf://datasets/me/mine')
    >>> print(place_of("./digits"))
    digits
    """
    if not isinstance(given, str):
        return Path(given)
    if given.startswith(hub.SCHEME):
        return given
    if given.partition("/")[0] in loading.DATASETS:
        return None
    return Path(given) if "/" in given or os.sep in given or exists(given) else None


def named(text: str, split: str | None) -> ImageData:
    """Load a set by name ("digits", "digits/train"); return it.

    Args:
        text: the name.
        split: that is wanted beside it, None for none in particular.

    Raises:
        UsageError: no such set or split.
        SourceNotFound, AccessError, NetworkError, DamagedError, FormatError: as in `load`.
    """
    name, _, inside = text.partition("/")
    if name not in loading.DATASETS:
        try:
            loading.load(name)
        except UsageError as error:
            error.expected += f"; or a place: {PLACES}"
            error.do += ", or give a path with a slash in it, or one that is there"
            raise
    if inside and split and inside != split:
        raise UsageError(f"split of {text!r}", expected=repr(inside), found=repr(split))
    try:
        return loading.load(name, inside or split or "test")
    except UsageError as error:
        error.do = f"A folder of that name is ./{text}"
        raise


def exists(text: str) -> bool:
    """Say whether a file or folder of that name is there."""
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, no such user's home
        return False


def read(place: str | Path, split: str | None, columns: Columns, wanted: Wanted) -> tuple[Found, str]:
    """Read what lies at a place; return it, and what its name is there.

    Args:
        place: an address, or a path.
        split, columns, wanted: as in `of`.

    Raises:
        SourceNotFound: nothing there.
        UsageError, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: as in `of`.
    """
    if isinstance(place, str):
        found = places.on_hub(place, split, columns, wanted)
        return found, place.removeprefix(hub.SCHEME).split("/")[2].partition("@")[0]
    path = place.expanduser()
    if not exists(str(path)):
        names = ", ".join(loading.DATASETS)
        expected = f"{PLACES}; or a name: {names}"
        raise SourceNotFound(f"images {str(place)!r}", expected=expected, found="nothing there", path=path)
    whole = path.resolve()
    if not path.is_dir():
        if path.suffix.lower() in decoding.SUFFIXES:
            do = f"Give the folder that it lies in, {whole.parent}"
            raise UsageError(f"images {path}", expected=PLACES, found="one image", do=do)
        return replace(tables.read([path], columns, wanted, f"file {path}"), split=split or ""), whole.stem
    files = folders.parquets(path)
    if not files:
        if columns != Columns():
            said = ", ".join(f"{key}={value!r}" for key, value in vars(columns).items() if value is not None)
            raise UsageError(f"folder {path}", expected="no columns, since it has image files", found=said)
        return folders.read(path, split, wanted), whole.name
    if folders.has_images(path):
        found_both = f"both, such as {files[0].name}"
        raise FormatError(f"folder {path}", expected="images or Parquet files", found=found_both, path=path)
    some, part = places.chosen([file.relative_to(path).as_posix() for file in files], split, f"folder {path}")
    return replace(
        tables.read([path / file for file in some], columns, wanted, f"folder {path}"), split=part
    ), whole.name
