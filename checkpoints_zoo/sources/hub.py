"""Access to the Hub: resolve addresses to commits, get files, and translate the errors of the Hub's client into ours.

All calls after `resolve_address` name the commit, so a running program does not see newer commits. The client's own
settings apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS. The client is imported
inside functions, because importing it takes half a second.

This is one file, because every call to the client needs its settings, its cache and the translation of its errors.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from checkpoints_zoo.errors import (
    AccessError,
    DamagedError,
    NetworkError,
    SourceNotFound,
    StorageError,
    UsageError,
    ZooError,
)
from checkpoints_zoo.formats import disk, limits, manifest
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources import hosts
from checkpoints_zoo.sources.hash_records import HashRecord, delete_file

LIBRARY_NAME = "checkpoints_zoo"
CONNECTION_SECONDS = 10
LARGE_NBYTES = 4 * 2**20  # Number of bytes from which a manifest is read by ranges.
ADDRESS_SCHEME = "hf://"
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
READ_ONLY_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)

TRY_AGAIN_ADVICE = "Try again: what has arrived is kept"
PROXY_ADVICE = "Check HF_ENDPOINT, and proxies on the way"
DAMAGED_COPY_ADVICE = "The damaged copy in the cache stays, but is not used: unset HF_HUB_OFFLINE to get it again"
LOGIN_ADVICE = "log in with `hf auth login` or set HF_TOKEN"

T = TypeVar("T")

_COMMIT = re.compile("[0-9a-f]{40}")
_ETAG = re.compile('(?:W/)?"?[A-Za-z0-9_+=-][A-Za-z0-9_.+=-]{0,127}"?')
_fallback_folders: list[Path] = []
_reached_addresses: set[str] = set()
_late_settings: set[str] = set()  # settings for which a warning was shown
# Number of bytes from which `fetch_small_file` does not fetch a file; None while other functions fetch files.
_large_nbytes: ContextVar[int | None] = ContextVar("_large_nbytes", default=None)


@dataclass(frozen=True)
class Repo:
    """A repo on the Hub, at one commit.

    Args:
        id: "org/name".
        commit: hash of the commit, 40 hex digits.
        kind: "dataset" or "model", as the Hub's client spells it.
    """

    id: str
    commit: str
    kind: str = "dataset"

    @property
    def label(self) -> str:
        return repo_label(self.id, self.kind)

    @property
    def cache_name(self) -> str:
        """Name of the repo in our cache: "org/name" of a data set, "models/org/name" of a model."""
        return self.id if self.kind == "dataset" else f"{self.kind}s/{self.id}"

    def __str__(self) -> str:
        return f"{self.label}@{self.commit}"


def repo_label(repo_id: str, kind: str) -> str:
    """Return the address of a repo: hf://datasets/ORG/NAME of a data set, hf://ORG/NAME of a model."""
    return f"{ADDRESS_SCHEME}{'datasets/' if kind == 'dataset' else ''}{repo_id}"


