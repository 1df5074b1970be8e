"""Index of model repos: a member a repo, a snapshot a branch, read from listings and headers; no weights are fetched.

The manifest that is written names byte ranges of the repos' files (schema 2).

This is one file, because it is one sequence of steps: the checkpoints, their rows, the manifest.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import DamagedError, UsageError, ZooError
from checkpoints_zoo.formats import catalog, disk, manifest, row_checks
from checkpoints_zoo.formats.catalog import EPOCH_UNITS, Description
from checkpoints_zoo.formats.layout import Layout, compare_shapes
from checkpoints_zoo.formats.member_parts import Part, join_parts
from checkpoints_zoo.formats.shard_files import Header
from checkpoints_zoo.formats.text import count_with_noun, one_line
from checkpoints_zoo.interop.ingest.importing import Imported
from checkpoints_zoo.interop.ingest.origin import PICKLE_SUFFIXES, Say
from checkpoints_zoo.interop.ingest.survey import status_counts
from checkpoints_zoo.interop.ingest.user_facts import make_description
from checkpoints_zoo.networks.architectures import from_config_name
from checkpoints_zoo.sources import cache, rate_limits, revisions
from checkpoints_zoo.sources.folder_source import FolderSource
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.revisions import Revision, WeightFile

# Names that a tied output layer has; its weights are those of the input embedding.
TIED_NAMES = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")
# Keys of config.json that say how a checkpoint was saved, not which network it is.
SAVING_KEYS = ("_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "_commit_hash")
CONVERSION_ADVICE = (
    "a pickle can't be read by ranges: ask for safetensors at huggingface.co/spaces/safetensors/convert, or download "
    "it and give it to zoo-cli import --reshard OUT"
)
_MEMBER_NUMBER = re.compile(r"(?:seed|run|member|model|replica)[-_]?(\d+)$", re.IGNORECASE)
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
LARGEST_CONFIG_NBYTES = 2**20
LATENCY_SECONDS = 0.05  # expected time of a request, in each of the threads that list


@dataclass(frozen=True)
class IndexPlan:
    """The plan of an index of model repos.

    Args:
        collection, target: name of the collection, and folder that its manifest is written to.
        repos, snapshots: number of repos, and of their revisions that match.
        listings, headers: number of requests that list files, and that read a header (a shard more takes one more).
            What the cache has is not asked for again.
        minutes: time that these requests take inside the Hub's windows, about.
    """

    collection: str
    target: str
    repos: int
    snapshots: int
    listings: int
    headers: int
    minutes: float

    def __str__(self) -> str:
        requests = f"{count_with_noun(self.listings, 'listing')} and {count_with_noun(self.headers, 'header')}"
        return (
            f"{count_with_noun(self.snapshots, 'snapshot')} of {count_with_noun(self.repos, 'repo')}: {requests}, "
            f"about {self.minutes:.3g} minutes"
        )


def index_model_repos(
    addresses: Sequence[str],
    name: str,
    out: str | Path,
    *,
    revision_patterns: Sequence[str] = (),
    epoch_rule: str | None = None,
    epoch_unit: str | None = None,
    user_facts: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    say: Say = lambda text: None,
) -> Imported | IndexPlan:
    """Index the revisions of model repos as a collection, and write its manifest; return the result, or the plan in a
    dry run.

    Each repo is a member, each revision a snapshot. An index that was stopped goes on: what was listed is kept.

    Args:
        addresses: hf://ORG/NAME[@REVISION]; {1..9} and {a,b} are written out.
        name: name of the collection.
        out: folder that the manifest is written to.
        revision_patterns: patterns of branches and tags ("step*"); () for the addresses' revisions.
        epoch_rule: regular expression whose first group is the epoch in a revision's name; None for the number after
            "step", "epoch", "checkpoint" or "iter", or the only number.
        epoch_unit: unit of the epochs, "epoch" or "step"; None for "epoch" if the names have this word, else "step".
        user_facts: the collection's title, dataset, licence and citation.
        dry_run: whether only the branches are listed, and nothing is written.
        say: function called with lines of text on the progress.

    Raises:
        UsageError: an address is no model repo, or a revision's name has no epoch.
        SourceNotFound: a repo does not exist, or no revision matches.
        LayoutError, DamagedError: no revision has weights that can be indexed.
        NetworkError, AccessError, StorageError: the Hub can't be read, or the disk is full.
    """
    name, root = catalog.check_name(name), Path(out).expanduser().absolute()
    if epoch_unit is not None and epoch_unit not in EPOCH_UNITS:
        raise UsageError("epoch unit", expected=" or ".join(EPOCH_UNITS), found=repr(epoch_unit)[:80])
    commits = revisions.list_commits(addresses, revision_patterns)
    epochs = {key: revisions.epoch_of_name(key[1], epoch_rule) for key in commits}
    repo_ids = list(dict.fromkeys(repo_id for repo_id, _ in commits))
    members = dict(zip(repo_ids, number_members(repo_ids), strict=True))
    _check_epochs(commits, epochs)
    plan = _plan(commits, name, str(root))
    say(str(plan))
    if dry_run:
        return plan
    listed = revisions.list_revisions(commits, f"{name}: listing")
    headers = revisions.read_headers(
        [WeightFile(revision.repo, file) for revision in listed for file in revision.weights], f"{name}: headers"
    )
    checkpoints = [_Checkpoint.of(revision, headers) for revision in listed]
    config = _read_config(listed, say)
    rows, layouts = _rows_and_layouts(checkpoints, list(commits), members, epochs, config)
    net_facts = {"architecture": _architecture(config), "arguments": _arguments(config)}
    facts = dict(user_facts or {})
    if name not in catalog.collections():
        facts.setdefault("title", f"{count_with_noun(len(repo_ids), 'model repo')}, such as {repo_ids[0]}")
    unit = epoch_unit or ("epoch" if all("epoch" in revision for _, revision in commits) else "step")
    description = replace(make_description(name, net_facts, layouts, facts, None), epoch_unit=unit)
    _write(FolderSource(root, root.as_uri()), description, rows)
    counts = status_counts(rows)
    for status in ("excluded", "failed"):
        reasons = Counter(row["reason"] for row in rows if row["status"] == status)
        for reason, count in reasons.most_common(3):
            say(f"{count_with_noun(count, 'snapshot')} {status}: {reason}")
    manifest_path = FolderSource(root, root.as_uri()).manifest_path(name)
    return Imported(name, manifest_path, len(rows), **counts, hashed=0, measured=0)


def number_members(repo_ids: Sequence[str]) -> list[int]:
    """Number the members; return the numbers after "seed" or "run" at the ends of the repos' names if all have such a
    number of their own, else 0, 1, 2, …

    >>> number_members(["org/net-seed3", "org/net-seed1"]), number_members(["org/net", "org/net-seed1"])
    ([3, 1], [0, 1])
    """
    matches = [_MEMBER_NUMBER.search(repo_id) for repo_id in repo_ids]
    numbers = [int(match[1]) for match in matches if match is not None]
    fits = len(set(numbers)) == len(repo_ids) and max(numbers) < 2**30
    return numbers if fits else list(range(len(repo_ids)))


def _check_epochs(commits: Mapping[tuple[str, str], str], epochs: Mapping[tuple[str, str], int]) -> None:
    first_with_epoch: dict[tuple[str, int], str] = {}
    for (repo_id, name), epoch in epochs.items():
        if not 0 <= epoch < 2**31:
            raise UsageError(f"revision {name!r} of {repo_id}", expected="an epoch below 2³¹", found=f"{epoch:,}")
        other = first_with_epoch.setdefault((repo_id, epoch), name)
        if other != name:
            raise UsageError(
                f"revisions of {repo_id}", expected="each epoch once", found=f"{other!r} and {name!r}, both {epoch:,}",
                do="Give --revisions that match one of them, or --epoch-rule",
            )  # fmt: skip


def _plan(commits: Mapping[tuple[str, str], str], name: str, target: str) -> IndexPlan:
    """Return the plan for revisions whose commits are known."""
    repos = {repo_id for repo_id, _ in commits}
    places = [(name, Repo(repo_id, commit, "model")) for (repo_id, name), commit in commits.items()]
    listed = [revisions.list_revision(name, repo) for name, repo in places if revisions.is_listed(repo)]
    listings = len(places) - len(listed)
    files = [WeightFile(revision.repo, file) for revision in listed for file in revision.weights]
    # A content is read once; how many a revision has is known after its listing.
    known = {file.file.etag for file in files if file.is_known()}
    headers = len({file.file.etag for file in files} - known) + listings
    waits = rate_limits.expected_seconds(listings, "api") + rate_limits.expected_seconds(headers, "resolvers")
    seconds = waits + (listings + 2 * headers) * LATENCY_SECONDS
    return IndexPlan(name, target, len(repos), len(commits), listings, headers, round(seconds / 60, 3))


@dataclass(frozen=True)
class _Checkpoint:
    """A revision's checkpoint: its tensors and the parts that hold them, or the reason why it has none.

    Args:
        tensors: (name, dtype, shape) of each tensor of the network, in the order of their bytes.
        ranges: range of each of these tensors.
        status, reason: "ok" and "", or the status and reason of a row without weights.
    """

    revision: Revision
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    ranges: tuple[Part, ...] = ()
    status: str = "ok"
    reason: str = ""

    @classmethod
    def of(cls, revision: Revision, headers: Mapping[str, Header | ZooError]) -> _Checkpoint:
        """Return the checkpoint of a revision from the headers of its files (ETag -> header)."""
        files = revision.weights
        if not files:
            pickles = [path for path in revision.files if path.endswith(PICKLE_SUFFIXES)]
            if pickles:
                return cls(revision, status="excluded", reason=f"{pickles[0]}: {CONVERSION_ADVICE}")
            return cls(revision, status="failed", reason="no safetensors file")
        numbers = [(int(m[1]), int(m[2])) for file in files if (m := _SHARD.fullmatch(file.path))]
        if numbers and {n for n, _ in numbers} != set(range(1, max(count for _, count in numbers) + 1)):
            return cls(revision, status="failed", reason=f"{len(numbers)} of {numbers[0][1]} shards")
        tensors: dict[str, tuple[str, tuple[int, ...], Part]] = {}
        for file in files:
            header = headers[file.etag]
            if isinstance(header, ZooError):
                reason = f"{file.path}: expected {header.expected}; found {header.found}"
                return cls(revision, status="failed", reason=one_line(reason, 200))
            path = f"{revision.repo}/{file.path}"
            for tensor, (dtype, shape, start, end) in header.tensors.items():
                if tensor in tensors:
                    return cls(revision, status="failed", reason=one_line(f"tensor {tensor} in two files", 200))
                if not revisions.is_ignored(tensor, shape):
                    part = Part(path, header.data_start + start, end - start, file.etag)
                    tensors[tensor] = dtype, shape, part
        if not any(math.prod(shape) for _, shape, _ in tensors.values()):
            return cls(revision, status="failed", reason="no tensors")
        return cls(
            revision,
            tuple((tensor, dtype, shape) for tensor, (dtype, shape, _) in tensors.items()),
            tuple(part for *_, part in tensors.values()),
        )

    def without(self, names: set[str]) -> _Checkpoint:
        """Return the checkpoint without some tensors."""
        kept = [i for i, (name, *_) in enumerate(self.tensors) if name not in names]
        return replace(self, tensors=tuple(self.tensors[i] for i in kept), ranges=tuple(self.ranges[i] for i in kept))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, _, shape in self.tensors}


def _rows_and_layouts(
    checkpoints: Sequence[_Checkpoint],
    keys: Sequence[tuple[str, str]],
    members: Mapping[str, int],
    epochs: Mapping[tuple[str, str], int],
    config: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], dict[str, Layout]]:
    """Return the rows of checkpoints, and their layouts. The network is the most common one by names and shapes."""
    if config.get("tie_word_embeddings"):
        checkpoints = [checkpoint.without(_tied(checkpoint.shapes)) for checkpoint in checkpoints]
    found = Counter(tuple(sorted(x.shapes.items())) for x in checkpoints if x.status == "ok")
    if not found:
        reasons = Counter(x.reason for x in checkpoints)
        raise DamagedError(
            f"{count_with_noun(len(checkpoints), 'revision')} of {checkpoints[0].revision.repo.id}",
            expected="safetensors files", found=f"none: {reasons.most_common(1)[0][0]}",
        )  # fmt: skip
    network = dict(found.most_common(1)[0][0])
    final_epoch_of_repo: dict[str, int] = {}
    for (repo_id, _), checkpoint in zip(keys, checkpoints, strict=True):
        if checkpoint.status == "ok" and checkpoint.shapes == network:
            epoch = epochs[checkpoint.revision.repo.id, checkpoint.revision.name]
            final_epoch_of_repo[repo_id] = max(epoch, final_epoch_of_repo.get(repo_id, 0))
    layout_keys: dict[tuple[Any, ...], str] = {}
    layouts: dict[str, Layout] = {}
    rows = []
    for (repo_id, name), checkpoint in zip(keys, checkpoints, strict=True):
        epoch = epochs[repo_id, name]
        row: dict[str, Any] = {
            "member": members[repo_id], "epoch": epoch, "final": final_epoch_of_repo.get(repo_id) == epoch,
            "status": checkpoint.status, "reason": checkpoint.reason or None,
        }  # fmt: skip
        if re.search(r"seed[-_]?\d+$", repo_id, re.IGNORECASE):
            row["seed"] = int(re.findall(r"\d+", repo_id)[-1])
        if checkpoint.status == "ok" and checkpoint.shapes != network:
            _, difference = compare_shapes(checkpoint.shapes, network)
            row |= {"status": "excluded", "reason": one_line(f"tensors of another network: {difference}", 500)}
        elif checkpoint.status == "ok":
            key = layout_keys.setdefault(checkpoint.tensors, f"layout-{len(layout_keys)}" if layout_keys else "main")
            if key not in layouts:
                stored = ((n, dtype, shape, n, shape) for n, dtype, shape in checkpoint.tensors)
                layouts[key] = Layout.of_stored(stored, (), 0)
            parts = join_parts([part for part in checkpoint.ranges if part.nbytes])
            row |= {
                "path": parts[0].path, "offset": parts[0].offset, "nbytes": layouts[key].nbytes, "layout": key,
                "dtype": layouts[key].dtype, "parts": [part.to_row() for part in parts],
            }  # fmt: skip
        rows.append(row)
    return rows, layouts


def _tied(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the stored names of an output layer that is tied to another tensor of the same shape."""
    return {
        name
        for name in TIED_NAMES
        if name in shapes and any(other != name and shape == shapes[name] for other, shape in shapes.items())
    }


