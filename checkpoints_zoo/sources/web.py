"""Files at https:// and gs:// addresses that the user names: byte ranges, pinned by ETag and length.

No login is sent. Redirects stay on https and lead from a public host to no private address (`hosts`). A file on a host
that ignores byte ranges, or that sends no strong ETag, is read whole, once, if it is small.

This is one file, because files and folders on the web follow the same rules for requests and redirects.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.client import responses
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError, SourceNotFound
from checkpoints_zoo.formats import source_paths
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.formats.text import format_bytes
from checkpoints_zoo.sources import hosts, hub, hub_cache, hub_errors
from checkpoints_zoo.sources.ranges import Cursor, RangedFile, Sink

GS_SCHEME = "gs://"
SCHEMES = ("https://", "http://", GS_SCHEME)
LARGEST_WHOLE_NBYTES = 64 * 2**20  # A larger file is read by ranges or not at all.
LARGEST_REDIRECT_COUNT = 5
READ_SECONDS = 30
_reached_hosts: set[str] = set()
_warned_hosts: set[str] = set()  # Hosts without ranges of which a warning was shown.
_REDIRECTS = (301, 302, 303, 307, 308)

T = TypeVar("T")


def is_web_address(address: str) -> bool:
    """Say whether an address is one of a file or folder on the web."""
    return address.startswith(SCHEMES)


def https_address(address: str) -> str:
    """Return the https address of a file or folder on the web, quoted. `gs://BUCKET/OBJECT` is at Google's storage, or
    where STORAGE_EMULATOR_HOST says.

    Raises:
        SourceNotFound: the address has no host, a login or a query, or is plain http on a public host.

    >>> https_address("gs://gresearch/bnn-posteriors/v1")
    'https://storage.googleapis.com/gresearch/bnn-posteriors/v1'
    """
    found, link = "", address
    if address.startswith(GS_SCHEME):
        storage = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        link = f"{storage.rstrip('/')}/{address.removeprefix(GS_SCHEME)}"
    scheme, host, _ = hosts.origin(link)
    parts = urlsplit(link) if scheme else urlsplit("")
    if address.startswith(GS_SCHEME) and not address.removeprefix(GS_SCHEME).partition("/")[0]:
        found = "no bucket"
    elif not scheme:
        found = "no host"
    elif "@" in parts.netloc:
        found = "a login, and none is sent"
    elif parts.query or parts.fragment:
        found = f"{'?' if parts.query else '#'} and more, which would be lost"
    elif scheme == "http" and not hosts.is_private(host):
        found = "http://, where anyone on the way may change what arrives"
    if found:
        raise SourceNotFound(f"source {address[:200]}", expected="https://HOST/PATH or gs://BUCKET/PATH", found=found)
    path = quote(unquote(parts.path, errors="surrogateescape"), errors="surrogateescape")
    return f"{scheme}://{parts.netloc}{path.rstrip('/')}"


@dataclass
class WebFile(RangedFile):
    """A file on the web whose bytes can be read, pinned to what it was at the first request.

    Args:
        address: its https address.
        etag: its ETag, without quotes; "" if the host sends none: then the size alone tells of a change.
        size: size in bytes.
        has_ranges: whether the host serves byte ranges and a strong ETag.
        error_subject: noun for the file in errors, such as "file a.pkl of gs://…".
    """

    address: str
    etag: str
    size: int
    has_ranges: bool
    error_subject: str
    _whole: bytes | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def error_path(self) -> str:
        """The address of the file."""
        return self.address

    @classmethod
    def of(cls, address: str, error_subject: str) -> WebFile:
        """Ask for the first byte of a file; return the file with its ETag and size.

        Raises:
            SourceNotFound, AccessError: there is no such file, or it may not be read, or a redirect is refused.
            NetworkError: the host gave no answer.
            DamagedError: the answer is no range of a file.
        """

        def look(status: int, headers: Mapping[str, str], _: Iterator[bytes]) -> WebFile:
            etag = headers.get("etag", "").strip('"')
            content_range = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d+)", headers.get("content-range", ""))
            if status in (206, 416) and content_range:
                is_strong = bool(etag) and not etag.startswith("W/")
                return cls(address, etag, int(content_range[1]), is_strong, error_subject)
            length = headers.get("content-length", "")
            if status != 200 or not re.fullmatch("[0-9]{1,18}", length):
                raise _wrong_answer(error_subject, "a file with its length", f"status {status} and length {length!r}")
            return cls(address, etag, int(length), False, error_subject)

        return _patiently(error_subject, lambda: _request(address, (0, 1), error_subject, look))

    def check_unchanged(self, etag: str, size: int) -> None:
        """Check that the file is the file of an earlier request.

        Raises:
            DamagedError: the file has another ETag or size.
        """
        if (etag, size) != (self.etag, self.size):
            raise self._changed(_version_text(self.etag, self.size), _version_text(etag, size))

    def read(self, start: int, end: int, sink: Sink) -> None:
        """Read a range of the file, as `RangedFile.read` does; on a host that ignores ranges, of the file in memory.

        Raises:
            NetworkError: the connection broke too often, or the host ignores ranges and the file is large.
            SourceNotFound, AccessError: the file is gone, or may not be read.
            DamagedError: the file has changed, or the answer is not the requested range.
        """
        if self.has_ranges:
            super().read(start, end, sink)
        else:
            sink(start, self.read_whole()[start:end])

    def _read_on(self, cursor: Cursor) -> str:
        def pass_on(status: int, headers: Mapping[str, str], pieces: Iterator[bytes]) -> None:
            wanted = f"bytes {cursor.position}-{cursor.end - 1}/{self.size}"
            if status == 206 and headers.get("content-range", "") == wanted and self._has_same_etag(headers):
                for piece in pieces:
                    if cursor.position + len(piece) > cursor.end:
                        raise _wrong_answer(self.error_subject, wanted, "more bytes than that")
                    cursor.pass_on(piece)
                return
            total = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "")
            if status in (200, 206, 412, 416) and not (self._has_same_etag(headers) and total == str(self.size)):
                found = _version_text(headers.get("etag", ""), int(total[:18]) if total.isdecimal() else -1)
                raise self._changed(found, _version_text(self.etag, self.size))
            raise _wrong_answer(self.error_subject, wanted, f"status {status} and {_kind_of(pieces)}")

        try:
            _request(self.address, (cursor.position, cursor.end), self.error_subject, pass_on, self.etag)
        except _Broken as error:
            return str(error)
        return "a body cut short"

    def read_whole(self) -> bytes:
        """Read the file into memory; return its bytes. On a host that ignores ranges the bytes are kept, and a warning
        says so.

        Raises:
            ZooError: for the same reasons as in `read`.
        """
        if self.has_ranges:
            return self.bytes_at(0, self.size)
        with self._lock:
            if self._whole is None:
                self._whole = self._read_at_once()
        return self._whole

    def _read_at_once(self) -> bytes:
        host = urlsplit(self.address).netloc
        if self.size > LARGEST_WHOLE_NBYTES:
            raise NetworkError(
                self.error_subject,
                expected=f"byte ranges and a strong ETag from {host}, for a file of {format_bytes(self.size)}",
                found="neither or one of the two",
                do=f"Files of up to {format_bytes(LARGEST_WHOLE_NBYTES)} are read whole; get this one by other means",
            )
        if host not in _warned_hosts:
            _warned_hosts.add(host)
            warnings.warn(
                f"{host} serves no byte ranges of a pinned file: files there are read whole, such as "
                f"{self.error_subject} of {format_bytes(self.size)}",
                stacklevel=2,
            )

        def collect(status: int, headers: Mapping[str, str], pieces: Iterator[bytes]) -> bytes:
            received = bytearray()
            for piece in pieces:
                received += piece
                if len(received) > self.size:
                    break
            if status != 200 or len(received) != self.size or not self._has_same_etag(headers):
                raise _wrong_answer(self.error_subject, f"{self.size:,} bytes", f"status {status} and other bytes")
            return bytes(received)

        return _patiently(self.error_subject, lambda: _request(self.address, None, self.error_subject, collect))

    def _has_same_etag(self, headers: Mapping[str, str]) -> bool:
        return not self.etag or headers.get("etag", "").strip('"') == self.etag

    def _changed(self, found: str, expected: str) -> DamagedError:
        return DamagedError(
            self.error_subject,
            expected=f"{expected}, as when it was first read",
            found=found,
            do="The file has changed, and nothing of it was stored: load the collection again",
            path=self.address,
        )


@dataclass(frozen=True)
class WebFolder:
    """A folder on the web: files whose addresses begin with one address. It can't be listed.

    Args:
        address: its https address, without a slash at the end.
        label: its address as the user named it, for citations and errors.
    """

    address: str
    label: str

    @classmethod
    def of(cls, address: str) -> WebFolder:
        """Return the folder at an address.

        Raises:
            SourceNotFound: for the same reasons as in `https_address`.
        """
        return cls(https_address(address), address.rstrip("/"))

    @property
    def cache_name(self) -> str:
        """Name of the folder in our cache, which no repo of the Hub has."""
        parts = urlsplit(self.address)
        name = parts.path.strip("/").replace("/", "--") or "_"
        if len(name) > 120:
            name = f"{name[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return f"web+{parts.netloc.replace(':', '_')}/{name}"

    def file(self, path: str) -> WebFile:
        """Ask for a file of the folder; return it, pinned to its present ETag and size.

        Raises:
            DamagedError: the path leads out of the folder.
            ZooError: for the same reasons as in `WebFile.of`.
        """
        subject = f"file {path[:200]} of {self.label}"
        if problem := source_paths.path_refusal(path):
            raise DamagedError(subject, expected="a file inside the folder", found=problem, path=path)
        return WebFile.of(f"{self.address}/{quote(path, errors='surrogateescape')}", subject)


class _Broken(Exception):
    """Raised when a connection breaks, or a host answers with a temporary error; the request may be repeated."""


def _patiently(error_subject: str, request: Callable[[], T]) -> T:
    """Make a request up to five times while connections break; return its result.

    Raises:
        NetworkError: the connection broke five times.
    """
    for wait_seconds in (1, 2, 4, 8, 0):
        try:
            return request()
        except _Broken as error:
            reason = str(error)
        time.sleep(wait_seconds)
    raise NetworkError(error_subject, expected="an answer", found=reason, do=hub_errors.TRY_AGAIN_ADVICE)


def _request(
    address: str,
    byte_range: tuple[int, int] | None,
    error_subject: str,
    read_answer: Callable[[int, Mapping[str, str], Iterator[bytes]], T],
    etag: str = "",
) -> T:
    """Ask for a range of a file, and follow redirects that the rules of hosts allow; return what `read_answer` returns.

    Args:
        address: the file's address.
        byte_range: offsets of the first byte and of the byte after the last one; None for the whole file.
        error_subject: noun for the file in errors.
        read_answer: function of (status, headers, pieces of the body), called while the answer arrives.
        etag: the ETag that the file must have; "" for any.

    Raises:
        _Broken: the connection broke, or a temporary error occurred.
        SourceNotFound, AccessError, NetworkError: there is no such file, or it may not be read, or its host was never
            reached, or offline mode is on.
    """
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    if hub_cache.is_offline():
        raise NetworkError(
            error_subject,
            expected="it in the cache, since HF_HUB_OFFLINE is set",
            found="nothing of it",
            do="Read it once online",
        )
    headers = {"accept-encoding": "identity"}
    if byte_range is not None:
        headers["range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
    if etag:
        headers["if-match"] = f'"{etag}"'
    link = address
    try:
        for _ in range(LARGEST_REDIRECT_COUNT + 1):
            with _client(os.getpid()).stream("GET", link, headers=headers) as response:
                _reached_hosts.add(urlsplit(link).netloc)
                status = response.status_code
                if status not in _REDIRECTS:
                    _check_status(status, response.headers, error_subject, link)
                    if response.headers.get("content-encoding", "identity") != "identity":
                        raise _wrong_answer(error_subject, "its bytes as they are stored", "a compressed answer")
                    return read_answer(status, response.headers, response.iter_bytes())
                next_link = urljoin(link, response.headers.get("location", ""))
            hosts.check_link(next_link, link, error_subject)
            if link.startswith("https://") and not next_link.startswith("https://"):
                found = f"one to {next_link.partition('://')[0]}://{urlsplit(next_link).netloc}"[:120]
                raise AccessError(error_subject, expected="redirects that stay on https", found=found)
            link = next_link
    except (httpx.TransportError, httpx.StreamError) as error:
        host = urlsplit(link).netloc
        if isinstance(error, httpx.ConnectError) and host not in _reached_hosts:
            do = "Check the address, and the network of this machine"
            raise NetworkError(error_subject, expected=f"a connection to {host}", found=str(error), do=do) from error
        raise _Broken(f"{type(error).__name__}{f': {error}' if str(error) else ''}"[:200]) from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise NetworkError(error_subject, expected="an answer", found=str(error)[:200]) from error
    raise AccessError(error_subject, expected=f"at most {LARGEST_REDIRECT_COUNT} redirects", found="more")


@cache
def _client(process: int) -> Any:
    """Return the client of a process. It follows no redirects and reads no logins of this machine."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    info = hub.client_info()
    agent = f"{info['library_name']}/{info['library_version']}"
    return httpx.Client(follow_redirects=False, auth=None, timeout=READ_SECONDS, headers={"user-agent": agent})


