"""Addresses inside repos of the Hub: hf://datasets/ORG/NAME[@REVISION][/PATH]."""

from __future__ import annotations

from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats import manifest
from checkpoints_zoo.sources import hub


def apart(address: str, what: str) -> tuple[str, str]:
    """Take an address apart; return that of the repo, and the path inside it, "" for none.

    An address of another form is returned as it is: `hub.resolve` says what is wrong with it.

    Args:
        address: on the Hub.
        what: lies there, for errors.

    Raises:
        SourceNotFound: a path that leads out of the repo.

    >>> apart("hf://datasets/me/zoo@v1/shards/a.tar", "source")
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
        raise SourceNotFound(f"{what} {address}", expected="a path inside the repo", found=problem, path=path)
    kind = f"{uri.type}s/" if uri.type != "model" else ""
    return f"{hub.SCHEME}{kind}{uri.id}{f'@{uri.revision}' if uri.revision else ''}", path
