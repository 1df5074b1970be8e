"""A folder of anyone's checkpoints becomes a source: shards, manifest, description."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import nn

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.errors import LeftOut, SourceNotFound, UsageError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.images import ImageInput, Preprocess
from checkpoints_zoo.interop.ingest import NetSpec, given_columns, ingest
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.networks.modules import Build, build_architecture
from checkpoints_zoo.sources.source import FolderSource

if TYPE_CHECKING:
    import pandas as pd

MAX_LISTED = 5  # members that a warning names


class Facts(TypedDict, total=False):
    """What weights can't tell of a collection.

    title: one line on what it is. dataset: the images it was trained on, by name. classes: in the order of the logits,
    or the name or place of images that have them so. preprocessing: what turns pixels into inputs, or its JSON.
    licence: SPDX name. citation: how to cite it.
    """

    title: str
    dataset: str
    classes: Sequence[str] | str
    preprocessing: Preprocess | Mapping[str, Any]
    licence: str
    citation: str


def from_checkpoints(
    directory: str | Path,
    architecture: str | Build,
    *,
    out: str | Path,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    files: str | None = None,
    key: str = "",
    prefix: str = "",
    columns: Mapping[str, Any] | pd.DataFrame | str | Path | None = None,
    evaluate: ImageInput | None = None,
    like: str | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
    **facts: Unpack[Facts],
) -> Collection:
    """Make a source of a folder of checkpoints, one member a file; return the collection as loaded from it.

    The files are .pt, .pth, .ckpt, .bin (tensors alone are read from these, no code is run) or .safetensors. What
    wrappers put before names comes off where the rest fits the architecture exactly. A file that is damaged, or of
    other tensors, is refused before anything is written; values that are not finite and weights that were there before
    make a member `failed` or `excluded`, with a warning. OUT/files/NAME.csv says which file became which member. Cut
    off and started again it goes on.

    Args:
        directory: with the checkpoints, folders below it included.
        architecture: a name in `ARCHITECTURES`, or what builds the module.
        out: folder of the source; other collections in it stay.
        name: of the collection.
        arguments: of an architecture that is named.
        files: pattern of the names that are meant ("*.pt"), where the folder has files of several kinds.
        key: under what each file has the state dict ("ema"), where two of them fit.
        prefix: that all names of tensors have, where it is none of a known wrapper.
        columns: of the manifest: name -> a value for all, or one for each member in the order of the ids; or a table
            with the files in its column "file" or its index, as a DataFrame or a CSV file.
        evaluate: test images to measure the members on: their name, their place, or whatever `images.of` takes.
        like: a collection of the catalog whose images, classes and preprocessing the members are for.
        device: what to measure them on.
        say: told of the progress.
        facts: facts that the files can't tell, see `Facts`.

    Raises:
        UsageError: arguments that make no sense, a file that is no tensors alone, or a folder with other members.
        SourceNotFound: no checkpoints there.
        DamagedError: files that are cut, or something else, by name.
        LayoutError: files whose tensors are missing, extra or misshapen, by name.
        StorageError: no room.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, f"{place}/seed-7.pt")
    ...     from_checkpoints(place, lambda: torch.nn.Linear(3, 2), out=f"{place}/out", name="linear").ids
    [7]
    """
    chosen_net = choose_net(architecture, arguments)
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        obstacle = "a file" if folder.exists() else "nothing there"
        raise SourceNotFound(f"source {directory}", expected="a folder of checkpoints", found=obstacle, path=folder)
    net = NetSpec(chosen_net.architecture, chosen_net.arguments, chosen_net.custom_name, prefix, key)
    column_reader = make_column_reader(columns, evaluate is not None)
    ingest(
        [folder], name, reshard=out, hash=True, evaluate=evaluate, given=facts_to_json(facts), like=like, net=net,
        build=chosen_net.build, columns=column_reader, files=files, strict=True, device=device, say=say,
    )  # fmt: skip
    root = Path(out).expanduser().absolute()
    warn_of_left_out(FolderSource(root, root.as_uri()), name, given_columns.read_files(root, name))
    return load(name, source=root, architecture=chosen_net.build)


@dataclass(frozen=True)
class ChosenNet:
    """The members' net: one of the package's with arguments, or one of the user's own with what builds it."""

    architecture: str | None
    arguments: Mapping[str, Any]
    custom_name: str | None
    build: Build | None

    def facts(self) -> dict[str, Any]:
        """Return what a description says of it."""
        return {"architecture": self.architecture or self.custom_name, "arguments": dict(self.arguments)}

    def module(self) -> nn.Module:
        """Build it, without memory where that can be; return it.

        Raises:
            UsageError: no architecture of that name, or nothing that builds a module.
        """
        build = self.build or (lambda: build_architecture(str(self.architecture), **self.arguments))
        return modules.build_module(build, "the members")


