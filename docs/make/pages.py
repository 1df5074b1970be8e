"""All generated pages, and what is measured for them."""

from __future__ import annotations

from collections.abc import Callable

from docs.make import (
    alignment,
    architecture,
    cli,
    columns,
    compact,
    comparison,
    data,
    faults,
    formats,
    gpu,
    hmc,
    json_output,
    pictures,
    rooms,
    symmetries,
    transformers,
    tutorials,
)

PAGES: dict[str, Callable[[], str]] = {
    "docs/alignment.md": alignment.page,
    "docs/architecture.md": architecture.page,
    "docs/cli.md": cli.page,
    "docs/compact.md": compact.page,
    "docs/comparison.md": comparison.page,
    "docs/data.md": data.page,
    "docs/faults.md": faults.page,
    "docs/formats.md": formats.page,
    "docs/gpu.md": gpu.page,
    "docs/hmc.md": hmc.page,
    "docs/json.md": json_output.page,
    "docs/rooms.svg": rooms.draw_rooms,
    "docs/symmetries.md": symmetries.page,
    "docs/transformers.md": transformers.page,
    "manifests/README.md": columns.page,
}
MEASURED: dict[str, Callable[[], None]] = {
    "alignment": alignment.measure_collections,
    "compact": compact.measure_anew,
    "json": json_output.measure,
    "pictures": pictures.draw_pictures,
    "transformers": transformers.measure,
    "tutorials": tutorials.write_notebooks,
}
