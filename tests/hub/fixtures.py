"""Fixtures: one Hub a session, empty at the start of each test, with a client that knows no other.

The client reads HF_ENDPOINT when it is imported. So conftest.py calls `prepare()` before anything imports it.
That only binds the port: until the first test asks for a Hub, connections to it are refused.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .hub import WRITER, Hub
from .server import HOST, Server, bound

CALLERS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_CACHE",
    "HF_ASSETS_CACHE",
    "HF_XET_CACHE",
    "HF_TOKEN_PATH",
)
reserved: list[socket.socket] = []


def prepare() -> None:
    """Bind the port of the session's Hub and point the client at it. To be called once, before its import."""
    reserved.append(bound())
    for name in CALLERS:
        os.environ.pop(name, None)
    os.environ.update(
        HF_ENDPOINT=f"http://{HOST}:{reserved[0].getsockname()[1]}",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        HF_HUB_DISABLE_UPDATE_CHECK="1",
        NO_PROXY=f"{HOST},localhost",
        no_proxy=f"{HOST},localhost",
    )


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """Run the session's Hub; tests take `hub` or `hub_xet`."""
    with Server(tmp_path_factory.mktemp("hub"), sock=reserved[0]) as running:
        yield running


@pytest.fixture
def hub(hub_server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Give an empty Hub, and a client that is online, logged in as alice, without Xet, with empty caches."""
    from huggingface_hub import HfFileSystem, constants

    hub_server.wipe()
    assert hub_server.url == constants.ENDPOINT, "huggingface_hub was imported before hub.fixtures.prepare()"
    home = tmp_path / "hf-home"
    for name, value in {"HF_HOME": str(home), "HF_TOKEN": WRITER, "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)  # for processes that a test starts
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    caches = {"HF_HUB_CACHE": "hub", "HUGGINGFACE_HUB_CACHE": "hub", "HF_ASSETS_CACHE": "assets"}
    for name, folder in {**caches, "HF_XET_CACHE": "xet"}.items():
        monkeypatch.setattr(constants, name, str(home / folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    if "datasets" in sys.modules:
        config = sys.modules["datasets"].config
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(home / "datasets"))
    HfFileSystem.clear_instance_cache()
    yield hub_server
    hub_server.faults.clear()
    assert not hub_server.errors, f"the Hub itself failed: {hub_server.errors}\n{hub_server.log}"


@pytest.fixture
def hub_xet(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """Give a Hub with Xet storage, to a client that uses it; skip where hf_xet takes no local:// address."""
    from huggingface_hub import constants

    if reason := refusal(tmp_path / "probe"):
        pytest.skip(f"this hf_xet keeps nothing under a local:// address: {reason}")
    hub.xet = True
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "0")
    return hub


def refusal(folder: Path) -> str:
    """Try a small upload into the folder with hf_xet, and return why it failed; "" if it did not."""
    try:
        import hf_xet

        with hf_xet.XetSession().new_upload_commit(endpoint=f"local://{folder}") as commit:
            commit.start_upload_bytes(b"probe")
    except Exception as error:  # noqa: BLE001 - Rust's errors share no class
        return repr(error)
    return "" if list(folder.glob("xet/xorbs/shards/*.mdb")) else "no shard was written"


class Clock:
    """The `time` module, but `sleep` only writes down for how long."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def __getattr__(self, name: str):
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Add to `waits`."""
        self.waits.append(seconds)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the client's retries follow at once, and give the seconds it would have waited."""
    from huggingface_hub import file_download
    from huggingface_hub.utils import _http

    clock = Clock()
    for module in (file_download, _http):
        monkeypatch.setattr(module, "time", clock)
    return clock.waits
