"""Revisions of model repos: their commits, files and headers, by one small request each, paced and kept in the cache.

A commit's files and a file's header never change, so each is asked for once: what was stopped goes on.

This is one file, because all of its requests share the pace and the cache.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from checkpoints_zoo.errors import DamagedError, SourceNotFound, UsageError, ZooError
from checkpoints_zoo.formats import catalog, disk, source_paths
from checkpoints_zoo.formats.member_parts import is_etag
from checkpoints_zoo.formats.progress import progress
from checkpoints_zoo.formats.shard_files import Header, guess_kind, header_length, parse_header
from checkpoints_zoo.formats.text import first_few
from checkpoints_zoo.sources import cache, hub, hub_addresses, hub_errors
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.hub_ranges import RemoteFile
from checkpoints_zoo.sources.rate_limits import Pace

FIRST_HEADER_NBYTES = 64 * 2**10  # Number of bytes that are read of a repo's first header.
THREADS = 8
LARGEST_REPO_COUNT = 1000
INDEX_SUFFIX = ".safetensors.index.json"  # of the file that names the shards of a sharded checkpoint
# Buffers that old versions of transformers stored and no network needs: pattern of the name, numbers of axes.
IGNORED_TENSORS = (
    ("*attention.bias", (4,)),
    ("*attn.bias", (4,)),
    ("*masked_bias", (0,)),
    ("*rotary_emb.inv_freq", (1,)),
    ("*position_ids", (2,)),
)
_STEP_NUMBER = re.compile(r"(?:step|epoch|iter(?:ation)?|checkpoint|ckpt)[-_ ]?(\d+)([km]?)(?![a-z0-9])", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)([km]?)(?![a-z0-9])", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1000, "m": 10**6}
_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBER_RANGE = re.compile(r"(\d+)\.\.(\d+)")

API, RESOLVERS = Pace("api"), Pace("resolvers")

J = TypeVar("J")
T = TypeVar("T")


@dataclass(frozen=True)
class ListedFile:
    """A file of a commit: its path, its size in bytes, and its ETag (the sha256 of a large file, git's sha1 of a small
    one)."""

    path: str
    size: int
    etag: str


@dataclass(frozen=True)
class Revision:
    """A branch or tag of a model repo, at the commit that it had when it was listed.

    Args:
        name: name of the branch or tag.
        repo: the repo at the commit.
        files: path -> file, of the files at the top of the repo.
    """

    name: str
    repo: Repo
    files: Mapping[str, ListedFile]

    @property
    def weights(self) -> list[ListedFile]:
        """The safetensors files of the checkpoint, in the order of their names: `model.safetensors`, or the shards of
        its index file if there are several checkpoints."""
        paths = sorted(path for path in self.files if path.endswith(".safetensors"))
        if "model.safetensors" in paths:
            paths = ["model.safetensors"]
        elif f"model{INDEX_SUFFIX}" in self.files:
            paths = [path for path in paths if re.fullmatch(r"model-\d+-of-\d+\.safetensors", path)]
        return [self.files[path] for path in paths]

    def __str__(self) -> str:
        return f"{self.repo.id}@{self.name}"


def expand_braces(address: str) -> list[str]:
    """Write out the braces of an address, as a shell does: {1..9} is 1 to 9, {a,b} is a and b.

    >>> expand_braces("hf://org/net-{70m,160m}-seed{1..2}")
    ['hf://org/net-70m-seed1', 'hf://org/net-70m-seed2', 'hf://org/net-160m-seed1', 'hf://org/net-160m-seed2']

    Raises:
        UsageError: there are too many addresses.
    """
    addresses = [address]
    while match := _BRACES.search(addresses[0]):
        if numbers := _NUMBER_RANGE.fullmatch(match[1]):
            first, last = int(numbers[1]), int(numbers[2])
            choices = [str(n) for n in range(first, min(last, first + LARGEST_REPO_COUNT) + 1)]
        else:
            choices = match[1].split(",")
        addresses = [_BRACES.sub(choice, a, count=1) for a in addresses for choice in choices]
        if not 0 < len(addresses) <= LARGEST_REPO_COUNT:
            raise UsageError(
                f"address {address[:120]}", expected=f"1 to {LARGEST_REPO_COUNT:,} repos", found=f"{len(addresses):,}"
            )
    return addresses


def parse_model_address(address: str) -> tuple[str, str] | None:
    """Parse the address of a model repo; return its id and revision ("" if it has none), or None for the address of
    anything else.

    >>> parse_model_address("hf://org/net@step10"), parse_model_address("hf://datasets/org/zoo")
    (('org/net', 'step10'), None)
    """
    from huggingface_hub.errors import HfUriError, HFValidationError
    from huggingface_hub.utils import parse_hf_uri, validate_repo_id  # type: ignore[attr-defined]

    if not address.startswith(hub_addresses.ADDRESS_SCHEME):
        return None
    try:
        uri = parse_hf_uri(address)
        validate_repo_id(uri.id)
    except (HfUriError, HFValidationError):
        return None
    if uri.type != "model" or uri.path_in_repo or uri.id.count("/") != 1:
        return None
    return uri.id, uri.revision or ""


def list_refs(repo_id: str, patterns: Sequence[str]) -> dict[str, str]:
    """List the branches and tags of a model repo that match one of some patterns, by one request; return name ->
    commit, in the order of the numbers in the names.

    Raises:
        SourceNotFound: the repo does not exist, or no branch or tag matches.
        AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
    """
    from huggingface_hub import HfApi

    label = hub_addresses.repo_label(repo_id, "model")
    subject = f"branches of {label}"
    API.wait()
    with hub_errors.translated_errors(label, subject), hub_errors.malformed_answers(subject):
        refs = hub.retry_patiently(
            lambda: HfApi(**hub.client_info()).list_repo_refs(repo_id, repo_type="model"), hub.RETRIED_STATUSES
        )
        commit_of_name = {ref.name: ref.target_commit for ref in [*refs.tags, *refs.branches]}
    names = [name for name in commit_of_name if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for name in names:
        if not re.fullmatch("[0-9a-f]{40}", commit_of_name[name]):
            raise DamagedError(subject, expected="a commit of 40 hex digits", found=repr(commit_of_name[name])[:80])
    if not names:
        raise SourceNotFound(
            subject,
            expected=f"one that matches {first_few(list(patterns), 3)}",
            found=f"{len(commit_of_name):,} others ({first_few(sorted(commit_of_name), 3)})",
            do="Give --revisions GLOB, such as 'step*'",
        )
    return {name: commit_of_name[name] for name in sorted(names, key=_numeric_order)}


def list_commits(addresses: Sequence[str], revision_patterns: Sequence[str]) -> dict[tuple[str, str], str]:
    """List the revisions of model repos that match patterns, by one request a repo; return (repo id, revision) ->
    commit.

    Raises:
        UsageError: an address is no model repo, or names a revision beside patterns.
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `list_refs`.
    """
    patterns_of_repo: dict[str, list[str]] = {}
    for address in (a for text in addresses for a in expand_braces(text)):
        parsed = parse_model_address(address)
        if parsed is None:
            raise UsageError(
                f"source {address[:200]}", expected="model repos alone, hf://ORG/NAME", found="another source",
                do="Import other sources as a collection of their own",
            )  # fmt: skip
        repo_id, revision = parsed
        if revision and revision_patterns:
            raise UsageError(f"source {address[:200]}", expected="a revision, or --revisions", found="both")
        patterns_of_repo.setdefault(repo_id, []).extend(revision_patterns or [revision or "main"])
    return {
        (repo_id, name): commit
        for repo_id, patterns in patterns_of_repo.items()
        for name, commit in list_refs(repo_id, patterns).items()
    }


def epoch_of_name(revision: str, rule: str | None = None) -> int:
    """Read the epoch from the name of a branch or tag; return it.

    >>> epoch_of_name("step143000"), epoch_of_name("step_20k"), epoch_of_name("run2-x40", r"x(\\d+)")
    (143000, 20000, 40)

    Raises:
        UsageError: the name has no number, or several and none after a word such as "step"; or the rule does not fit.
    """
    if rule is not None:
        try:
            match = re.search(rule, revision)
            number = int(match[1]) if match else None
        except (re.error, IndexError, ValueError, TypeError) as error:
            raise UsageError(
                "--epoch-rule", expected=r"a pattern with a group, such as 'step(\d+)'", found=str(error)
            ) from error
        matches = [] if number is None else [(str(number), "")]
    else:
        # Without such a word, the name must have one number alone.
        numbers = [(digits, "") for digits in re.findall(r"\d+", revision)]
        matches = _STEP_NUMBER.findall(revision)[:1] or (_NUMBER.findall(revision) if len(numbers) == 1 else numbers)
    if len(matches) != 1:
        raise UsageError(
            f"revision {revision[:80]!r}",
            expected="one number in its name, or one after step, epoch, checkpoint or iter",
            found="none" if not matches else first_few([digits for digits, _ in matches], 5),
            do=r"Give --epoch-rule, a pattern whose group is the number ('-s(\d+)'), or another --revisions",
        )
    return int(matches[0][0]) * _FACTORS[matches[0][1].lower()]


def _numeric_order(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d{1,18}", name)], name


def is_listed(repo: Repo) -> bool:
    """Say whether the files of a commit are known, so that listing them makes no request."""
    return _load(repo, "trees", repo.commit) is not None


def list_revision(name: str, repo: Repo) -> Revision:
    """List the files at the top of a commit, by one request, or none if they are known; return the revision.

    Raises:
        DamagedError: a file has an impossible path, size or hash.
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    rows = _load(repo, "trees", repo.commit)
    if rows is None:
        subject = f"files of {repo}"
        with hub_errors.translated_errors(repo.label, subject), hub_errors.malformed_answers(subject):
            entries = hub.retry_patiently(
                lambda: list(
                    HfApi(**hub.client_info()).list_repo_tree(repo.id, revision=repo.commit, repo_type="model")
                ),
                hub.RETRIED_STATUSES,
            )
            rows = [
                [entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id]
                for entry in entries
                if isinstance(entry, RepoFile)
            ]
        _check_files(rows, subject)
        _save(repo, "trees", repo.commit, rows)
    return Revision(name, repo, {row[0]: ListedFile(*row) for row in rows})


