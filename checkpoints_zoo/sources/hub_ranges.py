"""Files on the Hub: a HEAD request returns a signed link, from which byte ranges are read."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError
from checkpoints_zoo.formats.shard_files import guess_kind
from checkpoints_zoo.sources import hub, hub_addresses, hub_errors, hub_token
from checkpoints_zoo.sources.hub_addresses import Repo
from checkpoints_zoo.sources.ranges import Cursor, RangedFile

SNIFFED_BYTES = 512


@dataclass
class RemoteFile(RangedFile):
    """A file on the Hub whose byte ranges can be read.

    Args:
        repo, repo_path: the repo, and the path of the file in it.
        etag: ETag of the file, which depends only on its content.
        size: size of the file in bytes.
        link: signed link to the file's bytes, valid for some time.
    """

    repo: Repo
    repo_path: str
    etag: str
    size: int
    link: str
    _renewal_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _link_is_renewed: bool = False
    _link_works: bool = False

    def __post_init__(self) -> None:
        self.error_subject = f"file {self.repo_path} of {self.repo.label}"

    @property
    def error_path(self) -> str:
        """The path of the file in the repo."""
        return self.repo_path

    @classmethod
    def of(cls, repo: Repo, repo_path: str) -> RemoteFile:
        """Ask the Hub for a file's link, ETag and size by one HEAD request; return the file.

        Raises:
            SourceNotFound, AccessError, NetworkError: for the same reasons as in `hub.resolve_address`.
        """
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

        error_subject = f"file {repo_path} of {repo.label}"
        url = hf_hub_url(repo.id, repo_path, repo_type=repo.kind, revision=repo.commit)
        with hub_errors.translated_errors(repo.label, error_subject):
            metadata = hub.retry_patiently(
                lambda: get_hf_file_metadata(
                    url, timeout=constants.HF_HUB_ETAG_TIMEOUT, retry_on_errors=True, **hub.client_info()
                ),
                (408,),
            )
            link = httpx.URL(metadata.location)  # raises an error for a wrong host or port
            urlsplit(str(link))
        if metadata.etag is None or metadata.size is None:
            raise NetworkError(
                error_subject,
                expected="an ETag and a size",
                found="none",
                do="Check HF_ENDPOINT, and proxies on the way",
            )
        return cls(repo, repo_path, metadata.etag, metadata.size, metadata.location)

    def check_size(self, end: int) -> None:
        """Check that the file has at least `end` bytes, as many as the manifest needs.

        Raises:
            DamagedError: the file is shorter; the error names the kind of file, if its first bytes show the kind.
        """
        if end <= self.size:
            return
        kind = guess_kind(self.first_bytes()) if self.size > 0 else ""
        raise DamagedError(
            self.error_subject, expected=f"{end:,} bytes or more, as the manifest says",
            found=f"{self.size:,} bytes{f': {kind}' if kind else ''}",
            do="Manifest and file do not belong together: tell the producer", path=self.repo_path,
        )  # fmt: skip

    def check_etag(self, etag: str) -> None:
        """Check that the file has an ETag, so that a row of a manifest names these bytes.

        Raises:
            DamagedError: the file has another ETag.
        """
        if self.etag != etag:
            raise DamagedError(
                self.error_subject, expected=f"ETag {etag[:16]}, as the manifest says", found=self.etag[:16],
                do="Manifest and file do not belong together: index the repo again", path=self.repo_path,
            )  # fmt: skip

    def first_bytes(self) -> bytes:
        """Read the first bytes of the file, which show its kind; return these bytes, b"" if they can't be read."""
        try:
            return self.bytes_at(0, SNIFFED_BYTES)
        except (DamagedError, AccessError, NetworkError):
            return b""

    def _read_on(self, cursor: Cursor) -> str:
        """Make one request for the bytes that are left, with a new link if the link has expired; the client itself
        repeats requests after the statuses 429 and 5xx."""
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

        try:
            while not self._read_unless_expired(link := self.link, cursor):
                self._renew_link(link)
        except httpx.TimeoutException:
            return "no bytes for too long"
        except httpx.TransportError as error:
            return f"{type(error).__name__}{f': {error}' if str(error) else ''}"[:200]
        except (
            httpx.RequestError,
            httpx.InvalidURL,
            UnicodeError,
        ) as error:  # such as a wrong encoding, or a circle of links
            raise hub_errors.translate_error(error, self.repo.label, self.error_subject) from error
        return "a body cut short"

    def _read_unless_expired(self, link: str, cursor: Cursor) -> bool:
        """Read the file from the cursor's position to the cursor's end; return False if the link has expired."""
        from huggingface_hub import constants
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            hf_raise_for_status,
            http_stream_backoff,
        )  # fmt: skip

        headers = hub_token.headers_for(link, **hub.client_info())
        headers |= {"range": f"bytes={cursor.position}-{cursor.end - 1}", "accept-encoding": "identity"}
        try:
            with http_stream_backoff(
                "GET", link, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_status_codes=hub.RETRIED_STATUSES, retry_on_exceptions=(),
            ) as response:  # fmt: skip
                if response.status_code in (401, 403) and not hub_addresses.is_hub_link(link):
                    return False
                hf_raise_for_status(response)
                # Read piece by piece, so that bytes that arrive before the connection breaks are used.
                pieces = response.iter_bytes()
                self._check_answer(response.status_code, response.headers, cursor, pieces)
                self._link_works = True
                for piece in pieces:
                    if cursor.position + len(piece) > cursor.end:
                        raise self._wrong_range_error(cursor, "more bytes than that")
                    cursor.pass_on(piece)
        except HfHubHTTPError as error:
            raise hub_errors.translate_error(error, self.repo.label, self.error_subject) from error
        return True

    def _check_answer(self, status: int, headers: Mapping[str, str], cursor: Cursor, pieces: Iterator[bytes]) -> None:
        """Check that the Hub's answer is the requested range of the requested file."""
        if status == 206:
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("content-range", ""))
            if match and int(match[1]) == cursor.position and match[2] in ("*", str(self.size)):
                return
            raise self._wrong_range_error(cursor, f"content-range {headers.get('content-range', '')[:80]!r}")
        kind_of_answer = guess_kind(next(pieces, b"")[:SNIFFED_BYTES])
        if kind_of_answer:
            raise self._wrong_range_error(cursor, f"{status} and {kind_of_answer}")
        raise NetworkError(
            f"bytes {cursor.position:,} to {cursor.end:,} of {self.error_subject}", expected="206 and this range",
            found=f"{status} and the file from its start",
            do="A proxy may have dropped the Range header; HF_ENDPOINT can name another mirror", path=self.repo_path,
        )  # fmt: skip

    def _wrong_range_error(self, cursor: Cursor, found: str) -> DamagedError:
        return DamagedError(
            f"bytes {cursor.position:,} to {cursor.end:,} of {self.error_subject}",
            expected=f"this range of {self.size:,} bytes",
            found=found, do="A login page or a proxy may have answered; nothing was stored", path=self.repo_path,
        )  # fmt: skip

    def _renew_link(self, link: str) -> None:
        """Ask the Hub for a new link, once for all threads.

        Raises:
            AccessError: the new link was refused too.
            DamagedError: the file on the Hub has changed.
        """
        with self._renewal_lock:
            if self.link != link:
                return
            if self._link_is_renewed and not self._link_works:
                found = f"a fresh one refused by {urlsplit(link).netloc}"
                do = "Check the clock and proxies of this machine"
                raise AccessError(
                    self.error_subject, expected="a link that may be read", found=found, do=do, path=self.repo_path
                )
            new_file = RemoteFile.of(self.repo, self.repo_path)
            if (new_file.etag, new_file.size) != (self.etag, self.size):
                raise DamagedError(
                    self.error_subject, expected=f"ETag {self.etag[:16]}", found=new_file.etag[:16],
                    path=self.repo_path,
                    do="A commit's files never change: tell the mirror's owner",
                )  # fmt: skip
            self.link, self._link_is_renewed, self._link_works = new_file.link, True, False
