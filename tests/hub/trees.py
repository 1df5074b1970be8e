"""Listings: the files of a revision, and the commits behind it."""

from __future__ import annotations

import hashlib
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import JSONResponse

from .accounts import REPO, repo
from .answers import Refusal
from .repos import Commit, File

EXPANDED_PAGE = 50


def file_row(commit: Commit, path: str, file: File, expand: bool) -> dict:
    row = {"type": "file", "path": path, "oid": file.oid, "size": file.size}
    if file.lfs:
        row["lfs"] = {"oid": file.sha, "size": file.size, "pointerSize": 130}
    if file.xet:
        row["xetHash"] = file.xet
    return {**row, "lastCommit": commit.short()} if expand else row


def folder_row(commit: Commit, path: str, expand: bool) -> dict:
    row = {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}
    return {**row, "lastCommit": commit.short()} if expand else row


def tree(hub, request: Request, kind: str, id: str, revision: str, path: str | None) -> JSONResponse:
    query, commit = request.query_params, repo(hub, request, kind, id).at(revision)
    prefix = path.strip("/") + "/" if path else ""
    expand, deep = query.get("expand") == "true", query.get("recursive") == "true"
    found = {}
    for name, file in commit.tree.items():
        if not name.startswith(prefix):
            continue
        parts = name[len(prefix) :].split("/")
        for depth in range(1, len(parts) if deep else min(2, len(parts))):
            folder = prefix + "/".join(parts[:depth])
            found[folder] = folder_row(commit, folder, expand)
        if deep or len(parts) == 1:
            found[name] = file_row(commit, name, file, expand)
    if prefix and not found:
        raise Refusal(404, "EntryNotFound", f"{path} does not exist on {revision}")
    size, start = EXPANDED_PAGE if expand else hub.page, int(query.get("cursor") or 0)
    rows, headers = [found[name] for name in sorted(found)], {}
    if start + size < len(rows):
        kept = "".join(f"{key}={quote(value)}&" for key, value in query.items() if key != "cursor")
        url = f"{hub.url}{request.scope['raw_path'].decode().split('?')[0]}?{kept}cursor={start + size}"
        headers["Link"] = f'<{url}>; rel="next"'
    return JSONResponse(rows[start : start + size], headers=headers)


async def paths_info(hub, request: Request, kind: str, id: str, revision: str) -> JSONResponse:
    commit, raw = repo(hub, request, kind, id).at(revision), await request.body()
    is_json = "json" in request.headers.get("content-type", "")
    form = await request.json() if is_json else parse_qs(raw.decode())
    expand, rows = "true" in str(form.get("expand")).lower(), []
    for path in form.get("paths", []):
        if path in commit.tree:
            rows.append(file_row(commit, path, commit.tree[path], expand))
        elif any(name.startswith(path.rstrip("/") + "/") for name in commit.tree):
            rows.append(folder_row(commit, path, expand))
    return JSONResponse(rows)


def commits(hub, request: Request, kind: str, id: str, revision: str) -> JSONResponse:
    found, rows = repo(hub, request, kind, id), []
    commit: Commit | None = found.at(revision)
    while commit is not None:
        rows.append({**commit.short(), "message": commit.message, "authors": [{"user": found.owner}]})
        commit = found.commits.get(commit.parent or "")
    return JSONResponse(rows)


ROUTES = [
    ("GET", REPO + "/tree/(?P<revision>[^/]+)(?:/(?P<path>.*))?", tree),
    ("POST", REPO + "/paths-info/(?P<revision>[^/]+)", paths_info),
    ("GET", REPO + "/commits/(?P<revision>[^/]+)", commits),
]
