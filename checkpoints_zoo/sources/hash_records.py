"""Records of hashed files: a file is not hashed again while its inode, size and times stay the same.

A record is a small JSON file: the identity (inode, size, mtime, ctime) of a file, and the hashes of its parts. Programs
can't set a file's ctime, so a file that was changed, replaced or copied has another identity and is hashed again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.shard_files import file_stamp

Hashes = dict[str, str]

# Path of a record -> (identity, hashes); this dict also serves if the record file can't be written.
_known_records: dict[Path, tuple[tuple[int, ...], Hashes]] = {}


class HashRecord:
    """The recorded hashes of one file.

    Args:
        path: path of the file.
        record_path: path of the JSON file that holds the hashes.
        ignore_recorded: whether recorded hashes are ignored, so that the file is hashed again.

    Attributes:
        hashes: name of a part of the file -> hash of the part; empty if the file has changed since the hashing.
        old_hashes: name of a part of the file -> hash of the part when the record was written, even if the file has
            changed.
    """

    def __init__(self, path: Path, record_path: Path, ignore_recorded: bool = False) -> None:
        self._identity = file_stamp(path)
        self._record = record_path
        self._changed = False
        recorded_identity, recorded_hashes = _known_records.get(record_path, ((), {}))
        if recorded_identity != self._identity:
            recorded_identity, recorded_hashes = _read_record(record_path)
        self.hashes: Hashes = (
            dict(recorded_hashes) if recorded_identity == self._identity and not ignore_recorded else {}
        )
        self.old_hashes: Hashes = recorded_hashes

    def add(self, part_name: str, digest: str) -> None:
        """Add the hash of a part of the file, which has just been computed."""
        self.hashes[part_name] = digest
        self._changed = True

    def save(self) -> None:
        """Write the record by rename, if a hash was added. If the folder can't be written to, no error is raised."""
        if self._changed:
            _known_records[self._record] = self._identity, dict(self.hashes)
            with suppress(OSError), disk.replace_file(self._record) as file:
                file.write(json.dumps({"identity": self._identity, "hashes": self.hashes}))


def _read_record(record_path: Path) -> tuple[tuple[int, ...], Hashes]:
    """Read a record; return the file's identity and the hashes, both empty if the record is missing or damaged."""
    try:
        values = json.loads(record_path.read_bytes())
        identity, hashes = tuple(values["identity"]), values["hashes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return (), {}
    if not isinstance(hashes, dict) or not all(isinstance(x, str) for x in hashes.values()):
        return (), {}
    return identity, hashes


def delete_file(path: Path, record_path: Path) -> None:
    """Delete a file whose bytes are wrong, with its record."""
    _known_records.pop(record_path, None)
    for obsolete_file in (record_path, path):
        with suppress(OSError):
            obsolete_file.unlink(missing_ok=True)
