"""`from_samples`: draws of a posterior become a source with shards, manifest and description.

This is one file, because the writer stores the draws that the reader yields.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from checkpoints_zoo.collection.collection import Collection, load
from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats import catalog, disk, manifest, row_checks, shard_files
from checkpoints_zoo.formats.layout import Layout, Shape, compare_shapes, is_counter
from checkpoints_zoo.formats.shard_files import Location, tensor_prefix
from checkpoints_zoo.images import ImageInput
from checkpoints_zoo.interop.checkpoints import (
    ArgumentChecks,
    ChosenNet,
    Facts,
    facts_to_json,
    net_from_argument,
    warn_of_left_out,
)
from checkpoints_zoo.interop.ingest import importing, measuring, shards, torch_files, user_columns, user_facts
from checkpoints_zoo.interop.ingest.origin import Say
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.modules import Build, first_names
from checkpoints_zoo.populations.independent_units import INDEPENDENT_METHOD
from checkpoints_zoo.sources import archives, cache
from checkpoints_zoo.sources.archives import MemberHeader
from checkpoints_zoo.sources.archives.keymaps import unwrap_names
from checkpoints_zoo.sources.folder_source import FolderSource

Array = Tensor | npt.NDArray[Any]
Draw = Mapping[str, Array] | Array
Samples = Iterable[Draw] | Mapping[str, Array] | Array
StateDict = dict[str, Tensor]
PARAMETERS = "parameters"
Row = dict[str, Any]
_METHOD_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,31}")


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
    evaluate: ImageInput | None = None,
    like: str | None = None,
    device: str = "cpu",
    say: Say = lambda text: None,
    **facts: Unpack[Facts],
) -> Collection:
    """Make a source from draws of a posterior, one member a draw; return the collection loaded from it.

    An iterator is read one draw at a time, with one draw in memory. The manifest is written last, so an interruption
    keeps the earlier content. If the folder has the first draws already, the other draws are added.

    Args:
        samples: list or iterator of state dicts; or tensors stacked by name (draw, …); or flat vectors with `order`,
            as a tensor (draw, weight) or one after another. Draws of a net with buffers may contain only its
            parameters.
        architecture: name in `ARCHITECTURES`, or a function or class that builds the module.
        method: method that made the draws ("swag", "hmc", "sghmc", "laplace", "vi", "dropout", …). Equal draws are
            allowed only in one run of dropout, hmc, sghmc and sgld.
        out: folder of the new source; other collections in the folder stay.
        name: name of the collection, COLLECTION-METHOD or COLLECTION-METHOD-multi.
        arguments: arguments of a named architecture.
        order: order of weights in flat vectors: "parameters" for torch.nn.utils.parameters_to_vector, or tensor names,
            such as `dataset.spans` of a WeightDataset.
        buffers: module or state dict whose buffers all draws share, if the draws have none.
        run: number of the method's run, for all draws or for each draw; draws are counted in each run.
        columns: columns of the manifest: name -> one value for all draws, or a value for each draw.
        evaluate: test images to measure the draws on: a name, a path, or any other argument of `images.of`.
        like: name of a collection of the catalog with the same images, classes and preprocessing.
        device: torch device on which the draws are evaluated.
        say: function called with lines of text on the progress.
        facts: title, images, licence and citation of the collection, see `Facts`.

    Raises:
        UsageError: arguments contradict each other, there are no draws, or the folder has other members under this
            name.
        LayoutError: a draw has missing, extra or misshapen tensors; the error names them.
        StorageError: the disk is full.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as out:
    ...     vectors = torch.randn(5, 8)  # (draw, weight)
    ...     build = lambda: torch.nn.Linear(3, 2)
    ...     drawn = from_samples(vectors, build, method="vi", out=out, name="line-vi", order="parameters")
    ...     drawn.stack()["weight"].shape
    torch.Size([5, 2, 3])
    """
    checks = ArgumentChecks("from_samples")
    draw_count = checks.run(count_draws, samples)
    chosen_net: ChosenNet | None = checks.run(net_from_argument, architecture, arguments)
    checks.run(_check_names, name, method)
    checked_columns = checks.run(_check_columns, columns, method, run, evaluate is not None)
    if draw_count is not None and checked_columns is not None:
        checks.run(user_columns.columns_of_members, checked_columns, range(draw_count))
    module = None if chosen_net is None else checks.run(chosen_net.module)
    reader = None if module is None else checks.run(DrawReader, module, order, buffers)
    if reader is not None and draw_count and isinstance(samples, Sequence | Mapping | Tensor | np.ndarray):
        checks.run(reader, next(iterate_draws(samples)), 0)
    json_facts = checks.run(facts_to_json, facts)
    if evaluate is not None:
        checks.run(check_device, device)
    checks.raise_problems()
    if chosen_net is None or reader is None or checked_columns is None or json_facts is None:
        raise RuntimeError("a check returned nothing, but raised no error")
    root = Path(out).expanduser().absolute()
    target = FolderSource(root, root.as_uri())
    lock_folder = cache.writable_folder("local/copies")
    with disk.translate_write_errors(root), cache.hold_key_lock(lock_folder, str(root.resolve() / name)):
        shards.remove_temporary_files(root, name)
        writer = DrawWriter(target, name, method)
        try:
            for index, draw in enumerate(iterate_draws(samples)):
                state = reader(draw, index)
                if writer.head is None:
                    writer.begin(
                        torch_files.header_of_state_dict(state),
                        reader.counters,
                        chosen_net.architecture or str(chosen_net.custom_name),
                    )
                    new_description = user_facts.make_description(
                        name, chosen_net.facts(), writer.layouts, json_facts, like
                    )
                    user_facts.check_net(new_description, chosen_net.build)
                    description = user_facts.keep_earlier_facts(new_description, json_facts, like, target)
                    test_images = None
                    if evaluate is not None:
                        test_images = importing.load_test_images(evaluate, description, chosen_net.build)
                writer.add(state)
            if writer.head is None:
                raise UsageError("samples", expected="one draw or more", found="none")
            writer.finish(user_columns.columns_of_members(checked_columns, range(len(writer.rows))))
            table = manifest.build_manifest(writer.rows)
            row_checks.check_rows(table, description, target.manifest_path(name))
            catalog.write_json(description.to_json(), target.description_path(name))
            manifest.write_manifest(table, target.manifest_path(name))
        finally:
            writer.clean_up()
        say(f"{name}: {len(writer.rows):,} draws written")
        if test_images is not None:
            measuring.fill_hashes_and_figures(target, name, test_images, chosen_net.build, device, say)
    warn_of_left_out(target, name, {})
    return load(name, source=root, architecture=chosen_net.build)


def _check_names(collection: str, method: str) -> None:
    catalog.check_name(collection)
    if not _METHOD_PATTERN.fullmatch(str(method)):
        raise UsageError("method", expected="a word in lower case, as swag, laplace or hmc", found=repr(method)[:80])
    if method != INDEPENDENT_METHOD and not re.fullmatch(rf".+-{re.escape(method)}(-multi)?", collection):
        raise UsageError(
            f"collection name {collection!r}",
            expected=f"a name that ends in -{method}, or -{method}-multi for several runs: a manifest holds one method",
            found="another ending",
            do=f"Name it {collection}-{method}",
            collection=collection,
        )


def _check_columns(
    columns: Mapping[str, Any] | None, method: str, run: int | Sequence[int] | None, has_images: bool
) -> Row:
    """Check the columns before a draw is read; return the columns, with the column `run`."""
    checked = dict(columns or {})
    user_columns.check_column_names(checked)
    if repeated_names := sorted({"method", "run", "draw"} & set(checked)):
        raise UsageError(
            f"column {repeated_names[0]!r}",
            expected="its own argument of from_samples" if repeated_names[0] != "draw" else "no such column",
            found="it among the columns",
            do="Leave it out: draws are counted in each run" if repeated_names[0] == "draw" else "",
        )
    if has_images:
        user_columns.check_no_measured_figures(checked)
    if method == INDEPENDENT_METHOD and run is not None:
        raise UsageError("run", expected="a method that has runs", found=f"method {INDEPENDENT_METHOD!r}")
    return checked | ({} if run is None else {"run": run})


def count_draws(samples: Samples) -> int | None:
    """Return the number of draws; None for an iterator.

    Raises:
        UsageError: samples have another type, or tensors are not stacked by draw.
    """
    if isinstance(samples, Mapping):
        shapes = {n: tuple(getattr(t, "shape", ())) for n, t in samples.items()}
        draw_counts = {shape[:1] for shape in shapes.values()}
        if len(draw_counts) != 1 or draw_counts == {()}:
            found = ", ".join(f"{n} {list(s)}" for n, s in list(shapes.items())[:5])
            raise UsageError("stacked draws", expected="tensors (draw, …) with equal numbers of draws",
                             found=found or "no tensors", do="Give a list for a single one: [state]")  # fmt: skip
        return int(next(iter(draw_counts))[0])
    if isinstance(samples, Tensor | np.ndarray):
        if len(samples.shape) != 2:
            raise UsageError("flat draws", expected="shape (draw, weight)", found=f"{tuple(samples.shape)}")
        return int(samples.shape[0])
    if isinstance(samples, str | bytes | nn.Module) or not hasattr(samples, "__iter__"):
        raise UsageError("samples", expected="state dicts, stacked tensors or flat vectors",
                         found=f"a {type(samples).__name__}")  # fmt: skip
    return len(samples) if isinstance(samples, Sized) else None


def iterate_draws(samples: Samples) -> Iterator[Draw]:
    """Yield the draws one by one."""
    if isinstance(samples, Mapping):
        for index in range(count_draws(samples) or 0):
            yield {name: stacked[index] for name, stacked in samples.items()}
    else:
        yield from samples


class DrawReader:
    """Turns draws into complete state dicts: maps names, cuts flat vectors, adds shared buffers.

    Args:
        module: the net, with or without memory.
        order: order of weights in flat vectors: "parameters" for torch.nn.utils.parameters_to_vector, or tensor names.
        buffers: module or state dict with the buffers that the draws lack.

    Raises:
        UsageError: the order has names that the net lacks.
        LayoutError: the buffers do not fit the net.
    """

    def __init__(
        self, module: nn.Module, order: Iterable[str] | None, buffers: nn.Module | Mapping[str, Tensor] | None
    ) -> None:
        state = module.state_dict(keep_vars=True)
        self.shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in state.items() if not is_counter(n)}
        self.counters = tuple(name for name in state if is_counter(name))
        self.parameters = [name for name, _ in module.named_parameters() if name in state]
        # Tensor name -> first name of the same tensor; of a tied tensor, draws need only the first name.
        self.first_name = first_names(module)

        self.buffers = [n for n, t in state.items() if n in self.shapes and not isinstance(t, nn.Parameter)]
        self.shared_buffers = self._check_buffers(buffers)
        self.order = self._check_order(order)
        self._name_maps: dict[tuple[str, ...], dict[str, str]] = {}

    def _check_order(self, order: Iterable[str] | None) -> list[str] | None:
        if order is None or order == PARAMETERS:
            return None if order is None else self.parameters
        names = [order] if isinstance(order, str) else list(order)
        if unknown := [name for name in names if name not in self.shapes]:
            raise UsageError(
                "order of flat draws",
                expected=f"'{PARAMETERS}', or names of the net's tensors in order",
                found=", ".join(map(repr, unknown[:5])),
            )
        if len(set(names)) < len(names):
            raise UsageError("order of flat draws", expected="each name once", found="one twice")
        return names

    def _check_buffers(self, buffer_source: nn.Module | Mapping[str, Tensor] | None) -> StateDict:
        if buffer_source is None:
            return {}
        state = buffer_source.state_dict() if isinstance(buffer_source, nn.Module) else dict(buffer_source)
        shapes = {name: tuple(state[name].shape) for name in self.buffers if name in state}
        different, difference_text = compare_shapes(shapes, {name: self.shapes[name] for name in self.buffers})
        if different:
            raise LayoutError("buffers of all draws", expected="the net's", found=difference_text, tensor=different[0])
        return {name: state[name].detach().cpu() for name in self.buffers}

    def __call__(self, draw: Draw, index: int) -> StateDict:
        """Add missing buffers to the tensors of a draw; return the tensors in the order of the module, on the CPU.

        Args:
            draw: name -> tensor, or a flat vector of shape (weight,).
            index: position of the draw, for error texts.

        Raises:
            LayoutError: tensors are missing, extra or misshapen.
            UsageError: a draw has values that are no tensors, or is a flat vector although no order is known.
        """
        tensors = self._from_names(draw, index) if isinstance(draw, Mapping) else self._from_vector(draw, index)
        for name in self.shapes:
            if name not in tensors:
                tensors[name] = (
                    tensors[self.first_name[name]] if self.first_name[name] in tensors else self.shared_buffers[name]
                )
        return {name: tensors[name] for name in self.shapes}

    def _from_names(self, draw: Mapping[str, Array], index: int) -> StateDict:
        tensors = {name: _cpu_tensor(value, f"tensor {name!r} of draw {index}") for name, value in draw.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        key = tuple(shapes)
        net_name_of_draw_name = self._name_maps.get(key)
        if net_name_of_draw_name is None or any(
            shapes[n] != self.shapes.get(net_name)
            for n, net_name in net_name_of_draw_name.items()
            if not is_counter(net_name)
        ):
            self._name_maps[key] = self._map_names(shapes, index)
        return {net_name: tensors[name] for name, net_name in self._name_maps[key].items() if not is_counter(net_name)}

    def _map_names(self, shapes: Mapping[str, Shape], index: int) -> dict[str, str]:
        """Map a draw's tensor names to the net's; a draw may lack buffers, and further names of tied tensors."""
        errors = []
        for names in self._name_sets:
            try:
                net_name_of_draw_name = unwrap_names(shapes, {name: self.shapes[name] for name in names})
            except LayoutError as error:
                errors.append(error)
                continue
            self._check_missing(set(names), index)
            return net_name_of_draw_name
        closest_error = min(errors, key=lambda error: len(error.found))
        raise LayoutError(f"draw {index}", expected=f"the net's {len(self.shapes)} tensors by name and shape",
                          found=closest_error.found, tensor=closest_error.tensor)  # fmt: skip

    @cached_property
    def _name_sets(self) -> list[list[str]]:
        parameters = [name for name in self.shapes if name not in self.buffers]
        untied_names = [name for name in self.shapes if self.first_name[name] == name]
        return [list(self.shapes), untied_names, parameters, [n for n in parameters if n in untied_names]]

    def _from_vector(self, draw: Any, index: int) -> StateDict:
        if isinstance(draw, nn.Module):
            raise UsageError(f"draw {index}", expected="tensors by name, or a flat vector", found="a module",
                             do="Give its state_dict()")  # fmt: skip
        vector = _cpu_tensor(draw, f"draw {index}")
        if self.order is None:
            raise UsageError(
                f"draw {index}",
                expected="tensors by name, or a flat vector and its order",
                found=f"a vector of shape {tuple(vector.shape)} without an order",
                do="Give order='parameters' for vectors of torch.nn.utils.parameters_to_vector, or the tensors' names",
            )
        width = sum(math.prod(self.shapes[name]) for name in self.order)
        if vector.shape != (width,):
            raise LayoutError(f"draw {index}", expected=f"a vector of {width:,} weights",
                              found=f"one of shape {tuple(vector.shape)}")  # fmt: skip
        self._check_missing(set(self.order), index)
        state, start = {}, 0
        for name in self.order:
            shape = self.shapes[name]
            state[name] = vector[start : start + math.prod(shape)].reshape(shape)
            start += math.prod(shape)
        return state

    def _check_missing(self, present_names: set[str], index: int) -> None:
        """Check that each tensor missing from a draw is a shared buffer, or is tied to a tensor of the draw."""
        missing = [
            n
            for n in self.shapes
            if n not in present_names and self.first_name[n] not in present_names and n not in self.shared_buffers
        ]
        if missing:
            buffers = all(name in self.buffers for name in missing)
            raise LayoutError(
                f"draw {index}",
                expected=f"the net's {len(self.shapes)} tensors",
                found=compare_shapes({}, {name: self.shapes[name] for name in missing})[1],
                do="Give buffers=module: all draws then share its buffers, such as statistics of norms"
                if buffers
                else "",
                tensor=missing[0],
            )


def _cpu_tensor(array: Any, array_name: str) -> Tensor:
    if isinstance(array, np.ndarray | np.generic):
        try:
            return torch.from_numpy(np.array(array))
        except TypeError:
            raise UsageError(array_name, expected="numbers", found=f"an array of {array.dtype}") from None
    if not isinstance(array, Tensor):
        raise UsageError(array_name, expected="a tensor", found=f"a {type(array).__name__}")
    return array.detach().cpu()


@dataclass
class DrawWriter:
    """Writes draws into shards; the draws of a shard are spooled on disk until it is complete.

    Args:
        target: the source.
        name: name of the collection.
        method: name of the method that made the draws.
    """

    target: FolderSource
    name: str
    method: str
    head: MemberHeader | None = None
    rows: list[Row] = field(default_factory=list)
    layouts: dict[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        has_manifest = self.target.manifest_path(self.name).is_file()
        self.existing: list[Row] = self.target.read_collection(self.name)[1].to_pylist() if has_manifest else []
        self.spool_folder = shards.import_folder(self.target.root, self.name)
        self.pending = 0
        self.spool: IO[bytes] | None = None

    def begin(self, head: MemberHeader, counters: Sequence[str], architecture: str) -> None:
        """Derive the layout of all draws from the first one, and clear the spool folder."""
        self.head = head
        tensors = ((n, dtype, shape, n, shape) for n, dtype, shape in head.tensors)
        self.stored = Layout.of_stored(tensors, counters, 0)
        self.layout = shard_files.shard_layout(self.stored)
        self.key = archives.layout_key(architecture, self.layout)
        self.layouts[self.key] = self.layout
        self.per_shard = shard_files.members_per_shard(self.layout)
        shutil.rmtree(self.spool_folder, ignore_errors=True)
        # Delete the record that an interrupted import left behind.
        self.spool_folder.with_name(f"{self.name}.json").unlink(missing_ok=True)
        self.spool_folder.mkdir(parents=True)

    def add(self, draw: Mapping[str, Tensor]) -> None:
        """Add a draw.

        Raises:
            LayoutError: dtypes differ from the first draw's.
            UsageError: the folder holds another draw at this position.
        """
        index = len(self.rows)
        if (head := torch_files.header_of_state_dict(draw)) != self.head and self.head:
            dtypes = zip(head.tensors, self.head.tensors, strict=True)
            name, found, expected = next((n, one, other) for (n, one, _), (_, other, _) in dtypes if one != other)
            raise LayoutError(f"tensor {name!r} of draw {index}", expected=f"{expected}, as in the first", found=found,
                              tensor=name)  # fmt: skip
        raw = torch_files.state_bytes(draw)
        row: Row = {"member": index, "epoch": 0, "final": True, "status": "ok", "method": self.method, "sha256": None}
        measuring.check_member(row, Location(index, tensor_prefix(index), self.spool_folder, 0, self.stored), raw)
        if index < len(self.existing) and self.existing[index]["sha256"] != row["sha256"]:
            raise self._conflict_error(f"another draw {index}")
        if (
            index < len(self.existing) and self.existing[index]["status"] == "failed"
        ):  # the draw's logits were not finite
            row |= {n: self.existing[index][n] for n in ("status", "reason")}
        if self.spool is None:
            disk.check_room(self.target.root, self.layout.nbytes)
            self.spool = (self.spool_folder / f"{index:06d}.draws").open("w+b")
        self.spool.write(shard_files.repack(self.stored, raw, self.layout))
        self.rows.append(self._existing_columns(index) | row)
        self.pending += 1
        if len(self.rows) % self.per_shard == 0:
            self._write_shard()

    def _existing_columns(self, index: int) -> Row:
        """Return the columns of a draw in the existing manifest that an import does not write, such as figures."""
        return (
            {n: v for n, v in self.existing[index].items() if n not in user_columns.IMPORT_COLUMNS}
            if index < len(self.existing)
            else {}
        )

    def _conflict_error(self, found: str) -> UsageError:
        return UsageError(
            f"collection {self.name} in folder {self.target.root}",
            expected="no members, or the first of these draws",
            found=found,
            do=f"Give another folder or name, or delete manifests/{self.name}.parquet there",
            collection=self.name,
            path=self.target.root,
        )

    def _write_shard(self) -> None:
        """Write the pending draws into a shard, and their locations into their rows."""
        if self.spool is None:
            return
        pending_rows = self.rows[-self.pending :]
        prefixes = [tensor_prefix(row["member"]) for row in pending_rows]
        path = self._existing_shard(pending_rows)
        if path is None:
            self.spool.seek(0)
            members = (self.spool.read(self.layout.nbytes) for _ in pending_rows)
            number = pending_rows[0]["member"] // self.per_shard
            path = shard_files.stream_shard(
                self.target.root / "shards" / self.name, number, self.layout, prefixes, members
            )
        start = shard_files.first_offset(self.layout, prefixes)
        for index, row in enumerate(pending_rows):
            row |= {
                "path": path.relative_to(self.target.root).as_posix(),
                "offset": start + index * self.layout.nbytes,
                "nbytes": self.layout.nbytes,
                "layout": self.key,
                "dtype": self.layout.dtype,
            }
        self.spool.close()
        Path(self.spool.name).unlink()
        self.spool, self.pending = None, 0

    def _existing_shard(self, rows: Sequence[Row]) -> Path | None:
        """Return the existing shard with exactly these draws, None without such a shard."""
        first_member, last_member = rows[0]["member"], rows[-1]["member"]
        existing = self.existing[first_member : last_member + 2]
        paths_and_layouts = {(row["path"], row["layout"]) for row in existing[: len(rows)]}
        if len(existing) < len(rows) or paths_and_layouts != {(existing[0]["path"], self.key)}:
            return None
        if len(existing) > len(rows) and existing[-1]["path"] == existing[0]["path"]:
            return None
        path = self.target.root / str(existing[0]["path"])
        return path if path.is_file() else None

    def finish(self, columns_of_member: Mapping[int, Row]) -> None:
        """Write the last shard, and the user's columns into the rows.

        Raises:
            UsageError: the folder has more draws than were added.
        """
        if len(self.existing) > len(self.rows):
            raise self._conflict_error(f"{len(self.existing):,} draws, not {len(self.rows):,}")
        self._write_shard()
        last_draw_of_run: dict[int | None, int] = {}
        for row in self.rows:
            row |= columns_of_member[row["member"]]
            if self.method != INDEPENDENT_METHOD:
                run = row.get("run")
                row["draw"] = last_draw_of_run[run] = last_draw_of_run.get(run, -1) + 1
        measuring.mark_duplicates(self.rows)

    def clean_up(self) -> None:
        """Delete the spooled draws, and shards that no row of the manifest names."""
        if self.spool is not None:
            self.spool.close()
        shutil.rmtree(self.spool_folder, ignore_errors=True)
        path = self.target.manifest_path(self.name)
        named_paths = set(manifest.read_manifest(path).column("path").to_pylist()) if path.is_file() else set()
        for shard_path in (self.target.root / "shards" / self.name).glob("*.safetensors"):
            if shard_path.relative_to(self.target.root).as_posix() not in named_paths:
                shard_path.unlink()
