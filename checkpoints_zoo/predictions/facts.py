"""What a set of stored predictions says of itself: the images, the classes, how the logits were computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from checkpoints_zoo.errors import FormatError
from checkpoints_zoo.formats.catalog import FORMAT_VERSION, check_keys
from checkpoints_zoo.formats.layout import Layout

LOGITS = "logits"  # the tensor of a member, and the key of its layout
DTYPES = ("F16", "F32")
SCHEMA_VERSION = 1

_TYPES = {
    "member": pa.int32(), "epoch": pa.int32(), "final": pa.bool_(), "status": pa.string(),
    "weights_sha256": pa.string(), "sha256": pa.string(), "path": pa.string(), "offset": pa.int64(),
    "nbytes": pa.int64(), "layout": pa.string(), "dtype": pa.string(),
}  # fmt: skip
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=False) for name, kind in _TYPES.items()],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""A row: whose logits they are, the content hash of the weights they were computed with, and of themselves; the
location is as in the manifest of weights."""


def layout_of(inputs: int, classes: int, dtype: str = "F16") -> Layout:
    """Return the layout of one member's logits, (input, class)."""
    return Layout.of([(LOGITS, dtype, (inputs, classes))])


@dataclass(frozen=True)
class Facts:
    """The JSON of a set, beside its rows.

    Args:
        collection, set: names: of the members' collection, and of this set.
        data, split, revision: of the images.
        fingerprint: of the images, as `ImageData` has it.
        inputs: how many.
        classes: names in the order of the logits.
        preprocessing: of the members' inputs.
        computed: dtype that the members computed in ("float32").
        view: what was done to the weights as they were read, "" for nothing.
        version: of the package that computed them.
        citation: of the members, "" where their weights lie in no public place.
        layouts: key to layout.
        labels: position in `classes` of each input, None where the images have no labels, or other classes.
    """

    collection: str
    set: str
    data: str
    split: str
    revision: str
    fingerprint: str
    inputs: int
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    computed: str
    view: str
    version: str
    citation: str
    layouts: Mapping[str, Layout]
    labels: tuple[int, ...] | None = field(repr=False)

    @property
    def name(self) -> str:
        """What to call the set in errors."""
        return f"{self.collection}/{self.set}"

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values, with the format's version."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["layouts"] = {key: layout.to_json() for key, layout in self.layouts.items()}
        values["labels"] = None if self.labels is None else list(self.labels)
        return {"format_version": FORMAT_VERSION, **values, "classes": list(self.classes)}

    @classmethod
    def from_json(cls, values: Any, path: Path) -> Facts:
        """Check the JSON of a set, trusting nothing; return the facts.

        Raises:
            FormatError: a newer format, a key that is missing or of another type, or counts that do not agree.
        """
        other = {"inputs": int, "classes": list, "preprocessing": dict, "layouts": dict}
        kinds = {f.name: other.get(f.name, str) for f in fields(cls)}
        labelled = isinstance(values, dict) and values.get("labels") is not None
        known = check_keys(values, kinds | {"labels": list if labelled else type(None)}, path)

        def wrong(expected: str, found: str) -> FormatError:
            return FormatError(f"description {path}", expected=expected, found=found, path=path)

        classes, inputs, labels = known["classes"], known["inputs"], known["labels"]
        if not classes or not all(type(c) is str for c in classes) or inputs < 1:
            raise wrong("names of classes, and one input or more", f"{len(classes)} classes, {inputs} inputs")
        layouts = {key: Layout.from_json(layout) for key, layout in known["layouts"].items()}
        for key, layout in layouts.items():
            shapes = [(t.name, t.shape) for t in layout.tensors]
            if shapes != [(LOGITS, (inputs, len(classes)))] or layout.dtype not in DTYPES or layout.lead:
                expected = f"{LOGITS!r} ({inputs}, {len(classes)}) of {' or '.join(DTYPES)} in layout {key!r}"
                raise wrong(expected, f"{layout.dtype} {shapes!r:.200}")
        if labels is not None:
            good = [type(x) is int and 0 <= x < len(classes) for x in labels]
            if len(labels) != inputs or not all(good):
                expected = f"{inputs} labels from 0 to {len(classes) - 1}"
                found = f"{labels[good.index(False)]!r:.80}" if False in good else f"{len(labels)}"
                raise wrong(expected, found)
        tuples = {"classes": tuple(classes), "labels": None if labels is None else tuple(labels)}
        return cls(**known | tuples | {"layouts": layouts})

    def rounding(self) -> float:
        """Return how far a stored logit may be from the computed one, as a share of it."""
        return math.ldexp(1.0, -11) if any(x.dtype == "F16" for x in self.layouts.values()) else 0.0
