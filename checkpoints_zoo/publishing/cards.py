"""The card of a source: the README.md that the Hub shows, with a picture of each collection's test accuracies.

A card states the facts of the manifests and nothing else: jinja2 templates in `cards/`, one passage a fact. The same
manifests give the same card. Text from a file becomes text on the card, never markup: a template escapes every value
that is not `Markup`, and what is `Markup` is made by the functions of `formats.text`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.evaluation.drawing import BLUE, DPI, GREEN, GREY, RED, histogram_edges, png_bytes
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import FORMAT_VERSION, Description
from checkpoints_zoo.formats.columns import COLUMNS, SCHEMA_VERSION
from checkpoints_zoo.formats.layout import Layout
from checkpoints_zoo.formats.shard_files import tensor_prefix
from checkpoints_zoo.formats.text import (
    MOST_LISTED,
    counted,
    first_few,
    first_values,
    format_bytes,
    markdown_block,
    markdown_code,
    markdown_text,
    one_line,
    summarize_values,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = ("test_accuracy", "test_nll", "test_brier", "test_ece", "train_accuracy", "train_loss")
TRAINING = (
    "epochs", "optimizer", "lr", "momentum", "weight_decay", "batch_size", "schedule", "augmentation", "precision",
    "recipe", "recipe_hash", "data_fingerprint", "stack_width", "code_version", "torch_version", "device",
    "wall_time_s", "created",
)  # fmt: skip
SEEDS = ("seed", "seed_init", "seed_order", "seed_augment")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LARGEST = 1e6  # of a figure; larger values, and values that are no numbers, are not shown
HUB = "https://huggingface.co/datasets"
INCHES = (9.6, 3.5)
FEWEST_BARS = 8  # that a panel has room for
README = "README.md"
EXAMPLE_MEMBERS = 5  # in the examples, if the collection has as many
# The architectures and images of the package; importing them takes torch.
NETS = ("convnet", "mlp", "optunet", "resnet18", "resnet20-frn-silu", "resnet8")
IMAGE_SETS = ("cifar10", "cifar100", "digits", "fashion-mnist", "mnist", "photos", "svhn", "tiny-imagenet")
_TEMPLATES = Path(__file__).parents[1] / "cards"
_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[\w][\w./-]{0,199}", re.ASCII)
_MARKER = re.compile(
    r"<!-- Written by checkpoints_zoo from the manifests; sha256 of the rest: (?P<digest>[0-9a-f]{64})\. "
    r"Edited, it counts as written by hand\. -->"
)
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))
_SPDX = {"c-uda-1.0": "c-uda", "odbl-1.0": "odbl", "odc-by-1.0": "odc-by", "pddl-1.0": "pddl", "": "unknown"}


def card(
    collections: Mapping[str, tuple[Description, pa.Table]],
    repo: str,
    revision: str | None = None,
    predictions: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> str:
    """Write the card of a source; return the text of its README.md.

    Args:
        collections: name -> description and manifest, every one that the source has.
        repo: "org/name" on the Hub, for the examples.
        revision: git tag or commit that the examples name; None for the newest commit.
        predictions: name -> sets of stored predictions that the source has.

    Raises:
        UsageError: no collections, or a repo or revision that is none.
    """
    _check(collections, repo, revision)
    shown = [Section(n, *collections[n], tuple(sorted(predictions.get(n, ())))) for n in sorted(collections)]
    parts = parts_of_source(shown, repo, revision)
    without = _render("source", {**parts, "marker": Markup("")})
    return _render("source", {**parts, "marker": Markup(_marker(_digest(without)))})


def files(
    collections: Mapping[str, tuple[Description, pa.Table]],
    repo: str,
    revision: str | None = None,
    predictions: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Write the card and its pictures; return path in the repo -> bytes.

    Args, Raises: as of `card`.
    """
    written = {README: card(collections, repo, revision, predictions).encode()}
    for name, (description, rows) in sorted(collections.items()):
        drawn = picture(name, rows, description)
        if drawn is not None:
            written[picture_path(name)] = drawn
    return written


def picture_path(name: str) -> str:
    """Return where the picture of a collection lies in its source."""
    return f"cards/{name}.png"


