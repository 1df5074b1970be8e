"""Members for torch-uncertainty, versions 0.7 to 0.x (tested with 0.13): its routine evaluates them as an ensemble.

Its ensembles give logits (member·batch, class), all of the first member first.
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

REQUIREMENTS = "torch-uncertainty>=0.7,<1", "lightning>=2.4,<2.7"  # its extras alone bring lightning

# Our figures, and what its ClassificationRoutine calls the same ones. It has no class-wise calibration error (`ace`).
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
        ensemble: of the members; held in memory, or read chunk by chunk at every call.
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
    """What gives stored logits back as an ensemble would: (batch, member, class) as (member·batch, class).

    Args:
        num_estimators: members.
    """

    def __init__(self, num_estimators: int) -> None:
        super().__init__()
        self.num_estimators = num_estimators
        self.eval()

    def forward(self, logits: Tensor) -> Tensor:
        """Bring logits into torch-uncertainty's order; return them (member·batch, class)."""
        return logits.transpose(0, 1).flatten(0, 1)


def ensemble(members: Collection | Ensemble | Predictions) -> FlatEnsemble | StoredLogits:
    """Make members a model whose logits are (member·batch, class), to be given with `is_ensemble=True`; return it.

    Args:
        members: a collection (in float32 on the CPU; the Trainer moves it), an ensemble, or stored predictions: their
            inputs are then the logits that `loader` gives.

    Raises:
        UsageError, DamagedError, TooLargeError: as `Collection.ensemble`.

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
    """Make members the list of modules that `deep_ensembles` takes; return it. They share the ensemble's memory.

    Args:
        members: two or more; `deep_ensembles` copies a single one.

    >>> import checkpoints_zoo as zoo
    >>> [type(m).__name__ for m in zoo.interop.torch_uncertainty.core_models(zoo.load("convnet-digits", n=2))]
    ['ConvNet', 'ConvNet']
    """
    ensemble_members = as_ensemble(members)
    return [ensemble_members[i] for i in range(len(ensemble_members))]


def routine(members: Collection | Predictions, *, eval_ood: bool = False) -> Any:
    """Make members a ClassificationRoutine that a lightning Trainer can test; return it.

    Its figures are those of `zoo.evaluate` under the names in `FIGURES`, to 1e-5. Its `test/cplx/flops` also counts
    what the ensemble tries once on random inputs.

    Args:
        members: a collection, or stored predictions.
        eval_ood: whether the Trainer's second loader holds images out of distribution.

    Raises:
        UsageError: no torch-uncertainty; neither a collection nor predictions.
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
    """Return how many parameters the members have together, 0 where there are only predictions."""
    if isinstance(members, Predictions):
        return 0
    return len(members) * sum(p.numel() for p in members._skeleton().parameters())


def loader(predictions: Predictions, *, batch: int = 128) -> DataLoader[Any]:
    """Make stored predictions batches of (logits (batch, member, class), labels); return the DataLoader.

    Args:
        predictions: their labels are -1 where they have none.
        batch: inputs a batch.

    Raises:
        UsageError: no predictions.
    """
    argument: object = predictions
    if not isinstance(argument, Predictions):
        do = "`zoo.interop.loader` makes batches of images, for members"
        raise UsageError("predictions", expected="stored Predictions", found=type(argument).__name__, do=do)
    logits = predictions.logits().transpose(0, 1)
    labels = torch.full((len(logits),), NO_LABEL) if predictions.labels is None else predictions.labels
    return DataLoader(TensorDataset(logits, labels), batch_size=batch)
