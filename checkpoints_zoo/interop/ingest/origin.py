"""The origin of an import: files on this disk or in a repo of the Hub, by kind.

This is one file, because files on disk and files in a repo become the same origin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from checkpoints_zoo.errors import DamagedError, SourceNotFound, UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources import fetching, hub, hub_addresses, hub_cache
from checkpoints_zoo.sources.archives import indexing, numbers_in
from checkpoints_zoo.sources.archives.tar import BLOCK_BYTES, is_header

PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".pt.tar", ".pth.tar")
ARRAY_PICKLE_SUFFIXES = (".pkl", ".pickle")  # of pickles of numpy arrays, which lie beside other checkpoints too
SAFETENSORS_SUFFIX = ".safetensors"
FIRST_READ_NBYTES = 512
IMPORT_FOLDERS = (".import", "manifests", "shards")  # names of folders that an import creates
Say = Callable[[str], object]
LARGEST_ID_BOUND = 2**30
_ID_WORDS = r"member|seed|run|model|net|version|id|fold|replica|trial|draw|sample"
_ID_WORD_AT_END = re.compile(rf"(?:^|[^a-z])(?:{_ID_WORDS})[-_=. ]*$", re.IGNORECASE)


@dataclass(frozen=True)
class Origin:
    """Files that hold members.

    Args:
        label: name of the origin in messages.
        root: folder that the paths are relative to; for a repo, the repo's snapshot folder in the cache.
        repo: repo that has the files; None for files on this disk.
        archives: paths of tar archives, gzipped or not, in the collection's order.
        gzips: paths of the gzipped archives in `archives`.
        files: paths of safetensors files, one member each.
        pickles: paths of files of torch.save, one member each.
    """

    label: str
    root: Path
    repo: hub_addresses.Repo | None = None
    archives: tuple[str, ...] = ()
    gzips: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    pickles: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return self.archives + self.files + self.pickles

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return (self.root / path).stat().st_size if self.repo is None else fetching.remote_file(self.repo, path).size


@dataclass(frozen=True)
class FileFilter:
    """Selects the files of a folder that are imported.

    Args:
        pattern: pattern of file names or paths ("*.pt"); None for all files.
        requires_one_kind: whether files of several kinds are an error; otherwise only the first kind is taken, with a
            message.
    """

    pattern: str | None = None
    requires_one_kind: bool = False


def find_origin(
    sources: Sequence[str | Path], collection: str, root: Path | None, excluded_folder: Path | None, say: Say,
    file_filter: FileFilter = FileFilter(),
) -> Origin:  # fmt: skip
    """Find the files to be imported; return them as an origin.

    Args:
        sources: files or folders on this disk; or one place on the Hub, `hf://datasets/ORG/NAME[@REVISION][/PATH]`.
        collection: name of the collection; the catalog may name the repo's folder that has the collection.
        root: folder that the paths are relative to; None for the folder of the sources.
        excluded_folder: folder that members are copied into, whose files are skipped; None if they are not copied.
        say: function called with a line of text on files that are left out.
        file_filter: selects files of folders.

    Raises:
        SourceNotFound: a source does not exist or can't be read.
        UsageError: files have several kinds, or lie outside the root.
        DamagedError: a file has no known kind.
        NetworkError, AccessError: the Hub can't be reached, or this login may not read the repo.
    """
    if not sources:
        raise UsageError("import", expected="a file, a folder or a place on the Hub", found="none")
    if any(str(source).startswith(hub_addresses.ADDRESS_SCHEME) for source in sources):
        if len(sources) > 1:
            raise UsageError("import", expected="one place on the Hub alone", found=f"{len(sources)} sources")
        return _origin_on_hub(str(sources[0]), collection, say)
    return _origin_on_disk(
        [_absolute_path(Path(source).expanduser()) for source in sources],
        collection,
        root,
        excluded_folder,
        say,
        file_filter,
    )


def _absolute_path(path: Path) -> Path:
    """Return the absolute path; a link to a file is not resolved."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def _origin_on_disk(
    paths: Sequence[Path],
    collection: str,
    root: Path | None,
    excluded_folder: Path | None,
    say: Say,
    file_filter: FileFilter,
) -> Origin:
    for path in paths:
        if not path.exists():
            raise SourceNotFound(f"source {path}", expected="a file or a folder", found="nothing there", path=path)
    file_paths = list[Path]()
    for path in paths:
        file_paths += _files_in_folder(path, collection, excluded_folder, say, file_filter) if path.is_dir() else [path]
    base = paths[0] if len(paths) == 1 and paths[0].is_dir() else Path(os.path.commonpath([p.parent for p in paths]))
    base = base if root is None else root.expanduser().resolve()
    kinds: dict[str, list[str]] = {"tar": [], "gzip": [], "safetensors": [], "pickle": []}
    ordered = []
    for file in dict.fromkeys(file_paths):
        kind = _file_kind(_read_first_bytes(file), str(file))
        relative_path = _relative_path(file, base) if excluded_folder is None else file.relative_to(base).as_posix()
        _check_utf8(relative_path)
        kinds[kind].append(relative_path)
        ordered.append(relative_path)
    if len({"archive" if kind in ("tar", "gzip") else kind for kind in kinds if kinds[kind]}) > 1:
        raise UsageError(
            f"source {', '.join(map(str, paths))[:200]}",
            expected="archives, safetensors files or files of torch.save, one kind of them",
            found=" and ".join(f"{len(paths):,} ({kind})" for kind, paths in kinds.items() if paths),
        )
    archives = tuple(p for p in ordered if p in {*kinds["tar"], *kinds["gzip"]})
    label = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {base}"
    files, pickles = tuple(kinds["safetensors"]), tuple(kinds["pickle"])
    return Origin(label, base, None, archives, frozenset(kinds["gzip"]), files, pickles)


