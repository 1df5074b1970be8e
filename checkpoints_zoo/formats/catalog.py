"""The catalog of collections, and the description that a source has of each collection.

The catalog (`manifests/*.json` of the package) lists collections with their sources and a summary. The description
(`manifests/NAME.json` of a source) decides for that source. Both are data from files: every value is checked, no
value is run.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import CollectionNotFound, FormatError, UsageError
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.text import did_you_mean

FORMAT_VERSION = 1
CATALOG = Path(__file__).parents[1] / "manifests"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
MAX_INPUT_VALUES = 2**26
_BASE = re.compile(r"hf://datasets/[\w.-]{1,96}/[\w.-]{1,96}@[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True)
class Archives:
    """A collection that lies in archives without a manifest: its folder, and the facts that archives don't hold.

    Args:
        folder: of the archives, in the source.
        classes, preprocessing, citation: as in `Description`.
    """

    folder: str
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    citation: str

    @classmethod
    def from_json(cls, values: Any, path: Path) -> Archives:
        """Read and check the catalog's JSON on archives; return the object.

        Raises:
            FormatError: a key that is missing or of another type.
        """
        kinds = {"folder": str, "classes": list, "preprocessing": dict, "citation": str}
        fields_by_name = check_keys({"format_version": FORMAT_VERSION, **values}, kinds, path)
        return cls(**{**fields_by_name, "classes": tuple(fields_by_name["classes"])})


@dataclass(frozen=True)
class Listing:
    """One collection of the catalog: its summary and its sources."""

    name: str
    title: str
    architecture: str
    dataset: str
    members: int
    bytes: int
    licence: str
    sources: tuple[str, ...]
    archives: Archives | None = None


@dataclass(frozen=True)
class Description:
    """A source's description of a collection: the JSON file beside the manifest.

    Args:
        name: of the collection.
        title: one line on what it is.
        architecture: a name in `ARCHITECTURES`, or any other for a net of the user's own.
        arguments: of the function that builds the network: JSON values only.
        dataset: name of the images it was trained and tested on.
        classes: names in the order of the logits.
        preprocessing: what `images.Preprocess.from_json` reads.
        layouts: key to layout.
        licence: SPDX name.
        citation: how to cite the collection, as text.
        base: a repo of the Hub at a commit, if the bytes lie there and not in this source; else "".
    """

    name: str
    title: str
    architecture: str
    arguments: Mapping[str, Any]
    dataset: str
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    layouts: Mapping[str, Layout]
    licence: str
    citation: str
    base: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values, with the format's version."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["classes"] = list(self.classes)
        values["layouts"] = {key: layout.to_json() for key, layout in self.layouts.items()}
        if not self.base:
            del values["base"]
        return {"format_version": FORMAT_VERSION, **values}

    @classmethod
    def from_json(cls, values: Any, path: Path) -> Description:
        """Read and check the JSON of a source; return the description.

        Raises:
            FormatError: a newer format, or a key that is missing or of another type.
        """
        kinds = {"arguments": dict, "classes": list, "preprocessing": dict, "layouts": dict}
        names = [f.name for f in fields(cls) if f.name != "base" or (isinstance(values, dict) and "base" in values)]
        checked = check_keys(values, {name: kinds.get(name, str) for name in names}, path)
        if "base" in checked and not _BASE.fullmatch(checked["base"]):
            expected = "'base' to be hf://datasets/ORG/NAME@COMMIT, with all 40 digits of the commit"
            raise FormatError(f"description {path}", expected=expected, found=repr(checked["base"][:120]), path=path)
        if not all(type(c) is str for c in checked["classes"]) or not checked["layouts"]:
            raise FormatError(
                f"description {path}", expected="class names and a layout or more", found="others", path=path
            )
        _check_input_size(checked["preprocessing"], path)
        checked["classes"] = tuple(checked["classes"])
        layouts = {}
        for key, layout in checked["layouts"].items():
            try:
                layouts[key] = Layout.from_json(layout)
            except FormatError as error:
                tensor = "" if error.thing == "layout" else f"{error.thing} of "
                error.thing, error.path = f"{tensor}layout {key!r} in description {path}", str(path)
                raise
        return cls(**{**checked, "layouts": layouts})


def _check_input_size(preprocessing: Mapping[str, Any], path: Path) -> None:
    """Check that one input of the members is not absurdly large, since networks are traced and tried on such an input.

    Raises:
        FormatError: more than MAX_INPUT_VALUES.
    """
    size, channels = preprocessing.get("size"), preprocessing.get("channels")
    counts = [n for n in (channels, *(size if isinstance(size, list) else ())) if type(n) is int]
    if any(n > MAX_INPUT_VALUES for n in counts) or math.prod(counts) > MAX_INPUT_VALUES:
        expected = f"inputs of at most {MAX_INPUT_VALUES:,} values (channels · height · width)"
        found = reprlib.repr({"size": size, "channels": channels})
        raise FormatError(f"preprocessing of description {path}", expected=expected, found=found, path=path)


def check_keys(values: Any, kinds: Mapping[str, type], path: Path) -> dict[str, Any]:
    """Check a JSON object's format version, keys and types; return the known keys, leaving others out.

    Raises:
        FormatError: a newer format, or a key that is missing or of another type.
    """
    version = values.get("format_version") if isinstance(values, dict) else None
    if type(version) is not int:
        raise FormatError(
            f"description {path}",
            expected="a JSON object with a format_version",
            found=reprlib.repr(values),
            path=path,
        )
    if version > FORMAT_VERSION:
        raise FormatError(
            f"description {path}",
            expected=f"format version {FORMAT_VERSION} or older",
            found=f"version {version}",
            do="It was written by a newer checkpoints-zoo: install a newer one",
            path=path,
        )
    for key, kind in kinds.items():
        if type(values.get(key)) is not kind:
            value_text = reprlib.repr(values[key]) if key in values else "no such key"
            raise FormatError(
                f"description {path}", expected=f"{key!r} to be a {kind.__name__}", found=value_text, path=path
            )
    return {key: values[key] for key in kinds}


def read_json(path: Path) -> Any:
    """Read a JSON file; return its values.

    Raises:
        FormatError: it is no JSON, or larger than any description may be.
    """
    manifest.check_file(path)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"description {path}", expected="JSON", found=str(error), path=path) from error
    manifest.check_json(values, path)
    return values


def write_json(values: Any, path: Path) -> None:
    """Write JSON values by rename: the same values give the same bytes."""
    with replace_file(path, sync=True) as file:
        file.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def check_name(name: object) -> str:
    """Check that a collection's name can be a file's name; return it.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"collection name {name!r}",
            expected="lower-case letters, digits, '.', '_' and '-', at most 96 of them",
        )
    return name


