"""Who asks, and what they may."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse

from .answers import Refusal
from .repos import Repo

KINDS = "models|datasets|spaces"
REPO = rf"/api/(?P<kind>{KINDS})/(?P<id>[^/]+/[^/]+)"  # of the API
WEB = r"/(?:(?P<kind>datasets|spaces)/)?(?P<id>[^/]+/[^/]+)"  # of the pages and files


def user(hub, request: Request) -> str | None:
    """Return whose token came along; None without one. Raises: Refusal: 401, nobody's."""
    header = request.headers.get("authorization")
    if header is None:
        return None
    name = hub.tokens.get(header.removeprefix("Bearer "))
    if name is None:
        raise Refusal(401, "", "Invalid credentials in Authorization header")
    return name


def repo(hub, request: Request, kind: str, id: str, *, write: bool = False, content: bool = False) -> Repo:
    """Return a repo. Raises: Refusal: there is none, or it is not theirs to see, write to, or read."""
    name, found = user(hub, request), hub.repos.get((kind, id))
    owner = id.split("/")[0] in hub.namespaces(name)
    if found is None or (found.private and not owner):
        raise Refusal(404 if name else 401, "RepoNotFound", "Repository not found")
    if write and not owner:
        raise Refusal(403 if name else 401, "", "You don't have the rights to write to this repo")
    if content and found.gated and not owner and name not in found.allowed:
        raise Refusal(403 if name else 401, "GatedRepo", f"Access to {kind[:-1]} {id} is restricted.")
    return found


def whoami(hub, request: Request) -> JSONResponse:
    name = user(hub, request)
    if name is None:
        raise Refusal(401, "", "Invalid username or password.")
    groups = [{"type": "org", "name": group, "fullname": group} for group in hub.groups.get(name, [])]
    auth = {"accessToken": {"displayName": "tests", "role": "write"}}
    return JSONResponse({"type": "user", "id": name, "name": name, "fullname": name, "orgs": groups, "auth": auth})


def auth_check(hub, request: Request, kind: str, id: str, write: str | None) -> JSONResponse:
    repo(hub, request, kind, id, write=bool(write), content=True)
    return JSONResponse({})


ROUTES = [("GET", "/api/whoami-v2", whoami), ("GET", REPO + "/auth-check(?P<write>/write)?", auth_check)]
