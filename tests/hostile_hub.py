"""Hostile strings in each answer of a Hub, read by each command: `python -m tests.hostile_hub`.

A place is a header of an answer, the text of an error, a leaf or a key of an answer's JSON. A case puts one string into
one place and runs one command that asks for this answer, with empty caches. It passes as a case of
`tests.hostile_strings` does; the caches are the only folders outside its own that it may write to.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.hub.fixtures import Clock, prepare, reserved

os.environ.update(HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_OFFLINE="0", HF_TOKEN="hf_writer")
prepare()  # before the client of the Hub is imported, which reads its address then


from huggingface_hub import file_download  # noqa: E402
from huggingface_hub.utils import _http, httpx  # type: ignore[attr-defined]  # noqa: E402
from safetensors.torch import save  # noqa: E402

from checkpoints_zoo.sources import (  # noqa: E402
    archive_source,
    fetching,
    hash_records,
    ranges,
)
from checkpoints_zoo.sources import hub as hub_client  # noqa: E402
from checkpoints_zoo.sources.archives import indexing  # noqa: E402
from tests.fuzz import RUNS, Report, Watch, case_folders, make_archive, run_case  # noqa: E402
from tests.hostile_strings import (  # noqa: E402
    NAME,
    Addresses,
    Use,
    all_texts,
    chance,
    commands,
    json_places,
    make_digit_table,
    make_parser,
    quiet,
    use,
)
from tests.hub import WRITER, Hub, Server  # noqa: E402
from tests.support.scenarios import random_state  # noqa: E402

Fault = dict[str, Any]
MakeFault = Callable[[str], Fault]

HEADERS = ("ETag", "X-Repo-Commit", "X-Linked-ETag", "X-Linked-Size", "Location", "Content-Range", "Content-Length",
           "Content-Type", "Content-Encoding", "Link", "X-Xet-Hash", "Set-Cookie")  # fmt: skip
STATUSES = (400, 403, 404, 429, 500)
WAITS = ("Retry-After", "RateLimit")
REPOS = {"source": "alice/zoo", "archive": "alice/archives", "images": "alice/images", "checkpoints": "alice/runs"}


ADDRESSES = Addresses(
    source="hf://datasets/alice/zoo",
    archives="hf://datasets/alice/archives",
    images="hf://datasets/alice/images",
    images_folder="hf://datasets/alice/images",
    checkpoints="hf://datasets/alice/runs/nets",
)


def commit_inputs(hub: Hub, folder: Path) -> Path:
    """Commit a repo for each kind of input; return the folder of the collection's source."""
    source = folder / "source"
    quiet("download", NAME, "--members", "0-3", "--dest", source)
    quiet("predict", NAME, "--source", source, "--data", "digits", "-o", source)
    (folder / "images").mkdir()
    make_digit_table(folder / "images" / "test.parquet")
    make_archive(folder / "archives")
    (folder / "runs" / "nets").mkdir(parents=True)
    for i in range(2):
        (folder / "runs" / "nets" / f"net_{i}.safetensors").write_bytes(save(random_state("convnet", i)))
    for kind, name in {"source": "source", "archive": "archives", "images": "images", "checkpoints": "runs"}.items():
        files = {p.relative_to(folder / name).as_posix(): p for p in (folder / name).rglob("*") if p.is_file()}
        hub.commit(REPOS[kind], files)
    return source


def hub_commands(out: Path, source: Path) -> dict[str, Use]:
    """Return what reads the repos: the command -> a function that runs it."""
    kinds = commands(ADDRESSES, out)
    runs = {label: run for uses in kinds.values() for label, run in uses.items()}
    runs = {label: run for label, run in runs.items() if not label.startswith("train-merge")}  # of folders alone
    publish = ("publish", source, "--repo", REPOS["source"], "--dry-run")
    return runs | {"publish": partial(quiet, *publish)}


def forget(home: Path) -> None:
    """Start as a new process with empty caches does."""
    for known in (indexing._indexes, archive_source._archived_collections, fetching._remote_files):
        known.clear()
    hash_records._known_records.clear()
    shutil.rmtree(home, ignore_errors=True)


# ---- places ----
def header_text(text: str) -> str:
    """Return a string as a header can hold it: without NUL, DEL and ends of lines."""
    return re.sub(r"[\0\x7f\n\v\f\r]", " ", text.encode(errors="replace").decode()).strip(" \t")


def path_class(path: str) -> str:
    """Return a regex of the paths that are asked for alike: commits and links differ from run to run."""
    return "^" + re.sub(r"(?<=/)[0-9a-f]{40,64}(?=/|$)", "[0-9a-f]+", re.escape(path)) + "$"


