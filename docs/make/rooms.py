"""The rooms of the package in one picture: their order from pyproject.toml, their arrows from the imports."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "checkpoints_zoo"


def order(project: str) -> list[list[str]]:
    """Return the rooms from the ground up, by the contract of import-linter; rooms of one layer stand together.

    Args:
        project: the text of pyproject.toml.

    Raises:
        LookupError: it has no contract of the type `layers` for the package.
    """
    tools = tomllib.loads(project).get("tool", {})
    for contract in tools.get("importlinter", {}).get("contracts", []):
        if contract["type"] == "layers":
            layers = [[_room(name) for name in re.split(r"\s*[|:]\s*", layer)] for layer in contract["layers"]]
            if layers:
                return layers[::-1]
    raise LookupError("expected a contract of the type layers in [tool.importlinter] of pyproject.toml; found none")


def _room(name: str) -> str:
    """Strip a layer's name of the package and of the parentheses of what may be absent."""
    return name.strip("() ").removeprefix(f"{PACKAGE}.")


def says(package: Path, room: str) -> str:
    """Return the first sentence of a room's docstring."""
    folder = package / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z`])", text)[0]


def imports(package: Path, layers: Sequence[Sequence[str]]) -> dict[str, set[str]]:
    """Return which rooms of lower layers each room imports, wherever in a file it does so."""
    found: dict[str, set[str]] = {}
    for layer in layers:
        lower = set(found)
        for room in layer:
            folder, found[room] = package / room, set()
            for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
                found[room] |= set(_imported(ast.parse(file.read_text(encoding="utf-8")))) & lower
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith(f"{PACKAGE}."):
                yield name.split(".")[1]


def reduced(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Leave out each arrow that a longer way of arrows implies."""

    def reach(room: str) -> set[str]:
        return set().union(arrows[room], *(reach(other) for other in arrows[room]))

    return {room: others - set().union(*(reach(o) for o in others), set()) for room, others in arrows.items()}


def picture(layers: Sequence[Sequence[str]], arrows: Mapping[str, set[str]]) -> str:
    """Draw the rooms in Mermaid, the ground at the bottom; an arrow leads to what a room imports."""
    rooms = [room for layer in reversed(layers) for room in layer]
    lines = ["```mermaid", "flowchart TD", *(f"    {room}[{room}]" for room in rooms)]
    lines += [f"    {room} --> {other}" for room in rooms for other in rooms if other in arrows[room]]
    return "\n".join([*lines, "```"])


def rooms() -> str:
    """Return the picture, and a table that says what each room is."""
    layers = order((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / PACKAGE
    names = [room for layer in layers for room in layer]
    lines = ["| room | what it is |", "|---|---|"]
    lines += [f"| `{room}` | {says(package, room)} |" for room in names]
    return "\n".join([picture(layers, reduced(imports(package, layers))), "", *lines])
