"""Reading of images at a place: a folder of images, Parquet files, or a data set on the Hub.

Classes and files of a folder have the order of torchvision's ImageFolder: sorted folder names, then the sorted paths in
each folder.

This is one file, because one function tells the kinds of places apart, and the kinds share the reading of tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.images import parquet
from checkpoints_zoo.images.data_sets import DATASETS
from checkpoints_zoo.images.reading import SPLIT_NAMES, Columns, ImageBuffer, PixelFormat, RawImages, choose_split
from checkpoints_zoo.sources import hub, hub_addresses

EXPECTED_PLACES = "a folder of images or of Parquet files, a Parquet file, or hf://datasets/ORG/NAME[@REVISION][/PATH]"

READ_SUFFIXES = (".png", ".jpg", ".jpeg")
# Suffixes of image files that are refused.
REFUSED_SUFFIXES = (".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")

_NUMBERED_STEM_PATTERN = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")


def parse_place(place_or_name: str | os.PathLike[str]) -> str | Path | None:
    """Decide whether a text is the place of images or a data set's name; return an address unchanged, a path as a Path,
    and None for a name.

    A name of a data set takes precedence: `digits` and `digits/train` are data sets, `./digits` is a folder. Any other
        text is a path if it contains a slash or exists.

    >>> parse_place("digits/train"), parse_place("hf://datasets/me/mine")
    (None, 'hf://datasets/me/mine')
    >>> print(parse_place("./digits"))
    digits
    """
    if not isinstance(place_or_name, str):
        return Path(place_or_name)
    if place_or_name.startswith(hub_addresses.ADDRESS_SCHEME):
        return place_or_name
    if place_or_name.partition("/")[0] in DATASETS:
        return None
    return (
        Path(place_or_name)
        if "/" in place_or_name or os.sep in place_or_name or _is_existing_path(place_or_name)
        else None
    )


def _is_existing_path(text: str) -> bool:
    """Say whether a text is the name of a file or folder that exists."""
    try:
        return bool(text) and Path(text).expanduser().exists()
    # The text is too long, contains a zero byte, or names the home folder of an unknown user.
    except (OSError, ValueError, RuntimeError):
        return False


def read_place(
    place: str | Path, split: str | None, columns: Columns, pixel_format: PixelFormat
) -> tuple[RawImages, str]:
    """Read the images at a place; return the images, and the last part of the place's name.

    Args:
        place: place of the images: an address on the Hub, or a path.
        split, columns, pixel_format: the same arguments as in `of`.

    Raises:
        SourceNotFound: there is nothing at the path or address.
        UsageError, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: for the same reasons as in
            `of`.
    """
    if isinstance(place, str):
        raw = _read_address(place, split, columns, pixel_format)
        return raw, place.removeprefix(hub_addresses.ADDRESS_SCHEME).split("/")[2].partition("@")[0]
    path = place.expanduser()
    if not _is_existing_path(str(path)):
        names = ", ".join(DATASETS)
        expected = f"{EXPECTED_PLACES}; or a name: {names}"
        raise SourceNotFound(f"images {str(place)!r}", expected=expected, found="no such file or folder", path=path)
    resolved = path.resolve()
    if not path.is_dir():
        if path.suffix.lower() in READ_SUFFIXES:
            do = f"Give the folder that it lies in, {resolved.parent}"
            raise UsageError(f"images {path}", expected=EXPECTED_PLACES, found="one image", do=do)
        return replace(_read_tables([path], columns, pixel_format, f"file {path}"), split=split or ""), resolved.stem
    parquet_files = _parquet_paths(path)
    if not parquet_files:
        if columns != Columns():
            columns_text = ", ".join(f"{key}={value!r}" for key, value in vars(columns).items() if value is not None)
            raise UsageError(
                f"folder {path}", expected="no arguments for columns, since it has image files", found=columns_text
            )
        return _read_folder(path, split, pixel_format), resolved.name
    if _has_images(path):
        both_text = f"both, {parquet_files[0].name} beside images"
        raise FormatError(f"folder {path}", expected="images or Parquet files", found=both_text, path=path)
    files_of_split, split_name = _choose_files(
        [file.relative_to(path).as_posix() for file in parquet_files], split, f"folder {path}"
    )
    return replace(
        _read_tables([path / file for file in files_of_split], columns, pixel_format, f"folder {path}"),
        split=split_name,
    ), resolved.name


def _read_folder(folder: Path, split: str | None, pixel_format: PixelFormat) -> RawImages:
    """Read the images below a folder, one file at a time; return the images.

    Args:
        folder: the folder, which contains a folder for each class, or images, or a folder for each split ("train",
            "test").
        split: name of the requested split; None for the only split, or for "test" if there are several.
        pixel_format: the size and channels to which images are converted.

    Raises:
        SourceNotFound: there are no images, or a file can't be read.
        UsageError: there is no such split.
        FormatError: there are images beside class folders, a class has no images, or a file is not an image.
    """
    subfolders = sorted(each.name for each in _list_folder(folder) if each.is_dir())
    if (
        subfolders
        and all(name in SPLIT_NAMES for name in subfolders)
        and not list(_image_paths([folder], recursive=False))
    ):
        chosen_split = choose_split(subfolders, split, f"folder {folder}")
        return _read_class_folders(folder / chosen_split, chosen_split, pixel_format)
    return _read_class_folders(folder, "", pixel_format)


def _read_class_folders(folder: Path, split: str, pixel_format: PixelFormat) -> RawImages:
    data_name = f"folder {folder}"
    classes = sorted(each.name for each in _list_folder(folder) if each.is_dir())
    unlabelled_files = list(_image_paths([folder], recursive=False))
    if not classes and not unlabelled_files:
        found = f"none of them among {len(_list_folder(folder)):,} files" if _list_folder(folder) else "an empty folder"
        raise SourceNotFound(data_name, expected="PNG or JPEG images, or Parquet files", found=found, path=folder)
    if classes and unlabelled_files:
        raise FormatError(
            data_name,
            expected="a folder for each class, or images alone",
            found=f"folders ({', '.join(classes[:4])}{', …' if len(classes) > 4 else ''}) "
            f"beside {unlabelled_files[0].name}",
            path=folder,
        )
    files_by_class = (
        [unlabelled_files]
        if unlabelled_files
        else [list(_image_paths([folder / name], recursive=True)) for name in classes]
    )
    empty_classes = [name for name, files in zip(classes, files_by_class, strict=not unlabelled_files) if not files]
    if empty_classes and not unlabelled_files:
        found = f"none in {first_few([repr(name) for name in empty_classes], 1)}"
        raise FormatError(data_name, expected="images in the folder of every class", found=found)
    buffer = ImageBuffer(pixel_format, sum(map(len, files_by_class)), data_name)
    for files in files_by_class:
        for file in files:
            buffer.add_encoded(file, f"image {file}")
    labels = None if unlabelled_files else [at for at, files in enumerate(files_by_class) for _ in files]
    return RawImages(buffer.finish(), labels, () if unlabelled_files else tuple(classes), split)


def _list_folder(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if not each.name.startswith(".")]
    except OSError as error:
        expected = "a folder that can be read"
        raise SourceNotFound(f"folder {folder}", expected=expected, found=f"{error.strerror}", path=folder) from error


def _image_paths(folders: list[Path], *, recursive: bool) -> Iterator[Path]:
    for file in _walk_files(folders, recursive):
        if file.suffix.lower() in READ_SUFFIXES:
            yield file
        elif file.suffix.lower() in REFUSED_SUFFIXES:
            do = "Convert it to PNG, which loses nothing, or remove it"
            raise FormatError(f"image {file}", expected="PNG or JPEG", found=file.suffix, do=do, path=file)


def _has_images(folder: Path) -> bool:
    """Say whether a folder, or any folder below it, contains an image."""
    return next(_image_paths([folder], recursive=True), None) is not None


def _parquet_paths(folder: Path) -> list[Path]:
    """Return the Parquet files below a folder, in order."""
    return sorted(p for p in _walk_files([folder], recursive=True) if p.suffix.lower() == ".parquet")


def _walk_files(folders: list[Path], recursive: bool) -> Iterator[Path]:
    """Yield files that are not hidden, in order; links are followed, but no folder is visited twice."""
    visited_folders = set()
    for folder in folders:
        for parent, folder_names, file_names in os.walk(folder, followlinks=True):
            stat = Path(parent).stat()
            if (stat.st_dev, stat.st_ino) in visited_folders:
                folder_names[:] = []
                continue
            visited_folders.add((stat.st_dev, stat.st_ino))
            folder_names[:] = sorted(name for name in folder_names if not name.startswith(".")) if recursive else []
            yield from (Path(parent, name) for name in sorted(file_names) if not name.startswith("."))


def _read_address(address: str, split: str | None, columns: Columns, pixel_format: PixelFormat) -> RawImages:
    """Read the Parquet files of one split of a data set on the Hub; return the images.

    Args:
        address: address `hf://datasets/ORG/NAME[@REVISION][/PATH]`, where PATH is a folder or a file.
        split, columns, pixel_format: the same arguments as in `_choose_files` and `_read_tables`.

    Raises:
        SourceNotFound, AccessError, NetworkError, DamagedError: the files can't be fetched, or there is no Parquet
            file.
        UsageError, FormatError, TooLargeError: for the same reasons as in `_choose_files` and `_read_tables`.
    """
    from huggingface_hub import is_offline_mode

    place, path = hub_addresses.split_address(address, "images")
    repo = hub.resolve_address(place)
    data_name = f"{repo.label}@{repo.commit[:8]}{'/' if path else ''}{path}"
    if path.lower().endswith(".parquet"):
        chosen_files, split_name = [path], ""
    else:
        all_files = hub.list_files(repo, path, recursive=True)
        parquet_files = [file for file in all_files if file.lower().endswith(".parquet")]
        if not parquet_files:
            kinds = sorted({PurePosixPath(file).suffix or file for file in all_files})
            if is_offline_mode():
                expected = "Parquet files in the cache, since HF_HUB_OFFLINE is set"
                raise NetworkError(data_name, expected=expected, found="none", do="Load it once online")
            found = (
                f"{len(all_files):,} files ({', '.join(kinds[:8])})" if all_files else "no such folder, or an empty one"
            )
            raise SourceNotFound(data_name, expected="Parquet files", found=found, path=path)
        chosen_files, split_name = _choose_files(parquet_files, split, data_name)
    raw = _read_tables([hub.fetch_file(repo, file) for file in chosen_files], columns, pixel_format, data_name)
    return replace(raw, split=split_name, revision=repo.commit)


def _choose_files(files: Sequence[str], split: str | None, data_name: str) -> tuple[list[str], str]:
    """Choose the files of one split in a folder; return them in order, and the split's name ("" if files have no
    split).

    The split is part of the path, as on the Hub: `test-00000-of-00002.parquet`, `test.parquet`, `test/0000.parquet`.

    Args:
        files: paths of the files below the folder.
        split: the name of a split; None chooses the only split, or "test" if there are several.
        data_name: name of the folder in error texts.

    Raises:
        UsageError: there is no such split, or its files are in several folders.
        FormatError: some files of a split are missing.
    """
    files_by_folder_and_split: dict[tuple[str, str], list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        numbered_match = _NUMBERED_STEM_PATTERN.fullmatch(path.stem)
        name, folder = numbered_match[1] if numbered_match else path.stem, path.parent
        if not numbered_match and name not in SPLIT_NAMES:
            name, folder = (folder.name, folder.parent) if folder.name in SPLIT_NAMES else ("", folder)
        files_by_folder_and_split.setdefault((str(folder), name), []).append(file)
    folders = sorted({folder for folder, _ in files_by_folder_and_split})
    if len(folders) > 1:
        do = "Give the path of one folder, or of one file"
        raise UsageError(
            data_name, expected="Parquet files of one data set", found=f"some in {first_few(folders, 6)}", do=do
        )
    name = choose_split(
        [name for _, name in files_by_folder_and_split],
        split if any(name for _, name in files_by_folder_and_split) else None,
        data_name,
    )
    chosen_files = files_by_folder_and_split[folders[0], name]
    numbered_matches = [_NUMBERED_STEM_PATTERN.fullmatch(PurePosixPath(file).stem) for file in chosen_files]
    if numbered_matches[0] is not None and [int(part[2]) for part in numbered_matches if part] != list(
        range(int(numbered_matches[0][3]))
    ):
        expected = f"files {name}-00000-of-{numbered_matches[0][3]}.parquet and so on, all of them"
        raise FormatError(
            data_name, expected=expected, found=first_few([PurePosixPath(f).name for f in chosen_files], 6)
        )
    return chosen_files, name


def _read_tables(
    parquet_paths: Sequence[Path], columns: Columns, pixel_format: PixelFormat, data_name: str
) -> RawImages:
    """Read the rows of Parquet files in order; return images and labels.

    Args:
        parquet_paths: paths of the Parquet files.
        columns: names of the requested columns of images and labels.
        pixel_format: the size and channels to which images are converted.
        data_name: name of the data in error texts.

    Raises:
        FormatError: a file is not Parquet, a column has another type, a row has no image, or an image does not fit the
            others.
        UsageError: a requested column is missing, or no column is requested and several columns may hold the images.
        TooLargeError: a row group or the pixels do not fit into memory.
    """
    footers = [parquet.read_footer(path, data_name) for path in parquet_paths]
    features = [parquet.features_of(schema) for schema, _ in footers]
    column_kinds = {column: features[0].get(column, {}).get("_type", "") for column in footers[0][0].names}
    image_column, label_column = columns.choose_columns(column_kinds, data_name)
    classes_by_file = [_class_names(file_features.get(label_column or "", {})) for file_features in features]
    for path, names in zip(parquet_paths, classes_by_file, strict=True):
        if names != classes_by_file[0]:
            expected, found = f"the classes of {parquet_paths[0].name} in every file", f"other classes in {path.name}"
            raise FormatError(data_name, expected=expected, found=found, path=path)
    buffer = ImageBuffer(pixel_format, sum(rows for _, rows in footers), data_name)
    labels = parquet.read_rows(parquet_paths, image_column, label_column, buffer)
    pixels = buffer.finish()
    if labels is None or all(x is None for x in labels):
        return RawImages(pixels)
    if None in labels:
        expected, found = "a label in every row, or in none", f"none in row {labels.index(None)}"
        raise FormatError(data_name, expected=expected, found=found)
    return RawImages(pixels, labels, classes_by_file[0])


def _class_names(feature: Mapping[str, Any]) -> tuple[str, ...]:
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    return tuple(names) if isinstance(names, list) and all(type(name) is str for name in names) else ()
