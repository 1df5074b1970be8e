"""Read a folder that is to be published: its collections and their files, checked against the rows byte by byte.

This is one file, because a folder, its collections and its files are checked together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound, UsageError
from checkpoints_zoo.formats import arrow_tables, manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.member_parts import parse_repo_file, parts_of_rows
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.formats.shard_files import Location, Problem, file_stamp
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import PredictionSet
from checkpoints_zoo.publishing.byte_checks import Verification
from checkpoints_zoo.sources import hub_addresses
from checkpoints_zoo.sources.finding import open_source
from checkpoints_zoo.sources.source import Source

Say = Callable[[str], object]
RESERVED_FOLDERS = ("manifests", "predictions", "cards")  # `publish` writes their files: members' bytes lie elsewhere
SHARD_SUFFIXES, TABLE_SUFFIXES, PICTURE_FORMATS = (
    (".safetensors",),
    (".parquet", ".json"),
    (".png", ".jpg", ".jpeg", ".svg"),
)
LARGEST_SHOWN_COUNT = 3  # problems that an error text names


@dataclass(frozen=True)
class File:
    """A file that is to be uploaded to the repo.

    Args:
        repo_path: path of the file in the repo.
        content: bytes of the file, or the path on disk of a file that has them.
        size: size of the file in bytes.
        sha256: SHA-256 hash of its content, as hex digits.
        stamp: identity, size and times of the file on disk when it was hashed; empty for bytes.
    """

    repo_path: str
    content: bytes | Path = field(repr=False)
    size: int
    sha256: str
    stamp: tuple[int, ...] = ()

    @classmethod
    def of(cls, repo_path: str, content: bytes | Path) -> File:
        """Hash the content of a file; return the file for the repo.

        >>> File.of("README.md", b"# Mine").sha256[:16]
        'dd2de6b935cbf72d'
        """
        if isinstance(content, bytes):
            return cls(repo_path, content, len(content), hashlib.sha256(content).hexdigest())
        stamp = file_stamp(content)
        with content.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(repo_path, content, content.stat().st_size, digest, stamp)

    def git_hash(self) -> str:
        """Return the hash by which git names the content; the content is read again, since few files need this hash."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def check_unchanged(self) -> None:
        """Check that the file on disk is still the file that was hashed.

        Raises:
            DamagedError: the file was changed or replaced after it was hashed.
        """
        if isinstance(self.content, Path) and (not self.content.is_file() or file_stamp(self.content) != self.stamp):
            raise DamagedError(
                f"file {self.content}",
                expected="the file that was checked",
                found="a file that was changed meanwhile",
                do="Publish again once nobody writes to the folder",
                path=self.content,
            )


@dataclass(frozen=True)
class Folder:
    """A source on disk whose collections and predictions are to be published.

    Args:
        source: source that reads the folder.
        collections: collections of the folder.
    """

    source: Source
    collections: tuple[LocalCollection, ...]

    @cached_property
    def shards(self) -> dict[str, Path]:
        """The files that manifest rows name: path in the repo -> path on disk."""
        paths_of_collections = [
            manifest.without_parts(c.rows).column("path").to_pylist() for c in self.collections if not c.base
        ]
        return {
            repo_path: self.source.local_path(repo_path)
            for repo_path in sorted(
                {path for collection_paths in paths_of_collections for path in collection_paths if path is not None}
            )
        }

    @cached_property
    def sets(self) -> tuple[PredictionSet, ...]:
        """The sets of stored predictions in the folder, also of collections that the folder lacks."""
        split_paths = (p.split("/") for p in self._list_below("predictions"))
        collection_and_set_names = [
            path_parts[1:3]
            for path_parts in split_paths
            if len(path_parts) == 4 and path_parts[3] == prediction_sets.MANIFEST_FILE
        ]
        return tuple(
            prediction_sets.read_set(self.source, *collection_and_set)
            for collection_and_set in collection_and_set_names
        )

    @cached_property
    def predictions(self) -> dict[str, Path]:
        """The shards, manifests and descriptions of stored predictions: path in the repo -> path on disk."""
        paths: set[str] = set()
        for prediction_set in self.sets:
            folder = prediction_sets.folder_of_set(prediction_set.facts.collection, prediction_set.facts.set)
            paths |= {f"{folder}/{file}" for file in (prediction_sets.MANIFEST_FILE, prediction_sets.DESCRIPTION_FILE)}
            paths |= set(prediction_set.rows.column("path").to_pylist())
        return {repo_path: self.source.local_path(repo_path) for repo_path in sorted(paths)}

    @cached_property
    def pictures(self) -> list[str]:
        """The paths of pictures in the folder `cards`."""
        return [p for p in self._list_below("cards") if p.endswith(PICTURE_FORMATS)]

    def tables(self) -> dict[str, Path]:
        """Return the manifests and descriptions of the collections: path in the repo -> path on disk."""
        repo_paths = (
            f"manifests/{collection.name}{suffix}" for collection in self.collections for suffix in TABLE_SUFFIXES
        )
        return {repo_path: self.source.local_path(repo_path) for repo_path in repo_paths}

    def _list_below(self, folder: str) -> list[str]:
        paths = (
            Path(parent, name) for parent, _, file_names in os.walk(self.source.root / folder) for name in file_names
        )
        repo_paths = sorted(path.relative_to(self.source.root).as_posix() for path in paths)
        return [path for path in repo_paths if not any(part.startswith(".") for part in path.split("/"))]

    def ignored(self) -> list[str]:
        """Return the paths of files that are not published; a folder with no published file is one path."""
        published_paths = {*self.shards, *self.predictions, *self.tables(), "README.md"}
        published_folders = {
            "/".join(path.split("/")[:i]) for path in published_paths for i in range(1, path.count("/") + 1)
        }
        return sorted(_unpublished_files(self.source.root, "", published_paths, published_folders))


