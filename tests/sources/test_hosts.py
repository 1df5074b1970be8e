"""Hosts that may be asked: written addresses of every kind, and names that lead to several addresses."""

import socket
from types import SimpleNamespace

import pytest

from checkpoints_zoo.errors import AccessError
from checkpoints_zoo.sources import hosts, hub_errors

PRIVATE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "::1", "fe80::1", "fc00::1", "::ffff:127.0.0.1", "localhost",
]  # fmt: skip


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Answer names without a network: one has a public and a private address."""
    of_name = {"localhost": ["127.0.0.1"], "public.org": ["8.8.8.8"], "cdn.org": ["1.1.1.1"],
               "both.org": ["8.8.8.8", "10.0.0.1"]}  # fmt: skip

    def getaddrinfo(host, port, *arguments, **options):
        if host not in of_name:
            raise socket.gaierror(f"no such name: {host}")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in of_name[host]]

    hosts.is_private.cache_clear()
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    hosts.is_private.cache_clear()


@pytest.mark.parametrize("host", [*PRIVATE, "both.org"])
def test_a_public_host_links_to_no_private_address(host):
    link = f"http://[{host}]:80/x" if ":" in host else f"http://{host}/x"
    with pytest.raises(AccessError, match=r"a link of public\.org to a public address"):
        hosts.check_link(link, "https://public.org/a", "file a")


def test_links_that_are_followed():
    hosts.check_link("https://cdn.org/x?signed=1", "https://public.org/a", "file a")
    hosts.check_link("http://127.0.0.1:8000/x", "http://127.0.0.1:9000/a", "file a")
    hosts.check_link("http://localhost:8000/x", "http://127.0.0.1:9000/a", "file a")
    hosts.check_link("https://public.org/x", "http://127.0.0.1:9000/a", "file a")


@pytest.mark.parametrize(
    "link", ["file:///etc/passwd", "ftp://cdn.org/x", "https://", "http://a:b@cdn.org/", "x", "//x"]
)
def test_links_of_other_kinds(link):
    with pytest.raises(AccessError, match="a link to http:// or https://, without a login"):
        hosts.check_link(link, "https://public.org/a", "file a")


def test_a_name_without_an_address_is_left_to_the_request():
    hosts.check_link("https://nowhere.invalid/x", "https://public.org/a", "file a")


def test_the_client_follows_no_redirect_of_a_public_host_to_a_private_address():
    answer = SimpleNamespace(
        headers={"location": "/other"}, has_redirect_location=True, status_code=302,
        request=SimpleNamespace(url="https://public.org/a", method="GET"),
    )  # fmt: skip
    hub_errors._check_answer(answer)
    answer.headers = {"location": "http://169.254.169.254/latest"}
    with pytest.raises(AccessError, match=r"answer of public\.org: expected a link of public\.org to a public address"):
        hub_errors._check_answer(answer)


def test_a_manifest_names_no_new_host():
    named = ["https://public.org/data/", "http://127.0.0.1:9/"]
    hosts.check_named("https://public.org/other", named, "file a")
    hosts.check_named("http://127.0.0.1:9/b", named, "file a")
    for address in (
        "https://cdn.org/x",
        "http://169.254.169.254/latest",
        "https://public.org.evil.org/",
        "s3://public.org/",
    ):
        with pytest.raises(AccessError, match=r"a host that you named \(127.0.0.1, public.org\)"):
            hosts.check_named(address, named, "file a")


def test_a_login_stays_at_its_origin():
    assert hosts.same_origin("https://public.org/a", "https://PUBLIC.org:443/b")
    for other in (
        "http://public.org/a",
        "https://public.org:444/a",
        "https://cdn.org/a",
        "https://public.org@cdn.org/",
        "",
    ):
        assert not hosts.same_origin("https://public.org/a", other)
    assert not hosts.same_origin("file:///a", "file:///a")
