"""Every command run by a Python that has the core of the package alone, and what each must say."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import COMMANDS, DONE, USAGE
from checkpoints_zoo.errors import EXTRA_OF_PACKAGE
from tests.hub import Hub
from tests.support.publications import ADDRESS, publish, two_shards
from tests.support.scenarios import random_state

CORE_COMMANDS = {"list", "show", "download", "cache", "audit", "verify", "import", "publish"}
INSTALL = "Type: pip install 'checkpoints-zoo[torch]'"
OTHERWISE = {
    "verify": "; or give --sample 0 and no other option, which checks bytes and hashes",
    "publish": "; or give sample=0 (--sample 0), which measures no accuracy again",
}

# Makes the packages that the JSON list in the first argument names as if they were not installed.
HIDE_PACKAGES = """
import json, sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *places):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, *places)
    def __getattr__(self, name):
        return getattr(self.finder, name)

hidden = json.loads(sys.argv[1])
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""

# Runs commands, a JSON list of lists of words, in one process; prints each command's exit code, stdout and stderr, and
# the packages of the first argument that were imported.
RUN_COMMANDS = """
import contextlib, io, json, sys
from checkpoints_zoo.cli.main import main

results = []
for words in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code or 0
    results.append({"words": words, "code": code, "out": out.getvalue(), "err": err.getvalue()})
print(json.dumps({"results": results, "imported": sorted(set(json.loads(sys.argv[1])) & set(sys.modules))}))
"""


def run_commands(python: Path | str, prelude: str, commands: list[list[str]], cwd: Path) -> list[dict[str, Any]]:
    """Run commands in one process of a Python; return each command's exit code and output, and check that the process
    imported no package of an extra."""
    code = [python, "-c", prelude + RUN_COMMANDS, json.dumps(list(EXTRA_OF_PACKAGE)), json.dumps(commands)]
    done = subprocess.run(code, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert printed["imported"] == []
    return list(printed["results"])


def check_core(python: Path | str, prelude: str, hub: Hub, tmp_path: Path) -> None:
    """Run every command with a Python that has the core alone, and check what each says."""
    published, own = two_shards(tmp_path / "out"), tmp_path / "own"
    publish(published.root)
    own.mkdir()
    for seed in range(2):
        save_file(random_state("convnet", seed), own / f"{seed}.safetensors")
    copy = str(tmp_path / "copy")
    facts = {"classes": list("0123456789"), "preprocessing": {"size": [8, 8], "channels": 1, "mean": [0.3], "std": [1]}}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    commands = [
        ["list"],
        ["show", "convnet-digits", "--where", "test_accuracy > 0.97"],
        ["download", "tiny", "--source", ADDRESS, "--dest", copy],
        ["cache"],
        ["verify", copy, "--sample", "0", "--format", "json"],
        ["verify", "tiny", "--source", ADDRESS, "--sample", "0"],
        ["audit", copy],
        ["audit", ADDRESS],
        ["import", str(own), "--collection", "own", "--architecture-name", "my-net", "--facts", "facts.json", "--hash"],
        ["show", "own", "--source", str(own), "--format", "json"],
        ["publish", copy, "--repo", "alice/second", "--sample", "0"],
        ["publish", copy, "--repo", "alice/second", "--dry-run"],
    ]
    results = run_commands(python, prelude, commands, tmp_path)
    for result in results:
        assert result["code"] == DONE, result
    by_words = {" ".join(result["words"][:2]): result for result in results}
    verified = json.loads(by_words[f"verify {copy}"]["out"])
    assert [(row["read"], row["hashed"], row["measured"]) for row in verified["checked"]] == [(6, 6, 0)]
    assert len(json.loads(by_words["show own"]["out"])["rows"]) == 2
    assert "cards/tiny.png" not in hub.files("alice/second")
    uploaded = zoo.load("tiny", source="hf://datasets/alice/second").stack()
    assert all(torch.equal(uploaded[name], t) for name, t in zoo.load("tiny", source=published.root).stack().items())
    said = results[-2]["err"]
    assert "not checked: the test accuracies, since the sample is 0" in said
    assert "the card has no pictures, since matplotlib is not installed" in said

    examples = {name: shlex.split(command.examples[0])[1:] for name, command in COMMANDS.items()}
    refused = {name: words for name, words in examples.items() if name not in CORE_COMMANDS}
    refused |= {"verify": ["verify", copy], "publish": ["publish", copy, "--repo", "alice/third"]}
    for result in run_commands(python, prelude, list(refused.values()), tmp_path):
        name = result["words"][0]
        user = {"verify": "a check of accuracies", "publish": "publish"}.get(name, "this command")
        text = f"zoo-cli: error: {user} needs torch, which is not installed. {INSTALL}{OTHERWISE.get(name, '')}."
        progress = ["Importing torch …"] if name == "demo" else []
        assert (result["code"], result["out"], result["err"].splitlines()) == (USAGE, "", [*progress, text])
