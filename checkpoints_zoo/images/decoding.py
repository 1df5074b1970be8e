"""Encoded images, PNG or JPEG, that anyone may have written."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from checkpoints_zoo.errors import FormatError, SourceNotFound
from checkpoints_zoo.formats.safetensors import what_is
from checkpoints_zoo.images.parquet import UNREADABLE
from checkpoints_zoo.images.pixels import Gathered

FORMATS = ("PNG", "JPEG")
SUFFIXES = (".png", ".jpg", ".jpeg")
OTHERS = (".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")  # images that are not read


def add(encoded: bytes | Path, gathered: Gathered, what: str) -> None:
    """Decode an image and add it to others.

    Args:
        encoded: its bytes, or the file that has them.
        gathered: the others.
        what: to call it in errors.

    Raises:
        FormatError: no image, a damaged one, or one that does not fit the others.
        SourceNotFound: a file that can't be read.
    """
    try:
        if isinstance(encoded, Path):
            encoded = encoded.read_bytes()
    except OSError as error:
        raise SourceNotFound(what, expected="a file that can be read", found=f"{error.strerror}") from error
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            gathered.picture(image, what)
    except FormatError:
        raise
    except (*UNREADABLE, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        kind = what_is(encoded[:512]) if encoded else "an empty file"
        found = kind or ("another file" if isinstance(error, UnidentifiedImageError) else str(error)[:200])
        raise FormatError(what, expected="a PNG or JPEG image", found=found) from error
