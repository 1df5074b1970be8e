"""Audit of model repos across revisions: equal weights, foreign shards, missing tensors and steps, sizes that jump.

A revision costs one listing, a distinct file one header; no weights are read. What was listed is kept in the cache, so
an audit that was stopped goes on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from checkpoints_zoo.errors import UsageError, ZooError
from checkpoints_zoo.formats.layout import Shape, compare_shapes
from checkpoints_zoo.formats.shard_files import Header
from checkpoints_zoo.formats.text import count_with_noun, first_few
from checkpoints_zoo.publishing.auditing import PICKLE_SUFFIXES
from checkpoints_zoo.sources import revisions
from checkpoints_zoo.sources.revisions import ListedFile, Revision, WeightFile, epoch_of_name, is_ignored

SIZE_TOLERANCE = 0.01  # Share by which the sizes of a network's checkpoints may differ: their headers do.
FEWEST_EQUAL_STEPS = 3  # Number of equal distances between steps from which the others are expected to be equal.
LARGEST_SHOWN_COUNT = 5
_SHARD_COUNT = re.compile(r"-(\d+)-of-(\d+)\.")


@dataclass(frozen=True)
class RevisionFinding:
    """A fault of revisions.

    Args:
        kind: "same weights", "same shard", "foreign shard", "missing shard", "missing tensors", "missing steps",
            "size", "no weights" or "header".
        revisions: the revisions that have the fault, ORG/NAME@REVISION; of missing steps, the repo.
        text: sentence that describes the fault.
        compare: what to compare by hand.
    """

    kind: str
    revisions: tuple[str, ...]
    text: str
    compare: str

    def __str__(self) -> str:
        return f"{first_few(list(self.revisions), LARGEST_SHOWN_COUNT)}: {self.kind}: {self.text}"


@dataclass
class RevisionAudit:
    """The result of an audit across revisions.

    Args:
        repos, revisions: number of repos and of revisions that were listed.
        bytes: total size of the revisions' weights in bytes.
        contents: number of different files of weights.
        headers: number of headers that were read, of this run or an earlier one.
        findings: the faults.
        notes: what could not be checked.
    """

    repos: int
    revisions: int
    bytes: int
    contents: int
    headers: int
    findings: list[RevisionFinding] = field(default_factory=list)
    notes: list[RevisionFinding] = field(default_factory=list)

    @property
    def faulty_revisions(self) -> int:
        """Number of revisions with a fault."""
        return len({name for finding in self.findings for name in finding.revisions if "@" in name})


def audit_revisions(
    addresses: Sequence[str],
    revision_patterns: Sequence[str] = ("*",),
    epoch_rule: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> RevisionAudit:
    """Compare the revisions of model repos with each other, by listings and headers; return the faults.

    Args:
        addresses: hf://ORG/NAME; {1..9} and {a,b} are written out.
        revision_patterns: patterns of branches and tags, such as "step*".
        epoch_rule: the same argument as in `index_model_repos`.
        say: function called with lines of text on the progress.

    Raises:
        UsageError: an address is no model repo.
        SourceNotFound: a repo does not exist, or no revision matches.
        NetworkError, AccessError, StorageError: the Hub can't be read, or the disk is full.
    """
    commits = revisions.list_commits(addresses, revision_patterns)
    repo_count = len({repo_id for repo_id, _ in commits})
    say(f"{count_with_noun(len(commits), 'revision')} of {count_with_noun(repo_count, 'repo')}: listing …")
    listed = revisions.list_revisions(commits, "audit: listing")
    files = [WeightFile(revision.repo, file) for revision in listed for file in revision.weights]
    say(f"reading {count_with_noun(len({file.file.etag for file in files}), 'header')} …")
    headers = revisions.read_headers(files, "audit: headers")
    contents = {file.etag for revision in listed for file in _weights(revision)}
    nbytes = sum(file.size for revision in listed for file in _weights(revision))
    result = RevisionAudit(repo_count, len(listed), nbytes, len(contents), len(headers))
    revisions_of_repo: dict[str, list[Revision]] = {}
    for revision in listed:
        revisions_of_repo.setdefault(revision.repo.id, []).append(revision)
    result.findings += _equal_files(listed)
    for repo_revisions in revisions_of_repo.values():
        result.findings += _wrong_tensors(repo_revisions, headers)
        named = {name for finding in result.findings for name in finding.revisions if finding.kind != "same weights"}
        result.findings += [x for x in _jumping_sizes(repo_revisions) if not named & set(x.revisions)]
    result.findings += _missing_steps(revisions_of_repo, epoch_rule)
    for revision in listed:
        if not revision.weights and (pickles := _weights(revision)):
            text = f"{pickles[0].path}: a pickle, of which only hash and size were compared"
            result.notes.append(RevisionFinding("pickle", (str(revision),), text, ""))
    return result


def _weights(revision: Revision) -> list[ListedFile]:
    """Return a revision's files of weights: safetensors files, or pickles if it has none."""
    pickles = (path for path in sorted(revision.files) if path.endswith(PICKLE_SUFFIXES))
    return revision.weights or [revision.files[path] for path in pickles if path != "training_args.bin"]


