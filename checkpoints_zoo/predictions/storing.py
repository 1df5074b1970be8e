"""`predict`: logits of members, computed once and stored as shards with a manifest of their own."""

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
from checkpoints_zoo.formats.shard_files import Location, prefix
from checkpoints_zoo.images import ImageData, ImageInput
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import pack_member
from checkpoints_zoo.predictions import prediction_sets
from checkpoints_zoo.predictions.prediction_sets import LOGITS, SCHEMA, Facts, PredictionSet, layout_of
from checkpoints_zoo.predictions.running import Members, by_members, group_size
from checkpoints_zoo.predictions.stored import Predictions, cited, other_weights, predictions_of
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.source import EMBEDDED, FolderSource
from checkpoints_zoo.workers import Engine, InProcess, Job, choose_engine

GROUP_BYTES = 2**27  # of logits in float32 that are held before they are stored
JOB_MEMBERS = 16  # in one job on CPUs, where a member's logits depend on no other
JOBS = 16  # that work is divided into at least, as far as there are members

Key = tuple[int, int]
Packed = tuple[int, bytearray]  # position among the members, logits as they are stored


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
    """Run members on images and store their logits in float16, labels with them; return these predictions.

    Members that a set has already are not run again, and members that were done when a run was killed neither. A stored
    logit is off by at most 1/2048 of itself. Views that keep the function (canonical, aligned) change it by rounding.

    Args:
        members: a collection.
        data: images: their name ("digits", "digits/train"), their place, or whatever `images.of` takes. Labels are
            stored where their classes are the members', in the order of the logits.
        out: a folder; the set goes into predictions/COLLECTION/SET in it, from where `zoo.publish` takes it. None for
            the folder that the members lie in.
        name: of the set; None for the images' name and split ("digits-test").
        device, dtype: what the members run on and in.
        batch: images a forward pass.
        workers: processes at a time; None for one a device. What is stored is the same, byte for byte.
        devices: several to compute on instead of one ("cuda:0", "cuda:1").
        ray: "auto", "local" or an address: members are run on a Ray cluster; see `executor.engine`.
        say: told what is being done, a line at a time.

    Raises:
        UsageError: images that the members can't take; a set of that name on other images or of other weights.
        DamagedError: weights that are not what their rows say, or logits that float16 can't hold.
        LockedError: another process is writing the same set.
        StorageError: the disk is full, or can't be written to.
        NetworkError, AccessError: members on the Hub that can't be had, or a Ray cluster.
        WorkerError: processes that die again and again.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=3)
    >>> predict(members, "digits", tempfile.mkdtemp())
    Predictions('convnet-digits/digits-test', 3 members × 540 inputs × 10 classes, on digits/test)
    """
    members._skeleton()  # what has no members, or no net, is refused before a folder is made
    inside = images.in_order(images.of(data), members.classes)
    kind = prediction_sets.check_set(f"{inside.name}-{inside.split}" if name is None else name)
    on = choose_engine(workers, [str(device)] if devices is None else devices, ray, say)
    if ray is None:
        for each in [device] if devices is None else devices:
            check_device(each)
    root = _root(members, out)
    folder = root / prediction_sets.folder_of(members.name, kind)
    facts = _facts(members, inside, kind, dtype)
    with disk.writing_into(folder), disk.locked(folder / ".lock", _busy(folder)):
        before = (
            prediction_sets.read(FolderSource(root, root.as_uri()), members.name, kind)
            if (folder / prediction_sets.TABLE).is_file()
            else None
        )
        hashes = _hashes(members)
        _check_before(before, facts, members, hashes)
        parts = Parts(folder, facts)
        done = {} if before is None else dict.fromkeys(_keys(before))
        wanted = [i for i, key in enumerate(members._keys) if key not in done and not parts.has(key, hashes[key])]
        say(f"{facts.name}: {len(wanted):,} of {len(members):,} members to run on {len(inside):,} inputs …")
        for at, raw in _run(Running(members, inside, facts, hashes, dtype, batch), _runs(wanted), on):
            key = members._keys[at]
            parts.keep(key, hashes[key], raw)
        finals = members.rows.column("final").to_pylist()
        new = sorted((key, final) for key, final in zip(members._keys, finals, strict=True) if key not in done)
        parts.finish(before, new, hashes, lambda rows: replace(facts, citation=_citation(members, rows)))
    return predictions_of(members, kind, source=root, data=inside)