@dataclass(frozen=True)
class LocalCollection:
    """A collection of the folder. `base` is the repo that has the collection's weights, "" if the folder has the
    weights."""

    name: str
    description: Description
    rows: pa.Table

    @property
    def base(self) -> str:
        return self.description.base


def read_folder(folder: str | Path) -> Folder:
    """Read a folder's manifests and check everything that needs no bytes of weights; return its collections.

    Raises:
        SourceNotFound: there is no such folder, it has no manifests, or a file that a manifest names is missing.
        UsageError: the folder is an address on the Hub, or a row's bytes lie in a reserved folder such as manifests/.
        FormatError: a manifest breaks the format, or a row has no hash.
        DamagedError: a path leads out of the folder.
    """
    if str(folder).startswith(hub_addresses.ADDRESS_SCHEME):
        raise UsageError(f"source {folder}", expected="a folder on this machine", found="an address on the Hub")
    source = open_source(folder, "")
    names = sorted(path.stem for path in (source.root / "manifests").glob("*.parquet"))
    if not names:
        raise SourceNotFound(
            f"source {folder}",
            expected="manifests/NAME.parquet",
            found="none",
            do="`zoo-cli import` and `zoo-cli train` write some",
            path=source.root,
        )
    result = Folder(source, tuple(LocalCollection(name, *source.read_collection(name)) for name in names))
    for collection in result.collections:
        _check_rows(collection)
    for repo_path in result.shards:
        if (
            "/" not in repo_path
            or repo_path.split("/")[0] in RESERVED_FOLDERS
            or any(part.startswith(".") for part in repo_path.split("/"))
        ):
            raise UsageError(
                f"file {repo_path} of source {source.label}",
                expected="members' bytes in a folder of their own, as shards/",
                found="a path that the repo needs for other files",
                path=repo_path,
            )
    return result


def _check_rows(collection: LocalCollection) -> None:
    status_and_final = zip(*(collection.rows.column(c).to_pylist() for c in ("status", "final")), strict=True)
    if ("ok", True) not in status_and_final:
        raise FormatError(
            f"manifest of {collection.name}",
            expected="a row or more that are final with status ok",
            found=f"none of {collection.rows.num_rows}",
            do="Leave the collection out until it has members",
            collection=collection.name,
        )
    rows = manifest.without_parts(collection.rows)  # Files of other repos have the hash that their part names.
    paths, hashes = (rows.column(c).to_pylist() for c in ("path", "sha256"))
    positions = [i for i, (path, digest) in enumerate(zip(paths, hashes, strict=True)) if path and not digest]
    if positions:
        keys_without_hash = manifest.snapshot_keys(arrow_tables.take_rows(rows, positions))
        raise FormatError(
            f"manifest of {collection.name}",
            expected="a sha256 in every row that has weights",
            found=f"null for members {_format_keys(keys_without_hash)}",
            do="`zoo-cli import --hash` fills them",
            collection=collection.name,
            member=keys_without_hash[0][0],
        )