def _file_address(revision: Revision, path: str) -> str:
    return f"hf://{revision.repo.id}@{revision.name}/{path}"


def _equal_files(listed: Sequence[Revision]) -> Iterator[RevisionFinding]:
    """Yield revisions that have the same weights, and shards that several checkpoints share."""
    revisions_of_weights: dict[tuple[str, ...], list[Revision]] = {}
    for revision in listed:
        etags = tuple(sorted(file.etag for file in _weights(revision)))
        if etags:
            revisions_of_weights.setdefault(etags, []).append(revision)
    for etags, revisions_with_main in revisions_of_weights.items():
        equal = [revision for revision in revisions_with_main if revision.name != "main"]  # main is the last step, too
        if len(equal) > 1:
            file = _weights(equal[0])[0]
            addresses = " and ".join(_file_address(revision, file.path) for revision in equal[:2])
            yield RevisionFinding(
                "same weights", tuple(map(str, equal)),
                f"{count_with_noun(len(equal), 'revision')} with the same "
                f"{'file' if len(etags) == 1 else f'{len(etags)} files'}, sha256 {file.etag[:16]}…",
                f"the sha256 of {addresses}, and the losses of both steps",
            )  # fmt: skip
    first_with_etag: dict[str, tuple[tuple[str, ...], Revision, str]] = {}
    for etags, (revision, *_) in revisions_of_weights.items():
        for file in _weights(revision):
            other = first_with_etag.setdefault(file.etag, (etags, revision, file.path))
            if other[0] != etags:
                is_foreign = other[1].repo.id != revision.repo.id
                yield RevisionFinding(
                    "foreign shard" if is_foreign else "same shard", (str(revision), str(other[1])),
                    f"{file.path} is {other[2]} of {other[1]}, while the other files differ",
                    f"the tensors of {_file_address(revision, file.path)} with those of the steps before and after",
                )  # fmt: skip


def _wrong_tensors(
    repo_revisions: Sequence[Revision], headers: Mapping[str, Header | ZooError]
) -> Iterator[RevisionFinding]:
    """Yield files of a repo's revisions whose tensors differ from those of most revisions."""
    shapes_of_file: dict[tuple[str, str], dict[str, Shape]] = {}
    for revision in repo_revisions:
        weights = revision.weights
        if not _weights(revision):
            yield RevisionFinding("no weights", (str(revision),), "no file of weights", f"the files of hf://{revision}")
        if counts := [match for file in weights if (match := _SHARD_COUNT.search(file.path))]:
            missing = set(range(1, int(counts[0][2]) + 1)) - {int(match[1]) for match in counts}
            if missing:
                text = f"no shard {', '.join(map(str, sorted(missing)))} of {int(counts[0][2])}"
                yield RevisionFinding("missing shard", (str(revision),), text, f"the files of hf://{revision}")
        for file in weights:
            header = headers[file.etag]
            if isinstance(header, ZooError):
                text = f"{file.path}: expected {header.expected}; found {header.found}"
                yield RevisionFinding(
                    "header", (str(revision),), text, f"the start of {_file_address(revision, file.path)}"
                )
            else:
                shapes_of_file[str(revision), file.path] = {
                    name: shape for name, (_, shape, *_) in header.tensors.items() if not is_ignored(name, shape)
                }
    usual_shapes: dict[str, dict[str, Shape]] = {}
    for path in {path for _, path in shapes_of_file}:
        found = Counter(tuple(sorted(x.items())) for (_, p), x in shapes_of_file.items() if p == path)
        usual_shapes[path] = dict(found.most_common(1)[0][0])
    for revision in repo_revisions:
        own = {path: x for (name, path), x in shapes_of_file.items() if name == str(revision)}
        all_names = {name for shapes in own.values() for name in shapes}
        for path, shapes in own.items():
            usual = usual_shapes[path]
            if shapes == usual:
                continue
            lacking = [name for name in usual if name not in all_names]
            is_subset = all(usual.get(name) == shape for name, shape in shapes.items())
            _, difference = compare_shapes(shapes, usual)
            others = [str(other) for other in repo_revisions if shapes_of_file.get((str(other), path)) == usual]
            compare = f"the header of {_file_address(revision, path)} with that of {others[0]}"
            kind = "missing tensors" if is_subset and lacking else "foreign shard"
            yield RevisionFinding(kind, (str(revision),), f"{path}: {difference}", compare)


