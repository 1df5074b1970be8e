"""Hostile strings in each place of a source that holds text, read by each command: `python -m tests.hostile_strings`.

A place is a manifest column, a leaf or a key of the JSON files, a tensor's name, a file's name, a column of an image
table. A case puts one string into one place and runs one command. It passes if the command ends with an exit code of
ours, writes, runs and connects to nothing outside its folder, and prints and writes no escape of a terminal and no
markup of the string's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from click.testing import CliRunner
from markdown_it import MarkdownIt

import checkpoints_zoo as zoo
from checkpoints_zoo.cli.main import BUG, main
from checkpoints_zoo.formats.manifest import read_manifest
from checkpoints_zoo.publishing import card_pictures, cards
from tests.fuzz import (
    ARCHIVE,
    ASKS_THE_NETWORK,
    RUNS,
    SEEDS,
    Report,
    Watch,
    case_folders,
    hostile,
    make_archive,
    make_checkpoints,
    png,
    run_case,
)  # fmt: skip

NAME = "convnet-digits"
DRAWS = ("plot", "report", "compact")
# An escape of a terminal, a turned line and a script in one: a share of all cases has it 300 times as often as others.
WORST = "\x1b[2J\u202e<script>alert(1)</script>"
OUR_SCRIPT = '"use strict";'  # the beginning of the report page's own script
UNSOUND = {("archive", "audit"), ("images", "audit"), ("checkpoints", "audit")}  # small files that no hash is known of
Put = Callable[[str], None]
Use = Callable[[], tuple[int, str]]


@dataclass(frozen=True)
class Addresses:
    """Where the commands find each kind of input: paths, or addresses on the Hub."""

    source: str | Path
    archives: str | Path
    images: str | Path
    images_folder: str | Path
    checkpoints: str | Path


# ---- places: each is a function that puts a string there ----
class Inputs:
    """A folder with one input of each kind, and the places in them that hold text.

    Attributes:
        folder: that holds the inputs.
        places: name of a place -> (the kind of input, a function that puts a string there).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "source"
        quiet("download", NAME, "--members", "0-3", "--dest", self.source)
        quiet("predict", NAME, "--source", self.source, "--data", "digits", "-o", self.source)
        (self.source / "README.md").write_text(f"---\nlicense: mit\ntags: [{NAME}]\n---\n# A card\n")
        self.archive, self.table = make_archive(folder / "archives"), make_digit_table(folder / "images.parquet")
        self.checkpoints = make_checkpoints(folder)
        self.addresses = Addresses(self.source, folder / "archives", self.table, folder, self.checkpoints)
        self.saved = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.places: dict[str, tuple[str, Put]] = dict(self._places())

    def restore(self) -> None:
        """Write each file as it was, and drop all others."""
        for path in [*self.folder.rglob("*")]:
            if not path.is_dir() and path not in self.saved:
                path.unlink()
        for path, raw in self.saved.items():
            if not path.is_file() or path.read_bytes() != raw:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(raw)

    def _places(self) -> Iterator[tuple[str, tuple[str, Put]]]:
        stored = self.source / "predictions" / NAME / "digits-test"
        manifest = self.source / "manifests" / f"{NAME}.parquet"
        for label, path in (("manifest", manifest), ("predictions", stored / "manifest.parquet")):
            for place, put in table_places(path):
                yield f"{label}: {place}", ("source", put)
        for label, path in (("description", manifest.with_suffix(".json")), ("predictions", stored / "manifest.json")):
            for place, put in json_places(path):
                yield f"{label}: {place}", ("source", put)
        for label, folder in (("shard", self.source / "shards"), ("logits", stored)):
            (path,) = folder.rglob("*.safetensors")
            for place, put in header_places(path):
                yield f"{label}: {place}", ("source", put)
            yield f"{label}: file name", ("source", rename(path))
        for label, path in (("manifest", manifest), ("README", self.source / "README.md")):
            yield f"{label}: file name", ("source", rename(path))
        yield "README: head", ("source", card(self.source, "---\nlicense: {}\n---\n# A card\n" + NAME))
        yield "README: text", ("source", card(self.source, "---\nlicense: mit\n---\n{}\n" + NAME))
        for field in ("name", "linkname", "uname", "pax key", "pax value"):
            yield f"archive: {field}", ("archive", tar_entry(self.archive, field))
        for place, put in table_places(self.table):
            yield f"images: {place}", ("images", put)
        for place, put in features_places(self.table):
            yield f"images: {place}", ("images", put)
        for place in ("key", "tensor", "value"):
            yield f"checkpoint: {place}", ("checkpoints", checkpoint(self.checkpoints / "0.pt", place))
        yield "checkpoint: file name", ("checkpoints", rename(self.checkpoints / "0.pt"))


