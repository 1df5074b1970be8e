"""Gzipped archives, which can't be read in part: unpacked once into the member cache."""

from __future__ import annotations

import gzip
import uuid
import zlib
from pathlib import Path

from checkpoints_zoo.errors import DamagedError
from checkpoints_zoo.sources import cache

MOST_GROWTH = 200  # what unpacks to more times its size holds no weights


def unpacked(path: Path, key: str, place: Path) -> Path:
    """Unpack a gzipped file, unless that was done before; return where it lies.

    Args:
        path: of the file.
        key: names its content.
        place: a repo's folder in the cache.

    Raises:
        DamagedError: the file is cut, or unpacks to far more than weights would.
        StorageError: the disk is full.
    """
    target = place / "unpacked" / f"{key}.tar"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(place, f"unpacked {key}"):
            if not target.is_file():  # another process may have been faster
                _unpack(path, target)
    return target


def _unpack(path: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    most = path.stat().st_size * MOST_GROWTH + 2**20
    try:
        with gzip.open(path) as packed, temporary.open("wb") as file:
            while raw := packed.read(2**20):
                if file.tell() + len(raw) > most:
                    expected = f"at most {MOST_GROWTH} times its size unpacked"
                    raise DamagedError(f"archive {path}", expected=expected, found="more", path=path)
                file.write(raw)
        temporary.replace(target)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DamagedError(
            f"archive {path}", expected="a whole gzip file", found=str(error), do="Get it again", path=path
        ) from error
    except OSError as error:
        raise cache.full(target.parent, error) from error
    finally:
        temporary.unlink(missing_ok=True)
