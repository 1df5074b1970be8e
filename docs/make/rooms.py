"""The rooms of the package in one picture: their order from pyproject.toml, their arrows from the imports."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "checkpoints_zoo"
FLOOR_STEP, BOX_SIZE = (190, 64), (130, 34)  # pixels
# Grey arrows, and boxes with a colour of their own, can be read on light and on dark pages.
SVG_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<style>
.arrow {{ stroke: #7d8590; stroke-width: 1.5; fill: none }}
.room {{ fill: #0072b2 }}
.name {{ fill: #ffffff; font: 15px sans-serif; text-anchor: middle }}
</style>
<marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#7d8590"/></marker>"""


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
    return first_sentence(folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py"))


def first_sentence(file: Path) -> str:
    """Return the first sentence of a file's docstring, on one line, for a cell of a Markdown table."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z`])", text)[0].replace("|", "\\|")


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


def heights(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Return how many arrows the longest way from each room to the ground has."""

    def height(room: str) -> int:
        return 1 + max((height(other) for other in arrows[room]), default=-1)

    return {room: height(room) for room in arrows}


def picture(layers: Sequence[Sequence[str]], arrows: Mapping[str, set[str]]) -> str:
    """Draw the rooms as an SVG, the ground at the bottom; an arrow leads to what a room imports.

    Args:
        layers: the rooms from the ground up.
        arrows: the rooms that each room imports, without arrows that others imply.
    """
    height_of = heights(arrows)
    floors: list[list[str]] = [[] for _ in range(max(height_of.values()) + 1)]
    for room in (room for layer in layers for room in layer):
        floors[height_of[room]].append(room)
    width, height = max(map(len, floors)) * FLOOR_STEP[0], len(floors) * FLOOR_STEP[1]
    places = {
        room: (round(width * (at + 0.5) / len(floor)), height - round(FLOOR_STEP[1] * (floor_number + 0.5)))
        for floor_number, floor in enumerate(floors)
        for at, room in enumerate(floor)
    }
    box_width, box_height = BOX_SIZE
    lines = [SVG_HEAD.format(width=width, height=height)]
    for room in places:
        for other in sorted(arrows[room]):
            (x1, y1), (x2, y2) = places[room], places[other]
            y1, y2 = y1 + box_height // 2, y2 - box_height // 2 - 4
            lines.append(f'<path d="M{x1} {y1} L{x2} {y2}" class="arrow" marker-end="url(#head)"/>')
    for room, (x, y) in places.items():
        box = f'x="{x - box_width // 2}" y="{y - box_height // 2}" width="{box_width}" height="{box_height}"'
        lines.append(f'<rect {box} rx="5" class="room"/><text x="{x}" y="{y + 5}" class="name">{room}</text>')
    return "\n".join([*lines, "</svg>", ""])


def draw_rooms() -> str:
    """Return the picture of this package's rooms."""
    layers = order((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return picture(layers, reduced(imports(ROOT / PACKAGE, layers)))


def room_table() -> str:
    """Return a table that says what each room is."""
    layers = order((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = ["| room | what it is |", "|---|---|"]
    lines += [f"| `{room}` | {says(ROOT / PACKAGE, room)} |" for layer in layers for room in layer]
    return "\n".join(lines)
