"""Members for torch-uncertainty, versions 0.7 to 0.x (tested with 0.13): its routine evaluates them as an ensemble.

Ensembles of torch-uncertainty return logits (member·batch, class), beginning with all rows of the first member.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.interop.batches import NO_LABEL, as_ensemble
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.predictions import Predictions

REQUIREMENTS = (
    "torch-uncertainty>=0.7,<1",
    "lightning>=2.4,<2.7",
)  # torch-uncertainty installs lightning only with its extras

# Our figure -> the same figure of torch-uncertainty's ClassificationRoutine, which has no class-wise error (`ace`).
FIGURES: dict[str, str] = {
    "accuracy": "test/cls/Acc",
    "nll": "test/cls/NLL",
    "brier": "test/cls/Brier",
    "ece": "test/cal/ECE",
    "adaptive_ece": "test/cal/aECE",
    "aurc": "test/sc/AURC",
    "mi_id": "test/ens_MI",
    "disagreement": "test/ens_Disagreement",
    "mi_ood": "ood/ens_MI",
    "auroc": "ood/AUROC",
    "aupr": "ood/AUPR",
    "fpr95": "ood/FPR95",
}


class FlatEnsemble(nn.Module):
    """An ensemble whose logits are (member·batch, class), as torch-uncertainty's `deep_ensembles` gives them.

    Args:
        ensemble: ensemble of the members, in memory or read in chunks at every call.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.num_estimators = len(ensemble)
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Run every member; return logits (member·batch, class)."""
        return self.ensemble.flat(inputs)


class StoredLogits(nn.Module):
    """A module that returns stored logits like an ensemble: (batch, member, class) becomes (member·batch, class).

    Args:
        num_estimators: number of members.
    """

    def __init__(self, num_estimators: int) -> None:
        super().__init__()
        self.num_estimators = num_estimators
        self.eval()

    def forward(self, logits: Tensor) -> Tensor:
        """Reorder logits for torch-uncertainty; return them (member·batch, class)."""
        return logits.transpose(0, 1).flatten(0, 1)


def ensemble(members: Collection | Ensemble | Predictions) -> FlatEnsemble | StoredLogits:
    """Return a model with logits (member·batch, class), for a routine with `is_ensemble=True`.

    Args:
        members: collection (in float32 on the CPU; a Trainer moves it), an ensemble, or stored predictions, whose
            inputs are the logits from `loader`.

    Raises:
        UsageError, DamagedError, TooLargeError: the same cases as in `Collection.ensemble`.

    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits", n=4)
    >>> model = zoo.interop.torch_uncertainty.ensemble(members)
    >>> model(members.preprocess(zoo.images.load("digits").images[:5])).shape
    torch.Size([20, 10])
    """
    if isinstance(members, Predictions):
        return StoredLogits(len(members))
    return FlatEnsemble(as_ensemble(members))


def core_models(members: Collection | Ensemble) -> list[nn.Module]:
    """Return the members as the list of modules that `deep_ensembles` takes; they share the ensemble's memory.

    Args:
        members: collection of two members or more, since `deep_ensembles` copies a single module.

    >>> import checkpoints_zoo as zoo
    >>> [type(m).__name__ for m in zoo.interop.torch_uncertainty.core_models(zoo.load("convnet-digits", n=2))]
    ['ConvNet', 'ConvNet']
    """
    ensemble_members = as_ensemble(members)
    return [ensemble_members[i] for i in range(len(ensemble_members))]


def routine(members: Collection | Predictions, *, eval_ood: bool = False) -> Any:
    """Return a ClassificationRoutine of the members, for a lightning Trainer's `test`.

    The routine's figures equal those of `zoo.evaluate` up to 1e-5; `FIGURES` maps their names. The figure
    `test/cplx/flops` also counts the ensemble's trial runs on random inputs.

    Args:
        members: collection, or stored predictions.
        eval_ood: whether the Trainer's second loader has images out of distribution.

    Raises:
        UsageError: torch-uncertainty is not installed; members are neither a collection nor predictions.
    """
    argument: object = members
    if not isinstance(argument, Collection | Predictions):
        expected, do = (
            "a Collection or Predictions",
            "Give an ensemble to `ensemble`, and that to a routine of your own",
        )
        raise UsageError("members", expected=expected, found=type(argument).__name__, do=do)
    routine_class = import_optional("torch_uncertainty.routines", *REQUIREMENTS).ClassificationRoutine
    classification_routine = routine_class(
        ensemble(members), len(members.classes), None, is_ensemble=True, eval_ood=eval_ood
    )
    classification_routine.num_params = _parameter_count(members)
    return classification_routine


def _parameter_count(members: Collection | Predictions) -> int:
    """Return the number of parameters of all members together; 0 for predictions."""
    if isinstance(members, Predictions):
        return 0
    return len(members) * sum(p.numel() for p in members._skeleton().parameters())


def loader(predictions: Predictions, *, batch: int = 128) -> DataLoader[Any]:
    """Return a DataLoader of stored predictions, with batches (logits (batch, member, class), labels).

    Args:
        predictions: stored predictions; if they have no labels, all labels are -1.
        batch: number of inputs in a batch.

    Raises:
        UsageError: the argument is not Predictions.
    """
    argument: object = predictions
    if not isinstance(argument, Predictions):
        do = "`zoo.interop.loader` makes batches of images, for members"
        raise UsageError("predictions", expected="stored Predictions", found=type(argument).__name__, do=do)
    logits = predictions.logits().transpose(0, 1)
    labels = torch.full((len(logits),), NO_LABEL) if predictions.labels is None else predictions.labels
    return DataLoader(TensorDataset(logits, labels), batch_size=batch)
