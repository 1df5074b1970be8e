"""The card of a source: the README.md that the Hub shows, with a picture of each collection's test accuracies.

It says what the manifests know, and nothing else: templates in `cards/`, one passage a fact. The same manifests give
the same card. What comes from a file is written as text, never as markup (see `markup`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from types import MappingProxyType

import pyarrow as pa

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog, manifest
from checkpoints_zoo.formats.catalog import FORMAT_VERSION, Description
from checkpoints_zoo.formats.columns import COLUMNS, SCHEMA_VERSION
from checkpoints_zoo.formats.safetensors import prefix
from checkpoints_zoo.formats.text import code, counted, fenced, in_bytes, plain, quoted
from checkpoints_zoo.publishing import sections
from checkpoints_zoo.publishing.sections import Section
from checkpoints_zoo.publishing.sections import picture as picture

README = "README.md"
EXAMPLE = 5  # members in the examples, where there are as many
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
        revision: a tag or commit to name in the examples; None for the newest.
        predictions: name -> sets of stored predictions that the source has.

    Raises:
        UsageError: no collections, or a repo or revision that is none.
    """
    _check(collections, repo, revision)
    shown = [Section(n, *collections[n], tuple(sorted(predictions.get(n, ())))) for n in sorted(collections)]
    parts = parts_of_source(shown, repo, revision)
    text = _filled("source", {**parts, "marker": (mark := _marker("0" * 64))})
    return text.replace(mark, _marker(_digest(text.replace(mark, ""))), 1)


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
            written[sections.picture_path(name)] = drawn
    return written


def is_generated(text: str) -> bool:
    """Say whether a README.md is a card as this package, or another version of it, wrote it.

    One that was edited since is not: it holds what a person wrote.

    >>> is_generated("# My networks")
    False
    """
    text = text.replace("\r\n", "\n")
    found = _MARKER.search(text)
    return found is not None and found["digest"] == _digest(text[: found.start()] + text[found.end() :])


def _digest(rest: str) -> str:
    return hashlib.sha256(rest.encode("utf-8", "surrogatepass")).hexdigest()


def _marker(digest: str) -> str:
    return _MARKER.pattern.replace(r"(?P<digest>[0-9a-f]{64})", digest).replace("\\", "")


def _check(collections: Mapping[str, object], repo: str, revision: str | None) -> None:
    if not collections:
        raise UsageError("card", expected="one collection or more", found="none")
    for name in collections:
        catalog.check_name(name)
    if not _REPO.fullmatch(repo):
        raise UsageError("repo of the card", expected="ORG/NAME", found=repr(repo))
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError("revision of the card", expected="a branch, tag or commit", found=repr(revision))


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Fill in a template's passages, leaving out those with a name that has nothing to say; return the text."""
    text = (_TEMPLATES / f"{template}.md").read_text(encoding="utf-8")
    passages = [Template(passage) for passage in text.strip("\n").split("\n\n\n")]
    kept = [p.substitute(parts) for p in passages if all(parts[name] for name in p.get_identifiers())]
    return "\n\n".join(kept) + "\n"


def parts_of_source(shown: list[Section], repo: str, revision: str | None) -> dict[str, str]:
    """Write what the card says of the whole source; return name in the template -> text, "" for nothing to say."""
    rows = sum(s.all_rows for s in shown)
    known = [column for column in COLUMNS if any(not manifest.is_null(s.rows, column.name) for s in shown)]
    title = shown[0].description.title if len(shown) == 1 else repo.partition("/")[2]
    title = title if plain(title) else shown[0].name
    example = next((s for s in shown if s.count), None)
    return {
        "pretty_name": quoted(title),
        "license": _license([s.description.licence for s in shown], repo),
        "tags": f"[{', '.join(quoted(tag) for tag in _tags(shown))}]",
        "size": next((size for limit, size in _SIZES if rows < limit), "10M<n<100M"),
        "configs": "\n".join(_configs(shown)),
        "title": plain(title),
        "summary": _summary(shown),
        "collections": "\n".join(_line(s) for s in shown),
        "spread": _spread(shown),
        "loading": _filled("loading", parts_of_loading(example, repo, revision)).rstrip("\n") if example else "",
        "sections": "\n".join(_filled("collection", sections.parts(s)) for s in shown).rstrip("\n"),
        "licences": "\n".join(f"- `{s.name}`: {plain(s.description.licence) or 'not stated'}" for s in shown),
        "citations": "\n\n".join(_citations(shown)),
        "format_version": str(FORMAT_VERSION),
        "schema_version": str(SCHEMA_VERSION),
        "columns": "\n".join(f"| `{c.name}` | {c.type} | {c.meaning} |" for c in known),
    }


def parts_of_loading(example: Section, repo: str, revision: str | None) -> dict[str, str]:
    """Write how to load a collection; return name in the template -> text, "" for nothing to say."""
    table = [f'"{repo}"', f'"{example.name}"', *([f'revision="{revision}"'] if revision else [])]
    first, measured = example.first_shard(), set(example.members["eval_data"]) - {None}
    where = [repo, revision] if not example.base else example.base.removeprefix("hf://datasets/").split("@")
    file = [f'"{where[0]}"', _literal(first), *([f'revision="{where[1]}"'] if where[1] else [])]
    return {
        "name": example.name,
        "address": f"hf://datasets/{repo}{f'@{revision}' if revision else ''}",
        "n": str(min(EXAMPLE, example.count)),
        # Figures on a named test set: the package has its images and the architecture.
        "test_set": code(example.description.dataset) if measured and example.finite("test_accuracy") else "",
        "table_arguments": ", ".join(table),
        "file_arguments": ", ".join(file) if first else "",
        "prefix": prefix(example.members["member"][0]),
    }


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


def _license(licences: Iterable[str], repo: str) -> str:
    """Write the front matter's licence: the Hub's names where it has some, "other" where it lacks one."""
    known = set((_TEMPLATES / "licences.txt").read_text(encoding="utf-8").split())
    names = sorted({_SPDX.get(text.strip().lower(), text.strip().lower()) for text in licences})
    if known.issuperset(names):
        return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    slug = re.sub(r"[^a-z0-9.]+", "-", "-and-".join(names))[:80].strip("-.") or "see-the-card"
    return f"other\nlicense_name: {quoted(slug)}\nlicense_link: https://huggingface.co/datasets/{repo}#licence"


def _configs(shown: list[Section]) -> Iterable[str]:
    for at, s in enumerate(shown):
        yield f"- config_name: {quoted(s.name)}"
        yield f'  data_files: "manifests/{s.name}.parquet"'
        if at == 0 and len(shown) > 1:
            yield "  default: true"


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
    weights = in_bytes(s.nbytes) + (f", in {code(s.base_repo)}" if s.base else "")
    cells = (code(s.name), f"{s.count:,}", code(s.description.architecture), code(s.description.dataset),
             s.accuracy() or "not known", weights, ", ".join(s.dtypes()) or "none")  # fmt: skip
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
        yield f"{', '.join(cited)}:\n\n{fenced(text)}"
