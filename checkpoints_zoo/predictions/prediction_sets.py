"""Sets of stored predictions in a source: list them, read their description and rows, check their bytes.

A set is a folder predictions/COLLECTION/SET: manifest.parquet has one row a member, manifest.json describes the set.

This is one file, because all of these functions need the description of a set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from checkpoints_zoo.errors import DamagedError, FormatError, LayoutError, NetworkError, SourceNotFound, UsageError
from checkpoints_zoo.formats import catalog, manifest, row_checks, shard_files
from checkpoints_zoo.formats.catalog import FORMAT_VERSION, check_keys
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import Location, Problem, file_stamp
from checkpoints_zoo.sources.finding import open_source
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.source import Source

LOGITS_TENSOR = "logits"  # Name of a member's only tensor in the shard, and key of its layout.
STORED_DTYPES = ("F16", "F32")

PREDICTIONS_FOLDER = "predictions"
MANIFEST_FILE, DESCRIPTION_FILE = "manifest.parquet", "manifest.json"

_DIGITS = frozenset("0123456789abcdef")

SCHEMA_VERSION = 1
_COLUMN_TYPES = {
    "member": pa.int32(), "epoch": pa.int32(), "final": pa.bool_(), "status": pa.string(),
    "weights_sha256": pa.string(), "sha256": pa.string(), "path": pa.string(), "offset": pa.int64(),
    "nbytes": pa.int64(), "layout": pa.string(), "dtype": pa.string(),
}  # fmt: skip
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=False) for name, kind in _COLUMN_TYPES.items()],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""A row: member and epoch, the content hash of the weights and of the logits, and the place of
the logits' bytes, in the columns that manifests of weights have too."""

Key = tuple[int, int]


@dataclass(frozen=True)
class PredictionSet:
    """A set of stored predictions in a source.

    Args:
        source: the source that contains the set.
        facts: description of the set: its images, its classes, and how the logits were computed.
        rows: the set's manifest, with one row for each snapshot, ordered by member and epoch.
    """

    source: Source
    facts: SetDescription
    rows: pa.Table = field(repr=False)

    def locate(self, rows: pa.Table) -> list[Location]:
        """Find the logits of manifest rows, fetching missing ones from the Hub together; return their locations on this
        machine.

        Raises:
            DamagedError, SourceNotFound: a file is missing, or its path leads out of the source.
            NetworkError, AccessError, StorageError: bytes on the Hub can't be read, or can't be stored on this machine.
        """
        try:
            return self.source.locate(self.facts, rows)
        except NetworkError as error:
            if error.collection == self.facts.name:  # offline
                error.do = "Read them once online: they are kept"
            raise


def read_set(source: Source, collection: str, set_name: str) -> PredictionSet:
    """Read and check the description and rows of a set; return the set.

    Raises:
        SourceNotFound: the source has no such set; the error names its sets.
        FormatError, DamagedError: the description or the rows do not follow the format, or a path leads out of the
            source.
        AccessError, NetworkError: the source is on the Hub and can't be read.
    """
    folder = folder_of_set(collection, set_name)
    manifest_path, description_path = (
        _find_file(source, f"{folder}/{file}", collection, set_name) for file in (MANIFEST_FILE, DESCRIPTION_FILE)
    )
    facts, rows = _read_and_check(
        manifest_path, description_path, (file_stamp(manifest_path), file_stamp(description_path))
    )
    if (facts.collection, facts.set) != (collection, set_name):
        raise FormatError(
            f"description {description_path}",
            expected=f"the names {collection!r} and {set_name!r}, as its folder's",
            found=f"{facts.collection!r:.80} and {facts.set!r:.80}",
            path=description_path,
        )
    for shard_path in set(rows.column("path").to_pylist()):
        if not shard_path.startswith(f"{folder}/"):
            expected = f"a path below {folder}/"
            raise FormatError(
                f"manifest {manifest_path}", expected=expected, found=repr(shard_path)[:200], path=manifest_path
            )
    return PredictionSet(source, facts, rows)


def _find_file(source: Source, path_in_source: str, collection: str, set_name: str) -> Path:
    try:
        return source.local_path(path_in_source)
    except SourceNotFound as error:
        # If the whole repo or the commit is missing, and not only this file, the error is raised unchanged.
        if error.path not in (path_in_source, str(source.root / path_in_source)):
            raise
        known_sets = ", ".join(list_set_names(source, collection)) or "none"
        is_description = path_in_source.endswith(DESCRIPTION_FILE)
        raise SourceNotFound(
            f"predictions {set_name!r} of {collection}",
            expected=f"{path_in_source} beside its rows"
            if is_description
            else f"a set of source {source.display_name}, which has: {known_sets}",
            found="no such file" if is_description else "no such set",
            do="" if is_description else f"`zoo-cli predict {collection} --data … --out …` makes one",
            collection=collection,
            path=path_in_source,
        ) from error


