"""Pixels are those of the images: nothing is turned, cut or accepted in part without a word."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageFile

from checkpoints_zoo.errors import FormatError
from checkpoints_zoo.images import of

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)


def encoded(pixels: Any, kind: str = "PNG", orientation: int | None = None) -> bytes:
    out, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(out, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    return out.getvalue()


def rows_of(path: Path, images: list[bytes], mode: str | None = None) -> torch.Tensor:
    """Write images as `datasets` does; return the pixels that it reads, (input, channel, height, width)."""
    import datasets

    features = datasets.Features({"image": datasets.Image(mode=mode)})
    rows = {"image": [{"bytes": image, "path": None} for image in images]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    arrays = [np.asarray(row["image"]) for row in datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent))]
    return torch.from_numpy(
        np.stack([array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0) for array in arrays])
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8, None])
def test_rows_are_turned_as_datasets_turns_them(tmp_path: Path, kind: str, orientation: int | None) -> None:
    """Case 10."""
    expected = rows_of(tmp_path / "a.parquet", [encoded(PIXELS, kind, orientation)] * 2)
    assert of(tmp_path / "a.parquet").images.equal(expected)
    assert expected.shape[2:] == ((9, 6) if orientation in (6, 8) else (6, 9))


def test_rows_of_several_orientations(tmp_path: Path) -> None:
    """The size that counts is the one after turning."""
    turned = encoded(np.rot90(PIXELS).copy(), orientation=6)
    expected = rows_of(tmp_path / "a.parquet", [encoded(PIXELS), turned])
    data = of(tmp_path / "a.parquet")
    assert data.images.equal(expected)
    assert data.images[0].equal(data.images[1])


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_rows_have_the_mode_of_their_feature(tmp_path: Path, mode: str) -> None:
    """Case 10: the feature `Image(mode="RGB")`, on transparent, grey and palette images."""
    transparent = Image.fromarray(np.dstack([PIXELS, np.full((6, 9), 100, np.uint8)]), "RGBA")
    images = [encoded(transparent), encoded(PIXELS[..., 0]), encoded(Image.fromarray(PIXELS).quantize(4))]
    expected = rows_of(tmp_path / "a.parquet", images, mode)
    data = of(tmp_path / "a.parquet")
    assert data.images.equal(expected)
    assert data.images.shape[1] == (3 if mode == "RGB" else 1)


def test_files_of_a_folder_are_read_as_torchvision_reads_them(tmp_path: Path) -> None:
    from torchvision.datasets.folder import pil_loader

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.jpg").write_bytes(encoded(PIXELS, "JPEG", 6))
    expected = np.moveaxis(np.asarray(pil_loader(tmp_path / "a" / "0.jpg")), -1, 0)
    assert of(tmp_path).images[0].numpy().tolist() == expected.tolist()


def deep(colour: int) -> bytes:
    """Write a PNG of 16 bits a channel by hand: colour type 2 (RGB), 4 (grey and alpha) or 6 (RGBA)."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 2, 2, 16, colour, 0, 0, 0)
    row = b"\0" + bytes(range(2 * 2 * {2: 3, 4: 2, 6: 4}[colour]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * 2)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("colour", [2, 4, 6])
@pytest.mark.parametrize("place", ["folder", "parquet", "pictures"])
def test_images_of_16_bits_are_refused(tmp_path: Path, colour: int, place: str) -> None:
    """Case 10: Pillow cuts them to 8 bits, and says nothing."""
    given: Any = tmp_path
    if place == "folder":
        (tmp_path / "0.png").write_bytes(deep(colour))
    elif place == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"image": [{"bytes": deep(colour)}]}), tmp_path / "a.parquet")
    else:
        given = [Image.open(io.BytesIO(deep(colour)))]
    with pytest.raises(
        FormatError, match=r"expected 8-bit grey or RGB pixels; found 16 bits a channel\. Convert it to"
    ):
        of(given)


@pytest.mark.parametrize("kind", ["jpg", "png"])
@pytest.mark.parametrize("lenient", [True, False])
def test_a_cut_image_is_refused_whatever_pillow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, lenient: bool
) -> None:
    """Case 10: `LOAD_TRUNCATED_IMAGES`, which other packages set, fills what is missing with grey."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    whole = encoded(noise, "JPEG" if kind == "jpg" else "PNG")
    (tmp_path / f"0.{kind}").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="expected a PNG or JPEG image; found "):
        of(tmp_path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient
