"""The catalog of collections, and the description that a source has of each collection.

The catalog (`manifests/*.json` of the package) lists collections with their sources and a summary. If a source has a
description of a collection (`manifests/NAME.json`), the description replaces the catalog's summary. Anyone may have
written a catalog or description, so every value is checked, and no value is executed.

This is one file, because a description extends a listing, and both pass the same checks.
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
from checkpoints_zoo.formats import limits
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.text import did_you_mean, escape_latex, one_line

FORMAT_VERSION = 1
CATALOG_FOLDER = Path(__file__).parents[1] / "manifests"
_COLLECTION_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
MAX_INPUT_VALUES = 2**26
LONGEST_CITATION = 2**20  # characters: a citation may name thousands of members one by one
EPOCH_UNITS = ("epoch", "step")
_OPTIONAL_FIELDS = {"base": "", "epoch_unit": EPOCH_UNITS[0]}  # of descriptions: name -> value if it is left out
_BASE_ADDRESS = re.compile(r"hf://datasets/[\w.-]{1,96}/[\w.-]{1,96}@[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True)
class Archives:
    """Facts on a collection that consists of archives without a manifest: the archives' folder, and facts that archives
    lack.

    Args:
        folder: path of the archives' folder in the source.
        classes, preprocessing, citation: facts on the collection, as in `Description`.
    """

    folder: str
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    citation: str

    @classmethod
    def from_json(cls, values: Any, path: Path) -> Archives:
        """Read and check the part of the catalog's JSON that describes archives; return it as an object.

        Raises:
            FormatError: a key of the JSON object is missing, or its value has another type.
        """
        required_types = {"folder": str, "classes": list, "preprocessing": dict, "citation": str}
        fields_by_name = check_keys({"format_version": FORMAT_VERSION, **values}, required_types, path)
        return cls(**{**fields_by_name, "classes": tuple(fields_by_name["classes"])})


@dataclass(frozen=True)
class PickledDraws:
    """Facts on a collection of a sampler's draws that lie in pickles of haiku's parameters: each file has one draw of
    each chain.

    Args:
        files: path of a file in the source, in which {} stands for the file's number, counted from 0.
        count: number of files.
        chains: number of chains, which are the draws of a file.
        classes, preprocessing, citation: facts on the collection, as in `Description`.
    """

    files: str
    count: int
    chains: int
    classes: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    citation: str

    @property
    def paths(self) -> list[str]:
        """Paths of all files, in order."""
        return [self.files.replace("{}", str(number)) for number in range(self.count)]

    @classmethod
    def from_json(cls, values: Any, path: Path) -> PickledDraws:
        """Read and check the part of the catalog's JSON that describes draws; return it as an object.

        Raises:
            FormatError: a key of the JSON object is missing, or its value has another type.
        """
        required_types = {
            "files": str, "count": int, "chains": int, "classes": list, "preprocessing": dict, "citation": str,
        }  # fmt: skip
        fields_by_name = check_keys({"format_version": FORMAT_VERSION, **values}, required_types, path)
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
    draws: PickledDraws | None = None

    @property
    def stated(self) -> Archives | PickledDraws | None:
        """What the catalog states on a collection without a manifest, whose source states no classes and the like."""
        return self.archives or self.draws


@dataclass(frozen=True)
class Description:
    """A source's description of a collection: the JSON file beside the manifest.

    Args:
        name: name of the collection.
        title: one line of text that says what the collection is.
        architecture: name of the network: a key of `ARCHITECTURES`, or any other name for a user's own network.
        arguments: arguments of the function that builds the network, as JSON values.
        dataset: name of the image set on which the members were trained and tested.
        classes: class names in the order of the logits.
        preprocessing: JSON values from which `images.Preprocess.from_json` makes the preprocessing.
        layouts: key of a layout, which rows of the manifest name -> the layout.
        licence: SPDX name of the licence.
        citation: text by which the authors of the collection want to be cited.
        base: address of a Hub repo, at a commit, that holds the members' bytes; "" if the source itself holds the
            bytes.
        epoch_unit: unit that the column `epoch` counts, "epoch" or "step".
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
    epoch_unit: str = EPOCH_UNITS[0]

    def bibtex(self, citation: str) -> str:
        """Return a BibTeX entry for members of the collection, with the citation by which `zoo.load` finds them.

        Args:
            citation: citation of the selected members.
        """
        fields_of_entry = {
            "title": self.title or self.name,
            "howpublished": f"Trained networks, loaded by checkpoints_zoo from {citation}",
            "note": self.citation,
        }
        # BibTeX counts braces, escaped or not.
        lines = [
            f"  {name} = {{{escape_latex(re.sub('[{}]', '', one_line(text, LONGEST_CITATION)))}}},"
            for name, text in fields_of_entry.items()
            if text
        ]
        return "\n".join([f"@misc{{{self.name},", *lines, "}"])

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values, which include the version of the format."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["classes"] = list(self.classes)
        values["layouts"] = {key: layout.to_json() for key, layout in self.layouts.items()}
        for name, default in _OPTIONAL_FIELDS.items():
            if values[name] == default:
                del values[name]
        return {"format_version": FORMAT_VERSION, **values}

    @classmethod
    def from_json(cls, values: Any, path: Path) -> Description:
        """Read and check the JSON of a source; return the description.

        Raises:
            FormatError: the format is newer, a key is missing, or its value has another type.
        """
        type_of_field = {"arguments": dict, "classes": list, "preprocessing": dict, "layouts": dict}
        required_names = [
            f.name
            for f in fields(cls)
            if f.name not in _OPTIONAL_FIELDS or (isinstance(values, dict) and f.name in values)
        ]
        checked_values = check_keys(values, {name: type_of_field.get(name, str) for name in required_names}, path)
        if "base" in checked_values and not _BASE_ADDRESS.fullmatch(checked_values["base"]):
            expected = "'base' to be hf://datasets/ORG/NAME@COMMIT, with all 40 digits of the commit"
            raise FormatError(
                f"description {path}", expected=expected, found=repr(checked_values["base"][:120]), path=path
            )
        if checked_values.get("epoch_unit", EPOCH_UNITS[0]) not in EPOCH_UNITS:
            expected, found = f"'epoch_unit' to be {' or '.join(EPOCH_UNITS)}", repr(checked_values["epoch_unit"][:80])
            raise FormatError(f"description {path}", expected=expected, found=found, path=path)
        if not all(type(c) is str for c in checked_values["classes"]) or not checked_values["layouts"]:
            raise FormatError(
                f"description {path}", expected="class names, and one layout or more", found="other values", path=path
            )
        _check_input_size(checked_values["preprocessing"], path)
        checked_values["classes"] = tuple(checked_values["classes"])
        layouts = {}
        for key, layout in checked_values["layouts"].items():
            try:
                layouts[key] = Layout.from_json(layout)
            except FormatError as error:
                tensor = "" if error.thing == "layout" else f"{error.thing} of "
                error.thing, error.path = f"{tensor}layout {key!r} in description {path}", str(path)
                raise
        return cls(**{**checked_values, "layouts": layouts})