def _check_files(rows: Any, subject: str) -> None:
    for path, size, etag in rows:
        if not (type(path) is type(etag) is str and type(size) is int and size >= 0 and is_etag(etag)):
            raise DamagedError(subject, expected="a path, a size and a hash of each file", found=repr(path)[:80])
        if problem := source_paths.path_refusal(path):
            raise DamagedError(f"path {path[:200]!r} of {subject}", expected="a file inside the repo", found=problem)


def is_ignored(tensor: str, shape: tuple[int, ...]) -> bool:
    """Say whether a tensor is a buffer that no network needs.

    >>> is_ignored("gpt_neox.layers.0.attention.bias", (1, 1, 2048, 2048)), is_ignored("x.attention.bias", (512,))
    (True, False)
    """
    return any(fnmatchcase(tensor, pattern) and len(shape) in axes for pattern, axes in IGNORED_TENSORS)


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file of a model repo: the repo at its commit, and the file."""

    repo: Repo
    file: ListedFile

    @property
    def subject(self) -> str:
        return f"file {self.file.path} of {self.repo}"

    def is_known(self) -> bool:
        """Say whether the file's header is known, so that reading it makes no request."""
        return self._stored() is not None

    def read_header(self, guess_nbytes: int = FIRST_HEADER_NBYTES) -> Header:
        """Read and check the header of the file, by one request and one range, or none if it is known; return it.

        Args:
            guess_nbytes: number of bytes that the header may have; a longer header takes a second range.

        Raises:
            DamagedError: the file has no valid header, or another hash than was listed.
            SourceNotFound, AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
        """
        prefix = self._stored()
        if prefix is None:
            remote = RemoteFile.of(self.repo, self.file.path)
            if (remote.etag, remote.size) != (self.file.etag, self.file.size):
                raise DamagedError(
                    self.subject, expected=f"ETag {self.file.etag[:16]}, as listed", found=remote.etag[:16],
                    do="A commit's files never change: tell the mirror's owner", path=self.file.path,
                )  # fmt: skip
            prefix = remote.bytes_at(0, guess_nbytes)
            if not guess_kind(prefix):
                length = 8 + header_length(prefix, self.file.size, self.subject)
                if length > len(prefix):
                    prefix += remote.bytes_at(len(prefix), length - len(prefix))
                prefix = prefix[:length]
            header = parse_header(prefix, self.file.size, self.subject)
            self._store(prefix)
            return header
        return parse_header(prefix, self.file.size, self.subject)

    def _stored(self) -> bytes | None:
        """Return the header's bytes from the cache; None if they are not there. Equal headers are stored once."""
        digest = _load(self.repo, "headers", self.file.etag)
        for folder in cache.cache_folders(self.repo.cache_name) if isinstance(digest, str) and is_etag(digest) else ():
            path = folder / "headers" / f"{digest}.head"
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() == digest:
                return content
        return None

    def _store(self, prefix: bytes) -> None:
        digest, folder = hashlib.sha256(prefix).hexdigest(), cache.writable_folder(self.repo.cache_name)
        try:
            if not (folder / "headers" / f"{digest}.head").is_file():
                with disk.replace_file(folder / "headers" / f"{digest}.head", "wb") as file:
                    file.write(prefix)
        except OSError as error:
            raise disk.disk_full_error(folder, error) from error
        _save(self.repo, "headers", self.file.etag, digest)


