"""Settings, runs and draws out of their range: each method refuses them before anything is trained."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.fitting import CHOSEN_SETTINGS, METHODS
from checkpoints_zoo.methods.method import check_settings

WRONG: dict[str, tuple[Any, ...]] = {
    "lr": (0.0, -1.0, math.nan, math.inf, "fast", None),
    "temperature": (-0.1, math.nan, math.inf, True),
    "scale": (-1.0, math.nan),
    "var_clamp": (-1e-9, math.nan),
    "rate": (0.0, 1.0, 1.5, math.nan),
    "target": (0.0, 1.0, math.nan),
    "friction": (0.0, 1.1, math.nan),
    "exploring": (-0.1, 1.0, math.nan),
    "init_log_sd": (math.nan, -math.inf),
    "diag_covariance": (1, "yes"),
    "start": ("mean", None, []),
    "prior": ("none", None),
    **dict.fromkeys(("burn_in", "warmup"), (-1, 2.5, True)),
    **dict.fromkeys(("thinning", "batch_size", "cycle", "cycles", "epochs", "steps", "samples"), (0, 1.5, math.nan)),
    "max_num_models": (1, 2.0, 21),
}


@pytest.mark.parametrize("name", METHODS)
def test_each_setting_has_a_range(name: str) -> None:
    """There is no problem to fit to: what is refused is refused at once."""
    nothing: Any = None
    kind = METHODS[name]
    for field in [field.name for field in dataclasses.fields(kind)]:
        for value in WRONG[field]:
            method: Any = dataclasses.replace(kind(), **{field: value})
            with pytest.raises(UsageError) as error:
                method.fit(nothing, 1, 2, 0)
            text = str(error.value)
            assert text.startswith(f"{field} of {name}: expected "), text
            assert text.endswith(f"; found {value!r}."), text


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("given", "found"), [({"runs": 0}, "runs"), ({"draws": -1}, "draws"), ({"draws": 2.5}, "draws")]
)
def test_runs_and_draws_are_counts(name: str, given: dict[str, Any], found: str) -> None:
    nothing: Any = None
    with pytest.raises(UsageError) as error:
        METHODS[name]().fit(nothing, given.get("runs", 1), given.get("draws", 2), 0)
    assert str(error.value) == f"{found} of {name}: expected a whole number from 1; found {given[found]!r}."


def test_settings_that_are_used_are_in_range() -> None:
    methods = [method for of in CHOSEN_SETTINGS.values() for method in of.values()] + [
        kind() for kind in METHODS.values()
    ]
    for method in methods:
        check_settings(method, 10, 100)
