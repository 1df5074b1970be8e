"""Images at a place: a folder of images, Parquet files as `datasets` writes them, or a data set on the Hub.

Classes and files of a folder come in the order of torchvision's ImageFolder: folder names sorted, then paths as they
are walked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, TooLargeError, UsageError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.images.data_sets import DATASETS
from checkpoints_zoo.images.reading import SPLITS, Columns, Gathered, PixelFormat, RawImages, add, batches, choose_split
from checkpoints_zoo.networks.device import free_if_short
from checkpoints_zoo.sources import hub

PLACES = "a folder of images or of Parquet files, a Parquet file, or hf://datasets/ORG/NAME[@REVISION][/PATH]"

SUFFIXES = (".png", ".jpg", ".jpeg")
OTHERS = (".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")  # images that are not read

_NUMBERED = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")


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
    if given.partition("/")[0] in DATASETS:
        return None
    return Path(given) if "/" in given or os.sep in given or _exists(given) else None


def _exists(text: str) -> bool:
    """Say whether a file or folder of that name is there."""
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, no such user's home
        return False


def read_place(place: str | Path, split: str | None, columns: Columns, wanted: PixelFormat) -> tuple[RawImages, str]:
    """Read what lies at a place; return it, and what its name is there.

    Args:
        place: an address, or a path.
        split, columns, wanted: as in `of`.

    Raises:
        SourceNotFound: nothing there.
        UsageError, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: as in `of`.
    """
    if isinstance(place, str):
        found = _read_address(place, split, columns, wanted)
        return found, place.removeprefix(hub.SCHEME).split("/")[2].partition("@")[0]
    path = place.expanduser()
    if not _exists(str(path)):
        names = ", ".join(DATASETS)
        expected = f"{PLACES}; or a name: {names}"
        raise SourceNotFound(f"images {str(place)!r}", expected=expected, found="nothing there", path=path)
    whole = path.resolve()
    if not path.is_dir():
        if path.suffix.lower() in SUFFIXES:
            do = f"Give the folder that it lies in, {whole.parent}"
            raise UsageError(f"images {path}", expected=PLACES, found="one image", do=do)
        return replace(_read_tables([path], columns, wanted, f"file {path}"), split=split or ""), whole.stem
    files = _parquets(path)
    if not files:
        if columns != Columns():
            said = ", ".join(f"{key}={value!r}" for key, value in vars(columns).items() if value is not None)
            raise UsageError(f"folder {path}", expected="no columns, since it has image files", found=said)
        return _read_folder(path, split, wanted), whole.name
    if _has_images(path):
        found_both = f"both, such as {files[0].name}"
        raise FormatError(f"folder {path}", expected="images or Parquet files", found=found_both, path=path)
    some, part = _chosen([file.relative_to(path).as_posix() for file in files], split, f"folder {path}")
    return replace(
        _read_tables([path / file for file in some], columns, wanted, f"folder {path}"), split=part
    ), whole.name


def _read_folder(folder: Path, split: str | None, wanted: PixelFormat) -> RawImages:
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
        return _read_pictures(folder / chosen, chosen, wanted)
    return _read_pictures(folder, "", wanted)


def _read_pictures(folder: Path, split: str, wanted: PixelFormat) -> RawImages:
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
        found = f"none in {first_few([repr(name) for name in empty], 1)}"
        raise FormatError(where, expected="images in the folder of every class", found=found)
    gathered = Gathered(wanted, sum(map(len, of_class)), where)
    for files in of_class:
        for file in files:
            add(file, gathered, f"image {file}")
    labels = None if flat else [at for at, files in enumerate(of_class) for _ in files]
    return RawImages(gathered.done(), labels, () if flat else tuple(classes), split)


def _listing(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if not each.name.startswith(".")]
    except OSError as error:
        expected = "a folder that can be read"
        raise SourceNotFound(f"folder {folder}", expected=expected, found=f"{error.strerror}", path=folder) from error


def _pictures(roots: list[Path], *, deep: bool) -> Iterator[Path]:
    for file in _files(roots, deep):
        if file.suffix.lower() in SUFFIXES:
            yield file
        elif file.suffix.lower() in OTHERS:
            do = "Convert it to PNG, which loses nothing, or take it out"
            raise FormatError(f"image {file}", expected="PNG or JPEG", found=file.suffix, do=do, path=file)


def _has_images(folder: Path) -> bool:
    """Say whether there is an image in a folder or below it."""
    return next(_pictures([folder], deep=True), None) is not None


def _parquets(folder: Path) -> list[Path]:
    """Return the Parquet files below a folder, in order."""
    return sorted(p for p in _files([folder], deep=True) if p.suffix.lower() == ".parquet")


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


def _read_address(address: str, split: str | None, columns: Columns, wanted: PixelFormat) -> RawImages:
    """Read a data set on the Hub, its Parquet files of one split; return it.

    Args:
        address: `hf://datasets/ORG/NAME[@REVISION][/PATH]`, the path of a folder or a file.
        split, columns, wanted: as in `_chosen` and `_read_tables`.

    Raises:
        SourceNotFound, AccessError, NetworkError, DamagedError: it can't be had, or has no Parquet files.
        UsageError, FormatError, TooLargeError: as in `_chosen` and `_read_tables`.
    """
    from huggingface_hub import is_offline_mode

    place, path = hub.split_address(address, "images")
    repo = hub.resolve_address(place)
    where = f"{repo.label}@{repo.commit[:8]}{'/' if path else ''}{path}"
    if path.lower().endswith(".parquet"):
        some, name = [path], ""
    else:
        there = hub.list_files(repo, path, below=True)
        files = [file for file in there if file.lower().endswith(".parquet")]
        if not files:
            kinds = sorted({PurePosixPath(file).suffix or file for file in there})
            if is_offline_mode():
                expected = "Parquet files in the cache, since HF_HUB_OFFLINE is set"
                raise NetworkError(where, expected=expected, found="none", do="Load it once online")
            listed = f"{len(there):,} files ({', '.join(kinds[:8])})" if there else "no such folder, or an empty one"
            raise SourceNotFound(where, expected="Parquet files", found=listed, path=path)
        some, name = _chosen(files, split, where)
    found = _read_tables([hub.fetch_file(repo, file) for file in some], columns, wanted, where)
    return RawImages(found.images, found.labels, found.classes, name, repo.commit)


def _chosen(files: Sequence[str], split: str | None, where: str) -> tuple[list[str], str]:
    """Choose the files of one split among those of a folder; return them in order, and the split, "" for no name.

    A file says its split as the Hub's do: `test-00000-of-00002.parquet`, `test.parquet`, `test/0000.parquet`.

    Args:
        files: paths below the folder.
        split: None for the only one, or "test".
        where: what to call the folder in errors.

    Raises:
        UsageError: no such split, or files in several folders.
        FormatError: some files of a split are missing.
    """
    sorts: dict[tuple[str, str], list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        numbered = _NUMBERED.fullmatch(path.stem)
        name, folder = numbered[1] if numbered else path.stem, path.parent
        if not numbered and name not in SPLITS:
            name, folder = (folder.name, folder.parent) if folder.name in SPLITS else ("", folder)
        sorts.setdefault((str(folder), name), []).append(file)
    folders = sorted({folder for folder, _ in sorts})
    if len(folders) > 1:
        do = "Give the path of the folder, or of a file, that is meant"
        raise UsageError(
            where, expected="Parquet files of one data set", found=f"some in {first_few(folders, 6)}", do=do
        )
    name = choose_split([name for _, name in sorts], split if any(name for _, name in sorts) else None, where)
    some = sorts[folders[0], name]
    parts = [_NUMBERED.fullmatch(PurePosixPath(file).stem) for file in some]
    if parts[0] is not None and [int(part[2]) for part in parts if part] != list(range(int(parts[0][3]))):
        expected = f"files {name}-00000-of-{parts[0][3]}.parquet and so on, all of them"
        raise FormatError(where, expected=expected, found=first_few([PurePosixPath(f).name for f in some], 6))
    return some, name


def _read_tables(paths: Sequence[Path], columns: Columns, wanted: PixelFormat, where: str) -> RawImages:
    """Read the rows of Parquet files in order; return images and labels.

    Memory: the pixels, and a row group of the encoded images.

    Args:
        paths: of the files.
        columns: which have images and labels, where the files don't say.
        wanted: what images are made into.
        where: what to call the data in errors.

    Raises:
        FormatError: no Parquet, columns of other kinds, a row without an image, or one that does not fit the others.
        UsageError: which columns are meant is not clear.
        TooLargeError: a row group or pixels that memory has no room for.
    """
    schemas = [_schema(path) for path in paths]
    said = [_said(schema) for schema in schemas]
    kinds = {column: said[0].get(column, {}).get("_type", "") for column in schemas[0].names}
    image, label = columns.choose(kinds, where)
    classes = [_names(one.get(label or "", {})) for one in said]
    for path, names in zip(paths, classes, strict=True):
        if names != classes[0]:
            found = f"others in {path.name}"
            raise FormatError(where, expected=f"the classes of {paths[0].name} in every file", found=found, path=path)
    total = sum(pq.read_metadata(path).num_rows for path in paths)
    gathered = Gathered(wanted, total, where)
    labels: list[Any] = []
    for path, schema in zip(paths, schemas, strict=True):
        row = 0
        for images, numbers in _batches(path, schema, image, label):
            for encoded in images.to_pylist():
                what = f"row {row:,} of {path}"
                if encoded is None:
                    raise FormatError(what, expected="an image in the file", found="none", path=path)
                add(encoded, gathered, what)
                row += 1
            labels += [] if numbers is None else numbers.to_pylist()
    pixels = gathered.done()
    if label is None or all(x is None for x in labels):
        return RawImages(pixels)
    if None in labels:
        raise FormatError(where, expected="a label in every row, or in none", found=f"none in row {labels.index(None)}")
    return RawImages(pixels, labels, classes[0])


def _schema(path: Path) -> pa.Schema:
    try:
        schema = pq.read_schema(path)
        str(schema)  # the names of columns may be no text
        return schema
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        found = _kind(path) or f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"file {path}", expected="a Parquet file", found=found, path=path) from error


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return guess_kind(file.read(512))
    except OSError:
        return ""


def _said(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return what a file's metadata says of its columns, as `datasets` writes it; {} where it says nothing."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return {}
    known = features.items() if isinstance(features, Mapping) else ()
    return {column: kind for column, kind in known if isinstance(kind, dict)}


def _names(kind: Mapping[str, Any]) -> tuple[str, ...]:
    names = kind.get("names") if kind.get("_type") == "ClassLabel" else None
    return tuple(names) if isinstance(names, list) and all(type(name) is str for name in names) else ()


def _batches(
    path: Path, schema: pa.Schema, image: str, label: str | None
) -> Iterator[tuple[pa.Array, pa.Array | None]]:
    """Yield the encoded images and the labels of some rows at a time."""
    for column in (image, *([] if label is None else [label])):
        if column not in schema.names:
            raise FormatError(f"file {path}", expected=f"a column {column!r}", found=", ".join(schema.names)[:200])
    kind = schema.field(image).type
    nested = pa.types.is_struct(kind) and "bytes" in kind.names
    inner = kind.field("bytes").type if nested else kind
    if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
        raise FormatError(f"column {image!r} of {path}", expected="encoded images", found=str(kind)[:200])
    if label is not None:
        of = schema.field(label).type
        of = of.value_type if pa.types.is_dictionary(of) else of
        if not (pa.types.is_integer(of) or pa.types.is_string(of) or pa.types.is_large_string(of)):
            raise FormatError(f"column {label!r} of {path}", expected="whole numbers or names", found=str(of)[:200])
    names = [f"{image}.bytes" if nested else image, *([] if label is None else [label])]
    try:
        for batch in batches(path, names, partial(_check_room, path)):
            images = batch.column(image)
            labels = None if label is None else batch.column(label)
            yield pc.struct_field(images, "bytes") if nested else images, labels
    except (pa.ArrowException, OSError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise FormatError(f"file {path}", expected="rows that can be read", found=found, path=path) from error


def _check_room(path: Path, needed: int) -> None:
    if (free := free_if_short(needed)) is not None:
        found = f"{needed:,}, by its footer"
        raise TooLargeError(f"a row group of {path}", expected=f"at most {free:,} bytes", found=found, path=path)
