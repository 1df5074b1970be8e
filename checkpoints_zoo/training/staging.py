"""Finished snapshots laid aside one by one until their shard can be written.

OUT/.training/NAME/finished/000007@40-SHA256.safetensors   a snapshot's bytes, by their content
OUT/.training/NAME/finished/000007@40.json                 its row of the manifest, written last: now it is finished

A member is finished once its last snapshot is; those before it alone are nothing, and it is trained again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from checkpoints_zoo.errors import DamagedError, FormatError
from checkpoints_zoo.formats import catalog, safetensors
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.member_bytes import Location, check_against_files, read
from checkpoints_zoo.training.measure import Finished, Key, Row, key_of


class Staging:
    """The finished snapshots of a collection that are in no shard yet.

    Args:
        folder: that they lie in; nobody else writes to it.
        layout: of their bytes.
        recipe_hash: of the recipe that trained them.
        readonly: whether to leave what a kill left, and what belongs to another recipe; else it is deleted.
    """

    def __init__(self, folder: Path, layout: Layout, recipe_hash: str, *, readonly: bool = False) -> None:
        self.folder, self.layout, self.recipe_hash, self.readonly = folder, layout, recipe_hash, readonly
        self.rows: dict[Key, Row] = {}
        self._digests: dict[Key, str | None] = {}
        self._read()

    def _read(self) -> None:
        """Read what is here, and remove what a kill left of snapshots that weren't finished."""
        for path in self.folder.glob("[0-9]*.json"):
            # What a disk that lied has left is none: the member is trained again.
            with suppress(FormatError, DamagedError, KeyError, TypeError, ValueError):
                self._take(catalog.read_json(path))
        whole = self.members
        for key in [key for key in self.rows if key[0] not in whole]:
            del self.rows[key], self._digests[key]
        kept = {path for key in self.rows for path in (self._json(key), self._bytes(key))}
        for path in () if self.readonly else self.folder.glob("*"):
            if path not in kept:
                path.unlink()

    def _take(self, values: dict[str, object]) -> None:
        row, digest = dict.fromkeys(SCHEMA.names) | values["row"], values["bytes"]  # type: ignore[operator]
        row["created"] = datetime.fromisoformat(row["created"])
        if row["recipe_hash"] != self.recipe_hash:
            raise ValueError("another recipe's")
        key = key_of(row)
        self.rows[key], self._digests[key] = row, None if digest is None else str(digest)
        if digest is not None:
            try:
                check_against_files([self.location(key)])
                whole = hashlib.sha256(next(read([self.location(key)]))[1]).hexdigest() == digest
            except (DamagedError, OSError):
                whole = False
            if not whole:
                del self.rows[key], self._digests[key]

    @property
    def members(self) -> set[int]:
        """Ids of the members that are finished."""
        return {key[0] for key, row in self.rows.items() if row["final"]}

    def _name(self, key: Key) -> str:
        return f"{key[0]:06d}@{key[1]}"

    def _json(self, key: Key) -> Path:
        return self.folder / f"{self._name(key)}.json"

    def _bytes(self, key: Key) -> Path:
        return self.folder / f"{self._name(key)}-{self._digests[key]}.safetensors"

    def location(self, key: Key) -> Location:
        """Return where a snapshot's bytes lie."""
        return Location(key[0], "", self._bytes(key), safetensors.first_offset(self.layout, [""]), self.layout)

    def keep(self, finished: Iterable[Finished]) -> None:
        """Lay a stack's snapshots aside, each by rename, a member's last one last."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for each in sorted(finished, key=lambda f: f.key):
            key, digest = each.key, None
            if each.raw is not None:
                digest = hashlib.sha256(each.raw).hexdigest()
                written = safetensors.write_shard(self.folder, 0, self.layout, [("", each.raw)])
                written.replace(self.folder / f"{self._name(key)}-{digest}.safetensors")
            row = each.row | {"created": each.row["created"].isoformat()}
            catalog.write_json({"row": row, "bytes": digest}, self._json(key))
            self.rows[key], self._digests[key] = dict(each.row), digest
        safetensors.sync_folder(self.folder)

    def drop(self, keys: Iterable[Key]) -> None:
        """Delete snapshots that are in a shard now, rows first."""
        for key in list(keys):
            self._json(key).unlink()
            if self._digests[key] is not None:
                self._bytes(key).unlink()
            del self.rows[key], self._digests[key]
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


class Log:
    """A JSON line for every member that finished: member, status, reason, accuracy, seconds, time.

    Args:
        path: of the file; a run adds to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.members: set[int] = set()
        self._cut = False
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            self._cut = bool(lines[-1])  # by a kill
            for line in lines:
                try:
                    self.members.add(json.loads(line)["member"])
                except (ValueError, KeyError, TypeError):
                    continue

    def add(self, rows: Iterable[Row]) -> list[str]:
        """Add the members whose last snapshots these rows are, each once; return the lines."""
        lines = []
        for row in rows:
            if not row["final"] or row["member"] in self.members:
                continue
            self.members.add(row["member"])
            facts = {
                "member": row["member"], "status": row["status"], "reason": row["reason"],
                "accuracy": row.get("test_accuracy"), "seconds": row["wall_time_s"],
                "time": row["created"].isoformat(),
            }  # fmt: skip
            lines.append(json.dumps(facts))
        if lines:
            with safetensors.writing_into(self.path.parent), self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._cut + "".join(f"{line}\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
            self._cut = False
        return lines
