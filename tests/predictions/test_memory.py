"""Logits that do not fit into the memory: said before they are all computed, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import TooLargeError
from checkpoints_zoo.networks import device
from checkpoints_zoo.predictions import running
from tests.support.scenarios import build, load
from tests.support.stored_sets import by_loop, few


def test_more_logits_than_fit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = build(tmp_path, members=range(3))
    members = load(built)
    monkeypatch.setattr(device, "free_bytes", lambda device: 3 * 9 * 10 * 4 - 1)
    with pytest.raises(TooLargeError) as caught:
        zoo.evaluate(members, few())
    assert str(caught.value) == (
        "logits of 3 members of tiny on 9 inputs: expected at most 1,079 bytes, the memory that is free; found 1,080. "
        "Store them with `members.predict('few', folder)`, and give these predictions instead of the members: they are "
        "read in blocks."
    )
    assert caught.value.collection == "tiny"
    monkeypatch.setattr(device, "free_bytes", lambda device: 3 * 9 * 10 * 4)
    found = running.logits(members, few())
    for at in range(3):
        torch.testing.assert_close(found[at], by_loop(built, at, few()), rtol=1e-5, atol=1e-6)
