"""`zoo.load` and `zoo.collections`: from a name to a Collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.sources.finding import find

if TYPE_CHECKING:
    import pandas as pd


def load(
    name: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
    architecture: Callable[[], nn.Module] | None = None,
) -> Collection:
    """Select members of a collection by its manifest, reading no weights yet; return the Collection.

    Args:
        name: of the collection, or a citation.
        n: how many: the first n, or with `sample` n drawn without replacement.
        where: an SQL condition on the manifest's columns ("test_accuracy > 0.97").
        members: ids, or their text ("0-99,205,7@40").
        sample: seed of the draw.
        snapshots: whether snapshots that are not final are meant as well.
        source: a folder, or hf://datasets/ORG/NAME[@REVISION]; None for where the catalog says the collection lies.
        architecture: builds the module, for a net the package lacks.

    Raises:
        CollectionNotFound, SourceNotFound: nothing there; the nearest names are given.
        SelectionError, MemberNotFound: a selection that can't be met.
        FormatError, DamagedError: a manifest that breaks the format.
        NetworkError, AccessError: a source on the Hub that can't be reached or may not be read.

    >>> import checkpoints_zoo as zoo
    >>> zoo.load("convnet-digits", n=8)
    Collection('convnet-digits', 8 members, convnet on digits, from embedded)
    """
    found = find(name, n=n, where=where, members=members, sample=sample, snapshots=snapshots, source=source)
    return Collection(found.source, found.commit, found.description, found.rows, architecture)


def collections() -> pd.DataFrame:
    """Return the catalog as a DataFrame: name, title, architecture, dataset, members, bytes, licence, source."""
    import pandas as pd

    listings = catalog.collections().values()
    columns = ("name", "title", "architecture", "dataset", "members", "bytes", "licence")
    return pd.DataFrame([{c: getattr(x, c) for c in columns} | {"source": x.sources[0]} for x in listings])
