"""From a name or a citation to the rows that are meant, no weights read: what `zoo.load` and `zoo-cli show` share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from checkpoints_zoo.errors import MemberNotFound, SelectionError
from checkpoints_zoo.formats import selection
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.sources.source import Source, resolve


@dataclass(frozen=True)
class Found:
    """What a source says of selected members.

    Args:
        source, commit: where, and what pins it.
        description: the source's JSON on the collection.
        rows: the selected ones.
        of: members of the whole collection.
    """

    source: Source
    commit: str
    description: Description
    rows: pa.Table
    of: int

    @property
    def citation(self) -> str:
        return selection.cite(self.source.label, self.commit, self.description.name, self.rows)


def find(
    name: str,
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
) -> Found:
    """Select members of a collection by its manifest, importing neither torch nor pandas; return what it says of them.

    Args, Raises: as of `loading.load`.
    """
    cited = selection.parse_citation(str(name))
    if cited:
        if any(x is not None for x in (n, where, members, sample)) or snapshots:
            raise SelectionError("selection", expected="a citation alone", found="a citation with another selection")
        name, members = cited.name, cited.ids
        source = cited.source if source is None else source
    place = resolve(source, name)
    description, rows = place.read(name)
    commit = place.commit(name)
    try:
        chosen = selection.select(rows, name, n=n, where=where, members=members, sample=sample, snapshots=snapshots)
    except (MemberNotFound, SelectionError) as error:
        if cited and cited.commit != commit:
            raise selection.changed(cited, commit, str(error).rstrip(".")) from error
        raise
    if cited:
        selection.verify_citation(cited, commit, chosen)
    return Found(place, commit, description, chosen, len(set(rows.column("member").to_pylist())))
