"""From a request to its answer: the log, the faults, the routes."""

from __future__ import annotations

import asyncio
import inspect
import re
from urllib.parse import unquote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from . import accounts, download, lfs, refs, registry, trees, upload, xet
from .answers import Content, Refusal
from .log import Exchange
from .wire import Gone, Wire

ROOMS = (accounts, registry, trees, refs, upload, lfs, xet, download)
ROUTES = [(method, re.compile(path), answer) for room in ROOMS for method, path, answer in room.ROUTES]


async def serve(hub, scope, receive, send) -> None:
    """Answer one request."""
    if scope["type"] != "http":
        return
    exchange = Exchange.of(scope)
    hub.log.append(exchange)
    if hub.on_request:
        hub.on_request(exchange)
    fault = hub.faults.take(exchange)
    wire = Wire(exchange, send, fault)

    async def counted():
        message = await receive()
        exchange.received += len(message.get("body", b""))
        return message

    try:
        await wire.silence(hub.latency + fault.get("wait", 0))
        if fault.get("whole"):
            kept = [(name, value) for name, value in scope["headers"] if name != b"range"]
            scope = {**scope, "headers": kept}
        answer = await answered(hub, Request(scope, counted), fault)
        await answer(scope, counted, wire.send)
    except (Gone, ClientDisconnect):
        wire.transport.close()
    except asyncio.CancelledError:
        raise
    except Exception as error:
        hub.errors.append(error)
        raise


async def answered(hub, request: Request, fault: dict):
    """Return the answer, or what a fault puts in its place."""
    try:
        instead = replaced(hub, request, fault)
        return instead or await routed(hub, request)
    except Refusal as refusal:
        return refusal.answer()


def replaced(hub, request: Request, fault: dict):
    """Return what stands in for the answer; None if the answer shall be given."""
    headers = {name: str(value) for name, value in fault.get("headers", {}).items() if value is not None}
    if fault.get("hangup"):
        raise Gone
    if fault.get("expire"):
        hub.expire_links()
        raise Refusal(403, "", "Request has expired")
    if "redirect" in fault:
        start = hub.cdn_url if fault["redirect"] is True else fault["redirect"]
        path = request.scope["raw_path"].decode() + (f"?{request.url.query}" if request.url.query else "")
        return Response(status_code=fault.get("status", 302), headers={"Location": start + path, **headers})
    if "body" in fault:
        body = fault["body"]
        kind = "text/html" if body.lstrip().startswith(b"<") else "text/plain"
        if fault.get("ranges"):
            return Content(request, len(body), lambda at, n: body[at : at + n], headers, kind)
        return Response(body, fault.get("status", 200), headers, kind)
    if "status" in fault:
        raise Refusal(fault["status"], fault.get("code", ""), fault.get("message", "injected"), headers)
    return None


async def routed(hub, request: Request):
    """Return the answer of the room whose path it is."""
    raw = request.scope["raw_path"].decode().split("?")[0]
    wanted = {request.method, "GET" if request.method == "HEAD" else request.method}
    for method, path, answer in ROUTES:
        if method in wanted and (match := path.fullmatch(raw)):
            named = {name: value and unquote(value) for name, value in match.groupdict().items()}
            if "kind" in named:
                named["kind"] = named["kind"] or "models"
            result = answer(hub, request, **named)
            return await result if inspect.isawaitable(result) else result
    raise Refusal(404, "", f"no such route: {request.method} {raw}")
