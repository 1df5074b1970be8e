"""Faults of the Hub that stay: where each strikes, what is answered, and the error that a user sees."""

from __future__ import annotations

from typing import Any

from checkpoints_zoo.errors import AccessError, DamagedError, NetworkError, SourceNotFound, ZooError
from tests.hub.faults import HTML

BYTES = "/_cdn/.*/shards/"
RANGE = "bytes 22,824 to 37,456 of file FILE"
FAULTS: list[tuple[str, dict[str, Any], type[ZooError], str]] = [
    (
        "/api/", {"status": 401}, AccessError,
        "revision 'main' of ADDRESS: expected a login that the Hub takes; "
        "found 401 Unauthorized: the token was refused. "
        "Replace it (HF_TOKEN, or `hf auth login`), or unset it: public repos need none.",
    ),
    (
        "/api/", {"status": 403}, AccessError,
        "revision 'main' of ADDRESS: expected permission to read; "
        "found 403 Forbidden. "
        "Log in with `hf auth login` or set HF_TOKEN.",
    ),
    (
        "/api/", {"status": 404, "code": "RepoNotFound"}, SourceNotFound,
        "revision 'main' of ADDRESS: expected a data set repo; "
        "found none that this login may see. "
        "Check its name; if it is private, log in with `hf auth login` or set HF_TOKEN.",
    ),
    (
        "/api/", {"status": 404, "code": "RevisionNotFound"}, SourceNotFound,
        "revision 'main' of ADDRESS: expected a branch, tag or commit; "
        "found no such revision.",
    ),
    (
        "/api/", {"status": 503}, NetworkError,
        "revision 'main' of ADDRESS: expected an answer from HOST; "
        "found 503 Service Unavailable. "
        "Try again: what has arrived is kept.",
    ),
    (
        "/api/", {"body": HTML}, NetworkError,
        "revision 'main' of ADDRESS: expected a commit from HOST; "
        "found a web page. "
        "A login page or a proxy may have answered; HF_ENDPOINT sets the address of the Hub.",
    ),
    (
        "resolve/.*/shards/", {"status": 403, "code": "GatedRepo"}, AccessError,
        "file FILE: expected access to the repo; "
        "found a gated one. "
        "Ask for access at http://HOST/datasets/alice/zoo, then log in with `hf auth login` or set HF_TOKEN.",
    ),
    (
        "resolve/.*/shards/", {"status": 404, "code": "EntryNotFound"}, SourceNotFound,
        "file FILE: expected a file, since a manifest names it; "
        "found no such file at this commit.",
    ),
    (
        "resolve/.*/shards/", {"status": 429, "headers": {"Retry-After": "30"}}, NetworkError,
        "file FILE: expected an answer; "
        "found 429 Too Many Requests: the Hub's rate limit. "
        "Try again in 30 s: what has arrived is kept. "
        "Logged in, the limit is higher.",
    ),
    (
        "resolve/.*/shards/", {"headers": {"X-Linked-Size": "0"}}, DamagedError,
        "file FILE: expected 37,456 bytes or more, as the manifest says; "
        "found 0 bytes. "
        "Manifest and file do not belong together: tell the producer.",
    ),
    (
        BYTES, {"status": 500}, NetworkError,
        "file FILE: expected an answer from HOST; "
        "found 500 Internal Server Error. "
        "Try again: what has arrived is kept.",
    ),
    (
        BYTES, {"status": 416}, DamagedError,
        "file FILE: expected the bytes that the manifest names; "
        "found 416 Requested Range Not Satisfiable: the file is shorter. "
        "Tell its producer.",
    ),
    (
        BYTES, {"whole": True}, NetworkError,
        f"{RANGE}: expected 206 and this range; "
        f"found 200 and the file from its start. "
        f"A proxy may have dropped the Range header; HF_ENDPOINT can name another mirror.",
    ),
    (
        BYTES, {"body": HTML}, DamagedError,
        f"{RANGE}: expected this range of 154,512 bytes; "
        f"found 200 and a web page. "
        f"A login page or a proxy may have answered; nothing was stored.",
    ),
    (
        BYTES, {"expire": True}, AccessError,
        "file FILE: expected a link that may be read; "
        "found a fresh one refused by CDN. Check the clock and proxies of this machine.",
    ),
    (BYTES, {"cut": 0}, NetworkError, f"{RANGE}: expected all of them; found RemoteProtocolError: "),
    (BYTES, {"wrong": 0}, DamagedError, "member 1 in file FILE: expected sha256 "),
]  # fmt: skip
