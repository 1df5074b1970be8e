"""Ensembles of nets that can't run side by side, or share layers: through their own code, with the same logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from tests.support.ensemble_nets import (
    HERE,
    Base,
    ByValue,
    Counting,
    Cumulative,
    assert_close,
    ensemble,
    images,
    looped,
    stacked,
)  # fmt: skip


class Functional(Base):
    """Batch norm as a function, on the batch's own statistics: inputs are not independent."""

    def forward(self, x: Tensor) -> Tensor:
        return self.end(F.batch_norm(self.conv(x), None, None, training=True))


class OwnStatistics(Base):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm
        return self.end(F.batch_norm(self.conv(x), n.running_mean, n.running_var, n.weight, n.bias, False, 0.0, 1e-5))


class Shuffled(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x))[:, [2, 0, 1, 3]])


class Overwritten(Base):
    """What is read after it was overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = x.relu_()
        return self.end(self.norm(y) + x)


class AcrossInputs(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return self.end(x - x.mean((0, 2, 3), keepdim=True))


class Reversed(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.end(1 - self.norm(self.conv(x)))


class Subclassed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = type("Own", (nn.BatchNorm2d,), {"forward": lambda self, x: -nn.BatchNorm2d.forward(self, x)})(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x)))


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.conv(x)))


ALONE = [ByValue, Counting, Functional, OwnStatistics, Shuffled, Overwritten, AcrossInputs, Reversed,
         Cumulative, Subclassed, Hooked]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("build", ALONE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("batch", [1, 9])
def test_all_other_nets_run_their_own_code(build: type[Base], batch: int) -> None:
    x = images(batch)
    made, wanted = looped(build, x, 9)
    for execution in ("loop", None):
        assert_close(ensemble(build, made, execution)(x), wanted)
    with pytest.raises(UsageError, match=r"^execution 'grouped': expected a network all of whose operations are known"):
        ensemble(build, made, "grouped")(x)


def test_vmap_that_a_net_cannot_take() -> None:
    made, _ = looped(ByValue, images())
    with pytest.raises(UsageError) as caught:
        ensemble(ByValue, made, "vmap")(images())
    assert str(caught.value) == (
        "execution 'vmap': expected a network that torch.func.vmap gives the logits of its own code; found ByValue."
        " Take 'loop' or None."
    )


class Shared(nn.Module):
    """One convolution and norm called twice, and a kernel tied to another's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.conv, self.norm, self.tied = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.tied.weight = self.conv.weight
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = self.norm(self.conv(x)).relu()
        y = self.conv(x)
        x = self.norm(y) + y + self.tied(x)
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("execution", [*HERE, None])
def test_layers_that_are_used_twice_and_tied_kernels(execution: str | None) -> None:
    x = images(9)
    made, wanted = looped(Shared, x, 9)
    program = derive_program(made[0], 4)
    assert program is not None
    assert len(program.norms) == 2  # the third call's convolution is read by another layer too
    assert_close(ensemble(Shared, made, execution)(x), wanted)
    state = stacked(made)
    state["tied.weight"] = state["tied.weight"] + 1  # where tied names differ the last one counts
    for m in made:
        m.tied.weight.data.add_(1)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        changed = torch.stack([m(x) for m in made])
    ens = Ensemble(copy.deepcopy(made[0]).requires_grad_(False), state, range(9), execution=execution)
    assert_close(ens(x), changed)


def test_random_numbers_are_the_callers() -> None:
    class Drawing(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.end(F.dropout(self.norm(self.conv(x)), 0.5))

    x = images()
    made, _ = looped(Drawing, x, 3)
    torch.manual_seed(3)
    with torch.no_grad():
        wanted = torch.stack([m(x) for m in made])
    torch.manual_seed(3)
    assert torch.equal(ensemble(Drawing, made)(x), wanted)
