"""docs/model-repos.md, run as it stands on replicas of the repos that it names."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.hub.hub import Hub
from tests.support.commands import run
from tests.support.model_repos import checkpoint, neox, publish

PAGE = (Path(__file__).parents[2] / "docs" / "model-repos.md").read_text(encoding="utf-8")
TENSORS = neox(hidden=16, layers=1)


@pytest.mark.slow
def test_the_page(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oracle: Callable[[str], ModuleType]
) -> None:
    oracle("transformers")
    monkeypatch.chdir(tmp_path)
    for seed in range(1, 10):
        publish(hub, f"EleutherAI/pythia-70m-seed{seed}", [0, 1, 1000, 2000], TENSORS, seed)
    equal = {step: {"model.safetensors": checkpoint(TENSORS, 1)} for step in (1000, 2000)}
    publish(hub, "EleutherAI/pythia-2.8b", [0, 1000, 2000], TENSORS, files=equal)
    scope: dict[str, Any] = {"__name__": "page"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for language, code in re.findall(r"```(bash|python)\n(.*?)```", PAGE, flags=re.DOTALL):
        if language == "bash":
            for line in code.splitlines():
                done = run(*shlex.split(line)[1:])
                assert done.exit_code == ("zoo-cli audit" in line), f"{line}\n{done.output}"
        else:
            test = doctest.DocTestParser().get_doctest(code, scope, "model-repos.md", "model-repos.md", 0)
            found: list[str] = []
            runner.run(test, out=found.append, clear_globs=False)
            assert not found, "".join(found)
            scope |= test.globs
    assert scope["embedding"]["gpt_neox.embed_in.weight"].shape == (18, 256, 16)
    assert scope["steps"].description.title.startswith("PolyPythias 70m: nine seeds")
    assert len(hub.log.select(r"/api/models/.*/tree/")) == 9 * 4 + 3