def choose_net(architecture: str | Build, arguments: Mapping[str, Any] | None) -> ChosenNet:
    """Look at what a user gives as architecture; return the net that it is.

    Raises:
        UsageError: no architecture of that name, a module in place of what builds it, or arguments for that.
    """
    if isinstance(architecture, str):
        if architecture not in ARCHITECTURES or arguments:
            build_architecture(architecture, **(arguments or {}))  # says what is wrong with them
        return ChosenNet(architecture, dict(arguments or {}), None, None)
    if isinstance(architecture, nn.Module) or not callable(architecture):
        raise UsageError(
            "architecture",
            expected=f"a name ({', '.join(ARCHITECTURES)}), or a function that builds the module",
            found=f"a {type(architecture).__name__}",
            do="Give the class or function that made it, such as lambda: NetSpec(10)",
        )
    if arguments:
        raise UsageError("arguments", expected="an architecture by name", found="a function that builds it",
                         do="Give lambda: build(…)")  # fmt: skip
    class_name = type(modules.build_module(architecture, "the members")).__name__
    return ChosenNet(None, {}, class_name if class_name not in ARCHITECTURES else f"{class_name}-own", architecture)


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """Return facts as a description has them.

    Raises:
        UsageError: images that the classes are to be of, but that nobody knows.
    """
    values: dict[str, Any] = dict(facts)
    if isinstance(classes := values.get("classes"), str):
        values["classes"] = images.CLASSES.get(classes) or images.of(classes).classes
    if isinstance(values.get("preprocessing"), Preprocess):
        values["preprocessing"] = values["preprocessing"].to_json()
    return values


def make_column_reader(
    columns: Mapping[str, Any] | pd.DataFrame | str | Path | None, measured: bool
) -> given_columns.ColumnReader | None:
    """Return what tells columns by member, from each file's member; None without any.

    Args:
        columns: by member, or by file.
        measured: whether test figures are measured, and so may not be given.

    Raises:
        UsageError, FormatError, SourceNotFound: columns that are none, or a table that can't be read.
    """
    if columns is None:
        return None
    if isinstance(columns, str | Path):
        return given_columns.make_reader(given_columns.read_csv(Path(columns).expanduser()), measured)
    if not isinstance(columns, Mapping):
        return given_columns.make_reader(given_columns.rows_by_file(_records(columns), "columns by file"), measured)
    given_columns.check_names(columns)
    if measured:
        given_columns.check_unmeasured(columns)
    return lambda files: given_columns.columns_of_members(columns, list(files.values()))


def _records(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame, the file of each under "file"."""
    if not hasattr(frame, "to_dict") or not hasattr(frame, "index"):
        raise UsageError("columns", expected="a mapping, a DataFrame or a CSV file", found=type(frame).__name__)
    if given_columns.FILE_COLUMN not in frame.columns:
        frame = frame.rename_axis(index=given_columns.FILE_COLUMN).reset_index()
    records: list[dict[str, Any]] = frame.to_dict(orient="records")
    return records


def warn_of_left_out(source: FolderSource, name: str, files: Mapping[int, str]) -> None:
    """Warn of members that can't be used, by the files that they were."""
    rows = source.read_collection(name)[1].to_pylist()
    left_out = [row for row in rows if row["status"] != "ok"]
    if left_out:
        listed = "; ".join(
            f"{_member_label(row['member'], files)}: {row['status']}, {row['reason']}" for row in left_out[:MAX_LISTED]
        )
        more = f"; and {len(left_out) - MAX_LISTED} more" if len(left_out) > MAX_LISTED else ""
        count = f"{len(left_out)} of {len(rows)} members are left out"
        text = f"collection {catalog.check_name(name)}: {count}. {listed}{more}."
        warnings.warn(text, LeftOut, stacklevel=3)


def _member_label(member: int, files: Mapping[int, str]) -> str:
    return f"member {member} ({files[member]})" if member in files else f"member {member}"
