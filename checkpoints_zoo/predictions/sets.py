"""Sets of a source, in a folder or on the Hub: their names, their rows, and where the rows' bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import FormatError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.member_bytes import Location
from checkpoints_zoo.formats.safetensors import prefix, stamp_of
from checkpoints_zoo.formats.selection import keys_of
from checkpoints_zoo.predictions.facts import SCHEMA, Facts
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.finding import resolve
from checkpoints_zoo.sources.source import HubSource, Source, bring

PREDICTIONS = "predictions"
TABLE, DESCRIPTION = "manifest.parquet", "manifest.json"
_DIGITS = frozenset("0123456789abcdef")


def folder_of(collection: str, name: str) -> str:
    """Return the folder of a set in its source, both names checked."""
    return f"{PREDICTIONS}/{catalog.check_name(collection)}/{check_set(name)}"


def check_set(name: str) -> str:
    """Check that a set's name can be a folder's; return it.

    Raises:
        UsageError: it is something else.
    """
    try:
        return catalog.check_name(name)
    except UsageError as error:
        error.thing = f"name of a set of predictions {name!r}"
        raise


@dataclass(frozen=True)
class PredictionSet:
    """A set of stored predictions in a source.

    Args:
        source: that it lies in.
        facts: its JSON.
        rows: one a snapshot, in the order of member and epoch.
    """

    source: Source
    facts: Facts
    rows: pa.Table = field(repr=False)

    def locate(self, rows: pa.Table) -> list[Location]:
        """Find the bytes of rows; from the Hub, what is missing is fetched in one go. Return where they lie here.

        Raises:
            DamagedError, SourceNotFound: a file outside the source, or none.
            NetworkError, AccessError, StorageError: a source on the Hub that can't be read, or not be kept.
        """
        if isinstance(self.source, HubSource):
            try:
                return bring(self.source.repo, self.facts, rows)
            except NetworkError as error:
                if error.collection == self.facts.name:  # offline
                    error.do = "Read them once online: they are kept"
                raise
        columns = (rows.column(c).to_pylist() for c in ("member", "path", "offset", "layout"))
        members, paths, offsets, keys = columns
        files = {inside: self.source.file(inside) for inside in set(paths)}
        return [
            Location(m, prefix(*known), files[inside], offset, self.facts.layouts[key])
            for m, known, inside, offset, key in zip(members, keys_of(rows), paths, offsets, keys, strict=True)
        ]


def place(source: str | Path | Source) -> Source:
    """Find a source that may hold nothing but predictions; return it.

    Raises:
        SourceNotFound, AccessError, NetworkError: as in `finding.resolve`.
    """
    if isinstance(source, Source):
        return source
    if "://" not in str(source):
        root = Path(source).expanduser().absolute()
        if (root / PREDICTIONS).is_dir():
            return Source(root, root.as_uri())
    try:
        return resolve(source, "")
    except SourceNotFound as error:
        if "://" not in str(source):
            error.expected = f"a folder with {PREDICTIONS}/COLLECTION/SET in it"
            error.found = error.found.replace("manifests/", f"{PREDICTIONS}/")
            error.do = "Give the folder that `zoo-cli predict` had as --out"
        raise


def names(source: Source, collection: str) -> list[str]:
    """List the sets of a collection that a source has; return their names.

    Raises:
        AccessError, NetworkError: a source on the Hub that can't be read.
    """
    inside = f"{PREDICTIONS}/{catalog.check_name(collection)}"
    if isinstance(source, HubSource):
        found = [p.split("/") for p in hub.files(source.repo, inside, below=True)]
        return sorted(parts[2] for parts in found if len(parts) == 4 and parts[3] == TABLE)
    return sorted(path.parent.name for path in (source.root / inside).glob(f"*/{TABLE}"))


def read(source: Source, collection: str, name: str) -> PredictionSet:
    """Read and check the facts and rows of a set; return it.

    Raises:
        SourceNotFound: the source has no such set; those that it has are named.
        FormatError, DamagedError: facts or rows break the format, or a path leads out of the source.
        AccessError, NetworkError: a source on the Hub that can't be read.
    """
    folder = folder_of(collection, name)
    table, description = (_file(source, f"{folder}/{file}", collection, name) for file in (TABLE, DESCRIPTION))
    facts, rows = _checked(table, description, (stamp_of(table), stamp_of(description)))
    if (facts.collection, facts.set) != (collection, name):
        raise FormatError(
            f"description {description}",
            expected=f"the names {collection!r} and {name!r}, as its folder's",
            found=f"{facts.collection!r:.80} and {facts.set!r:.80}",
            path=description,
        )
    for inside in set(rows.column("path").to_pylist()):
        if not inside.startswith(f"{folder}/"):
            expected = f"a path below {folder}/"
            raise FormatError(f"manifest {table}", expected=expected, found=repr(inside)[:200], path=table)
    return PredictionSet(source, facts, rows)


def _file(source: Source, inside: str, collection: str, name: str) -> Path:
    try:
        return hub.fetch(source.repo, inside) if isinstance(source, HubSource) else source.file(inside)
    except SourceNotFound as error:
        if isinstance(source, HubSource) and error.path != inside:  # the repo or the commit is missing
            raise
        known = ", ".join(names(source, collection)) or "none"
        beside = inside.endswith(DESCRIPTION)
        raise SourceNotFound(
            f"predictions {name!r} of {collection}",
            expected=f"{inside} beside its rows" if beside else f"a set of source {source.shown}, which has: {known}",
            found="no such file" if beside else "no such set",
            do="" if beside else f"`zoo-cli predict {collection} --data … --out …` makes one",
            collection=collection,
            path=inside,
        ) from error


@lru_cache(maxsize=16)
def _checked(table: Path, description: Path, stamp: tuple[tuple[int, ...], ...]) -> tuple[Facts, pa.Table]:
    """Read and check once for each state of the two files."""
    facts = Facts.from_json(catalog.read_json(description), description)
    rows = manifest.read(table, SCHEMA)
    manifest.validate(rows, facts, table)
    for column in SCHEMA.names:
        if rows.column(column).null_count:
            raise FormatError(
                f"manifest {table}", expected=f"a value for {column} in each row", found="null", path=table
            )
    _check_hashes(rows.column("weights_sha256").to_pylist(), table)
    return facts, rows


def _check_hashes(hashes: Sequence[str], table: Path) -> None:
    for digest in hashes:
        if len(digest) != 64 or set(digest) - _DIGITS:
            expected = "weights_sha256 of 64 lower-case hex digits"
            raise FormatError(f"manifest {table}", expected=expected, found=repr(digest[:80]), path=table)
