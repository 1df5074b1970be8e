"""Records of hashed files. A file whose identity is unchanged since it was hashed is trusted without reading it.

A record is a small JSON file: the identity (inode, size, mtime, ctime) of a file, and the hashes of its parts. Nobody
can set a file's ctime, so a file that was changed, replaced or copied has another identity and is hashed again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from checkpoints_zoo.formats import disk
from checkpoints_zoo.formats.shard_files import file_stamp

Hashes = dict[str, str]

# Path of a record -> identity and hashes in it; this also works if the record can't be written.
_known_records: dict[Path, tuple[tuple[int, ...], Hashes]] = {}


class HashRecord:
    """The recorded hashes of one file.

    Args:
        path: path of the file.
        record: path of the JSON file with its record.
        check: whether to ignore recorded hashes, so that the file is hashed again.

    Attributes:
        hashes: part of the file -> its hash; empty if the file has changed since it was hashed.
        old_hashes: part of the file -> its hash when the record was written; the file may have changed since.
    """

    def __init__(self, path: Path, record: Path, check: bool = False) -> None:
        self._identity = file_stamp(path)
        self._record = record
        self._changed = False
        identity, recorded = _known_records.get(record, ((), {}))
        if identity != self._identity:
            identity, recorded = _read(record)
        self.hashes: Hashes = dict(recorded) if identity == self._identity and not check else {}
        self.old_hashes: Hashes = recorded

    def add(self, part: str, digest: str) -> None:
        """Add the hash of a part of the file, which has just been computed."""
        self.hashes[part] = digest
        self._changed = True

    def save(self) -> None:
        """Write the record by rename, if a hash was added. No error is raised if the folder can't be written to."""
        if self._changed:
            _known_records[self._record] = self._identity, dict(self.hashes)
            with suppress(OSError), disk.replace_file(self._record) as file:
                file.write(json.dumps({"identity": self._identity, "hashes": self.hashes}))


def _read(record: Path) -> tuple[tuple[int, ...], Hashes]:
    """Read a record; return the identity and the hashes, both empty if the record is missing or damaged."""
    try:
        values = json.loads(record.read_bytes())
        identity, hashes = tuple(values["identity"]), values["hashes"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return (), {}
    if not isinstance(hashes, dict) or not all(isinstance(x, str) for x in hashes.values()):
        return (), {}
    return identity, hashes


def delete_file(path: Path, record: Path) -> None:
    """Delete a file whose bytes are wrong, with its record."""
    _known_records.pop(record, None)
    for obsolete_file in (record, path):
        with suppress(OSError):
            obsolete_file.unlink(missing_ok=True)