def _read_first_bytes(file: Path) -> bytes:
    """Return a file's first bytes.

    Raises:
        SourceNotFound: the file can't be read, such as a broken link.
    """
    try:
        with file.open("rb") as opened_file:
            return opened_file.read(FIRST_READ_NBYTES)
    except OSError as error:
        found = f"{'a link, ' if file.is_symlink() else ''}{error.strerror}"
        raise SourceNotFound(f"file {file}", expected="a file that can be read", found=found, path=file) from error


def _check_utf8(relative_path: str) -> None:
    """Check that a file's name is UTF-8, as manifests and repos require.

    Raises:
        UsageError: the name is not UTF-8.
    """
    try:
        relative_path.encode()
    except UnicodeEncodeError as error:
        printable_name = relative_path.encode("utf-8", "backslashreplace").decode()
        raise UsageError(
            f"file {printable_name}",
            expected="a name in UTF-8",
            found="other bytes",
            do="Rename it",
            path=printable_name,
        ) from error


def _relative_path(file: Path, root: Path) -> str:
    """Return a file's path relative to a folder.

    Raises:
        UsageError: the file is outside the folder.
    """
    if file.is_relative_to(root) and file.resolve().is_relative_to(root):
        return file.relative_to(root).as_posix()
    raise UsageError(
        f"file {file}",
        expected=f"a file in the folder {root}, since a manifest names files by their path in its folder",
        found="a file elsewhere" if not file.is_relative_to(root) else f"a link to {file.resolve()}",
        do="Give a folder that holds all files as --out, or --reshard OUT to copy the members",
        path=file,
    )


