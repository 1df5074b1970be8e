"""Pages on symmetries and learning on weights cannot go stale: their code runs, their tables are computed again."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from checkpoints_zoo.symmetry.canonical.mass import MinimalMass
from docs.make.symmetries import fill_page, minimal_masses
from tests.support.commands import run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("symmetries.md", "architectures.md", "learning-on-weights.md", "transformers.md")
RUNS = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```(python|bash)\n(.*?)```", page(name), flags=re.DOTALL)
    assert len(blocks) > 1
    for at, (language, code) in enumerate(blocks):
        if language == "bash":
            for line in code.splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["zoo-cli"] and "snapshots/" not in line:  # these need a minute of training first
                    result = run(*words[1:])
                    assert result.exit_code == 0, result.output
        elif ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, scope, f"{name}, block {at}", name, 0)
            found: list[str] = []
            RUNS.run(test, out=found.append, clear_globs=False)
            assert not found, "".join(found)
            scope |= test.globs
        else:
            exec(compile(code, f"{name}, block {at}", "exec"), scope)


@pytest.fixture(scope="module")
def masses() -> dict[str, MinimalMass]:
    return minimal_masses()


@pytest.mark.slow
def test_the_tables_are_up_to_date(masses: dict[str, MinimalMass]) -> None:
    """The last line along training too: `tests.support.snapshots` trains the collection's first sixteen members."""
    written = page("symmetries.md")
    assert fill_page(masses, written) == written, "run `python -m docs.make docs/symmetries.md`"


def test_an_excess_is_no_error_of_the_minimum(masses: dict[str, MinimalMass]) -> None:
    """The certificate is a share, the excess a percentage."""
    for found in masses.values():
        assert bool(found.converged.all())
        assert bool((found.excess / 100 > 10 * found.residual).all())


def test_links_lead_somewhere() -> None:
    for name in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page(name)):
            assert (DOCS / target).is_file(), target
