"""The two calls around every upload: how shall I send these files, and: here is the commit."""

from __future__ import annotations

import base64
import json

from starlette.requests import Request
from starlette.responses import JSONResponse

from .accounts import REPO, repo, user
from .answers import Refusal
from .repos import File, Repo, wants_lfs
from .xet import xet_file


async def preupload(hub, request: Request, kind: str, id: str, revision: str) -> JSONResponse:
    asked = "create_pr" in request.query_params
    found, body = writable(hub, request, kind, id, revision, asked), await request.json()
    commit, rows = found.at(revision), []
    for file in body["files"]:
        sample, old = base64.b64decode(file.get("sample", "")), commit.tree.get(file["path"])
        lfs = wants_lfs(file["path"], file["size"], sample)
        mode, oid = "lfs" if lfs else "regular", old and (old.sha if old.lfs else old.oid)
        rows.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return JSONResponse({"files": rows, "commitOid": commit.id})


async def commit(hub, request: Request, kind: str, id: str, revision: str) -> JSONResponse:
    asked = "create_pr" in request.query_params
    found = writable(hub, request, kind, id, revision, asked)
    lines = [json.loads(line) for line in (await request.body()).splitlines() if line.strip()]
    header = next(line["value"] for line in lines if line["key"] == "header")
    with hub.lock:
        parent = found.at(revision)
        if header.get("parentCommit") and not parent.id.startswith(header["parentCommit"]):
            raise Refusal(412, "", "A commit has happened since. Please refresh and try again.")
        tree = dict(parent.tree)
        for line in lines:
            apply(hub, tree, line["key"], line["value"])
        ref = target(found, revision, header["summary"], asked, user(hub, request))
        oid = found.commit(ref, tree, header["summary"], header.get("description", ""), parent.id)
    answer = {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}{found.web}/commit/{oid}"}
    if asked:
        answer["pullRequestUrl"] = f"{hub.url}{found.web}/discussions/{ref.removeprefix('refs/pr/')}"
    return JSONResponse({**answer, "hookOutput": ""})


def writable(hub, request: Request, kind: str, id: str, revision: str, asked: bool) -> Repo:
    """Return the repo: to its owners, to anyone who opens a pull request, and to its author to go on with it."""
    name = user(hub, request)
    found = repo(hub, request, kind, id)
    number = revision.removeprefix("refs/pr/")
    own = revision != number and number.isdigit() and found.pull_authors[int(number) - 1 : int(number)] == [name]
    return found if (asked or own) and name else repo(hub, request, kind, id, write=True)


def target(found: Repo, revision: str, title: str, asked: bool, author: str | None) -> str:
    """Return the ref that a commit moves. Raises: Refusal: 403, it is neither branch nor pull request."""
    ref = f"refs/pr/{found.open_pull(title, author or '')}" if asked else found.ref(revision)
    if ref is None or ref.startswith("refs/tags/"):
        raise Refusal(403, "", "cannot commit to something else than a branch")
    return ref


def apply(hub, tree: dict[str, File], key: str, value: dict) -> None:
    """Change the tree by one line of a commit."""
    if key == "file":
        content = base64.b64decode(value["content"])
        hub.blobs.put(content)
        tree[value["path"]] = File.regular(content)
    elif key == "lfsFile":
        tree[value["path"]] = large(hub, value["path"], value["oid"])
    elif key in {"deletedFile", "deletedFolder"}:
        folder = value["path"].rstrip("/") + "/" if key == "deletedFolder" else None
        gone = [path for path in tree if path == value["path"] or (folder and path.startswith(folder))]
        if not gone:
            raise Refusal(404, "EntryNotFound", "A file with this name doesn't exist")
        for path in gone:
            del tree[path]


def large(hub, path: str, sha: str) -> File:
    """Return the file whose content was uploaded before. Raises: Refusal: 400, it was not."""
    if hub.xet and (stored := xet_file(hub, sha)):
        return File.large(sha, stored.size, stored.name)
    if not hub.blobs.has(sha):
        raise Refusal(400, "", f"LFS pointer pointed to a file that does not exist: {path}")
    return File.large(sha, hub.blobs.size(sha))


ROUTES = [
    ("POST", REPO + "/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", REPO + "/commit/(?P<revision>[^/]+)", commit),
]
