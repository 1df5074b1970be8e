"""Members for lightning-uq-box, versions 0.2 to 0.x: its deep ensemble for classification, with weights in memory.

lightning-uq-box's own DeepEnsembleClassification reads each member's checkpoint from disk in every forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.interop import batches
from checkpoints_zoo.interop.optional_packages import import_optional
from checkpoints_zoo.networks.ensemble import Ensemble

REQUIREMENT = "lightning-uq-box>=0.2,<1"


def deep_ensemble(members: Collection | Ensemble, num_classes: int | None = None, *, task: str = "multiclass") -> Any:
    """Return a DeepEnsembleClassification that holds the members in memory.

    The result is an instance of lightning-uq-box's class, so `predict_step`, `test_step` and Trainers work as usual.
    Its outputs equal those of lightning-uq-box's own class up to 1e-5 of the largest.

    Args:
        members: collection (in float32 on the CPU; a Trainer moves it), or an ensemble.
        num_classes: number of classes; None for the collection's; required for an ensemble.
        task: name of lightning-uq-box for the task, such as "multiclass".

    Raises:
        UsageError: lightning-uq-box is not installed; an ensemble without `num_classes`; an unknown task.
        DamagedError, TooLargeError: the same cases as in `Collection.ensemble`.
    """
    ensemble_class = _resident_class()
    if num_classes is None:
        num_classes = _class_count(members)
    if task not in ensemble_class.valid_tasks:
        raise UsageError("task", expected=f"one of {', '.join(ensemble_class.valid_tasks)}", found=repr(task))
    return ensemble_class(batches.as_ensemble(members), num_classes, task)


def _class_count(members: Collection | Ensemble) -> int:
    if isinstance(members, Collection):
        return len(members.classes)
    raise UsageError("num_classes of an ensemble", expected="a whole number", found="None")


@cache
def _resident_class() -> Any:
    """Return our subclass of lightning-uq-box's class."""
    base: Any = import_optional("lightning_uq_box.uq_methods", REQUIREMENT).DeepEnsembleClassification

    class ResidentEnsemble(base):  # type: ignore[misc]
        """A DeepEnsembleClassification whose members are held in memory.

        Args:
            ensemble: ensemble of the members.
            num_classes: number of classes in the members' logits.
            task: task of the networks, one of `valid_tasks`.
        """

        def __init__(self, ensemble: Ensemble, num_classes: int, task: str) -> None:
            super().__init__([{"member": id} for id in ensemble.ids], num_classes, task)
            self.ensemble = ensemble

        def forward(self, X: Tensor) -> Tensor:
            """Run every member; return logits (batch, class, member)."""
            logits: Tensor = self.ensemble(X)
            return logits.permute(1, 2, 0)

    ResidentEnsemble.__qualname__ = (
        "ResidentEnsemble"  # pickle finds the class by this name through `__getattr__` below
    )
    return ResidentEnsemble


def __getattr__(name: str) -> Any:
    if name == "ResidentEnsemble":
        return _resident_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class _DictCollate:
    """Collate examples into a batch of lightning-uq-box: a dict with `input` and `target`."""

    collate: Callable[[Any], Any]

    def __call__(self, examples: Sequence[batches.Batch]) -> dict[str, Tensor]:
        inputs, labels = self.collate(examples)
        return {"input": inputs, "target": labels}


def loader(members: Collection, data: ImageInput, split: str | None = None, *, batch: int = 128) -> DataLoader[Any]:
    """Return a DataLoader of batches {"input", "target"}, preprocessed for the members, in order.

    Args:
        members, data, split, batch: same arguments as in `zoo.interop.loader`.

    Raises:
        UsageError, SourceNotFound, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: the same cases
            as in `zoo.interop.loader`.

    >>> import checkpoints_zoo as zoo
    >>> batch = next(iter(zoo.interop.lightning_uq_box.loader(zoo.load("convnet-digits"), "digits")))
    >>> {name: tuple(tensor.shape) for name, tensor in batch.items()}
    {'input': (128, 1, 8, 8), 'target': (128,)}
    """
    plain_loader = batches.loader(members, data, split, batch=batch)
    return DataLoader(plain_loader.dataset, batch_size=batch, collate_fn=_DictCollate(plain_loader.collate_fn))
