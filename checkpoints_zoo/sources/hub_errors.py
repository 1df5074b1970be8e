"""What the client's errors mean: which of ours each becomes, and where a token may go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from json import JSONDecodeError
from typing import Any
from urllib.parse import urlsplit

from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError, SourceNotFound, UsageError, ZooError

AGAIN = "Try again: what has arrived is kept"
PROXIES = "Check HF_ENDPOINT, and proxies on the way"
LOGIN = "log in with `hf auth login` or set HF_TOKEN"


@contextmanager
def asking(label: str, what: str, to: str = "read") -> Iterator[None]:
    """Turn the client's errors into ours.

    Args:
        label: of the repo.
        what: is asked for.
        to: what permission it takes.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    check_endpoint()
    try:
        yield
    except ZooError:
        raise
    except LocalEntryNotFoundError as error:  # it wraps what came back from the Hub
        raise explained(error.__cause__ or error, label, what, to) from error
    except (httpx.HTTPError, OSError, JSONDecodeError) as error:
        raise explained(error, label, what, to) from error


def explained(error: BaseException, label: str, what: str, to: str = "read") -> BaseException:
    """Return our error for one of the client's, or the error itself where it has nothing to do with the network."""
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )  # fmt: skip
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    if isinstance(error, OfflineModeIsEnabled):
        expected = "it in the cache, since HF_HUB_OFFLINE is set"
        return NetworkError(what, expected=expected, found="nothing there", do="Load it once online")
    if isinstance(error, GatedRepoError):
        page = f"{endpoint()}/{label.removeprefix('hf://')}"
        do = f"Ask for access at {page}, then {LOGIN}"
        return AccessError(what, expected="access to the repo", found="a gated one", do=do)
    if isinstance(error, RevisionNotFoundError):
        return SourceNotFound(what, expected="a branch, tag or commit", found="no such revision")
    if isinstance(error, RemoteEntryNotFoundError):
        inside = what.removeprefix("file ").removesuffix(f" of {label}")
        return SourceNotFound(
            what, expected="a file, since a manifest names it", found="no such file at this commit", path=inside
        )
    if isinstance(error, RepositoryNotFoundError):
        do = f"Check its name; if it is private, {LOGIN}"
        return SourceNotFound(what, expected="a data set repo", found="none that this login may see", do=do)
    if isinstance(error, HfHubHTTPError):
        return _of_status(error.response, what, to)
    if isinstance(error, FileMetadataError):
        return NetworkError(what, expected="the headers of a Hub", found="others", do=PROXIES)
    if isinstance(error, JSONDecodeError):
        return NetworkError(what, expected=f"an answer from {host()}", found="a page that is none", do=PROXIES)
    if isinstance(error, OSError) and "file should be of size" in str(error):  # the client has no class for it
        return NetworkError(what, expected="as many bytes as announced", found="others", do=PROXIES)
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        found = "no bytes for too long"
    elif isinstance(error, (httpx.HTTPError, ConnectionError)):
        found = f"{type(error).__name__}{f': {error}' if str(error) else ''}"[:200]
    else:
        return error
    return NetworkError(what, expected=f"an answer from {host()}", found=found, do=AGAIN)


def _of_status(response: Any, what: str, to: str) -> ZooError:
    code = response.status_code
    found = f"{code} {HTTPStatus(code).phrase}" if code in iter(HTTPStatus) else str(code)
    if code in (401, 403):
        return AccessError(what, expected=f"permission to {to}", found=found, do=f"L{LOGIN[1:]}")
    if code == 416:
        expected = "the bytes that the manifest names"
        return DamagedError(what, expected=expected, found=f"{found}: the file is shorter", do="Tell its producer")
    if code == 429:
        wait = re.search(r"\d+", response.headers.get("retry-after", "")) or re.search(
            r"(?<=t=)\d+", response.headers.get("ratelimit", "")
        )
        when = f"in {wait[0]} s" if wait else "in a few minutes"
        do = f"Try again {when}: what has arrived is kept. Logged in, the limit is higher"
        return NetworkError(what, expected="an answer", found=f"{found}: the Hub's rate limit", do=do)
    return NetworkError(what, expected=f"an answer from {host()}", found=found, do=AGAIN)


def check_endpoint() -> None:
    """Check that the Hub's address is one.

    Raises:
        UsageError: HF_ENDPOINT is something else.
    """
    parts = urlsplit(endpoint())
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(
            "HF_ENDPOINT", expected="https://HOST", found=repr(endpoint())[:120], do="Correct it, or unset it"
        )


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def host() -> str:
    return urlsplit(endpoint()).netloc


def is_own(link: str) -> bool:
    """Say whether a link leads to the Hub itself: to that origin alone a token may go."""
    own, other = urlsplit(endpoint()), urlsplit(link)
    return (own.scheme, own.netloc) == (other.scheme, other.netloc)
