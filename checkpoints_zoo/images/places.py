"""Where Parquet files of images lie: in a folder, or in a repo of the Hub; and which of them are one split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.images import tables
from checkpoints_zoo.images.pixels import Wanted
from checkpoints_zoo.images.sets import SPLITS, Columns, Found, choose_split
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources import hub as addresses

_NUMBERED = re.compile(r"(.+?)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?")


def chosen(files: Sequence[str], split: str | None, where: str) -> tuple[list[str], str]:
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
        raise UsageError(where, expected="Parquet files of one data set", found=f"some in {_few(folders)}", do=do)
    name = choose_split([name for _, name in sorts], split if any(name for _, name in sorts) else None, where)
    some = sorts[folders[0], name]
    parts = [_NUMBERED.fullmatch(PurePosixPath(file).stem) for file in some]
    if parts[0] is not None and [int(part[2]) for part in parts if part] != list(range(int(parts[0][3]))):
        expected = f"files {name}-00000-of-{parts[0][3]}.parquet and so on, all of them"
        raise FormatError(where, expected=expected, found=_few([PurePosixPath(f).name for f in some]))
    return some, name


def on_hub(address: str, split: str | None, columns: Columns, wanted: Wanted) -> Found:
    """Read a data set on the Hub, its Parquet files of one split; return it.

    Args:
        address: `hf://datasets/ORG/NAME[@REVISION][/PATH]`, the path of a folder or a file.
        split, columns, wanted: as in `chosen` and `read`.

    Raises:
        SourceNotFound, AccessError, NetworkError, DamagedError: it can't be had, or has no Parquet files.
        UsageError, FormatError, TooLargeError: as in `chosen` and `read`.
    """
    from huggingface_hub import is_offline_mode

    place, path = addresses.apart(address, "images")
    repo = hub.resolve(place)
    where = f"{repo.label}@{repo.commit[:8]}{'/' if path else ''}{path}"
    if path.lower().endswith(".parquet"):
        some, name = [path], ""
    else:
        there = hub.files(repo, path, below=True)
        files = [file for file in there if file.lower().endswith(".parquet")]
        if not files:
            kinds = sorted({PurePosixPath(file).suffix or file for file in there})
            if is_offline_mode():
                expected = "Parquet files in the cache, since HF_HUB_OFFLINE is set"
                raise NetworkError(where, expected=expected, found="none", do="Load it once online")
            listed = f"{len(there):,} files ({', '.join(kinds[:8])})" if there else "no such folder, or an empty one"
            raise SourceNotFound(where, expected="Parquet files", found=listed, path=path)
        some, name = chosen(files, split, where)
    found = tables.read([hub.fetch(repo, file) for file in some], columns, wanted, where)
    return Found(found.images, found.labels, found.classes, name, repo.commit)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
