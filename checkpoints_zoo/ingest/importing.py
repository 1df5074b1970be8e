"""`zoo-cli import` as one call: look at the files, write the manifest or shards, fill in what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from checkpoints_zoo import archive, cache, catalog, manifest, writing
from checkpoints_zoo.archive import Lot
from checkpoints_zoo.catalog import Description
from checkpoints_zoo.errors import DamagedError, LayoutError, UsageError
from checkpoints_zoo.ingest import facts, filling, lots, origin, planning, resharding, staging
from checkpoints_zoo.ingest.nets import Net, teller
from checkpoints_zoo.ingest.origin import Origin, Say
from checkpoints_zoo.ingest.planning import Plan
from checkpoints_zoo.source import Source

if TYPE_CHECKING:
    from torch import nn

    from checkpoints_zoo.images import ImageData


@dataclass(frozen=True)
class Imported:
    """What an import has written.

    Args:
        collection: its name.
        manifest: the file.
        rows, ok, failed, excluded: of the manifest, and how many are what.
        hashed, measured: rows with a hash, and with figures on test images.
    """

    collection: str
    manifest: Path
    rows: int
    ok: int
    failed: int
    excluded: int
    hashed: int
    measured: int


def ingest(
    sources: Sequence[str | Path],
    name: str,
    *,
    out: str | Path | None = None,
    reshard: str | Path | None = None,
    hash: bool = False,
    evaluate: str | ImageData | None = None,
    given: Mapping[str, Any] | None = None,
    like: str | None = None,
    net: Net | None = None,
    build: Callable[[], nn.Module] | None = None,
    device: str = "cpu",
    dry_run: bool = False,
    say: Say = lambda text: None,
) -> Imported | Plan:
    """Import members that lie anywhere as a collection; return what was written, or would be in a dry run.

    Args:
        sources: archives, files or a folder of them; or a place on the Hub, `hf://datasets/ORG/NAME[@REV][/PATH]`.
        name: of the collection.
        out: folder to write the manifest into; the files lie in it, those of the Hub aside. None for theirs.
        reshard: folder to copy the members into, as a source of its own; None leaves them where they are.
        hash: whether to read all members, for their content hashes.
        evaluate: test images to measure the members on, by name or given; hashes come with it.
        given: what the files can't tell: title, dataset, classes, preprocessing, licence, citation.
        like: a collection of the catalog whose images the members are for.
        net: which net they are, where their tensors don't tell.
        build: builds a net of the user's own, to measure it.
        device: what to measure them on.
        dry_run: whether to write nothing and read no weights.
        say: told of the progress.

    Raises:
        UsageError: an import that can't be; it says what can.
        SourceNotFound, CollectionNotFound: nothing there.
        DamagedError, LayoutError: no members, or of no net that is known.
        NetworkError, AccessError, StorageError: the Hub can't be reached, or no room.
    """
    name, net, given = catalog.check_name(name), net or Net(), given or {}
    found = _found(sources, name, out, reshard, say)
    root = Path(reshard if reshard is not None else out if out is not None else found.root).expanduser().absolute()
    target = Source(root, root.as_uri())
    if dry_run and found.gzips:
        return planning.unseen(name, found, str(root))
    if dry_run:
        reads = hash or evaluate is not None or reshard is not None
        return _survey(found, name, {}, True, given, like, net, say).plan(str(root), reads)
    locks = cache.writable("local/copies")  # one lock for all that write a collection into a folder
    with writing.writing_into(root), cache.locked(locks, str(root.resolve() / name)):
        resharding.sweep(root, name)
        if reshard is not None:
            resharding.check_begun(target, name, lots.fingerprint(found, net))
        aside = resharding.aside(root, name)
        staged = staging.staged(found, aside, say) if found.gzips else {}
        survey = _survey(found, name, staged, False, given, like, net, say)
        inside = None if evaluate is None else _images(evaluate, survey.description, build)
        if reshard is None:
            survey.write(target)
        else:
            reader = resharding.Reader(found, survey.description, staging.places(found, aside))
            resharding.reshard(reader, survey.rows.to_pylist(), target, say)
        if hash or inside is not None:
            filling.fill(target, name, inside, build, device, say)
        return _imported(target, name)


def _found(
    sources: Sequence[str | Path], name: str, out: str | Path | None, reshard: str | Path | None, say: Say
) -> Origin:
    """Look at the sources, and check that they can be imported so; return them."""
    if out is not None and reshard is not None:
        raise UsageError("import", expected="a folder for the manifest, or one for shards", found="both")
    copied = None if reshard is None else Path(reshard).expanduser().resolve()
    found = origin.find(sources, name, None if out is None else Path(out), copied, say)
    if reshard is None and (found.gzips or found.pickles):
        what = "a gzipped archive" if found.gzips else "a file of torch.save"
        raise UsageError(
            f"source {found.label}",
            expected="members that can be read where they lie",
            found=f"{what} ({(*sorted(found.gzips), *found.pickles)[0]})",
            do="Give --reshard OUT, which copies them into shards",
        )
    if found.repo is not None and out is None and reshard is None:
        raise UsageError(
            f"source {found.label}",
            expected="a folder to write to",
            found="none",
            do="Give --out DIR for a manifest whose bytes stay on the Hub, or --reshard OUT for shards of your own",
        )
    return found


@dataclass(frozen=True)
class _Survey:
    """What an origin holds, written down as a source would: its description, and its rows with their places."""

    origin: Origin
    description: Description
    rows: pa.Table
    given: Mapping[str, Any]
    like: str | None

    def plan(self, target: str, reads: bool) -> Plan:
        headers = lots.unverified(self.origin)
        return planning.planned(self.description, self.origin, target, self.rows.to_pylist(), headers, reads)

    def known(self, source: Source) -> _Survey:
        """Take over what a manifest of these same members says already; return that.

        Raises:
            UsageError: there is a manifest of that name, of other members.
        """
        path = source.manifest_path(self.description.name)
        if not path.is_file():
            return self
        old, rows = source.read(self.description.name)
        if difference := _difference(self, old, rows):
            raise UsageError(
                f"manifest {path}",
                expected=f"the members of {self.origin.label}, or no manifest of that name",
                found=difference,
                do="Give the collection another name or folder, or delete the manifest",
                collection=self.description.name,
                path=path,
            )
        description = facts.renewed(self.description, self.given, self.like, old)
        return replace(self, description=replace(description, layouts=old.layouts), rows=rows)

    def write(self, target: Source) -> None:
        """Write description and manifest, or go on with those of the same members that are there."""
        now, name = self.known(target), self.description.name
        manifest.validate(now.rows, now.description, target.manifest_path(name))
        catalog.write_json(now.description.to_json(), target.description_path(name))
        if now is self:
            manifest.write(now.rows, target.manifest_path(name))


def _survey(
    found: Origin,
    name: str,
    staged: Mapping[str, archive.Index],
    predicted: bool,
    given: Mapping[str, Any],
    like: str | None,
    net: Net,
    say: Say,
) -> _Survey:
    """Find out what members an origin holds, and of what net; return it."""
    there: list[Lot] = lots.of_archives(found, staged, predicted) if found.archives else []
    if found.files:
        there.append(lots.of_files(found, say))
    if found.pickles:
        from checkpoints_zoo.ingest.pickles import lot_of_pickles

        there.append(lot_of_pickles(found))
    broken = [why for lot in there for _, why in lot.broken]
    if not any(lot.members for lot in there):
        first = f"{len(broken):,} damaged ones, the first: {broken[0]}".rstrip(".") if broken else "none"
        raise DamagedError(f"source {found.label}", expected="members", found=first)
    try:
        rows, layouts, told = archive.rows_of_lots(there, teller(net, there))
    except LayoutError as error:
        if net == Net():
            error.do = "Give --architecture NAME for a net of the package, or --architecture-name TEXT for your own"
        raise
    description = facts.described(name, told, layouts, given, like)
    if found.repo is not None:
        description = replace(description, base=str(found.repo))
    survey = _Survey(found, description, manifest.table(rows), given, like)
    return survey.known(Source(found.root, found.root.as_uri())) if found.repo is None else survey


def _difference(new: _Survey, old: Description, rows: pa.Table) -> str:
    """Say in what a manifest that is there differs from that of these members; return "" if in nothing that counts."""
    if old.base != new.description.base:
        return f"members in {old.base or 'this folder'}, not in {new.description.base or 'this folder'}"
    if (old.architecture, dict(old.arguments)) != (new.description.architecture, dict(new.description.arguments)):
        return f"members of {old.architecture} with {dict(old.arguments)}"
    columns = ("member", "epoch", "path", "offset", "nbytes")
    mine, theirs = (list(zip(*(t.column(c).to_pylist() for c in columns), strict=True)) for t in (new.rows, rows))
    if len(mine) != len(theirs):
        return f"{len(theirs):,} members, not {len(mine):,}"
    lain = zip(new.rows.column("layout").to_pylist(), rows.column("layout").to_pylist(), strict=True)
    for one, other, (key, was) in zip(mine, theirs, lain, strict=True):
        if one != other or (key and new.description.layouts[key] != old.layouts[was]):
            return f"member {other[0]} elsewhere or of other tensors"
    return ""


def _images(evaluate: str | ImageData, description: Description, build: Callable[[], nn.Module] | None) -> ImageData:
    """Load test images, and check that the members can be measured on them; return them.

    Raises:
        UsageError: labels of other classes, or a net that nobody can build.
    """
    from checkpoints_zoo import images, measuring
    from checkpoints_zoo.architectures import ARCHITECTURES

    if build is None and description.architecture not in ARCHITECTURES:
        raise UsageError(
            f"accuracies of {description.name}",
            expected=f"a net of the package ({', '.join(ARCHITECTURES)})",
            found=repr(description.architecture),
            do="In Python, `ingest(..., build=...)` takes the function that builds it",
        )
    called = evaluate if isinstance(evaluate, str) else evaluate.name
    for fact, do in (("classes", f"--classes-from {called}, if the logits have its classes in this order, or "),
                     ("preprocessing", "")):  # fmt: skip
        if not getattr(description, fact):
            raise UsageError(
                f"accuracies of {description.name}",
                expected=f"{fact} that the members were trained with",
                found="none in their description",
                do=f"Give {do}--like NAME or --facts FILE",
            )
    inside = images.load(evaluate, "test") if isinstance(evaluate, str) else evaluate
    measuring.labels_of(inside, description)
    return inside


def _imported(target: Source, name: str) -> Imported:
    rows = target.read(name)[1]
    counts = planning.counted(rows.select(["status"]).to_pylist())
    hashed, measured = (rows.num_rows - rows.column(c).null_count for c in ("sha256", "test_accuracy"))
    return Imported(name, target.manifest_path(name), rows.num_rows, **counts, hashed=hashed, measured=measured)