def _read_config(listed: Sequence[Revision], say: Say) -> dict[str, Any]:
    """Read the config.json that most revisions have, each content once; return it, {} if there is none."""
    files = [(revision, revision.files["config.json"]) for revision in listed if "config.json" in revision.files]
    contents = Counter(file.etag for _, file in files if file.size <= LARGEST_CONFIG_NBYTES)
    if not contents:
        return {}
    etag = contents.most_common(1)[0][0]
    revision = next(revision for revision, file in files if file.etag == etag)
    values = revisions.read_json_file(revision.repo, "config.json")
    if len(contents) > 1:
        count = len(files) - contents[etag]
        say(f"config.json of {revision} is taken; {count_with_noun(count, 'revision')} have another text of it")
    return values if isinstance(values, dict) else {}


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    return from_config_name(name) if re.fullmatch(r"\w{1,100}", name, re.ASCII) else "unknown"


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in SAVING_KEYS}


def _write(target: FolderSource, description: Description, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write description and manifest; hashes that an earlier manifest has for the same parts stay.

    Raises:
        UsageError: the folder has another collection of this name.
    """
    name = description.name
    with (
        disk.translate_write_errors(target.root),
        cache.hold_key_lock(cache.writable_folder("local/copies"), str(target.root.resolve() / name)),
    ):
        if target.manifest_path(name).is_file():
            earlier = {(row["member"], row["epoch"]): row for row in target.read_collection(name)[1].to_pylist()}
            lost = earlier.keys() - {(row["member"], row["epoch"]) for row in rows}
            if lost or any(row.get("path") and not row.get("parts") for row in earlier.values()):
                raise UsageError(
                    f"manifest {target.manifest_path(name)}",
                    expected="snapshots that are indexed again, or no manifest of that name",
                    found=f"{len(lost):,} others" if lost else "members that lie in the folder",
                    do="Give the collection another name or folder, or delete the manifest",
                    collection=name,
                )  # fmt: skip
            rows = [
                {**row, "sha256": old["sha256"]}
                if (old := earlier.get((row["member"], row["epoch"]))) and old.get("parts") == row.get("parts")
                else row
                for row in rows
            ]
        table = manifest.build_manifest(rows)
        # What JSON can't hold is refused before anything is written.
        description = Description.from_json(
            json.loads(json.dumps(description.to_json())), target.description_path(name)
        )
        row_checks.check_rows(table, description, target.manifest_path(name))
        catalog.write_json(description.to_json(), target.description_path(name))
        manifest.write_manifest(table, target.manifest_path(name))
