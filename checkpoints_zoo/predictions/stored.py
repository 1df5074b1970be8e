"""Stored predictions, read lazily: only the bytes of the requested members and inputs.

Axes: logits are (member, input, class).

This is one file, because half of it is one class, `Predictions`; the rest checks what the class reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from io import FileIO
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from checkpoints_zoo import images
from checkpoints_zoo.errors import DamagedError, MemberNotFound, SelectionError, SourceNotFound, UsageError
from checkpoints_zoo.formats import arrow_tables, selection, shard_files
from checkpoints_zoo.formats.shard_files import Location, read_at
from checkpoints_zoo.formats.text import whole_number
from checkpoints_zoo.images import ImageData, ImageInput, in_order
from checkpoints_zoo.networks.modules import TORCH_DTYPES
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import LOGITS_TENSOR, PredictionSet, SetDescription
from checkpoints_zoo.predictions.running import Members

BLOCK_BYTES = 2**26  # Largest number of bytes of a block of logits in float32.


def predictions_of(
    members: Members,
    name: str,
    *,
    source: str | Path | None = None,
    data: ImageInput | None = None,
) -> Predictions:
    """Find the stored predictions of members without reading logits yet; return them as `Predictions`.

    Args:
        members: a collection.
        name: name of the set of predictions ("digits-test").
        source: a folder or a Hub address that contains the set; None for the members' own source.
        data: images on which the set must have been made, in any form that `predict` takes; None for no check.

    Raises:
        SourceNotFound: the source has no set of this name.
        MemberNotFound: the set lacks some of the members.
        UsageError: the set was made with other weights, classes or preprocessing, or on other images.
        FormatError, DamagedError: the files of the set do not follow the format.
        NetworkError, AccessError: the source is on the Hub and can't be read.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> from checkpoints_zoo.predictions import predict
    >>> members, folder = zoo.load("convnet-digits", n=3), tempfile.mkdtemp()
    >>> _ = predict(members, "digits", folder)
    >>> predictions_of(members, "digits-test", source=folder).logits([2]).shape
    torch.Size([1, 540, 10])
    """
    stored = prediction_sets.read_set(
        members.source if source is None else prediction_sets.source_of_predictions(source), members.name, name
    )
    check_members(stored.facts, members)
    if data is not None:
        check_data(stored.facts, images.of(data))
    return Predictions(stored, select_rows(stored, members), (members.source.label, members._commit))


def cite_weights(label: str, commit: str, collection: str, rows: pa.Table) -> str:
    """Cite the members behind rows of predictions, by the hashes of their weights; return the citation."""
    column_names = ["member", "epoch", "final", "weights_sha256", "path", "offset", "nbytes"]
    weight_rows = rows.select(column_names).rename_columns([n.removeprefix("weights_") for n in column_names])
    return selection.cite(label, commit, collection, weight_rows)


def check_same_members(predictions: Predictions, members: Predictions | Members) -> Predictions:
    """Check that predictions have the same members, with the same weights, in the same order; return the predictions.

    Weights are compared by their content hashes; if a manifest has no hashes, by the names of the collections.

    Raises:
        UsageError: the predictions are of other members, or were made with other weights.
    """
    keys, expected_keys = predictions.keys, _snapshot_keys(members)
    collection = members.facts.collection if isinstance(members, Predictions) else members.name
    difference = ""
    if [key[0] for key in keys] != [key[0] for key in expected_keys]:
        difference = f"members {selection.format_ids([(id, None) for id, *_ in keys[:100]])}"
    elif [key[1] for key in keys] != [key[1] for key in expected_keys]:
        difference = f"snapshots {selection.format_ids([key[:2] for key in keys[:100]])}"
    else:
        for (id, _, used_hash), (_, _, known_hash) in zip(keys, expected_keys, strict=True):
            if used_hash != known_hash if used_hash and known_hash else predictions.facts.collection != collection:
                difference = f"other weights of member {id}"
                break
    if difference:
        raise UsageError(
            f"predictions {predictions.name} for {members.name}",
            expected="those of the same members with the same weights, in the same order",
            found=difference,
            do="Take both with `members.predictions(…)` from one selection of members",
        )
    return predictions


def _snapshot_keys(members: Predictions | Members) -> list[tuple[int, int, str]]:
    """Return (member, epoch, content hash of the weights) of each member; the hash is "" if the manifest has no hash
    for the member."""
    if isinstance(members, Predictions):
        return members.keys
    hashes = members.rows.column("sha256").to_pylist()
    return [(*key, known_hash or "") for key, known_hash in zip(members._snapshot_keys, hashes, strict=True)]


class Predictions:
    """Stored logits of selected members on one set of images; `predictions_of` returns them, a slice selects members.

    Args:
        stored: the set.
        rows: the set's manifest rows of the selected members, in the order of the members.
        label_and_commit: (label, commit) of the source that holds the members' weights.
    """

    def __init__(self, stored: PredictionSet, rows: pa.Table, label_and_commit: tuple[str, str]) -> None:
        self.stored = stored
        self.rows = rows
        self.origin = label_and_commit

    def __repr__(self) -> str:
        members, inputs, classes = self.shape
        data = f"{self.facts.data}/{self.facts.split}"
        return f"Predictions({self.name!r}, {members} members × {inputs:,} inputs × {classes} classes, on {data})"

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    @property
    def facts(self) -> SetDescription:
        """The description of the set: its images, its classes, and how the logits were computed."""
        return self.stored.facts

    @property
    def name(self) -> str:
        """Names of the collection and of the set ("convnet-digits/digits-test")."""
        return self.facts.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """(members, inputs, classes)."""
        return len(self), self.facts.inputs, len(self.facts.classes)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored logits; the widest dtype if members have different dtypes."""
        widest_dtype: torch.dtype = max(
            (TORCH_DTYPES[x.dtype] for x in self.facts.layouts.values()), key=lambda d: d.itemsize
        )
        return widest_dtype

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the logits."""
        return self.facts.classes

    @property
    def data(self) -> str:
        """Text with the images' name, split and fingerprint ("digits/test 0123456789abcdef")."""
        return f"{self.facts.data}/{self.facts.split} {self.facts.fingerprint}"

    @cached_property
    def labels(self) -> Tensor | None:
        """The inputs' labels as positions in `classes`, (input,) int64; None if the images have no labels."""
        return None if self.facts.labels is None else torch.tensor(self.facts.labels)

    @cached_property
    def ids(self) -> list[int]:
        """Ids of the members, in the order of the logits."""
        return [int(m) for m in self.rows.column("member").to_pylist()]

    @property
    def keys(self) -> list[tuple[int, int, str]]:
        """(member id, epoch, hash of the weights) of each member."""
        columns = (self.rows.column(c).to_pylist() for c in ("member", "epoch", "weights_sha256"))
        return list(zip(*columns, strict=True))

    @property
    def citation(self) -> str:
        """Citation text that names exactly these members; `zoo.load` loads them from it."""
        return cite_weights(*self.origin, self.facts.collection, self.rows)

    def __getitem__(self, position: object) -> Predictions:
        """Select members by a slice of positions.

        Raises:
            UsageError: the argument is not a slice.
            SelectionError: the slice contains no members.
        """
        if not isinstance(position, slice):
            expected, do = "a slice", "`.logits([id])` gives those of a member"
            raise UsageError("position of predictions", expected=expected, found=repr(position)[:80], do=do)
        return self._select(list(range(len(self)))[position])

    def _select(self, positions: list[int]) -> Predictions:
        if not positions:
            raise SelectionError(f"selection of {self.name}", expected="one member or more", found="none")
        return Predictions(self.stored, arrow_tables.take_rows(self.rows, positions), self.origin)

    @cached_property
    def _locations(self) -> list[Location]:
        """The locations of the members' logits on this machine, checked against the files' headers."""
        locations = self.stored.locate(self.rows)
        shard_files.check_against_files(locations)
        return locations

    def logits(self, ids: Iterable[int] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read whole members; return their logits (member, input, class) on the CPU.

        Args:
            ids: ids of the members to read, in the order of the result; None for all members.
            dtype: dtype of the returned tensor.

        Raises:
            MemberNotFound: the set has no predictions for one of the ids.
            DamagedError, SourceNotFound: a file of logits is missing, differs from the manifest, or has logits that are
                not finite.
            NetworkError, AccessError: the source is on the Hub and can't be read.
        """
        if ids is None:
            return self.block(0, self.shape[1], dtype)
        positions = {id: position for position, id in enumerate(self.ids)}
        requested_ids = list(ids)
        for id in requested_ids:
            if whole_number(id) not in positions:
                raise selection.member_not_found(self.rows, self.name, id)
        return self._select([positions[int(id)] for id in requested_ids]).block(0, self.shape[1], dtype)

    def block(self, begin: int, end: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Read some inputs of all members; return their logits (member, input, class) on the CPU.

        Args:
            begin, end: positions of the first input to read and of the input after the last one.
            dtype: dtype of the returned tensor.

        Raises:
            DamagedError: a file is shorter than its header says, or a logit is not finite.
            SourceNotFound: a file of the set was deleted in the meantime.
        """
        inputs = self.shape[1]
        if not 0 <= begin <= end <= inputs:
            expected = f"a begin and an end within 0 to {inputs}"
            raise UsageError(f"inputs of {self.name}", expected=expected, found=f"{begin} to {end}")
        return self._read(self._locations, begin, end).to(dtype)

    def one(self, at: int) -> Tensor:
        """Read the member at one position; return its logits (input, class) in float32 on the CPU."""
        return self._read([self._locations[at]], 0, self.shape[1])[0].float()

    def _read(self, locations: Sequence[Location], first_input: int, end_input: int) -> Tensor:
        """Read some inputs of members; return their logits (member, input, class) in the stored dtype."""
        classes = self.shape[2]
        stacked_logits = torch.empty(len(locations), end_input - first_input, classes, dtype=self.dtype)
        if not stacked_logits.numel():
            return stacked_logits
        bytes_of_members = stacked_logits.view(len(stacked_logits), -1).view(torch.uint8).numpy()
        with ExitStack() as files:
            open_file_by_path: dict[Path, FileIO] = {}
            for member_bytes, member_logits, location in zip(bytes_of_members, stacked_logits, locations, strict=True):
                if location.path not in open_file_by_path:
                    files.close()
                    open_file_by_path = {location.path: files.enter_context(self._open(location))}
                dtype = TORCH_DTYPES[location.layout.tensors[0].dtype]
                offset = location.offset + location.layout.tensors[0].offset + first_input * classes * dtype.itemsize
                if dtype == self.dtype:
                    read_at(open_file_by_path[location.path], location, offset, member_bytes.data)
                else:  # This member's logits have a narrower dtype than the logits of other members.
                    narrow_logits = torch.empty(member_logits.shape, dtype=dtype)
                    read_at(
                        open_file_by_path[location.path],
                        location,
                        offset,
                        narrow_logits.view(-1).view(torch.uint8).numpy().data,
                    )
                    member_logits.copy_(narrow_logits)
        self._check_finite(stacked_logits, locations)
        return stacked_logits

    def _open(self, location: Location) -> FileIO:
        try:
            return location.path.open("rb", buffering=0)
        except FileNotFoundError as error:  # The file was deleted after the members were located.
            raise SourceNotFound(
                f"file {location.path} of predictions {self.name}",
                expected="a file, since the set's manifest names it",
                found="none any more",
                do="Get the set again, or predict again",
                path=location.path,
            ) from error

    def _check_finite(self, logits: Tensor, locations: Sequence[Location]) -> None:
        # One pass over the values finds infinities and NaN: the minimum and maximum of values with a NaN are NaN.
        if torch.isfinite(torch.stack(torch.aminmax(logits))).all():
            return
        location = locations[int((~torch.isfinite(logits)).flatten(1).any(1).nonzero()[0])]
        raise DamagedError(
            f"predictions of member {location.member} in {self.name}",
            expected="finite logits",
            found="others",
            do="`zoo-cli verify` says whether their file was changed; get it again, or predict again",
            member=location.member,
            tensor=LOGITS_TENSOR,
            path=location.path,
        )

    def blocks(self, inputs: int | None = None, dtype: torch.dtype = torch.float32) -> Blocks:
        """Return the logits as blocks of inputs, each (member, input, class), read during the iteration.

        Args:
            inputs: number of inputs in each block; None for as many as 64 MiB hold.
            dtype: dtype of the logits in a block.

        Raises:
            UsageError: the number of inputs is no whole number from 1.
        """
        members, _, classes = self.shape
        count = max(1, BLOCK_BYTES // (4 * members * classes)) if inputs is None else whole_number(inputs)
        if count is None or count < 1:
            raise UsageError("inputs of a block", expected="a whole number from 1", found=repr(inputs)[:80])
        return Blocks(self, count, dtype)

    def batches(self, size: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[list[int], Tensor]]:
        """Stream the members: yield (ids, logits (member, input, class)) of `size` members each.

        Args:
            size: number of members in each batch.
            dtype: dtype of the logits.

        Raises:
            UsageError: the size is no whole number from 1.
        """
        count = whole_number(size)
        if count is None or count < 1:
            raise UsageError("size of a batch of members", expected="a whole number from 1", found=repr(size))
        for first in range(0, len(self), count):
            selected = self[first : first + count]
            yield selected.ids, selected.logits(dtype=dtype)

    def check_data(self, data: ImageData) -> None:
        """Check that these predictions were made on the given images.

        Args:
            data: the images.

        Raises:
            UsageError: the images differ in number, pixels, labels or the order of the classes.
        """
        check_data(self.facts, data)


class Blocks:
    """Stored logits as blocks of inputs, each (member, input, class); every iteration reads them again.

    Args:
        predictions: the stored predictions whose logits are read.
        inputs: number of inputs in each block.
        dtype: dtype of the logits in a block.
    """

    def __init__(self, predictions: Predictions, inputs: int, dtype: torch.dtype) -> None:
        self.predictions, self.inputs, self.dtype = predictions, inputs, dtype

    def __len__(self) -> int:
        return -(-self.predictions.shape[1] // self.inputs)

    def __iter__(self) -> Iterator[Tensor]:
        end = self.predictions.shape[1]
        for begin in range(0, end, self.inputs):
            yield self.predictions.block(begin, min(end, begin + self.inputs), self.dtype)


def check_members(description: SetDescription, members: Members) -> None:
    """Check that a set of predictions has the classes of the members, in the order of the logits, and the members'
    preprocessing.

    Raises:
        UsageError: the set has other classes or another preprocessing.
    """
    if description.classes != members.classes:
        raise UsageError(
            f"predictions {description.name}",
            expected=f"classes {', '.join(members.classes[:12])}, in this order",
            found=f"classes {', '.join(description.classes[:12])}",
            do="Predict again: the set was made from another state of the collection",
            collection=description.collection,
        )
    if dict(description.preprocessing) != dict(members.description.preprocessing):
        raise UsageError(
            f"predictions {description.name}",
            expected=f"inputs preprocessed as {dict(members.description.preprocessing)}",
            found=f"{dict(description.preprocessing)}",
            do="Predict again: the set was made from another state of the collection",
            collection=description.collection,
        )


def check_data(description: SetDescription, data: ImageData) -> None:
    """Check that a set was made on the given images: with the same pixels, labels and classes.

    Classes in another order are first put into the set's order by their names, as in `predict`.

    Raises:
        UsageError: the set was made on other images.
    """
    data = in_order(data, description.classes)
    expected = (f"{len(data):,} inputs", f"fingerprint {data.fingerprint}")
    found = (f"{description.inputs:,} inputs", f"fingerprint {description.fingerprint}")
    if expected != found:
        raise UsageError(
            f"predictions {description.name}",
            expected=f"{', '.join(expected)}, as images {data.name}/{data.split} have",
            found=f"{', '.join(found)}, of {description.data}/{description.split}",
            do="The set is on other images, or on these in another order; predict on these",
            collection=description.collection,
        )


def select_rows(stored: PredictionSet, members: Members) -> pa.Table:
    """Find the members' rows in a set and compare the weights; return the rows in the members' order.

    Raises:
        MemberNotFound: the set has no row for some members.
        UsageError: some of the set's rows were made with other weights.
    """
    columns = (stored.rows.column(c).to_pylist() for c in ("member", "epoch"))
    positions = {key: i for i, key in enumerate(zip(*columns, strict=True))}
    missing = [id for id, epoch in members._snapshot_keys if (id, epoch) not in positions]
    name = stored.facts.name
    if missing:
        raise MemberNotFound(
            f"predictions {name}",
            expected=f"a row for each of the {len(members)} selected members",
            found=f"none for members {selection.format_ids([(id, None) for id in missing[:100]])}",
            do="`zoo-cli predict` adds the missing ones; or select members that the set has",
            collection=stored.facts.collection,
            member=missing[0],
        )
    rows = arrow_tables.take_rows(stored.rows, [positions[key] for key in members._snapshot_keys])
    used_hashes = rows.column("weights_sha256").to_pylist()
    for (id, _), known_hash, used_hash in zip(
        members._snapshot_keys, members.rows.column("sha256").to_pylist(), used_hashes, strict=True
    ):
        if known_hash != used_hash:
            raise weights_mismatch(name, id, known_hash, used_hash)
    return rows


def weights_mismatch(predictions_name: str, member: int, row_hash: str | None, used_hash: str) -> UsageError:
    """Return the error for predictions that were made with other weights than a member's."""
    hash_advice = "`zoo-cli import --hash` fills the hashes of a collection that has none"
    return UsageError(
        f"predictions {predictions_name} of member {member}",
        expected=f"made with weights of sha256 {row_hash[:16]}…"
        if row_hash
        else "the hash of its weights in its manifest",
        found=f"made with {used_hash[:16]}…" if row_hash else "null, so that the two can't be compared",
        do="Predict again, under another name or after deleting the set" if row_hash else hash_advice,
        collection=predictions_name.partition("/")[0],
        member=member,
    )
