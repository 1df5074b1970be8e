"""`predict`: logits of members, computed once and stored as shards with a manifest of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from checkpoints_zoo import images
from checkpoints_zoo.errors import LockedError, UsageError
from checkpoints_zoo.executor import Engine, Here, engine
from checkpoints_zoo.formats import member_bytes, safetensors
from checkpoints_zoo.images import Given, ImageData
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.predictions import prediction_sets as sets
from checkpoints_zoo.predictions.finding import predictions_of
from checkpoints_zoo.predictions.matching import other_weights
from checkpoints_zoo.predictions.parts import Key, Parts
from checkpoints_zoo.predictions.prediction_sets import LOGITS, Facts, PredictionSet, layout_of
from checkpoints_zoo.predictions.running import Members
from checkpoints_zoo.predictions.stored import Predictions, cited
from checkpoints_zoo.predictions.work import Packed, Running
from checkpoints_zoo.sources import hub
from checkpoints_zoo.sources.source import EMBEDDED, Source


def predict(
    members: Members,
    data: Given,
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
    members.skeleton()  # what has no members, or no net, is refused before a folder is made
    inside = images.in_order(images.of(data), members.classes)
    kind = sets.check_set(f"{inside.name}-{inside.split}" if name is None else name)
    on = engine(workers, [str(device)] if devices is None else devices, ray, say)
    if ray is None:
        for each in [device] if devices is None else devices:
            check_device(each)
    root = _root(members, out)
    folder = root / sets.folder_of(members.name, kind)
    facts = _facts(members, inside, kind, dtype)
    with safetensors.writing_into(folder), _locked(folder):
        before = sets.read(Source(root, root.as_uri()), members.name, kind) if (folder / sets.TABLE).is_file() else None
        hashes = _hashes(members)
        _check_before(before, facts, members, hashes)
        parts = Parts(folder, facts)
        done = {} if before is None else dict.fromkeys(_keys(before))
        wanted = [i for i, key in enumerate(members.keys) if key not in done and not parts.has(key, hashes[key])]
        say(f"{facts.name}: {len(wanted):,} of {len(members):,} members to run on {len(inside):,} inputs …")
        for at, raw in _run(Running(members, inside, facts, hashes, dtype, batch), _runs(wanted), on):
            key = members.keys[at]
            parts.keep(key, hashes[key], raw)
        finals = members.rows.column("final").to_pylist()
        new = sorted((key, final) for key, final in zip(members.keys, finals, strict=True) if key not in done)
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
        view="; ".join(str(step) for step in members.view.steps), version=version("checkpoints-zoo"), citation="",
        layouts={LOGITS: layout_of(len(inside), len(classes))}, labels=labels,
    )  # fmt: skip


def _citation(members: Members, rows: object) -> str:
    """Cite the members of rows, where their weights lie in a place that others can read and all are hashed."""
    public = members.source.label == EMBEDDED or members.source.label.startswith(hub.SCHEME)
    if not public or members.rows.column("sha256").null_count:
        return ""
    return cited(members.source.label, members.commit, members.name, rows)


def _keys(stored: PredictionSet) -> list[Key]:
    columns = (stored.rows.column(c).to_pylist() for c in ("member", "epoch"))
    return list(zip(*columns, strict=True))


def _hashes(members: Members) -> dict[Key, str]:
    """Return the content hash of each member's weights: by its row, or where that has none by its bytes."""
    claimed = members.rows.column("sha256").to_pylist()
    if None in claimed:
        claimed = member_bytes.hash_members(members.locations())
    return dict(zip(members.keys, claimed, strict=True))


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
    origin = f"{members.source.label}@{members.commit}/"
    if was.citation and not was.citation.startswith(origin) and set(_keys(before)) - set(members.keys):
        raise UsageError(
            f"predictions {facts.name} in {before.source.shown}",
            expected=f"some of members of {origin}{members.name}",
            found=f"some of {was.citation}",
            do="Select the members that it has as well, or give another name",
            collection=facts.collection,
        )


def _run(work: Running, runs: Iterable[range], on: Engine) -> Iterator[Packed]:
    """Run members at some positions on an engine; yield position and bytes of each as they come."""
    if isinstance(on, Here):  # the next group is read while one computes
        for run in runs:
            yield from work.packed(run, on.device)
        return
    some = list(runs)
    for run in some:
        work.members[run.start : run.stop].locations()  # those on the Hub are fetched once, here
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


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing a set while the block runs.

    Raises:
        LockedError: another process holds the lock; it goes with its process, however that ends.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock = folder / ".lock"
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=1))
        except TimeoutError as error:
            raise LockedError(
                f"folder {folder}",
                expected="no other process writing predictions into it",
                found=f"a lock on {lock}",
                do="Wait until the other run ends, or give another folder or name",
                path=folder,
            ) from error
        yield