def read_headers(files: Iterable[WeightFile], title: str) -> dict[str, Header | ZooError]:
    """Read the headers of files, some at a time, each content once; return ETag -> header, or the error of a file that
    is no safetensors file.

    Args:
        files: the files.
        title: title of the progress bar.

    Raises:
        AccessError, NetworkError, SourceNotFound, StorageError: the repos can't be read.
    """
    file_of_etag: dict[str, WeightFile] = {}
    for file in files:
        file_of_etag.setdefault(file.file.etag, file)
    largest_of_repo: dict[str, int] = {}

    def read(file: WeightFile) -> Header | ZooError:
        guess = largest_of_repo.get(file.repo.id) or max(largest_of_repo.values(), default=FIRST_HEADER_NBYTES)
        try:
            header = file.read_header(guess)
        except DamagedError as error:
            return error
        # Headers of one repo have nearly the same length; some offsets have a digit more.
        largest_of_repo[file.repo.id] = max(largest_of_repo.get(file.repo.id, 0), header.data_start + 512)
        return header

    # The first header is read alone, since its length is a good guess for the others.
    etags = list(file_of_etag)
    first, others = ({etag: file_of_etag[etag] for etag in part} for part in (etags[:1], etags[1:]))
    headers = _paced(read, first, lambda file: not file.is_known(), RESOLVERS, title, "headers")
    return headers | _paced(read, others, lambda file: not file.is_known(), RESOLVERS, title, "headers")


