"""Select from a manifest of a million rows, and read a thousand members: ours against DuckDB, torch and another commit.

Run: uv run python benchmarks/scale.py [--before CHECKOUT] [--rows N] [--only rows|members]. The last line is one JSON
object. The manifest is made of random values with our writer, in a temporary folder; the Hub is a process on the
loopback interface. Each figure is measured in processes of their own, warm, both sides in turns. The figures of members
are in benchmarks/thousand.py.

select_vs_duckdb     time of `find(where, n=1000)` / of DuckDB on the file with the same condition and LIMIT, medians
select_ms            milliseconds of ours, and first_ms of the first call of a process; duckdb_ms of DuckDB
ids_ms, sample_ms    milliseconds of 1,000 scattered ids, and of a sample of 1,000
rare_vs_duckdb       as select_vs_duckdb, for a condition on measured values that 20 rows meet, without n
unknown_s, twice_s   seconds until an unknown id is refused, and until an id given twice is; and the
                     characters of the errors
select_mb            largest resident memory of a process that selects, above that of an empty Python process, in MB;
                     selection_mb: above the same process before it opens the manifest
hub_bytes_share      bytes of the manifest that came from a Hub for 1,000 rows of a condition that a quarter of the rows
                     meet / bytes of the manifest; hub_requests: of the manifest
scattered_bytes_share, scattered_requests   the same for the condition of select_vs_duckdb, which one row in 200 meets:
                     its 1,000 rows lie in a fifth of the row groups, which are read whole
select_small         9,216 rows: time of the first `zoo.load` of a source / the same in another checkout (--before),
                     medians
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import thousand

from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.catalog import Description, write_json
from checkpoints_zoo.formats.columns import SCHEMA
from checkpoints_zoo.formats.layout import Layout
from tests.hub import WRITER, Server

NAME, REPO, SMALL_ROWS, PER_SHARD = "zoo", "alice/zoo", 9_216, 2_000
CONDITION, RARE_CONDITION = "test_accuracy > 0.9 AND lr < 0.05", "test_nll < 0.00002"
FREQUENT_CONDITION = "test_accuracy > 0.5 AND lr < 0.5"
LAYOUT = Layout.of([("weight", "F16", (64, 64))])


def write_source(folder: Path, count: int) -> Path:
    """Write the manifest and the description of a collection; return the path of the manifest."""
    random = np.random.default_rng(0)
    members = np.arange(count)
    digests = [hashlib.sha256(b"%d" % member).hexdigest() for member in range(count)]
    columns: dict[str, Any] = {
        "member": members.astype(np.int32), "epoch": np.full(count, 40, np.int32), "final": np.ones(count, bool),
        "status": ["ok" if x > 0.01 else "failed" for x in random.random(count)], "method": ["independent"] * count,
        "seed": random.permutation(count), "run_id": [digest[:16] for digest in digests],
        "split": [("train", "validation", "test")[x] for x in random.integers(0, 3, count)],
        "lr": random.random(count), "optimizer": ["sgd"] * count, "epochs": np.full(count, 40, np.int32),
        "sha256": digests, "path": [f"shards/zoo/{member // PER_SHARD:05d}.safetensors" for member in range(count)],
        "offset": 4096 + members % PER_SHARD * LAYOUT.nbytes, "nbytes": np.full(count, LAYOUT.nbytes),
        "layout": ["f16"] * count, "dtype": ["F16"] * count,
    }  # fmt: skip
    columns |= {
        name: random.random(count)
        for name in ("train_accuracy", "test_accuracy", "train_loss", "test_nll", "test_brier", "test_ece")
    }
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    description = Description(
        NAME, "random rows", "resnet18", {}, "none", ("a", "b"), {}, {"f16": LAYOUT}, "none", "none"
    )
    path = folder / "manifests" / f"{NAME}.parquet"
    manifest.write_manifest(pa.Table.from_arrays(arrays, schema=SCHEMA), path)
    write_json(description.to_json(), path.with_suffix(".json"))
    return path


# ---- measuring processes: each function runs in a process of its own ----
def milliseconds(function: Callable[[], Any], repeats: int = 9) -> float:
    """Call a function several times; return the median time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1000