def _jumping_sizes(repo_revisions: Sequence[Revision]) -> Iterator[RevisionFinding]:
    """Yield revisions of a repo whose weights are larger or smaller than those of most revisions."""
    sizes = {str(revision): sum(file.size for file in _weights(revision)) for revision in repo_revisions}
    usual = Counter(size for size in sizes.values() if size).most_common(1)
    for revision in repo_revisions:
        size = sizes[str(revision)]
        if usual and size and abs(size - usual[0][0]) > SIZE_TOLERANCE * usual[0][0]:
            text = f"{size:,} bytes of weights, where {usual[0][1]} of {len(sizes)} revisions have {usual[0][0]:,}"
            others = [name for name, other in sizes.items() if other == usual[0][0]]
            compare = f"the files and dtypes of hf://{revision} with those of hf://{others[0]}"
            yield RevisionFinding("size", (str(revision),), text, compare)


def _missing_steps(
    revisions_of_repo: Mapping[str, Sequence[Revision]], epoch_rule: str | None
) -> Iterator[RevisionFinding]:
    """Yield the steps that a repo lacks: by the distances of its own steps, and by the steps of most other repos."""
    steps_of_repo: dict[str, set[int]] = {}
    for repo_id, repo_revisions in revisions_of_repo.items():
        steps_of_repo[repo_id] = set()
        for revision in repo_revisions:
            try:
                steps_of_repo[repo_id].add(epoch_of_name(revision.name, epoch_rule))
            except UsageError as error:
                if error.thing == "--epoch-rule":
                    raise
                continue  # A branch such as main has no step.
    counts = Counter(step for steps in steps_of_repo.values() for step in steps)
    common = {step for step, count in counts.items() if len(steps_of_repo) > 1 and 2 * count > len(steps_of_repo)}
    for repo_id, steps in steps_of_repo.items():
        missing = sorted((set(expected_steps(steps)) | common) - steps)
        if missing:
            names = first_few([str(step) for step in missing], LARGEST_SHOWN_COUNT)
            text = f"no step {names}, among {len(steps):,} from {min(steps, default=0):,} to {max(steps, default=0):,}"
            yield RevisionFinding("missing steps", (repo_id,), text, f"the branches of hf://{repo_id} and its paper")


def expected_steps(steps: Iterable[int]) -> list[int]:
    """Return the steps that a series should have: powers of two in its first part, equal distances in its second.

    >>> expected_steps([0, 1, 2, 8, 16, 1000, 2000, 3000, 5000, 6000])
    [0, 1, 2, 4, 8, 16, 1000, 2000, 3000, 4000, 5000, 6000]
    """
    ordered = sorted(set(steps))
    distances = Counter(after - before for before, after in pairwise(ordered))
    expected = set(ordered)
    distance, count = max(distances.items(), key=lambda item: (item[1], item[0]), default=(0, 0))
    first_even = len(ordered)
    if count >= FEWEST_EQUAL_STEPS:
        first_even = next(i for i in range(len(ordered) - 1) if ordered[i + 1] - ordered[i] == distance)
        start = ordered[first_even]
        # The even part may begin with a gap: go down to the step before it.
        while first_even and start - distance > ordered[first_even - 1]:
            start -= distance
        if sum((step - start) % distance == 0 for step in ordered[first_even:]) * 2 > len(ordered) - first_even:
            expected |= set(range(start, ordered[-1], distance))
    powers = [step for step in ordered[:first_even] if step > 0]
    if len(powers) >= FEWEST_EQUAL_STEPS and all(step & (step - 1) == 0 for step in powers):
        expected |= {2**i for i in range(powers[0].bit_length() - 1, powers[-1].bit_length())}
    return sorted(expected)
