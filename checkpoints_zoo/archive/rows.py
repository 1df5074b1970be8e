"""From the index of archives to the rows of a manifest, and the layouts that their members' bytes have."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo import manifest
from checkpoints_zoo.archive import walking
from checkpoints_zoo.archive.contents import Head, Index, tensors_of
from checkpoints_zoo.archive.names import numbers_of
from checkpoints_zoo.catalog import Description
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.keymaps import Recognised, recognise, tensor_shapes
from checkpoints_zoo.layout import Layout, is_counter

if TYPE_CHECKING:
    import pyarrow as pa


def layout_of_head(head: Head) -> tuple[Recognised, Layout]:
    """Tell which net a header's tensors are; return that and their layout under our names.

    Raises:
        LayoutError: none that is known.
    """
    stored = tensors_of(head)
    net = recognise(stored)
    wanted = tensor_shapes(net.architecture, **net.arguments)
    tensors = (
        (ours, dtype, shape, name, was)
        for (ours, (dtype, shape)), (name, (_, was)) in zip(net.tensors.items(), stored.items(), strict=True)
    )
    missing = [name for name in wanted if is_counter(name) and name not in net.tensors]
    return net, Layout.of_stored(tensors, missing, head.lead)


def rows_of(
    indexes: Mapping[str, Index],
) -> tuple[list[dict[str, Any]], dict[str, Layout], dict[str, Any]]:
    """Write the manifest of a collection that lies in archives; return rows, layouts, and architecture with arguments.

    A member's id is the number in its name; where an archive's numbers were taken by those before, it counts on after
    the largest of them. Members of other nets than most are `excluded`, damaged ones `failed`.

    Args:
        indexes: path in the source -> index, in the collection's order.

    Raises:
        LayoutError: the members are none of the nets that are known.
        DamagedError: no members.
        UsageError: a gzipped archive.
    """
    nets: dict[Head, tuple[Recognised, Layout] | LayoutError] = {}
    for path, index in indexes.items():
        if index.kind != "tar":
            raise UsageError(
                f"archive {path}",
                expected="an uncompressed tar, whose members have a place",
                found="a gzipped one",
                do="It can only be read from front to back: `stream` yields its members",
            )
        for head in index.heads:
            if head not in nets:
                try:
                    nets[head] = layout_of_head(head)
                except LayoutError as error:
                    nets[head] = error
    majority = _majority(indexes, nets)
    rows, layouts, taken = list[dict[str, Any]](), dict[str, Layout](), set[int]()
    for path, index in indexes.items():
        broken = [other for other in index.others if other.member]
        numbers = numbers_of([*(e.name for e in index.entries), *(other.name for other in broken)])
        if taken & set(numbers):
            shift = max(taken) + 1 - min(numbers)
            numbers = [number + shift for number in numbers]
        taken |= set(numbers)
        alike = [_of_head(nets[head], majority, layouts) for head in index.heads]
        leads = [head.lead for head in index.heads]
        # The numbers of the damaged members come last; their rows are made below.
        for entry, number in zip(index.entries, numbers[: len(index.entries)], strict=True):
            row = _row(number) | alike[entry.head]
            if row["status"] == "ok":
                row |= {"path": path, "offset": entry.data + leads[entry.head]}
            rows.append(row)
        for other, number in zip(broken, numbers[len(index.entries) :], strict=True):
            rows.append(_row(number) | {"status": "failed", "reason": other.why})
    return rows, layouts, {"architecture": majority.architecture, "arguments": majority.arguments}


def _of_head(
    net: tuple[Recognised, Layout] | LayoutError, majority: Recognised, layouts: dict[str, Layout]
) -> dict[str, Any]:
    """Return what the rows of members with one header have in common, its layout among those known by now."""
    if isinstance(net, LayoutError):
        return {"status": "excluded", "reason": str(net)}
    if (net[0].architecture, net[0].arguments) != (majority.architecture, majority.arguments):
        return {"status": "excluded", "reason": f"a {net[0].architecture} with {net[0].arguments}"}
    key = _key(majority.architecture, net[1])
    layouts[key] = net[1]
    return {"nbytes": net[1].nbytes, "layout": key, "dtype": net[1].dtype}


def _row(number: int) -> dict[str, Any]:
    return {"member": number, "epoch": 0, "final": True, "status": "ok", "method": "independent"}


def _majority(indexes: Mapping[str, Index], nets: Mapping[Head, tuple[Recognised, Layout] | LayoutError]) -> Recognised:
    """Return the net that most members are."""
    counts: Counter[Head] = Counter()
    for index in indexes.values():
        for at, of_head in Counter(e.head for e in index.entries).items():
            counts[index.heads[at]] += of_head
    if not counts:
        raise DamagedError(f"archives {', '.join(indexes)}", expected="members", found="none")
    votes: dict[str, tuple[int, Recognised]] = {}
    for head, count in counts.items():
        net = nets[head]
        if not isinstance(net, LayoutError):
            key = json.dumps([net[0].architecture, net[0].arguments], sort_keys=True)
            votes[key] = votes.get(key, (0, net[0]))[0] + count, net[0]
    if not votes:
        raise next(net for net in nets.values() if isinstance(net, LayoutError))
    return max(votes.values(), key=lambda vote: vote[0])[1]


def _key(architecture: str, layout: Layout) -> str:
    text = json.dumps(layout.to_json(), separators=(",", ":")).encode()
    return f"{architecture}-{hashlib.sha256(text).hexdigest()[:8]}"


def source_of_archive(
    paths: Path | Iterable[Path], root: Path | None = None, known: Mapping[str, Any] | None = None
) -> tuple[Description, pa.Table]:
    """Walk archives on disk; return the description and manifest of the collection that lies in them.

    Args:
        paths: of the archives, in the collection's order.
        root: the source's folder, from which the rows' paths count; None for that of the first archive.
        known: what the archives can't tell, as fields of `Description`: name, title, dataset, classes and so on.

    Raises:
        DamagedError, LayoutError, UsageError: see `index` and `rows_of`.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    if not files:
        raise UsageError("archives", expected="one path or more", found="none")
    base = (files[0].parent if root is None else root).resolve()
    indexes = {path.resolve().relative_to(base).as_posix(): index_file(path) for path in files}
    rows, layouts, net = rows_of(indexes)
    fields: dict[str, Any] = {
        "name": files[0].name.lower().split(".")[0], "title": "", "dataset": "", "classes": (), "preprocessing": {},
        "licence": "", "citation": "", **net, "layouts": layouts,
    }  # fmt: skip
    description = Description(**fields | dict(known or {}))
    table = manifest.table(rows)
    manifest.validate(table, description, files[0])
    return description, table


def index_file(path: Path) -> Index:
    """Index an archive on disk, every header read; return the index.

    Raises:
        DamagedError: see `walking.index`.
    """
    with path.open("rb", buffering=0) as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            pieces, left = [], length
            while left and (piece := file.read(left)):
                pieces.append(piece)
                left -= len(piece)
            return b"".join(pieces)

        size = path.stat().st_size
        found = walking.index(read, size, str(path), threads=1)
        # On disk headers cost next to nothing: nothing stays predicted.
        return found if all(e.verified for e in found.entries) else walking.walk(read, size, str(path), threads=1)
