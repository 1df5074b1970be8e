"""The token of the login on the Hub: `HF_TOKEN`, or what `hf auth login` stored. It is sent to the Hub alone."""

from __future__ import annotations

from typing import Any

from checkpoints_zoo.errors import AccessError
from checkpoints_zoo.sources.hub_addresses import is_hub_link

LOGIN_ADVICE = "log in with `hf auth login` or set HF_TOKEN"


def has_token() -> bool:
    """Say whether somebody is logged in."""
    from huggingface_hub import get_token

    return bool(get_token())


def check_token() -> None:
    """Check that the token can be sent in a header.

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


def headers_for(link: str, **client: Any) -> dict[str, str]:
    """Return the headers of a request: with the token if the link leads to the Hub, without it if the link leads to the
    storage behind the Hub or elsewhere.

    Args:
        link: web address of the request.
        client: name and version of this package, as the Hub's client takes them.
    """
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    return build_hf_headers(token=None if is_hub_link(link) else False, **client)
