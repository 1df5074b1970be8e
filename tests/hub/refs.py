"""Branches, tags and pull requests."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse

from .accounts import REPO, repo, user
from .answers import Refusal
from .repos import Repo, now

GROUPS = (("refs/heads/", "branches"), ("refs/tags/", "tags"), ("refs/pr/", "pullRequests"))


def listing(hub, request: Request, kind: str, id: str) -> JSONResponse:
    found = repo(hub, request, kind, id)
    rows: dict[str, list] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
    for ref, commit in found.refs.items():
        for start, group in GROUPS:
            if ref.startswith(start):
                rows[group].append({"name": ref.removeprefix(start), "ref": ref, "targetCommit": commit})
    return JSONResponse(rows)


async def branch(hub, request: Request, kind: str, id: str, name: str) -> JSONResponse:
    found, body = repo(hub, request, kind, id, write=True), json.loads(await request.body() or b"{}")
    found.set_ref(f"refs/heads/{name}", body.get("startingPoint") or "main")
    return JSONResponse({})


async def tag(hub, request: Request, kind: str, id: str, revision: str) -> JSONResponse:
    found, body = repo(hub, request, kind, id, write=True), await request.json()
    found.set_ref(f"refs/tags/{body['tag']}", revision)
    return JSONResponse({})


def remove(hub, request: Request, kind: str, id: str, group: str, name: str) -> JSONResponse:
    start = {"branch": "refs/heads/", "tag": "refs/tags/"}[group]
    if repo(hub, request, kind, id, write=True).refs.pop(start + name, None) is None:
        raise Refusal(404, "RevisionNotFound", "no such ref")
    return JSONResponse({})


async def open_pull(hub, request: Request, kind: str, id: str) -> JSONResponse:
    found, body = repo(hub, request, kind, id), await request.json()
    number = found.open_pull(body["title"], user(hub, request) or "")
    return JSONResponse({"num": number, "url": f"{hub.url}{found.web}/discussions/{number}"})


def summary(found: Repo, number: int) -> dict:
    """Return what a listing says of a pull request."""
    return {
        "title": found.pulls[number - 1],
        "num": number,
        "repo": {"name": found.id, "type": found.kind[:-1]},
        "author": {"name": found.pull_authors[number - 1]},
        "createdAt": now(),
        "status": found.pull_status.get(number, "open"),
        "isPullRequest": True,
    }


def pulls(hub, request: Request, kind: str, id: str) -> JSONResponse:
    found = repo(hub, request, kind, id)
    rows = [summary(found, number) for number in range(len(found.pulls), 0, -1)]
    return JSONResponse({"discussions": rows, "count": len(rows), "start": 0})


def pull(hub, request: Request, kind: str, id: str, number: str) -> JSONResponse:
    found = repo(hub, request, kind, id)
    return JSONResponse(
        {
            **summary(found, int(number)),
            "status": "draft",
            "events": [],
            "diff": "",
            "filesWithConflicts": [],
            "changes": {"base": "refs/heads/main", "mergeCommitId": None},
        }
    )


ROUTES = [
    ("GET", REPO + "/refs", listing),
    ("POST", REPO + "/branch/(?P<name>[^/]+)", branch),
    ("POST", REPO + "/tag/(?P<revision>[^/]+)", tag),
    ("DELETE", REPO + "/(?P<group>branch|tag)/(?P<name>[^/]+)", remove),
    ("POST", REPO + "/discussions", open_pull),
    ("GET", REPO + "/discussions", pulls),
    ("GET", REPO + r"/discussions/(?P<number>\d+)", pull),
]
