"""Xet storage without a server: the client's own hf_xet keeps its chunks under a local:// address.

The address is no documented feature of hf_xet; `supported` says whether the one installed here takes it.
"""

from __future__ import annotations

import shutil
import struct
import time
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse

from .accounts import REPO, repo
from .answers import Refusal

RECORD, MARK = 48, b"\xff" * 32
HAS_VERIFICATION, HAS_SHA = 1 << 31, 1 << 30


class Stored(NamedTuple):
    """A file in Xet storage: its Xet name, its size, the store it is in."""

    name: str
    size: int
    store: Path


def token(hub, request: Request, kind: str, id: str, mode: str, revision: str) -> JSONResponse:
    if not hub.xet:
        raise Refusal(404, "", "this Hub has no Xet storage")
    write = mode == "write"
    asked = "create_pr" in request.query_params
    repo(hub, request, kind, id, write=write and not asked, content=not write)
    store, until = hub.folder / "xet" / f"{kind}--{id.replace('/', '--')}", str(int(time.time()) + 3600)
    address = f"local://{store if write else view(hub, store)}"
    headers = {
        "X-Xet-Cas-Url": address,
        "X-Xet-Access-Token": "none",
        "X-Xet-Token-Expiration": until,
    }
    return JSONResponse({"casUrl": address, "accessToken": "none", "exp": int(until)}, headers=headers)


def view(hub, store: Path) -> Path:
    """Make another folder with the same content, and return it: hf_xet locks an address for one process."""
    folder, source = hub.folder / "views" / str(time.time_ns()), store / "xet" / "xorbs"
    xorbs = folder / "xet" / "xorbs"
    xorbs.mkdir(parents=True)
    for part in ("xorbs", "shards"):
        (xorbs / part).symlink_to(source / part)
    database = "global_dedup_lookup.redb"
    if (source / database).exists():
        shutil.copyfile(source / database, xorbs / database)
    return folder


def xet_file(hub, sha: str) -> Stored | None:
    """Return the file of this sha256; None if Xet storage has none."""
    for shard in (hub.folder / "xet").glob("*/xet/xorbs/shards/*.mdb"):
        if shard not in hub.xet_shards:
            hub.xet_shards[shard] = records(shard)
        if sha in hub.xet_shards[shard]:
            return hub.xet_shards[shard][sha]
    return None


def records(shard: Path) -> dict[str, Stored]:
    """Read the files that a shard of hf_xet describes, and return them by sha256.

    A file is a header record, `n` records of segments, as many of verification if the header says so, and one
    with the sha256 if the header says so.
    """
    raw, position, found = shard.read_bytes(), RECORD, {}
    while raw[position : position + 32] != MARK:
        flags, n = struct.unpack_from("<II", raw, position + 32)
        name = words(raw, position)
        size = sum(struct.unpack_from("<I", raw, position + RECORD * (i + 1) + 36)[0] for i in range(n))
        position += RECORD * (1 + n * (2 if flags & HAS_VERIFICATION else 1))
        if flags & HAS_SHA:
            found[words(raw, position)] = Stored(name, size, shard.parents[3])
            position += RECORD
    return found


def words(raw: bytes, position: int) -> str:
    return "{:016x}{:016x}{:016x}{:016x}".format(*struct.unpack_from("<4Q", raw, position))


def rebuild(hub, sha: str) -> None:
    """Put a file together from its chunks, for those who read it over plain HTTP."""
    import hf_xet

    stored = xet_file(hub, sha)
    if stored is None:
        raise Refusal(404, "", f"no content of sha256 {sha}")
    address, target = f"local://{view(hub, stored.store)}", hub.blobs.path(sha)
    with hf_xet.XetSession().new_file_download_group(endpoint=address) as group:
        group.start_download_file(hf_xet.XetFileInfo(stored.name, stored.size), str(target))


ROUTES = [("GET", REPO + "/xet-(?P<mode>read|write)-token/(?P<revision>[^/]+)", token)]