def _check_input_size(preprocessing: Mapping[str, Any], description_path: Path) -> None:
    """Check that one input of the members is not absurdly large, since networks are run on such an input.

    Raises:
        FormatError: one input has more than MAX_INPUT_VALUES values.
    """
    size, channels = preprocessing.get("size"), preprocessing.get("channels")
    input_sizes = [n for n in (channels, *(size if isinstance(size, list) else ())) if type(n) is int]
    if any(n > MAX_INPUT_VALUES for n in input_sizes) or math.prod(input_sizes) > MAX_INPUT_VALUES:
        expected = f"inputs of at most {MAX_INPUT_VALUES:,} values (channels · height · width)"
        found = reprlib.repr({"size": size, "channels": channels})
        raise FormatError(
            f"preprocessing of description {description_path}", expected=expected, found=found, path=description_path
        )


def check_keys(json_values: Any, required_types: Mapping[str, type], path: Path) -> dict[str, Any]:
    """Check the format version, the keys and the types of a JSON object; return the object without unknown keys.

    Raises:
        FormatError: the format is newer, a key is missing, or its value has another type.
    """
    version = json_values.get("format_version") if isinstance(json_values, dict) else None
    if type(version) is not int:
        raise FormatError(
            f"description {path}",
            expected="a JSON object with a format_version",
            found=reprlib.repr(json_values),
            path=path,
        )
    if version > FORMAT_VERSION:
        raise FormatError(
            f"description {path}",
            expected=f"format version {FORMAT_VERSION} or older",
            found=f"version {version}",
            do="Install a newer checkpoints-zoo",
            path=path,
        )
    for key, required_type in required_types.items():
        if key not in json_values or type(json_values[key]) is not required_type:
            value_text = reprlib.repr(json_values[key]) if key in json_values else "no such key"
            raise FormatError(
                f"description {path}", expected=f"{key!r} to be a {required_type.__name__}", found=value_text, path=path
            )
    return {key: json_values[key] for key in required_types}


