"""The core, installed without torch: what it can do alone, and the one sentence about everything else."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from checkpoints_zoo.errors import EXTRA_OF_PACKAGE
from tests.hub import Hub
from tests.support.core_commands import HIDE_PACKAGES, INSTALL, check_core

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.slow
def test_the_core_does_its_part_where_the_extras_are_hidden(hub: Hub, tmp_path: Path) -> None:
    check_core(sys.executable, HIDE_PACKAGES, hub, tmp_path)


CALL_PUBLIC_NAMES = """
import json
import checkpoints_zoo as zoo

texts = {}
for name in zoo.__all__:
    try:
        getattr(zoo, name)
    except zoo.ZooError as error:
        texts[name] = str(error)
try:
    zoo.images.of("digits")
except ModuleNotFoundError as error:
    texts["images.of"] = str(error)
print(json.dumps(texts))
"""


@pytest.mark.slow
def test_a_public_name_says_what_it_needs_where_the_extras_are_hidden() -> None:
    command = [sys.executable, "-c", HIDE_PACKAGES + CALL_PUBLIC_NAMES, json.dumps(list(EXTRA_OF_PACKAGE))]
    texts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"load", "evaluate", "verify", "symmetries", "images.of"} <= texts.keys()
    assert not {"publish", "ZooError", "images"} & texts.keys()
    for name, text in texts.items():
        assert text == f"zoo.{name} needs torch, which is not installed. {INSTALL}."


def test_the_table_of_extras_names_their_packages() -> None:
    """Each package of an extra is in the table, and no package of the core is."""
    names_by_distribution: dict[str, set[str]] = {}
    for name, distributions in metadata.packages_distributions().items():
        for distribution in distributions:
            names_by_distribution.setdefault(canonicalize_name(distribution), set()).add(name)
    for extra, lines in PROJECT["optional-dependencies"].items():
        for requirement in map(Requirement, lines):
            if requirement.name != "checkpoints-zoo":
                imported = names_by_distribution[canonicalize_name(requirement.name)] & EXTRA_OF_PACKAGE.keys()
                assert {EXTRA_OF_PACKAGE[name] for name in imported} == {extra}, requirement
    core = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert not {name for distribution in core for name in names_by_distribution[distribution]} & EXTRA_OF_PACKAGE.keys()