def _format_keys(snapshot_keys: Sequence[tuple[int, int | None]]) -> str:
    rest_text = f" and {len(snapshot_keys) - 100:,} more" if len(snapshot_keys) > 100 else ""
    return f"{format_ids(snapshot_keys[:100])}{rest_text}"


def _unpublished_files(
    root: Path, subfolder: str, published_paths: set[str], published_folders: set[str]
) -> Iterator[str]:
    with os.scandir(root / subfolder) as directory_entries:
        for entry in directory_entries:
            path = f"{subfolder}/{entry.name}".lstrip("/")
            if entry.is_dir() and path in published_folders:
                yield from _unpublished_files(root, path, published_paths, published_folders)
            elif path not in published_paths and path != "cards":
                yield f"{path}/" if entry.is_dir() else path


def hash_files(disk_path_of_repo_path: Mapping[str, Path]) -> list[File]:
    """Hash files on disk, passed as path in the repo -> path on disk; return the files for the repo."""
    paths = progress(disk_path_of_repo_path.items(), len(disk_path_of_repo_path), "hashes", "files")
    return [File.of(repo_path, path) for repo_path, path in paths]


def check_ranges(folder: Folder) -> None:
    """Check that each row's byte range lies inside its file, and that no two different ranges overlap.

    Raises:
        DamagedError: a range leaves its file or overlaps another; the error names the member.
    """
    ranges_of_path: dict[str, list[tuple[int, int, int, str]]] = {}
    for collection in folder.collections:
        if not collection.base:
            rows = manifest.without_parts(collection.rows)
            columns = (rows.column(c).to_pylist() for c in ("path", "offset", "nbytes", "member"))
            for path, offset, nbytes, member in zip(*columns, strict=True):
                if path is not None:
                    ranges_of_path.setdefault(path, []).append((offset, offset + nbytes, member, collection.name))
    for path, file_ranges in ranges_of_path.items():
        file_nbytes = folder.shards[path].stat().st_size
        last_range = (0, 0, -1, "")  # the range that ends last so far: start, end, member, collection
        for start, end, member, name in sorted(file_ranges):
            problem = f"a file of {file_nbytes:,} bytes" if end > file_nbytes else ""
            if start < last_range[1] and (start, end) != last_range[:2]:
                problem = f"member {last_range[2]} of {last_range[3]} at {last_range[0]:,} to {last_range[1]:,}"
            if problem:
                raise DamagedError(
                    f"member {member} of {name} in file {path}",
                    expected=f"bytes {start:,} to {end:,} of its own",
                    found=problem,
                    collection=name,
                    member=member,
                    path=path,
                )
            last_range = max(last_range, (start, end, member, name), key=lambda file_range: file_range[1])


def check(folder: Folder, say: Say, check_finite: bool) -> None:
    """Check each member's location and hash and that no two members hold the same weights; check stored predictions.

    Args:
        folder: folder to be published.
        say: function that is called with a line of text for each collection.
        check_finite: whether members with status ok are also checked for values that are not finite.

    Raises:
        DamagedError: some members or predictions have problems; the error names the first ones.
    """
    problems: list[Problem] = []
    named_rows_and_hashes: list[tuple[str, pa.Table, list[str | None]]] = []
    for collection in folder.collections:
        is_ok = [status == "ok" for status in collection.rows.column("status").to_pylist()]
        expected_hashes = collection.rows.column("sha256").to_pylist()
        hashes_of_ok_rows = [
            digest if is_row_ok else None for digest, is_row_ok in zip(expected_hashes, is_ok, strict=True)
        ]
        if collection.base:
            problems += shard_files.find_duplicates([(collection.name, collection.rows, hashes_of_ok_rows)])
            continue
        named_rows_and_hashes.append((collection.name, collection.rows, hashes_of_ok_rows))
        parts = parts_of_rows(collection.rows)
        positions = [i for i, row_parts in enumerate(parts) if row_parts and parse_repo_file(row_parts[0].path) is None]
        if not positions:
            continue
        say(f"{collection.name}: checking {len(positions):,} members' bytes …")
        locations = folder.source.locate(collection.description, arrow_tables.take_rows(collection.rows, positions))
        shard_files.check_against_files(locations)
        located = zip(positions, locations, strict=True)
        for position, location in progress(located, len(positions), f"{collection.name}: checking"):
            problems += _member_problems(
                collection.name, location, expected_hashes[position], check_finite and is_ok[position]
            )
    raise_problems(folder.source.display_name, problems + shard_files.find_duplicates(named_rows_and_hashes))
    raise_problems(
        folder.source.display_name,
        [p for prediction_set in folder.sets for p in _prediction_problems(folder, prediction_set, say, check_finite)],
    )


def _member_problems(collection: str, location: Location, expected_hash: str, check_finite: bool) -> list[Problem]:
    problems, _ = shard_files.check_bytes(location, expected_hash, check_finite)
    return [Problem(collection, location.member, kind, text) for kind, text in problems]


def _prediction_problems(folder: Folder, prediction_set: PredictionSet, say: Say, check_finite: bool) -> list[Problem]:
    """Check a set of predictions; if the folder has the collection, also check that the predictions come from its
    weights."""
    say(f"{prediction_set.facts.name}: checking the predictions of {prediction_set.rows.num_rows:,} members …")
    manifest_rows = next((c.rows for c in folder.collections if c.name == prediction_set.facts.collection), None)
    return prediction_sets.find_set_problems(
        prediction_set, None if manifest_rows is None else prediction_sets.weight_hashes(manifest_rows), check_finite
    )


def raise_problems(folder_name: str, problems: Sequence[Problem]) -> None:
    """Raise an error that names the first few problems; do nothing if there are none.

    Args:
        folder_name: name of the folder in the error text.
        problems: problems of the folder's members.

    Raises:
        DamagedError: there are problems.
    """
    if not problems:
        return
    first_problems = " ".join(str(p) for p in problems[:LARGEST_SHOWN_COUNT])
    rest_text = f" And {len(problems) - LARGEST_SHOWN_COUNT:,} more." if len(problems) > LARGEST_SHOWN_COUNT else ""
    raise DamagedError(
        f"members of source {folder_name}",
        expected="what their manifest says",
        found=f"{first_problems}{rest_text}".rstrip("."),
        do=f"Nothing was published. `zoo-cli verify {folder_name}` lists them all",
        collection=problems[0].collection,
        member=problems[0].member,
    )


def skipped_checks(folder: Folder, sample: int) -> tuple[str, ...]:
    """Return the checks that a dry run leaves out, one line of text per check."""
    own_rows = [manifest.without_parts(collection.rows) for collection in folder.collections if not collection.base]
    member_count = sum(rows.num_rows - rows.column("path").null_count for rows in own_rows)
    check_lines = [f"finite values of {member_count:,} members' weights"] if member_count else []
    return (
        *check_lines,
        *([f"test accuracy of at most {sample} members a collection, measured again"] if sample else []),
    )


def measure_accuracies(folder: Folder, sample: int, say: Say) -> list[Problem]:
    """Measure the accuracy of some members of each collection again; return the differences from the manifest.

    Members whose weights lie in another repo are fetched, and their bytes are checked as well.

    Args:
        folder: folder whose members' bytes were checked.
        sample: number of members measured in each collection, spread evenly over it.
        say: function that is called with a line of text for each collection, also if its network can't be built.
    """
    from checkpoints_zoo.collection.collection import load
    from checkpoints_zoo.publishing.verification import measure_again, verify

    problems: list[Problem] = []
    for collection in folder.collections:
        members = load(collection.name, source=folder.source.root)
        architecture, sample_size = collection.description.architecture, min(sample, len(members))
        can_build = architecture in ARCHITECTURES
        if not can_build:
            say(f"{collection.name}: accuracies are not measured again, since the package can't build {architecture!r}")
        if collection.base:
            say(f"{collection.name}: fetching and checking {sample_size} of {len(members):,} members …")
            for position in (i * len(members) // sample_size for i in range(sample_size)):
                problems += verify(members[position : position + 1], sample=int(can_build))
        elif can_build:
            say(f"{collection.name}: measuring the accuracy of at most {sample_size} of {len(members):,} members …")
            result = Verification(collection.name, len(members), members.nbytes)
            measure_again(members, range(len(members)), sample, result)
            problems += result.problems
    return problems