def collections() -> dict[str, Listing]:
    """Read the catalog; return its listings by name.

    >>> sorted(collections())[0]
    'convnet-digits'
    """
    stamps = ((path, path.stat()) for path in sorted(CATALOG.glob("*.json")))
    return dict(_read_catalog(tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stamps)))


@lru_cache(maxsize=4)
def _read_catalog(stamped: tuple[tuple[Path, int, int], ...]) -> dict[str, Listing]:
    """Read the catalog once for each state of its files."""
    kinds = {f.name: {"int": int, "str": str}.get(str(f.type), list) for f in fields(Listing) if f.name != "archives"}
    listings = {}
    for path, _, _ in stamped:
        values = read_json(path)
        checked = check_keys(values, kinds, path)
        archives = Archives.from_json(values["archives"], path) if "archives" in values else None
        listing = Listing(**{**checked, "sources": tuple(checked["sources"]), "archives": archives})
        listings[listing.name] = listing
    return listings


def archived_listings() -> list[tuple[Listing, Archives]]:
    """Return the listings of collections that lie in archives, each with the facts on its archives."""
    return [(each, each.archives) for each in collections().values() if each.archives is not None]


def find_listing(name: str) -> Listing:
    """Find a collection in the catalog; return its listing.

    Raises:
        CollectionNotFound: the catalog has no such name; the nearest names are suggested.
    """
    known = collections()
    if name not in known:
        raise not_found(name, known, "the catalog")
    return known[name]


def not_found(name: str, names_there: Mapping[str, Any] | list[str], place: str) -> CollectionNotFound:
    """Return the error for an unknown collection; it suggests the nearest names."""
    ordered = sorted(names_there)
    return CollectionNotFound(
        f"collection {name!r}",
        expected=f"a name in {place} ({', '.join(ordered) or 'which has none'})",
        found="no such name",
        do=did_you_mean(str(name), ordered, most=3) or "`zoo-cli list` shows the catalog",
        collection=str(name),
    )
