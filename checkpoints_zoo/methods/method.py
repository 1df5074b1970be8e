"""What a method is: settings that fit an approximate posterior, and the draws that it gives.

Axes: draws are (draw, *shape).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem


@dataclass(frozen=True, eq=False)
class Run:
    """The draws of one run of a method, and what its fit says of itself.

    Args:
        states: stacked state dicts of the recipe's network, name -> (draw, *shape), float32 on the CPU, counters left
            out.
        facts: name -> number: acceptance, step size, evidence, and the like.
    """

    states: Tensors
    facts: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Method(Protocol):
    """A way to draw networks: a frozen dataclass whose fields are the settings, plain JSON values with defaults.

    Attributes:
        name: as `zoo-cli compare --methods` takes it.
        title: in a line.
        source: the paper.
        needs: requirements beside this package, as pip takes them.
        independent: whether each run is one independently trained member.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    independent: ClassVar[bool]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def fit(self, problem: Problem, runs: int, draws: int, seed: int) -> Sequence[Run]:
        """Fit the posterior `runs` times, from different modes, and draw from each; return the runs in order.

        Args:
            problem: the network and its training images.
            runs: how many; the first of them have the same seeds whatever their number, and the same draws where
                runs are not computed together.
            draws: of each run.
            seed: of everything random.

        Raises:
            UsageError: a network that the method can't be used for, or a package that is missing.
        """

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries on a problem."""
