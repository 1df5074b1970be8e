"""Content by its sha256: files on disk, and virtual ones."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from .virtual import Virtual


class Blobs:
    """The content of every repo."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.virtual: dict[str, Virtual] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, sha: str) -> Path:
        """Return where the content lies, or would."""
        return self.folder / sha

    def put(self, content: bytes | str | Path | Virtual) -> tuple[str, int]:
        """Keep the content (a path's is copied), and return its sha256 and size."""
        if isinstance(content, Virtual):
            self.virtual[content.sha] = content
            return content.sha, content.size
        if isinstance(content, Path):
            with content.open("rb") as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
            if not self.path(sha).exists():
                shutil.copyfile(content, self.path(sha))
            return sha, content.stat().st_size
        content = content.encode() if isinstance(content, str) else content
        sha = hashlib.sha256(content).hexdigest()
        if not self.path(sha).exists():
            self.path(sha).write_bytes(content)
        return sha, len(content)

    def has(self, sha: str) -> bool:
        """Say whether the content is here."""
        return sha in self.virtual or self.path(sha).exists()

    def size(self, sha: str) -> int:
        """Return the size in bytes."""
        return self.virtual[sha].size if sha in self.virtual else self.path(sha).stat().st_size

    def read(self, sha: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from `offset` on; to the end unless told."""
        length = self.size(sha) - offset if length is None else length
        if sha in self.virtual:
            return self.virtual[sha].read(offset, length)
        with self.path(sha).open("rb") as file:
            file.seek(offset)
            return file.read(length)
