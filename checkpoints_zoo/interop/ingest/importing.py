"""`zoo-cli import` as one call: look at the files, write the manifest or shards, fill in what is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog, disk
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.interop.ingest import checkpoint_members, given_columns, origin, shards
from checkpoints_zoo.interop.ingest.given_columns import Tells
from checkpoints_zoo.interop.ingest.measuring import fill
from checkpoints_zoo.interop.ingest.networks import Build, Net
from checkpoints_zoo.interop.ingest.origin import Chosen, Origin, Say
from checkpoints_zoo.interop.ingest.survey import How, Plan, counted, survey, unseen
from checkpoints_zoo.sources import archives, cache
from checkpoints_zoo.sources.source import FolderSource

if TYPE_CHECKING:
    from checkpoints_zoo.images import ImageData, ImageInput


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
    evaluate: ImageInput | None = None,
    given: Mapping[str, Any] | None = None,
    like: str | None = None,
    net: Net | None = None,
    build: Build | None = None,
    columns: Tells | None = None,
    files: str | None = None,
    strict: bool = False,
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
        evaluate: test images to measure the members on, as `images.of` takes them; hashes come with it.
        given: what the files can't tell: title, dataset, classes, preprocessing, licence, citation.
        like: a collection of the catalog whose images the members are for.
        net: which net they are, where their tensors don't tell.
        build: builds a net of the user's own, to check the members against it, and to measure them.
        columns: gives columns of the manifest by member, from each file's member.
        files: pattern of the names that are meant in a folder; None for all of the first kind that it has.
        strict: whether files of several kinds, damaged ones and those of another net are refused; else damaged members
            are marked as failed and others as excluded.
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
    if evaluate is not None:
        from checkpoints_zoo.networks.device import check_device

        check_device(device)
    found = _found(sources, name, out, reshard, say, Chosen(files, strict))
    how = How(net, build, columns, strict)
    root = Path(reshard if reshard is not None else out if out is not None else found.root).expanduser().absolute()
    target, copied = FolderSource(root, root.as_uri()), None if reshard is None else root.resolve()
    if dry_run and found.gzips:
        return unseen(name, found, str(root))
    if dry_run:
        reads = hash or evaluate is not None or reshard is not None
        return survey(found, name, {}, True, given, like, how, copied, say).plan(str(root), reads)
    locks = cache.writable("local/copies")  # one lock for all that write a collection into a folder
    with disk.writing_into(root), cache.locked(locks, str(root.resolve() / name)):
        shards.sweep(root, name)
        stamp = "" if reshard is None else shards.fingerprint(found, net, build)
        if reshard is not None:
            shards.check_begun(target, name, stamp)
        aside, staged = shards.aside(root, name), dict[str, archives.Index]()
        if found.gzips:
            shards.begin(target, name, stamp)
            staged = checkpoint_members.staged(found, aside, say)
        surveyed = survey(found, name, staged, False, given, like, how, copied, say)
        inside = None if evaluate is None else images_for(evaluate, surveyed.description, build)
        if reshard is None:
            surveyed.write(target)
        else:
            described = given_columns.kept(surveyed.description, given, like, target)
            shards.begin(target, name, stamp)
            reader = shards.Reader(found, described, checkpoint_members.places(found, aside), how.within(found))
            shards.reshard(reader, surveyed.rows.to_pylist(), target, say)
            given_columns.write_files(root, name, surveyed.files)
        given_columns.write_columns(target, name, surveyed.told)
        if hash or inside is not None:
            fill(target, name, inside, build, device, say)
        return _imported(target, name)


def _found(
    sources: Sequence[str | Path], name: str, out: str | Path | None, reshard: str | Path | None, say: Say,
    chosen: Chosen,
) -> Origin:  # fmt: skip
    """Look at the sources, and check that they can be imported so; return them."""
    if out is not None and reshard is not None:
        raise UsageError("import", expected="a folder for the manifest, or one for shards", found="both")
    copied = None if reshard is None else Path(reshard).expanduser().resolve()
    found = origin.find(sources, name, None if out is None else Path(out), copied, say, chosen)
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


def images_for(evaluate: ImageInput, description: Description, build: Build | None) -> ImageData:
    """Load test images, and check that the members can be measured on them; return them in the order of the classes.

    Raises:
        UsageError: labels of other classes, images of another size, or a net that nobody can build.
        SourceNotFound, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: as `images.of`.
    """
    from checkpoints_zoo import images
    from checkpoints_zoo.evaluation import arguments
    from checkpoints_zoo.networks.architectures import ARCHITECTURES

    if build is None and description.architecture not in ARCHITECTURES:
        raise UsageError(
            f"accuracies of {description.name}",
            expected=f"a net of the package ({', '.join(ARCHITECTURES)})",
            found=repr(description.architecture),
            do="In Python, `ingest(..., build=...)` takes the function that builds it",
        )
    called = evaluate if isinstance(evaluate, str) else "IMAGES"
    for fact, do in (("classes", f"--classes-from {called}, if the logits have its classes in this order, or "),
                     ("preprocessing", "")):  # fmt: skip
        if not getattr(description, fact):
            raise UsageError(
                f"accuracies of {description.name}",
                expected=f"{fact} that the members were trained with",
                found="none in their description",
                do=f"Give {do}--like NAME or --facts FILE",
            )
    inside, _ = arguments.labelled(images.of(evaluate), description)
    inside.inputs(inside.images[:1], images.Preprocess.from_json(description.preprocessing))
    return inside


def _imported(target: FolderSource, name: str) -> Imported:
    rows = target.read(name)[1]
    counts = counted(rows.select(["status"]).to_pylist())
    hashed, measured = (rows.num_rows - rows.column(c).null_count for c in ("sha256", "test_accuracy"))
    return Imported(name, target.manifest_path(name), rows.num_rows, **counts, hashed=hashed, measured=measured)