def _files_in_folder(
    folder: Path, collection: str, excluded_folder: Path | None, say: Say, file_filter: FileFilter
) -> list[Path]:
    """List the files of a folder that may hold members: archives in it, or safetensors files or pickles below it."""
    listing = catalog.listing_of(collection)
    if listing and listing.archives and (folder / listing.archives.folder).is_dir():
        return [folder / p for p in indexing.list_in_folder(folder, listing.archives)]
    candidates = [
        p for p in _walk_files(folder, excluded_folder) if _matches_pattern(p.relative_to(folder), file_filter.pattern)
    ]
    pickles = [p for p in candidates if p.name.lower().endswith(PICKLE_SUFFIXES)]
    tars = [p for p in candidates if p.parent == folder and p.name.lower().endswith(indexing.ARCHIVE_SUFFIXES)]
    archives = [p for p in tars if p not in pickles]
    files = [p for p in candidates if p.name.lower().endswith(SAFETENSORS_SUFFIX)]
    array_pickles = [p for p in candidates if is_pickle_of_arrays(p.name)]
    kinds = [kind for kind in (archives, files, pickles) if kind] or [array_pickles] * bool(array_pickles)
    if not kinds:
        filter_text = f" that match {file_filter.pattern}" if file_filter.pattern else ""
        raise SourceNotFound(
            f"source {folder}",
            expected=(
                f"archives ({', '.join(indexing.ARCHIVE_SUFFIXES)}), safetensors files, or "
                f"{', '.join(PICKLE_SUFFIXES + ARRAY_PICKLE_SUFFIXES)} files"
            ),
            found=f"none among {len(candidates):,} files{filter_text}",
            path=folder,
        )
    left_out_count = sum(map(len, kinds[1:]))
    if left_out_count:
        other_suffixes = ", ".join(sorted({p.suffix for kind in kinds[1:] for p in kind}))
        if file_filter.requires_one_kind:
            raise UsageError(
                f"source {folder}",
                expected="checkpoints of one kind",
                found=f"{len(kinds[0]):,} ({kinds[0][0].suffix}) and {left_out_count:,} others ({other_suffixes})",
                do=f"Choose with files='*{kinds[0][0].suffix}'",
                path=folder,
            )
        say(
            f"{folder}: {left_out_count:,} files ({other_suffixes}) are left out: the {kinds[0][0].suffix} files are "
            "taken"
        )
    return sorted(kinds[0], key=lambda p: _numeric_sort_key(p.relative_to(folder).as_posix()))


def _matches_pattern(path: Path, pattern: str | None) -> bool:
    return pattern is None or fnmatch(path.name, pattern) or fnmatch(path.as_posix(), pattern)


def _numeric_sort_key(path: str) -> tuple[list[int], str]:
    return numbers_in(path), path


def _walk_files(folder: Path, excluded_folder: Path | None) -> Iterable[Path]:
    """Yield the files below a folder, links to folders included, except hidden files and files that an import wrote."""
    resolved_excluded = None if excluded_folder is None else excluded_folder.resolve()
    visited_folders, starts = set[Path](), [folder]
    while starts:
        # Links are followed after all real folders are known, so that each folder is listed under its own name.
        linked_folders = list[Path]()
        for start in starts:
            for folder_path, folders, names in os.walk(start):
                current_folder = Path(folder_path)
                real_folder = current_folder.resolve()
                if real_folder in visited_folders:
                    folders.clear()
                    continue
                visited_folders.add(real_folder)
                is_excluded = real_folder == resolved_excluded
                folders[:] = sorted(
                    f
                    for f in folders
                    if not f.startswith(".")
                    and (current_folder / f).resolve() != resolved_excluded
                    and not (is_excluded and f in IMPORT_FOLDERS)
                )
                linked_folders += [current_folder / f for f in folders if (current_folder / f).is_symlink()]
                yield from (current_folder / name for name in sorted(names) if not name.startswith("."))
        starts = sorted(linked_folders)


def is_pickle_of_arrays(file_name: str) -> bool:
    """Return whether a file should be a pickle of numpy arrays, by its name."""
    return file_name.lower().endswith(ARRAY_PICKLE_SUFFIXES)


def _file_kind(first_bytes: bytes, file_label: str) -> str:
    """Return the kind of a file by its first bytes: "tar", "gzip", "safetensors" or "pickle".

    Raises:
        DamagedError: the file has another kind.
    """
    if first_bytes[:2] == b"\x1f\x8b":
        return "gzip"
    if is_header(first_bytes[:BLOCK_BYTES]) or first_bytes[:BLOCK_BYTES] == bytes(BLOCK_BYTES):
        return "tar"
    if file_label.lower().endswith(SAFETENSORS_SUFFIX) or (
        first_bytes[8:9] == b"{" and not file_label.lower().endswith(PICKLE_SUFFIXES)
    ):
        return "safetensors"  # a damaged file becomes a failed member
    if file_label.lower().endswith(PICKLE_SUFFIXES + ARRAY_PICKLE_SUFFIXES):
        return "pickle"
    raise DamagedError(
        f"file {file_label}",
        expected="a tar archive, a safetensors file, a file of torch.save or a pickle of numpy arrays (.pkl)",
        found=guess_kind(first_bytes) or f"something else: {first_bytes[:16]!r}",
        path=file_label,
    )