def read_json(path: Path) -> Any:
    """Read a JSON file; return its values.

    Raises:
        FormatError: the file is not JSON, or is larger than a description may be.
    """
    limits.check_file(path)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"description {path}", expected="JSON", found=str(error), path=path) from error
    limits.check_json(values, path)
    return values


def write_json(values: Any, path: Path) -> None:
    """Write JSON values by rename: the same values give the same bytes."""
    with replace_file(path, sync=True) as file:
        file.write(json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def check_name(collection: object) -> str:
    """Check that a collection's name can be a file's name; return the name.

    Raises:
        UsageError: the name can't be the name of a file.
    """
    if not isinstance(collection, str) or not _COLLECTION_NAME.fullmatch(collection):
        raise UsageError(
            f"collection name {collection!r}",
            expected="lower-case letters, digits, '.', '_' and '-', at most 96 of them",
        )
    return collection


def collections() -> dict[str, Listing]:
    """Read the catalog; return its listings by name.

    >>> sorted(collections())[0]
    'convnet-digits'
    """
    paths = sorted(CATALOG_FOLDER.glob("*.json"), key=lambda path: path.stem)
    return {listing.name: listing for path in paths if (listing := _read_listing(path)) is not None}


def listing_of(collection: object) -> Listing | None:
    """Return a collection's listing in the catalog; None if the catalog has no such name. Only the file of that name is
    read."""
    if not isinstance(collection, str) or not _COLLECTION_NAME.fullmatch(collection):
        return None
    return _read_listing(CATALOG_FOLDER / f"{collection}.json")


def _read_listing(path: Path) -> Listing | None:
    """Read a listing, unless this version of its file was read before; return None if there is no such file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return _read_listing_once(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _read_listing_once(path: Path, mtime_ns: int, nbytes: int) -> Listing:
    required_types = {
        f.name: {"int": int, "str": str}.get(str(f.type), list)
        for f in fields(Listing)
        if f.name not in ("archives", "draws")
    }
    values = read_json(path)
    checked_values = check_keys(values, required_types, path)
    archives = Archives.from_json(values["archives"], path) if "archives" in values else None
    draws = PickledDraws.from_json(values["draws"], path) if "draws" in values else None
    sources = tuple(checked_values["sources"])
    return Listing(**{**checked_values, "sources": sources, "archives": archives, "draws": draws})


def archived_listings() -> list[tuple[Listing, Archives]]:
    """Return the catalog's listings of collections that consist of archives, each with the facts on its archives."""
    return [(listing, listing.archives) for listing in collections().values() if listing.archives is not None]


def find_listing(collection: str) -> Listing:
    """Find a collection in the catalog; return its listing.

    Raises:
        CollectionNotFound: the catalog has no collection of this name; the error suggests the most similar names.
    """
    listing = listing_of(collection)
    if listing is None:
        raise collection_not_found(collection, collections(), "the catalog")
    return listing


def collection_not_found(
    collection: str, known_names: Mapping[str, Any] | list[str], place_text: str
) -> CollectionNotFound:
    """Return the error for an unknown collection; the error suggests the most similar names."""
    sorted_names = sorted(known_names)
    return CollectionNotFound(
        f"collection {collection!r}",
        expected=f"a name in {place_text} ({', '.join(sorted_names) or 'which has none'})",
        found="no such name",
        do=did_you_mean(str(collection), sorted_names, largest_count=3) or "`zoo-cli list` shows the catalog",
        collection=str(collection),
    )