def make_digit_table(path: Path) -> Path:
    """Write twenty random images of ten classes as `datasets` does."""
    rng = np.random.default_rng(0)
    labels = [str(digit) for digit in range(10)]
    features = {"image": {"_type": "Image"}, "label": {"names": labels, "_type": "ClassLabel"}}
    images = pa.array([{"bytes": png(rng), "path": "a.png"} for _ in range(20)])
    table = pa.table({"image": images, "label": pa.array([*range(10)] * 2, pa.int64())})
    _write(path, table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}))
    return path


def table_places(path: Path) -> Iterator[tuple[str, Put]]:
    """Yield each column of text of a Parquet file, a column's name, and the values of its metadata."""
    table = pq.read_table(path)
    for column in table.schema.names:
        if pa.types.is_string(table.schema.field(column).type):
            for rows in ("first row", "all rows"):
                yield f"{column}, {rows}", _column(path, table, column, rows == "all rows")
    yield "name of a column", lambda text: _write(path, table.append_column(legal(text), table.column(0)))
    yield "renamed column", lambda text: _write(path, table.rename_columns([legal(text), *table.schema.names[1:]]))
    for key in table.schema.metadata or {}:
        yield f"metadata {key.decode()}", _metadata(path, table, key)


def _column(path: Path, table: pa.Table, column: str, all_rows: bool) -> Put:
    def put(text: str) -> None:
        position = table.schema.get_field_index(column)
        values = table.column(column).to_pylist()
        values = [legal(text)] * len(values) if all_rows else [legal(text), *values[1:]]
        _write(path, table.set_column(position, table.schema.field(column), pa.array(values, pa.string())))

    return put


def _metadata(path: Path, table: pa.Table, key: bytes) -> Put:
    return lambda text: _write(path, table.replace_schema_metadata({**table.schema.metadata, key: legal(text)}))


def _write(path: Path, table: pa.Table) -> None:
    with path.open("wb") as file:
        pq.write_table(table, file)


def json_places(path: Path) -> Iterator[tuple[str, Put]]:
    """Yield each text, number and key of a JSON file; of a list, its first."""
    values = json.loads(path.read_text())

    def put_at(keys: tuple[Any, ...], as_key: bool) -> Put:
        def put(text: str) -> None:
            changed = json.loads(json.dumps(values))
            holder = changed
            for key in keys[:-1]:
                holder = holder[key]
            if as_key:
                holder[text] = holder.pop(keys[-1])
            else:
                holder[keys[-1]] = text
            path.write_text(json.dumps(changed))

        return put

    for keys in _leaves(values):
        yield ".".join(map(str, keys)), put_at(keys, as_key=False)
        if isinstance(keys[-1], str):
            yield f"key {'.'.join(map(str, keys))}", put_at(keys, as_key=True)