def _root(members: Members, out: str | Path | None) -> Path:
    """Return the folder that predictions go into."""
    if out is not None:
        return Path(out).expanduser().absolute()
    if not members.source.label.startswith("file:"):
        raise UsageError(
            f"folder for predictions of {members.name}",
            expected="`out`, a folder of yours",
            found=f"none, and the members lie in {members.source.shown}",
        )
    return members.source.root


def _facts(members: Members, inside: ImageData, kind: str, dtype: torch.dtype) -> Facts:
    classes, labels = members.classes, None
    if inside.labels is not None and tuple(inside.classes) == classes:
        labels = tuple(int(x) for x in inside.labels.tolist())
    return Facts(
        collection=members.name, set=kind, data=inside.name, split=inside.split, revision=inside.revision,
        fingerprint=inside.fingerprint, inputs=len(inside), classes=classes,
        preprocessing=dict(members.description.preprocessing), computed=str(dtype).removeprefix("torch."),
        view="; ".join(str(step) for step in members._view.steps), version=version("checkpoints-zoo"), citation="",
        layouts={LOGITS: layout_of(len(inside), len(classes))}, labels=labels,
    )  # fmt: skip


def _citation(members: Members, rows: object) -> str:
    """Cite the members of rows, where their weights lie in a place that others can read and all are hashed."""
    public = members.source.label == EMBEDDED or members.source.label.startswith(hub.SCHEME)
    if not public or members.rows.column("sha256").null_count:
        return ""
    return cited(members.source.label, members._commit, members.name, rows)


def _keys(stored: PredictionSet) -> list[Key]:
    columns = (stored.rows.column(c).to_pylist() for c in ("member", "epoch"))
    return list(zip(*columns, strict=True))


def _hashes(members: Members) -> dict[Key, str]:
    """Return the content hash of each member's weights: by its row, or where that has none by its bytes."""
    claimed = members.rows.column("sha256").to_pylist()
    if None in claimed:
        claimed = shard_files.hash_members(members._locations())
    return dict(zip(members._keys, claimed, strict=True))


def _check_before(before: PredictionSet | None, facts: Facts, members: Members, hashes: dict[Key, str]) -> None:
    """Check that a set that is there already is one that these members' predictions can join.

    Raises:
        UsageError: it is on other images, was computed in another way, or with other weights of the same members.
    """
    if before is None:
        return
    was = before.facts
    for field in ("fingerprint", "inputs", "classes", "labels", "preprocessing", "computed", "view"):
        if getattr(was, field) != getattr(facts, field):
            shown = [f"{field} {getattr(x, field)!r}" if field != "labels" else "labels" for x in (facts, was)]
            raise UsageError(
                f"predictions {facts.name} in {before.source.shown}",
                expected=f"none yet, or some with {shown[0]:.160}",
                found=f"some with {'others' if field == 'labels' else shown[1]:.160}",
                do="Give another name, or delete the set",
                collection=facts.collection,
            )
    for key, made in zip(_keys(before), before.rows.column("weights_sha256").to_pylist(), strict=True):
        if hashes.get(key, made) != made:
            raise other_weights(facts.name, key[0], hashes[key], made)
    origin = f"{members.source.label}@{members._commit}/"
    if was.citation and not was.citation.startswith(origin) and set(_keys(before)) - set(members._keys):
        raise UsageError(
            f"predictions {facts.name} in {before.source.shown}",
            expected=f"some of members of {origin}{members.name}",
            found=f"some of {was.citation}",
            do="Select the members that it has as well, or give another name",
            collection=facts.collection,
        )


def _busy(folder: Path) -> LockedError:
    """Return the error for a set that another process is writing."""
    return LockedError(
        f"folder {folder}",
        expected="no other process writing predictions into it",
        found=f"a lock on {folder / '.lock'}",
        do="Wait until the other run ends, or give another folder or name",
        path=folder,
    )


