"""Access to the Hub: resolve addresses to commits, list files, and get whole files.

All calls after `resolve_address` name the commit, so a running program does not see newer commits. The client's own
settings apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_HUB_DISABLE_PROGRESS_BARS. The client is imported
inside functions, because importing it takes half a second.

This is one file, because every call to the client needs its settings and the same repeated requests.
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from checkpoints_zoo.errors import DamagedError, NetworkError, SourceNotFound
from checkpoints_zoo.formats import limits, source_paths
from checkpoints_zoo.formats.disk import replace_file
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources.hub_addresses import Repo, endpoint, host, parse_address, repo_label
from checkpoints_zoo.sources.hub_cache import (
    LIBRARY_NAME,
    blob_name,
    cached_file,
    check_whole_file,
    fallback_folder,
    is_offline,
    snapshot_folder,
)
from checkpoints_zoo.sources.hub_errors import COMMIT, LargeFile, large_nbytes, malformed_answers, translated_errors

LARGE_NBYTES = 4 * 2**20  # Number of bytes from which a manifest is read by ranges.
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
READ_ONLY_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)

DAMAGED_COPY_ADVICE = "The damaged copy in the cache stays, but is not used: unset HF_HUB_OFFLINE to get it again"

T = TypeVar("T")

_reported_settings: set[str] = set()  # Settings that came too late for the client, and that a warning has named.


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
    id, revision = parse_address(address)
    if COMMIT.fullmatch(revision):
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
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
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
        if setting not in _reported_settings:
            _reported_settings.add(setting)
            warnings.warn(
                f"{setting} was set after huggingface_hub was imported, so it has no effect: "
                "set it before Python starts",
                stacklevel=3,
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


@cache
def client_info() -> dict[str, Any]:
    """Return the name and version of this package, which every request sends."""
    return {"library_name": LIBRARY_NAME, "library_version": version("checkpoints-zoo")}


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
        root, glob_pattern = snapshot_folder(repo), "**/*" if recursive else "*"
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


def _check_path(repo: Repo, repo_path: str) -> None:
    """Check a path that becomes a name in the client's cache.

    Raises:
        DamagedError: the path leads out of the repo.
    """
    if problem := source_paths.path_refusal(repo_path):
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
    announced_hash = blob_name(path)
    if actual_hash := check_whole_file(repo, path):
        raise DamagedError(
            file_text,
            expected=f"the hash {announced_hash[:16]}…",
            found=actual_hash,
            do=DAMAGED_COPY_ADVICE if is_offline() else "The file was not stored; get it again",
            path=repo_path,
        )
    return path


def fetch_small_file(repo: Repo, repo_path: str) -> Path | None:
    """Get a file as `fetch_file` does if it has less than LARGE_NBYTES; return its path. Of a larger file nothing is
    fetched, unless it is cached; None is returned.

    Raises:
        ZooError: for the same reasons as in `fetch_file`.
    """
    limit = large_nbytes.set(LARGE_NBYTES)
    try:
        return fetch_file(repo, repo_path)
    except LargeFile:
        return None
    finally:
        large_nbytes.reset(limit)


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
