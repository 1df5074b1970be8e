"""Every public name of the package leads to what it names, and is imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import checkpoints_zoo as zoo


@pytest.mark.parametrize("name", zoo.__all__)
def test_a_public_name_leads_to_what_it_names(name: str) -> None:
    assert getattr(zoo, name).__name__.rpartition(".")[2] == name


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'checkpoints_zoo' has no attribute 'nothing'"):
        zoo.nothing  # noqa: B018


def test_the_package_itself_imports_no_torch() -> None:
    code = "import sys, checkpoints_zoo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