def _check_status(status: int, headers: Mapping[str, str], error_subject: str, link: str) -> None:
    """Raise the error for an answer's status; statuses of ranges are left to the reader of the answer."""
    host = urlsplit(link).netloc
    text = f"{status} {responses[status]}" if status in responses else str(status)
    if status in (404, 410):
        raise SourceNotFound(
            error_subject, expected=f"a file on {host}", found=text,
            do="Check the address; a file that was there may have been removed", path=link,
        )  # fmt: skip
    if status in (401, 403):
        raise AccessError(
            error_subject, expected="a file that anyone may read", found=f"{text} from {host}",
            do="No login is sent: get the file by other means, and give its folder", path=link,
        )  # fmt: skip
    if status in hub.RETRIED_STATUSES:
        raise _Broken(f"{text} from {host}")
    if status not in (200, 206, 412, 416):
        raise NetworkError(error_subject, expected=f"its bytes from {host}", found=text, do=hub_errors.TRY_AGAIN_ADVICE)


def _version_text(etag: str, size: int) -> str:
    """Return a phrase for a version of a file; the size is -1 if it is unknown."""
    size_text = f"{size:,} bytes" if size >= 0 else "an unknown length"
    return f"ETag {etag.strip(chr(34))[:40] or 'none'}, {size_text}"


def _wrong_answer(error_subject: str, expected: str, found: str) -> DamagedError:
    do = "A login page or a proxy may have answered; nothing was stored"
    return DamagedError(error_subject, expected=expected, found=found, do=do)


def _kind_of(pieces: Iterator[bytes]) -> str:
    return guess_kind(next(pieces, b"")[:512]) or "other bytes"
