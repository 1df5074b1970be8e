"""Members as a folder of `.ckpt` files in the format of lightning 2.4 to 2.x.

Each file holds one member: `torch.save` of a dict whose `state_dict` has the module's names with a prefix. The prefix
is "model." for a LightningModule that keeps its net as `self.model`, as torch-uncertainty and lightning-uq-box do.
lightning itself is not needed.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.collection.collection import Collection, Member
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation import arguments
from checkpoints_zoo.formats import shard_files
from checkpoints_zoo.formats.disk import check_room, replace_file, translate_write_errors
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, KeyMap

VERSION = "2.4.0"  # version of lightning whose format the files have; later versions convert the files.
LOAD_ERRORS = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError)  # raised by torch.load


def write_checkpoints(
    members: Collection,
    folder: str | Path,
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    upstream: bool = False,
) -> list[Path]:
    """Write each member as a lightning checkpoint; return the paths of the files, in the order of the members.

    A file is written under a temporary name and renamed. An existing file with the same member, prefix and values
    stays, so an interrupted call can be repeated.

    Args:
        members: members to write; a view, such as `canonicalize`, changes the written weights.
        folder: folder for the files; it is created. Files are named by member id, "000007.ckpt", or "000007@40.ckpt"
            for an earlier snapshot: readers of whole folders sort the files by name.
        prefix: text put before each tensor name; "" for a plain module.
        dtype: dtype of the weights; None for the stored dtype. Running statistics stay float32.
        upstream: whether tensors get the names and shapes of torch-uncertainty's networks
            ("layer2.0.shortcut.0.weight").

    Raises:
        UsageError: members are no collection; a checkpoint with other content exists, and nothing is written; or
            `upstream` with a net that torch-uncertainty does not have.
        StorageError: the folder can't be written to, or the disk is full.
        DamagedError: a weight is not finite, or the bytes differ from the manifest.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = zoo.interop.lightning.write_checkpoints(zoo.load("convnet-digits", n=2), folder)
    ...     [(p.name, list(torch.load(p)["state_dict"])[0]) for p in paths]
    [('000000.ckpt', 'model.conv1.weight'), ('000001.ckpt', 'model.conv1.weight')]
    """
    arguments.check_collection(members)
    root, file_format = Path(folder), _CheckpointFormat(prefix, dtype, _key_map(members) if upstream else None)
    members.download()  # downloads all members at once
    paths = [root / _file_name(member) for member in members]
    if len(set(paths)) < len(paths):
        raise UsageError(f"selection of {members.name}", expected="each member once", found="one twice")
    missing = []
    for member, path in zip(members, paths, strict=True):
        if path.exists():
            _check_existing_file(path, file_format.checkpoint(member))
        else:
            missing.append((member, path))
    with translate_write_errors(root):
        for index, (member, path) in enumerate(missing):
            raw = _serialize(file_format.checkpoint(member))
            if index == 0:
                check_room(root, len(raw) * len(missing))
            _write_file(path, raw)
    return paths


def _file_name(member: Member) -> str:
    key = shard_files.tensor_prefix(member.id, None if member.row["final"] else member.epoch)
    return f"{key.removesuffix('/')}.ckpt"


def _key_map(members: Collection) -> KeyMap:
    """Return the rules that map our names to torch-uncertainty's."""
    key_map = KEY_MAPS.get(members.description.architecture)
    if key_map is None or key_map.matches_by_shape:
        raise UsageError(
            f"torch-uncertainty's names for {members.name}",
            expected=f"members of {' or '.join(n for n, keys in KEY_MAPS.items() if not keys.matches_by_shape)}",
            found=members.description.architecture,
        )
    return key_map


@dataclass(frozen=True)
class _CheckpointFormat:
    """The format of the files: the arguments of `write_checkpoints`, and the rules for names."""

    prefix: str
    dtype: torch.dtype | None
    key_map: KeyMap | None

    def checkpoint(self, member: Member) -> dict[str, Any]:
        """Return the content of a member's file, in types that `torch.load(weights_only=True)` reads."""
        facts: dict[str, Any] = {"collection": member.collection, "member": member.id, "epoch": member.epoch}
        return {
            "epoch": member.epoch,
            "global_step": 0,
            "pytorch-lightning_version": VERSION,
            "state_dict": OrderedDict(self.stored_tensor(*x) for x in member.state_dict(dtype=self.dtype).items()),
            "checkpoints_zoo": {**facts, "citation": member.citation},
        }

    def stored_tensor(self, tensor_name: str, tensor: Tensor) -> tuple[str, Tensor]:
        """Return the name and the tensor in the file for a tensor of the module."""
        if self.key_map is not None:
            tensor_name, shape = self.key_map.translate_to_stored(tensor_name, tuple(tensor.shape))
            tensor = tensor.reshape(shape)
        return self.prefix + tensor_name, tensor.contiguous()


def _serialize(checkpoint: dict[str, Any]) -> memoryview:
    """Return the bytes of a file.

    The bytes are written to memory first, since torch.save would write the name of a file into the file.
    """
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getbuffer()


def _write_file(path: Path, raw: memoryview) -> None:
    with replace_file(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def _check_existing_file(path: Path, expected: dict[str, Any]) -> None:
    """Check that an existing file has the content that would be written.

    Raises:
        UsageError: the content differs.
    """
    try:
        existing_checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except LOAD_ERRORS:
        existing_checkpoint = None
    state = existing_checkpoint.get("state_dict") if isinstance(existing_checkpoint, dict) else None
    if not isinstance(state, dict) or not _are_equal_state_dicts(state, expected["state_dict"]):
        facts = expected["checkpoints_zoo"]
        raise UsageError(
            f"file {path}",
            expected=f"no file, or member {facts['member']} of {facts['collection']} with these options",
            found="other content",
            do="Give another folder, or remove the file",
            path=path,
        )


def _are_equal_state_dicts(state_dict: dict[str, Any], expected: dict[str, Tensor]) -> bool:
    if state_dict.keys() != expected.keys():
        return False
    pairs = [(state_dict[name], expected[name]) for name in expected]
    return all(isinstance(x, Tensor) and x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
