"""The ways of a datum through the package: `python -m docs.make.ways [load evaluate train publish]` prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.hub import WRITER, Server

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Way:
    """What a user writes, and the code that is traced for it.

    Attributes:
        title: what a user writes.
        code: what is traced.
        ready: code that runs before it in the same process: imports, and lazy names of the package.
        files: code that runs before it in another process, which leaves files and no caches in memory.
    """

    title: str
    code: str
    ready: str
    files: str = ""


def command(*words: str) -> str:
    """Return the code of a `zoo-cli` command that succeeds."""
    return f"try:\n    main({list(words)!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"


MAIN = "from checkpoints_zoo.cli.main import main\n"
# Other packages that a way imports: traced, their imports take several times as long.
OTHERS = "import sklearn.datasets, torch\n"
WAYS = {
    "load": Way(
        'zoo.load("convnet-digits", n=16).ensemble()(x)',
        'zoo.load("convnet-digits", n=16).ensemble()(x)',
        "import torch\nimport checkpoints_zoo as zoo\nzoo.load\nx = torch.rand(4, 1, 8, 8)",
    ),
    "evaluate": Way(
        'zoo.evaluate(zoo.load("convnet-digits", n=8), "digits", ood="photos")',
        'zoo.evaluate(zoo.load("convnet-digits", n=8), "digits", ood="photos")',
        OTHERS + "import checkpoints_zoo as zoo\nzoo.load, zoo.evaluate",
    ),
    "train": Way(
        "zoo-cli train convnet-digits --members 0-1 --set epochs=1 --out out/",
        command("train", "convnet-digits", "--members", "0-1", "--set", "epochs=1", "--out", "out/"),
        "import torch._dynamo\n" + OTHERS + MAIN,
    ),
    "publish": Way(
        "zoo-cli publish five/ --repo alice/zoo --dry-run",
        command("publish", "five/", "--repo", "alice/zoo", "--dry-run"),
        MAIN,
        MAIN + command("download", "convnet-digits", "-n", "5", "--dest", "five/"),
    ),
}


# Runs each of a list of ways in a process of its own, forked from this one once the packages are imported that take
# seconds; writes what `trace` finds into the way's folder.
FORKING = """
import json, os, sys
import sklearn.datasets, torch._dynamo

def run(way):
    os.chdir(way["folder"])
    os.environ["HF_HOME"] = os.path.join(way["folder"], "huggingface")
    from docs.make.trace import trace
    found = trace(way["code"], way["ready"])
    with open("found.json", "w") as file:
        json.dump(found, file)

def run_files(way):
    os.chdir(way["folder"])
    exec(way["files"], {})

for way in json.load(sys.stdin):
    for step in (run_files, run) if way["files"] else (run,):
        child = os.fork()
        if child == 0:
            step(way)
            sys.stdout.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(way["title"] + " failed")
"""


def traced(*ways: Way) -> list[dict[str, str]]:
    """Trace ways in fresh processes, on the processor, with an empty Hub and empty caches.

    Returns, for each way, the files of the package that it passes, in their order, each with the function that ran
    first.
    """
    with tempfile.TemporaryDirectory(prefix="way-") as name, Server(Path(name) / "hub") as hub:
        folders = [Path(name, str(at)) for at in range(len(ways))]
        for folder in folders:
            folder.mkdir()
        alone = {
            "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_TOKEN": WRITER,
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        jobs = [{"folder": str(folder), **asdict(way)} for folder, way in zip(folders, ways, strict=True)]
        done = subprocess.run(
            [sys.executable, "-c", FORKING], input=json.dumps(jobs), env=os.environ | alone, cwd=name,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        return [json.loads((folder / "found.json").read_text(encoding="utf-8")) for folder in folders]


if __name__ == "__main__":
    names = sys.argv[1:] or list(WAYS)
    for name, files in zip(names, traced(*(WAYS[name] for name in names)), strict=True):
        print(f"{name}: {WAYS[name].title} passes {len(files)} files")
        print(*(f"{at:5} {file}: {function}" for at, (file, function) in enumerate(files.items(), 1)), sep="\n")
