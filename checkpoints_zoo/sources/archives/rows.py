"""Build manifest rows and layouts from the indexes of archives."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.formats.layout import Layout, is_counter
from checkpoints_zoo.sources.archives import walking
from checkpoints_zoo.sources.archives.contents import Index, MemberHeader, numbers_of, tensors_of
from checkpoints_zoo.sources.archives.keymaps import RecognisedNetwork, recognise, tensor_shapes

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class MemberRange:
    """The byte range of one member inside a file of a source, with its safetensors header.

    Args:
        name: name of the member's file, which may contain its number.
        path: path in the source of the file that holds the member's bytes.
        offset: offset of the member's first tensor in that file.
        head: safetensors header of the member, which lists its tensors.
    """

    name: str
    path: str
    offset: int
    head: MemberHeader


@dataclass(frozen=True)
class MemberGroup:
    """Members that are numbered together: those of one archive or one folder.

    Args:
        members: the byte range of each member.
        broken: (name, reason) of each damaged member.
        numbers: numbers of the members, then of the damaged members; () to read them from the names.
    """

    members: Sequence[MemberRange]
    broken: Sequence[tuple[str, str]] = ()
    numbers: Sequence[int] = ()


# Function that recognises the network of a header's tensors; it returns the network and the layout, or raises
# LayoutError.
IdentifyNet = Callable[[MemberHeader], tuple[RecognisedNetwork, Layout]]


def layout_of_head(head: MemberHeader) -> tuple[RecognisedNetwork, Layout]:
    """Recognise the network of a header's tensors; return it, and the layout under our names.

    Raises:
        LayoutError: the tensors are of no known network.
    """
    stored = tensors_of(head)
    net = recognise(stored)
    expected = tensor_shapes(net.architecture, **net.arguments)
    tensors = (
        (ours, dtype, shape, name, stored_shape)
        for (ours, (dtype, shape)), (name, (_, stored_shape)) in zip(net.tensors.items(), stored.items(), strict=True)
    )
    missing = [name for name in expected if is_counter(name) and name not in net.tensors]
    return net, Layout.of_stored(tensors, missing, head.header_nbytes)


def rows_of_archives(
    indexes: Mapping[str, Index],
) -> tuple[list[dict[str, Any]], dict[str, Layout], dict[str, Any]]:
    """Make the manifest of a collection that lies in archives; return its rows, its layouts, and the architecture with
    arguments.

    The id of a member is the number in its name. If one of an archive's numbers is used by an earlier archive, all its
    numbers are increased so that they follow the largest used one. Members of another network than the majority get the
    status "excluded", damaged members the status "failed".

    Args:
        indexes: path of an archive in the source -> its index, in the collection's order.

    Raises:
        LayoutError: the members are of no known network.
        DamagedError: no members.
        UsageError: an archive is gzipped, so that its members can't be read by ranges.
    """
    for path, index in indexes.items():
        if index.kind != "tar":
            raise UsageError(
                f"archive {path}",
                expected="an uncompressed tar, whose members have a place",
                found="a gzipped one",
                do="It can only be read from front to back: `stream` yields its members",
            )
    return rows_of_groups([archive_group(path, index) for path, index in indexes.items()], layout_of_head)


def archive_group(path: str, index: Index) -> MemberGroup:
    """Return the members of an archive as a group; the path is the archive's in the source."""
    heads = index.heads
    members = [MemberRange(e.name, path, e.data + heads[e.head].header_nbytes, heads[e.head]) for e in index.entries]
    return MemberGroup(members, [(other.name, other.why) for other in index.others if other.member])


def rows_of_groups(
    groups: Sequence[MemberGroup], identify: IdentifyNet
) -> tuple[list[dict[str, Any]], dict[str, Layout], dict[str, Any]]:
    """Make the manifest of groups of members; ids and result are those of `rows_of_archives`.

    Args:
        groups: groups of members, in the collection's order.
        identify: function that recognises the network of a header's tensors.

    Raises:
        LayoutError: no member is of a known network.
        DamagedError: no members.
    """
    # The dict is keyed by `id(head)`: headers are few, and hashing all their tensor names takes long.
    heads = {id(m.head): m.head for group in groups for m in group.members}
    nets = {key: _identify(head, identify) for key, head in heads.items()}
    majority = _majority_net(Counter(id(m.head) for group in groups for m in group.members), nets)
    rows, layouts, used_numbers = list[dict[str, Any]](), dict[str, Layout](), set[int]()
    shared_columns = {key: _shared_columns(net, majority, layouts) for key, net in nets.items()}
    for group in groups:
        names = [*(m.name for m in group.members), *(name for name, _ in group.broken)]
        numbers = list(group.numbers) or numbers_of(names)
        if used_numbers & set(numbers):
            shift = max(used_numbers) + 1 - min(numbers)
            numbers = [number + shift for number in numbers]
        used_numbers |= set(numbers)
        # The numbers of the damaged members come after those of the others.
        for member, number in zip(group.members, numbers[: len(group.members)], strict=True):
            row = _new_row(number) | shared_columns[id(member.head)]
            if row["status"] == "ok":
                row |= {"path": member.path, "offset": member.offset}
            rows.append(row)
        for (_, why), number in zip(group.broken, numbers[len(group.members) :], strict=True):
            rows.append(_new_row(number) | {"status": "failed", "reason": why})
    return rows, layouts, {"architecture": majority.architecture, "arguments": majority.arguments}


