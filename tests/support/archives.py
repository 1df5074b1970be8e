"""Archives like upstream's for the tests, small ones in memory and true-sized ones that take no memory."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, tensor_shapes
from tests.hub.virtual import Virtual, filled, joined, noise

Part = bytes | Virtual


class Counted:
    """A ranged reader that counts its requests and bytes, as a server would."""

    def __init__(self, file: Part) -> None:
        self.file = file
        self.size = file.size if isinstance(file, Virtual) else len(file)
        self.ranges: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __call__(self, offset: int, length: int) -> bytes:
        with self._lock:
            self.ranges.append((offset, length))
        if isinstance(self.file, Virtual):
            return self.file.read(offset, length)
        return self.file[offset : offset + length]

    @property
    def requests(self) -> int:
        return len(self.ranges)

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.ranges)


@cache
def head(architecture: str = "resnet18", dtype: str = "F16", **arguments: Any) -> tuple[bytes, int]:
    """Write the header of a member as safetensors does, under upstream's names; return it and the payload's bytes."""
    shapes = tensor_shapes(architecture, **(arguments or {"classes": 100}))
    stored = sorted(KEY_MAPS[architecture].translate_to_stored(name, shape) for name, shape in shapes.items())
    at, values = 0, {}
    for name, shape in stored:
        count = 1
        for axis in shape:
            count *= axis
        end = at + count * (2 if dtype == "F16" or is_counter(name) else 4)
        kind = "F16" if is_counter(name) else dtype
        values[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def member(seed: int, **options: Any) -> Virtual:
    """Make a true-sized member whose float16 weights are noise, all finite."""
    header, payload = head(**options)
    return joined(header, noise(seed, payload, 0xBF))


def tar_header(name: str, size: int, format: int = tarfile.GNU_FORMAT, **fields: Any) -> bytes:
    """Write what stands before a file in a tar, with Python's own tarfile; return its bytes."""
    made = tarfile.TarInfo(name)
    made.size, made.mtime = size, 1_700_000_000
    for key, value in fields.items():
        setattr(made, key, value)
    return made.tobuf(format, "utf-8", "surrogateescape")  # type: ignore[arg-type]


def folder(name: str) -> bytes:
    return tar_header(name, 0, type=tarfile.DIRTYPE)


def virtual_tar(files: Iterable[tuple[str, Part]], format: int = tarfile.GNU_FORMAT, **fields: Any) -> Virtual:
    """Put files of any size into a tar; return it."""
    parts: list[Part] = []
    size = 0
    for name, content in files:
        length = content.size if isinstance(content, Virtual) else len(content)
        before = tar_header(name, length, format, **fields)
        parts += [before, content, bytes(-length % 512)]
        size += len(before) + length + -length % 512
    parts.append(filled(1024 + -(size + 1024) % tarfile.RECORDSIZE))
    return joined(*parts)


def local_tar(
    files: Iterable[tuple[str, bytes]],
    format: int = tarfile.PAX_FORMAT,
    mode: str = "w",
    change: Callable[[tarfile.TarInfo], None] = lambda made: None,
) -> bytes:
    """Write a tar with Python's tarfile, times with fractions as `tar.add` gives them; return its bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=format) as tar:  # type: ignore[call-overload]
        for at, (name, content) in enumerate(files):
            made = tarfile.TarInfo(name)
            made.size, made.mtime = len(content), 1_700_000_000.25 + at
            if name.endswith("/"):
                made.type = tarfile.DIRTYPE
            change(made)
            tar.addfile(made, io.BytesIO(content))
    return out.getvalue()
