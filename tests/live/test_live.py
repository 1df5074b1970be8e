"""The assumptions, against the true Hub: `ZOO_LIVE=1 pytest -m live -s`. A false one is printed, and fails nothing."""

from __future__ import annotations

import pytest

from tests.live.assumptions import BUDGET, Traffic, lines


@pytest.mark.live
def test_what_is_assumed_of_the_hub() -> None:
    traffic, found = Traffic(), []
    for line in lines(traffic):
        print(line)
        found.append(line)
    assert len(found) > 40
    assert traffic.spent <= BUDGET