def places(hub: Hub, asked: Iterator[tuple[str, str, str]], folder: Path) -> Iterator[tuple[str, str, MakeFault]]:
    """Yield (place, regex of the path, the fault that puts a string there) of each answer that was asked for.

    Args:
        hub: the Hub.
        asked: (method, path, query) of the requests.
        folder: folder for a file with the JSON of an answer.
    """
    seen = set[tuple[str, str]]()
    for method, path, query in asked:
        regex = path_class(path)
        if (method, regex) in seen:
            continue
        seen.add((method, regex))
        met: Fault = {"path": regex, "method": method, "times": math.inf}
        for header in HEADERS:
            yield f"{method} {regex}: {header}", regex, partial(_header, met, header)
        for status in STATUSES:
            for part in ("code", "message", *(WAITS if status in (429, 500) else ())):
                yield f"{method} {regex}: {status} {part}", regex, partial(_error, met, status, part)
        if method == "GET" and path.startswith("/api/"):
            answer = httpx.get(f"{hub.url}{path}?{query}", headers={"authorization": f"Bearer {WRITER}"})
            for place, make in _json_faults(met, folder / f"{len(seen)}.json", answer.text):
                yield f"{method} {regex}: {place}", regex, make


def _header(met: Fault, header: str, text: str) -> Fault:
    return {**met, "headers": {header: header_text(text)}}


def _error(met: Fault, status: int, part: str, text: str) -> Fault:
    fault = {**met, "status": status}
    if part in WAITS:
        return {**fault, "headers": {part: header_text(text)}}
    name = "X-Error-Code" if part == "code" else "X-Error-Message"
    return {**fault, "message": text, "headers": {name: header_text(text)}}


def _json_faults(met: Fault, path: Path, answer: str) -> Iterator[tuple[str, MakeFault]]:
    path.write_text(answer)
    for place, put in json_places(path):

        def make(text: str, put: Callable[[str], None] = put) -> Fault:
            put(text)
            return {**met, "body": path.read_bytes()}

        yield place, make
    if "/tree/" in met["path"] and '"path"' in answer:  # names of files that lie where they should
        for form in (
            "manifests/{}.parquet",
            "manifests/{}.json",
            "shards/{}",
            "models/mnist-optunet/{}.tgz",
            "{}.parquet",
        ):

            def make_row(text: str, form: str = form) -> Fault:
                path.write_text(answer)
                (first, *_) = [put for place, put in json_places(path) if place.endswith("path") and "key" not in place]
                first(form.format(text))
                return {**met, "body": path.read_bytes()}

            yield f"path {form}", make_row


# ---- cases ----
def keep_inside() -> None:
    """Let retries follow at once, and no name be looked up but that of this machine."""
    clock = Clock()
    for module in (file_download, _http):
        module.time = clock  # type: ignore[attr-defined]
    for room in (ranges, hub_client):
        room.time = type("Clock", (), {"sleep": staticmethod(lambda seconds: None)})  # type: ignore[attr-defined]
    look_up = socket.getaddrinfo

    def local_only(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in ("127.0.0.1", "localhost"):
            raise socket.gaierror(socket.EAI_NONAME, "no such host")
        return look_up(host, *arguments, **options)

    socket.getaddrinfo = local_only


def run_cases(
    report: Report, hub: Hub, folder: Path, home: Path, strings: int, seed: int, share: float, only: list[str]
) -> None:
    """Run a share of all cases, drawn at random: each place, each of `strings` strings, each command that asks there.

    Commands that draw take seconds: a tenth of their cases is run. `only` names the commands; [] runs all.
    """
    (folder / "inputs").mkdir()
    source, out = commit_inputs(hub, folder / "inputs"), folder / "out"
    runs = {x: run for x, run in hub_commands(out, source).items() if not only or x.split()[0] in only}
    keep_inside()
    asked: dict[tuple[str, str, str], set[str]] = {}  # (method, path, query) -> the commands that ask for it
    for label, sound in runs.items():
        forget(home)
        hub.log.clear()
        out.mkdir()
        code, printed = sound()
        assert code == 0 or label.startswith("audit"), f"{label}: exit code {code}: {printed}"
        shutil.rmtree(out)
        for exchange in hub.log:
            query = "" if exchange.path.startswith("/_cdn/") else exchange.query
            asked.setdefault((exchange.method, exchange.path, query), set()).add(label)
    rng = random.Random(f"{seed}/strings")
    texts = all_texts(rng, strings)
    (folder / "answers").mkdir()
    every_place = list(places(hub, iter(asked), folder / "answers"))
    watch = Watch(folder, home, events=RUNS - {"socket.connect"})
    for place, regex, make in every_place:
        method = place.partition(" ")[0]
        labels = {x for (m, path, _), users in asked.items() if m == method and re.search(regex, path) for x in users}
        for text, label in itertools.product(texts, sorted(labels)):
            if rng.random() >= chance(share, text, label):
                continue
            forget(home)
            out.mkdir()
            hub.faults.append(make(text))
            answer = re.sub(r"^\^?/?(api/)?", "", regex)[:20]
            run_case(
                report, watch, f"{place} {text[:60]!r}, {label}", f"{answer}, {label.split()[0]}",
                partial(use, runs[label], out), len(text),
            )  # fmt: skip
            hub.faults.clear()
            hub.log.clear()
            hub.errors.clear()  # some strings are no headers: the connection ends
            shutil.rmtree(out)


def run() -> int:
    """Run cases, and print what came of them; return 1 if one failed."""
    options = make_parser("tests.hostile_hub", __doc__).parse_args()
    report = Report()
    with case_folders() as (folder, home):
        os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")
        with Server(folder / "hub", sock=reserved[0]) as hub:
            run_cases(report, hub, folder, home, options.strings, options.seed, options.share, options.only)
    return report.print()


if __name__ == "__main__":
    sys.exit(run())
