"""The plugin of pytest in a process with simulated cards: `pytest -p tests.simgpu.plugin`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simgpu import cards

cards.install()


@pytest.fixture(autouse=True)
def _no_execution_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a simulated card says nothing: all executions are as fast, so the first is chosen."""
    from checkpoints_zoo.networks.ensemble.executions import Runner

    monkeypatch.setattr(Runner, "seconds_per_member", lambda *_: 0.0)


@pytest.fixture(autouse=True)
def _every_kernel_was_simulated() -> Iterator[None]:
    """A kernel that torch launches itself computes nothing here, so none may be."""
    before, cards.GRAPHS.failures = cards.kernel_count(), []
    yield
    missed = cards.kernel_count() - before
    assert missed == 0, f"{missed} kernels were not simulated"
    assert not cards.GRAPHS.failures, cards.GRAPHS.failures
