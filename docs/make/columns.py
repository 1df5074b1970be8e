"""The column dictionary, `manifests/README.md`: names, types and meanings of the manifest's columns."""

from __future__ import annotations

from checkpoints_zoo.formats.columns import COLUMNS, NEWEST_SCHEMA_VERSION, PARTS, SCHEMA_VERSION


def page() -> str:
    """Return the text of `manifests/README.md`."""
    lines = [
        "# The manifest's columns",
        "",
        f"One row a snapshot, schema version {SCHEMA_VERSION}. Made by `python -m docs.make`; a test compares. A",
        "column that is not required is null where the source does not know it. `where` conditions use these names.",
        "",
        "| column | type | required | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{c.name}` | {c.type} | {'yes' if c.required else ''} | {c.meaning} |" for c in COLUMNS]
    lines += [
        "",
        f"Schema version {NEWEST_SCHEMA_VERSION}, written only where members lie in other repos, has one column more:",
        f"`{PARTS.name}`, {PARTS.meaning.removeprefix('in schema version 2: ')}. Its type is",
        f"`{PARTS.type}`.",
    ]
    return "\n".join(lines) + "\n"
