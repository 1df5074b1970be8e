"""`predict`: compute logits of members once and store them as shards with a manifest of their own.

This is one file, because the run and the files of its finished members share the folder of the set.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from checkpoints_zoo import images
from checkpoints_zoo.errors import DamagedError, FormatError, LockedError, UsageError
from checkpoints_zoo.formats import catalog, disk, manifest, shard_files
from checkpoints_zoo.formats.layout import Layout, content_hash
from checkpoints_zoo.formats.shard_files import Location, tensor_prefix
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import pack_member
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import (
    LOGITS_TENSOR,
    SCHEMA,
    PredictionSet,
    SetDescription,
    logits_layout,
)
from checkpoints_zoo.predictions.running import Members, group_size, logits_by_group
from checkpoints_zoo.predictions.stored import Predictions, cite_weights, predictions_of, weights_mismatch
from checkpoints_zoo.sources import hub_addresses
from checkpoints_zoo.sources.folder_source import EMBEDDED, FolderSource
from checkpoints_zoo.workers import Engine, InProcess, Job, choose_engine

GROUP_BYTES = 2**27  # Number of bytes of float32 logits that are held in memory before they are written.
JOB_MEMBERS = 16  # Number of members in one job on a CPU, where a member's logits depend on no other member.
LEAST_JOBS = 16  # Smallest number of jobs, if there are at least as many members.

Key = tuple[int, int]
PackedLogits = tuple[int, bytearray]  # Position of a member, and the bytes of its logits as they are stored.


def predict(
    members: Members,
    data: ImageInput,
    out: str | Path | None = None,
    *,
    name: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 512,
    workers: int | None = None,
    devices: Sequence[str] | None = None,
    ray: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Predictions:
    """Run members on images and store their logits in float16, together with the labels; return the predictions.

    Members whose logits are stored in the set already are not run again, even if the earlier run was killed. The
    rounding error of a stored logit is at most 1/2048 of it. Views that keep a member's function (canonical, aligned)
    change its logits by rounding errors.

    Args:
        members: a collection.
        data: images to run on: a name ("digits", "digits/train"), a path or address, or any other argument of
            `images.of`. Labels are stored if they belong to the members' classes, renumbered in the order of the
            logits.
        out: a folder; the set goes into its subfolder predictions/COLLECTION/SET, where `zoo.publish` finds it. `out`
            may be None for the members' own folder.
        name: name of the new set; None for the name and split of the images ("digits-test").
        device, dtype: device and dtype of the computation.
        batch: number of images in each forward pass.
        workers: number of processes that run at a time; None for one on each device. The number of processes does not
            change the stored bytes.
        devices: names of several devices, used instead of `device` ("cuda:0", "cuda:1").
        ray: "auto", "local" or the address of a Ray cluster that runs the members; see `workers.choose_engine`.
        say: function that is called with each line of progress.

    Raises:
        UsageError: the members can't take the images, or a set of this name exists that was made on other images or
            with other weights.
        DamagedError: weights do not match their manifest rows, or logits are too large for float16.
        LockedError: another process is writing the same set.
        StorageError: the disk is full or can't be written to.
        NetworkError, AccessError: the members' repo on the Hub, or the Ray cluster, can't be reached.
        WorkerError: worker processes died repeatedly.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=3)
    >>> predict(members, "digits", tempfile.mkdtemp())
    Predictions('convnet-digits/digits-test', 3 members × 540 inputs × 10 classes, on digits/test)
    """
    members._skeleton()  # Refuse an empty selection or an unknown network before a folder is made.
    data_set = images.in_order(images.of(data), members.classes)
    set_name = prediction_sets.check_set_name(f"{data_set.name}-{data_set.split}" if name is None else name)
    engine = choose_engine(workers, [str(device)] if devices is None else devices, ray, say)
    if ray is None:
        for device_name in [device] if devices is None else devices:
            check_device(device_name)
    root = _output_folder(members, out)
    folder = root / prediction_sets.folder_of_set(members.name, set_name)
    description = _describe_set(members, data_set, set_name, dtype)
    with disk.translate_write_errors(folder), disk.hold_lock(folder / ".lock", _locked_error(folder)):
        existing_set = (
            prediction_sets.read_set(FolderSource(root, root.as_uri()), members.name, set_name)
            if (folder / prediction_sets.MANIFEST_FILE).is_file()
            else None
        )
        hashes = _weight_hashes(members)
        _check_existing_set(existing_set, description, members, hashes)
        finished = FinishedMembers(folder, description)
        stored_keys = {} if existing_set is None else dict.fromkeys(_snapshot_keys(existing_set))
        positions_to_run = [
            i
            for i, key in enumerate(members._snapshot_keys)
            if key not in stored_keys and not finished.has_logits(key, hashes[key])
        ]
        say(
            f"{description.name}: {len(positions_to_run):,} of {len(members):,} members "
            f"to run on {len(data_set):,} inputs …"
        )
        for position, raw in _run_members(
            PredictionRun(members, data_set, description, hashes, dtype, batch),
            _consecutive_ranges(positions_to_run),
            engine,
        ):
            key = members._snapshot_keys[position]
            finished.write_logits(key, hashes[key], raw)
        is_final_by_member = members.rows.column("final").to_pylist()
        finished_keys = sorted(
            (key, final)
            for key, final in zip(members._snapshot_keys, is_final_by_member, strict=True)
            if key not in stored_keys
        )
        finished.write_set(
            existing_set,
            finished_keys,
            hashes,
            lambda rows: replace(description, citation=_public_citation(members, rows)),
        )
    return predictions_of(members, set_name, source=root, data=data_set)


def _output_folder(members: Members, out: str | Path | None) -> Path:
    """Return the folder below which predictions are stored."""
    if out is not None:
        return Path(out).expanduser().absolute()
    if not members.source.label.startswith("file:"):
        raise UsageError(
            f"folder for predictions of {members.name}",
            expected="`out`, a folder of yours",
            found=f"none, and the members are in {members.source.display_name}",
        )
    return members.source.root


def _describe_set(members: Members, data: ImageData, set_name: str, dtype: torch.dtype) -> SetDescription:
    classes, labels = members.classes, None
    if data.labels is not None and tuple(data.classes) == classes:
        labels = tuple(int(x) for x in data.labels.tolist())
    return SetDescription(
        collection=members.name, set=set_name, data=data.name, split=data.split, revision=data.revision,
        fingerprint=data.fingerprint, inputs=len(data), classes=classes,
        preprocessing=dict(members.description.preprocessing), computed=str(dtype).removeprefix("torch."),
        view="; ".join(str(step) for step in members._view.steps), version=version("checkpoints-zoo"), citation="",
        layouts={LOGITS_TENSOR: logits_layout(len(data), len(classes))}, labels=labels,
    )  # fmt: skip


def _public_citation(members: Members, rows: object) -> str:
    """Return a citation of the members if their source is public and all rows have hashes; else return ""."""
    is_public = members.source.label == EMBEDDED or members.source.label.startswith(hub_addresses.ADDRESS_SCHEME)
    if not is_public or members.rows.column("sha256").null_count:
        return ""
    return cite_weights(members.source.label, members._commit, members.name, rows)


def _snapshot_keys(stored: PredictionSet) -> list[Key]:
    columns = (stored.rows.column(c).to_pylist() for c in ("member", "epoch"))
    return list(zip(*columns, strict=True))


def _weight_hashes(members: Members) -> dict[Key, str]:
    """Return the content hash of each member's weights, from its row or, if the row has none, computed from the
    bytes."""
    hashes = members.rows.column("sha256").to_pylist()
    if None in hashes:
        hashes = shard_files.hash_members(members._locations())
    return dict(zip(members._snapshot_keys, hashes, strict=True))


def _check_existing_set(
    existing_set: PredictionSet | None, description: SetDescription, members: Members, hashes: dict[Key, str]
) -> None:
    """Check that predictions of these members can be added to a set that exists already.

    Raises:
        UsageError: the existing set is on other images, was computed in another way, or with other weights of the same
            members.
    """
    if existing_set is None:
        return
    existing_description = existing_set.facts
    for field in ("fingerprint", "inputs", "classes", "labels", "preprocessing", "computed", "view"):
        if getattr(existing_description, field) != getattr(description, field):
            field_texts = [
                f"{field} {getattr(x, field)!r}" if field != "labels" else "labels"
                for x in (description, existing_description)
            ]
            raise UsageError(
                f"predictions {description.name} in {existing_set.source.display_name}",
                expected=f"none yet, or some with {field_texts[0]:.160}",
                found=f"some with {'others' if field == 'labels' else field_texts[1]:.160}",
                do="Give another name, or delete the set",
                collection=description.collection,
            )
    for key, used_hash in zip(
        _snapshot_keys(existing_set), existing_set.rows.column("weights_sha256").to_pylist(), strict=True
    ):
        if hashes.get(key, used_hash) != used_hash:
            raise weights_mismatch(description.name, key[0], hashes[key], used_hash)
    label_and_commit = f"{members.source.label}@{members._commit}/"
    if (
        existing_description.citation
        and not existing_description.citation.startswith(label_and_commit)
        and set(_snapshot_keys(existing_set)) - set(members._snapshot_keys)
    ):
        raise UsageError(
            f"predictions {description.name} in {existing_set.source.display_name}",
            expected=f"some of members of {label_and_commit}{members.name}",
            found=f"some of {existing_description.citation}",
            do="Select the members that it has as well, or give another name",
            collection=description.collection,
        )


def _locked_error(folder: Path) -> LockedError:
    """Return the error for a set that another process is writing."""
    return LockedError(
        f"folder {folder}",
        expected="no other process writing predictions into it",
        found=f"a lock on {folder / '.lock'}",
        do="Wait until the other run ends, or give another folder or name",
        path=folder,
    )


def _run_members(prediction_run: PredictionRun, ranges: Iterable[range], engine: Engine) -> Iterator[PackedLogits]:
    """Run members in this process or in an engine's workers; yield (position, bytes of the logits) of each member when
    its job ends."""
    if isinstance(engine, InProcess):
        # In one process, the next group of members is read while the present group computes.
        for positions in ranges:
            yield from prediction_run.packed_logits(positions, engine.device)
        return
    all_ranges = list(ranges)
    for positions in all_ranges:
        # Fetch the members from the Hub once, before the workers start.
        prediction_run.members[positions.start : positions.stop]._locations()
    with closing(engine.run(prediction_run, prediction_run.divide_into_jobs(all_ranges, engine.device))) as results:
        for _, packed_of_job in results:
            yield from packed_of_job


def _consecutive_ranges(positions: list[int]) -> Iterator[range]:
    """Join consecutive positions into ranges; yield each range."""
    start = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1:
            yield range(positions[start], positions[end - 1] + 1)
            start = end


@dataclass(frozen=True, eq=False)
class PredictionRun:
    """Members and the images that they are run on; workers call it with positions of members.

    Args:
        members, data: the members to run and the images to run them on.
        description: description of the set to which the logits will belong.
        hashes: content hash that each member's weights must have.
        dtype, batch: the same arguments as in `predict`.
    """

    members: Members
    data: ImageData
    description: SetDescription
    hashes: Mapping[Key, str]
    dtype: torch.dtype
    batch: int

    def __call__(self, positions: range, device: str) -> list[PackedLogits]:
        """Run the members at the given positions; return (position, bytes of the logits) of each member."""
        return list(self.packed_logits(positions, device))

    @property
    def members_at_once(self) -> int:
        """Return the number of members whose logits are held in memory at a time."""
        return max(1, GROUP_BYTES // (4 * self.description.inputs * len(self.description.classes)))

    def divide_into_jobs(self, ranges: Sequence[range], device: str | torch.device) -> list[Job[range]]:
        """Divide members into jobs that give the same bits as one process; return the jobs.

        On a GPU the last bits of a member's logits may depend on the group that it is run in, so the groups are those
        that one process would form.

        Args:
            ranges: ranges of positions of the members to run.
            device: device that the jobs compute on.
        """
        jobs = []
        member_count = sum(len(positions_of_run) for positions_of_run in ranges)
        for positions_of_run in ranges:
            members_per_job = group_size(
                self.members[positions_of_run.start : positions_of_run.stop], self.members_at_once
            )
            if torch.device(device).type == "cpu":
                members_per_job = min(members_per_job, JOB_MEMBERS, -(-member_count // LEAST_JOBS))
            for first in range(positions_of_run.start, positions_of_run.stop, members_per_job):
                positions = range(first, min(first + members_per_job, positions_of_run.stop))
                first_and_last_id = self.members.ids[positions.start], self.members.ids[positions.stop - 1]
                jobs.append(
                    Job(
                        f"members {first_and_last_id[0]} to {first_and_last_id[1]}"
                        if len(positions) > 1
                        else f"member {first_and_last_id[0]}",
                        positions,
                    )
                )
        return jobs

    def packed_logits(self, positions: range, device: str | torch.device) -> Iterator[PackedLogits]:
        """Run members and round their logits; yield (position, bytes of the logits) of each member.

        Args:
            positions: positions of the members to run.
            device: device that the members run on.

        Raises:
            UsageError: the members can't take the images, or give logits of another number of classes.
            DamagedError: weights do not match their manifest rows, or logits are too large for float16.
        """
        members, description = self.members[positions.start : positions.stop], self.description
        members_done = 0
        for member_ids, logits_of_group in logits_by_group(
            members, self.data, device, self.dtype, self.batch, self.members_at_once
        ):
            if logits_of_group.shape[-1] != len(description.classes):
                raise UsageError(
                    f"predictions {description.name}",
                    expected=f"logits of {len(description.classes)} classes, as the collection has",
                    found=f"{logits_of_group.shape[-1]}",
                    collection=description.collection,
                )
            members_of_group = members[members_done : members_done + len(member_ids)]
            for key, weights_hash in zip(
                members_of_group._snapshot_keys, shard_files.hash_members(members_of_group._locations()), strict=True
            ):
                if weights_hash != self.hashes[key]:
                    raise DamagedError(
                        f"member {key[0]} of {members.name}",
                        expected=f"weights of sha256 {self.hashes[key][:16]}…, as its row says",
                        found=f"{weights_hash[:16]}…",
                        do="`zoo-cli verify` lists all members that do not match their rows",
                        collection=members.name,
                        member=key[0],
                    )
            for i, logits in enumerate(logits_of_group):
                try:
                    yield (
                        positions.start + members_done + i,
                        pack_member({LOGITS_TENSOR: logits}, description.layouts[LOGITS_TENSOR]),
                    )
                except DamagedError as error:
                    error.thing, error.member = (
                        f"logits of member {member_ids[i]} on {description.data}/{description.split}",
                        member_ids[i],
                    )
                    error.do = "Leave the member out"
                    raise
            members_done += len(member_ids)


class FinishedMembers:
    """Files with the logits of finished members, one file a member, until all logits are written into the set's shards.

    Args:
        folder: folder of the set; it is locked, so no other process writes to it.
        description: description of the set. Files of an earlier run that had another description are deleted.
    """

    def __init__(self, folder: Path, description: SetDescription) -> None:
        self.folder, self.parts_folder = folder, folder / ".parts"
        self.layout: Layout = description.layouts[LOGITS_TENSOR]
        description_file = self.parts_folder / "begun.json"
        description_json = description.to_json() | {"version": "", "citation": ""}
        try:
            has_same_description = (
                description_file.is_file() and catalog.read_json(description_file) == description_json
            )
        except FormatError:
            has_same_description = False
        if not has_same_description:
            shutil.rmtree(self.parts_folder, ignore_errors=True)
            catalog.write_json(description_json, description_file)
        for path in (*folder.glob(".*.tmp"), *self.parts_folder.glob(".*.tmp")):  # Files left by a run that was killed.
            path.unlink()

    def _logits_path(self, member_key: Key, weights_hash: str) -> Path:
        return self.parts_folder / f"{member_key[0]:06d}@{member_key[1]}-{weights_hash}.safetensors"

    def has_logits(self, member_key: Key, weights_hash: str) -> bool:
        """Say whether a complete file with a member's logits exists."""
        path = self._logits_path(member_key, weights_hash)
        try:
            if path.is_file():
                shard_files.check_against_files([self._logits_location(member_key, path)])
                return True
        except DamagedError:  # A damaged file of logits counts as missing.
            path.unlink()
        return False

    def _logits_location(self, member_key: Key, logits_path: Path) -> Location:
        return Location(member_key[0], "", logits_path, shard_files.first_offset(self.layout, [""]), self.layout)

    def write_logits(self, member_key: Key, weights_hash: str, packed_logits: shard_files.Bytes) -> None:
        """Write a member's logits to a file of its own, by rename."""
        shard_path = shard_files.write_shard(self.parts_folder / ".new", 0, self.layout, [("", packed_logits)])
        shard_path.replace(self._logits_path(member_key, weights_hash))

    def write_set(
        self,
        existing_set: PredictionSet | None,
        keys_and_final: Sequence[tuple[Key, bool]],
        hashes: Mapping[Key, str],
        describe: Callable[[pa.Table], SetDescription],
    ) -> None:
        """Write the finished members into shards, and the manifest after each shard; older shards stay as they are.

        Args:
            existing_set: the set as it was before this run; None if there was none.
            keys_and_final: pairs (key, final) of finished members: key is (member, epoch), and final says whether the
                snapshot is the last one of its run; in the order of the rows.
            hashes: the hash of each member's weights.
            describe: function that returns the description of the set, given its rows.
        """
        rows = [] if existing_set is None else existing_set.rows.to_pylist()
        shard_number = 1 + max((int(Path(row["path"]).name[:5]) for row in rows), default=-1)
        # A shard with a later number was left by a run that was killed before it wrote the rows.
        for path in self.folder.glob("[0-9]*.safetensors"):
            if int(path.name[:5]) >= shard_number:
                path.unlink()
        members_per_shard = shard_files.members_per_shard(self.layout)
        for first in range(0, len(keys_and_final), members_per_shard):
            chunk_of_keys = keys_and_final[first : first + members_per_shard]
            rows += self._write_shard(shard_number, chunk_of_keys, hashes)
            shard_number += 1
            table = manifest.build_manifest(rows, SCHEMA)
            catalog.write_json(describe(table).to_json(), self.folder / prediction_sets.DESCRIPTION_FILE)
            manifest.write_manifest(table, self.folder / prediction_sets.MANIFEST_FILE, SCHEMA)
            for key, _ in chunk_of_keys:
                self._logits_path(key, hashes[key]).unlink()
        if not any(self.parts_folder.glob("*.safetensors")):
            shutil.rmtree(self.parts_folder)

    def _write_shard(
        self, shard_number: int, keys_in_shard: Sequence[tuple[Key, bool]], hashes_of_weights: Mapping[Key, str]
    ) -> list[dict[str, Any]]:
        """Write the logits of some members into a shard; return their manifest rows."""
        hashes_of_logits: list[str] = []

        def read() -> Iterator[shard_files.Bytes]:
            for key, _ in keys_in_shard:
                _, packed_logits = next(
                    iter(
                        shard_files.read_members(
                            [self._logits_location(key, self._logits_path(key, hashes_of_weights[key]))]
                        )
                    )
                )
                hashes_of_logits.append(content_hash(self.layout, packed_logits))
                yield packed_logits

        prefixes = [tensor_prefix(member, None if final else epoch) for (member, epoch), final in keys_in_shard]
        path = shard_files.stream_shard(self.folder, shard_number, self.layout, prefixes, read())
        path_in_source = "/".join(path.parts[-4:])
        start, step = shard_files.first_offset(self.layout, prefixes), self.layout.nbytes
        return [
            {
                "member": key[0], "epoch": key[1], "final": final, "status": "ok",
                "weights_sha256": hashes_of_weights[key], "sha256": hashes_of_logits[i], "path": path_in_source,
                "offset": start + i * step, "nbytes": step, "layout": LOGITS_TENSOR, "dtype": self.layout.dtype,
            }
            for i, (key, final) in enumerate(keys_in_shard)
        ]  # fmt: skip
