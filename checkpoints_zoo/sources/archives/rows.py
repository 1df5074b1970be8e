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
from checkpoints_zoo.sources.archives.contents import Index, MemberHeader, numbers_from_file_names, tensors_of_header
from checkpoints_zoo.sources.archives.keymaps import RecognisedNetwork, recognise, tensor_shapes

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class MemberRange:
    """The byte range of one member inside a file of a source, with its safetensors header.

    Args:
        name: name of the member's file, which may contain the member's number.
        path: path in the source of the file that holds the member's bytes.
        offset: position in bytes of the member's first tensor in the file at `path`.
        header: safetensors header of the member, which lists its tensors.
    """

    name: str
    path: str
    offset: int
    header: MemberHeader


@dataclass(frozen=True)
class MemberGroup:
    """Members that are numbered together: the members of one archive or one folder.

    Args:
        members: the byte range of each member.
        damaged: (name, reason) of each damaged member.
        numbers: numbers of the members, then of the damaged members; () to read the numbers from the file names.
    """

    members: Sequence[MemberRange]
    damaged: Sequence[tuple[str, str]] = ()
    numbers: Sequence[int] = ()


# Function that recognises the network of a header's tensors; it returns the network and the layout, or raises
# LayoutError.
IdentifyNet = Callable[[MemberHeader], tuple[RecognisedNetwork, Layout]]


def layout_of_header(header: MemberHeader) -> tuple[RecognisedNetwork, Layout]:
    """Recognise the network of a header's tensors; return the network, and the layout under our names.

    Raises:
        LayoutError: the tensors are of no known network.
    """
    stored_tensors = tensors_of_header(header)
    net = recognise(stored_tensors)
    expected = tensor_shapes(net.architecture, **net.arguments)
    tensors = (
        (ours, dtype, shape, name, stored_shape)
        for (ours, (dtype, shape)), (name, (_, stored_shape)) in zip(
            net.tensors.items(), stored_tensors.items(), strict=True
        )
    )
    missing_counters = [name for name in expected if is_counter(name) and name not in net.tensors]
    return net, Layout.of_stored(tensors, missing_counters, header.header_nbytes)


def rows_of_archives(
    indexes: Mapping[str, Index],
) -> tuple[list[dict[str, Any]], dict[str, Layout], dict[str, Any]]:
    """Make the manifest of a collection that lies in archives; return its rows, its layouts, and the architecture with
    arguments.

    The id of a member is the number in its name. If an earlier archive uses one of an archive's numbers, all numbers of
    the archive are increased, so that they follow the largest used number. A member whose network is not the most
    common one gets the status "excluded", a damaged member the status "failed".

    Args:
        indexes: path of an archive in the source -> its index, in the collection's order.

    Raises:
        LayoutError: the members are of no known network.
        DamagedError: the archives have no members.
        UsageError: an archive is gzipped, so that its members can't be read by ranges.
    """
    for path, index in indexes.items():
        if index.kind != "tar":
            raise UsageError(
                f"archive {path}",
                expected="an uncompressed tar, whose members can be read by byte ranges",
                found="a gzipped one",
                do="A gzipped tar can only be read from start to end: `stream` yields its members",
            )
    return rows_of_groups([archive_group(path, index) for path, index in indexes.items()], layout_of_header)


def archive_group(archive_path: str, index: Index) -> MemberGroup:
    """Return the members of an archive as a group; `archive_path` is the archive's path in the source."""
    headers = index.headers
    members = [
        MemberRange(
            e.name, archive_path, e.data_offset + headers[e.header_number].header_nbytes, headers[e.header_number]
        )
        for e in index.entries
    ]
    return MemberGroup(members, [(other.name, other.why) for other in index.others if other.member])


def rows_of_groups(
    groups: Sequence[MemberGroup], identify_net: IdentifyNet
) -> tuple[list[dict[str, Any]], dict[str, Layout], dict[str, Any]]:
    """Make the manifest of groups of members; ids and result are as in `rows_of_archives`.

    Args:
        groups: groups of members, in the collection's order.
        identify_net: function that recognises the network of a header's tensors.

    Raises:
        LayoutError: no member is of a known network.
        DamagedError: the archives have no members.
    """
    # The dict is keyed by `id(header)`: headers are few, and hashing all their tensor names takes long.
    headers = {id(m.header): m.header for group in groups for m in group.members}
    net_of_header = {key: _identify(head, identify_net) for key, head in headers.items()}
    majority = _majority_net(Counter(id(m.header) for group in groups for m in group.members), net_of_header)
    rows, layouts, used_numbers = list[dict[str, Any]](), dict[str, Layout](), set[int]()
    shared_columns = {key: _shared_columns(net, majority, layouts) for key, net in net_of_header.items()}
    for group in groups:
        names = [*(m.name for m in group.members), *(name for name, _ in group.damaged)]
        numbers = list(group.numbers) or numbers_from_file_names(names)
        if used_numbers & set(numbers):
            number_shift = max(used_numbers) + 1 - min(numbers)
            numbers = [number + number_shift for number in numbers]
        used_numbers |= set(numbers)
        # The numbers of the damaged members come after the other members' numbers.
        for member, number in zip(group.members, numbers[: len(group.members)], strict=True):
            row = _new_row(number) | shared_columns[id(member.header)]
            if row["status"] == "ok":
                row |= {"path": member.path, "offset": member.offset}
            rows.append(row)
        for (_, why), number in zip(group.damaged, numbers[len(group.members) :], strict=True):
            rows.append(_new_row(number) | {"status": "failed", "reason": why})
    return rows, layouts, {"architecture": majority.architecture, "arguments": majority.arguments}


