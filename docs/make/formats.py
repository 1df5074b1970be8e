"""The page on the formats: its words are here, its bytes are read from the collection `convnet-digits`.

The reading here knows the safetensors format alone, and nothing of the package.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

SOURCE = Path(__file__).resolve().parents[2] / "checkpoints_zoo" / "embedded"
MANIFEST = SOURCE / "manifests" / "convnet-digits.parquet"
[SHARD] = (SOURCE / "shards" / "convnet-digits").glob("*.safetensors")
SHOWN_COLUMNS = (
    "member", "epoch", "final", "status", "seed", "test_accuracy", "path", "offset", "nbytes", "layout", "dtype",
    "sha256",
)  # fmt: skip

WORDS = """# The formats, byte by byte

Made by `python -m docs.make` from the collection `convnet-digits`, which ships with the package; a test compares the
page with the bytes.

A source is files that other programs read: Parquet, JSON, safetensors. Nobody needs this package to read the weights.

| file | format | what it is |
|---|---|---|
| `manifests/NAME.parquet` | Parquet | one row a snapshot: [its columns](../manifests/README.md) |
| `manifests/NAME.json` | JSON | architecture, classes, preprocessing, layouts, licence, citation |
| `shards/NAME/NNNNN-HASH.safetensors` | safetensors | members' weights; number, beginning of the file's sha256 |
| `predictions/NAME/SET/` | both | [stored logits](predictions.md#the-format) |

## A shard

![The bytes of a shard](shard.svg)

The file `{shard}` has {size:,} bytes. It begins with the length of the header, 8 bytes, little-endian; the header
is JSON, filled with spaces so that the weights begin at a multiple of 4,096, here at byte {start:,}:

```text
{dump}
```

The header gives each tensor its dtype, its shape, and where its bytes begin and end, counted from the end of the
header. Names begin with the member's id, six digits (`000123@40/…` is the snapshot after epoch 40). All tensors of a
member lie side by side, so a member is one range of bytes:

| tensor | dtype | shape | first byte | bytes |
|---|---|---|---:|---:|
{tensors}

Within a member larger items come first (8, 4, 2, 1 bytes), in the order of the layout within a size. Where the range
is no multiple of 8, a last tensor `…/_pad` of zeros fills it: it belongs to no network. Weights are little-endian, in C
order. Norms' statistics are float32 always; counters of batches are not stored.

## A row of the manifest

| column | of member 0 |
|---|---|
{row}

`path`, `offset`, `nbytes` and `layout` are all that a reader needs:

```python
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

source = Path("source")
row = pq.read_table(source / "manifests/convnet-digits.parquet").to_pylist()[0]
layout = json.loads((source / "manifests/convnet-digits.json").read_text())["layouts"][row["layout"]]
with (source / row["path"]).open("rb") as file:
    file.seek(row["offset"])
    data = file.read(row["nbytes"])

weights, at = {{}}, 0
for name, dtype, shape in layout["tensors"]:
    count = int(np.prod(shape))
    weights[name] = np.frombuffer(data, {{"F32": "<f4", "F16": "<f2"}}[dtype], count, at).reshape(shape)
    at += weights[name].nbytes
```

On the Hub the same three numbers are the header of one request: `Range: bytes={begin}-{end}`.

## Members in other repos

A row of schema version 2 may have `parts` instead of a range of its own source: a list of ranges of files of other
repos, each with `path`, `offset`, `nbytes` and `etag`. The member's bytes are these ranges, one after another. A `path`
is `hf://ORG/NAME@COMMIT/FILE` (`hf://datasets/ORG/NAME@COMMIT/FILE` of a data set repo); `etag` is the file's sha256:
a row names bytes and not only a place. `path` and `offset` of the row are those of its first part, `nbytes` is the
sum of all. The check of a citation hashes all parts of a row without `sha256`. The version stands in the Parquet
metadata: 1 where no row has parts, and readers of version 1 refuse 2 with a sentence. `epoch_unit` in the JSON says
whether `epoch` counts steps (`step`).

## The layout

```json
{layout}
```

`tensors` are in the order of their bytes; `counters` are the names that a strict load also wants, and that are rebuilt;
`pad` is the number of bytes that fill the range.

## The hash

`sha256` in a row is the member's content hash: over the names, shapes and values of its tensors in the order of their
names, with float16 and bfloat16 widened to float32. So the same weights have the same hash in any file and any of these
dtypes. Members from archives that nobody has read yet have none.
"""


def page() -> str:
    """Return the page."""
    data = SHARD.read_bytes()
    start, tensors = read_header(data)
    row = pq.read_table(MANIFEST).to_pylist()[0]
    description = json.loads(MANIFEST.with_suffix(".json").read_text(encoding="utf-8"))
    return WORDS.format(
        shard=SHARD.relative_to(SOURCE).as_posix(),
        size=len(data),
        start=start,
        dump="\n".join(hexdump(data, (0, 16, 32))),
        tensors="\n".join(_tensor_rows(start, tensors)),
        row="\n".join(f"| `{name}` | {_cell(row[name])} |" for name in SHOWN_COLUMNS),
        begin=row["offset"],
        end=row["offset"] + row["nbytes"] - 1,
        layout=_layout(description["layouts"]["float32"]),
    )


def read_header(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return where a safetensors file's data begin, and each tensor's entry in the header, in the order of bytes."""
    [length] = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    return 8 + length, dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))


def hexdump(data: bytes, offsets: tuple[int, ...]) -> Iterator[str]:
    """Yield lines of 16 bytes each: offset, bytes in hex, letters."""
    for offset in offsets:
        line = data[offset : offset + 16]
        letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"{offset:06x}  {line.hex(' ')}  {letters}"


def _tensor_rows(start: int, tensors: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in tensors.items():
        if name.startswith("000000/"):
            begin, end = entry["data_offsets"]
            shape = " × ".join(map(str, entry["shape"]))
            yield f"| `{name}` | {entry['dtype']} | {shape} | {start + begin:,} | {end - begin:,} |"


def _cell(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else str(value)


def _layout(layout: Mapping[str, Any]) -> str:
    """Write a layout with one line a tensor."""
    tensors = ",\n    ".join(json.dumps(tensor) for tensor in layout["tensors"])
    rest = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in layout.items() if key != "tensors")
    return f'{{\n  "tensors": [\n    {tensors}\n  ],\n  {rest}\n}}'
