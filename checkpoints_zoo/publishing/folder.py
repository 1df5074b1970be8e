"""What a folder has to publish: collections and the files that they name, checked against the rows byte by byte."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, SourceNotFound, UsageError
from checkpoints_zoo.formats import manifest, shard_files
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.selection import format_ids
from checkpoints_zoo.formats.shard_files import Location, Problem, file_stamp
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import PredictionSet
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.source import Source, open_source

Say = Callable[[str], object]
OURS = ("manifests", "predictions", "cards")  # folders whose files publish writes: no row's bytes may lie there
SHARDS, TABLES, PICTURES = (".safetensors",), (".parquet", ".json"), (".png", ".jpg", ".jpeg", ".svg")
SHOWN = 3  # problems that an error names


@dataclass(frozen=True)
class File:
    """A file as it is to be in the repo.

    Args:
        inside: its path there.
        content: bytes, or where they lie.
        size: in bytes.
        sha256: of its content.
        stamp: of the file on disk when it was read.
    """

    inside: str
    content: bytes | Path = field(repr=False)
    size: int
    sha256: str
    stamp: tuple[int, ...] = ()

    @classmethod
    def of(cls, inside: str, content: bytes | Path) -> File:
        """Read and hash; return the file.

        >>> File.of("README.md", b"# Mine").sha256[:16]
        'dd2de6b935cbf72d'
        """
        if isinstance(content, bytes):
            return cls(inside, content, len(content), hashlib.sha256(content).hexdigest())
        stamp = file_stamp(content)
        with content.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(inside, content, content.stat().st_size, digest, stamp)

    def git(self) -> str:
        """Return the name that git gives to the content; read again, since few files need it."""
        content = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

    def check_unchanged(self) -> None:
        """Check that the file on disk is still the one that was read.

        Raises:
            DamagedError: it was changed or replaced since.
        """
        if isinstance(self.content, Path) and (not self.content.is_file() or file_stamp(self.content) != self.stamp):
            raise DamagedError(
                f"file {self.content}",
                expected="the file that was checked",
                found="another: it was changed meanwhile",
                do="Publish again once nobody writes to the folder",
                path=self.content,
            )


@dataclass(frozen=True)
class Folder:
    """A source on disk, and what of it is to be published.

    Args:
        source: the folder.
        held: its collections.
    """

    source: Source
    held: tuple[Held, ...]

    @cached_property
    def shards(self) -> dict[str, Path]:
        """The files that rows name, by path."""
        paths = [h.rows.column("path").to_pylist() for h in self.held if not h.base]
        return {
            inside: self.source.local_path(inside)
            for inside in sorted({p for ps in paths for p in ps if p is not None})
        }

    @cached_property
    def sets(self) -> tuple[PredictionSet, ...]:
        """The stored predictions: of these collections, and of others."""
        found = (p.split("/") for p in self._below("predictions"))
        names = [parts[1:3] for parts in found if len(parts) == 4 and parts[3] == prediction_sets.TABLE]
        return tuple(prediction_sets.read_set(self.source, *name) for name in names)

    @cached_property
    def predictions(self) -> dict[str, Path]:
        """The files of the stored predictions: shards, manifests, descriptions."""
        paths: set[str] = set()
        for stored in self.sets:
            folder = prediction_sets.folder_of(stored.facts.collection, stored.facts.set)
            paths |= {f"{folder}/{file}" for file in (prediction_sets.TABLE, prediction_sets.DESCRIPTION)}
            paths |= set(stored.rows.column("path").to_pylist())
        return {inside: self.source.local_path(inside) for inside in sorted(paths)}

    @cached_property
    def pictures(self) -> list[str]:
        """The pictures of a card, by path."""
        return [p for p in self._below("cards") if p.endswith(PICTURES)]

    def tables(self) -> dict[str, Path]:
        """Return the manifests and descriptions, by path."""
        paths = (f"manifests/{h.name}{suffix}" for h in self.held for suffix in TABLES)
        return {inside: self.source.local_path(inside) for inside in paths}

    def _below(self, folder: str) -> list[str]:
        found = (Path(at, name) for at, _, names in os.walk(self.source.root / folder) for name in names)
        inside = sorted(p.relative_to(self.source.root).as_posix() for p in found)
        return [p for p in inside if not any(part.startswith(".") for part in p.split("/"))]

    def ignored(self) -> list[str]:
        """List what is not published, whole folders as one; return the paths."""
        kept = {*self.shards, *self.predictions, *self.tables(), "README.md"}
        folders = {"/".join(p.split("/")[:i]) for p in kept for i in range(1, p.count("/") + 1)}
        return sorted(_others(self.source.root, "", kept, folders))


@dataclass(frozen=True)
class Held:
    """A collection of the folder: its name, description and rows; `base` is the repo that its bytes lie in, "" here."""

    name: str
    description: Description
    rows: pa.Table

    @property
    def base(self) -> str:
        return self.description.base


def read_folder(folder: str | Path) -> Folder:
    """Read the manifests of a folder, and check all that takes no bytes of weights; return what it has.

    Raises:
        SourceNotFound: no folder, none with manifests, or a file that a manifest names is not there.
        UsageError: it is no folder but a place on the Hub, or a row's bytes lie where manifests do.
        FormatError: a manifest breaks the format, or a row has no hash.
        DamagedError: a path that leads out of the folder.
    """
    if str(folder).startswith(hub.SCHEME):
        raise UsageError(f"source {folder}", expected="a folder on this machine", found="an address on the Hub")
    source = open_source(folder, "")
    names = sorted(p.stem for p in (source.root / "manifests").glob("*.parquet"))
    if not names:
        raise SourceNotFound(
            f"source {folder}",
            expected="manifests/NAME.parquet",
            found="none",
            do="`zoo-cli import` and `zoo-cli train` write some",
            path=source.root,
        )
    found = Folder(source, tuple(Held(name, *source.read_collection(name)) for name in names))
    for held in found.held:
        _check_rows(held)
    for inside in found.shards:
        if "/" not in inside or inside.split("/")[0] in OURS or any(p.startswith(".") for p in inside.split("/")):
            raise UsageError(
                f"file {inside} of source {source.label}",
                expected="members' bytes in a folder of their own, as shards/",
                found="a path that the repo needs for other things",
                path=inside,
            )
    return found


def _check_rows(held: Held) -> None:
    states = zip(*(held.rows.column(c).to_pylist() for c in ("status", "final")), strict=True)
    if ("ok", True) not in states:
        raise FormatError(
            f"manifest of {held.name}",
            expected="a row or more that are final with status ok",
            found=f"none of {held.rows.num_rows}",
            do="Leave the collection out until it has members",
            collection=held.name,
        )
    paths, hashes = (held.rows.column(c).to_pylist() for c in ("path", "sha256"))
    at = [i for i, (path, digest) in enumerate(zip(paths, hashes, strict=True)) if path and not digest]
    if at:
        without = manifest.snapshot_keys(manifest.take_rows(held.rows, at))
        raise FormatError(
            f"manifest of {held.name}",
            expected="a sha256 in every row that has weights",
            found=f"null for members {_few(without)}",
            do="`zoo-cli import --hash` fills them",
            collection=held.name,
            member=without[0][0],
        )


def _few(keys: Sequence[tuple[int, int | None]]) -> str:
    return f"{format_ids(keys[:100])}{f' and {len(keys) - 100:,} more' if len(keys) > 100 else ''}"


def _others(root: Path, inside: str, kept: set[str], folders: set[str]) -> Iterator[str]:
    with os.scandir(root / inside) as entries:
        for entry in entries:
            path = f"{inside}/{entry.name}".lstrip("/")
            if entry.is_dir() and path in folders:
                yield from _others(root, path, kept, folders)
            elif path not in kept and path != "cards":
                yield f"{path}/" if entry.is_dir() else path


def hashed(files: Mapping[str, Path]) -> list[File]:
    """Hash files on disk; return them."""
    return [File.of(inside, path) for inside, path in files.items()]


def check_ranges(folder: Folder) -> None:
    """Check that rows' bytes lie inside their files, and that no two of them overlap but are not the same.

    Raises:
        DamagedError: naming the member whose bytes don't.
    """
    ranges: dict[str, list[tuple[int, int, int, str]]] = {}
    for held in folder.held:
        if not held.base:
            columns = (held.rows.column(c).to_pylist() for c in ("path", "offset", "nbytes", "member"))
            for path, offset, nbytes, member in zip(*columns, strict=True):
                if path is not None:
                    ranges.setdefault(path, []).append((offset, offset + nbytes, member, held.name))
    for path, found in ranges.items():
        size = folder.shards[path].stat().st_size
        reached = (0, 0, -1, "")
        for one in sorted(found):
            problem = f"a file of {size:,} bytes" if one[1] > size else ""
            if one[0] < reached[1] and one[:2] != reached[:2]:
                problem = f"member {reached[2]} of {reached[3]} at {reached[0]:,} to {reached[1]:,}"
            if problem:
                raise DamagedError(
                    f"member {one[2]} of {one[3]} in file {path}",
                    expected=f"bytes {one[0]:,} to {one[1]:,} of its own",
                    found=problem,
                    collection=one[3],
                    member=one[2],
                    path=path,
                )
            reached = max(reached, one, key=lambda r: r[1])


def check(folder: Folder, say: Say, finite: bool) -> None:
    """Check every member's place and hash, that no two hold the same weights, and the same of stored predictions.

    Args:
        folder: what is to be published.
        say: told of each collection.
        finite: whether the values of members whose status is ok are to be finite too.

    Raises:
        DamagedError: naming the first members that are not as they should be.
    """
    problems: list[Problem] = []
    hashes: list[tuple[str, pa.Table, list[str | None]]] = []
    for held in folder.held:
        ok = [status == "ok" for status in held.rows.column("status").to_pylist()]
        claimed = held.rows.column("sha256").to_pylist()
        counted = [digest if good else None for digest, good in zip(claimed, ok, strict=True)]
        if held.base:
            problems += shard_files.find_duplicates([(held.name, held.rows, counted)])
            continue
        hashes.append((held.name, held.rows, counted))
        at = [i for i, path in enumerate(held.rows.column("path").to_pylist()) if path is not None]
        say(f"{held.name}: checking {len(at):,} members' bytes …")
        locations = folder.source.locate(held.description, manifest.take_rows(held.rows, at))
        shard_files.check_against_files(locations)
        for i, location in zip(at, locations, strict=True):
            problems += _of_member(held.name, location, claimed[i], finite and ok[i])
    refuse(folder.source.display_name, problems + shard_files.find_duplicates(hashes))
    refuse(
        folder.source.display_name, [p for stored in folder.sets for p in _of_predictions(folder, stored, say, finite)]
    )


def _of_member(name: str, location: Location, claimed: str, finite: bool) -> list[Problem]:
    found, _ = shard_files.check_bytes(location, claimed, finite)
    return [Problem(name, location.member, kind, text) for kind, text in found]


def _of_predictions(folder: Folder, stored: PredictionSet, say: Say, finite: bool) -> list[Problem]:
    """Check a set of predictions; where the folder has their collection, that they are of the weights that it has."""
    say(f"{stored.facts.name}: checking the predictions of {stored.rows.num_rows:,} members …")
    rows = next((held.rows for held in folder.held if held.name == stored.facts.collection), None)
    return prediction_sets.find_problems(stored, None if rows is None else prediction_sets.weights_of(rows), finite)


def refuse(shown: str, problems: Sequence[Problem]) -> None:
    """Raise what is wrong with members, if anything is.

    Args:
        shown: how the folder is called.
        problems: what was found.

    Raises:
        DamagedError: naming the first few.
    """
    if not problems:
        return
    few = " ".join(str(p) for p in problems[:SHOWN])
    more = f" And {len(problems) - SHOWN:,} more." if len(problems) > SHOWN else ""
    raise DamagedError(
        f"members of source {shown}",
        expected="what their manifest says",
        found=f"{few}{more}".rstrip("."),
        do=f"Nothing was published. `zoo-cli verify {shown}` lists them all",
        collection=problems[0].collection,
        member=problems[0].member,
    )


def to_come(folder: Folder, sample: int) -> tuple[str, ...]:
    """Return what a dry run leaves out, a line a check."""
    members = sum(held.rows.num_rows for held in folder.held if not held.base)
    lines = [f"finite values of {members:,} members' weights"] if members else []
    return (*lines, *([f"test accuracy of at most {sample} members a collection, measured again"] if sample else []))


def measure(folder: Folder, sample: int, say: Say) -> list[Problem]:
    """Measure the accuracy of some members of each collection again; return the problems found.

    Members whose weights lie in another repo are fetched, and their bytes are checked as well.

    Args:
        folder: whose members' bytes are right, as far as they lie in it.
        sample: members a collection, spread evenly over it.
        say: told of each collection, and of those whose nets the package can't build.
    """
    from checkpoints_zoo.collection.collection import load
    from checkpoints_zoo.networks.architectures import ARCHITECTURES
    from checkpoints_zoo.publishing.verification import Verification, measure_again, verify

    problems: list[Problem] = []
    for held in folder.held:
        members = load(held.name, source=folder.source.root)
        net, count = held.description.architecture, min(sample, len(members))
        known = net in ARCHITECTURES
        if not known:
            say(f"{held.name}: accuracies are not measured again, since the package can't build {net!r}")
        if held.base:
            say(f"{held.name}: fetching and checking {count} of {len(members):,} members …")
            for at in (i * len(members) // count for i in range(count)):
                problems += verify(members[at : at + 1], sample=int(known))
        elif known:
            say(f"{held.name}: measuring the accuracy of at most {count} of {len(members):,} members …")
            result = Verification(held.name, len(members), members.nbytes)
            measure_again(members, range(len(members)), sample, result)
            problems += result.problems
    return problems
