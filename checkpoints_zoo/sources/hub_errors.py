"""Checks of the Hub's answers, and errors of the Hub's client translated into ours."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any
from urllib.parse import urljoin, urlsplit
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
from checkpoints_zoo.formats import disk
from checkpoints_zoo.sources import hosts
from checkpoints_zoo.sources.hub_addresses import endpoint, host, repo_label
from checkpoints_zoo.sources.hub_cache import cache_root
from checkpoints_zoo.sources.hub_token import LOGIN_ADVICE, check_token, has_token

CONNECTION_SECONDS = 10
TRY_AGAIN_ADVICE = "Try again: what has arrived is kept"
PROXY_ADVICE = "Check HF_ENDPOINT, and proxies on the way"
COMMIT = re.compile("[0-9a-f]{40}")
_ETAG = re.compile('(?:W/)?"?[A-Za-z0-9_+=-][A-Za-z0-9_.+=-]{0,127}"?')
_reached_addresses: set[str] = set()
# Number of bytes from which `hub.fetch_small_file` does not fetch a file; None while other functions fetch files.
large_nbytes: ContextVar[int | None] = ContextVar("large_nbytes", default=None)


class LargeFile(Exception):
    """Raised when the Hub announces a file that `hub.fetch_small_file` does not fetch."""


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
    check_token()
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
        LargeFile: the file is too large for `hub.fetch_small_file`.
    """
    headers = response.headers
    if response.has_redirect_location:
        url = str(response.request.url)
        hosts.check_link(urljoin(url, headers["location"]), url, f"answer of {hosts.origin(url)[1]}")
    if "x-repo-commit" not in headers:  # the client uses no other answers for names
        return
    for header_name, allowed_pattern in (("X-Repo-Commit", COMMIT), ("X-Linked-ETag", _ETAG), ("ETag", _ETAG)):
        header_value = headers.get(header_name)
        if header_value is not None and not allowed_pattern.fullmatch(header_value):
            raise DamagedError(
                f"answer from {host()}",
                expected=f"{header_name} with {'40 hex digits' if allowed_pattern is COMMIT else 'a plain word'}",
                found=repr(header_value[:80]),
                do=f"Nothing was written. {PROXY_ADVICE}",
            )
    size_text = headers.get("X-Linked-Size") or headers.get("Content-Length") or ""
    limit = large_nbytes.get() if response.request.method == "HEAD" and response.status_code < 400 else None
    if limit is not None and size_text.isascii() and size_text.isdigit() and int(size_text[:20]) >= limit:
        raise LargeFile


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
    status_code = response.status_code
    status_text = (
        f"{status_code} {HTTPStatus(status_code).phrase}" if status_code in iter(HTTPStatus) else str(status_code)
    )
    if status_code == 401 and has_token():
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
