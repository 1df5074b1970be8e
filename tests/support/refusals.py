"""What comes where weights or tables should be, and a check that it is refused and nothing changed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_zoo.errors import ZooError
from tests.support.scenarios import Built, digest_of

HTML = b"<!DOCTYPE html><html><body>Quota exceeded</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


def _pickle() -> bytes:
    content = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, content)
    return content.getvalue()


PICKLE = _pickle()


class Evil:
    """Makes a folder when it is unpickled as anybody else would."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def refused(built: Built, use: Callable[[], object], text: str) -> ZooError:
    """Check that something is refused with this text, whose ROOT is the source's folder, and changes nothing.

    Args:
        built: the source.
        use: what should be refused.
        text: of the error; up to "…" if it ends so.
    """
    before = digest_of(built.root)
    with pytest.raises(ZooError) as caught:
        use()
    found = str(caught.value).replace(str(built.root), "ROOT")
    if built.rows and built.rows[0]["path"]:
        found = found.replace(str(built.rows[0]["path"]), "SHARD")
    assert found == text or (text.endswith("…") and found.startswith(text[:-1])), found
    assert digest_of(built.root) == before
    return caught.value
