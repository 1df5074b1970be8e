"""Members as one module: stacked parameters and a batch of inputs give logits (member, batch, class)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from checkpoints_zoo import modules
from checkpoints_zoo.errors import DamagedError, UsageError


class Ensemble(nn.Module):
    """Independent members behind one call, in eval mode.

    Args:
        skeleton: the members' module; its own parameters are never used.
        stacked: parameters and buffers, name -> (member, …).
        ids: of the members, in the order of the stack.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=3)
    >>> ensemble = members.ensemble()
    >>> images = zoo.images.load("digits").images[:5]
    >>> ensemble(members.preprocess(images)).shape  # (member, batch, class)
    torch.Size([3, 5, 10])
    """

    def __init__(self, skeleton: nn.Module, stacked: Mapping[str, Tensor], ids: Sequence[int]) -> None:
        super().__init__()
        self.training = False
        self.ids = list(ids)
        self._skeleton = (skeleton,)  # in a tuple, so that it is no submodule and `.to` leaves it alone
        self._stacked = modules.settled(stacked)
        # Of names tied to one tensor the last counts, as in a strict load.
        self._last = set({id(t): n for n, t in skeleton.state_dict(keep_vars=True).items()}.values())
        self._loose = {
            name: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)
            for name, t in modules.loose(skeleton).items()
        }

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        kind = type(self._skeleton[0]).__name__
        return f"Ensemble({len(self)} × {kind}, {self.dtype}, {self.device})"

    @property
    def stacked(self) -> dict[str, Tensor]:
        """The members' parameters and buffers, name -> (member, …)."""
        return self._stacked

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that inputs must have; layers with running statistics may hold wider ones."""
        return modules.input_dtype(self._stacked)

    @property
    def device(self) -> torch.device:
        return next(iter(self._stacked.values())).device

    def forward(self, inputs: Tensor) -> Tensor:
        """Run every member on a batch of inputs; return logits (member, batch, class).

        Args:
            inputs: preprocessed, (batch, channel, height, width), of the ensemble's dtype and on its device.

        Raises:
            UsageError: inputs of another dtype or on another device.
            DamagedError: a member's logits are not finite though its inputs are.
        """
        if inputs.dtype != self.dtype or inputs.device != self.device:
            raise UsageError(
                "inputs of the ensemble",
                expected=f"{self.dtype} on {self.device}",
                found=f"{inputs.dtype} on {inputs.device}",
                do="Give members.preprocess(images), then .to(...) if another device or dtype is meant",
            )
        logits = torch.stack([self._member(i, inputs) for i in range(len(self))])
        if not torch.isfinite(logits).all() and torch.isfinite(inputs).all():
            bad = ~torch.isfinite(logits).flatten(1).all(1)
            raise DamagedError(
                f"logits of members {', '.join(str(self.ids[int(i)]) for i in bad.nonzero()[:5])}",
                expected="finite numbers",
                found="infinite ones or NaN",
                do="`zoo-cli verify` says whether their weights are damaged",
            )
        return logits

    def _member(self, i: int, inputs: Tensor) -> Tensor:
        state = {name: tensor[i] for name, tensor in self._stacked.items() if name in self._last}
        logits: Tensor = functional_call(self._skeleton[0], state | self._loose, (inputs,))
        return logits

    def train(self, mode: bool = True) -> Ensemble:
        """Stay in eval mode; asked for training mode, say why not.

        Raises:
            UsageError: if `mode` is true.
        """
        if mode:
            raise UsageError(
                "ensemble.train()",
                expected="eval mode: the members are finished, and batch statistics would mix their inputs",
                do="Take members[i].model() to train one of them further",
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ensemble:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._loose = {name: fn(tensor) for name, tensor in self._loose.items()}
        norms = modules.norm_tensors(self._stacked)
        for name, tensor in self._stacked.items():
            moved = fn(tensor)
            if name in norms and moved.is_floating_point() and moved.dtype.itemsize < 4:
                moved = tensor.to(moved.device, torch.float32)  # a variance can be infinite in float16
            self._stacked[name] = moved
        return self
