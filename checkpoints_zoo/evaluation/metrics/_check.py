"""Checks of the arguments of metrics: each function raises a ValueError if its check fails.

The text of the error names the argument, the expected value, the value that was found, and a remedy.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Largest distance of a sum of probabilities from 1: a float32 softmax or a mean over members is within 1e-5 of 1, and
# after rounding to float16 within this number.
SUM_TOLERANCE = 1e-3

INPUT_CLASS = ("input", "class")
MEMBER_INPUT_CLASS = ("member", "input", "class")


def argument_error(argument_name: str, expected: str, found: str, advice: str) -> ValueError:
    """Build the error for a metric's wrong argument; return the error, which the caller raises."""
    return ValueError(f"{argument_name}: expected {expected}; found {found}. {advice}.")


def check_floats(argument_name: str, tensor: Tensor, axes: tuple[str, ...] | None = None) -> None:
    """Check that a tensor has the expected axes, is float32 or float64, is not empty and has no NaN; return None.

    Args:
        argument_name: name of the tensor in the error text.
        tensor: the tensor to check.
        axes: names of the tensor's axes; None to accept any number of axes from 1.

    Raises:
        ValueError: the tensor has other axes or another dtype, is empty, or contains NaN.
    """
    shape = f"shape {tuple(tensor.shape)}"
    if axes is not None and tensor.ndim != len(axes):
        axes_text = ", ".join(axes) + ("," if len(axes) == 1 else "")
        raise argument_error(argument_name, f"axes ({axes_text})", shape, "Reshape it, one axis for each name")
    _check_dense(argument_name, tensor)
    if tensor.ndim == 0:
        raise argument_error(argument_name, "an axis of classes", shape, "Give a tensor with a class axis")
    if tensor.dtype not in (torch.float32, torch.float64):
        raise argument_error(
            argument_name, "dtype float32 or float64", _dtype_name(tensor), f"Convert it with {argument_name}.float()"
        )
    if tensor.numel() == 0:
        raise argument_error(argument_name, "at least one value", shape, "Check what was selected before it")
    nan_count = int(tensor.isnan().sum())
    if nan_count:
        raise argument_error(
            argument_name, "no NaN", f"{nan_count} in {tensor.numel()} values", "Check the weights of the members"
        )


def check_probabilities(probs: Tensor, axes: tuple[str, ...] | None = INPUT_CLASS) -> None:
    """Check that probabilities have the expected axes, and sum to one over the last axis; return None.

    Args:
        probs: probabilities; the last axis is the class.
        axes: names of the tensor's axes; None to accept any number of axes.

    Raises:
        ValueError: the probabilities fail this check, contain NaN, or are neither float32 nor float64.
    """
    check_floats("probs", probs, axes)
    lowest_value = float(probs.min())
    if lowest_value < 0:
        raise argument_error("probs", "no negative value", f"{lowest_value:.4g}", "Logits need a softmax")
    low, high = (float(bound) for bound in probs.sum(-1).aminmax())
    if low < 1 - SUM_TOLERANCE or high > 1 + SUM_TOLERANCE:
        worst_sum = high if high - 1 > 1 - low else low
        raise argument_error("probs", "a sum of 1 over the classes", f"{worst_sum:.4g}", "Give all classes, normalised")


def check_log_probabilities(log_probs: Tensor) -> None:
    """Check that log probabilities are (input, class) and sum to one when exponentiated; return None.

    Args:
        log_probs: log probabilities (input, class), in nats; -inf is probability 0.

    Raises:
        ValueError: the log probabilities fail this check, contain NaN, or are neither float32 nor float64.
    """
    check_floats("log_probs", log_probs, INPUT_CLASS)
    low, high = (float(bound) for bound in torch.logsumexp(log_probs, -1).exp().aminmax())
    if low < 1 - SUM_TOLERANCE or high > 1 + SUM_TOLERANCE:
        worst = high if high - 1 > 1 - low else low
        advice = "Give log_softmax of the logits, not logits or probabilities"
        raise argument_error("log_probs", "a sum of exp of 1 over the classes", f"{worst:.4g}", advice)


def check_labels(labels: Tensor, probs: Tensor) -> None:
    """Check that each input has one int64 label, which is the number of a class; return None.

    Args:
        labels: number of the class of each input, (input,).
        probs: probabilities (input, class), which were checked before.

    Raises:
        ValueError: the labels fail this check.
    """
    inputs, classes = probs.shape
    _check_one_per_input("labels", labels, inputs)
    if labels.dtype != torch.int64:
        raise argument_error("labels", "dtype int64", _dtype_name(labels), "Convert them with labels.long()")
    _check_same_device("labels", labels, probs)
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= classes:
        found = str(low if low < 0 else high)
        raise argument_error("labels", f"classes 0 to {classes - 1}", found, "Check the class order of the data set")


def check_ood_scores(is_ood: Tensor, scores: Tensor) -> None:
    """Check that each input has a score and a bool (out of distribution or not), and that both bools occur; return
    None.

    Args:
        is_ood: whether each input is out of distribution, (input,) bool.
        scores: scores (input,), higher for inputs that look more out of distribution.

    Raises:
        ValueError: scores or labels fail this check, scores contain NaN or are neither float32 nor float64.
    """
    check_floats("scores", scores, ("input",))
    _check_one_per_input("is_ood", is_ood, len(scores))
    if is_ood.dtype != torch.bool:
        raise argument_error("is_ood", "dtype bool", _dtype_name(is_ood), "Convert it with is_ood.bool()")
    _check_same_device("is_ood", is_ood, scores)
    positive_count = int(is_ood.sum())
    if positive_count in (0, len(is_ood)):
        found = f"{positive_count} of {len(is_ood)} out of distribution"
        raise argument_error("is_ood", "inputs of both kinds", found, "Join the scores of both data sets")


def check_at_least(argument_name: str, fewest: int, number: int) -> None:
    """Check that a number is at least `fewest`; return None.

    Raises:
        ValueError: the number is less than `fewest`.
    """
    if number < fewest:
        raise argument_error(argument_name, f"at least {fewest}", str(number), f"Give more {argument_name}")


def _check_one_per_input(argument_name: str, tensor: Tensor, input_count: int) -> None:
    _check_dense(argument_name, tensor)
    if tensor.shape != (input_count,):
        raise argument_error(
            argument_name, f"shape ({input_count},)", f"shape {tuple(tensor.shape)}", "Give one value an input"
        )


def _check_dense(argument_name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise argument_error(
            argument_name, "a dense tensor", f"layout {layout}", f"Convert it with {argument_name}.to_dense()"
        )


def _check_same_device(argument_name: str, tensor: Tensor, reference: Tensor) -> None:
    if tensor.device != reference.device:
        raise argument_error(
            argument_name, f"device {reference.device}", str(tensor.device), f"Move it there with {argument_name}.to"
        )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
