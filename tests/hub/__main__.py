"""python -m tests.hub --port 8777: the Hub as a process of its own, until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile

from . import WRITER, Server

parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--root", help="folder for the content; a temporary one otherwise")
parser.add_argument("--xet", action="store_true")
parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
options = parser.parse_args()

# Both end it in order; a shell may have started it with SIGINT ignored.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.default_int_handler)

with tempfile.TemporaryDirectory(prefix="hub-") as temporary, contextlib.suppress(KeyboardInterrupt):
    server = Server(options.root or temporary, options.port, xet=options.xet, latency=options.latency)
    with server as hub:
        print(f"HF_ENDPOINT={hub.url} HF_TOKEN={WRITER} HF_HUB_DISABLE_XET={int(not options.xet)}", flush=True)
        server.thread.join()
