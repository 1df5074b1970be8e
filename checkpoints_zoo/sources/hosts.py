"""Hosts that may be asked: those that the user named, no private address behind a public one, no token elsewhere.

The user names hosts: by HF_ENDPOINT, and by the address of a source. What a source says, in a manifest or in an answer,
was written by others. Three rules follow.

1. A manifest names no new hosts (`check_named`).
2. A link or redirect from a public host leads to no private or loopback address (`check_link`).
3. A login is sent to the origin that it belongs to, and to no other (`same_origin`).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from checkpoints_zoo.errors import AccessError

PORTS = {"http": 80, "https": 443}


def origin(address: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a web address; ("", "", 0) if it is none.

    >>> origin("https://zenodo.org/records/1"), origin("file:///home"), origin("http://[::1]:8000/a")
    (('https', 'zenodo.org', 443), ('', '', 0), ('http', '::1', 8000))
    """
    try:
        parts = urlsplit(address)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # The port is no number, or a bracket is missing.
        return "", "", 0
    if parts.scheme not in PORTS or not host:
        return "", "", 0
    return parts.scheme, host, PORTS[parts.scheme] if port is None else port


def same_origin(address: str, other_address: str) -> bool:
    """Say whether two web addresses have the same scheme, host and port: a login for one may be sent to the other.

    >>> same_origin("https://hf.co/a", "https://HF.co:443/b"), same_origin("https://hf.co/a", "http://hf.co/a")
    (True, False)
    """
    return origin(address) == origin(other_address) != ("", "", 0)


def check_named(address: str, named_addresses: Iterable[str], subject: str) -> None:
    """Check that an address from a manifest is on a host that the user named.

    Args:
        address: the web address that the manifest has.
        named_addresses: web addresses whose hosts the user named, such as the source's own.
        subject: noun for the address in the error, such as "file weights.bin of https://…".

    Raises:
        AccessError: the address is no web address, or is on another host.
    """
    named_hosts = sorted({host for _, host, _ in map(origin, named_addresses) if host})
    scheme, host, _ = origin(address)
    if not scheme or host not in named_hosts:
        raise AccessError(
            subject,
            expected=f"a host that you named ({', '.join(named_hosts) or 'none'})",
            found=repr(host or address)[:120],
            do="A manifest may send nobody to other hosts. If you trust this one, give its address as the source",
        )


def check_link(link: str, linking_address: str, subject: str) -> None:
    """Check that a link or redirect of a public host does not lead to a private address. A host that is private itself,
    as an institute's mirror is, may link to private ones.

    Args:
        link: web address that the host answered with.
        linking_address: web address of the host.
        subject: noun for what is read in the error, such as "file weights.bin of https://…".

    Raises:
        AccessError: the link is no web address, holds a login, or leads to a private address.
    """
    scheme, host, _ = origin(link)
    host_text = repr(host or link)[:120]
    if not scheme or "@" in urlsplit(link).netloc:
        raise AccessError(subject, expected="a link to http:// or https://, without a login", found=host_text)
    linking_host = origin(linking_address)[1]
    if host != linking_host and is_private(host) and not is_private(linking_host):
        raise AccessError(
            subject,
            expected=f"a link of {linking_host} to a public address",
            found=f"{host_text}, an address of this machine or its network",
            do="Nothing was asked there. Tell the producer, or check the proxies of this machine",
        )


@lru_cache(maxsize=256)
def is_private(host: str) -> bool:
    """Say whether one of a host's addresses is not public: loopback, private, link-local or reserved. A name that has
    no address here is not private: a proxy may know it, which then asks for this machine.

    >>> is_private("127.0.0.1"), is_private("169.254.169.254"), is_private("8.8.8.8")
    (True, True, False)
    """
    try:
        addresses = [ipaddress.ip_address(host)]
    except ValueError:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # UnicodeError: a part of the name is empty or too long.
            return False
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    # An IPv6 address may hold an IPv4 one, such as ::ffff:127.0.0.1.
    plain = [getattr(address, "ipv4_mapped", None) or address for address in addresses]
    return any(not address.is_global or address.is_multicast for address in plain)
