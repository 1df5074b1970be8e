"""Uploads of large files, in one part or several; the bytes go to the CDN's host."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .accounts import WEB, repo, user
from .answers import Refusal
from .download import no_token

OBJECT = "/_lfs/(?P<sha>[0-9a-f]{64})"


async def batch(hub, request: Request, kind: str, id: str) -> JSONResponse:
    body, rows = await request.json(), []
    # To anyone who may open a pull request: the commit that names the content is what takes a right.
    repo(hub, request, kind, id, write=user(hub, request) is None)
    for asked in body["objects"]:
        row = {"oid": asked["oid"], "size": asked["size"]}
        if not hub.blobs.has(asked["oid"]):
            parts = "multipart" in body.get("transfers", []) and asked["size"] > hub.part_size
            verify = {"href": f"{hub.url}/_lfs/{asked['oid']}/verify"}
            row["actions"] = {"upload": way(hub, asked["oid"], asked["size"], parts), "verify": verify}
        rows.append(row)
    return JSONResponse({"transfer": "basic", "objects": rows}, media_type="application/vnd.git-lfs+json")


def way(hub, sha: str, size: int, parts: bool) -> dict:
    """Return where the bytes go."""
    url = f"{hub.cdn_url}/_lfs/{sha}"
    if not parts:
        return {"href": url}
    numbered = {str(i + 1): f"{url}/{i + 1}" for i in range(-(-size // hub.part_size))}
    return {
        "href": f"{hub.url}/_lfs/{sha}/complete",
        "header": {"chunk_size": str(hub.part_size), **numbered},
    }


def part_path(hub, sha: str, part: int) -> Path:
    folder = hub.folder / "parts"
    folder.mkdir(exist_ok=True)
    return folder / f"{sha}.{part:05d}"


async def put(hub, request: Request, sha: str, part: str | None) -> Response:
    no_token(request)
    # Two may send the same content at the same time.
    name = sha if part else f"{sha}.{next(hub.links)}"
    target, digest = part_path(hub, name, int(part or 0)), hashlib.sha256()
    with target.open("wb") as file:
        async for piece in request.stream():
            digest.update(piece)
            file.write(piece)
    if part is None:
        keep(hub, target, sha, digest.hexdigest())
    return Response(headers={"ETag": f'"{digest.hexdigest()[:32]}"'})


async def complete(hub, request: Request, sha: str) -> JSONResponse:
    digest, target = hashlib.sha256(), part_path(hub, sha, 0)
    with target.open("wb") as whole:
        for row in (await request.json())["parts"]:
            part = part_path(hub, sha, row["partNumber"])
            content = part.read_bytes()
            part.unlink()
            digest.update(content)
            whole.write(content)
    keep(hub, target, sha, digest.hexdigest())
    return JSONResponse({})


def keep(hub, target: Path, sha: str, found: str) -> None:
    if sha != found:
        target.unlink()
        raise Refusal(400, "", "content does not match the sha256")
    target.replace(hub.blobs.path(sha))


async def verify(hub, request: Request, sha: str) -> JSONResponse:
    body = await request.json()
    if not hub.blobs.has(sha) or hub.blobs.size(sha) != body["size"]:
        raise Refusal(404, "", "object not found")
    return JSONResponse({})


ROUTES = [
    ("POST", WEB + r"\.git/info/lfs/objects/batch", batch),
    ("PUT", OBJECT + r"(?:/(?P<part>\d+))?", put),
    ("POST", OBJECT + "/complete", complete),
    ("POST", OBJECT + "/verify", verify),
]
