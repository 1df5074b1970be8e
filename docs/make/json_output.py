"""What `--format json` prints, key by key: the types from a run of each command, the units from a table here."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints_zoo.cli.main import COMMANDS, main
from checkpoints_zoo.formats.text import finite_or_null
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.publishing.publisher import Plan, Published
from checkpoints_zoo.publishing.remote import MAIN, Branch
from checkpoints_zoo.sources.cache import CachedRepoSummary

ROOT = Path(__file__).resolve().parents[2]
TYPES = ROOT / "docs" / "json.json"
# Runs in one folder, in this order; the last run of a command is shown.
RUNS = """
list
show convnet-digits -n 2
evaluate convnet-digits -n 4 --data digits --ood photos --within nll=0.01 --temperature
predict convnet-digits -n 4 --data digits --out predicted
plot convnet-digits -n 2 --out figures.png
pairwise convnet-digits -n 4 --ood photos
compare-predictives convnet-digits -n 8
mmd convnet-digits -n 8 --permutations 9
symmetries convnet-digits -n 2
align convnet-digits -n 3 --to 0
compact convnet-digits -n 8
report convnet-digits -n 4 --out report.html
download convnet-digits --members 0-1 --dest four
recipes
train convnet-digits --set epochs=1 --set stack_width=2 --members 0-1 --out trained
train convnet-digits --set epochs=1 --set stack_width=2 --members 2-3 --out more
train-merge trained more --out all
verify all --retrain 1
audit four
import own --collection own --architecture-name mine
demo --out demo
"""
# Objects whose keys are names: path of the object -> what its keys are.
MAPS = {
    "compact": {
        "table": "column", "table.*": "figure", "held_out": "column", "held_out.*": "figure", "sigma": "Gaussian",
        "sigma.*": "quantile", "pruning.sigma": "Gaussian", "pruning.snr": "Gaussian",
    },
    "compact-table": {
        "table": "method", "table.*": "column", "table.*.*": "figure", "halves": "method", "halves.*": "column",
        "halves.*.*": "figure", "sources": "method", "sources.*.facts.fit.settings": "setting",
        "sources.*.facts.fit.facts[]": "diagnostic",
    },
    "compare": {
        "rows[].figures": "figure", "rows[].worth": "figure", "rows[].layers": "distance", "rows[].layers.*": "layer",
        "rows[].corollary_layers": "layer", "methods": "method", "methods.*.fit.settings": "setting",
        "methods.*.fit.facts[]": "diagnostic", "methods.*.search.settings": "setting",
        "methods.*.search.tried[].settings": "setting", "left_out": "method", "meaning": "figure",
    },
    "show": {"rows[]": "column"},
    "symmetries": {"tensors": "tensor"},
    "verify": {"checked[].impossible": "check"},
}  # fmt: skip
TYPE_NAMES = {
    "str": "text", "int": "whole number", "float": "number", "bool": "true or false", "NoneType": "null",
}  # fmt: skip
# Last part of a numeric key's path -> its unit.
UNITS = {
    **dict.fromkeys(("bytes", "cache_bytes", "dest_bytes", "read", "there_bytes"), "bytes"),
    **dict.fromkeys(
        (
            "after", "before", "blocks", "classes", "collections", "commits", "draws", "epochs", "excluded", "failed",
            "files", "groups", "hashed", "inputs", "looked_into", "measured", "members", "members_fetched",
            "members_here", "of", "ok", "ood_inputs", "pairs", "permutations", "predictions", "problems", "rows",
            "runs", "samples", "shards", "size", "splits", "stack_width", "statistics_images", "subsets", "sweeps",
            "trained", "transpositions", "units", "weights",
        ),
        "count",
    ),
    **dict.fromkeys(("high", "limit", "low", "value", "within"), "that of the figure"),
    **dict.fromkeys(("accuracy", "level", "p", "p_value", "ns_p_value", "share"), "share, 0 to 1"),
    **dict.fromkeys(("mass", "minimum"), "sum of squared weights"),
    "epoch": "epochs trained", "excess_percent": "%", "nll": "nats", "seconds": "s",
}  # fmt: skip

INTRODUCTION = """
Each command prints one JSON value on stdout; messages go to stderr. `[]` in a key's path stands for each item of a list, and angle
brackets for keys that are names. The types are those of a run; a list without a type was empty in it. A number that is not finite is
null, and a number without a unit is a pure number. Within 0.x, keys keep their meaning, and new ones may come.

