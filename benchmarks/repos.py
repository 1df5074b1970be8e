"""Index a population in model repos and read parts of it: requests and bytes against what was asked for.

Run: uv run python benchmarks/repos.py [--repos 9 --steps 154]. The last line is one JSON object. The Hub runs in a
thread on the loopback interface; its repos are replicas of Pythia's (a seed a repo, a step a branch, one file of 5.9 MB
with buffers that no network needs; the first repo has checkpoints of two shards), whose bytes are made on request. Each
figure starts with empty caches. The waits for the Hub's windows are counted, and not waited for.

names_bytes_ratio            bytes of files that came / bytes of the embedding of all steps of one repo
names_ranges_per_snapshot    ranges for it / snapshots
member_bytes_ratio           bytes of files that came / bytes of 16 snapshots, 8 of them sharded
index_requests_per_snapshot  requests that the Hub's windows count (listings and files, not the storage behind them) /
                             snapshots, for the whole index of the repos of single files
index_ranges_per_snapshot    ranges of headers / snapshots
index_bytes_per_snapshot     bytes of headers and listings / snapshots
index_requests_per_sharded   the same as index_requests_per_snapshot, of the repo of two shards: each has a header
vs_whole_file                bytes of a snapshot's file / bytes that came for one of its tensors (a layer's attention)
audit_requests               requests of an audit after the index: what is known is not asked for again
largest_window               most listings in any five minutes of the paced clock; the Hub allows 1,000
paced_minutes                minutes that the indexes wait for the Hub's windows
index_s                      seconds of this machine for the indexes
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from bisect import bisect_left
from pathlib import Path

from checkpoints_zoo.collection.collection import load
from checkpoints_zoo.interop.ingest.model_repos import index_model_repos
from checkpoints_zoo.publishing.revision_audit import audit_revisions
from checkpoints_zoo.sources import fetching, rate_limits, revisions
from checkpoints_zoo.sources.hub_cache import cache_root
from tests.hub import WRITER, Hub, Server
from tests.support.model_repos import EMBEDDING, STEPS, neox, publish

FILES, COUNT = r"/_cdn/.*safetensors", 16
TENSOR = "gpt_neox.layers.3.attention.query_key_value.weight"
TENSORS = neox(hidden=128, layers=6, vocabulary=2048, extras=True)


class PacedClock:
    """A clock that is set forward by every wait, and otherwise goes as it does."""

    def __init__(self) -> None:
        self.waited = 0.0

    def time(self) -> float:
        return time.time() + self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds


def forget() -> None:
    """Empty the caches of members and of files' links."""
    fetching._remote_files.clear()
    for path in cache_root().glob("*--*--*/members/*"):
        path.unlink()


def largest_window(moments: list[float]) -> int:
    """Return the largest number of moments in a window of the Hub."""
    ordered = sorted(moments)
    return max(i + 1 - bisect_left(ordered, moment - rate_limits.WINDOW_SECONDS) for i, moment in enumerate(ordered))


def measure(hub: Hub, repos: int, steps: list[int], out: Path) -> dict[str, float]:
    """Measure everything on a Hub; return the figures by name."""
    clock, listings = PacedClock(), list[float]()
    revisions.API = rate_limits.Pace("api", clock.time, clock.sleep)
    revisions.RESOLVERS = rate_limits.Pace("resolvers", clock.time, clock.sleep)
    hub.on_request = lambda exchange: listings.append(clock.time()) if exchange.path.startswith("/api/") else None
    start, addresses = time.perf_counter(), [f"hf://org/net-seed{{2..{repos}}}"]
    figures: dict[str, float] = {}
    for name, places, key in (("net", addresses, "snapshot"), ("sharded", ["hf://org/net-seed1"], "sharded")):
        hub.log.clear()
        index_model_repos(places, name, out, revision_patterns=["step*"], say=print)
        snapshots = len(load(name, source=out, snapshots=True))
        own, headers = [x for x in hub.log if "/_cdn/" not in x.path], hub.log.select(FILES)
        figures[f"index_requests_per_{key}"] = len(own) / snapshots
        if name == "net":
            figures["index_ranges_per_snapshot"] = len(headers) / snapshots
            figures["index_bytes_per_snapshot"] = sum(x.bytes for x in [*own, *headers]) / snapshots
    figures["index_s"] = time.perf_counter() - start
    figures |= {"largest_window": largest_window(listings), "paced_minutes": clock.waited / 60}
    hub.on_request = None
    hub.log.clear()
    assert audit_revisions(addresses, ["step*"]).findings == []
    figures["audit_requests"] = len(hub.log)

    members = load("net", source=out, snapshots=True, where="member = 2")
    forget()
    hub.log.clear()
    wanted = members.stack(names=[EMBEDDING])[EMBEDDING].nbytes
    figures["names_bytes_ratio"] = hub.log.bytes(FILES) / wanted
    figures["names_ranges_per_snapshot"] = hub.log.requests(FILES) / len(members)

    forget()
    hub.log.clear()
    some = [load(name, source=out, snapshots=True, n=COUNT // 2) for name in ("net", "sharded")]
    for part in some:
        part.stack()
    figures["member_bytes_ratio"] = hub.log.bytes(FILES) / sum(part.nbytes for part in some)

    forget()
    hub.log.clear()
    members.take([5]).stack(names=[TENSOR])
    file = hub.files("org/net-seed2", f"step{steps[5]}", "models")["model.safetensors"]
    figures["vs_whole_file"] = file.size / hub.log.bytes(FILES)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repos", type=int, default=9)
    parser.add_argument("--steps", type=int, default=len(STEPS))
    options = parser.parse_args()
    steps = STEPS[: options.steps]
    with tempfile.TemporaryDirectory(prefix="zoo-repos-") as name, Server(Path(name, "hub")) as hub:
        os.environ.update(
            HF_ENDPOINT=hub.url, HF_HOME=str(Path(name, "hf")), HF_TOKEN=WRITER, HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="127.0.0.1,localhost",
        )  # fmt: skip
        for seed in range(1, options.repos + 1):
            publish(hub, f"org/net-seed{seed}", steps, TENSORS, seed, sharded=seed == 1)
        figures = measure(hub, options.repos, steps, Path(name, "index"))
    print(json.dumps({key: round(value, 4) for key, value in sorted(figures.items())}))


if __name__ == "__main__":
    main()
