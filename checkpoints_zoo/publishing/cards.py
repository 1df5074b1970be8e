"""Make the card of a source: the README.md that the Hub shows, with a picture of each collection's test accuracies.

A card states only facts from the manifests. Its sentences stand in the jinja2 templates in `cards/`, one passage for
each fact. The same manifests give the same card. Text from a manifest becomes text on the card, never Markdown: a
template escapes every value that is not `Markup`, and only the functions of `formats.text` make `Markup` of such text.

This is one file, because its functions are the passages of one page.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import arrow_tables, catalog
from checkpoints_zoo.formats.catalog import FORMAT_VERSION, Description
from checkpoints_zoo.formats.columns import COLUMNS, SCHEMA_VERSION
from checkpoints_zoo.formats.member_parts import parse_repo_file
from checkpoints_zoo.formats.shard_files import tensor_prefix
from checkpoints_zoo.formats.text import (
    LARGEST_LISTED_COUNT,
    count_with_noun,
    first_few,
    first_values,
    format_bytes,
    markdown_block,
    markdown_code,
    markdown_text,
    one_line,
    summarize_values,
)
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.publishing import card_pictures
from checkpoints_zoo.publishing.card_sections import DTYPE_NAMES, Section
from checkpoints_zoo.sources.hub_addresses import repo_label

FIGURE_COLUMNS = ("test_accuracy", "test_nll", "test_brier", "test_ece", "train_accuracy", "train_loss")
TRAINING_COLUMNS = (
    "epochs", "optimizer", "lr", "momentum", "weight_decay", "batch_size", "schedule", "augmentation", "precision",
    "recipe", "recipe_hash", "data_fingerprint", "stack_width", "code_version", "torch_version", "device",
    "wall_time_s", "created",
)  # fmt: skip
SEED_COLUMNS = ("seed", "seed_init", "seed_order", "seed_augment")
HUB_ADDRESS = "https://huggingface.co/datasets"
README = "README.md"
LARGEST_EXAMPLE_COUNT = 5  # number of members that the examples load, if the collection has so many
# The images of the package; importing them takes torch.
IMAGE_SETS = ("cifar10", "cifar100", "digits", "fashion-mnist", "mnist", "photos", "svhn", "tiny-imagenet")
_TEMPLATE_FOLDER = Path(__file__).parents[1] / "cards"
_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_REVISION = re.compile(r"[\w][\w./-]{0,199}", re.ASCII)
_MARKER = re.compile(
    r"<!-- Written by checkpoints_zoo from the manifests; sha256 of the rest: (?P<digest>[0-9a-f]{64})\. "
    r"Edited, it counts as written by hand\. -->"
)
_SIZE_CATEGORIES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)
_HUB_NAME_OF_LICENCE = {
    "c-uda-1.0": "c-uda",
    "odbl-1.0": "odbl",
    "odc-by-1.0": "odc-by",
    "pddl-1.0": "pddl",
    "": "unknown",
}


def card(
    collections: Mapping[str, tuple[Description, pa.Table]],
    repo: str,
    revision: str | None = None,
    predictions: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> str:
    """Write the card of a source; return the text of its README.md.

    Args:
        collections: all collections of the source, name -> (description, manifest).
        repo: name of the repo on the Hub, "org/name", for the examples.
        revision: git tag or commit that the examples name; None for the newest commit.
        predictions: collection -> names of its sets of stored predictions in the source.

    Raises:
        UsageError: there are no collections, or the repo's name or the revision is invalid.
    """
    _check_arguments(collections, repo, revision)
    sections = [Section(n, *collections[n], tuple(sorted(predictions.get(n, ())))) for n in sorted(collections)]
    texts = source_texts(sections, repo, revision)
    text_without_marker = _render("source", {**texts, "marker": Markup("")})
    return _render("source", {**texts, "marker": Markup(_marker_of(_digest_of(text_without_marker)))})


def card_files(
    collections: Mapping[str, tuple[Description, pa.Table]],
    repo: str,
    revision: str | None = None,
    predictions: Mapping[str, Iterable[str]] = MappingProxyType({}),
) -> dict[str, bytes]:
    """Make the card and its pictures; return path in the repo -> bytes.

    Arguments and errors are those of `card`.
    """
    file_contents = {README: card(collections, repo, revision, predictions).encode()}
    for name, (description, rows) in sorted(collections.items()):
        png_bytes = card_pictures.picture(name, rows, description)
        if png_bytes is not None:
            file_contents[card_pictures.picture_path(name)] = png_bytes
    return file_contents


def is_generated(readme_text: str) -> bool:
    """Return whether a README.md is a card that this package wrote, in any version, and that nobody edited since.

    >>> is_generated("# My networks")
    False
    """
    readme_text = readme_text.replace("\r\n", "\n")
    # The search starts behind the YAML head, whose values may contain a copy of the marker.
    match = _MARKER.search(readme_text, max(readme_text.find("\n---\n"), 0))
    return match is not None and match["digest"] == _digest_of(
        readme_text[: match.start()] + readme_text[match.end() :]
    )


def _check_arguments(collections: Mapping[str, object], repo: str, revision: str | None) -> None:
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
    """Return jinja2's environment for the templates; it escapes every value that is not `Markup`."""

    def escape(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(markdown_text(str(value)))

    return Environment(
        loader=FileSystemLoader(_TEMPLATE_FOLDER), autoescape=True, undefined=StrictUndefined, finalize=escape,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


def _render(template: str, template_values: Mapping[str, str]) -> Markup:
    """Fill values into a template; return Markdown that ends in exactly one newline."""
    return Markup(_templates().get_template(f"{template}.md").render(template_values).rstrip("\n") + "\n")


def _digest_of(card_text: str) -> str:
    return hashlib.sha256(card_text.encode("utf-8", "surrogatepass")).hexdigest()


def _marker_of(digest: str) -> str:
    return _MARKER.pattern.replace(r"(?P<digest>[0-9a-f]{64})", digest).replace("\\", "")


def source_texts(sections: list[Section], repo: str, revision: str | None) -> dict[str, str]:
    """Return the texts on the whole source, name in the template -> text; a text is "" if its facts are missing."""
    known_columns = [
        column for column in COLUMNS if any(not arrow_tables.is_null(section.rows, column.name) for section in sections)
    ]
    title = sections[0].description.title if len(sections) == 1 else repo.partition("/")[2]
    title = title if markdown_text(title) else sections[0].name
    example_section = next((section for section in sections if section.member_count), None)
    sections_text = "\n".join(_render("collection", collection_texts(section)) for section in sections).rstrip("\n")
    return {
        "metadata": _metadata(sections, repo, title),
        "title": title,
        "summary": Markup(_summary_text(sections)),
        "collections": Markup("\n".join(_collection_row(section) for section in sections)),
        "spread": Markup(_spread_note(sections)),
        "loading": Markup(_render("loading", loading_texts(example_section, repo, revision)).rstrip("\n"))
        if example_section
        else "",
        "sections": Markup(sections_text),
        "licences": Markup(
            "\n".join(
                f"- `{section.name}`: {markdown_text(section.description.licence) or 'not stated'}"
                for section in sections
            )
        ),
        "citations": Markup("\n\n".join(_citations(sections))),
        "format_version": str(FORMAT_VERSION),
        "schema_version": str(SCHEMA_VERSION),
        "columns": Markup("\n".join(f"| `{c.name}` | {c.type} | {c.meaning} |" for c in known_columns)),
    }


def _metadata(sections: list[Section], repo: str, title: str) -> Markup:
    """Return the YAML head, which names the manifests for the Hub's viewer and for the package `datasets`."""
    from huggingface_hub.repocard_data import DatasetCardData

    row_count = sum(section.row_count for section in sections)
    configs: list[dict[str, Any]] = [
        {"config_name": section.name, "data_files": f"manifests/{section.name}.parquet"} for section in sections
    ]
    if len(configs) > 1:
        configs[0]["default"] = True
    card_data = DatasetCardData(
        pretty_name=one_line(title), tags=_tags(sections), configs=configs,
        size_categories=[next((size for limit, size in _SIZE_CATEGORIES if row_count < limit), "10M<n<100M")],
        **_license([section.description.licence for section in sections], repo),
    )  # fmt: skip
    return Markup(card_data.to_yaml())


def loading_texts(example_section: Section, repo: str, revision: str | None) -> dict[str, Markup]:
    """Return the texts on loading a collection, name in the template -> Markdown; "" if a fact is missing."""
    table_arguments = [f'"{repo}"', f'"{example_section.name}"', *([f'revision="{revision}"'] if revision else [])]
    first_shard = example_section.first_shard()
    has_accuracy = set(example_section.member_values["eval_data"]) - {None} and example_section.finite_values(
        "test_accuracy"
    )
    repo_and_revision = (
        [repo, revision] if not example_section.base else example_section.base.removeprefix("hf://datasets/").split("@")
    )
    file_arguments = [
        f'"{repo_and_revision[0]}"',
        _string_literal(first_shard),
        *([f'revision="{repo_and_revision[1]}"'] if repo_and_revision[1] else []),
    ]
    architecture, image_set = example_section.description.architecture, example_section.description.dataset
    texts = {
        "name": example_section.name,
        "address": f"hf://datasets/{repo}{f'@{revision}' if revision else ''}",
        "n": str(min(LARGEST_EXAMPLE_COUNT, example_section.member_count)),
        "test_set": markdown_code(image_set) if has_accuracy and image_set in IMAGE_SETS else "",
        "own_net": "" if architecture in ARCHITECTURES else markdown_code(architecture),
        "own_images": "" if image_set in IMAGE_SETS else markdown_code(image_set),
        "table_arguments": ", ".join(table_arguments),
        "file_arguments": ", ".join(file_arguments) if first_shard else "",
        "prefix": tensor_prefix(example_section.member_values["member"][0]),
    }
    return {name: Markup(text) for name, text in texts.items()}


def _string_literal(text: str) -> str:
    """Return Python code for a string, in double quotes unless the string contains one."""
    return repr(text) if '"' in text else f'"{repr(text)[1:-1]}"'


def _tags(sections: Iterable[Section]) -> list[str]:
    methods = {method for s in sections for method in s.member_values["method"]}
    ensembles = ["deep-ensembles"] if "independent" in methods else []
    return [
        *("checkpoints", "safetensors", "uncertainty", "bayesian-neural-networks"),
        *ensembles, "weight-space-learning", "checkpoints_zoo",
    ]  # fmt: skip


def _license(licences: Iterable[str], repo: str) -> dict[str, Any]:
    """Return the licence fields of the YAML head: names that the Hub knows, or "other" if it lacks one of them."""
    known_licences = set((_TEMPLATE_FOLDER / "licences.txt").read_text(encoding="utf-8").split())
    licence_names = sorted({_HUB_NAME_OF_LICENCE.get(text.strip().lower(), text.strip().lower()) for text in licences})
    if known_licences.issuperset(licence_names):
        return {"license": licence_names[0] if len(licence_names) == 1 else licence_names}
    licence_slug = re.sub(r"[^a-z0-9.]+", "-", "-and-".join(licence_names))[:80].strip("-.") or "see-the-card"
    licence_link = f"https://huggingface.co/datasets/{repo}#licence"
    return {"license": "other", "license_name": licence_slug, "license_link": licence_link}


def _summary_text(sections: list[Section]) -> str:
    contents_text = count_with_noun(sum(s.member_count for s in sections), "trained network")
    contents_text += f" in {len(sections)} collections" if len(sections) > 1 else ""
    sections_with_base = [s for s in sections if s.base]
    if len(sections_with_base) == len(sections):
        contents_text = f"Manifests of {contents_text}, whose weights lie in another repo"
    else:
        base_note = ", some of them in another repo" if sections_with_base else ""
        contents_text = f"The weights of {contents_text}, as safetensors{base_note}"
    return (
        f"{contents_text}. A collection has a manifest: a Parquet table with a row for each member (one network), "
        "or each snapshot of one. It says what the member is, where its bytes lie, and what is known of its training "
        "and its test figures. The data set viewer shows the manifest. The package checkpoints_zoo loads any selection "
        "of members, stacks them or makes an ensemble of them, without downloading the rest."
    )


def _collection_row(section: Section) -> str:
    """Return a collection's row of the table of collections, in Markdown."""
    weights = format_bytes(section.nbytes) + (f", in {markdown_code(section.base_repo)}" if section.base else "")
    architecture, dataset = markdown_code(section.description.architecture), markdown_code(section.description.dataset)
    accuracy, dtypes = section.accuracy() or "not known", ", ".join(section.dtypes()) or "none"
    cells = (markdown_code(section.name), f"{section.member_count:,}", architecture, dataset, accuracy, weights, dtypes)
    return f"| {' | '.join(cells)} |"


def _spread_note(sections: Iterable[Section]) -> str:
    has_spread = any(len(s.finite_values("test_accuracy")) > 1 for s in sections)
    return "mean ± standard deviation (lowest to highest)" if has_spread else ""


def _citations(sections: Iterable[Section]) -> Iterable[str]:
    """Yield each different citation once, below the names of its collections."""
    names_of_citation: dict[str, list[str]] = {}
    for section in sections:
        if section.description.citation.strip():
            names_of_citation.setdefault(section.description.citation, []).append(f"`{section.name}`")
    for citation, collection_names in names_of_citation.items():
        yield f"{', '.join(collection_names)}:\n\n{markdown_block(citation)}"


def collection_texts(section: Section) -> dict[str, Markup]:
    """Return the texts on a collection, name in the template -> Markdown; a text is "" if its facts are missing."""
    has_accuracy = bool(section.finite_values("test_accuracy"))
    title = markdown_text(section.description.title)
    texts = {
        "heading": f"`{section.name}`{': ' if title else ''}{title}",
        "alternative": f"Histograms of the test figures of the members of {section.name}",
        "picture": card_pictures.picture_path(section.name) if has_accuracy and card_pictures.can_draw() else "",
        "members": _members_sentence(section),
        "stored": _network_and_storage_sentences(section),
        "place": _place_sentence(section),
        "unmeasured": "" if has_accuracy else _unmeasured_sentence(section),
        "figures": "\n".join(_figure_rows(section)),
        "measured": _measured_sentence(section),
        "training": "\n".join(_training_rows(section)),
        "preprocessing": _preprocessing_sentence(section.description.preprocessing),
        "classes": _classes_sentence(section.description.classes),
        "left_out": _left_out_sentences(section),
        "snapshots": _snapshots_sentence(section),
        "seeds": _seeds_sentence(section),
        "splits": _splits_sentence(section),
        "hashes": _hashes_sentence(section),
        "predictions": _predictions_sentence(section),
    }
    return {name: Markup(text) for name, text in texts.items()}


def _members_sentence(section: Section) -> str:
    """Return a sentence on the number of members and the method that made them."""
    methods = {m for m in section.member_values["method"] if m is not None}
    members_text = count_with_noun(section.member_count, "member")
    if None in section.member_values["method"] or not methods:
        return f"{members_text}."
    if methods == {"independent"}:
        return (
            f"{members_text}, trained independently of each other." if section.member_count > 1 else f"{members_text}."
        )
    run_count = len(set(section.member_values["run"]) - {None})
    runs_text = f", from {count_with_noun(run_count, 'run')}" if run_count else ""
    return f"{members_text}, by method: {summarize_values(section.member_values['method'])}{runs_text}."


def _network_and_storage_sentences(section: Section) -> str:
    """Return sentences on the network, the images, and the values that are stored for a member."""
    arguments = section.description.arguments
    arguments_text = f" with {markdown_code(json.dumps(dict(arguments), ensure_ascii=False))}" if arguments else ""
    dataset = section.description.dataset
    images_text = f", for the images of {markdown_code(dataset)}" if dataset else ""
    sentences = f"Architecture {markdown_code(section.description.architecture)}{arguments_text}{images_text}."
    layouts = section.layouts()
    if len(layouts) != 1:
        return sentences
    element_count_of_dtype: dict[str, int] = {}
    for t in layouts[0].tensors:
        dtype = DTYPE_NAMES.get(t.dtype, t.dtype)
        element_count_of_dtype[dtype] = element_count_of_dtype.get(dtype, 0) + math.prod(t.shape)
    counts_text = " and ".join(
        f"{n:,} {markdown_code(dtype)}" for dtype, n in sorted(element_count_of_dtype.items(), key=lambda x: -x[1])
    )
    return f"{sentences} A member is stored as {counts_text} values, {format_bytes(layouts[0].nbytes)}."


def _place_sentence(section: Section) -> str:
    """Return sentences on the place of the weights; "" if they are in shards beside the manifest."""
    sentences = []
    if section.base:
        commit = section.base.partition("@")[2]
        sentences.append(
            f"The weights are not in this repo, which holds their manifest: they lie in "
            f"[{markdown_text(section.base_repo)}]({HUB_ADDRESS}/{section.base_repo}/tree/{commit}), "
            f"at commit `{commit}`."
        )
    addresses = [address for p in section.member_values["path"] if p and (address := parse_repo_file(p))]
    if addresses:
        repos = sorted({repo_label(address.id, address.kind) for address in addresses})
        sentences.append(
            f"The weights are not in this repo, which holds their index: they lie in files of "
            f"{count_with_noun(len(repos), 'other repo')}, {first_values(repos)}, at the commits that the rows name."
        )
    if any(layout.header_nbytes for layout in section.layouts()):
        paths = sorted({p for p in section.member_values["path"] if p})
        sentences.append(
            f"They lie in tar archives, each member as a safetensors file of its own: {first_values(paths)}."
        )
    return " ".join(sentences)


def _unmeasured_sentence(section: Section) -> str:
    if not section.member_count:
        return ""
    return "Test accuracies are not known yet: the manifest has none. `zoo-cli import --evaluate` measures them."


def _figure_rows(section: Section) -> Iterable[str]:
    """Yield a table row for each known test figure."""
    for name in FIGURE_COLUMNS:
        values = section.finite_values(name)
        if values:
            deviation_text = f"{statistics.stdev(values):.4g}" if len(values) > 1 else "-"
            cells = (f"{statistics.fmean(values):.4g}", deviation_text, f"{min(values):.4g}", f"{max(values):.4g}")
            yield f"| `{name}` | {' | '.join(cells)} | {len(values):,} |"


def _measured_sentence(section: Section) -> str:
    """Return a sentence on how the test figures were measured; "" if there are none."""
    measured_figures = [name for name in FIGURE_COLUMNS if name.startswith("test_") and section.finite_values(name)]
    if not measured_figures:
        return ""
    set_of_member = [
        set_name
        for i, set_name in enumerate(section.member_values["eval_data"])
        if any(section.member_values[figure][i] is not None for figure in measured_figures)
    ]
    sets_text = (
        summarize_values(set_of_member, "member")
        if len(set(set_of_member)) > 1
        else markdown_code(set_of_member[0])
        if set_of_member[0] is not None
        else ""
    )
    sentence_start = "The test figures were measured with the weights as they are stored, computed in float32"
    return (
        f"{sentence_start}, on {sets_text}."
        if sets_text
        else f"{sentence_start}; the manifest does not name the test set."
    )


def _training_rows(section: Section) -> Iterable[str]:
    """Yield a table row for each column on the training that has values."""
    for name in TRAINING_COLUMNS:
        values = section.member_values[name]
        if name == "created":
            values = [None if v is None else datetime.fromtimestamp(v, UTC).date().isoformat() for v in values]
        if set(values) - {None}:
            yield f"| `{name}` | {summarize_values(values)} |"


def _preprocessing_sentence(fields: Mapping[str, Any]) -> str:
    if not fields:
        return ""
    values_text = ", ".join(
        f"{markdown_code(name)} = {markdown_code(json.dumps(v, ensure_ascii=False))}" for name, v in fields.items()
    )
    return f"Preprocessing, as `members.preprocess` does it: {values_text}."


def _classes_sentence(classes: Sequence[str]) -> str:
    return f"Classes, in the order of the logits: {len(classes):,} ({first_values(classes)})." if classes else ""


def _left_out_sentences(section: Section) -> str:
    """Return sentences on rows that are not loaded because their status is failed or excluded; "" if none."""
    sentences = []
    for status in ("failed", "excluded"):
        positions = [i for i, row_status in enumerate(section.row_values["status"]) if row_status == status]
        if not positions:
            continue
        counted_reasons = Counter(section.row_values["reason"][i] or "" for i in positions).most_common()
        shown_reasons = [
            f"{markdown_code(reason) if reason else 'no reason given'} ({count:,})"
            for reason, count in counted_reasons[:LARGEST_LISTED_COUNT]
        ]
        rest_count = sum(count for _, count in counted_reasons[LARGEST_LISTED_COUNT:])
        ids_text = first_values(sorted({section.row_values["member"][i] for i in positions}))
        reasons_text = ", ".join([*shown_reasons, *([f"other reasons ({rest_count:,})"] if rest_count else [])])
        sentences.append(
            f"{count_with_noun(len(positions), 'row')} with status `{status}` (member {ids_text}): {reasons_text}."
        )
    return f"Not loaded unless asked for: {' '.join(sentences)}" if sentences else ""


def _snapshots_sentence(section: Section) -> str:
    """Return a sentence on stored weights of earlier epochs; "" if there are none."""
    positions = [
        i
        for i, is_final in enumerate(section.row_values["final"])
        if not is_final and section.row_values["status"][i] == "ok"
    ]
    if not positions:
        return ""
    member_count = len({section.row_values["member"][i] for i in positions})
    snapshot_epochs = sorted({section.row_values["epoch"][i] for i in positions})
    return (
        f"Beside the final weights there are {count_with_noun(len(positions), 'snapshot')} "
        f"of {count_with_noun(member_count, 'member')}, at epoch {first_values(snapshot_epochs)}: "
        "`zoo.load(…, snapshots=True)` selects them too."
    )


def _seeds_sentence(section: Section) -> str:
    known_seeds = [name for name in SEED_COLUMNS if section.member_count and None not in section.member_values[name]]
    return (
        f"Each member's seeds are in the manifest: {', '.join(f'`{name}`' for name in known_seeds)}."
        if known_seeds
        else ""
    )


def _splits_sentence(section: Section) -> str:
    split_of_member = section.member_values["split"]
    if not section.member_count or None in split_of_member:
        return ""
    counts_text = ", ".join(
        f"{markdown_code(name)} {count:,}" for name, count in sorted(Counter(split_of_member).items())
    )
    return f"Members for learning on weights, by the column `split`: {counts_text}."


def _hashes_sentence(section: Section) -> str:
    if not section.member_count or None in section.member_values["sha256"]:
        return ""
    return "Each member's content hash is in the column `sha256`; `zoo-cli verify` computes it again."


def _predictions_sentence(section: Section) -> str:
    if not section.predictions:
        return ""
    set_names_text = first_few([markdown_code(name) for name in section.predictions], LARGEST_LISTED_COUNT)
    return (
        f"Logits of its members are stored too, under the names {set_names_text}: "
        f'`members.predictions("{section.predictions[0]}")` reads them, and `zoo.evaluate` takes them in place of '
        "members."
    )