def _identify(head: MemberHeader, identify: IdentifyNet) -> tuple[RecognisedNetwork, Layout] | LayoutError:
    try:
        return identify(head)
    except LayoutError as error:
        return error


def _shared_columns(
    net: tuple[RecognisedNetwork, Layout] | LayoutError, majority: RecognisedNetwork, layouts: dict[str, Layout]
) -> dict[str, Any]:
    """Return the manifest values that all members with one header share; add the header's layout to `layouts`."""
    if isinstance(net, LayoutError):
        return {"status": "excluded", "reason": str(net)}
    if (net[0].architecture, net[0].arguments) != (majority.architecture, majority.arguments):
        return {"status": "excluded", "reason": f"a {net[0].architecture} with {net[0].arguments}"}
    key = layout_key(majority.architecture, net[1])
    layouts[key] = net[1]
    return {"nbytes": net[1].nbytes, "layout": key, "dtype": net[1].dtype}


def _new_row(number: int) -> dict[str, Any]:
    return {"member": number, "epoch": 0, "final": True, "status": "ok", "method": "independent"}


def _majority_net(
    counts: Mapping[int, int], nets: Mapping[int, tuple[RecognisedNetwork, Layout] | LayoutError]
) -> RecognisedNetwork:
    """Return the network that most members have, given the number of members of each header."""
    if not counts:
        raise DamagedError("archives or folder", expected="members", found="none")
    votes: dict[str, tuple[int, RecognisedNetwork]] = {}
    for head, count in counts.items():
        net = nets[head]
        if not isinstance(net, LayoutError):
            key = json.dumps([net[0].architecture, net[0].arguments], sort_keys=True)
            votes[key] = votes.get(key, (0, net[0]))[0] + count, net[0]
    if not votes:
        raise next(net for net in nets.values() if isinstance(net, LayoutError))
    return max(votes.values(), key=lambda vote: vote[0])[1]


def layout_key(architecture: str, layout: Layout) -> str:
    """Return the key of a layout: the name of the architecture and a hash."""
    text = json.dumps(layout.to_json(), separators=(",", ":")).encode()
    return f"{architecture}-{hashlib.sha256(text).hexdigest()[:8]}"


def source_of_archive(
    paths: Path | Iterable[Path], root: Path | None = None, facts: Mapping[str, Any] | None = None
) -> tuple[Description, pa.Table]:
    """Index archives on this disk; return the description and the manifest of the collection in them.

    Args:
        paths: paths of the archives, in the collection's order.
        root: the source's folder, to which paths in the rows are relative; None for the folder of the first archive.
        facts: fields of `Description` that archives lack: name, title, dataset, classes and so on.

    Raises:
        DamagedError, LayoutError, UsageError: for the same reasons as in `index_archive` and `rows_of_archives`.
    """
    files = [paths] if isinstance(paths, Path) else list(paths)
    if not files:
        raise UsageError("archives", expected="one path or more", found="none")
    base = (files[0].parent if root is None else root).resolve()
    indexes = {path.resolve().relative_to(base).as_posix(): index_file(path) for path in files}
    rows, layouts, net = rows_of_archives(indexes)
    fields: dict[str, Any] = {
        "name": files[0].name.lower().split(".")[0], "title": "", "dataset": "", "classes": (), "preprocessing": {},
        "licence": "", "citation": "", **net, "layouts": layouts,
    }  # fmt: skip
    description = Description(**fields | dict(facts or {}))
    table = manifest.build_manifest(rows)
    manifest.check_rows(table, description, files[0])
    return description, table


def index_file(path: Path) -> Index:
    """Index an archive on this disk by reading every header; return the index.

    Raises:
        DamagedError: for the same reasons as in `walking.index_archive`.
    """
    with path.open("rb", buffering=0) as file:

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            pieces, missing = [], length
            while missing and (piece := file.read(missing)):
                pieces.append(piece)
                missing -= len(piece)
            return b"".join(pieces)

        size = path.stat().st_size
        index = walking.index_archive(read, size, str(path), threads=1)
        # Reading all headers of a local file is cheap, so no index is predicted.
        return (
            index if all(e.verified for e in index.entries) else walking.walk_archive(read, size, str(path), threads=1)
        )
