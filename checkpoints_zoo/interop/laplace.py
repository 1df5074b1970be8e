"""Members for laplace-torch, versions 0.2.2 to 0.x (tested with 0.3): batch norms folded into the layers before them.

laplace's Kronecker factors support only linear layers and convolutions. A batch norm's parameters make these factors
fail, and its statistics are not part of a posterior.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from checkpoints_zoo.collection.collection import Member
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.networks.ensemble.program import FoldableNorm, fold_norm
from checkpoints_zoo.networks.modules import TRACE_ERRORS, Tracer, shared_names

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LINEAR_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
LARGEST_LOGIT_CHANGE = 1e-4  # largest allowed change of a logit, as a share of the largest logit, in float32


class _NormTracer(Tracer):
    """Records every batch norm as one call, including classes derived from torch's."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, BATCH_NORMS) or super().is_leaf_module(m, module_qualified_name)


def folded(member: Member | nn.Module, example: Tensor | None = None) -> nn.Module:
    """Fold a member's batch norms into the layers before them; return a module in eval mode without batch norms.

    gamma · (w∗x + b − mean) / sqrt(var + eps) + beta equals a layer with weights w · gamma / sqrt(var + eps). The
    logits change only by rounding: by less than 1e-5 of the largest on the shipped collections. `requires_grad` of the
    weights stays, since laplace reads it.

    Args:
        member: member of a collection (in float32 on the CPU), or a module, such as `ensemble[i]`; the module is
            copied.
        example: inputs (batch, …) on which logits before and after folding are compared. For a member, None draws
            inputs; for a module, None skips the comparison.

    Raises:
        UsageError: `member` is neither a member nor a module; a batch norm that can't be folded, because no linear
            layer or convolution of its own precedes it or it has no running statistics; or logits that differ by more
            than rounding.

    >>> import checkpoints_zoo as zoo
    >>> net = zoo.interop.laplace.folded(zoo.load("resnet8-digits")[0])
    >>> [n for n, p in net.named_parameters()][:2], net.bn1
    (['conv1.weight', 'conv1.bias'], Identity())
    """
    argument: object = member
    if not isinstance(argument, Member | nn.Module):
        expected = "a member, such as members[0], or a module"
        raise UsageError("member to be folded", expected=expected, found=type(argument).__name__)
    unfolded_module = member.model() if isinstance(member, Member) else copy.deepcopy(member).eval()
    if isinstance(member, Member) and example is None:
        preprocess = member.selected.preprocess
        shape = (3, preprocess.channels, *preprocess.size)
        example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    module = copy.deepcopy(unfolded_module)
    layers: dict[str, Any] = dict(module.named_modules())
    norm_names = [name for name, layer in layers.items() if isinstance(layer, BATCH_NORMS)]
    if not norm_names:
        return module
    foldable_norms = _find_foldable(module, layers)
    if unfoldable_names := [name for name in norm_names if name not in foldable_norms]:
        raise UsageError(
            f"batch norm {unfoldable_names[0]!r} of {type(module).__name__}",
            expected="running statistics, and a linear layer or convolution before it that only this norm reads",
            found="a norm without them",
            do="Use laplace's subset_of_weights='last_layer' with the member's own module",
        )
    state = {name: tensor.detach()[None] for name, tensor in module.state_dict().items()}
    for name, (layer_name, replacement) in foldable_norms.items():
        layer = layers[layer_name]
        weight, bias = fold_norm(_foldable_norm(name, layers[name], layer_name, layer), state)
        is_trained = layer.weight.requires_grad
        layer.weight = nn.Parameter(weight[0].contiguous(), requires_grad=is_trained)
        layer.bias = nn.Parameter(bias[0].contiguous(), requires_grad=is_trained)
        parent, _, leaf_name = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf_name, replacement)
    if example is not None:
        _check_logits(unfolded_module, module, example)
    return module


def _check_logits(unfolded_module: nn.Module, folded_module: nn.Module, example: Tensor) -> None:
    """Check that two modules give the same logits up to rounding.

    Raises:
        UsageError: the logits differ by more than rounding.
    """
    with torch.no_grad():
        expected, logits = unfolded_module(example), folded_module(example)
    difference = float((logits - expected).abs().max() / expected.abs().max())
    if not difference < LARGEST_LOGIT_CHANGE:
        raise UsageError(
            f"batch norms of {type(folded_module).__name__}",
            expected="equal logits after folding",
            found=f"a difference of {difference:.1g} of the largest",
            do="Use laplace's subset_of_weights='last_layer' with the member's own module",
        )


def _find_foldable(module: nn.Module, layers: Mapping[str, Any]) -> dict[str, tuple[str, nn.Module]]:
    """Find the batch norms that can be folded; return norm -> (layer before it, module that replaces it)."""
    try:
        graph = _NormTracer().record_graph(module)
    except TRACE_ERRORS as error:
        raise UsageError(
            f"module {type(module).__name__}",
            expected="a module that torch.fx can trace, to find the layer before each batch norm",
            found=str(error).partition("\n")[0][:120],
        ) from error
    call_counts = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    shared_names_of_module = shared_names(module)
    foldable = {}
    for node in graph.nodes:
        norm = layers[str(node.target)] if node.op == "call_module" else None
        previous_node = node.args[0] if isinstance(norm, BATCH_NORMS) and len(node.args) == 1 else None
        if not isinstance(previous_node, fx.Node) or previous_node.op != "call_module" or norm is None:
            continue
        layer, replacement = layers[str(previous_node.target)], _batch_norm_replacement(norm)
        fits = type(layer) in LINEAR_LAYERS and layer.weight.shape[0] == norm.num_features
        is_used_once = (
            call_counts[str(node.target)] == call_counts[str(previous_node.target)] == len(previous_node.users) == 1
        )
        pair = (node, norm), (previous_node, layer)
        names = {
            f"{call_node.target}.{name}"
            for call_node, module_part in pair
            for name, _ in module_part.named_parameters(recurse=False)
        }
        if (
            fits
            and replacement is not None
            and is_used_once
            and not names & shared_names_of_module
            and norm.running_mean is not None
        ):
            foldable[str(node.target)] = str(previous_node.target), replacement
    return foldable


def _batch_norm_replacement(norm: Any) -> nn.Module | None:
    """Return the module that replaces a folded batch norm; None for an unknown class of batch norm."""
    if type(norm) in BATCH_NORMS:
        return nn.Identity()
    # timm's norm with activation. Importing timm takes seconds, so the class is compared by name.
    if type(norm).__name__ == "BatchNormAct2d" and type(norm).__module__.startswith("timm."):
        return nn.Sequential(norm.drop, norm.act)
    return None


def _foldable_norm(norm_name: str, norm: Any, layer_name: str, layer: Any) -> FoldableNorm:
    layer_tensor_names = f"{layer_name}.weight", "" if layer.bias is None else f"{layer_name}.bias"
    affine_names = [f"{norm_name}.{leaf}" if getattr(norm, leaf) is not None else "" for leaf in ("weight", "bias")]
    norm_tensor_names = f"{norm_name}.running_mean", f"{norm_name}.running_var", affine_names[0], affine_names[1]
    return FoldableNorm(0, 0, layer_tensor_names, (0, 0, 0, 0), norm_tensor_names, norm.eps)
