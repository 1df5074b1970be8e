"""A docstring describes the arguments that its function has, under their names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "checkpoints_zoo"
ARGUMENTS = re.compile(
    r"^ *Args:\n(.*?)(?=^ *(?:Returns|Raises|Yields|Attributes|Examples?):|^\S|\Z|\n\n *>>>)", re.S | re.M
)


def described_arguments(docstring: str) -> Iterator[str]:
    """Yield the names that the section `Args:` of a docstring describes, without stars."""
    section = ARGUMENTS.search(docstring)
    lines = [line for line in section[1].splitlines() if line.strip()] if section else []
    indents = [len(line) - len(line.lstrip()) for line in lines]
    for line, indent in zip(lines, indents, strict=True):
        entry = re.match(r" *([\w*, ]+):", line)
        if entry and indent == min(indents):
            yield from (name.strip().lstrip("*") for name in entry[1].split(","))


def accepted_arguments(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """Return the names of a function's parameters; of a class, those of its fields and of its `__init__`."""
    if isinstance(node, ast.FunctionDef):
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return {x.arg for x in (*named, arguments.vararg, arguments.kwarg) if x is not None}
    fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
    inits = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    return fields.union(*map(accepted_arguments, inits))


def unknown_arguments(code: str) -> list[str]:
    """Return what docstrings describe and their function or class does not accept, as "function: name"."""
    nodes = [x for x in ast.walk(ast.parse(code)) if isinstance(x, ast.FunctionDef | ast.ClassDef)]
    return [
        f"{node.name}: {name}"
        for node in nodes
        if (accepted := accepted_arguments(node))  # a class may take its base's arguments
        for name in described_arguments(ast.get_docstring(node) or "")
        if name not in accepted
    ]


@pytest.mark.slow
def test_docstrings_describe_the_arguments_that_are_there() -> None:
    unknown = {str(path): unknown_arguments(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in unknown.items() if names} == {}


def test_a_wrong_name_is_seen() -> None:
    described = "Args:\n        weight: w.\n        by, more: b:\n            c: d."
    code = f'def scale(weights, by=2, *more):\n    """Scale.\n\n    {described}\n    """'
    assert unknown_arguments(code) == ["scale: weight"]