@lru_cache(maxsize=16)
def _read_and_check(
    manifest_path: Path, description_path: Path, file_stamps: tuple[tuple[int, ...], ...]
) -> tuple[SetDescription, pa.Table]:
    """Read and check the manifest and the description of a set; files that did not change since an earlier call are not
    read again."""
    facts = SetDescription.from_json(catalog.read_json(description_path), description_path)
    rows = manifest.read_manifest(manifest_path, SCHEMA)
    row_checks.check_rows(rows, facts, manifest_path)
    for column in SCHEMA.names:
        if rows.column(column).null_count:
            raise FormatError(
                f"manifest {manifest_path}",
                expected=f"a value for {column} in each row",
                found="null",
                path=manifest_path,
            )
    _check_hashes(rows.column("weights_sha256").to_pylist(), manifest_path)
    return facts, rows


def _check_hashes(weight_hashes: Sequence[str], manifest_path: Path) -> None:
    for digest in weight_hashes:
        if len(digest) != 64 or set(digest) - _DIGITS:
            expected = "weights_sha256 of 64 lower-case hex digits"
            raise FormatError(
                f"manifest {manifest_path}", expected=expected, found=repr(digest[:80]), path=manifest_path
            )


def list_set_names(source: Source, collection: str) -> list[str]:
    """Return the names of a collection's sets of predictions in a source.

    Raises:
        AccessError, NetworkError: the source is on the Hub and can't be read.
    """
    folder = f"{PREDICTIONS_FOLDER}/{catalog.check_name(collection)}"
    split_paths = [path.split("/") for path in source.list_files(folder)]
    return sorted(
        path_parts[2] for path_parts in split_paths if len(path_parts) == 4 and path_parts[3] == MANIFEST_FILE
    )


def source_of_predictions(source: str | Path | Source) -> Source:
    """Find a source that may have only predictions, without weights; return the source.

    Raises:
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `finding.open_source`.
    """
    if isinstance(source, Source):
        return source
    if "://" not in str(source):
        root = Path(source).expanduser().absolute()
        if (root / PREDICTIONS_FOLDER).is_dir():
            return FolderSource(root, root.as_uri())
    try:
        return open_source(source, "")
    except SourceNotFound as error:
        if "://" not in str(source):
            error.expected = f"a folder with {PREDICTIONS_FOLDER}/COLLECTION/SET in it"
            error.found = error.found.replace("manifests/", f"{PREDICTIONS_FOLDER}/")
            error.do = "Give the folder that `zoo-cli predict` had as --out"
        raise


def folder_of_set(collection: str, set_name: str) -> str:
    """Check the names of a collection and a set; return the set's folder in its source."""
    return f"{PREDICTIONS_FOLDER}/{catalog.check_name(collection)}/{check_set_name(set_name)}"


def check_set_name(set_name: str) -> str:
    """Check that the name of a set can be the name of a folder; return it.

    Raises:
        UsageError: it can't.
    """
    try:
        return catalog.check_name(set_name)
    except UsageError as error:
        error.thing = f"name of a set of predictions {set_name!r}"
        raise


@dataclass(frozen=True)
class SetDescription:
    """Describe a set of predictions: its manifest.json.

    Args:
        collection, set: name of the members' collection, and name of this set.
        data, split, revision: name, split and revision of the images.
        fingerprint: fingerprint of the images (`ImageData.fingerprint`).
        inputs: number of the images.
        classes: class names in the order of the logits.
        preprocessing: preprocessing of the members' inputs.
        computed: dtype in which the logits were computed ("float32").
        view: text that names the steps which changed the weights as they were read; "" for none.
        version: version of the package that computed the logits.
        citation: citation of the members; "" if their weights are not public.
        layouts: key of a layout -> the layout of a member's logits.
        labels: label of each image as a position in `classes`; None if the images have no labels or other classes.
    """

    collection: str
    set: str
    data: str
    split: str
    revision: str
    fingerprint: str
    inputs: int
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    computed: str
    view: str
    version: str
    citation: str
    layouts: Mapping[str, Layout]
    labels: tuple[int, ...] | None = field(repr=False)
    base: ClassVar[str] = ""  # Paths in the rows begin at the source's folder.

    @property
    def name(self) -> str:
        """The name of the set in error texts."""
        return f"{self.collection}/{self.set}"

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values, which include the version of the format."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["layouts"] = {key: layout.to_json() for key, layout in self.layouts.items()}
        values["labels"] = None if self.labels is None else list(self.labels)
        return {"format_version": FORMAT_VERSION, **values, "classes": list(self.classes)}

    @classmethod
    def from_json(cls, description_json: Any, path: Path) -> SetDescription:
        """Check every value of a set's JSON; return the description.

        Raises:
            FormatError: the format is newer, a key is missing or has another type, or counts differ.
        """
        other_types = {"inputs": int, "classes": list, "preprocessing": dict, "layouts": dict}
        type_by_key = {f.name: other_types.get(f.name, str) for f in fields(cls)}
        has_labels = isinstance(description_json, dict) and description_json.get("labels") is not None
        values_by_key = check_keys(description_json, type_by_key | {"labels": list if has_labels else type(None)}, path)

        def make_error(expected: str, found: str) -> FormatError:
            return FormatError(f"description {path}", expected=expected, found=found, path=path)

        classes, input_count, labels = values_by_key["classes"], values_by_key["inputs"], values_by_key["labels"]
        if not classes or not all(type(c) is str for c in classes) or input_count < 1:
            raise make_error(
                "the names of the classes, and at least one input", f"{len(classes)} classes, {input_count} inputs"
            )
        layouts = {key: Layout.from_json(layout) for key, layout in values_by_key["layouts"].items()}
        for key, layout in layouts.items():
            names_and_shapes = [(t.name, t.shape) for t in layout.tensors]
            if (
                names_and_shapes != [(LOGITS_TENSOR, (input_count, len(classes)))]
                or layout.dtype not in STORED_DTYPES
                or layout.header_nbytes
            ):
                dtypes = " or ".join(STORED_DTYPES)
                expected = f"{LOGITS_TENSOR!r} ({input_count}, {len(classes)}) of {dtypes} in layout {key!r}"
                raise make_error(expected, f"{layout.dtype} {names_and_shapes!r:.200}")
        if labels is not None:
            label_is_valid = [type(x) is int and 0 <= x < len(classes) for x in labels]
            if len(labels) != input_count or not all(label_is_valid):
                expected = f"{input_count} labels from 0 to {len(classes) - 1}"
                found = f"{labels[label_is_valid.index(False)]!r:.80}" if False in label_is_valid else f"{len(labels)}"
                raise make_error(expected, found)
        tuple_fields = {"classes": tuple(classes), "labels": None if labels is None else tuple(labels)}
        return cls(**values_by_key | tuple_fields | {"layouts": layouts})

    def rounding_error(self) -> float:
        """Return the largest rounding error of a stored logit, as a share of the logit."""
        return math.ldexp(1.0, -11) if any(x.dtype == "F16" for x in self.layouts.values()) else 0.0


