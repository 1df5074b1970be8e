"""Estimate batch norm's running statistics anew for averaged, interpolated or sampled weights.

The statistics of an averaged network are not the average of its networks' statistics (Jordan et al. 2023, REPAIR,
arXiv 2211.08403, section 3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import is_counter, is_statistic
from checkpoints_zoo.networks import modules


def has_statistics(skeleton: nn.Module) -> bool:
    """Return whether a module has running statistics, which have to be estimated anew when its weights change."""
    return any(is_statistic(name) for name in skeleton.state_dict(keep_vars=True))


def reestimate_statistics(
    skeleton: nn.Module, stacked: Mapping[str, Tensor], inputs: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Estimate the running statistics of stacked networks on inputs; return the stack with the new statistics.

    Running means and variances become the averages, over all batches, of each batch's mean and unbiased variance.
    Meanwhile the norms normalise by batch statistics. `torch.optim.swa_utils.update_bn` does the same; here
    dropout and the like are off.

    Args:
        skeleton: the networks' module, in eval mode; the module is not changed.
        stacked: parameters and buffers, name -> (member, …).
        inputs: preprocessed batches of two inputs or more, of about the same size.

    Raises:
        UsageError: a layer that is no batch norm of torch has running statistics, or there are no inputs.

    >>> net = nn.Sequential(nn.BatchNorm1d(1, affine=False)).eval()
    >>> stacked = {"0.running_mean": torch.zeros(1, 1), "0.running_var": torch.zeros(1, 1)}
    >>> networks = reestimate_statistics(net, stacked, [torch.tensor([[1.0], [3.0]])])
    >>> networks["0.running_mean"], networks["0.running_var"]
    (tensor([[2.]]), tensor([[2.]]))
    """
    training_module = copy.deepcopy(skeleton)
    tensors = training_module.state_dict(keep_vars=True)
    statistics: dict[str, Tensor] = {}
    members = len(next(iter(stacked.values())))
    norm_buffer_ids = {id(tensor) for norm in _batch_norms(training_module) for tensor in norm.buffers(recurse=False)}
    for name, tensor in tensors.items():
        if is_statistic(name):
            if id(tensor) not in norm_buffer_ids:
                raise UsageError(
                    f"running statistics {name!r}",
                    expected="those of a batch norm of torch or a class derived from it",
                    found="another layer, whose statistics can't be estimated anew",
                )
            value = torch.ones_like if name.endswith("running_var") else torch.zeros_like
            statistics[name] = value(stacked[name])
        elif is_counter(name) and id(tensor) in norm_buffer_ids:
            device = next(iter(stacked.values())).device
            statistics[name] = torch.zeros(members, dtype=torch.int64, device=device)
    for norm in _batch_norms(training_module):
        norm.training, norm.momentum = True, None  # Momentum None gives a cumulative average.
    networks = modules.widen_norms({**stacked, **statistics})
    tied = modules.superseded_names(training_module)
    device, dtype = next(iter(networks.values())).device, modules.input_dtype(networks)
    unsaved_tensors = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in modules.unsaved_tensors(training_module).items()
    }
    batches = 0
    with torch.no_grad():
        for batch in inputs:
            for i in range(members):
                # The norm layers get views of the stack, so the new running statistics are written into the stack.
                state = {name: tensor[i] for name, tensor in networks.items() if name not in tied}
                functional_call(training_module, state | unsaved_tensors, (batch,))
            batches += 1
    if not batches:
        raise UsageError("inputs to estimate running statistics on", expected="two or more", found="none")
    return {name: networks[name] for name in stacked}


def _batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
