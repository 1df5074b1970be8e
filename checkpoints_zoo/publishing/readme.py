"""Which README a repo gets: the one that `cards` writes, or the folder's own if it was written by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.predictions.sets import TABLE
from checkpoints_zoo.publishing.cards import README, is_generated
from checkpoints_zoo.publishing.folder import File, Folder
from checkpoints_zoo.publishing.remote import Branch, Remote
from checkpoints_zoo.sources.hub import Repo, fetch

_FRONT = re.compile(r"\A---\r?\n(.*?\r?\n)?---\r?\n?(.*)", re.DOTALL)


def others(folder: Folder, branch: Branch) -> list[str]:
    """List the collections that the repo has and the folder lacks; return their names."""
    names = {Path(p).stem for p in branch.tree if p.startswith("manifests/") and p.endswith(".parquet")}
    return sorted(names - {held.name for held in folder.held})


def predictions(folder: Folder, branch: Branch) -> dict[str, set[str]]:
    """List the sets of stored predictions that the repo has and will have; return collection -> their names."""
    named = [p.split("/") for p in (*branch.tree, *folder.predictions) if p.startswith("predictions/")]
    sets: dict[str, set[str]] = {}
    for parts in named:
        if len(parts) == 4 and parts[3] == TABLE:
            sets.setdefault(parts[1], set()).add(parts[2])
    return sets


def by_hand(folder: Folder, remote: Remote, branch: Branch) -> list[File]:
    """Find the folder's README if it was written by hand; return it and its pictures, [] where one is to be made.

    Raises:
        UsageError: it does not name every manifest; or the repo has one written by hand, and the folder none.
    """
    path = folder.source.root / README
    if path.is_file():
        text = folder.source.file(README).read_text(encoding="utf-8", errors="replace")
        if not is_generated(text):
            names = [*(held.name for held in folder.held), *others(folder, branch)]
            _check_configs(text, sorted(names), path)
            pictures = [p for p in folder.pictures if p in text]
            return [File.of(p, folder.source.file(p)) for p in (README, *pictures)]
    if README in branch.tree:
        text = fetch(Repo(remote.id, branch.head), README).read_text(encoding="utf-8", errors="replace")
        match = _FRONT.match(text)
        if not is_generated(text) and (match[2] if match else text).strip():
            raise UsageError(
                f"{README} of {remote.label}",
                expected="none, or one that an earlier publication wrote",
                found="one written by hand",
                do=f"To keep it, put it into {folder.source.root} (`hf download {remote.id} {README} --repo-type "
                f"dataset --local-dir {folder.source.root}`); to have one made, delete it in the repo",
            )
    return []


def _check_configs(text: str, names: Sequence[str], path: Path) -> None:
    """Check that the YAML of a README names every manifest, for the Hub's viewer and `datasets.load_dataset`."""
    known, problem = set(), ""
    try:
        match = _FRONT.match(text)
        configs = (yaml.safe_load((match[1] if match else "") or "") or {}).get("configs") or []
        known = {(c["config_name"], file) for c in configs for file in _files(c.get("data_files"))}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        problem = f": {' '.join(str(error).split())[:200]}"
    lacking = [name for name in names if (name, f"manifests/{name}.parquet") not in known]
    if lacking:
        lines = "; ".join(f"- config_name: {n}, data_files: manifests/{n}.parquet" for n in lacking)
        raise UsageError(
            f"{path}",
            expected="YAML at its top whose `configs` name every manifest, since it was written by hand",
            found=f"none for {', '.join(lacking)}{problem}",
            do=f"Add under `configs:` {lines}; or remove the file, and one is made",
            path=path,
        )


def _files(value: Any) -> list[str]:
    """Return the paths in a config's data_files: a path, several, or several with their splits."""
    if isinstance(value, dict):
        value = value.get("path")
    if isinstance(value, list):
        return [file for one in value for file in _files(one)]
    return [value] if isinstance(value, str) else []
