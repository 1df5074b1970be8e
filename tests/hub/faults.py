"""What can go wrong on the way. A fault is a dict: which requests it meets, and what they get.

Which requests (all optional):
    path     regex, searched in the percent-decoded path
    method   "GET", "HEAD", ...
    ranged   True: only with a Range header; False: only without
    skip     so many matching requests pass unharmed first
    times    so many meet it then; 1 unless told; `math.inf` for all of them
What they get, instead of an answer:
    status   an error with `code` (X-Error-Code), `message`, `headers`; with `redirect` or `body` their status
    body     these bytes with status 200, whatever the range; with `ranges`: True, ranges of these bytes
    redirect 302 to the same path of another host: True for the CDN's, or the start of a URL
    expire   True: 403, and every link given out so far is dead; a new request of `resolve` gives a new one
    hangup   True: the connection ends without an answer
What they get, with the answer:
    headers  replaced; None takes the header away
    whole    True: the Range header is overlooked: 200 and all of it
    wait     seconds of silence before anything is sent
    cut      after n bytes of the body the connection is closed; 0 on a POST: done, but its answer is lost
    reset    after n bytes of the body the connection is reset
    stall    seconds of silence after the first `after` bytes of the body (0)
    wrong    from byte n of the body on every bit is flipped
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .log import Exchange

WHICH = {"path", "method", "ranged", "skip", "times"}
INSTEAD = {"status", "code", "message", "body", "ranges", "redirect", "expire", "hangup"}
DAMAGE = {"whole", "cut", "reset", "stall", "after", "wrong"}  # to a body; so a HEAD does not use them up
KEYS = WHICH | INSTEAD | DAMAGE | {"headers", "wait"}

HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Sign in first.</body></html>\n"


class Faults(list):
    """Faults, the first that fits a request wins. `fault["times"]` counts down, `fault["hits"]` up."""

    def __init__(self, faults: Iterable[dict] = ()) -> None:
        super().__init__()
        self.extend(faults)

    def append(self, fault: dict) -> None:
        """Add a fault. Raises: ValueError: it has a key that means nothing."""
        if unknown := set(fault) - KEYS:
            raise ValueError(f"a fault knows no {sorted(unknown)}; it knows {sorted(KEYS)}")
        fault.setdefault("times", 1)
        fault["hits"] = 0
        super().append(fault)

    def extend(self, faults: Iterable[dict]) -> None:
        """Add several."""
        for fault in faults:
            self.append(fault)

    def __iadd__(self, faults: Iterable[dict]) -> Faults:  # type: ignore[override,misc]  # list's `+` makes a plain list
        self.extend(faults)
        return self

    def add(self, path: str = "", **fault) -> dict:
        """Add a fault written as keywords, and return it."""
        fault["path"] = path
        self.append(fault)
        return fault

    def take(self, exchange: Exchange) -> dict:
        """Return the fault that this request meets, {} if none, and count it."""
        for fault in list(self):
            if not fits(fault, exchange) or fault["times"] <= 0:
                continue
            if fault.get("skip", 0) > 0:
                fault["skip"] -= 1
                continue
            fault["times"] -= 1
            fault["hits"] += 1
            exchange.fault = fault
            return fault
        return {}


def fits(fault: dict, exchange: Exchange) -> bool:
    """Say whether a request is one of those that the fault is about."""
    if exchange.method == "HEAD" and fault.get("method") != "HEAD" and fault.keys() & DAMAGE:
        return False
    return (
        re.search(fault.get("path", ""), exchange.path) is not None
        and fault.get("method") in {None, exchange.method}
        and fault.get("ranged") in {None, exchange.range is not None}
    )