def compare_with_duckdb(folder: str) -> dict[str, float]:
    """Select with both sides in turns; return the figures."""
    import duckdb

    from checkpoints_zoo.sources.finding import select_members

    path = Path(folder, "manifests", f"{NAME}.parquet")
    connection = duckdb.connect()

    def by_duckdb(condition: str, limit: str) -> list[int]:
        usable = f"status = 'ok' AND final AND ({condition})"
        rows = connection.execute(f"SELECT * FROM read_parquet('{path}') WHERE {usable} ORDER BY member {limit}")
        return [row[0] for row in rows.fetchall()]

    def by_us(condition: str, n: int | None) -> list[int]:
        ids: list[int] = select_members(NAME, where=condition, n=n, source=folder).rows.column("member").to_pylist()
        return ids

    start = time.perf_counter()
    ours = by_us(CONDITION, 1000)
    first_ms = (time.perf_counter() - start) * 1000
    assert ours == by_duckdb(CONDITION, "LIMIT 1000")
    assert by_us(RARE_CONDITION, None) == by_duckdb(RARE_CONDITION, "")
    times: dict[str, list[float]] = {}
    for _ in range(7):
        for key, call in {
            "select_ms": lambda: by_us(CONDITION, 1000), "duckdb_ms": lambda: by_duckdb(CONDITION, "LIMIT 1000"),
            "rare_ms": lambda: by_us(RARE_CONDITION, None), "rare_duckdb_ms": lambda: by_duckdb(RARE_CONDITION, ""),
        }.items():  # fmt: skip
            times.setdefault(key, []).append(milliseconds(call, 1))
    figures = {key: round(statistics.median(values), 1) for key, values in times.items()}
    return {
        "select_vs_duckdb": round(figures["select_ms"] / figures["duckdb_ms"], 2),
        "rare_vs_duckdb": round(figures["rare_ms"] / figures["rare_duckdb_ms"], 2),
        "first_ms": round(first_ms, 1),
        **figures,
    }


def time_errors(folder: str, count: int) -> dict[str, float]:
    """Select by ids and by a sample, and select wrongly; return the times."""
    from checkpoints_zoo.errors import MemberNotFound, SelectionError
    from checkpoints_zoo.sources.finding import select_members

    ids = np.random.default_rng(1).permutation(np.flatnonzero(np.arange(count) % 2))[:1000].tolist()
    known = select_members(NAME, source=folder, where=f"member IN ({', '.join(map(str, ids))})").rows
    chosen = known.column("member").to_pylist()
    figures = {
        "ids_ms": round(milliseconds(lambda: select_members(NAME, source=folder, members=chosen), 3), 1),
        "sample_ms": round(milliseconds(lambda: select_members(NAME, source=folder, n=1000, sample=7), 3), 1),
    }
    for key, members in {"unknown_s": [*chosen, count + 5], "twice_s": [*chosen, chosen[0]]}.items():
        start = time.perf_counter()
        try:
            select_members(NAME, source=folder, members=members)
        except (MemberNotFound, SelectionError) as error:
            figures[key] = round(time.perf_counter() - start, 2)
            figures[f"{key[:-2]}_characters"] = len(str(error))
    return figures


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure_memory(folder: str) -> dict[str, float]:
    """Select in this process; return its peak above an empty process, and above this one before the selection."""
    empty = int(subprocess.check_output([sys.executable, "-c", f"{PEAK_SCRIPT}"], text=True))
    peaks = subprocess.check_output([sys.executable, "-c", SELECT_SCRIPT, folder, CONDITION], text=True).split()
    before, after = map(int, peaks)
    return {"select_mb": round((after - empty) / 1e6, 1), "selection_mb": round((after - before) / 1e6, 1)}


