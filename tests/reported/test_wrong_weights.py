"""Weights and figures are right, or an error says that they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import checkpoints_zoo as zoo
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.publishing.auditing import audit
from tests.support.tiny import stored


class Dropping(nn.Module):
    """A network whose dropout does not stop in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return F.dropout(self.layer(images.flatten(1)), 0.1)


class Noisy(Dropping):
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layer(images.flatten(1))
        return logits + 1e-3 * torch.randn_like(logits)


@pytest.mark.parametrize("build", [Dropping, Noisy])
def test_networks_that_are_random_in_eval_mode_are_refused(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Case 8: their figures do not come back."""
    states = [build().state_dict() for _ in range(2)]
    source = {"method": "vi", "like": "convnet-digits"}
    members = zoo.from_samples(states, build, out=tmp_path / "in", name="net-vi", **source)
    calls: list[Callable[[], object]] = [
        lambda: zoo.evaluate(members, "digits"),
        lambda: zoo.pairwise(members, "digits"),
        lambda: members.predict("digits", tmp_path / "out"),
        lambda: zoo.from_samples(states, build, out=tmp_path / "new", name="net-vi", evaluate="digits", **source),
        lambda: zoo.check_equivalence(members, members, None, torch.ones(2, 1, 8, 8)),
    ]
    for call in calls:
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value) == (
            f"module {build.__name__} in eval mode: expected the same outputs each time; found others in a second run. "
            "Dropout and sampling have to stop in eval mode, as `F.dropout(x, p, self.training)` does."
        )


def test_a_network_that_draws_numbers_and_does_not_use_them_is_measured() -> None:
    """Case 8: the outputs count, not the operations."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__.update(build_architecture("convnet").__dict__)

        def forward(self, images: Tensor) -> Tensor:
            torch.randn(1)
            return type(build_architecture("convnet")).forward(self, images)  # type: ignore[arg-type, no-any-return]

    members = zoo.load("convnet-digits", n=2, architecture=Drawing)
    plain = zoo.load("convnet-digits", n=2)
    assert zoo.evaluate(members, "digits")["nll"].value == pytest.approx(zoo.evaluate(plain)["nll"].value, rel=1e-6)


def test_an_audit_follows_links_to_folders_once(tmp_path: Path) -> None:
    """Case 6, for audit: what lies behind a link to a folder was not looked at."""
    root = stored(range(2), tmp_path / "source")
    before = audit(root)
    assert before.findings == []
    (tmp_path / "elsewhere").mkdir()
    (root / "runs").mkdir()
    (root / "runs" / "circle").symlink_to(root)  # each folder once
    (root / "runs" / "out").symlink_to(tmp_path / "elsewhere")
    (root / ".store").mkdir()
    (root / ".store" / "broken.safetensors").write_bytes(b"no header")
    (root / "runs" / "linked").symlink_to(root / ".store")
    after = audit(root)
    assert after.files == before.files + 1
    assert [f.path for f in after.findings] == ["runs/linked/broken.safetensors"]
