"""Draws of any posterior become a source: shards, manifest, description."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Unpack

from torch import Tensor, nn

from checkpoints_zoo import archive, cache, catalog, manifest, writing
from checkpoints_zoo.archive import Head
from checkpoints_zoo.collection import Collection
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.header import prefix
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.ingest import facts, filling, importing, known, pickles, resharding
from checkpoints_zoo.interop.checkpoints import Build, Facts, Say, facts_of, named_net, warn_of_others
from checkpoints_zoo.interop.draws import Samples, Whole, count, each
from checkpoints_zoo.layout import Layout
from checkpoints_zoo.loading import load
from checkpoints_zoo.pieces import Location
from checkpoints_zoo.source import Source

Row = dict[str, Any]
INDEPENDENT = "independent"
_METHOD = re.compile(r"[a-z][a-z0-9_-]{0,31}")


def from_samples(
    samples: Samples,
    architecture: str | Build,
    *,
    method: str,
    out: str | Path,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    order: Iterable[str] | None = None,
    buffers: nn.Module | Mapping[str, Tensor] | None = None,
    run: int | Sequence[int] | None = None,
    columns: Mapping[str, Any] | None = None,
    evaluate: str | ImageData | None = None,
    like: str | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
    **given: Unpack[Facts],
) -> Collection:
    """Make a source of draws of a posterior, one member a draw; return the collection as loaded from it.

    An iterator is read one draw at a time, and no more is in memory. The manifest is written last: cut off anywhere,
    what was there before is still there. A folder that has the first of these draws already gets the others.

    Args:
        samples: state dicts one after another; tensors stacked by name (draw, …); or flat vectors (draw, weight) or
            one after another, with `order`. Of a net with buffers, draws may be of its parameters alone.
        architecture: a name in `ARCHITECTURES`, or what builds the module.
        method: that the draws are of ("swag", "hmc", "sghmc", "laplace", "vi", "dropout", …). Only draws of one run of
            hmc, sghmc and sgld may repeat.
        out: folder of the source; other collections in it stay.
        name: of the collection, COLLECTION-METHOD or COLLECTION-METHOD-multi.
        arguments: of an architecture that is named.
        order: of flat vectors: "parameters" for those of torch.nn.utils.parameters_to_vector, or names of tensors in
            order, such as `dataset.spans` of a WeightDataset.
        buffers: module or state dict whose buffers all draws share, where they have none.
        run: of the method that each draw is of, or all; draws are counted in each.
        columns: of the manifest: name -> a value for all, or one for each draw.
        evaluate: test images to measure the draws on, by name or given.
        like: a collection of the catalog whose images, classes and preprocessing the draws are for.
        device: what to measure them on.
        say: told of the progress.
        given: facts that the draws can't tell, see `Facts`.

    Raises:
        UsageError: arguments that make no sense, no draws, or a folder with other members of that name.
        LayoutError: a draw whose tensors are missing, extra or misshapen, by name.
        StorageError: no room.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as out:
    ...     vectors = torch.randn(5, 8)  # (draw, weight)
    ...     build = lambda: torch.nn.Linear(3, 2)
    ...     drawn = from_samples(vectors, build, method="vi", out=out, name="line-vi", order="parameters")
    ...     drawn.stack()["weight"].shape
    torch.Size([5, 2, 3])
    """
    _check_name(catalog.check_name(name), method)
    named, sized = named_net(architecture, arguments), count(samples)
    told = _told(columns, method, run, evaluate is not None)
    if sized is not None:
        known.of_members(told, range(sized))
    whole, facts_given = Whole(named.module(), order, buffers), facts_of(given)
    root = Path(out).expanduser().absolute()
    target = Source(root, root.as_uri())
    locks = cache.writable("local/copies")
    with writing.writing_into(root), cache.locked(locks, str(root.resolve() / name)):
        resharding.sweep(root, name)
        drawn = _Drawn(target, name, method)
        try:
            for at, draw in enumerate(each(samples)):
                state = whole(draw, at)
                if drawn.head is None:
                    drawn.begin(pickles.head_of(state), whole.counters, named.architecture or str(named.own))
                    described = facts.described(name, named.facts(), drawn.layouts, facts_given, like)
                    description = facts.kept(described, facts_given, like, target)
                    inside = None
                    if evaluate is not None:
                        inside = importing.images_for(evaluate, description, named.build)
                drawn.add(state)
            if drawn.head is None:
                raise UsageError("samples", expected="one draw or more", found="none")
            drawn.end(known.of_members(told, range(len(drawn.rows))))
            table = manifest.table(drawn.rows)
            manifest.validate(table, description, target.manifest_path(name))
            catalog.write_json(description.to_json(), target.description_path(name))
            manifest.write(table, target.manifest_path(name))
        finally:
            drawn.tidy()
        say(f"{name}: {len(drawn.rows):,} draws written")
        if inside is not None:
            filling.fill(target, name, inside, named.build, device, say)
    warn_of_others(target, name, {})
    return load(name, source=root, architecture=named.build)


def _check_name(name: str, method: str) -> None:
    if not _METHOD.fullmatch(str(method)):
        raise UsageError("method", expected="a word in lower case, as swag, laplace or hmc", found=repr(method)[:80])
    if method != INDEPENDENT and not re.fullmatch(rf".+-{re.escape(method)}(-multi)?", name):
        raise UsageError(
            f"collection name {name!r}",
            expected=f"one that ends in -{method}, or -{method}-multi for several runs: a manifest holds one method",
            found="another",
            do=f"Name it {name}-{method}",
            collection=name,
        )


def _told(columns: Mapping[str, Any] | None, method: str, run: int | Sequence[int] | None, measured: bool) -> Row:
    """Check the names of columns, before a draw is read; return all that is told."""
    given = dict(columns or {})
    known.check_names(given)
    if twice := sorted({"method", "run", "draw"} & set(given)):
        raise UsageError(f"column {twice[0]!r}", expected="it as an argument of its own", found="it among the columns",
                         do="Leave it out: draws are counted in each run" if twice[0] == "draw" else "")  # fmt: skip
    if measured:
        known.check_unmeasured(given)
    if method == INDEPENDENT and run is not None:
        raise UsageError("run", expected="a method that has runs", found=f"method {INDEPENDENT!r}")
    return given | ({} if run is None else {"run": run})


@dataclass
class _Drawn:
    """Draws on their way into shards: those of one shard lie aside until it is full.

    Args:
        target: the source.
        name: of the collection.
        method: of the draws.
    """

    target: Source
    name: str
    method: str
    head: Head | None = None
    rows: list[Row] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        manifest_there = self.target.manifest_path(self.name).is_file()
        self.there: list[Row] = self.target.read(self.name)[1].to_pylist() if manifest_there else []
        self.aside = resharding.aside(self.target.root, self.name)
        self.waiting = 0
        self.spool: IO[bytes] | None = None

    def begin(self, head: Head, counters: Sequence[str], architecture: str) -> None:
        """Lay out the draws as the first one is."""
        self.head = head
        tensors = ((n, dtype, shape, n, shape) for n, dtype, shape in head.tensors)
        self.stored = Layout.of_stored(tensors, counters, 0)
        self.layout = writing.sharded(self.stored)
        self.key = archive.layout_key(architecture, self.layout)
        self.layouts[self.key] = self.layout
        self.per_shard = writing.members_per_shard(self.layout)
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.with_name(f"{self.name}.json").unlink(missing_ok=True)  # of an import that never came to an end
        self.aside.mkdir(parents=True)

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Take a draw.

        Raises:
            LayoutError: other dtypes than those before.
            UsageError: another draw than the one that is there already.
        """
        at = len(self.rows)
        if (head := pickles.head_of(state)) != self.head and self.head:
            dtypes = zip(head.tensors, self.head.tensors, strict=True)
            name, found, expected = next((n, one, other) for (n, one, _), (_, other, _) in dtypes if one != other)
            raise LayoutError(f"tensor {name!r} of draw {at}", expected=f"{expected}, as in the first", found=found,
                              tensor=name)  # fmt: skip
        raw = pickles.bytes_of(state)
        row: Row = {"member": at, "epoch": 0, "final": True, "status": "ok", "method": self.method, "sha256": None}
        filling.judge(row, Location(at, prefix(at), self.aside, 0, self.stored), raw)
        if at < len(self.there) and self.there[at]["sha256"] != row["sha256"]:
            raise self._others(f"another draw {at}")
        if at < len(self.there) and self.there[at]["status"] == "failed":  # by its logits
            row |= {n: self.there[at][n] for n in ("status", "reason")}
        if self.spool is None:
            writing.check_room(self.target.root, self.layout.nbytes)
            self.spool = (self.aside / f"{at:06d}.draws").open("w+b")
        self.spool.write(writing.repack(self.stored, raw, self.layout))
        self.rows.append(self._known(at) | row)
        self.waiting += 1
        if len(self.rows) % self.per_shard == 0:
            self._shard()

    def _known(self, at: int) -> Row:
        """Return what the manifest says already of a draw, such as its figures."""
        return {n: v for n, v in self.there[at].items() if n not in known.OWN} if at < len(self.there) else {}

    def _others(self, found: str) -> UsageError:
        return UsageError(
            f"collection {self.name} in folder {self.target.root}",
            expected="none, or the first of these draws",
            found=found,
            do=f"Give another folder or name, or delete manifests/{self.name}.parquet there",
            collection=self.name,
            path=self.target.root,
        )

    def _shard(self) -> None:
        """Write the waiting draws into a shard, and its place into their rows."""
        if self.spool is None:
            return
        some = self.rows[-self.waiting :]
        prefixes = [prefix(row["member"]) for row in some]
        path = self._written(some)
        if path is None:
            self.spool.seek(0)
            members = (self.spool.read(self.layout.nbytes) for _ in some)
            number = some[0]["member"] // self.per_shard
            path = writing.stream_shard(self.target.root / "shards" / self.name, number, self.layout, prefixes, members)
        start = writing.first_offset(self.layout, prefixes)
        for at, row in enumerate(some):
            row |= {
                "path": path.relative_to(self.target.root).as_posix(),
                "offset": start + at * self.layout.nbytes,
                "nbytes": self.layout.nbytes,
                "layout": self.key,
                "dtype": self.layout.dtype,
            }
        self.spool.close()
        Path(self.spool.name).unlink()
        self.spool, self.waiting = None, 0

    def _written(self, some: Sequence[Row]) -> Path | None:
        """Return the shard that holds these draws and no others already, None if there is none."""
        first, last = some[0]["member"], some[-1]["member"]
        there = self.there[first : last + 2]
        inside = {(row["path"], row["layout"]) for row in there[: len(some)]}
        if len(there) < len(some) or inside != {(there[0]["path"], self.key)}:
            return None
        if len(there) > len(some) and there[-1]["path"] == there[0]["path"]:
            return None
        path = self.target.root / str(there[0]["path"])
        return path if path.is_file() else None

    def end(self, told: Mapping[int, Row]) -> None:
        """Write the last shard, and what is told into the rows.

        Raises:
            UsageError: there are more draws already.
        """
        if len(self.there) > len(self.rows):
            raise self._others(f"{len(self.there):,} draws, not {len(self.rows):,}")
        self._shard()
        drawn: dict[int | None, int] = {}
        for row in self.rows:
            row |= told[row["member"]]
            if self.method != INDEPENDENT:
                run = row.get("run")
                row["draw"] = drawn[run] = drawn.get(run, -1) + 1
        filling.mark_duplicates(self.rows)

    def tidy(self) -> None:
        """Delete what lies aside, and shards that no row of the manifest names."""
        if self.spool is not None:
            self.spool.close()
        shutil.rmtree(self.aside, ignore_errors=True)
        path = self.target.manifest_path(self.name)
        named = set(manifest.read(path).column("path").to_pylist()) if path.is_file() else set()
        for shard in (self.target.root / "shards" / self.name).glob("*.safetensors"):
            if shard.relative_to(self.target.root).as_posix() not in named:
                shard.unlink()
