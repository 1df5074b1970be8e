"""`ingest`, the function behind `zoo-cli import`: survey files, write manifest or shards, add hashes and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats import catalog, disk
from checkpoints_zoo.formats.catalog import Description
from checkpoints_zoo.interop.ingest import checkpoint_members, shards, user_columns
from checkpoints_zoo.interop.ingest.measuring import fill_hashes_and_figures
from checkpoints_zoo.interop.ingest.networks import Build, NetSpec
from checkpoints_zoo.interop.ingest.origin import FileFilter, Origin, Say, find_origin
from checkpoints_zoo.interop.ingest.survey import ImportOptions, ImportPlan, plan_of_gzips, status_counts, survey_origin
from checkpoints_zoo.interop.ingest.user_columns import ColumnReader
from checkpoints_zoo.interop.ingest.user_facts import keep_earlier_facts
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.sources import archives, cache
from checkpoints_zoo.sources.folder_source import FolderSource

if TYPE_CHECKING:
    from checkpoints_zoo.images import ImageData, ImageInput


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Args:
        collection: name of the collection.
        manifest: path of its manifest.
        rows, ok, failed, excluded: number of rows, and of rows with each status.
        hashed, measured: number of rows with a hash, and with figures on test images.
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
    user_facts: Mapping[str, Any] | None = None,
    like: str | None = None,
    net: NetSpec | None = None,
    build: Build | None = None,
    columns: ColumnReader | None = None,
    files: str | None = None,
    strict: bool = False,
    device: str = "cpu",
    dry_run: bool = False,
    say: Say = lambda text: None,
) -> Imported | ImportPlan:
    """Import members as a collection; return the result, or the plan in a dry run.

    Args:
        sources: archives, files or a folder of them; or a place on the Hub, `hf://datasets/ORG/NAME[@REV][/PATH]`.
        name: name of the collection.
        out: folder for the manifest; local files of members must be in this folder. None for the folder of the files.
        reshard: folder to copy the members into, as a new source; None leaves them where they are.
        hash: whether all members are read and their content hashes stored.
        evaluate: test images to measure the members on, as for `images.of`; hashes are stored as well.
        user_facts: the collection's title, dataset, classes, preprocessing, licence and citation.
        like: name of a collection of the catalog with the same images, whose facts on the images are copied.
        net: network of the members, if their tensors do not show it.
        build: function that builds the user's net, to check and to measure the members.
        columns: function that maps (file -> member) to (member -> columns of the manifest).
        files: pattern of the file names in a folder; None for all files of the first kind found.
        strict: whether files of several kinds, damaged files and files of another net are refused; otherwise damaged
            members become failed and members of another net excluded.
        device: torch device on which the members are evaluated.
        dry_run: whether the import is only planned: no weights are read, and nothing is written.
        say: function called with lines of text on the progress.

    Raises:
        UsageError: arguments contradict each other, or the files can't be imported with these options.
        SourceNotFound, CollectionNotFound: a source or `like` does not exist.
        DamagedError, LayoutError: there are no members, or their net is unknown.
        NetworkError, AccessError, StorageError: the Hub can't be read, or the disk is full.
    """
    name, net, user_facts = catalog.check_name(name), net or NetSpec(), user_facts or {}
    if evaluate is not None:
        from checkpoints_zoo.networks.device import check_device

        check_device(device)
    origin = _find_origin(sources, name, out, reshard, say, FileFilter(files, strict))
    root = Path(reshard if reshard is not None else out if out is not None else origin.root).expanduser().absolute()
    target, copy_root = FolderSource(root, root.as_uri()), None if reshard is None else root.resolve()
    options = ImportOptions(
        net, build, columns, strict, _earlier_member_ids(target, name, is_copied=reshard is not None)
    )
    if dry_run and origin.gzips:
        return plan_of_gzips(name, origin, str(root))
    if dry_run:
        reads_weights = hash or evaluate is not None or reshard is not None
        return survey_origin(origin, name, {}, True, user_facts, like, options, copy_root, say).plan(
            str(root), reads_weights
        )
    lock_folder = cache.writable_folder("local/copies")  # one lock for every process that writes this collection
    with disk.translate_write_errors(root), cache.hold_key_lock(lock_folder, str(root.resolve() / name)):
        shards.remove_temporary_files(root, name)
        import_record = shards.ImportRecord.of(origin, net, build)
        if reshard is not None:
            shards.check_same_import(target, name, import_record)
        staging_folder, staged_indexes = shards.import_folder(root, name), dict[str, archives.Index]()
        if origin.gzips:
            shards.record_import(target, name, import_record)
            staged_indexes = checkpoint_members.stage_gzips(origin, staging_folder, say)
        survey = survey_origin(origin, name, staged_indexes, False, user_facts, like, options, copy_root, say)
        description = keep_earlier_facts(survey.description, user_facts, like, target)
        test_images = None if evaluate is None else load_test_images(evaluate, description, build)
        if reshard is None:
            survey.write(target)
        else:
            shards.record_import(target, name, import_record)
            origin = survey.origin  # safetensors files with more tensors than the net's are read as state dicts
            reader = shards.MemberReader(
                origin,
                description,
                checkpoint_members.file_finder(origin, staging_folder),
                options.state_dict_place(origin),
            )
            shards.reshard(reader, survey.rows.to_pylist(), target, say)
            user_columns.write_original_files(root, name, survey.files)
        user_columns.write_columns(target, name, survey.user_columns)
        if hash or test_images is not None:
            fill_hashes_and_figures(target, name, test_images, build, device, say)
        return _import_summary(target, name)


def _earlier_member_ids(target: FolderSource, collection: str, is_copied: bool) -> dict[str, int]:
    """Return path -> member of the files that an earlier import into a folder has; {} for archives and without one."""
    if not target.manifest_path(collection).is_file():
        return {}
    if is_copied:
        return {path: member for member, path in user_columns.read_original_files(target.root, collection).items()}
    rows = target.read_collection(collection)[1].select(["member", "path"]).to_pylist()
    return {row["path"]: row["member"] for row in rows if row["path"] is not None and "!" not in row["path"]}


def _find_origin(
    sources: Sequence[str | Path], collection: str, out: str | Path | None, reshard: str | Path | None, say: Say,
    file_filter: FileFilter,
) -> Origin:  # fmt: skip
    """Find the files of the sources, and check that the options fit; return the origin."""
    if out is not None and reshard is not None:
        raise UsageError("import", expected="a folder for the manifest, or one for shards", found="both")
    copy_root = None if reshard is None else Path(reshard).expanduser().resolve()
    origin = find_origin(sources, collection, None if out is None else Path(out), copy_root, say, file_filter)
    if reshard is None and (origin.gzips or origin.pickles):
        kind = "a gzipped archive" if origin.gzips else "a file of torch.save"
        raise UsageError(
            f"source {origin.label}",
            expected="files whose members can be read in place",
            found=f"{kind} ({(*sorted(origin.gzips), *origin.pickles)[0]})",
            do="Give --reshard OUT, which copies them into shards",
        )
    if origin.repo is not None and out is None and reshard is None:
        raise UsageError(
            f"source {origin.label}",
            expected="a folder to write to",
            found="none",
            do="Give --out DIR for a manifest whose bytes stay on the Hub, or --reshard OUT for shards of your own",
        )
    return origin


def load_test_images(image_input: ImageInput, description: Description, build: Build | None) -> ImageData:
    """Load test images and check that the members can be measured on them; return them in the order of the classes.

    Raises:
        UsageError: the labels have other classes, the images another size, or the net is unknown and there is no
            `build`.
        SourceNotFound, FormatError, TooLargeError, NetworkError, AccessError, DamagedError: the same cases as in
            `images.of`.
    """
    from checkpoints_zoo import images
    from checkpoints_zoo.evaluation import arguments

    if build is None and description.architecture not in ARCHITECTURES:
        raise UsageError(
            f"accuracies of {description.name}",
            expected=f"a net of the package ({', '.join(ARCHITECTURES)})",
            found=repr(description.architecture),
            do="In Python, `ingest(..., build=...)` takes the function that builds it",
        )
    images_name = image_input if isinstance(image_input, str) else "IMAGES"
    for fact_name, option in (
        ("classes", f"--classes-from {images_name} if the logits have its classes in this order, "),
        ("preprocessing", ""),
    ):
        if not getattr(description, fact_name):
            raise UsageError(
                f"accuracies of {description.name}",
                expected=f"{fact_name} that the members were trained with",
                found="none in their description",
                do=f"Give like= or {fact_name}= (on the command line {option}--like NAME or --facts FILE)",
            )
    test_images, _ = arguments.require_labels(images.of(image_input), description)
    test_images.inputs(test_images.images[:1], images.Preprocess.from_json(description.preprocessing))
    return test_images


def _import_summary(target: FolderSource, collection: str) -> Imported:
    rows = target.read_collection(collection)[1]
    counts = status_counts(rows.select(["status"]).to_pylist())
    hashed, measured = (rows.num_rows - rows.column(c).null_count for c in ("sha256", "test_accuracy"))
    return Imported(
        collection, target.manifest_path(collection), rows.num_rows, **counts, hashed=hashed, measured=measured
    )
