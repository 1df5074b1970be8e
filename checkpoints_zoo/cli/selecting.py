"""The options that select members, the same for every command that takes some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from checkpoints_zoo import selection
from checkpoints_zoo.errors import SelectionError
from checkpoints_zoo.source import resolve

if TYPE_CHECKING:
    import pyarrow as pa

    from checkpoints_zoo.catalog import Description
    from checkpoints_zoo.collection import Collection


@dataclass(frozen=True)
class Found:
    """What a manifest says of the selected members, no weights read.

    Args:
        label, commit: of the source.
        description: the source's JSON on the collection.
        rows: the selected ones.
        of: members of the whole collection.
    """

    label: str
    commit: str
    description: Description
    rows: pa.Table
    of: int

    @property
    def citation(self) -> str:
        return selection.cite(self.label, self.commit, self.description.name, self.rows)


@dataclass(frozen=True)
class Selection:
    """A name and which of its members are meant: the arguments of `zoo.load`."""

    name: str
    n: int | None
    where: str | None
    members: str | None
    sample: int | None
    source: str | None

    def load(self) -> Collection:
        """Return the members as a Collection."""
        from checkpoints_zoo.loading import load

        return load(
            self.name,
            n=self.n,
            where=self.where,
            members=self.members,
            sample=self.sample,
            source=self.source,
        )

    def find(self) -> Found:
        """Select as `zoo.load` does, importing neither torch nor pandas; return what the manifest says."""
        name, members, source = self.name, self.members, self.source
        cited = selection.parse_citation(name)
        if cited:
            if any(x is not None for x in (self.n, self.where, members, self.sample)):
                raise SelectionError(
                    "selection", expected="a citation alone", found="a citation with another selection"
                )
            name, members, source = cited.name, cited.ids, cited.label if source is None else source
        place = resolve(source, name)
        description, rows = place.read(name)
        commit = place.commit(name)
        chosen = selection.select(rows, name, n=self.n, where=self.where, members=members, sample=self.sample)
        if cited:
            selection.verify_citation(cited, commit, chosen)
        return Found(place.label, commit, description, chosen, len(set(rows.column("member").to_pylist())))


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command NAME and the options that select members, and pass it the Selection as `selection`."""

    @click.argument("name", metavar="NAME")
    @click.option("-n", "n", type=int, metavar="N", help="The first N members; with --sample, N drawn ones.")
    @click.option("--where", metavar="SQL", help='A condition on the manifest\'s columns: "test_accuracy > 0.97".')
    @click.option("--members", metavar="IDS", help='Members by id: "0-9,15,7@40".')
    @click.option("--sample", type=int, metavar="SEED", help="Draw the N members without replacement, by this seed.")
    @click.option("--source", metavar="DIR", help="The folder to read, in place of the catalog's source.")
    @wraps(command)
    def wrapped(*args: Any, **options: Any) -> Any:
        own = {field.name: options.pop(field.name) for field in fields(Selection)}
        return command(*args, selection=Selection(**own), **options)

    return wrapped