def resolve_address(address: str) -> Repo:
    """Find the commit that an address refers to; return the repo at this commit. In offline mode, the address refers to
    the commit that this machine last found for it.

    Args:
        address: `hf://datasets/org/name[@revision]`; the revision is a branch, tag or commit, by default main.

    Raises:
        SourceNotFound: the address is malformed, or the repo or the revision does not exist.
        AccessError: the user's login may not read the repo.
        NetworkError: the Hub gave no answer; or offline mode is on, and this machine never found the revision's commit.
    """
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.errors import RevisionResolutionError
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_backoff,
    )  # fmt: skip

    _warn_of_late_settings()
    id, revision = _parse_address(address)
    if _COMMIT.fullmatch(revision):
        return Repo(id, revision)
    label = repo_label(id, "dataset")
    if is_offline_mode():
        from huggingface_hub import resolve_revision

        try:
            known_revision = resolve_revision(id, repo_type="dataset", revision=revision, local_files_only=True)
        except (RevisionResolutionError, UnicodeDecodeError) as error:
            raise NetworkError(
                f"revision {revision!r} of {label}",
                expected="a commit of it in the cache, since HF_HUB_OFFLINE is set",
                found="none",
                do="Load it once online",
            ) from error
        return Repo(id, str(known_revision.resolved))
    with translated_errors(label, f"revision {revision!r} of {label}"):
        # The client's resolve_revision is not used, because it continues with an older commit if the Hub does not
        # answer.
        response = http_backoff(
            "GET",
            f"{constants.ENDPOINT}/api/datasets/{id}/revision/{quote(revision, safe='')}",
            params={"expand": "sha"},
            headers=build_hf_headers(**client_info()),
            retry_on_status_codes=RETRIED_STATUSES,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        hf_raise_for_status(response)
        try:
            commit = response.json()["sha"]
        except (ValueError, KeyError, TypeError):
            commit = None
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise NetworkError(
            f"revision {revision!r} of {label}",
            expected=f"a commit from {host()}",
            found=guess_kind(response.content) or "another answer",
            do="A login page or a proxy may have answered; HF_ENDPOINT sets the address of the Hub",
        )
    _record_revision(id, revision, commit)
    return Repo(id, commit)


def _warn_of_late_settings() -> None:
    """Warn, once for each setting, of settings that were changed after the Hub's client was imported: the client
    ignores them."""
    from huggingface_hub import constants, is_offline_mode

    changed_settings, hf_home = [], os.environ.get("HF_HOME")
    cache_folder_setting = os.environ.get("HF_HUB_CACHE") or (hf_home and str(Path(hf_home, "hub")))
    if cache_folder_setting and Path(os.path.expandvars(cache_folder_setting)).expanduser() != Path(
        constants.HF_HUB_CACHE
    ):
        changed_settings.append(
            f"{'HF_HUB_CACHE' if os.environ.get('HF_HUB_CACHE') else 'HF_HOME'}={cache_folder_setting}"
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") and not is_offline_mode():
        changed_settings.append("HF_HUB_OFFLINE")
    endpoint_setting = os.environ.get("HF_ENDPOINT")
    if endpoint_setting and endpoint_setting.rstrip("/") != endpoint():
        changed_settings.append(f"HF_ENDPOINT={endpoint_setting}")
    for setting in changed_settings:
        if setting not in _late_settings:
            _late_settings.add(setting)
            warnings.warn(
                f"{setting} was set after huggingface_hub was imported, so it has no effect: "
                "set it before Python starts",
                stacklevel=3,
            )


def _parse_address(address: str) -> tuple[str, str]:
    from huggingface_hub.errors import HfUriError, HFValidationError
    from huggingface_hub.utils import parse_hf_uri, validate_repo_id  # type: ignore[attr-defined]

    found_text, advice = "another form", ""
    try:
        uri = parse_hf_uri(address)
        validate_repo_id(uri.id)
        if uri.revision and uri.path_in_repo:
            advice = f"If {uri.revision}/{uri.path_in_repo} is a branch, write its slashes as %2F"
        if uri.type == "dataset" and not uri.path_in_repo and uri.id.count("/") == 1:
            revision = uri.revision or "main"
            # The client names a cache file after the revision.
            revision_problem = manifest.path_problem(unquote(revision))
            if not revision_problem:
                return uri.id, revision
            found_text = f"the revision {revision_problem}"
            raise SourceNotFound(f"source {address[:200]}", expected="a branch, tag or commit", found=found_text)
        found_text = f"a {uri.type} repo" if uri.type != "dataset" else found_text
    except (HfUriError, HFValidationError):
        pass
    raise SourceNotFound(
        f"source {address}",
        expected="hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION",
        found=found_text,
        do=advice,
    )


def _record_revision(repo_id: str, revision: str, commit: str) -> None:
    """Record the commit of a revision in the client's cache, as the client does; offline mode uses the record."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    ref_path = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="dataset"), "refs", revision)
    if ".." in ref_path.parts:
        return
    try:
        if not ref_path.is_file() or ref_path.read_bytes() != commit.encode():
            with replace_file(ref_path) as file:
                file.write(commit)
    except OSError:  # If the cache can't be written to, offline mode will not know the commit.
        return


def split_address(address: str, subject: str) -> tuple[str, str]:
    """Split an address on the Hub; return the address of the repo, and the path in the repo ("" if the address has
    none).

    A malformed address is returned unchanged; `resolve_address` raises the error that explains it.

    Args:
        address: an address on the Hub.
        subject: noun for error texts, such as "source".

    Raises:
        SourceNotFound: the path leads out of the repo.

    >>> split_address("hf://datasets/me/zoo@v1/shards/a.tar", "source")
    ('hf://datasets/me/zoo@v1', 'shards/a.tar')
    """
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri  # type: ignore[attr-defined]

    try:
        uri = parse_hf_uri(address)
    except HfUriError:
        return address, ""
    path = (uri.path_in_repo or "").strip("/")
    if path and (problem := manifest.path_problem(path)):
        raise SourceNotFound(f"{subject} {address}", expected="a path inside the repo", found=problem, path=path)
    repo_kind_prefix = f"{uri.type}s/" if uri.type != "model" else ""
    return f"{ADDRESS_SCHEME}{repo_kind_prefix}{uri.id}{f'@{uri.revision}' if uri.revision else ''}", path


@cache
def client_info() -> dict[str, Any]:
    """Return the name and version of this package, which every request sends."""
    return {"library_name": LIBRARY_NAME, "library_version": version("checkpoints-zoo")}


def cache_root() -> Path:
    """Return the folder of our cache, which HF_HOME and HF_ASSETS_CACHE determine."""
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE).expanduser() / LIBRARY_NAME


def folder_name(repo_name: str) -> str:
    """Return the name of a repo's folder in our cache: "datasets--org--name" for "org/name"."""
    kind = "" if repo_name.count("/") > 1 else "datasets/"
    return f"{kind}{repo_name}".replace("/", "--")


def snapshot(repo: Repo) -> Path:
    """Return the folder of a commit's files in the client's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=repo.id, repo_type=repo.kind)
    return Path(constants.HF_HUB_CACHE, folder, "snapshots", repo.commit)


def cached_file(repo: Repo, repo_path: str) -> Path | None:
    """Look for a whole file in the client's cache; return its path, None if the file is missing."""
    from huggingface_hub import try_to_load_from_cache

    for cache_folder in (None, *fallback_folders()):
        path = try_to_load_from_cache(
            repo.id, repo_path, cache_dir=cache_folder, revision=repo.commit, repo_type=repo.kind
        )
        if isinstance(path, str):
            return Path(path)
    return None


def whole_file_record(repo: Repo, cached_path: Path) -> Path:
    """Return the path of the record with the hashes of a file in the client's cache."""
    record_name = hashlib.sha256(str(cached_path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_root() / folder_name(repo.cache_name) / "records" / f"{record_name}.json"


def _blob_name(cached_path: Path) -> str:
    """Return the name of a cached file's blob, which is its ETag."""
    # The client's cache holds links to a file named by the ETag; with Xet this file is itself a link to another file.
    return cached_path.readlink().name if cached_path.is_symlink() else cached_path.name


def has_announced_hash(cached_path: Path) -> bool:
    """Say whether the client's cache states which hash a file should have. On file systems without links, no hash is
    stated."""
    return re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", _blob_name(cached_path)) is not None


def is_offline() -> bool:
    """Say whether offline mode is on (HF_HUB_OFFLINE is set)."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def check_whole_file(repo: Repo, cached_path: Path, ignore_recorded: bool = False) -> str:
    """Compare the hash of a file in the client's cache with the announced hash; delete the file if the two differ.

    The file is read again only after it has changed. In offline mode it is not deleted, because it can't be fetched
    again.

    Args:
        repo, cached_path: the repo that has the file, and the path of the cached file.
        ignore_recorded: whether the file is hashed again even if a hash is recorded.

    Returns:
        The hash and kind of a file whose hash is wrong; "" if the hash is right, or if no hash was announced.
    """
    announced_hash, blob_path = _blob_name(cached_path), cached_path.resolve()
    hash_record = HashRecord(blob_path, whole_file_record(repo, cached_path), ignore_recorded)
    if hash_record.hashes.get("") == announced_hash:
        return ""
    actual_hash = _hash_as_announced(announced_hash, blob_path)
    if actual_hash in ("", announced_hash):
        if actual_hash:
            hash_record.add("", actual_hash)
            hash_record.save()
        return ""
    with blob_path.open("rb") as file:
        guessed_kind = guess_kind(file.read(512))
    if not is_offline():
        drop_whole_file(repo, cached_path)
    return f"{actual_hash[:16]}…{f': {guessed_kind}' if guessed_kind else ''}"


def drop_whole_file(repo: Repo, cached_path: Path) -> None:
    """Delete a file and the links to it from the client's cache, so that the file is fetched again."""
    record_path, blob_path = whole_file_record(repo, cached_path), cached_path.resolve()
    etag_link = cached_path.parent / cached_path.readlink() if cached_path.is_symlink() else cached_path
    for path in {cached_path, etag_link, blob_path}:
        delete_file(path, record_path)


def has_file(repo: Repo, repo_path: str) -> bool:
    """Say whether a repo has a file at its commit. The Hub is asked at most once; in offline mode, only the cache is
    searched.

    Raises:
        AccessError, NetworkError: for the same reasons as in `resolve_address`.
    """
    from huggingface_hub import _CACHED_NO_EXIST, is_offline_mode, try_to_load_from_cache

    cached_path = try_to_load_from_cache(repo.id, repo_path, revision=repo.commit, repo_type=repo.kind)
    if cached_path is not None or is_offline_mode():
        return isinstance(cached_path, str) and cached_path is not _CACHED_NO_EXIST
    try:
        fetch_small_file(repo, repo_path)
    except SourceNotFound as error:
        if error.path != repo_path:  # The repo or the commit is missing, not only the file.
            raise
        return False
    return True


def list_files(repo: Repo, folder: str, recursive: bool = False) -> list[str]:
    """List the files in a folder of a repo, or (`recursive`) all files below the folder; return their paths, [] if
    there is no such folder.

    In offline mode, only the cached files are listed.

    Raises:
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `resolve_address`.
    """
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.hf_api import RepoFile

    if is_offline_mode():
        root, glob_pattern = snapshot(repo), "**/*" if recursive else "*"
        return sorted(p.relative_to(root).as_posix() for p in (root / folder).glob(glob_pattern) if p.is_file())
    subject = f"folder {folder} of {repo.label}"
    with translated_errors(repo.label, subject), malformed_answers(subject):
        try:
            list_tree = HfApi(**client_info()).list_repo_tree
            tree_entries = list_tree(repo.id, folder, recursive=recursive, repo_type=repo.kind, revision=repo.commit)
            paths = sorted(entry.path for entry in tree_entries if isinstance(entry, RepoFile))
        except EntryNotFoundError:
            return []
    for path in paths:
        _check_path(repo, path)
    return paths


@contextmanager
def malformed_answers(subject: str) -> Iterator[None]:
    """Translate the errors that the Hub's client raises for an answer that lacks fields or has another form.

    Args:
        subject: noun for the answer in the error, such as "files of hf://…".
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise NetworkError(
            subject, expected=f"an answer of {host()} with the fields that Hubs send", found="another one",
            do=PROXY_ADVICE,
        ) from error  # fmt: skip


def _check_path(repo: Repo, repo_path: str) -> None:
    """Check a path that becomes a name in the client's cache.

    Raises:
        DamagedError: the path leads out of the repo.
    """
    if problem := manifest.path_problem(repo_path):
        raise DamagedError(
            f"path {repo_path[:200]!r} of {repo.label}",
            expected="a file inside the repo",
            found=problem,
            path=repo_path,
        )


def fetch_file(repo: Repo, repo_path: str, check: bool = False) -> Path:
    """Get a whole file through the client's cache, and compare it with the announced hash; return the file's path.

    A cached file that has another hash than announced is deleted, and fetched again. In offline mode it stays, and an
    error says that it is damaged.

    Args:
        repo, repo_path: the repo, and the path of the file in it.
        check: whether a cached file is hashed again even if a hash is recorded.

    Raises:
        SourceNotFound, AccessError, NetworkError: for the same reasons as in `resolve_address`.
        DamagedError: the bytes that arrived do not have the announced hash, and are deleted; or the cached copy is
            damaged, and offline mode is on.
        FormatError: a manifest or description is too large.
    """
    from huggingface_hub import constants, hf_hub_download

    _check_path(repo, repo_path)
    if (cached_path := cached_file(repo, repo_path)) and not check_whole_file(repo, cached_path, check):
        return cached_path
    file_text = f"file {repo_path} of {repo.label}"

    def download(cache_dir: Path | None) -> Path:
        progress_bar_class = _limited_progress_bar(repo_path, file_text)
        repo_options = {"repo_type": repo.kind, "revision": repo.commit, **client_info()}
        return Path(
            str(hf_hub_download(repo.id, repo_path, cache_dir=cache_dir, tqdm_class=progress_bar_class, **repo_options))
        )

    with translated_errors(repo.label, file_text):
        try:
            path = retry_patiently(lambda: download(None), RETRIED_STATUSES)
        except OSError as error:  # Errors that the client raises itself have no error number.
            if error.errno not in READ_ONLY_ERRNOS:
                raise
            fallback_cache = fallback_folder(Path(constants.HF_HUB_CACHE), error)
            path = retry_patiently(lambda: download(fallback_cache), RETRIED_STATUSES)
    announced_hash = _blob_name(path)
    if actual_hash := check_whole_file(repo, path):
        raise DamagedError(
            file_text,
            expected=f"the hash {announced_hash[:16]}…",
            found=actual_hash,
            do=DAMAGED_COPY_ADVICE if is_offline() else "The file was not stored; get it again",
            path=repo_path,
        )
    return path


class _LargeFile(Exception):
    """Raised when the Hub announces a file that `fetch_small_file` does not fetch."""


def fetch_small_file(repo: Repo, repo_path: str) -> Path | None:
    """Get a file as `fetch_file` does if it has less than LARGE_NBYTES; return its path. Of a larger file nothing is
    fetched, unless it is cached; None is returned.

    Raises:
        ZooError: for the same reasons as in `fetch_file`.
    """
    limit = _large_nbytes.set(LARGE_NBYTES)
    try:
        return fetch_file(repo, repo_path)
    except _LargeFile:
        return None
    finally:
        _large_nbytes.reset(limit)


def _limited_progress_bar(repo_path: str, subject: str) -> type[Any]:
    """Return a progress bar class for the Hub's client; the progress bar stops a download that is too large.

    Args:
        repo_path: the file's path in the repo; only manifests and predictions are limited.
        subject: noun for the file in error texts.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class BoundedBar(tqdm):
        """The client's progress bar, with a limit on the number of bytes."""

        received_bytes = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._check(options.get("total") or 0)
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            self.received_bytes += int(n or 0)
            self._check(self.received_bytes)
            is_shown: bool | None = super().update(n)
            return is_shown

        def _check(self, received_nbytes: int) -> None:
            if repo_path.startswith(("manifests/", "predictions/")):
                limits.check_size(received_nbytes, repo_path, subject)

    return BoundedBar


def _hash_as_announced(announced_hash: str, cached_path: Path) -> str:
    """Hash a file as the Hub does: sha256 for large files, git's sha1 for others; return the hash, "" if the ETag is no
    hash."""
    if re.fullmatch("[0-9a-f]{64}", announced_hash):
        digest = hashlib.sha256()
    elif re.fullmatch("[0-9a-f]{40}", announced_hash):
        digest = hashlib.sha1(b"blob %d\0" % cached_path.stat().st_size, usedforsecurity=False)
    else:
        return ""
    with cached_path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def retry_patiently(call_client: Callable[[], T], repeated_statuses: Sequence[int]) -> T:
    """Call the Hub's client, up to five times after temporary errors; return its result.

    Args:
        call_client: function that calls the client.
        repeated_statuses: HTTP statuses after which the call is repeated.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    for wait_seconds in (1, 2, 4, 8):
        try:
            return call_client()
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            http_error = error if isinstance(error, HfHubHTTPError) else error.__cause__
            # The client repeats wrapped errors itself, except 408.
            retried_statuses = repeated_statuses if http_error is error else (408,)
            if not isinstance(http_error, HfHubHTTPError) or http_error.response.status_code not in retried_statuses:
                raise
        time.sleep(wait_seconds)
    return call_client()


@contextmanager
def translated_errors(label: str, subject: str, permission: str = "read") -> Iterator[None]:
    """Translate errors of the Hub's client that the `with` block raises into errors of this package.

    Args:
        label: label of the repo, for error texts.
        subject: name of the requested repo or file, for error texts.
        permission: the permission that the request needs, "read" or "write".
    """
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    check_endpoint()
    _check_token()
    try:
        check_connection()
        _guard_client()
        yield
    except ZooError:
        raise
    except LocalEntryNotFoundError as error:  # The client wraps the error of the request in this error.
        raise translate_error(error.__cause__ or error, label, subject, permission) from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise translate_error(error, label, subject, permission) from error


def _guard_client() -> None:
    """Let the client check the headers of each answer before it uses them; this is set up once for each session of the
    client."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    session = get_session()
    hooks = session.event_hooks
    if _check_answer not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}


def _check_answer(response: Any) -> None:
    """Check where a redirect leads; the commit and the ETag in an answer's headers, after which the client names files
    of its cache; and for `fetch_small_file` the size of the file.

    Raises:
        AccessError: a redirect of a public host leads to a private address.
        DamagedError: the commit or the ETag is not a plain word.
        _LargeFile: the file is too large for `fetch_small_file`.
    """
    headers = response.headers
    if response.has_redirect_location:
        url = str(response.request.url)
        hosts.check_link(urljoin(url, headers["location"]), url, f"answer of {hosts.origin(url)[1]}")
    if "x-repo-commit" not in headers:  # the client uses no other answers for names
        return
    for header_name, allowed_pattern in (("X-Repo-Commit", _COMMIT), ("X-Linked-ETag", _ETAG), ("ETag", _ETAG)):
        header_value = headers.get(header_name)
        if header_value is not None and not allowed_pattern.fullmatch(header_value):
            raise DamagedError(
                f"answer from {host()}",
                expected=f"{header_name} with {'40 hex digits' if allowed_pattern is _COMMIT else 'a plain word'}",
                found=repr(header_value[:80]),
                do=f"Nothing was written. {PROXY_ADVICE}",
            )
    size_text = headers.get("X-Linked-Size") or headers.get("Content-Length") or ""
    limit = _large_nbytes.get() if response.request.method == "HEAD" and response.status_code < 400 else None
    if limit is not None and size_text.isascii() and size_text.isdigit() and int(size_text[:20]) >= limit:
        raise _LargeFile


def _check_token() -> None:
    """Check that the token of the login can be sent in a header.

    Raises:
        AccessError: the token has characters that a header can't contain.
    """
    from huggingface_hub import get_token

    try:
        token = get_token() or ""
    except UnicodeDecodeError:
        token = "\0"
    if not (token.isascii() and token.isprintable()):
        raise AccessError(
            "HF_TOKEN, or the stored login", expected="a token of plain letters and digits", found="other characters",
            do="Copy the token again, or unset it: public repos need none",
        )  # fmt: skip


def translate_error(error: BaseException, label: str, subject: str, permission: str = "read") -> BaseException:
    """Translate an error of the Hub's client; return this package's error. An error that has nothing to do with the
    network is returned unchanged."""
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )  # fmt: skip
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    if isinstance(error, OfflineModeIsEnabled):
        expected = "a copy in the cache, since HF_HUB_OFFLINE is set"
        return NetworkError(subject, expected=expected, found="none", do="Load it once online")
    if isinstance(error, GatedRepoError):
        access_page = f"{endpoint()}/{label.removeprefix('hf://')}"
        do = f"Ask for access at {access_page}, then {LOGIN_ADVICE}"
        return AccessError(subject, expected="access to the repo", found="a gated one", do=do)
    if isinstance(error, RevisionNotFoundError):
        return SourceNotFound(subject, expected="a branch, tag or commit", found="no such revision")
    if isinstance(error, RemoteEntryNotFoundError):
        repo_path = subject.removeprefix("file ").removesuffix(f" of {label}")
        return SourceNotFound(
            subject, expected="a file, since a manifest names it", found="no such file at this commit", path=repo_path
        )
    if isinstance(error, RepositoryNotFoundError):
        do = f"Check its name; if it is private, {LOGIN_ADVICE}"
        kind_text = "a data set repo" if label.startswith(repo_label("", "dataset")) else "a model repo"
        return SourceNotFound(subject, expected=kind_text, found="none that this login may see", do=do)
    if isinstance(error, HfHubHTTPError):
        return _status_error(error.response, subject, permission)
    if isinstance(error, FileMetadataError):
        return NetworkError(subject, expected="the headers of a Hub", found="others", do=PROXY_ADVICE)
    if isinstance(error, JSONDecodeError):
        return NetworkError(subject, expected=f"JSON from {host()}", found="another page", do=PROXY_ADVICE)
    # For a wrong size the client raises a plain OSError.
    if isinstance(error, OSError) and "file should be of size" in str(error):
        return NetworkError(subject, expected="as many bytes as announced", found="others", do=PROXY_ADVICE)
    if isinstance(error, OSError) and error.errno in disk.DISK_FULL_ERRNOS:
        return disk.disk_full_error(cache_root().parent, error)
    if isinstance(error, OSError) and error.errno in disk.NO_LOCK_ERRNOS:
        return StorageError(
            f"cache {cache_root().parent}", expected="a file system with locks", found=str(error.strerror or error),
            do="Set HF_HOME to a folder on another disk",
        )  # fmt: skip
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        reason = "no bytes for too long"
    elif isinstance(error, HFValidationError):
        return error
    elif isinstance(error, (httpx.HTTPError, httpx.InvalidURL, ConnectionError, ValueError)):
        reason = f"{type(error).__name__}{f': {error}' if str(error) else ''}"[:200]
    else:
        return error
    return NetworkError(subject, expected=f"an answer from {host()}", found=reason, do=TRY_AGAIN_ADVICE)


def _status_error(response: Any, subject: str, permission: str) -> ZooError:
    from huggingface_hub import get_token

    status_code = response.status_code
    status_text = (
        f"{status_code} {HTTPStatus(status_code).phrase}" if status_code in iter(HTTPStatus) else str(status_code)
    )
    if status_code == 401 and get_token():
        unset_advice = ", or unset it: public repos need none" if permission == "read" else ""
        do = f"Replace it (HF_TOKEN, or `hf auth login`){unset_advice}"
        return AccessError(
            subject, expected="a login that the Hub takes", found=f"{status_text}: the token was refused", do=do
        )
    if status_code in (401, 403):
        return AccessError(
            subject, expected=f"permission to {permission}", found=status_text, do=f"L{LOGIN_ADVICE[1:]}"
        )
    if status_code == 416:
        expected = "the bytes that the manifest names"
        return DamagedError(
            subject, expected=expected, found=f"{status_text}: the file is shorter", do="Tell its producer"
        )
    if status_code == 429:
        wait_match = re.search(r"\d+", response.headers.get("retry-after", "")) or re.search(
            r"(?<=t=)\d+", response.headers.get("ratelimit", "")
        )
        waiting_text = f"in {wait_match[0]} s" if wait_match else "in a few minutes"
        do = f"Try again {waiting_text}: what has arrived is kept. Logged in, the limit is higher"
        return NetworkError(subject, expected="an answer", found=f"{status_text}: the Hub's rate limit", do=do)
    return NetworkError(subject, expected=f"an answer from {host()}", found=status_text, do=TRY_AGAIN_ADVICE)


def check_endpoint() -> None:
    """Check that HF_ENDPOINT is a web address.

    Raises:
        UsageError: HF_ENDPOINT is no web address.
    """
    url_parts = urlsplit(endpoint())
    if url_parts.scheme not in ("http", "https") or not url_parts.netloc:
        raise UsageError(
            "HF_ENDPOINT", expected="https://HOST", found=repr(endpoint())[:120], do="Correct it, or unset it"
        )


def check_connection() -> None:
    """Check that the Hub, or the proxy in front of it, accepts connections; after a success, this process does not
    check again.

    Without this check, the client would repeat a request for half a minute if there is no network.

    Raises:
        ConnectionError: no connection was accepted.
    """
    from huggingface_hub import is_offline_mode

    address = endpoint()
    if address in _reached_addresses or is_offline_mode():
        return
    hub_url = urlsplit(address)
    proxy_url = None if proxy_bypass(hub_url.netloc) else getproxies().get(hub_url.scheme)
    contacted_url = urlsplit(proxy_url) if proxy_url else hub_url
    port = contacted_url.port or {"http": 80, "https": 443}.get(contacted_url.scheme)
    if contacted_url.hostname is not None and port is not None:
        try:
            socket.create_connection((contacted_url.hostname, port), timeout=CONNECTION_SECONDS).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error
    _reached_addresses.add(address)


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def host() -> str:
    return urlsplit(endpoint()).netloc


def is_hub_link(link: str) -> bool:
    """Say whether a link leads to the Hub itself, the only origin that a token is sent to."""
    return hosts.same_origin(endpoint(), link)


def fallback_folder(unwritable_folder: Path, error: OSError) -> Path:
    """Return a temporary folder that replaces a cache folder which can't be written to; warn at the first call.

    Args:
        unwritable_folder: the cache folder that can't be written to.
        error: the error that writing to the cache raised.
    """
    if not _fallback_folders:
        _fallback_folders.append(Path(tempfile.mkdtemp(prefix="checkpoints-zoo-")))
        atexit.register(shutil.rmtree, _fallback_folders[0], ignore_errors=True)
        warnings.warn(
            f"the cache {unwritable_folder} can't be written to ({error.strerror}): fetched files are deleted "
            "when this process ends. Set HF_HOME to a folder that can be written to.",
            stacklevel=2,
        )
    return _fallback_folders[0]


def fallback_folders() -> list[Path]:
    """Return a list with the temporary folder that `fallback_folder` has made; the list is empty if there is none."""
    return _fallback_folders[:]
