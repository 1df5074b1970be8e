"""Addresses on the Hub: the Hub's own, those of repos, and those of repos at one commit."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from checkpoints_zoo.errors import SourceNotFound
from checkpoints_zoo.formats import source_paths
from checkpoints_zoo.sources import hosts

ADDRESS_SCHEME = "hf://"


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


def parse_address(address: str) -> tuple[str, str]:
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
            revision_problem = source_paths.path_refusal(unquote(revision))
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
    if path and (problem := source_paths.path_refusal(path)):
        raise SourceNotFound(f"{subject} {address}", expected="a path inside the repo", found=problem, path=path)
    repo_kind_prefix = f"{uri.type}s/" if uri.type != "model" else ""
    return f"{ADDRESS_SCHEME}{repo_kind_prefix}{uri.id}{f'@{uri.revision}' if uri.revision else ''}", path


def endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def host() -> str:
    return urlsplit(endpoint()).netloc


def is_hub_link(link: str) -> bool:
    """Say whether a link leads to the Hub itself, the only origin that a token is sent to."""
    return hosts.same_origin(endpoint(), link)