def _paced(
    function: Callable[[J], T],
    jobs: Mapping[str, J],
    makes_request: Callable[[J], bool],
    pace: Pace,
    title: str,
    unit: str,
) -> dict[str, T]:
    """Call a function with each job, some at a time, at the pace of the Hub; return key -> result.

    Args:
        function: function of a job that makes at most one request of the pace's kind.
        jobs: key -> job.
        makes_request: function that says whether a job makes a request, or finds its result in the cache.
        pace: the pace of the requests. The calling thread waits, so that it can be interrupted.
        title, unit: title of the progress bar, and what it counts.
    """
    results, running = dict[str, T](), deque[tuple[str, Future[T]]]()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="zoo-list") as pool:
        try:
            for key, job in progress(jobs.items(), len(jobs), title, unit):
                if makes_request(job):
                    pace.wait()
                running.append((key, pool.submit(function, job)))
                if len(running) > 2 * THREADS:
                    first_key, first = running.popleft()
                    results[first_key] = first.result()
            results |= {key: future.result() for key, future in running}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def list_revisions(commits: Mapping[tuple[str, str], str], title: str) -> list[Revision]:
    """List the files of revisions, some at a time, inside the Hub's window; return the revisions in order.

    Args:
        commits: (repo id, name of the branch or tag) -> commit.
        title: title of the progress bar.
    """
    jobs = {f"{repo_id}@{name}": (name, Repo(repo_id, commit, "model")) for (repo_id, name), commit in commits.items()}
    listed = _paced(lambda job: list_revision(*job), jobs, lambda job: not is_listed(job[1]), API, title, "revisions")
    return list(listed.values())


def read_json_file(repo: Repo, path: str) -> Any:
    """Fetch a small JSON file of a repo through the cache of the Hub's client; return its values.

    Raises:
        FormatError: the file is not JSON, or is larger than a description may be.
        SourceNotFound, AccessError, NetworkError, DamagedError: for the same reasons as in `hub.fetch_file`.
    """
    RESOLVERS.wait()
    return catalog.read_json(hub.fetch_file(repo, path))


def _load(repo: Repo, folder_name: str, key: str) -> Any:
    """Return JSON values from the cache; None if they are missing or damaged."""
    for folder in cache.cache_folders(repo.cache_name):
        try:
            return json.loads((folder / folder_name / f"{cache.etag_name(key)}.json").read_bytes())
        except (OSError, ValueError):
            continue
    return None


def _save(repo: Repo, folder_name: str, key: str, values: Any) -> None:
    folder: Path = cache.writable_folder(repo.cache_name)
    try:
        with disk.replace_file(folder / folder_name / f"{cache.etag_name(key)}.json") as file:
            file.write(json.dumps(values))
    except OSError as error:
        raise disk.disk_full_error(folder, error) from error
