"""`from_checkpoints`: a folder of checkpoints becomes a source with shards, manifest and description."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from torch import nn

from checkpoints_zoo import images
from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.errors import LeftOut, SourceNotFound, UsageError, ZooError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.images import ImageInput, Preprocess
from checkpoints_zoo.interop.ingest import NetSpec, ingest, user_columns
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.networks import modules
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.networks.modules import Build, build_architecture
from checkpoints_zoo.sources.folder_source import FolderSource

if TYPE_CHECKING:
    import pandas as pd

Result = TypeVar("Result")
MAX_LISTED = 5  # number of members that a warning names


class Facts(TypedDict, total=False):
    """Facts about a collection that its weights do not show.

    Args:
        title: title of the collection, one line.
        dataset: name of the training images.
        classes: class names in the order of the logits, or the name or path of images with these classes.
        preprocessing: a Preprocess, or its JSON.
        licence: SPDX name.
        citation: text for citing the collection.
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
    """Make a source from a folder of checkpoints, one member a file; return the collection loaded from it.

    The files are .safetensors; .pt, .pth, .ckpt and .bin, from which only tensors are read; or .pkl and .pickle with
    dicts of numpy arrays. No code runs. Prefixes of wrappers, such as "module.", are removed from names if the shorter
    names fit the architecture exactly. A file that is damaged or has other tensors is refused before anything is
    written. A member with values that are not finite becomes `failed`, a copy of an earlier member `excluded`; a
    warning names both. OUT/files/NAME.csv lists the file of each member. After an interruption the same call continues.

    Args:
        directory: folder that has the checkpoints, directly or in folders below it.
        architecture: name in `ARCHITECTURES`, or a function or class that builds the module.
        out: folder of the new source; other collections in the folder stay.
        name: name of the collection.
        arguments: arguments of a named architecture.
        files: pattern of the file names (`"*.pt"`), required if the folder has files of several kinds.
        key: key of the state dict in each file ("ema"), required if several state dicts fit.
        prefix: prefix of the network's tensor names in the files, unless it is the prefix of a known wrapper.
        columns: columns of the manifest: name -> one value for all members, or a value for each in the order of ids;
            or a table, as DataFrame or CSV file, with the file names in its column "file" or its index.
        evaluate: test images to measure the members on: a name, a path, or any other argument of `images.of`.
        like: name of a collection of the catalog with the same images, classes and preprocessing.
        device: torch device on which the members are evaluated.
        say: function called with lines of text on the progress.
        facts: title (one line), dataset (name of the training images), classes (names in the order of the logits, or
            images that have these classes), preprocessing (a Preprocess, or its JSON), licence (SPDX name) and citation
            of the collection. Without `like`, `evaluate` needs classes and preprocessing.

    Raises:
        UsageError: arguments contradict each other, a file has more than tensors, or the folder has other members under
            this name.
        SourceNotFound: there are no checkpoints.
        DamagedError: files are cut or are no checkpoints; the error names them.
        LayoutError: files have missing, extra or misshapen tensors; the error names them.
        StorageError: the disk is full.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as place:
    ...     torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, f"{place}/seed-7.pt")
    ...     from_checkpoints(place, lambda: torch.nn.Linear(3, 2), out=f"{place}/out", name="linear").ids
    [7]
    """
    chosen_net = net_from_argument(architecture, arguments)
    if not isinstance(directory, str | Path):
        raise UsageError(
            "directory",
            expected="the path of one folder with checkpoints",
            found=f"a {type(directory).__name__}",
            do='To take some of its files only, give files="PATTERN"',
        )
    folder = Path(directory).expanduser()
    if not folder.is_dir():
        obstacle = "a file" if folder.exists() else "nothing there"
        raise SourceNotFound(f"source {directory}", expected="a folder of checkpoints", found=obstacle, path=folder)
    net = NetSpec(chosen_net.architecture, chosen_net.arguments, chosen_net.custom_name, prefix, key)
    column_reader = make_column_reader(columns, evaluate is not None)
    ingest(
        [folder], name, reshard=out, hash=True, evaluate=evaluate, user_facts=facts_to_json(facts), like=like, net=net,
        build=chosen_net.build, columns=column_reader, files=files, strict=True, device=device, say=say,
    )  # fmt: skip
    root = Path(out).expanduser().absolute()
    warn_of_left_out(FolderSource(root, root.as_uri()), name, user_columns.read_original_files(root, name))
    return load(name, source=root, architecture=chosen_net.build)


class ArgumentChecks:
    """Runs the checks of a call's arguments, and raises all their problems in one error.

    Args:
        function_name: name of the function, for the error.
    """

    def __init__(self, function_name: str) -> None:
        self.function_name = function_name
        self.problems: list[ZooError] = []

    def run(self, check: Callable[..., Result], *arguments: Any) -> Result | None:
        """Call a check; return its result, or None if it raises an error of the package."""
        try:
            return check(*arguments)
        except ZooError as error:
            self.problems.append(error)
            return None

    def raise_problems(self) -> None:
        """Raise the only problem unchanged, or several problems as one UsageError that lists them."""
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            listed = " ".join(f"({at}) {problem}" for at, problem in enumerate(self.problems, 1))
            raise UsageError(
                f"arguments of {self.function_name}",
                expected="valid ones",
                found=f"{len(self.problems)} problems: {listed}",
            ) from self.problems[0]


