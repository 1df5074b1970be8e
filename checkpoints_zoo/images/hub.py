"""Where Parquet files of images lie: in a folder, or in a repo of the Hub; and which of them are one split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow.parquet as pq
import torch

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.images import parquet
from checkpoints_zoo.images.hub_sets import HUB_SETS, HubSet
from checkpoints_zoo.images.image_data import ImageData
from checkpoints_zoo.images.pixels import Wanted
from checkpoints_zoo.images.sets import SPLITS, Columns, Found, choose_split
from checkpoints_zoo.sources import hub

# Data sets read from the Hub, through the client's cache: a name and a split -> the images at a commit.


CARDS = ("README.md", "dataset_infos.json")


@lru_cache(maxsize=2)
def read(name: str, split: str) -> ImageData:
    """Read one split of a data set on the Hub; return it, the same object while it is among the last two asked for.

    Args:
        name: a key of `HUB_SETS`.
        split: "test" or "train".

    Raises:
        SourceNotFound: no such repo, or not the files that it should have.
        AccessError: a repo that this login may not read.
        NetworkError: no answer; or offline, and the split is not in the cache.
        DamagedError: other bytes came than were announced; they are not kept.
        FormatError: the repo holds something else than expected.
    """
    hub_set = HUB_SETS[name]
    repo = hub.resolve(f"{hub.SCHEME}datasets/{hub_set.repo}")
    where = f"data set {name!r} of {repo.label}@{repo.commit[:8]}"
    paths = [hub.fetch(repo, inside) for inside in _files(repo, hub_set, split, where)]
    total = parquet.rows(paths, hub_set.inputs[split], where)
    ours = _positions(_class_names(repo, hub_set, paths[0], where), hub_set, where)
    pixels, labels = parquet.decode(paths, hub_set, total, where)
    return ImageData(
        name, split, torch.from_numpy(pixels), torch.from_numpy(ours[labels]), hub_set.classes, repo.commit
    )


def _files(repo: hub.Repo, hub_set: HubSet, split: str, where: str) -> list[str]:
    """Return the paths of a split's files in the repo, in order; all of them, or an error."""
    from huggingface_hub import is_offline_mode

    stem = f"{hub_set.folder}/{hub_set.splits[split]}"
    numbered = re.compile(rf"{re.escape(stem)}-(\d{{5}})-of-(\d{{5}})(?:-[0-9a-f]+)?\.parquet")
    listed = hub.files(repo, hub_set.folder)
    found = [(int(match[1]), int(match[2]), path) for path in listed if (match := numbered.fullmatch(path))]
    if found and [number for number, _, _ in sorted(found)] == list(range(found[0][1])):
        return [path for _, _, path in sorted(found)]
    expected = f"files {stem}-00000-of-{found[0][1] if found else 1:05}.parquet"
    expected += " and so on" if found else ""
    if is_offline_mode():
        here = f"{len(found)} of {found[0][1]}" if found else "none of them"
        expected += " in the cache, since HF_HUB_OFFLINE is set"
        raise NetworkError(where, expected=expected, found=here, do="Load it once online")
    others = ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")
    raise SourceNotFound(where, expected=expected, found=others or "no such folder", do=parquet.CHANGED)


def _class_names(repo: hub.Repo, hub_set: HubSet, path: Path, where: str) -> Sequence[str]:
    """Return the names of the classes in the order of the repo's labels, from the Parquet file or from the card.

    The files of the oldest repos do not say themselves what their columns are.
    """
    import datasets
    import yaml

    features = datasets.Features.from_arrow_schema(pq.read_schema(path))
    if not _fits(features, hub_set):
        for card in CARDS:
            if not hub.has(repo, card):
                continue
            try:
                described = datasets.info.DatasetInfosDict.from_directory(hub.fetch(repo, card).parent)
            except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
                found = f"{type(error).__name__}: {error}"[:200]
                raise FormatError(where, expected=f"a card {card}", found=found, do=parquet.CHANGED) from error
            alone = next(iter(described.values())) if len(described) == 1 else None
            chosen = described.get(hub_set.config, alone)
            if chosen is not None and chosen.features is not None:
                features = chosen.features
                break
    if not _fits(features, hub_set):
        expected = f"column {hub_set.image} of kind Image, column {hub_set.label} of kind ClassLabel"
        kinds = ", ".join(f"{column} of kind {type(kind).__name__}" for column, kind in features.items())
        raise FormatError(where, expected=expected, found=kinds[:300] or "no columns", do=parquet.CHANGED)
    names: Sequence[str] = features[hub_set.label].names
    return names


def _fits(features: object, hub_set: HubSet) -> bool:
    """Say whether a repo's features have our columns as an image and a class."""
    import datasets

    return (
        isinstance(features, dict)
        and isinstance(features.get(hub_set.image), datasets.Image)
        and isinstance(features.get(hub_set.label), datasets.ClassLabel)
    )


def _positions(names: Sequence[str], hub_set: HubSet, where: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Compare the repo's class names with ours; return our position of each of them, (class,)."""
    right = {theirs: ours for ours, theirs in hub_set.spelled.items()}
    corrected = tuple(right.get(name, name) for name in names)
    if corrected in hub_set.orders():
        return np.array([hub_set.classes.index(name) for name in corrected], np.int64)
    expected = hub_set.orders()[0]
    if len(names) != len(expected):
        raise FormatError(where, expected=f"{len(expected)} classes", found=str(len(names)), do=parquet.CHANGED)
    differing = [at for at, name in enumerate(corrected) if name != expected[at]]
    first = differing[0]
    others = f", and {len(differing) - 1} more that differ" if len(differing) > 1 else ""
    raise FormatError(
        where,
        expected=f"class {first} to be {expected[first]!r}",
        found=f"{names[first]!r}{others}",
        do=parquet.CHANGED,
    )


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

    place, path = hub.apart(address, "images")
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
    found = parquet.read([hub.fetch(repo, file) for file in some], columns, wanted, where)
    return Found(found.images, found.labels, found.classes, name, repo.commit)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
