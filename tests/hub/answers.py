"""Answers: refusals, and content by range."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse

PIECE = 1 << 19  # bytes a message


class Refusal(Exception):
    """An error that the client gets: status, the Hub's own error code, a message, more headers."""

    def __init__(self, status: int, code: str = "", message: str = "", headers: dict | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}

    def answer(self) -> JSONResponse:
        """Return the response."""
        own = {"X-Error-Code": self.code} if self.code else {}
        headers = {name: str(value) for name, value in self.headers.items() if value is not None}
        return JSONResponse({"error": self.message}, self.status, {"X-Error-Message": self.message, **own, **headers})


class Content:
    """A file, or the one range of it that the request asks for; several ranges get all of it, as from S3."""

    def __init__(
        self,
        request: Request,
        size: int,
        read: Callable[[int, int], bytes],
        headers: dict[str, str],
        kind: str = "application/octet-stream",
    ) -> None:
        """Read the Range header. Raises: Refusal: 416, it begins behind the end."""
        self.request, self.read, self.status = request, read, 200
        self.start, self.end = 0, size
        headers = {"Content-Type": kind, "Accept-Ranges": "bytes", **headers}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if asked and any(asked.groups()):
            first, last = asked.groups()
            if first:
                self.start, self.end = int(first), min(size, int(last) + 1 if last else size)
            else:
                self.start = max(0, size - int(last))
            if self.start >= self.end:
                raise Refusal(416, "", "Range not satisfiable", {"Content-Range": f"bytes */{size}"})
            self.status = 206
            headers["Content-Range"] = f"bytes {self.start}-{self.end - 1}/{size}"
        self.headers = {**headers, "Content-Length": str(self.end - self.start)}

    async def __call__(self, scope, receive, send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        position = self.start if self.request.method != "HEAD" else self.end
        while position < self.end:
            # In another thread: reading a virtual file computes, and other answers go on meanwhile.
            piece = await asyncio.to_thread(self.read, position, min(PIECE, self.end - position))
            position += len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
