"""The protocol of a method: settings of an approximate posterior, and the draws that its fit returns.

Axes: draws are (draw, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from torch import Tensor, vmap

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.gradients import explain_vmap_errors

POSTERIORS_REQUIREMENT = "posteriors>=0.1,<0.2"  # Requirement of the methods that run on the package posteriors.
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Run:
    """The draws of one run of a method, and numbers that describe the run's fit.

    Args:
        states: stacked state dicts of the recipe's network, name -> (draw, *shape), float32 on the CPU, without
            counters.
        facts: name -> number that describes the fit: acceptance, step size, evidence, and the like.
    """

    states: Tensors
    facts: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Method(Protocol):
    """A way to draw networks: a frozen dataclass whose fields are the settings, plain JSON values with defaults.

    Attributes:
        name: name of the method, as in `zoo-cli compare --methods`.
        title: title of the method, in one line.
        source: citation of the paper.
        needs: further packages that the method needs, as pip takes them.
        independent: whether each run is one independently trained member.

    A class may have a `version`, a whole number, which rises when the same settings give other draws, so that stored
    draws are fitted again. A class without a `version` has version 1.
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
            runs: number of runs; the seeds of the first runs do not depend on this number, nor do their draws if
                runs are not computed together.
            draws: number of draws of each run.
            seed: seed of all random numbers.

        Raises:
            UsageError: the method can't be used for the network, or a package is missing.
        """

    @classmethod
    def grid(cls, problem: Problem) -> Sequence[Self]:
        """Return the settings that a search tries on a problem."""


def version_of(method: Method | type[Method]) -> int:
    """Return the version of a method, 1 if its class has none.

    Raises:
        UsageError: the version is not a whole number of 1 or more.
    """
    version = getattr(method, "version", 1)
    if not whole_number_range(1).allows(version):
        raise UsageError(f"version of {method.name}", expected=whole_number_range(1).expected, found=repr(version))
    return int(version)


@dataclass(frozen=True)
class SettingRange:
    """The allowed values of a setting.

    Args:
        expected: description that follows "expected" in an error.
        allows: function that returns whether a value of any type is allowed.
    """

    expected: str
    allows: Callable[[Any], bool]


def number_range(expected: str, allows: Callable[[float], bool]) -> SettingRange:
    """Return a range that allows some finite numbers.

    >>> number_range("above 0", lambda value: value > 0).allows(float("nan"))
    False
    """
    return SettingRange(
        f"a number {expected}", lambda value: _is_instance(value, int, float) and math.isfinite(value) and allows(value)
    )


def whole_number_range(smallest: int) -> SettingRange:
    """Return a range that allows whole numbers from a smallest one on.

    >>> whole_number_range(1).expected, whole_number_range(1).allows(2.5)
    ('a whole number from 1', False)
    """
    return SettingRange(f"a whole number from {smallest}", lambda value: _is_instance(value, int) and value >= smallest)


def choice_range(*values: str) -> SettingRange:
    """Return a range that allows some words."""
    return SettingRange(" or ".join(values), lambda value: value in values)


def _is_instance(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


POSITIVE_RANGE = number_range("above 0", lambda value: value > 0)
SHARE_RANGE = number_range("between 0 and 1", lambda value: 0 < value < 1)
_NON_NEGATIVE_RANGE = number_range("from 0", lambda value: value >= 0)

# A setting has the same meaning and range in every method that has a setting of this name.
_SETTING_RANGES: dict[str, SettingRange] = {
    "lr": POSITIVE_RANGE,
    "temperature": _NON_NEGATIVE_RANGE,
    "scale": _NON_NEGATIVE_RANGE,
    "var_clamp": _NON_NEGATIVE_RANGE,
    "rate": SHARE_RANGE,
    "target": SHARE_RANGE,
    "friction": number_range("above 0 and at most 1", lambda value: 0 < value <= 1),
    "exploring": number_range("from 0 and below 1", lambda value: 0 <= value < 1),
    "init_log_sd": number_range("that is finite", lambda value: True),
    "burn_in": whole_number_range(0),
    "warmup": whole_number_range(0),
    "thinning": whole_number_range(1),
    "batch_size": whole_number_range(1),
    "cycle": whole_number_range(1),
    "cycles": whole_number_range(1),
    "epochs": whole_number_range(1),
    "steps": whole_number_range(1),
    "samples": whole_number_range(1),
    "max_num_models": whole_number_range(2),
    "diag_covariance": SettingRange("True or False", lambda value: isinstance(value, bool)),
    "start": choice_range("mode", "random"),
    "prior": choice_range("weight-decay", "evidence"),
}


def check_settings(method: Any, runs: int, draws: int, **narrower: SettingRange) -> None:
    """Check the settings of a method, and the numbers of runs and draws.

    Args:
        method: a frozen dataclass with a `name`.
        runs, draws: numbers of runs and draws, 1 or more.
        narrower: ranges of settings for which this method allows fewer values than others do.

    Raises:
        UsageError: a value is out of its range.
    """
    settings = {field.name: getattr(method, field.name) for field in fields(method)}
    ranges = _SETTING_RANGES | narrower
    for name, value in settings.items():
        if not ranges[name].allows(value):
            raise UsageError(f"{name} of {method.name}", expected=ranges[name].expected, found=repr(value))
    for name, setting in (("runs", runs), ("draws", draws)):
        if not whole_number_range(1).allows(setting):
            raise UsageError(f"{name} of {method.name}", expected=whole_number_range(1).expected, found=repr(setting))


def log_posterior(problem: Problem) -> Callable[[Tensors, Batch], tuple[Tensor, Tensor]]:
    """Make the log density of the product of all runs' posteriors, for the package posteriors; return the function.

    The function takes stacked parameters and a batch for each run, and returns the sum over the runs, in nats of the
    whole data, and each run's value, (run,). For a network that torch.vmap can't map over runs, the function raises
    UsageError.
    """
    log_posterior_of_each = vmap(lambda params, batch: problem.log_posterior(params, batch)[0])
    architecture = problem.recipe.architecture

    def sum_of_log_posteriors(stacked_params: Tensors, stacked_batches: Batch) -> tuple[Tensor, Tensor]:
        with explain_vmap_errors(
            architecture, "the runs", "Take swag, hmc or laplace, which run one network after another"
        ):
            by_run = log_posterior_of_each(stacked_params, stacked_batches)
        return by_run.sum(), by_run

    return sum_of_log_posteriors
