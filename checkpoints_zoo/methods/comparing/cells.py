"""What was measured already: one JSON file a cell, written by rename, read back and checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_zoo.formats import safetensors
from checkpoints_zoo.formats.disk import replacing

Key = Mapping[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Cells:
    """A folder of cells.

    Args:
        folder: it is made when the first is written.
        say: told of files that are damaged.
    """

    folder: Path
    say: Callable[[str], object] = field(default=lambda text: None, repr=False)

    def path(self, key: Key) -> Path:
        """Return where a cell lies: its name tells the method, the mode and what was measured, and hashes the key."""
        digest = hashlib.sha256(_text(key).encode()).hexdigest()[:12]
        return self.folder / f"{key['method']}-{key['mode']}-{key['measured']}-{digest}.json"

    def read(self, key: Key) -> Values | None:
        """Return a cell's values, None where it was not measured yet, or is damaged, which is said."""
        path = self.path(key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, OSError):
            found = None
        if not isinstance(found, dict) or found.get("sha256") != _check(found.get("key"), found.get("values")):
            self.say(f"{path} is damaged: measured anew")
            return None
        if _text(found["key"]) != _text(key):
            self.say(f"{path} is another cell: measured anew")
            return None
        values: Values = found["values"]
        return values

    def write(self, key: Key, values: Values) -> Values:
        """Keep a cell's values; return them as they will be read.

        Raises:
            StorageError: a place that can't be written to.
        """
        content = {"key": dict(key), "values": values, "sha256": _check(key, values)}
        text = json.dumps(content, indent=1, allow_nan=False)
        with safetensors.writing_into(self.folder), replacing(self.path(key)) as temporary:
            temporary.write_text(text, encoding="utf-8")
        kept: Values = json.loads(text)["values"]
        return kept


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _check(key: Any, values: Any) -> str:
    return hashlib.sha256(_text([key, values]).encode()).hexdigest()
