"""What the figures refuse, each with its text."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoints_zoo.evaluation import metrics

HALVES, ZEROS = torch.full((2, 2), 0.5), torch.tensor([0, 0])
SCORES, BOTH = torch.tensor([-0.5, -0.9]), torch.tensor([True, False])
NAN = torch.tensor([[math.nan, 0.5], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("figure", "arguments", "text"),
    [
        (
            metrics.accuracy,
            (HALVES[0], ZEROS),
            "probs: expected axes (input, class); found shape (2,). Reshape it, one axis for each name.",
        ),
        (
            metrics.mutual_information,
            (HALVES,),
            "probs: expected axes (member, input, class); found shape (2, 2). Reshape it, one axis for each name.",
        ),
        (
            metrics.entropy,
            (torch.tensor(1.0),),
            "probs: expected an axis of classes; found shape (). Give a tensor with a class axis.",
        ),
        (
            metrics.ece,
            (HALVES.half(), ZEROS),
            "probs: expected dtype float32 or float64; found float16. Convert it with probs.float().",
        ),
        (
            metrics.ace,
            (HALVES[:0], ZEROS[:0]),
            "probs: expected at least one value; found shape (0, 2). Check what was selected before it.",
        ),
        (
            metrics.aurc,
            (NAN, ZEROS),
            "probs: expected no NaN; found 1 in 4 values. Check the weights of the members.",
        ),
        (
            metrics.disagreement,
            (HALVES[None] - 1,),
            "probs: expected no negative value; found -0.5. Logits need a softmax.",
        ),
        (
            metrics.ood_score,
            (HALVES * 1.5,),
            "probs: expected a sum of 1 over the classes; found 1.5. Give all classes, normalised.",
        ),
        (
            metrics.nll,
            (HALVES, ZEROS),
            "log_probs: expected a sum of exp of 1 over the classes; found 3.297. "
            "Give log_softmax of the logits, not logits or probabilities.",
        ),
        (
            metrics.brier,
            (HALVES, ZEROS[:1]),
            "labels: expected shape (2,); found shape (1,). Give one value an input.",
        ),
        (
            metrics.adaptive_ece,
            (HALVES, ZEROS.int()),
            "labels: expected dtype int64; found int32. Convert them with labels.long().",
        ),
        (
            metrics.reliability,
            (HALVES, ZEROS + 2),
            "labels: expected classes 0 to 1; found 2. Check the class order of the data set.",
        ),
        (
            metrics.accuracy,
            (HALVES, ZEROS - 1),
            "labels: expected classes 0 to 1; found -1. Check the class order of the data set.",
        ),
        (
            metrics.accuracy,
            (HALVES, ZEROS.to("meta")),
            "labels: expected device cpu; found meta. Move it there with labels.to.",
        ),
        (metrics.ece, (HALVES, ZEROS, 0), "bins: expected at least 1; found 0. Give more bins."),
        (
            metrics.auroc,
            (SCORES, torch.tensor([True, True])),
            "is_ood: expected inputs of both kinds; found 2 of 2 out of distribution. "
            "Join the scores of both data sets.",
        ),
        (
            metrics.aupr,
            (SCORES, BOTH.long()),
            "is_ood: expected dtype bool; found int64. Convert it with is_ood.bool().",
        ),
        (
            metrics.fpr95,
            (SCORES, BOTH[:1]),
            "is_ood: expected shape (2,); found shape (1,). Give one value an input.",
        ),
        (
            metrics.fpr95,
            (SCORES * math.nan, BOTH),
            "scores: expected no NaN; found 2 in 2 values. Check the weights of the members.",
        ),
        (
            metrics.auroc,
            (HALVES, BOTH),
            "scores: expected axes (input,); found shape (2, 2). Reshape it, one axis for each name.",
        ),
    ],
)
def test_bad_input_is_refused(figure: Callable[..., Tensor], arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        figure(*arguments)
    assert str(error.value) == text
