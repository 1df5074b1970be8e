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
from checkpoints_zoo.formats import manifest, row_checks
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
    expected_shapes = tensor_shapes(net.architecture, **net.arguments)
    tensors = (
        (our_name, dtype, shape, stored_name, stored_shape)
        for (our_name, (dtype, shape)), (stored_name, (_, stored_shape)) in zip(
            net.tensors.items(), stored_tensors.items(), strict=True
        )
    )
    missing_counters = [name for name in expected_shapes if is_counter(name) and name not in net.tensors]
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
            entry.name,
            archive_path,
            entry.data_offset + headers[entry.header_number].header_nbytes,
            headers[entry.header_number],
        )
        for entry in index.entries
    ]
    return MemberGroup(members, [(other.name, other.reason) for other in index.others if other.is_damaged_member])


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
    header_of_id = {id(member_range.header): member_range.header for group in groups for member_range in group.members}
    net_of_header = {header_id: _identify(header, identify_net) for header_id, header in header_of_id.items()}
    majority_network = _majority_net(
        Counter(id(member_range.header) for group in groups for member_range in group.members), net_of_header
    )
    rows, layouts, used_ids = list[dict[str, Any]](), dict[str, Layout](), set[int]()
    shared_values_of_header = {
        header_id: _shared_columns(net, majority_network, layouts) for header_id, net in net_of_header.items()
    }
    for group in groups:
        file_names = [*(member_range.name for member_range in group.members), *(name for name, _ in group.damaged)]
        member_ids = list(group.numbers) or numbers_from_file_names(file_names)
        if used_ids & set(member_ids):
            id_shift = max(used_ids) + 1 - min(member_ids)
            member_ids = [member_id + id_shift for member_id in member_ids]
        used_ids |= set(member_ids)
        # The numbers of the damaged members come after the other members' numbers.
        for member, member_id in zip(group.members, member_ids[: len(group.members)], strict=True):
            row = _new_row(member_id) | shared_values_of_header[id(member.header)]
            if row["status"] == "ok":
                row |= {"path": member.path, "offset": member.offset}
            rows.append(row)
        for (_, reason), member_id in zip(group.damaged, member_ids[len(group.members) :], strict=True):
            rows.append(_new_row(member_id) | {"status": "failed", "reason": reason})
    return rows, layouts, {"architecture": majority_network.architecture, "arguments": majority_network.arguments}


def _identify(header: MemberHeader, identify_net: IdentifyNet) -> tuple[RecognisedNetwork, Layout] | LayoutError:
    try:
        return identify_net(header)
    except LayoutError as error:
        return error


def _shared_columns(
    network_and_layout: tuple[RecognisedNetwork, Layout] | LayoutError,
    majority_network: RecognisedNetwork,
    layouts: dict[str, Layout],
) -> dict[str, Any]:
    """Return the manifest values that all members with one header share; add the header's layout to `layouts`."""
    if isinstance(network_and_layout, LayoutError):
        return {"status": "excluded", "reason": str(network_and_layout)}
    if (network_and_layout[0].architecture, network_and_layout[0].arguments) != (
        majority_network.architecture,
        majority_network.arguments,
    ):
        return {
            "status": "excluded",
            "reason": f"a {network_and_layout[0].architecture} with {network_and_layout[0].arguments}",
        }
    key = layout_key(majority_network.architecture, network_and_layout[1])
    layouts[key] = network_and_layout[1]
    return {"nbytes": network_and_layout[1].nbytes, "layout": key, "dtype": network_and_layout[1].dtype}


def _new_row(member: int) -> dict[str, Any]:
    return {"member": member, "epoch": 0, "final": True, "status": "ok", "method": "independent"}


def _majority_net(
    member_count_of_header: Mapping[int, int],
    net_of_header: Mapping[int, tuple[RecognisedNetwork, Layout] | LayoutError],
) -> RecognisedNetwork:
    """Return the network that most members have, given the number of members of each header."""
    if not member_count_of_header:
        raise DamagedError("archives or folder", expected="members", found="none")
    count_and_network: dict[str, tuple[int, RecognisedNetwork]] = {}
    for header_id, member_count in member_count_of_header.items():
        network_and_layout = net_of_header[header_id]
        if not isinstance(network_and_layout, LayoutError):
            network_key = json.dumps(
                [network_and_layout[0].architecture, network_and_layout[0].arguments], sort_keys=True
            )
            count_and_network[network_key] = (
                count_and_network.get(network_key, (0, network_and_layout[0]))[0] + member_count,
                network_and_layout[0],
            )
    if not count_and_network:
        raise next(
            network_and_layout
            for network_and_layout in net_of_header.values()
            if isinstance(network_and_layout, LayoutError)
        )
    return max(count_and_network.values(), key=lambda vote: vote[0])[1]


def layout_key(architecture: str, layout: Layout) -> str:
    """Return the key of a layout: the name of the architecture and a hash."""
    layout_json = json.dumps(layout.to_json(), separators=(",", ":")).encode()
    return f"{architecture}-{hashlib.sha256(layout_json).hexdigest()[:8]}"


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
    rows, layouts, network_fields = rows_of_archives(indexes)
    fields: dict[str, Any] = {
        "name": archive_paths[0].name.lower().split(".")[0], "title": "", "dataset": "", "classes": (),
        "preprocessing": {}, "licence": "", "citation": "", **network_fields, "layouts": layouts,
    }  # fmt: skip
    description = Description(**fields | dict(description_fields or {}))
    manifest_table = manifest.build_manifest(rows)
    row_checks.check_rows(manifest_table, description, archive_paths[0])
    return description, manifest_table


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

        archive_nbytes = archive_path.stat().st_size
        index = walking.index_archive(read_range, archive_nbytes, str(archive_path), threads=1)
        # Reading all headers of a local file is cheap, so no index is predicted.
        return (
            index
            if all(e.verified for e in index.entries)
            else walking.walk_archive(read_range, archive_nbytes, str(archive_path), threads=1)
        )