def _run(work: Running, runs: Iterable[range], on: Engine) -> Iterator[Packed]:
    """Run members at some positions on an engine; yield position and bytes of each as they come."""
    if isinstance(on, InProcess):  # the next group is read while one computes
        for run in runs:
            yield from work.packed(run, on.device)
        return
    some = list(runs)
    for run in some:
        work.members[run.start : run.stop]._locations()  # those on the Hub are fetched once, here
    with closing(on.run(work, work.jobs(some, on.device))) as results:
        for _, packed in results:
            yield from packed


def _runs(positions: list[int]) -> Iterator[range]:
    """Join positions that follow each other; yield the runs."""
    start = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] != positions[at - 1] + 1:
            yield range(positions[start], positions[at - 1] + 1)
            start = at


@dataclass(frozen=True, eq=False)
class Running:
    """What is run on what.

    Args:
        members, inside: the members and the images.
        facts: of the set that the logits are for.
        hashes: what each member's weights must hash to.
        dtype, batch: as in `predict`.
    """

    members: Members
    inside: ImageData
    facts: Facts
    hashes: Mapping[Key, str]
    dtype: torch.dtype
    batch: int

    def __call__(self, some: range, device: str) -> list[Packed]:
        """Run the members at some positions; return the position and the stored bytes of each."""
        return list(self.packed(some, device))

    @property
    def most(self) -> int:
        """How many members' logits are held at a time."""
        return max(1, GROUP_BYTES // (4 * self.facts.inputs * len(self.facts.classes)))

    def jobs(self, runs: Sequence[range], device: str | torch.device) -> list[Job[range]]:
        """Divide members into jobs whose results are those of one process, bit for bit; return these.

        On a GPU a member's last bits may depend on the group that it is run in: there the groups are the same.

        Args:
            runs: positions that follow each other.
            device: what the jobs will run on.
        """
        found = []
        wanted = sum(len(run) for run in runs)
        for run in runs:
            size = group_size(self.members[run.start : run.stop], self.most)
            if torch.device(device).type == "cpu":
                size = min(size, JOB_MEMBERS, -(-wanted // JOBS))
            for at in range(run.start, run.stop, size):
                some = range(at, min(at + size, run.stop))
                ids = self.members.ids[some.start], self.members.ids[some.stop - 1]
                found.append(Job(f"members {ids[0]} to {ids[1]}" if len(some) > 1 else f"member {ids[0]}", some))
        return found

    def packed(self, some: range, device: str | torch.device) -> Iterator[Packed]:
        """Run members and round their logits; yield position and bytes of each.

        Raises:
            UsageError: images that the members can't take, or logits of other classes.
            DamagedError: weights that are not what their rows say, or logits that float16 can't hold.
        """
        members, facts = self.members[some.start : some.stop], self.facts
        at = 0
        for ids, found in by_members(members, self.inside, device, self.dtype, self.batch, self.most):
            if found.shape[-1] != len(facts.classes):
                raise UsageError(
                    f"predictions {facts.name}",
                    expected=f"logits of {len(facts.classes)} classes, as the collection has",
                    found=f"{found.shape[-1]}",
                    collection=facts.collection,
                )
            group = members[at : at + len(ids)]
            for key, digest in zip(group._keys, shard_files.hash_members(group._locations()), strict=True):
                if digest != self.hashes[key]:
                    raise DamagedError(
                        f"member {key[0]} of {members.name}",
                        expected=f"weights of sha256 {self.hashes[key][:16]}…, as its row says",
                        found=f"{digest[:16]}…",
                        do="`zoo-cli verify` lists all that are not what their rows say",
                        collection=members.name,
                        member=key[0],
                    )
            for i, logits in enumerate(found):
                try:
                    yield some.start + at + i, pack_member({LOGITS: logits}, facts.layouts[LOGITS])
                except DamagedError as error:
                    error.thing, error.member = f"logits of member {ids[i]} on {facts.data}/{facts.split}", ids[i]
                    error.do = "Leave the member out"
                    raise
            at += len(ids)


class Parts:
    """The logits of a set that is being written.

    Args:
        folder: of the set; nobody else writes to it.
        facts: of the set. What was laid aside for other ones is deleted.
    """

    def __init__(self, folder: Path, facts: Facts) -> None:
        self.folder, self.aside = folder, folder / ".parts"
        self.layout: Layout = facts.layouts[LOGITS]
        begun = self.aside / "begun.json"
        values = facts.to_json() | {"version": "", "citation": ""}
        try:
            same = begun.is_file() and catalog.read_json(begun) == values
        except FormatError:
            same = False
        if not same:
            shutil.rmtree(self.aside, ignore_errors=True)
            catalog.write_json(values, begun)
        for path in (*folder.glob(".*.tmp"), *self.aside.glob(".*.tmp")):  # of a run that was killed
            path.unlink()

    def _path(self, key: Key, weights: str) -> Path:
        return self.aside / f"{key[0]:06d}@{key[1]}-{weights}.safetensors"

    def has(self, key: Key, weights: str) -> bool:
        """Say whether a member's logits are here, whole."""
        path = self._path(key, weights)
        try:
            if path.is_file():
                shard_files.check_against_files([self._location(key, path)])
                return True
        except DamagedError:  # computed again
            path.unlink()
        return False

    def _location(self, key: Key, path: Path) -> Location:
        return Location(key[0], "", path, shard_files.first_offset(self.layout, [""]), self.layout)

    def keep(self, key: Key, weights: str, raw: shard_files.Bytes) -> None:
        """Lay a member's logits aside, by rename."""
        written = shard_files.write_shard(self.aside / ".new", 0, self.layout, [("", raw)])
        written.replace(self._path(key, weights))

    def finish(
        self,
        before: PredictionSet | None,
        new: Sequence[tuple[Key, bool]],
        weights: Mapping[Key, str],
        facts: Callable[[pa.Table], Facts],
    ) -> None:
        """Write shards of what was laid aside, and after each the manifest; what was there before stays as it is.

        Args:
            before: the set as it was, None for none.
            new: (member, epoch) and whether it is final, in order.
            weights: the hash of each member's weights.
            facts: of the set with these rows.
        """
        rows = [] if before is None else before.rows.to_pylist()
        number = 1 + max((int(Path(row["path"]).name[:5]) for row in rows), default=-1)
        for path in self.folder.glob("[0-9]*.safetensors"):  # whose rows a kill has kept from being written
            if int(path.name[:5]) >= number:
                path.unlink()
        size = shard_files.members_per_shard(self.layout)
        for at in range(0, len(new), size):
            some = new[at : at + size]
            rows += self._shard(number, some, weights)
            number += 1
            table = manifest.table(rows, SCHEMA)
            catalog.write_json(facts(table).to_json(), self.folder / prediction_sets.DESCRIPTION)
            manifest.write(table, self.folder / prediction_sets.TABLE, SCHEMA)
            for key, _ in some:
                self._path(key, weights[key]).unlink()
        if not any(self.aside.glob("*.safetensors")):
            shutil.rmtree(self.aside)

    def _shard(self, number: int, some: Sequence[tuple[Key, bool]], weights: Mapping[Key, str]) -> list[dict[str, Any]]:
        """Write a shard; return its rows."""
        hashes: list[str] = []

        def read() -> Iterator[shard_files.Bytes]:
            for key, _ in some:
                _, raw = next(iter(shard_files.read([self._location(key, self._path(key, weights[key]))])))
                hashes.append(content_hash(self.layout, raw))
                yield raw

        prefixes = [prefix(member, None if final else epoch) for (member, epoch), final in some]
        path = shard_files.stream_shard(self.folder, number, self.layout, prefixes, read())
        inside = "/".join(path.parts[-4:])
        start, step = shard_files.first_offset(self.layout, prefixes), self.layout.nbytes
        return [
            {
                "member": key[0], "epoch": key[1], "final": final, "status": "ok", "weights_sha256": weights[key],
                "sha256": hashes[i], "path": inside, "offset": start + i * step, "nbytes": step, "layout": LOGITS,
                "dtype": self.layout.dtype,
            }
            for i, (key, final) in enumerate(some)
        ]  # fmt: skip
