"""The Hub in a thread of this process, on a port of the loopback interface."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import uvicorn

from .hub import Hub

HOST = "127.0.0.1"


def bound(port: int = 0) -> socket.socket:
    """Bind a port and return its socket; until a server listens there, connections are refused."""
    # With IPPROTO_TCP asyncio turns Nagle's algorithm off. Without it each small answer takes 40 ms.
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    taken.bind((HOST, port))
    return taken


class Server:
    """`with Server(root) as hub:` runs a Hub for the length of the block."""

    def __init__(
        self,
        root: str | Path,
        port: int = 0,
        *,
        xet: bool = False,
        sock: socket.socket | None = None,
        **options,
    ) -> None:
        """Bind the port.

        Args:
            root: folder for the content.
            port: 0 takes a free one.
            xet: offer Xet storage (a `local://` one).
            sock: a bound socket to use in place of `port`.
            options: what else `Hub` takes.
        """
        self.sock = sock or bound(port)
        self.hub = Hub(root, port=self.sock.getsockname()[1], xet=xet, **options)
        config = uvicorn.Config(
            self.hub,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.run, name="hub", daemon=True)

    def run(self) -> None:
        """Serve in this thread until `stop` is called."""
        self.uvicorn.run(sockets=[self.sock])

    def start(self) -> Hub:
        """Serve in a thread, and return the Hub once it answers."""
        self.thread.start()
        while not self.uvicorn.started:
            if not self.thread.is_alive():
                raise RuntimeError(f"the loopback Hub did not start on port {self.hub.port}")
            time.sleep(0.002)
        return self.hub

    def stop(self) -> None:
        """End the thread and free the port."""
        self.uvicorn.should_exit = True
        self.thread.join(10)
        self.sock.close()

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(self, *exception) -> None:
        self.stop()
