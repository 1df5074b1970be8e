"""Repos made, found, described, changed and deleted."""

from __future__ import annotations

import re

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse

from .accounts import KINDS, REPO, repo, user
from .answers import Refusal
from .repos import Commit, Repo

FRONT = re.compile(r"---\r?\n(.*?)\r?\n---", re.S)


async def create(hub, request: Request) -> JSONResponse:
    body, name = await request.json(), user(hub, request)
    owner = body.get("organization") or name
    if owner not in hub.namespaces(name):
        raise Refusal(403 if name else 401, "", "You can't create a repo under this namespace")
    kind, id = (body.get("type") or "model") + "s", f"{owner}/{body['name']}"
    with hub.lock:
        exists = (kind, id) in hub.repos
        found = hub.repos[kind, id] if exists else hub.create_repo(id, kind, private=wants_private(body))
    url = hub.url + found.web
    if exists:
        return JSONResponse({"error": "You already created this repo", "url": url}, 409)
    return JSONResponse({"url": url, "name": id, "id": id})


def wants_private(body: dict, before: bool = False) -> bool:
    return body.get("visibility", "private" if body.get("private", before) else "public") == "private"


async def delete(hub, request: Request) -> JSONResponse:
    body = await request.json()
    kind, owner = (body.get("type") or "model") + "s", body.get("organization") or user(hub, request)
    found = repo(hub, request, kind, f"{owner}/{body['name']}", write=True)
    del hub.repos[found.kind, found.id]
    return JSONResponse({})


async def settings(hub, request: Request, kind: str, id: str) -> JSONResponse:
    found, body = repo(hub, request, kind, id, write=True), await request.json()
    found.private = wants_private(body, found.private)
    found.gated = body.get("gated", found.gated)
    return JSONResponse({})


async def validate_yaml(hub, request: Request) -> JSONResponse:
    block, errors = FRONT.match((await request.json())["content"]), []
    try:
        if block and not isinstance(yaml.safe_load(block[1]) or {}, dict):
            errors = [{"message": "metadata is not a mapping"}]
    except yaml.YAMLError as error:
        errors = [{"message": str(error)}]
    warnings = [] if block else [{"message": "empty or missing yaml metadata in repo card"}]
    return JSONResponse({"errors": errors, "warnings": warnings}, 400 if errors else 200)


def card(hub, commit: Commit) -> dict:
    """Return the metadata in the README of a commit."""
    readme = commit.tree.get("README.md")
    block = readme and FRONT.match(hub.blobs.read(hub.content(readme.sha)).decode())
    return (yaml.safe_load(block[1]) or {}) if block else {}


def about(hub, found: Repo, commit: Commit) -> dict:
    """Return what the API says of a repo."""
    metadata = card(hub, commit)
    siblings = []
    for path, file in sorted(commit.tree.items()):
        lfs = {"lfs": {"sha256": file.sha, "size": file.size, "pointerSize": 130}} if file.lfs else {}
        siblings.append({"rfilename": path, "size": file.size, "blobId": file.oid, **lfs})
    return {
        "_id": found.id,
        "id": found.id,
        "author": found.owner,
        "sha": commit.id,
        "cardData": metadata,
        "lastModified": commit.date,
        "createdAt": found.created,
        "private": found.private,
        "gated": found.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": list(metadata.get("tags") or []),
        "usedStorage": sum(file.size for file in commit.tree.values()),
        "siblings": siblings,
    }


def one(hub, request: Request, kind: str, id: str, revision: str | None) -> JSONResponse:
    found = repo(hub, request, kind, id)
    return JSONResponse(about(hub, found, found.at(revision or "main")))


def several(hub, request: Request, kind: str) -> JSONResponse:
    query, mine = request.query_params, hub.namespaces(user(hub, request))
    seen = [found for found in hub.repos.values() if found.kind == kind]
    seen = [found for found in seen if not found.private or found.owner in mine]
    seen = [found for found in seen if query.get("search", "") in found.id]
    seen = [found for found in seen if query.get("author", found.owner) == found.owner]
    rows, wanted = [about(hub, found, found.at("main")) for found in seen], set(query.getlist("filter"))
    return JSONResponse([row for row in rows if wanted <= set(row["tags"])][: int(query.get("limit", 1000))])


ROUTES = [
    ("POST", "/api/repos/create", create),
    ("DELETE", "/api/repos/delete", delete),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("GET", rf"/api/(?P<kind>{KINDS})", several),
    ("GET", REPO + "(?:/revision/(?P<revision>[^/]+))?", one),
    ("PUT", REPO + "/settings", settings),
]
