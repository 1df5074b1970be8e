"""`zoo.compare`: methods fitted or found, measured cell by cell, put beside the population."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.images import Given
from checkpoints_zoo.methods import fitting
from checkpoints_zoo.methods.comparing.comparison import Comparison
from checkpoints_zoo.methods.comparing.prepared import Say
from checkpoints_zoo.methods.comparing.preparing import PERMUTATIONS, prepare
from checkpoints_zoo.training.recipe import Recipe


def compare(
    collection: Collection | str,
    methods: Iterable[str] | None = None,
    data: Given | None = None,
    ood: Given | None = None,
    *,
    out: str | Path | None = None,
    reference: Collection | str | None = None,
    draws: Mapping[str, Collection] | None = None,
    recipe: Recipe | None = None,
    runs: int = fitting.RUNS,
    per_run: int = fitting.DRAWS,
    permutations: int = PERMUTATIONS,
    search: bool = False,
    workers: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    say: Say = lambda text: None,
) -> Comparison:
    """Compare approximate posteriors with a population: MMD, NS, accuracy, calibration, OOD, diversity; return all.

    Methods are fitted to the collection's recipe. What was fitted or measured before, with the same settings, is read
    from the folder; cut off anywhere, the next call goes on.

    Args:
        collection: a collection, or its name.
        methods: names; None for all that this machine has what they need for, () for none.
        data: labelled images, as in `zoo.evaluate`; None for the collection's own test set.
        ood: images out of distribution; None for those usual for the data set (digits: photos; CIFAR and
            Tiny-ImageNet: SVHN; MNIST: Fashion-MNIST), "none" for none.
        out: folder of draws, cells and comparison.json; None for NAME-compared.
        reference: another population to compare with, of the same architecture; None for the collection.
        draws: name -> draws that were made elsewhere, as `zoo.from_samples` gives them.
        recipe: of the collection, where it is not one of the package's.
        runs, per_run: posteriors that a method is fitted to, and draws of each.
        permutations: of the tests.
        search: whether each method's settings are searched for on training images that are held out; else those that
            were chosen so for the collection count, or the method's defaults.
        workers: processes; None for one a core.
        device: what to fit and measure on.
        seed: of fits, permutations and subsets.
        say: told of the progress.

    Raises:
        UsageError: no such method, one that was named and can't be fitted here, draws of another network, a collection
            without a recipe, arguments that make no sense.
        DamagedError, SourceNotFound, NetworkError, StorageError: members or images that can't be read, no room.

    >>> import tempfile
    >>> import checkpoints_zoo as zoo
    >>> members = zoo.load("convnet-digits")
    >>> with tempfile.TemporaryDirectory() as out:
    ...     found = zoo.compare(
    ...         members[:8], (), ood="none", draws={"others": members[8:12]}, out=out, permutations=19, workers=1
    ...     )
    >>> found["others", "members"]["mmd"].p > 0.05
    True
    """
    return prepare(
        collection, methods, data, ood, out=out, reference=reference, draws=draws, recipe=recipe, runs=runs,
        per_run=per_run, permutations=permutations, search=search, workers=workers, device=device, seed=seed, say=say,
    ).run()  # fmt: skip