def logits_layout(input_count: int, class_count: int, dtype: str = "F16") -> Layout:
    """Return the layout of one member's logits, (input, class)."""
    return Layout.of([(LOGITS_TENSOR, dtype, (input_count, class_count))])


def weight_hashes(rows: pa.Table) -> dict[Key, str | None]:
    """Return (member, epoch) -> content hash of the member's weights, from a collection's manifest."""
    columns = (rows.column(c).to_pylist() for c in ("member", "epoch", "sha256"))
    return {(member, epoch): digest for member, epoch, digest in zip(*columns, strict=True)}


def find_set_problems(
    stored: PredictionSet, known_hashes: Mapping[Key, str | None] | None, check_finite: bool = True
) -> list[Problem]:
    """Check the bytes of a set of predictions against the set's manifest, and the set's manifest against the members'
    manifest; return the problems.

    Args:
        stored: the set of predictions to check; missing bytes are fetched from the Hub together.
        known_hashes: content hashes as `weight_hashes` returns them; None for no comparison with the members' manifest.
        check_finite: whether the logits must be finite.

    Raises:
        NetworkError, AccessError, StorageError: bytes can't be read, or can't be stored on this machine.
    """
    name, rows = stored.facts.name, stored.rows
    problems = []
    if known_hashes is not None:
        problems = [
            Problem(name, member, "weights", text) for member, text in find_changed_weights(stored, known_hashes)
        ]
    try:
        locations = stored.locate(rows)
    except (DamagedError, SourceNotFound) as error:
        return [*problems, Problem(name, None, "bytes", str(error))]
    for location, claimed_hash in zip(locations, rows.column("sha256").to_pylist(), strict=True):
        try:
            kinds_and_texts, _ = shard_files.check_bytes(location, claimed_hash, check_finite)
        except (DamagedError, LayoutError, OSError) as error:
            kinds_and_texts = [("bytes", str(error))]
        problems += [Problem(name, location.member, kind, text) for kind, text in kinds_and_texts]
    return problems


def find_changed_weights(stored: PredictionSet, known_hashes: Mapping[Key, str | None]) -> Iterator[tuple[int, str]]:
    """Compare the manifest of a set of predictions with the members' manifest; yield (member, problem) where the
    weights differ."""
    columns = [stored.rows.column(c).to_pylist() for c in ("member", "epoch", "weights_sha256")]
    for member, epoch, used_hash in zip(*columns, strict=True):
        if problem := _describe_weights_mismatch(known_hashes, (member, epoch), used_hash):
            yield member, problem


def _describe_weights_mismatch(known_hashes: Mapping[Key, str | None], member_key: Key, used_hash: str) -> str:
    """Compare the hash of the weights in a row with the hash in the members' manifest; return a text on the difference,
    "" if the hashes are equal."""
    if member_key not in known_hashes:
        return f"expected a row of the collection's manifest for epoch {member_key[1]}; found none."
    known_hash = known_hashes[member_key]
    if known_hash is None or known_hash == used_hash:
        return ""
    return f"expected predictions of weights with sha256 {known_hash[:16]}…; found them made from {used_hash[:16]}…."
