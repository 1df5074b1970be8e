"""What a network can do: found out once, on random inputs, and remembered as long as its module lives."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from checkpoints_zoo.networks.ensemble.program import Program, safe_norms
from checkpoints_zoo.networks.ensemble.tracing import program_of

if TYPE_CHECKING:
    from checkpoints_zoo.networks.ensemble.executions import Runner

_BATCH = 3
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest logit; half precision 0.1: it rounds elsewhere
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError)


class Trials:
    """Programs of a network, and which of its executions give the logits of its own code."""

    _known: ClassVar[WeakKeyDictionary[nn.Module, Trials]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.programs: dict[int, Program | None] = {}
        self.verdicts: dict[tuple[object, ...], bool] = {}
        self.widths: dict[tuple[int, ...], int] = {}
        self.lock = RLock()  # the module's own code runs in one thread at a time: it holds the weights meanwhile

    @classmethod
    def of(cls, skeleton: nn.Module) -> Trials:
        return cls._known.setdefault(skeleton, Trials())

    def program(self, skeleton: nn.Module, rank: int) -> Program | None:
        if rank not in self.programs:
            self.programs[rank] = program_of(skeleton, rank)
        return self.programs[rank]

    def passed(self, what: str, runner: Runner, inputs: Tensor) -> bool:
        """Say whether two members give what their module's own code gives, up to rounding.

        Args:
            what: "program" or "vmap".
            runner: of the members.
            inputs: of the shape and dtype that count; their values don't.
        """
        autocast = torch.is_autocast_enabled(runner.device.type)
        key = (what, runner.device.type, inputs.dtype, tuple(inputs.shape[1:]), autocast)
        if key not in self.verdicts:
            # A network may draw random numbers; the caller's are not touched.
            with (
                self.lock,
                torch.no_grad(),
                torch.random.fork_rng([runner.device] if runner.device.type == "cuda" else []),
            ):
                verdict = self._try(what, runner, inputs)
            if verdict is None:
                return False
            self.verdicts[key] = verdict
        return self.verdicts[key]

    def _try(self, what: str, runner: Runner, inputs: Tensor) -> bool | None:
        random = torch.randn((_BATCH, *inputs.shape[1:]), generator=torch.Generator().manual_seed(0), device="cpu")
        random = random.to(runner.device, inputs.dtype)
        state = {n: t[:2] for n, t in runner.last.items()}
        members = len(next(iter(state.values())))
        wanted: list[object] = [
            runner.through_module({n: t[i] for n, t in state.items()}, random) for i in range(members)
        ]
        if not all(isinstance(w, Tensor) and torch.isfinite(w).all() for w in wanted):
            return None  # these two members tell nothing
        try:
            if what == "program":
                program = self.programs[inputs.dim()]
                if program is None:
                    return False
                found = program.run(program.ready(state, safe_norms(program.norms, state)), random, members, True)
            else:
                found = torch.func.vmap(lambda s: runner.through_module(s, random))(state)
        except _REFUSALS:
            return False
        logits = torch.stack([w for w in wanted if isinstance(w, Tensor)])
        if (found.shape, found.dtype) != (logits.shape, logits.dtype):
            return False
        close = _CLOSE.get(logits.dtype, 0.1) * logits.abs().max()
        return bool((found - logits).abs().max() <= close)

    def widest(self, runner: Runner, program: Program | None, inputs: Tensor) -> int:
        """Return the bytes of a member's widest activation, an input; without a program it is guessed."""
        shape = tuple(inputs.shape[1:])
        if program is None:
            return 8 * inputs[:1].numel() * inputs.element_size()
        if shape not in self.widths:
            sizes: list[int] = []
            with torch.no_grad():
                ready = program.ready({n: t[:1] for n, t in runner.last.items()})
                program.run(ready, torch.zeros_like(inputs[:1]), 1, False, sizes)
            self.widths[shape] = max(sizes)
        return self.widths[shape] * inputs.element_size()