def is_generated(text: str) -> bool:
    """Return whether a README.md is a card that this package wrote, in any version, and that nobody edited since.

    >>> is_generated("# My networks")
    False
    """
    text = text.replace("\r\n", "\n")
    # Behind the YAML head: values of the head and of the passages below may hold the marker's own words.
    match = _MARKER.search(text, max(text.find("\n---\n"), 0))
    return match is not None and match["digest"] == _digest(text[: match.start()] + text[match.end() :])


def _check(collections: Mapping[str, object], repo: str, revision: str | None) -> None:
    if not collections:
        raise UsageError("card", expected="one collection or more", found="none")
    for name in collections:
        catalog.check_name(name)
    if not _REPO.fullmatch(repo):
        raise UsageError("repo of the card", expected="ORG/NAME", found=repr(repo))
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError("revision of the card", expected="a branch, tag or commit", found=repr(revision))


@cache
def _templates() -> Environment:
    """Return the templates' environment, which writes every value that is no Markup as text of Markdown."""

    def escape(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(markdown_text(str(value)))

    return Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, finalize=escape,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


def _render(template: str, parts: Mapping[str, str]) -> Markup:
    """Fill values into a template; return Markdown that ends in one end of line."""
    return Markup(_templates().get_template(f"{template}.md").render(parts).rstrip("\n") + "\n")


def _digest(rest: str) -> str:
    return hashlib.sha256(rest.encode("utf-8", "surrogatepass")).hexdigest()


def _marker(digest: str) -> str:
    return _MARKER.pattern.replace(r"(?P<digest>[0-9a-f]{64})", digest).replace("\\", "")


@dataclass(frozen=True)
class Section:
    """A collection as the card sees it.

    Args:
        name: name of the collection.
        description, rows: description and manifest of the collection.
        predictions: names of the sets of its members' stored predictions.
    """

    name: str
    description: Description
    rows: pa.Table
    predictions: tuple[str, ...] = ()

    @property
    def all_rows(self) -> int:
        return int(self.rows.num_rows)

    @cached_property
    def column(self) -> Mapping[str, list[Any]]:
        """Column -> values of all rows; times as seconds since 1970, since Arrow's own need pandas."""
        names = self.rows.column_names
        seconds = {n: self.rows.column(n).cast(pa.int64()) for n in names if pa.types.is_timestamp(self.rows[n].type)}
        return {n: seconds.get(n, self.rows.column(n)).to_pylist() for n in names}

    @cached_property
    def members(self) -> Mapping[str, list[Any]]:
        """Column -> values of the rows that are loaded unless told otherwise: status ok, and final."""
        kept = [s == "ok" and f for s, f in zip(self.column["status"], self.column["final"], strict=True)]
        return {n: [v for v, k in zip(values, kept, strict=True) if k] for n, values in self.column.items()}

    @property
    def count(self) -> int:
        return len(self.members["member"])

    @property
    def nbytes(self) -> int:
        """Bytes of all stored weights, snapshots too."""
        return manifest.sum_of(self.rows, "nbytes")

    @property
    def base(self) -> str:
        return self.description.base

    @property
    def base_repo(self) -> str:
        return self.base.removeprefix("hf://datasets/").partition("@")[0]

    def layouts(self) -> list[Layout]:
        """Return the layouts that members are stored in."""
        return [self.description.layouts[key] for key in sorted({k for k in self.members["layout"] if k})]

    def dtypes(self) -> list[str]:
        """Return the dtypes of the weights."""
        return sorted({markdown_code(DTYPES.get(d, d)) for d in self.members["dtype"] if d})

    def finite(self, column: str) -> list[float]:
        """Return a figure of the members, where it is known and a number that means something."""
        return [v for v in self.members[column] if v is not None and abs(v) < LARGEST]

    def accuracy(self) -> str:
        """Write the members' test accuracy in percent; return "" where it is not known."""
        values = [100 * v for v in self.finite("test_accuracy")]
        if not values:
            return ""
        text = f"{statistics.fmean(values):.2f}"
        if len(values) > 1:
            text += f" ± {statistics.stdev(values):.2f} ({min(values):.2f} to {max(values):.2f})"
        return text if len(values) == self.count else f"{text}, of {counted(len(values), 'member')}"

    def first_shard(self) -> str:
        """Return the file that the first member lies in, "" where that is no shard."""
        inside, key = self.members["path"][0], self.members["layout"][0]
        is_shard = inside.endswith(".safetensors") and not self.description.layouts[key].lead
        return str(inside) if is_shard else ""


def parts_of_source(shown: list[Section], repo: str, revision: str | None) -> dict[str, str]:
    """Write what the card says of the whole source; return name in the template -> text, "" for nothing to say."""
    known = [column for column in COLUMNS if any(not manifest.is_null(s.rows, column.name) for s in shown)]
    title = shown[0].description.title if len(shown) == 1 else repo.partition("/")[2]
    title = title if markdown_text(title) else shown[0].name
    example = next((s for s in shown if s.count), None)
    sections = "\n".join(_render("collection", parts(s)) for s in shown).rstrip("\n")
    return {
        "metadata": _metadata(shown, repo, title),
        "title": title,
        "summary": Markup(_summary(shown)),
        "collections": Markup("\n".join(_line(s) for s in shown)),
        "spread": Markup(_spread(shown)),
        "loading": Markup(_render("loading", parts_of_loading(example, repo, revision)).rstrip("\n"))
        if example
        else "",
        "sections": Markup(sections),
        "licences": Markup(
            "\n".join(f"- `{s.name}`: {markdown_text(s.description.licence) or 'not stated'}" for s in shown)
        ),
        "citations": Markup("\n\n".join(_citations(shown))),
        "format_version": str(FORMAT_VERSION),
        "schema_version": str(SCHEMA_VERSION),
        "columns": Markup("\n".join(f"| `{c.name}` | {c.type} | {c.meaning} |" for c in known)),
    }


def _metadata(shown: list[Section], repo: str, title: str) -> Markup:
    """Write the YAML head, which names the manifests for the Hub's viewer and for `datasets`."""
    from huggingface_hub.repocard_data import DatasetCardData

    rows = sum(s.all_rows for s in shown)
    configs: list[dict[str, Any]] = [
        {"config_name": s.name, "data_files": f"manifests/{s.name}.parquet"} for s in shown
    ]
    if len(configs) > 1:
        configs[0]["default"] = True
    data = DatasetCardData(
        pretty_name=one_line(title), tags=_tags(shown), configs=configs,
        size_categories=[next((size for limit, size in _SIZES if rows < limit), "10M<n<100M")],
        **_license([s.description.licence for s in shown], repo),
    )  # fmt: skip
    return Markup(data.to_yaml())


def parts_of_loading(example: Section, repo: str, revision: str | None) -> dict[str, Markup]:
    """Write how to load a collection; return name in the template -> Markdown, "" for nothing to say."""
    table = [f'"{repo}"', f'"{example.name}"', *([f'revision="{revision}"'] if revision else [])]
    first = example.first_shard()
    measured = set(example.members["eval_data"]) - {None} and example.finite("test_accuracy")
    where = [repo, revision] if not example.base else example.base.removeprefix("hf://datasets/").split("@")
    file = [f'"{where[0]}"', _literal(first), *([f'revision="{where[1]}"'] if where[1] else [])]
    net, images = example.description.architecture, example.description.dataset
    texts = {
        "name": example.name,
        "address": f"hf://datasets/{repo}{f'@{revision}' if revision else ''}",
        "n": str(min(EXAMPLE_MEMBERS, example.count)),
        "test_set": markdown_code(images) if measured and images in IMAGE_SETS else "",
        "own_net": "" if net in NETS else markdown_code(net),
        "own_images": "" if images in IMAGE_SETS else markdown_code(images),
        "table_arguments": ", ".join(table),
        "file_arguments": ", ".join(file) if first else "",
        "prefix": tensor_prefix(example.members["member"][0]),
    }
    return {name: Markup(text) for name, text in texts.items()}


def _literal(text: str) -> str:
    """Write a Python string, in double quotes if it has none itself."""
    return repr(text) if '"' in text else f'"{repr(text)[1:-1]}"'


def _tags(shown: Iterable[Section]) -> list[str]:
    methods = {method for s in shown for method in s.members["method"]}
    ensembles = ["deep-ensembles"] if "independent" in methods else []
    return [
        *("checkpoints", "safetensors", "uncertainty", "bayesian-neural-networks"),
        *ensembles, "weight-space-learning", "checkpoints_zoo",
    ]  # fmt: skip


def _license(licences: Iterable[str], repo: str) -> dict[str, Any]:
    """Return the licence for the YAML head: the Hub's names, or "other" if the Hub lacks one of the names."""
    known = set((_TEMPLATES / "licences.txt").read_text(encoding="utf-8").split())
    names = sorted({_SPDX.get(text.strip().lower(), text.strip().lower()) for text in licences})
    if known.issuperset(names):
        return {"license": names[0] if len(names) == 1 else names}
    slug = re.sub(r"[^a-z0-9.]+", "-", "-and-".join(names))[:80].strip("-.") or "see-the-card"
    link = f"https://huggingface.co/datasets/{repo}#licence"
    return {"license": "other", "license_name": slug, "license_link": link}


def _summary(shown: list[Section]) -> str:
    what = counted(sum(s.count for s in shown), "trained network")
    what += f" in {len(shown)} collections" if len(shown) > 1 else ""
    elsewhere = [s for s in shown if s.base]
    if len(elsewhere) == len(shown):
        what = f"Manifests of {what}, whose weights lie in another repo"
    else:
        what = f"The weights of {what}, as safetensors{', some of them in another repo' if elsewhere else ''}"
    return (
        f"{what}. A collection has a manifest: a Parquet table with a row for each member (one network), or each "
        "snapshot of one. It says what the member is, where its bytes lie, and what is known of its training and its "
        "test figures. The data set viewer shows the manifest. The package checkpoints_zoo loads any selection of "
        "members, stacks them or makes an ensemble of them, without downloading the rest."
    )


def _line(s: Section) -> str:
    """Write a collection's line of the table."""
    weights = format_bytes(s.nbytes) + (f", in {markdown_code(s.base_repo)}" if s.base else "")
    architecture, dataset = markdown_code(s.description.architecture), markdown_code(s.description.dataset)
    accuracy, dtypes = s.accuracy() or "not known", ", ".join(s.dtypes()) or "none"
    cells = (markdown_code(s.name), f"{s.count:,}", architecture, dataset, accuracy, weights, dtypes)
    return f"| {' | '.join(cells)} |"


def _spread(shown: Iterable[Section]) -> str:
    several = any(len(s.finite("test_accuracy")) > 1 for s in shown)
    return "mean ± standard deviation (lowest to highest)" if several else ""


def _citations(shown: Iterable[Section]) -> Iterable[str]:
    """Write each citation once, under the names of its collections."""
    names: dict[str, list[str]] = {}
    for s in shown:
        if s.description.citation.strip():
            names.setdefault(s.description.citation, []).append(f"`{s.name}`")
    for text, cited in names.items():
        yield f"{', '.join(cited)}:\n\n{markdown_block(text)}"


def parts(s: Section) -> dict[str, Markup]:
    """Write what the card says of a collection; return name in the template -> Markdown, "" for nothing to say."""
    known = bool(s.finite("test_accuracy"))
    title = markdown_text(s.description.title)
    texts = {
        "heading": f"`{s.name}`{': ' if title else ''}{title}",
        "alternative": f"Histograms of the test figures of the members of {s.name}",
        "picture": picture_path(s.name) if known else "",
        "members": _members(s),
        "stored": _stored(s),
        "place": _place(s),
        "unmeasured": "" if known else _unmeasured(s),
        "figures": "\n".join(_figures(s)),
        "measured": _measured(s),
        "training": "\n".join(_training(s)),
        "preprocessing": _preprocessing(s.description.preprocessing),
        "classes": _classes(s.description.classes),
        "left_out": _left_out(s),
        "snapshots": _snapshots(s),
        "seeds": _seeds(s),
        "splits": _splits(s),
        "hashes": _hashes(s),
        "predictions": _predictions(s),
    }
    return {name: Markup(text) for name, text in texts.items()}


def _members(s: Section) -> str:
    """Say how many there are and how they came about."""
    methods = {m for m in s.members["method"] if m is not None}
    many = counted(s.count, "member")
    if None in s.members["method"] or not methods:
        return f"{many}."
    if methods == {"independent"}:
        return f"{many}, trained independently of each other." if s.count > 1 else f"{many}."
    runs = len(set(s.members["run"]) - {None})
    where = f", from {counted(runs, 'run')}" if runs else ""
    return f"{many}, by method: {summarize_values(s.members['method'])}{where}."


def _stored(s: Section) -> str:
    """Say what a member is made of."""
    arguments = s.description.arguments
    given = f" with {markdown_code(json.dumps(dict(arguments), ensure_ascii=False))}" if arguments else ""
    architecture, dataset = markdown_code(s.description.architecture), markdown_code(s.description.dataset)
    text = f"Architecture {architecture}{given}, for the images of {dataset}."
    layouts = s.layouts()
    if len(layouts) != 1:
        return text
    sizes: dict[str, int] = {}
    for t in layouts[0].tensors:
        dtype = DTYPES.get(t.dtype, t.dtype)
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(t.shape)
    values = " and ".join(f"{n:,} {markdown_code(dtype)}" for dtype, n in sorted(sizes.items(), key=lambda x: -x[1]))
    return f"{text} A member is stored as {values} values, {format_bytes(layouts[0].nbytes)}."


def _place(s: Section) -> str:
    """Say where the weights lie, if not in shards beside the manifest."""
    text = []
    if s.base:
        commit = s.base.partition("@")[2]
        text.append(
            f"The weights are not in this repo, which holds their manifest: they lie in "
            f"[{markdown_text(s.base_repo)}]({HUB}/{s.base_repo}/tree/{commit}), at commit `{commit}`."
        )
    if any(layout.lead for layout in s.layouts()):
        paths = sorted({p for p in s.members["path"] if p})
        text.append(f"They lie in tar archives, each member as a safetensors file of its own: {first_values(paths)}.")
    return " ".join(text)


def _unmeasured(s: Section) -> str:
    if not s.count:
        return ""
    return "Test accuracies are not known yet: the manifest has none. `zoo-cli import --evaluate` measures them."


def _figures(s: Section) -> Iterable[str]:
    """Write a line for each figure that is known."""
    for name in FIGURES:
        values = s.finite(name)
        if values:
            spread = f"{statistics.stdev(values):.4g}" if len(values) > 1 else "-"
            cells = (f"{statistics.fmean(values):.4g}", spread, f"{min(values):.4g}", f"{max(values):.4g}")
            yield f"| `{name}` | {' | '.join(cells)} | {len(values):,} |"


def _measured(s: Section) -> str:
    """Say how the test figures came about."""
    known = [name for name in FIGURES if name.startswith("test_") and s.finite(name)]
    if not known:
        return ""
    sets = [d for i, d in enumerate(s.members["eval_data"]) if any(s.members[n][i] is not None for n in known)]
    on = (
        summarize_values(sets, "member")
        if len(set(sets)) > 1
        else markdown_code(sets[0])
        if sets[0] is not None
        else ""
    )
    measured = "The test figures were measured with the weights as they are stored, computed in float32"
    return f"{measured}, on {on}." if on else f"{measured}; the manifest does not name the test set."


def _training(s: Section) -> Iterable[str]:
    """Write a line for each column on the training that is known."""
    for name in TRAINING:
        values = s.members[name]
        if name == "created":
            values = [None if v is None else datetime.fromtimestamp(v, UTC).date().isoformat() for v in values]
        if set(values) - {None}:
            yield f"| `{name}` | {summarize_values(values)} |"


def _preprocessing(fields: Mapping[str, Any]) -> str:
    if not fields:
        return ""
    shown = ", ".join(
        f"{markdown_code(name)} = {markdown_code(json.dumps(v, ensure_ascii=False))}" for name, v in fields.items()
    )
    return f"Preprocessing, as `members.preprocess` does it: {shown}."


def _classes(classes: Sequence[str]) -> str:
    return f"Classes, in the order of the logits: {len(classes):,} ({first_values(classes)})." if classes else ""


def _left_out(s: Section) -> str:
    """Say which rows are not loaded because something is wrong with them."""
    text = []
    for status in ("failed", "excluded"):
        at = [i for i, found in enumerate(s.column["status"]) if found == status]
        if not at:
            continue
        reasons = Counter(s.column["reason"][i] or "" for i in at).most_common()
        given = [f"{markdown_code(r) if r else 'no reason given'} ({n:,})" for r, n in reasons[:MOST_LISTED]]
        more = sum(n for _, n in reasons[MOST_LISTED:])
        members = first_values(sorted({s.column["member"][i] for i in at}))
        why = ", ".join([*given, *([f"other reasons ({more:,})"] if more else [])])
        text.append(f"{counted(len(at), 'row')} with status `{status}` (member {members}): {why}.")
    return f"Not loaded unless asked for: {' '.join(text)}" if text else ""


def _snapshots(s: Section) -> str:
    """Say which weights there are beside the final ones."""
    at = [i for i, final in enumerate(s.column["final"]) if not final and s.column["status"][i] == "ok"]
    if not at:
        return ""
    members = len({s.column["member"][i] for i in at})
    epochs = sorted({s.column["epoch"][i] for i in at})
    return (
        f"Beside the final weights there are {counted(len(at), 'snapshot')} of {counted(members, 'member')}, at epoch "
        f"{first_values(epochs)}: `zoo.load(…, snapshots=True)` selects them too."
    )


def _seeds(s: Section) -> str:
    known = [name for name in SEEDS if s.count and None not in s.members[name]]
    return f"Each member's seeds are in the manifest: {', '.join(f'`{name}`' for name in known)}." if known else ""


def _splits(s: Section) -> str:
    splits = s.members["split"]
    if not s.count or None in splits:
        return ""
    counts = ", ".join(f"{markdown_code(name)} {n:,}" for name, n in sorted(Counter(splits).items()))
    return f"Members for learning on weights, by the column `split`: {counts}."


def _hashes(s: Section) -> str:
    if not s.count or None in s.members["sha256"]:
        return ""
    return "Each member's content hash is in the column `sha256`; `zoo-cli verify` computes it again."


def _predictions(s: Section) -> str:
    if not s.predictions:
        return ""
    sets = first_few([markdown_code(name) for name in s.predictions], MOST_LISTED)
    return (
        f"Logits of its members are stored too, under the names {sets}: "
        f'`members.predictions("{s.predictions[0]}")` reads them, and `zoo.evaluate` takes them in place of members.'
    )


def picture(name: str, rows: pa.Table, description: Description) -> bytes | None:
    """Draw the distributions of a collection's test accuracy and NLL; return a PNG, None where no accuracy is known.

    Args:
        name: name of the collection.
        rows: manifest of the collection.
        description: the JSON beside it.
    """
    section = Section(name, description, rows)
    if not section.finite("test_accuracy"):
        return None
    return png_bytes(lambda: draw(section), f"{name}: test figures of its members")


def draw(section: Section) -> Figure:
    """Draw the panels; return the figure, whose axes are labelled by the manifest's columns."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    accuracies, losses = [100 * v for v in section.finite("test_accuracy")], section.finite("test_nll")
    sets = {d for d in section.members["eval_data"] if d}
    (named,) = sets if len(sets) == 1 else ("",)
    named = named if len(named) <= 60 else ""
    figure = Figure(figsize=INCHES, dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.03))
    title = f"{section.name}: {counted(len(accuracies), 'member')}{f' on {named}' if named else ''}"
    figure.suptitle(title, fontsize=min(12, 700 / len(title)), fontweight="bold")
    panels = figure.add_gridspec(1, 2 if losses else 1)
    _histogram(figure.add_subplot(panels[0], label="test_accuracy"), accuracies, "test accuracy (%)", BLUE, most=100)
    if losses:
        _histogram(figure.add_subplot(panels[1], label="test_nll"), losses, "test NLL (nats)", GREEN)
    return figure


def _histogram(axes: Axes, values: Sequence[float], label: str, colour: str, most: float | None = None) -> None:
    """Draw how values spread, their mean, and their ends, of which one member is hardly a bar."""
    sides = histogram_edges(values)
    heights, *_ = axes.hist(values, sides, color=colour, alpha=0.85, edgecolor="white")
    mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    digits = max(1, 1 - math.floor(math.log10(spread))) if spread > mean * 1e-9 else None
    named = [f"{v:.4g}" if digits is None else f"{v:.{digits}f}" for v in (mean, spread, min(values), max(values))]
    about = f"mean {named[0]}" + (f", standard deviation {named[1]}" if digits is not None else "")
    axes.axvline(mean, ymax=0.75, color=RED, linewidth=2, label=about)
    if digits is not None:
        ends = [min(values), max(values)]
        text = f"lowest {named[2]}, highest {named[3]}"
        axes.plot(ends, [0, 0], "^", color=GREY, markersize=6, clip_on=False, zorder=5, label=text)
    axes.set(xlabel=label, ylabel="members", ylim=(0, max(heights) / 0.75))
    if len(sides) <= FEWEST_BARS:
        middle, half = (sides[0] + sides[-1]) / 2, (sides[1] - sides[0]) * FEWEST_BARS / 2
        axes.set_xlim(middle - half, middle + half)
    if most is not None:
        axes.set_xlim(right=min(axes.get_xlim()[1], max(most, sides[-1])))
    axes.locator_params(axis="y", integer=True)
    axes.locator_params(axis="x", nbins=6)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.legend(loc="upper left")
