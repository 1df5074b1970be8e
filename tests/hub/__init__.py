"""A Hugging Face Hub on the loopback interface, for the real client: counted, slowed down and broken at will.

with Server(tmp_path) as hub:
    hub.commit("alice/zoo", {"README.md": b"hello", "big.tar": noise(0, 23 * 10**9)})
    hub.faults.append({"path": "/_cdn/", "status": 503})
    ...  # the client, with HF_ENDPOINT=hub.url
    assert hub.log.bytes(path="big.tar") < 1e6
"""

from __future__ import annotations

from .hub import READER, WRITER, Hub
from .server import Server
from .virtual import Virtual, filled, joined, noise

__all__ = ["READER", "WRITER", "Hub", "Server", "Virtual", "filled", "joined", "noise"]
