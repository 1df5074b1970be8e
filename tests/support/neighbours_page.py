"""What the tests of each neighbour share: the neighbour's section of docs/neighbours.md is run."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "neighbours.md").read_text(encoding="utf-8")
RUNS = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)

# What neighbours' packages say to their own authors.
THEIR_OWN = (
    "ignore:`torch.jit.script` is deprecated:FutureWarning",  # asdl, linear_operator
    "ignore:The Tensor default of the field:FutureWarning",  # posteriors
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated",  # lightning
    "ignore:The '.*dataloader' does not have many workers",  # lightning's advice
    "ignore:`training_step`:UserWarning",
)


def section(title: str) -> str:
    """The text of a section, by its title."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def run_section(title: str) -> dict[str, Any]:
    """Run a section's code in the working folder; return the names it leaves."""
    scope: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL)
    assert len(blocks) > 1
    for at, code in enumerate(blocks):
        name = f"neighbours.md, {title}, block {at}"
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, scope, name, "neighbours.md", 0)
            found: list[str] = []
            RUNS.run(test, out=found.append, clear_globs=False)
            assert not found, "".join(found)
            scope |= test.globs
        else:
            exec(compile(code, name, "exec"), scope)
    return scope
