"""What the Hub was asked and what it answered."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Exchange:
    """One request and its answer.

    Attributes:
        path: percent-decoded, without the query.
        host: the Host header, port included.
        headers: of the request, names in lower case.
        range: the Range header, or None.
        bytes: of the answer's body, headers not counted.
        received: bytes of the request's body.
        started: seconds on `time.perf_counter`'s clock.
        seconds: from the request to the last byte of the answer.
        fault: the fault it met, or None.
    """

    method: str
    path: str
    query: str
    host: str
    headers: dict[str, str]
    range: str | None
    status: int = 0
    bytes: int = 0
    received: int = 0
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    fault: dict | None = None

    @classmethod
    def of(cls, scope: dict) -> Exchange:
        """Start the row of a request, and return it."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        path, host = scope["path"], headers.get("host", "")
        return cls(scope["method"], path, query, host, headers, headers.get("range"))

    def __str__(self) -> str:
        path = re.sub("([0-9a-f]{8})[0-9a-f]{32,56}", r"\1", self.path)
        where = f"{self.host}{path}" + (f" [{self.range}]" if self.range else "")
        return f"{self.status} {self.method} {where} {self.bytes} B in {self.seconds * 1e3:.0f} ms"


class Log(list):
    """Exchanges in the order in which the requests came; `print(hub.log)` shows them."""

    def __init__(self, exchanges=(), *, api: str) -> None:
        """Args: api: the Hub's own URL, the only one a token may go to."""
        super().__init__(exchanges)
        self.api = api

    def select(
        self,
        path: str = "",
        *,
        method: str | None = None,
        status: int | None = None,
        host: str | None = None,
        ranged: bool | None = None,
    ) -> Log:
        """Return the exchanges whose path contains the regex `path` and that are as told."""
        chosen = (
            row
            for row in list(self)
            if re.search(path, row.path)
            and method in {None, row.method}
            and status in {None, row.status}
            and host in {None, row.host, row.host.rpartition(":")[0]}
            and ranged in {None, row.range is not None}
        )
        return Log(chosen, api=self.api)

    def requests(self, path: str = "", **conditions) -> int:
        """Count the requests; conditions as for `select`."""
        return len(self.select(path, **conditions))

    def bytes(self, path: str = "", **conditions) -> int:
        """Add up the bytes of the answers' bodies; conditions as for `select`."""
        return sum(row.bytes for row in self.select(path, **conditions))

    def received(self, path: str = "", **conditions) -> int:
        """Add up the bytes of the requests' bodies; conditions as for `select`."""
        return sum(row.received for row in self.select(path, **conditions))

    def with_token(self, token: str) -> Log:
        """Return the exchanges whose request names the token in a header, the path or the query."""
        chosen = (
            row for row in list(self) if any(token in text for text in (row.path, row.query, *row.headers.values()))
        )
        return Log(chosen, api=self.api)

    def leaks(self, token: str) -> Log:
        """Return the exchanges that took the token to another host than the Hub's own."""
        own = urlsplit(self.api).netloc
        return Log((row for row in self.with_token(token) if row.host != own), api=self.api)

    def most_at_once(self, path: str = "", **conditions) -> int:
        """Return how many of the requests were under way at one time, at most."""
        rows = self.select(path, **conditions)
        steps = sorted([(r.started, 1) for r in rows] + [(r.started + r.seconds, -1) for r in rows])
        now = most = 0
        for _, step in steps:
            now += step
            most = max(most, now)
        return most

    def __str__(self) -> str:
        return "\n".join(str(row) for row in self)