PEAK_SCRIPT = """
print(next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM:')))
"""
SELECT_SCRIPT = f"""
import sys
import duckdb
from checkpoints_zoo.sources.finding import select_members
{PEAK_SCRIPT}
assert select_members('{NAME}', where=sys.argv[2], n=1000, source=sys.argv[1]).rows.num_rows == 1000
{PEAK_SCRIPT}
"""
SMALL_SCRIPT = f"""
import sys, time
import checkpoints_zoo as zoo
zoo.load('convnet-digits', where='member < 4', n=1)
start = time.perf_counter()
zoo.load('{NAME}', where=sys.argv[2], n=1000, source=sys.argv[1])
print(time.perf_counter() - start)
"""


def compare_small(folder: str, before: Path | None) -> dict[str, float]:
    """Select from a small manifest with this checkout and another one in turns; return the figures."""
    here = Path(__file__).parents[1]
    times: dict[Path, list[float]] = {}
    for _ in range(9):
        for checkout in filter(None, (here, before)):
            command = [sys.executable, "-c", SMALL_SCRIPT, folder, FREQUENT_CONDITION]
            seconds = subprocess.check_output(
                command, text=True, cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}
            )
            times.setdefault(checkout, []).append(float(seconds))
    ours = statistics.median(times[here])
    figures = {"small_ms": round(ours * 1000, 1)}
    return figures if before is None else {"select_small": round(ours / statistics.median(times[before]), 2), **figures}


# ---- the Hub ----
def serve(wire: Connection, folder: str) -> None:
    """Run a Hub that has the collection, until None arrives; send (path, bytes) of its answers."""
    with tempfile.TemporaryDirectory() as name, Server(Path(name, "hub")) as hub:
        hub.commit(
            REPO, {f"manifests/{NAME}.{x}": Path(folder, "manifests", f"{NAME}.{x}") for x in ("json", "parquet")}
        )
        wire.send(hub.url)
        while wire.recv() is not None:
            wire.send([(row.path, row.bytes) for row in list(hub.log)])


def select_from_hub(folder: str, condition: str) -> tuple[float, int]:
    """Select from the Hub with empty caches; return the share of the manifest's bytes that came, and the number of
    requests for them."""
    spawn, (ours, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    process = spawn.Process(target=serve, args=(theirs, folder), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is seen here
    with tempfile.TemporaryDirectory() as name:
        environment = os.environ | {
            "HF_ENDPOINT": ours.recv(), "HF_HOME": f"{name}/hf", "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
        command = [sys.executable, "-c", SELECT_SCRIPT, f"hf://datasets/{REPO}", condition]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    ours.send("log")
    sizes = [size for path, size in ours.recv() if path.endswith(".parquet")]
    ours.send(None)
    process.join()
    return round(sum(sizes) / Path(folder, "manifests", f"{NAME}.parquet").stat().st_size, 4), len(sizes)


def measure_rows(count: int, before: Path | None) -> dict[str, float]:
    """Make manifests and select from them; return the figures."""
    figures: dict[str, float] = {"rows": count}
    with tempfile.TemporaryDirectory() as name:
        large, small = Path(name, "large"), Path(name, "small")
        path = write_source(large, count)
        write_source(small, SMALL_ROWS)
        print(f"{count:,} rows in {path.stat().st_size / 1e6:.0f} MB", flush=True)
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            figures |= pool.apply(compare_with_duckdb, (str(large),))
        print(json.dumps(figures), flush=True)
        with context.Pool(1) as pool:
            figures |= pool.apply(time_errors, (str(large), count))
        print(json.dumps(figures), flush=True)
        figures |= measure_memory(str(large))
        figures["hub_bytes_share"], figures["hub_requests"] = select_from_hub(str(large), FREQUENT_CONDITION)
        figures["scattered_bytes_share"], figures["scattered_requests"] = select_from_hub(str(large), CONDITION)
        return figures | compare_small(str(small), before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the large manifest")
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare 9,216 rows with")
    parser.add_argument("--only", choices=("rows", "members"), help="one half of the figures")
    parser.add_argument("--members", type=int, default=1024, help="of benchmarks/thousand.py")
    parser.add_argument("--images", type=int, default=500, help="to evaluate on in benchmarks/thousand.py")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    if options.only != "members":
        figures |= measure_rows(options.rows, options.before)
    if options.only != "rows":
        figures |= thousand.measure(options.members, options.images)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
