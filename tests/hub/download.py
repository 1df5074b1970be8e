"""Files: the Hub's answer says what a file is and where it lies, the CDN gives its bytes."""

from __future__ import annotations

import time
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from .accounts import WEB, repo
from .answers import Content, Refusal


def resolve(hub, request: Request, kind: str, id: str, revision: str, path: str):
    commit = repo(hub, request, kind, id, content=True).at(revision)
    headers, file = {"X-Repo-Commit": commit.id, "Accept-Ranges": "bytes"}, commit.tree.get(path)
    if file is None:
        raise Refusal(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit.id})
    if not file.lfs:
        return content(hub, request, file.sha, {**headers, "ETag": f'"{file.oid}"'})
    if file.xet and hub.xet:
        headers["X-Xet-Hash"] = file.xet
        headers["Link"] = f'<{hub.url}/api/{kind}/{id}/xet-read-token/{commit.id}>; rel="xet-auth"'
    # The link names the file, so that a regex on paths finds its bytes in the log.
    signed = f"link={next(hub.links)}&expires={time.time() + hub.cdn_ttl:.3f}"
    headers["Location"] = f"{hub.cdn_url}/_cdn/{file.sha}/{kind}/{id}/{quote(path)}?{signed}"
    headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha}"'}
    return Response(status_code=302, headers=headers)


def cdn(hub, request: Request, sha: str) -> Content:
    no_token(request)
    query = request.query_params
    dead = int(query.get("link", 0)) <= hub.dead_links
    if dead or float(query.get("expires", 0)) < time.time():
        raise Refusal(403, "", "Request has expired")
    return content(hub, request, sha, {"ETag": f'"{sha}"'})


def no_token(request: Request) -> None:
    """Refuse a token, as stores of signed links do. Raises: Refusal: 400, one came along."""
    if "authorization" in request.headers:
        raise Refusal(400, "", "Only one auth mechanism allowed")


def content(hub, request: Request, sha: str, headers: dict[str, str]) -> Content:
    hub.content(sha)
    return Content(request, hub.blobs.size(sha), lambda at, n: hub.blobs.read(sha, at, n), headers)


ROUTES = [
    ("GET", WEB + "/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    ("GET", "/_cdn/(?P<sha>[0-9a-f]{64})/.+", cdn),
]