A figure has its unit beside it (`unit`), and `low` and `high` are null where there is no interval.
[Evaluation](evaluation.md) defines the figures, [the dictionary of columns](../manifests/README.md) the rows of a manifest.
"""  # noqa: E501 (lines of the page)


def measure() -> None:
    """Run every command that needs no Hub, and write the types of what each prints into `docs/json.json`."""
    TYPES.write_text(json.dumps(types_of_commands(), indent=1) + "\n", encoding="utf-8")


def types_of_commands() -> dict[str, dict[str, list[str]]]:
    """Run the commands; return for each the keys that it prints, path -> names of types."""
    printed = {**_run_commands(), **_values_without_a_run()}
    types_of_command: dict[str, dict[str, list[str]]] = {}
    for name in COMMANDS:
        types: dict[str, set[str]] = {}
        for values in printed[name]:
            _add_types(finite_or_null(values), "", "", MAPS.get(name, {}), types)
        types_of_command[name] = {path: sorted(found) for path, found in types.items()}
    return types_of_command


def _run_commands() -> dict[str, list[Any]]:
    """Run the commands in a new folder; return command -> the values that its last run printed."""
    printed: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("own").mkdir()
        for seed in range(2):
            torch.manual_seed(seed)
            save_file(build_architecture("convnet").state_dict(), f"own/{seed}.safetensors")
        for line in RUNS.strip().splitlines():
            words = shlex.split(line)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
                main([*words, "--format", "json"])
            if not out.getvalue():
                raise RuntimeError(f"{line}: {err.getvalue()}")
            printed[words[0]] = [json.loads(out.getvalue())]
    return printed


def _values_without_a_run() -> dict[str, list[Any]]:
    """Return values like those of commands that need a Hub or hours, and of lists that are empty in a run."""
    plan = Plan("", Branch(MAIN, "", {}), False, False, (), (), (), (), (), None)
    published = Published("", "", "", 0, 0, 0, 0, None)
    return {
        "cache": [[asdict(CachedRepoSummary("", 0, 0))]],
        "compare": [_read("comparison.json")],
        "compact-table": [_read("compact-mlp.json")],
        "publish": [asdict(published), plan.to_json()],
    }


def _read(study: str) -> Any:
    return json.loads((ROOT / "docs" / "studies" / study).read_text(encoding="utf-8"))


def _add_types(values: Any, path: str, generic_path: str, maps: Mapping[str, str], types: dict[str, set[str]]) -> None:
    """Add the types of JSON values, path of a key -> names of types.

    Args:
        values: the values.
        path: path of the values, in which a name that is a key is its kind in angle brackets.
        generic_path: the same path with "*" for such a name.
        maps: as an entry of `MAPS`.
        types: gets the types.
    """
    if isinstance(values, dict):
        kind = maps.get(generic_path)
        for key, value in values.items():
            part, generic_part = (key, key) if kind is None else (f"<{kind}>", "*")
            _add_types(value, f"{path}.{part}".lstrip("."), f"{generic_path}.{generic_part}".lstrip("."), maps, types)
    elif isinstance(values, list):
        if not values:
            types.setdefault(f"{path}[]", set())
        for value in values:
            _add_types(value, f"{path}[]", f"{generic_path}[]", maps, types)
    else:
        types.setdefault(path, set()).add(TYPE_NAMES[type(values).__name__])


def page() -> str:
    """Return the text of `docs/json.md`."""
    types_of_command = json.loads(TYPES.read_text(encoding="utf-8"))
    lines = [
        "# What `--format json` prints",
        "",
        *INTRODUCTION.strip().split("\n"),
        "",
        "Made by `python -m docs.make` from docs/json.json, which `python -m docs.make --measure json` measures.",
    ]
    for name, types in types_of_command.items():
        lines += ["", f"## zoo-cli {name}", "", "| key | type | unit |", "|---|---|---|"]
        for path, found in types.items():
            lines.append(f"| `{path or '(the value itself)'}` | {' or '.join(found)} | {_unit(path, found)} |")
    return "\n".join(lines) + "\n"


def _unit(path: str, types: list[str]) -> str:
    last_part = path.rpartition(".")[2].rstrip("[]")
    return UNITS.get(last_part, "") if {"number", "whole number"} & set(types) else ""