def _leaves(values: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = list(values) if isinstance(values, dict) else range(min(1, len(values))) if isinstance(values, list) else ()
    for key in keys:
        yield (*above, key)
        yield from _leaves(values[key], (*above, key))


def header_places(path: Path) -> Iterator[tuple[str, Put]]:
    """Yield the texts of a safetensors file's header."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    first = next(name for name in header if name != "__metadata__")

    def put(change: Callable[[dict[str, Any], str], None]) -> Put:
        def write(text: str) -> None:
            changed = json.loads(json.dumps(header))
            change(changed, text)
            encoded = json.dumps(changed).encode()
            encoded += b" " * (-(8 + len(encoded)) % 4096)
            path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])

        return write

    yield "tensor's name", put(lambda header, text: header.update({text: header.pop(first)}))
    yield "dtype", put(lambda header, text: header[first].update(dtype=text))
    yield "metadata's value", put(lambda header, text: header.update(__metadata__={"format": text}))
    yield "metadata's key", put(lambda header, text: header.update(__metadata__={text: "pt"}))


def rename(path: Path) -> Put:
    """Return what gives a file a hostile name, where the file system takes one."""

    def put(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            path.rename(path.with_name(text.replace("/", "_") + path.suffix))

    return put


def card(source: Path, form: str) -> Put:
    """Return what writes a card with a hostile string in it."""

    def put(text: str) -> None:
        (source / "README.md").write_text(form.replace("{}", legal(text)))

    return put


def tar_entry(path: Path, field: str) -> Put:
    """Return what adds an entry with a hostile name, link, owner or PAX record to an archive."""
    raw = path.read_bytes()

    def put(text: str) -> None:
        text = legal(text).replace("\0", "")
        entry = tarfile.TarInfo("x/version_9/model.safetensors")
        if field == "linkname":
            entry.type = tarfile.SYMTYPE
        if field == "pax key":
            entry.pax_headers = {text.replace("=", "") or "x": "1"}
        elif field == "pax value":
            entry.pax_headers = {"path": text, "comment": text}
        else:
            setattr(entry, field, text)
        entry.size = 0
        with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as new, tarfile.open(fileobj=io.BytesIO(raw)) as old:
            for each in old:
                new.addfile(each, old.extractfile(each))
            new.addfile(entry)

    return put


def features_places(path: Path) -> Iterator[tuple[str, Put]]:
    """Yield the texts and keys of the JSON in which `datasets` says what the columns of images are."""
    table = pq.read_table(path)
    note = path.with_suffix(".json")
    note.write_bytes(table.schema.metadata[b"huggingface"])
    for place, change in json_places(note):

        def put(text: str, change: Put = change) -> None:
            change(text)
            _write(path, table.replace_schema_metadata({"huggingface": note.read_bytes()}))

        yield f"features {place}", put


def checkpoint(path: Path, place: str) -> Put:
    """Return what puts a string into a checkpoint: a key beside the weights, a tensor's name, a value."""
    values = torch.load(path, weights_only=True)

    def put(text: str) -> None:
        changed = {**values, "state_dict": dict(values["state_dict"])}
        if place == "key":
            changed[text] = 1
        elif place == "tensor":
            changed["state_dict"][text] = changed["state_dict"].pop("fc2.bias")
        else:
            changed["lr"] = text
        torch.save(changed, path)

    return put


def legal(text: str) -> str:
    """Return a text without lone surrogates, which UTF-8 does not hold."""
    return text.encode(errors="replace").decode()


# ---- commands ----
def quiet(*arguments: str | Path) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it printed."""
    result = CliRunner().invoke(main, [str(x) for x in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code != BUG, result.output
    return result.exit_code, result.output


def write_card(source: Path, out: Path) -> tuple[int, str]:
    """Write the card that `zoo-cli publish` uploads, with its picture where the column that it shows is changed."""
    members = zoo.load(NAME, source=source)
    rows = read_manifest(source / "manifests" / f"{NAME}.parquet")
    is_changed = {*rows.column("eval_data").to_pylist()} != {*zoo.load(NAME).rows.column("eval_data").to_pylist()}
    with mock.patch.object(card_pictures, "can_draw", return_value=is_changed):
        files = cards.card_files({NAME: (members.description, rows)}, "org/name")
    for path, content in files.items():
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_bytes(content)
    return 0, ""


def commands(at: Addresses, out: Path) -> dict[str, dict[str, Use]]:
    """Return, for each kind of input, what reads it: the command -> a function that runs it."""
    of = (NAME, "--source", at.source)
    stored = (NAME, "--members", "0-3", "--stored", at.source, "--data", "digits-test", "--ood", "none")
    few = (NAME, "--members", "0-1", "--data", at.images)
    lines: dict[str, list[tuple[str | Path, ...]]] = {
        "source": [
            ("list", "--source", at.source), ("show", *of), ("show", *of, "--format", "json"),
            ("verify", at.source, "--sample", "1"), ("evaluate", *of, "--ood", "none"), ("evaluate", *stored),
            ("predict", *of, "--data", "digits", "-o", out), ("plot", *of, "--ood", "none", "-o", out / "plot.svg"),
            ("pairwise", *of, "--ood", "none"), ("pairwise", *stored), ("mmd", *of, "--permutations", "9"),
            ("symmetries", *of), ("align", *of), ("compact", *of), ("audit", at.source),
            ("report", *of, "--ood", "none", "-o", out / "page.html"), ("download", *of, "--dest", out / "copy"),
            ("train-merge", at.source, "--out", out / "merged"),
        ],
        "archive": [
            ("list", "--source", at.archives), ("show", ARCHIVE, "--source", at.archives),
            ("download", ARCHIVE, "--source", at.archives, "-n", "2", "--dest", out / "copy"),
            ("audit", at.archives),
        ],
        "images": [
            ("evaluate", *few, "--ood", "none"), ("predict", *few, "-o", out), ("audit", at.images_folder),
            ("plot", *few, "--ood", "none", "-o", out / "plot.svg"),
        ],
        "checkpoints": [
            ("import", at.checkpoints, "--collection", "own", "--architecture", "convnet", "--like", NAME,
             "--evaluate", "digits", "--reshard", out / "imported"),
            ("audit", at.checkpoints),
        ],
    }  # fmt: skip
    runs: dict[str, dict[str, Use]] = {
        kind: {" ".join(map(str, line)): partial(quiet, *line) for line in kinds} for kind, kinds in lines.items()
    }
    if isinstance(at.source, Path):
        runs["source"]["card"] = partial(write_card, at.source, out)
    return runs


def use(run: Use, out: Path) -> str:
    """Run a command, and look at what it printed and wrote; return its exit code in words."""
    code, printed = run()
    escapes = {c for c in printed if (ord(c) < 32 and c not in "\n\t") or c in "\x7f\u202e"}
    assert not escapes, f"printed {escapes!r}: {printed[-300:]!r}"
    for page in [*out.rglob("*.html"), *out.rglob("*.md"), *out.rglob("*.svg")]:
        text = page.read_text(encoding="utf-8")
        if page.suffix == ".md":
            body = (
                text.partition("\n---\n")[2] if text.startswith("---\n") else text
            )  # The head is data, and not shown.
            text = MarkdownIt("commonmark").enable("table").render(body)
        tags = Tags(text)
        assert tags.scripts <= [OUR_SCRIPT], f"{page.name} has the scripts {tags.scripts}"
        assert not tags.foreign, f"{page.name} has {tags.foreign}"
    return f"exit code {code}"


class Tags(HTMLParser):
    """The tags of a page that a string of `SEEDS` would make: scripts, and tags with another one's attributes.

    Args:
        page: HTML, as a browser would read it.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.foreign: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.is_script = tag == "script"
        if any(
            name.startswith("on") or value == "x" or (value or "").startswith("javascript:")
            for name, value in attributes
        ):
            self.foreign.append(tag)

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.is_script:
            self.scripts.append(data[: len(OUR_SCRIPT)])
            self.is_script = False


def all_texts(rng: random.Random, count: int) -> list[str]:
    """Return so many hostile strings, the worst first."""
    return list(dict.fromkeys(itertools.chain((WORST,), SEEDS, (hostile(rng) for _ in range(10 * count)))))[:count]


def chance(share: float, text: str, label: str) -> float:
    """Return how likely a case is run, of which a share is; commands that draw take seconds."""
    return share * (300 if text == WORST else 1) / (10 if label.startswith(DRAWS) else 1)


def is_shown(place: str, text: str, label: str) -> bool:
    """Say whether a case puts the worst string where a command shows it: these are run in each share."""
    is_value = place.startswith("description") and "key" not in place
    is_value |= place.startswith("manifest") and place.endswith("all rows")
    return is_value and text == WORST and label.startswith(("card", "show")) and not label.endswith("json")


def run_cases(report: Report, folder: Path, home: Path, strings: int, seed: int, share: float, only: list[str]) -> None:
    """Run a share of all cases, drawn at random: each place, each of `strings` strings, each command of its kind.

    Commands that draw take seconds: a tenth of their cases is run. All cases of `is_shown` are. `only` names the
    commands; [] runs all.
    """
    inputs, out = Inputs(folder / "inputs"), folder / "out"
    runs = {
        kind: {label: run for label, run in uses.items() if not only or label.split()[0] in only}
        for kind, uses in commands(inputs.addresses, out).items()
    }
    rng = random.Random(f"{seed}/strings")
    texts = all_texts(rng, strings)
    cases = [
        (place, kind, text, label)
        for place, (kind, _) in inputs.places.items()
        for text, label in itertools.product(texts, runs[kind])
        if rng.random() < chance(share, text, label) or is_shown(place, text, label)
    ]
    # A sound input is read without an error, and what a command needs is imported.
    for kind, label in dict.fromkeys((kind, label) for _, kind, _, label in cases):
        out.mkdir()
        code, printed = runs[kind][label]()
        assert code == 0 or (kind, label.split()[0]) in UNSOUND, f"{label}: exit code {code}: {printed}"
        inputs.restore()
        shutil.rmtree(out)
    watch = Watch(folder, home, events=RUNS | ASKS_THE_NETWORK)
    for place, kind, text, label in cases:
        out.mkdir()
        with contextlib.suppress(pa.ArrowException):  # Parquet takes most names and texts, but not all
            inputs.places[place][1](text)
        name, case_label = f"{place.split(':')[0]}, {label.split()[0]}", f"{place} {text[:60]!r}, {label}"
        run_case(report, watch, case_label, name, partial(use, runs[kind][label], out), len(text))
        inputs.restore()
        shutil.rmtree(out)


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that choose cases."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--strings", type=int, default=200, help="hostile strings")
    parser.add_argument("--share", type=float, default=1.0, help="share of all cases to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="commands; all by default")
    return parser


def run() -> int:
    """Run cases, and print what came of them; return 1 if one failed."""
    options = make_parser("tests.hostile_strings", __doc__).parse_args()
    report = Report()
    with case_folders() as (folder, home):
        os.environ["MPLCONFIGDIR"] = str(folder / "matplotlib")
        (folder / "inputs").mkdir()
        run_cases(report, folder, home, options.strings, options.seed, options.share, options.only)
    return report.print()


if __name__ == "__main__":
    sys.exit(run())
