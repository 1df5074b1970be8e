"""The files of a repo or a folder: sizes, what names their content, and their first bytes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.hub_errors import asking
from checkpoints_zoo.sources.ranges import Remote

SAMPLES, SAMPLE_BYTES = 8, 4096


@dataclass(frozen=True)
class File:
    """A file that is looked into.

    Args:
        size: in bytes.
        content: names its content: two files with one name hold the same. "" where nobody knows.
        large: whether git itself does not keep it.
        read: (offset, length) -> bytes, fewer at the end of the file.
    """

    size: int
    content: str
    large: bool
    read: Callable[[int, int], bytes] = field(repr=False, compare=False)


Files = Mapping[str, File]


def on_hub(repo: hub.Repo) -> dict[str, File]:
    """List the files of a repo at its commit; return them by path.

    Raises:
        SourceNotFound, AccessError, NetworkError: see `hub.resolve`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def listed() -> list[RepoFile]:
        rows = HfApi(**hub.sent()).list_repo_tree(repo.id, recursive=True, revision=repo.commit, repo_type="dataset")
        return [row for row in rows if isinstance(row, RepoFile)]

    def reader(inside: str) -> Callable[[int, int], bytes]:
        return lambda offset, length: Remote.of(repo, inside).bytes_at(offset, length)

    with asking(repo.label, f"files of {repo.label}"):
        rows = hub.patiently(listed, hub.RETRIED)
    return {
        row.path: File(row.size, row.lfs.sha256 if row.lfs else row.blob_id, row.lfs is not None, reader(row.path))
        for row in rows
    }


def in_folder(root: Path, grounds: Sequence[Path]) -> dict[str, File]:
    """List the files below a folder, those of hidden folders aside; return them by path.

    Links are followed to files, not into folders. A link to nothing is an empty file; one that leads out is none.

    Args:
        root: the folder.
        grounds: folders that links may lead into.
    """
    return dict(_walked(root, [ground.resolve() for ground in grounds]))


def _walked(root: Path, grounds: Sequence[Path]) -> Iterator[tuple[str, File]]:
    def refused(error: OSError) -> None:
        raise error

    for at, folders, names in os.walk(root, onerror=refused):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(at, name)
            if path.is_symlink() and not any(path.resolve().is_relative_to(ground) for ground in grounds):
                continue
            try:
                found = path.stat()
            except OSError:
                found = None
            if found is not None and not stat.S_ISREG(found.st_mode):  # reading a pipe would never end
                continue
            size = found.st_size if found else 0
            linked = found is not None and (path.is_symlink() or found.st_nlink > 1)
            content = f"inode {found.st_dev}:{found.st_ino}" if found and linked else ""
            yield path.relative_to(root).as_posix(), File(size, content, True, _reader(path))


def _reader(path: Path) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    return read


def alike(files: Files) -> list[list[str]]:
    """Find files with the same content; return their paths, one list a content.

    Where no hash is known, which is on this disk alone, those that agree in size and in some samples are hashed.
    """
    groups: dict[object, list[str]] = {}
    for path, file in files.items():
        if file.size:
            groups.setdefault(file.content or file.size, []).append(path)
    found = []
    for key, paths in groups.items():
        if isinstance(key, str):
            found.append(paths)
        elif len(paths) > 1:
            found += _split(files, [p for same in _split(files, paths, _sampled) for p in same], _hashed)
    return sorted(paths for paths in found if len(paths) > 1)


def _split(files: Files, paths: list[str], name: Callable[[File], str]) -> list[list[str]]:
    """Put paths that have one name of their content together; return those that are not alone."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(name(files[path]), []).append(path)
    return [group for group in groups.values() if len(group) > 1]


def _sampled(file: File) -> str:
    last = max(0, file.size - SAMPLE_BYTES)
    places = sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})
    return hashlib.sha256(b"".join(file.read(at, SAMPLE_BYTES) for at in places)).hexdigest()


def _hashed(file: File) -> str:
    digest = hashlib.sha256()
    for at in range(0, file.size, 2**20):
        digest.update(file.read(at, 2**20))
    return digest.hexdigest()