def _origin_on_hub(address: str, collection: str, say: Say) -> Origin:
    """Find archives or safetensors files in a repo; return them as an origin."""
    repo_address, path = hub_addresses.split_address(address, "source")
    repo = hub.resolve_address(repo_address)
    label = f"{repo}/{path}" if path else str(repo)
    listing = catalog.listing_of(collection)
    if not path and listing and listing.archives:
        path = listing.archives.folder
    paths = hub.list_files(repo, path) if path else []
    if path and not paths:
        fetching.remote_file(repo, path)  # raises an error if there is no such file
        paths = [path]
    archives = [
        p for p in paths if p.lower().endswith(indexing.ARCHIVE_SUFFIXES) and not p.lower().endswith(PICKLE_SUFFIXES)
    ]
    files = [] if archives else [p for p in paths if p.lower().endswith(SAFETENSORS_SUFFIX)]
    left_out = [
        p for p in paths if p not in {*archives, *files} and p.lower().endswith((SAFETENSORS_SUFFIX, *PICKLE_SUFFIXES))
    ]
    if not archives and not files:
        pickles = f"{len(left_out):,} files of torch.save, which are never opened from the Hub" if left_out else "none"
        raise SourceNotFound(
            f"source {label}",
            expected="an archive, or a folder of archives or of safetensors files",
            found=pickles,
            do="Give the path inside the repo: hf://datasets/ORG/NAME[@REVISION]/PATH" if not path else "",
            path=path,
        )
    if left_out:
        say(f"{label}: {len(left_out):,} other files are left out")
    archives = sorted(archives, key=_numeric_sort_key)
    first = {p: fetching.remote_file(repo, p).bytes_at(0, FIRST_READ_NBYTES) for p in archives}
    kinds = {p: _file_kind(head, f"{p} of {repo.label}") for p, head in first.items()}
    gzips = frozenset(p for p, kind in kinds.items() if kind == "gzip")
    return Origin(
        label,
        hub_cache.snapshot_folder(repo),
        repo,
        tuple(archives),
        gzips,
        tuple(sorted(files, key=_numeric_sort_key)),
    )


def number_files(paths: Sequence[str]) -> list[int]:
    """Number the files of a folder; return a different number for each.

    A file's number is read from its path: the only number in which the paths differ, or, if the paths differ in several
    numbers, the number after a word such as member, seed or run. If there is no such number, or two files share it,
    each file's number is its position.

    Args:
        paths: paths of files in the folder, in order.

    >>> number_files(["seed-3.pt", "seed-12.pt"]), number_files(["v_0/epoch=9.ckpt", "v_1/epoch=7.ckpt"])
    ([3, 12], [0, 1])
    >>> number_files(["run_7/epoch=9.ckpt", "run_8/epoch=7.ckpt"]), number_files(["acc=0.91.pt", "acc=0.92.pt"])
    ([7, 8], [0, 1])
    """
    parts = [re.split("([0-9]+)", _without_suffix(path)) for path in paths]
    positions = list(range(len(paths)))
    if len({tuple(part[::2]) for part in parts}) != 1 or any(len(digits) > 18 for p in parts for digits in p[1::2]):
        return positions
    columns = list(zip(*([int(digits) for digits in part[1::2]] for part in parts), strict=True))
    texts = parts[0][::2]
    varying_column_indices = [index for index, column in enumerate(columns) if len(set(column)) > 1 or len(paths) == 1]
    if len(varying_column_indices) > 1 or len(paths) == 1:
        varying_column_indices = [index for index in varying_column_indices if _ID_WORD_AT_END.search(texts[index])]
    numbers = (
        columns[varying_column_indices[0]]
        if len(varying_column_indices) == 1
        and not (varying_column_indices[0] and texts[varying_column_indices[0]] == ".")
        else ()
    )
    return (
        list(numbers) if numbers and len(set(numbers)) == len(paths) and max(numbers) < LARGEST_ID_BOUND else positions
    )


def _without_suffix(file_path: str) -> str:
    """Return a path without the suffix of a checkpoint."""
    return next(
        (
            file_path[: -len(s)]
            for s in (SAFETENSORS_SUFFIX, *PICKLE_SUFFIXES, *ARRAY_PICKLE_SUFFIXES)
            if file_path.lower().endswith(s)
        ),
        file_path,
    )
