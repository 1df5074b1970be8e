"""The last step before the socket: counts what leaves, and damages it where a fault says so."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

from .log import Exchange


class Gone(Exception):
    """The connection has ended: there is nobody to send to."""


class Wire:
    """One answer on its way out."""

    def __init__(self, exchange: Exchange, send, fault: dict) -> None:
        """Take the place of ASGI's `send`, uvicorn's own method: its object holds the connection."""
        self.exchange, self.forward, self.fault = exchange, send, fault
        self.transport = send.__self__.transport
        self.position = 0
        stops = [fault[key] for key in ("cut", "reset") if key in fault]
        self.stop = stops[0] if stops else fault.get("after", 0) if "stall" in fault else None

    async def send(self, message: dict) -> None:
        """Send an ASGI message. Raises: Gone: the connection has ended."""
        if message["type"] == "http.response.start":
            self.exchange.status = message["status"]
            await self.pass_on({**message, "headers": self.changed(message["headers"])})
            return
        body, more = self.flipped(message.get("body", b"")), message.get("more_body", False)
        if self.stop is not None and self.position + len(body) >= self.stop:
            before = self.stop - self.position
            if before:
                await self.count(body[:before], True)
            body, self.stop = body[before:], None
            await self.interrupt()
        await self.count(body, more)

    async def count(self, body: bytes, more: bool) -> None:
        # Before it is sent: whoever has the answer finds it in the log.
        self.position += len(body)
        if self.exchange.method != "HEAD":
            self.exchange.bytes += len(body)
        await self.pass_on({"type": "http.response.body", "body": body, "more_body": more})

    async def pass_on(self, message: dict) -> None:
        if self.transport.is_closing():
            raise Gone
        self.exchange.seconds = time.perf_counter() - self.exchange.started
        await self.forward(message)

    def changed(self, headers) -> list[tuple[bytes, bytes]]:
        changes = {name.lower().encode(): value for name, value in self.fault.get("headers", {}).items()}
        kept = [(name, value) for name, value in headers if name.lower() not in changes]
        return kept + [(name, str(value).encode()) for name, value in changes.items() if value is not None]

    def flipped(self, body: bytes) -> bytes:
        if "wrong" not in self.fault:
            return body
        start = max(0, self.fault["wrong"] - self.position)
        return body[:start] + bytes(body[start:]).translate(FLIP)

    async def interrupt(self) -> None:
        if "stall" in self.fault:
            await self.silence(self.fault["stall"])
            return
        if "reset" in self.fault:
            await asyncio.sleep(0.05)  # a reset overtakes what still waits to be sent
            self.reset()
        else:
            self.transport.close()
        raise Gone

    async def silence(self, seconds: float) -> None:
        """Wait, unless the client gives up before. Raises: Gone: it did."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            if self.transport.is_closing():
                raise Gone
            await asyncio.sleep(min(left, 0.02))

    def reset(self) -> None:
        """End the connection with RST."""
        wire = self.transport.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


FLIP = bytes(255 - value for value in range(256))
