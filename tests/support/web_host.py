"""A host of files on the loopback interface, with the habits of web servers: ranges, ETags, redirects, faults."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass
class WebHost:
    """Files by path; what a test changes takes effect at once.

    Args:
        url: address of the host.
        files: path -> content.
        has_ranges: whether ranges are served.
        etags: "strong", "weak" or "none".
        redirects: path -> where it leads.
        statuses: path -> status that is answered instead of the file.
        cut: path -> number of bytes after which a body ends, each used once.
        log: (path, Range, all headers) of each request.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    has_ranges: bool = True
    etags: str = "strong"
    redirects: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    log: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [path for path, _, _ in self.log]

    def add_folder(self, folder: Path, prefix: str = "/") -> None:
        """Serve the files of a folder."""
        self.files |= {
            prefix + path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def etag(self, path: str) -> str:
        word = f'"{hashlib.md5(self.files[path], usedforsecurity=False).hexdigest()}"'
        return {"strong": word, "weak": f"W/{word}", "none": ""}[self.etags]

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if path in self.redirects:
            return 302, {"Location": self.redirects[path]}, b""
        if path in self.statuses:
            return self.statuses[path], {}, b"<html>no</html>"
        if path not in self.files:
            return 404, {}, b"<Error>NoSuchKey</Error>"
        content, answered = self.files[path], {"ETag": self.etag(path)} if self.etag(path) else {}
        if headers.get("If-Match", self.etag(path)) != self.etag(path):
            return 412, answered, b""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", ""))
        if match is None or not self.has_ranges:
            return 200, answered, content
        start, end = int(match[1]), min(int(match[2]) + 1, len(content))
        if start >= len(content):
            return 416, answered | {"Content-Range": f"bytes */{len(content)}"}, b""
        return 206, answered | {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}, content[start:end]


@contextmanager
def serving() -> Iterator[WebHost]:
    """Serve files while the `with` block runs."""
    host = WebHost()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # An answer is sent at once, or its parts would wait for each other.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            headers = dict(self.headers.items())
            headers = {name.title(): value for name, value in headers.items()}
            host.log.append((self.path, headers.get("Range", ""), headers))
            status, answered, body = host.answer(self.path, headers)
            self.send_response(status)
            for name, value in (answered | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            cut = host.cut.pop(self.path, None) if len(body) > 1 else None
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that need no more of an answer close the connection."""

    with Server(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        host.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield host
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebHost]:
    """Give a host of files, and a client that is online with empty caches."""
    from huggingface_hub import constants

    from checkpoints_zoo.sources import ranges
    from checkpoints_zoo.sources import web as web_room

    home = tmp_path / "hf-home"
    for name, value in {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_a_secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(home / "assets"))
    for room in (ranges, web_room):
        monkeypatch.setattr(room, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(web_room, "_warned_hosts", set())
    with serving() as host:
        yield host
    web_room._client(os.getpid()).close()
    web_room._client.cache_clear()
    assert all("Authorization" not in headers and "Cookie" not in headers for _, _, headers in host.log)