@dataclass(frozen=True)
class ChosenNet:
    """The network of the members: a named architecture with arguments, or a function of the user that builds it."""

    architecture: str | None
    arguments: Mapping[str, Any]
    custom_name: str | None
    build: Build | None

    def facts(self) -> dict[str, Any]:
        """Return the description's fields about the net."""
        return {"architecture": self.architecture or self.custom_name, "arguments": dict(self.arguments)}

    def module(self) -> nn.Module:
        """Return the module, without memory for its tensors if possible.

        Raises:
            UsageError: an unknown architecture, or a function that builds no module.
        """
        build = self.build or (lambda: build_architecture(str(self.architecture), **self.arguments))
        return modules.build_module(build, "the members")


def net_from_argument(architecture: str | Build, arguments: Mapping[str, Any] | None) -> ChosenNet:
    """Return the net for the user's argument `architecture`.

    Raises:
        UsageError: an unknown architecture, a module instead of a function, or `arguments` with a function.
    """
    if isinstance(architecture, str):
        if architecture not in ARCHITECTURES or arguments:
            build_architecture(architecture, **(arguments or {}))  # raises an error if the arguments are wrong
        return ChosenNet(architecture, dict(arguments or {}), None, None)
    if isinstance(architecture, nn.Module) or not callable(architecture):
        raise UsageError(
            "architecture",
            expected=f"a name ({', '.join(ARCHITECTURES)}), or a function that builds the module",
            found=f"a {type(architecture).__name__}",
            do="Give the class or function that builds it, such as lambda: Net(10)",
        )
    if arguments:
        raise UsageError("arguments", expected="an architecture by name", found="a function that builds it",
                         do="Give lambda: build(…)")  # fmt: skip
    class_name = type(modules.build_module(architecture, "the members")).__name__
    return ChosenNet(None, {}, class_name if class_name not in ARCHITECTURES else f"{class_name}-own", architecture)


def facts_to_json(facts: Facts) -> dict[str, Any]:
    """Return the user's facts about a collection as the JSON values of its description.

    Raises:
        UsageError: `classes` names unknown images.
    """
    values: dict[str, Any] = dict(facts)
    if isinstance(classes := values.get("classes"), str):
        values["classes"] = images.CLASSES.get(classes) or images.of(classes).classes
    if isinstance(values.get("preprocessing"), Preprocess):
        values["preprocessing"] = values["preprocessing"].to_json()
    return values


def make_column_reader(
    columns: Mapping[str, Any] | pd.DataFrame | str | Path | None, figures_are_measured: bool
) -> user_columns.ColumnReader | None:
    """Return the function that maps (file -> member) to (member -> columns); None without columns.

    Args:
        columns: columns by member, or by file.
        figures_are_measured: whether test figures are measured; if so, columns may not contain them.

    Raises:
        UsageError, FormatError, SourceNotFound: unknown columns, or an unreadable table.
    """
    if columns is None:
        return None
    if isinstance(columns, str | Path):
        return user_columns.column_reader_of_table(
            user_columns.read_csv(Path(columns).expanduser()), figures_are_measured
        )
    if not isinstance(columns, Mapping):
        return user_columns.column_reader_of_table(
            user_columns.rows_by_file(_rows_of_frame(columns), "columns by file"), figures_are_measured
        )
    user_columns.check_column_names(columns)
    if figures_are_measured:
        user_columns.check_no_measured_figures(columns)
    return lambda files: user_columns.columns_of_members(columns, list(files.values()))


def _rows_of_frame(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame, with the file of each under "file"."""
    if not hasattr(frame, "to_dict") or not hasattr(frame, "index"):
        raise UsageError("columns", expected="a mapping, a DataFrame or a CSV file", found=type(frame).__name__)
    if user_columns.FILE_COLUMN not in frame.columns:
        frame = frame.rename_axis(index=user_columns.FILE_COLUMN).reset_index()
    records: list[dict[str, Any]] = frame.to_dict(orient="records")
    return records


def warn_of_left_out(source: FolderSource, collection: str, file_of_member: Mapping[int, str]) -> None:
    """Warn of members with another status than ok, naming their files."""
    rows = source.read_collection(collection)[1].to_pylist()
    left_out = [row for row in rows if row["status"] != "ok"]
    if left_out:
        listed = "; ".join(
            f"{_member_label(row['member'], file_of_member)}: {row['status']}, {row['reason']}"
            for row in left_out[:MAX_LISTED]
        )
        more = f"; and {len(left_out) - MAX_LISTED} more" if len(left_out) > MAX_LISTED else ""
        left_out_text = f"{len(left_out)} of {len(rows)} members are left out"
        text = f"collection {catalog.check_name(collection)}: {left_out_text}. {listed}{more}."
        warnings.warn(text, LeftOut, stacklevel=3)


def _member_label(member: int, file_of_member: Mapping[int, str]) -> str:
    return f"member {member} ({file_of_member[member]})" if member in file_of_member else f"member {member}"
