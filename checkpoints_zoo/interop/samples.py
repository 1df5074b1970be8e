"""Draws of any posterior become a source: shards, manifest, description."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from checkpoints_zoo.collection.collection import Collection
from checkpoints_zoo.collection.loading import load
from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog, manifest, safetensors
from checkpoints_zoo.images import Given
from checkpoints_zoo.interop.checkpoints import Facts, facts_of, named_net, warn_of_others
from checkpoints_zoo.interop.drawn import INDEPENDENT, Drawn, Row
from checkpoints_zoo.interop.draws import Samples, Whole, count, each
from checkpoints_zoo.interop.ingest import facts, filling, importing, known, pickles, resharding
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import Build
from checkpoints_zoo.sources import cache
from checkpoints_zoo.sources.source import Source

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
    evaluate: Given | None = None,
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
            dropout, hmc, sghmc and sgld may repeat.
        out: folder of the source; other collections in it stay.
        name: of the collection, COLLECTION-METHOD or COLLECTION-METHOD-multi.
        arguments: of an architecture that is named.
        order: of flat vectors: "parameters" for those of torch.nn.utils.parameters_to_vector, or names of tensors in
            order, such as `dataset.spans` of a WeightDataset.
        buffers: module or state dict whose buffers all draws share, where they have none.
        run: of the method that each draw is of, or all; draws are counted in each.
        columns: of the manifest: name -> a value for all, or one for each draw.
        evaluate: test images to measure the draws on: their name, their place, or whatever `images.of` takes.
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
    if evaluate is not None:
        check_device(device)
    named, sized = named_net(architecture, arguments), count(samples)
    told = _told(columns, method, run, evaluate is not None)
    if sized is not None:
        known.of_members(told, range(sized))
    whole, facts_given = Whole(named.module(), order, buffers), facts_of(given)
    root = Path(out).expanduser().absolute()
    target = Source(root, root.as_uri())
    locks = cache.writable("local/copies")
    with safetensors.writing_into(root), cache.locked(locks, str(root.resolve() / name)):
        resharding.sweep(root, name)
        drawn = Drawn(target, name, method)
        try:
            for at, draw in enumerate(each(samples)):
                state = whole(draw, at)
                if drawn.head is None:
                    drawn.begin(pickles.head_of(state), whole.counters, named.architecture or str(named.own))
                    described = facts.described(name, named.facts(), drawn.layouts, facts_given, like)
                    facts.check_net(described, named.build)
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