def _identify(header: MemberHeader, identify_net: IdentifyNet) -> tuple[RecognisedNetwork, Layout] | LayoutError:
    try:
        return identify_net(header)
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


def _new_row(member: int) -> dict[str, Any]:
    return {"member": member, "epoch": 0, "final": True, "status": "ok", "method": "independent"}


def _majority_net(
    member_counts: Mapping[int, int], net_of_header: Mapping[int, tuple[RecognisedNetwork, Layout] | LayoutError]
) -> RecognisedNetwork:
    """Return the network that most members have, given the number of members of each header."""
    if not member_counts:
        raise DamagedError("archives or folder", expected="members", found="none")
    votes: dict[str, tuple[int, RecognisedNetwork]] = {}
    for header_id, count in member_counts.items():
        net = net_of_header[header_id]
        if not isinstance(net, LayoutError):
            key = json.dumps([net[0].architecture, net[0].arguments], sort_keys=True)
            votes[key] = votes.get(key, (0, net[0]))[0] + count, net[0]
    if not votes:
        raise next(net for net in net_of_header.values() if isinstance(net, LayoutError))
    return max(votes.values(), key=lambda vote: vote[0])[1]


def layout_key(architecture: str, layout: Layout) -> str:
    """Return the key of a layout: the name of the architecture and a hash."""
    text = json.dumps(layout.to_json(), separators=(",", ":")).encode()
    return f"{architecture}-{hashlib.sha256(text).hexdigest()[:8]}"


def source_of_archive(
    paths: Path | Iterable[Path], root: Path | None = None, description_fields: Mapping[str, Any] | None = None
) -> tuple[Description, pa.Table]:
    """Index archives on this disk; return the description and the manifest of the collection in them.

    Args:
        paths: paths of the archives, in the collection's order.
        root: the source's folder, to which paths in the rows are relative; None for the folder of the first archive.
        description_fields: fields of `Description` that archives lack: name, title, dataset, classes and so on.

    Raises:
        DamagedError, LayoutError, UsageError: for the same reasons as in `index_archive` and `rows_of_archives`.
    """
    archive_paths = [paths] if isinstance(paths, Path) else list(paths)
    if not archive_paths:
        raise UsageError("archives", expected="one path or more", found="none")
    base_folder = (archive_paths[0].parent if root is None else root).resolve()
    indexes = {path.resolve().relative_to(base_folder).as_posix(): index_file(path) for path in archive_paths}
    rows, layouts, net = rows_of_archives(indexes)
    fields: dict[str, Any] = {
        "name": archive_paths[0].name.lower().split(".")[0], "title": "", "dataset": "", "classes": (),
        "preprocessing": {}, "licence": "", "citation": "", **net, "layouts": layouts,
    }  # fmt: skip
    description = Description(**fields | dict(description_fields or {}))
    table = manifest.build_manifest(rows)
    manifest.check_rows(table, description, archive_paths[0])
    return description, table


def index_file(archive_path: Path) -> Index:
    """Index an archive on this disk by reading every header; return the index.

    Raises:
        DamagedError: for the same reasons as in `walking.index_archive`.
    """
    with archive_path.open("rb", buffering=0) as file:

        def read_range(offset: int, length: int) -> bytes:
            file.seek(offset)
            pieces, bytes_left = [], length
            while bytes_left and (piece := file.read(bytes_left)):
                pieces.append(piece)
                bytes_left -= len(piece)
            return b"".join(pieces)

        size = archive_path.stat().st_size
        index = walking.index_archive(read_range, size, str(archive_path), threads=1)
        # Reading all headers of a local file is cheap, so no index is predicted.
        return (
            index
            if all(e.verified for e in index.entries)
            else walking.walk_archive(read_range, size, str(archive_path), threads=1)
        )
