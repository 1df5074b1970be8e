"""Collections: selected rows of a manifest, and the weights that these rows locate.

This is one file, because most of it is one class, `Collection`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from checkpoints_zoo import predictions
from checkpoints_zoo.collection import reading
from checkpoints_zoo.collection.dataset import WeightDataset, label_table
from checkpoints_zoo.collection.joining import JoinedSource, join
from checkpoints_zoo.collection.reading import LocatedTensors
from checkpoints_zoo.collection.views import Aligned, AlignedToMean, Canonical, Step, Transformed, View
from checkpoints_zoo.errors import FormatError, MemberNotFound, SelectionError, UsageError
from checkpoints_zoo.formats import arrow_tables, catalog, disk, manifest, row_checks, selection
from checkpoints_zoo.formats.printing import LONGEST_REPR, html_text
from checkpoints_zoo.formats.shard_files import Location
from checkpoints_zoo.formats.text import count_with_noun, first_few, format_bytes, one_line, whole_number
from checkpoints_zoo.images import ImageInput, Preprocess
from checkpoints_zoo.networks import architectures, modules
from checkpoints_zoo.networks.device import check_device
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.predictions import Predictions
from checkpoints_zoo.sources import copying
from checkpoints_zoo.sources.finding import SelectedMembers, select_members
from checkpoints_zoo.symmetry import Element, Table, files, symmetries
from checkpoints_zoo.symmetry.applying import check_element
from checkpoints_zoo.symmetry.canonical import alignment, maps

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from checkpoints_zoo.formats.catalog import Description
    from checkpoints_zoo.sources.source import Source

_AS_STORED = View()  # The view that leaves weights as they are stored.
EXAMPLE_TOKEN_COUNT = 4  # Number of tokens in the inputs on which networks of transformers are traced.
# Public name of an attribute in version 0.1 -> its present name inside the package.
_RENAMED_ATTRIBUTES = {
    "at": "__getitem__", "before": "_without_last_step", "commit": "_commit", "held_by": "_member_count_within",
    "keys": "_snapshot_keys", "locations": "_locations", "match_mean": "_mean_permutations",
    "member_nbytes": "_member_nbytes", "read": "_read", "skeleton": "_skeleton", "view": "_view",
}  # fmt: skip


class Collection:
    """Selected members of a collection. Rows of the manifest are in memory; weights are read when needed.

    Args:
        source: the source that contains the manifest and the shards.
        commit: version of the source, a commit or a hash.
        description: the source's description of the collection.
        rows: the manifest rows of the selected members.
        architecture: function that builds the module; None for the architecture that the description names.
        skeletons: key of a layout -> the module built for this layout; all selections of one collection share this
            dict.
        view: steps that change the weights as they are read.
    """

    def __init__(
        self,
        source: Source,
        commit: str,
        description: Description,
        rows: pa.Table,
        architecture: Callable[[], nn.Module] | None = None,
        skeletons: dict[str, nn.Module] | None = None,
        view: View = _AS_STORED,
    ) -> None:
        self.source = source
        self.description = description
        self.rows = rows
        self._commit = commit
        self._view = view
        self._architecture = architecture
        self._skeletons = {} if skeletons is None else skeletons

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in _RENAMED_ATTRIBUTES:
                return self.__getattribute__(name)  # Python's usual AttributeError is raised here.
            warnings.warn(
                f"Collection.{name} is private from version 0.2 on, and goes in the next one",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(self, _RENAMED_ATTRIBUTES[name])

    @classmethod
    def _of_selected(cls, selected: SelectedMembers, architecture: Callable[[], nn.Module] | None) -> Collection:
        """Return a collection of selected members; `architecture` builds a network that the package lacks."""
        return cls(selected.source, selected.commit, selected.description, selected.rows, architecture)

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def __iter__(self) -> Iterator[Member]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Collection) -> Collection:
        """Join the members of two collections of one network into one collection; `load` describes the new ids.

        Raises:
            UsageError, LayoutError: the networks or the kinds of views differ, or a member occurs twice.
        """
        if not isinstance(other, Collection):
            return NotImplemented
        return _join([self, other])

    def __repr__(self) -> str:
        dataset_text = f" on {self.description.dataset}" if self.description.dataset else ""
        network_text = f"{self.description.architecture}{dataset_text}"
        steps_text = "".join(f", {step}" for step in self._view.steps)
        source_text = f"from {self.source.display_name}{steps_text}"
        return f"Collection({self.name!r}, {count_with_noun(len(self), 'member')}, {network_text}, {source_text})"

    def _repr_html_(self) -> str:
        facts = {
            "members": selection.format_ids(manifest.snapshot_keys(self.rows)),
            "bytes": format_bytes(self.nbytes),
            "classes": first_few(self.classes, 6),
            "licence": self.description.licence,
        }
        lines = [f"{name.ljust(7)}  {one_line(text, LONGEST_REPR)}" for name, text in facts.items() if text]
        return html_text("\n".join([repr(self), *lines]))

    @property
    def name(self) -> str:
        return self.description.name

    @cached_property
    def ids(self) -> list[int]:
        """Ids of the selected members, in order."""
        return [int(m) for m in self.rows.column("member").to_pylist()]

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the logits."""
        return self.description.classes

    @cached_property
    def preprocess(self) -> Preprocess:
        """The function that turns uint8 images (batch, channel, height, width) into the members' inputs.

        Raises:
            FormatError: the collection's description has no preprocessing.
        """
        if not self.description.preprocessing:
            raise FormatError(
                f"preprocessing of {self.name}",
                expected="the preprocessing that turns pixels into the members' inputs",
                found="none in its description",
                do="Whoever makes the source gives it: preprocessing=, like=, or `zoo-cli import --like NAME`",
                collection=self.name,
            )
        return Preprocess.from_json(dict(self.description.preprocessing))

    @property
    def manifest(self) -> pd.DataFrame:
        """The selected rows as a DataFrame with pyarrow dtypes, so that integers with nulls stay integers."""
        import pandas as pd

        frame: pd.DataFrame = self.rows.to_pandas(types_mapper=pd.ArrowDtype)
        return frame

    @property
    def citation(self) -> str:
        """Citation text that names this selection; `zoo.load` loads the same members from it."""
        self._check_not_empty()
        if isinstance(self.source, JoinedSource):
            return self.source.citation(self.rows)
        rows = self.source.updated_rows(self.name, self.rows)
        return selection.cite(self.source.label, self._commit, self.name, rows)

    @property
    def bibtex(self) -> str:
        """BibTeX entry that cites this selection: its title, its citation, and what its authors want cited."""
        return self.description.bibtex(self.citation)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the selected members as they are stored."""
        return arrow_tables.sum_of(self.rows, "nbytes")

    @overload
    def __getitem__(self, position: int) -> Member: ...
    @overload
    def __getitem__(self, position: slice) -> Collection: ...

    def __getitem__(self, position: int | slice) -> Member | Collection:
        """Select members by position: an int gives a Member, a slice gives a Collection.

        Raises:
            MemberNotFound, UsageError: there is no member at the position.
        """
        if isinstance(position, slice):
            return self._select(list(range(len(self)))[position])
        selected = self._select([self._position(position)])
        return Member(self.name, selected.rows.to_pylist()[0], selected)

    def _position(self, position: int) -> int:
        """Return a position counted from the first member.

        Raises:
            MemberNotFound, UsageError: there is no member at the position.
        """
        given_position = whole_number(position)
        if given_position is None:
            raise UsageError("position of a member", expected="a whole number or a slice", found=repr(position)[:80])
        if not -len(self) <= given_position < len(self):
            raise MemberNotFound(
                f"position {position} of {self.name}",
                expected=f"one of the {len(self)} selected members, from 0",
                found=str(given_position),
                do="`.member(id)` takes a member by its id",
                collection=self.name,
            )
        return given_position % len(self)

    def take(self, positions: Iterable[int]) -> Collection:
        """Select members by their positions, in any order; return them as a collection.

        Raises:
            MemberNotFound, UsageError: there is no member at the position.
        """
        return self._select([self._position(position) for position in positions])

    def member(self, id: int) -> Member:
        """Return the selected member with the given id (its last selected snapshot).

        Raises:
            MemberNotFound: no selected member has this id.
        """
        if whole_number(id) not in self.ids:
            raise selection.member_not_found(self.rows, f"this selection of {self.name}", id)
        return self[len(self) - 1 - self.ids[::-1].index(id)]

    def _select(self, positions: list[int], view: View | None = None) -> Collection:
        """Return the members at the given positions as a collection, with this view or another view."""
        rows = self.rows if positions == list(range(len(self))) else arrow_tables.take_rows(self.rows, positions)
        view = self._view if view is None else view
        selected = Collection(
            self.source, self._commit, self.description, rows, self._architecture, self._skeletons, view
        )
        # The new collection gets the symmetry table of this one, so that the table is derived only once.
        if len(selected) and "symmetry_table" in vars(self):
            selected.symmetry_table = self.symmetry_table
        return selected

    @property
    def _snapshot_keys(self) -> list[tuple[int, int]]:
        """(member id, epoch) of each selected snapshot."""
        columns = (self.rows.column(name).to_pylist() for name in ("member", "epoch"))
        return list(zip(*columns, strict=True))

    @property
    def _member_nbytes(self) -> int:
        """Average number of stored bytes of a member, at least 1."""
        return max(1, self.nbytes // max(1, len(self)))

    def _member_count_within(self, nbytes: int) -> int:
        """Return the number of members that fit into `nbytes` bytes, at least 1; it can be the batch size of
        `batches`."""
        return max(1, min(len(self), nbytes // self._member_nbytes))

    def _check_not_empty(self) -> None:
        if not len(self):
            raise SelectionError(
                f"selection of {self.name}",
                expected="one member or more",
                found="none",
                do="A slice beyond the last position is empty",
                collection=self.name,
            )

    def _locations(self) -> list[Location]:
        """Return the locations of the members' bytes on this machine; missing bytes are fetched from the Hub together.

        Raises:
            SelectionError: there are no members, or a member has no weights.
            DamagedError, SourceNotFound: a file is missing, or its path leads out of the source.
            NetworkError, AccessError, StorageError: bytes on the Hub can't be read, or can't be stored on this machine.
        """
        self._check_not_empty()
        row_checks.check_located(self.rows, self.name)
        return self.source.locate(self.description, self.rows)

    def _located(self, names: Iterable[str] | None) -> list[LocatedTensors]:
        """Return the locations of tensors on this machine; missing bytes are fetched from the Hub together. If tensors
        are named and no view needs the others, only their bytes are fetched.

        Raises:
            UsageError: a member has no tensor of such a name, or no name is given.
            ZooError: for the same reasons as in `_locations`.
        """
        name_list = None if names is None else tuple(dict.fromkeys((names,) if isinstance(names, str) else names))
        if name_list == ():
            raise UsageError("names of tensors", expected="one or more, or None for all", found="none")
        if name_list is None or self._view.steps:
            return [LocatedTensors(name_list, self._locations())]
        self._check_not_empty()
        row_checks.check_located(self.rows, self.name)
        return LocatedTensors.group(self.source.locate_tensors(self.description, self.rows, name_list))

    def _skeleton(self) -> nn.Module:
        """Build the members' module without memory for parameters, checked against the layout; return it.

        Raises:
            SelectionError: there are no members, or a member has no weights.
            UsageError, LayoutError: no architecture has this name, or its tensors differ from the stored ones.
        """
        self._check_not_empty()
        row_checks.check_located(self.rows, self.name)
        key = min(self.rows.column("layout").to_pylist())
        if key not in self._skeletons:
            description = self.description
            if self._architecture is None and description.architecture not in architectures.ARCHITECTURES:
                raise UsageError(
                    f"architecture {description.architecture!r} of {self.name}",
                    expected=f"one of the package's ({', '.join(architectures.ARCHITECTURES)}), or a function for it",
                    found="neither",
                    do="Give this function: zoo.load(…, architecture=build), or --architecture MODULE:FUNCTION",
                )
            layout = description.layouts[key]
            build = self._architecture or (
                lambda: modules.build_described(description.architecture, description.arguments, layout)
            )
            self._skeletons[key] = modules.build_skeleton(build, layout, self.name)
        return self._skeletons[key]

    def download(self, dest: str | Path | None = None) -> Collection:
        """Copy all members to this machine, fetching missing ones together; return them as a collection of the copies.

        Without `dest`, members on the Hub are stored in the member cache, and members in a local folder are not copied.
        Progress is printed on stderr.

        Args:
            dest: a folder that becomes a source, or a source to which these members are added, with shards, rows and
                hashes. Other collections in the source stay.

        Raises:
            NetworkError, AccessError, StorageError: the members can't be read, or can't be stored.
            DamagedError, SourceNotFound: a file is missing or outside the source, or a member does not match its row.
            UsageError: the folder has other members with the same ids, or another collection of the same name.
        """
        if dest is None:
            self._locations()
            return self
        self._check_not_empty()
        if isinstance(self.source, JoinedSource):
            raise UsageError(
                f"folder for {self.name}", expected="members of one collection", found="joined ones",
                do="Download each collection by itself",
            )  # fmt: skip
        copied_members = copying.copy_members(
            SelectedMembers(self.source, self._commit, self.description, self.rows), Path(dest)
        )
        return Collection(
            copied_members.source,
            copied_members.commit,
            copied_members.description,
            copied_members.rows,
            self._architecture,
            view=self._view,
        )

    def stack(
        self,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        names: Iterable[str] | None = None,
    ) -> dict[str, Tensor]:
        """Read the members' weights and statistics into stacked tensors; return name -> (member, …).

        On the CPU and in the stored dtype, the tensors are views of the file if possible: writing to them changes no
        file, and their values are not checked. In all other cases, values that are not finite are refused.

        numpy and JAX take the tensors without copies: `{n: np.from_dlpack(t) for n, t in members.stack().items()}`
        makes numpy arrays, `jnp.from_dlpack` JAX arrays. numpy has no bfloat16: stack such members in float32.

        Args:
            device: device of the tensors.
            dtype: dtype of the weights; None for the stored dtype. Running statistics stay in float32 or wider.
            names: names of the tensors to read; None for all tensors. From the Hub, only the bytes of these tensors are
                fetched. They can't be compared with the hash of the whole member; a `NotCompared` warning says so.

        Raises:
            DamagedError, LayoutError, SourceNotFound: the bytes of a member do not match the manifest.
            UsageError: the members have no tensor of such a name.
            TooLargeError: the tensors need more memory than is free; use `batches`.
        """
        target_device = check_device(device)
        return self._read(target_device, dtype, self._located(names), check=False)

    def _read(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        located: Sequence[LocatedTensors] | None = None,
        *,
        check: bool = True,
    ) -> dict[str, Tensor]:
        """Read stacked weights and apply the view's steps; return name -> (member, …).

        Args:
            device, dtype: the same arguments as in `reading.stack`.
            located: the tensors to read and their locations, as `_located` returns them; None for all tensors.
            check: whether to check that values are finite also if the tensors are views of a file.
        """
        tensors = self._located(None) if located is None else located
        if not self._view.steps:
            return reading.stack_located(tensors, device, dtype, check=check)
        keys, (all_tensors,) = self._snapshot_keys, tensors  # A view reads all tensors of a member.
        return self._view.stack(self.symmetry_table, keys, all_tensors.locations, device, dtype, all_tensors.names)

    def batches(
        self,
        size: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        names: Iterable[str] | None = None,
    ) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Stream the members in batches of `size`: yield (ids, stacked tensors) of each batch, while the next batch is
        read.

        Args:
            size: number of members in each batch.
            device, dtype, names: the same arguments as in `stack`.

        Raises:
            UsageError: the size is no whole number from 1.
            DamagedError, LayoutError, SourceNotFound, TooLargeError: for the same reasons as in `stack`; values are
                always checked to be finite.
        """
        batch_size = whole_number(size)
        if batch_size is None or batch_size < 1:
            raise UsageError("size of a batch of members", expected="a whole number from 1", found=repr(size))
        target_device = check_device(device)
        batch_starts = range(0, len(self), batch_size)
        # All members are fetched together before the first batch is read.
        located = self._located(names)
        batch_selections = [
            self._select(list(range(len(self)))[batch_start : batch_start + batch_size]) for batch_start in batch_starts
        ]

        def read_batch(batch_number: int) -> dict[str, Tensor]:
            batch_start = batch_starts[batch_number]
            positions = range(batch_start, min(batch_start + batch_size, len(self)))
            return batch_selections[batch_number]._read(target_device, dtype, [x.at(positions) for x in located])

        return zip(
            [batch_selection.ids for batch_selection in batch_selections],
            reading.read_ahead(read_batch, len(batch_selections), target_device),
            strict=True,
        )

    def dataset(
        self,
        labels: Iterable[str] = ("test_accuracy",),
        split: str | None = None,
        dtype: torch.dtype = torch.float32,
        names: Iterable[str] | None = None,
    ) -> WeightDataset:
        """Return a torch Dataset of flat weight vectors (weight,) and labels (label,).

        Args:
            labels: names of numeric columns of the manifest, whose values are the labels.
            split: name of the split, "train", "validation" or "test" (all snapshots of a run are in the same split);
                None for all members.
            dtype: dtype of the weight vectors.
            names: names of the tensors that a vector is made of; None for all. See `stack`.

        Raises:
            UsageError: a label is no numeric column, or is null in a row.
            SelectionError: the split contains no member.
        """
        selected = self
        if split is not None:
            split_of_member = self.rows.column("split").to_pylist()
            selected = self._select([i for i, member_split in enumerate(split_of_member) if member_split == split])
            if not len(selected):
                found = ", ".join(sorted({str(member_split) for member_split in split_of_member}))
                raise SelectionError(f"split of {self.name}", expected=f"members in {split!r}", found=f"only {found}")
        label_names = (labels,) if isinstance(labels, str) else tuple(labels)
        table = selected.symmetry_table if selected._view.steps else None
        label_values = label_table(selected.rows, label_names, self.name)
        return WeightDataset(
            selected._located(names), selected._view, selected._snapshot_keys, table, label_values, label_names, dtype
        )

    def ensemble(
        self,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        execution: str | None = None,
        compile: bool = False,
        chunk: int | None = None,
    ) -> Ensemble:
        """Stack the members into one module; return it: `ens(members.preprocess(images))` gives their logits.

        Args:
            device: device on which the module is placed.
            dtype: dtype of the computation. Logits in float32 agree with those of the members' modules to 1e-5 of the
                largest logit. On the collections in the package, logits in bfloat16 differ by at most 0.008 of the
                largest logit and in float16 by 0.0011, and 1 in 5,000 predicted classes changes (measured by
                `benchmarks/ensemble.py --errors`).
            execution: name of the way to run members: "loop", "grouped", "vmap", "graph" or "module" (the module's own
                code, bit for bit); None to choose by device and sizes.
            compile: whether to use torch.compile: the first call takes seconds to minutes, later calls are faster and
                equally exact.
            chunk: number of members that are read at a time, again at every call; None to keep all members in memory if
                they fit.

        Raises:
            DamagedError: a weight is not finite, or the bytes of a member do not match the manifest.
            TooLargeError: even one member needs more memory than is free.
            UsageError: the device, the execution or the chunk is not possible.
        """
        skeleton, target_device, located = self._skeleton(), check_device(device), self._located(None)

        def read_members(positions: range, device: torch.device, dtype: torch.dtype | None) -> dict[str, Tensor]:
            selected_members = self if len(positions) == len(self) else self._select(list(positions))
            return selected_members._read(device, dtype, [x.at(positions) for x in located])

        return Ensemble.reading(
            skeleton,
            read_members,
            self.ids,
            device=target_device,
            dtype=dtype,
            chunk=chunk,
            execution=execution,
            compile=compile,
        )

    def predict(self, data: ImageInput, out: str | Path | None = None, **options: Any) -> Predictions:
        """Run the members on images and store their logits in float16 beside the manifest; return the predictions.

        Members whose predictions are stored already are not run again.

        Args:
            data: images to run on: a name ("digits", "digits/train"), a path or address, or any other argument of
                `images.of`.
            out: folder that the predictions are written into; None for the members' own folder.
            options: the arguments name, device, dtype and batch of `predictions.predict`.

        Raises:
            UsageError, DamagedError, LockedError, StorageError, NetworkError, AccessError: for the same reasons as in
                `predictions.predict`.
        """
        return predictions.predict(self, data, out, **options)

    def predictions(self, name: str, **options: Any) -> Predictions:
        """Find stored predictions of these members without reading logits yet; return the predictions.

        Args:
            name: name of the set of predictions ("digits-test").
            options: the arguments source and data of `predictions.predictions_of`.

        Raises:
            SourceNotFound, MemberNotFound, UsageError, FormatError, DamagedError, NetworkError: as in
                `predictions.predictions_of`.
        """
        return predictions.predictions_of(self, name, **options)

    @cached_property
    def symmetry_table(self) -> Table:
        """The symmetries of the members' network: permutations, scales, signs, and with attention matrices and shifts.

        Raises:
            SymmetryError: the symmetries of the architecture can't be derived.
            SelectionError, UsageError, LayoutError: there are no members, or no architecture has the tensors of the
                members.
        """
        if architectures.is_from_config(self.description.architecture):
            return symmetries(self._skeleton(), torch.zeros(2, EXAMPLE_TOKEN_COUNT, dtype=torch.int64))
        preprocess = self.preprocess
        return symmetries(self._skeleton(), torch.zeros(2, preprocess.channels, *preprocess.size))

    def canonicalize(
        self,
        *,
        scale: str | None = None,
        permute: str | None = None,
        streams: bool = False,
        approximate: bool = False,
        heads: str | None = None,
    ) -> Collection:
        """Remove symmetries from the weights as they are read, scales first; return a view of the same members.

        Two members that differ only by a symmetry of the network get the same weights. Scaled weights are in float32 or
        wider, even if the stored weights are narrower.

        Args:
            scale: way to remove scales: "unit-norm" gives each unit's incoming row the norm 1, and makes gains 1 or -1;
                None changes no scales.
            permute: key by which the units of each layer are sorted in descending order: their "first" weight, their
                largest weight ("max") or their norm ("norm"); None changes no order.
            streams: whether to sort the units of residual streams too, or only the units of inner channels; residual
                streams of networks with attention are rotated if heads="balanced".
            approximate: whether to scale rows also before norms that keep no running statistics, such as group norms.
                They undo a factor only up to their eps, the constant under the root, so that the network's function
                changes a little.
            heads: way to remove the continuous symmetries of attention: "balanced" removes redundant biases, gives the
                two factors of each head's products (of queries and keys, of values and outputs) equal singular values,
                and fixes their signs; with scale="unit-norm", gains of norms move into the weights that read them as
                well; None changes no heads but their order.

        Raises:
            UsageError: `scale`, `permute` or `heads` has an unknown value, or permute="norm" although scaling makes all
                norms equal.
            SymmetryError: the symmetries of the architecture can't be derived.

        >>> import checkpoints_zoo as zoo
        >>> members = zoo.load("convnet-digits", n=2).canonicalize(permute="norm")
        >>> first = members.stack()["conv1.weight"].flatten(2).norm(dim=2)[0].flatten()
        >>> bool((first.diff() <= 0).all())
        True
        """
        maps.check_options(scale, permute, heads)
        # Refuse impossible options, and architectures without a symmetry table, now and not at the first batch.
        table = self.symmetry_table
        maps.check_scaling(table, scale, permute, streams, approximate)
        return self._with_step(Canonical(scale, permute, streams, approximate, heads))

    def align(self, to: int | str | Member | None = None, *, using: str | None = None) -> Collection:
        """Permute the units of each member as it is read, so that they match the units of a reference; return a view of
        the same members.

        Members with attention are also brought to the reference's scales and redundant biases, and rotated inside heads
        and residual streams. Their weights are then in float32 or wider.

        Each member is matched when it is first read; the view and its slices keep the result.

        Args:
            to: the reference: id of a selected member (its last selected snapshot), a `Member` of the same
                architecture, or "mean" for the mean of all aligned members, for which all members must fit into memory.
                `to` may be None for the first selected member.
            using: for networks with attention, the symmetries in use: "units" (permutations of hidden units), "heads"
                (of heads too), "matrices" (and what changes inside heads, scales and redundant biases) or "streams"
                (and rotations of residual streams); None uses all.

        Raises:
            MemberNotFound: no selected member has this id.
            UsageError: `to` is neither an id nor a `Member` nor "mean", or `using` is unknown, or given for a network
                without attention.
            SymmetryError: the symmetries of the architecture can't be derived.

        >>> import checkpoints_zoo as zoo
        >>> members = zoo.load("convnet-digits", n=2)
        >>> both = members.stack()["conv1.weight"], members.align(to=0).stack()["conv1.weight"]
        >>> apart = [float(weight.diff(dim=0).norm()) for weight in both]
        >>> apart[1] < apart[0]
        True
        """
        changes_values = alignment.restrict(self.symmetry_table, using).is_continuous
        if isinstance(to, str):
            if to != "mean":
                raise UsageError("align", expected="a member's id, a member or 'mean'", found=repr(to)[:80])
            return self._with_step(AlignedToMean(partial(self._match_to_mean, using), using, changes_values))
        if to is None:
            self._check_not_empty()
            to = self.ids[0]
        reference = to if isinstance(to, Member) else self.member(to)
        reference_keys = frozenset() if isinstance(to, Member) else frozenset([(reference.id, reference.epoch)])
        name = f"member {reference.id}" + (f" of {to.collection}" if isinstance(to, Member) else "")
        return self._with_step(Aligned(name, reference.state_dict, reference_keys, using, changes_values))

    def _match_to_mean(self, using: str | None) -> dict[tuple[int, int], Element]:
        """Match all members to their mean; return (member, epoch) -> symmetry."""
        stacked_tensors = self._read(torch.device("cpu"), None)
        table = alignment.restrict(self.symmetry_table, using)
        element = alignment.match_mean(table, stacked_tensors)[0].element
        return {key: element.select(row) for row, key in enumerate(self._snapshot_keys)}

    def _mean_permutations(self) -> dict[tuple[int, int], dict[str, Tensor]]:
        return {key: dict(element.permutations) for key, element in self._match_to_mean(None).items()}

    def transform(self, symmetries: Element | str | Path) -> Collection:
        """Apply symmetries to the weights as they are read; return a view of the members.

        Args:
            symmetries: one symmetry for each member, in the members' order, or the path of a file that
                `write_symmetries` wrote.

        Raises:
            UsageError: the symmetries are of another network, or there is not exactly one for each member.
            SourceNotFound, FormatError, DamagedError: the file does not exist, is of another kind, or is for other
                weights.
        """
        if isinstance(symmetries, Element):
            rows, element, file_name = {key: i for i, key in enumerate(self._snapshot_keys)}, symmetries, "the caller"
        else:
            rows, element = files.read_symmetries(Path(symmetries), self.rows)
            file_name = Path(symmetries).name
        check_element(self.symmetry_table, element, len(rows))
        return self._with_step(Transformed(rows, element, file_name))

    def symmetry(self, position: int) -> Element:
        """Return the symmetry that this view applies to the member at a position: permutations (unit), scales (value),
        signs (value).

        `zoo.symmetry.inverse` undoes the symmetry: `apply(table, weights, inverse(table, element))` gives the stored
        weights, rescaled weights up to rounding. The symmetry table is `members.symmetry_table`.

        Raises:
            MemberNotFound, UsageError: there is no member at the position.
        """
        return self._select([self._position(position)]).symmetries().select(0)

    def symmetries(self) -> Element:
        """Return the symmetries that this view applies: permutations (member, unit), scales (member, value)."""
        return self._view.elements(self.symmetry_table, self._snapshot_keys, self._locations())

    def write_symmetries(self, path: str | Path) -> Path:
        """Write the symmetry that this view applies to each member into a file; return its path, which `transform`
        takes.

        Args:
            path: path of the Parquet file, which has one row for each member.

        Raises:
            UsageError: this view changes nothing.
            StorageError: the file can't be written.
        """
        if not self._view.steps:
            raise UsageError(
                f"symmetries of {self.name}",
                expected="a view",
                found="weights as they are stored",
                do="Call canonicalize() or align() first",
            )
        steps = "; ".join(str(step) for step in self._view.steps)
        element_of_members = self.symmetries()
        with disk.translate_write_errors(Path(path).parent):
            files.write_symmetries(Path(path), self.rows, element_of_members, steps)
        return Path(path)

    def _with_step(self, step: Step) -> Collection:
        return self._select(list(range(len(self))), View((*self._view.steps, step)))

    def _without_last_step(self) -> Collection:
        """Return these members without the last step of their view; return the members unchanged if the view has no
        step."""
        return self._select(list(range(len(self))), View(self._view.steps[:-1]))


class Member:
    """One member: a snapshot of a training run, whose weights are read when needed.

    Args:
        collection: name of the collection.
        row: the member's row of the manifest.
        selected: the collection that contains only this member.
    """

    def __init__(self, collection: str, row: Mapping[str, Any], selected: Collection) -> None:
        self.collection = collection
        self.row = dict(row)
        self._selected = selected

    @property
    def id(self) -> int:
        return int(self.row["member"])

    @property
    def epoch(self) -> int:
        return int(self.row["epoch"])

    @property
    def selected(self) -> Collection:
        """The collection that contains only this member, with its view, module and preprocessing."""
        return self._selected

    @property
    def citation(self) -> str:
        """Citation text that names this member; `zoo.load` loads a collection with only this member from it."""
        return self._selected.citation

    def state_dict(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read the member's tensors; return them by name, with zeros for counters, ready for a strict load.

        Args:
            device: device of the tensors.
            dtype: dtype of the weights; None for the stored dtype. Running statistics stay in float32 or wider.

        Raises:
            DamagedError: the member's bytes do not match the manifest, or a value is not finite.
        """
        target_device, located = check_device(device), self._selected._located(None)
        locations = located[0].locations
        stacked = self._selected._read(target_device, dtype, located)
        zero_counters = {
            n: torch.zeros((), dtype=torch.int64, device=target_device) for n in locations[0].layout.rebuilt_counters
        }
        return {n: t[0] for n, t in stacked.items()} | zero_counters

    def model(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = torch.float32) -> nn.Module:
        """Build the member's module in eval mode; return it.

        Args:
            device: device on which the module is placed.
            dtype: dtype of the weights; None for the stored dtype.

        Raises:
            UsageError, LayoutError: no architecture has this name, or its tensors differ from the stored ones.
            DamagedError: for the same reasons as in `state_dict`.
        """
        return modules.fill_skeleton(self._selected._skeleton(), self.state_dict(device, dtype), torch.device(device))

    def __repr__(self) -> str:
        accuracy = self.row["test_accuracy"]
        figure = "" if accuracy is None else f", test accuracy {accuracy:.4f}"
        return f"Member({self.collection!r}, {self.id}, epoch {self.epoch}{figure})"


def load(
    name: str | Iterable[str | Collection],
    *,
    n: int | None = None,
    where: str | None = None,
    members: str | Iterable[int] | None = None,
    sample: int | None = None,
    snapshots: bool = False,
    source: str | Path | None = None,
    architecture: Callable[[], nn.Module] | None = None,
    check: bool = False,
) -> Collection:
    """Select members of a collection by its manifest, without reading weights yet; return the Collection.

    Args:
        name: name of the collection, or a citation; or several names, citations and collections of one network, whose
            members are joined in this order. Members of several collections get the ids 0, 1, 2, …, and the manifest
            gets the columns `collection` and `member_of_collection`.
        n: number of members: the first n, or with `sample` n members drawn without replacement.
        where: an SQL condition on the manifest's columns that members must meet ("test_accuracy > 0.97"). `/` gives
            fractions of whole numbers too; a division by zero is null, which meets no condition.
        members: ids of the members to select, or a text of ids ("0-99,205,7@40").
        sample: seed of the random draw of n members.
        snapshots: whether to select snapshots that are not final as well.
        source: folder or address to load from: hf://datasets/ORG/NAME[@REVISION], or https://HOST/PATH or
            gs://BUCKET/PATH for a folder on the web, to which no login is sent; None for the collection's source in
            the catalog.
        architecture: function that builds the module, for a network that the package lacks.
        check: whether to compare the hash of each member with the manifest when the member is opened. Without the
            check, members of a folder are mapped and not hashed; members from the Hub are hashed when they arrive and
            whenever their file in the cache has changed.

    Raises:
        CollectionNotFound, SourceNotFound: there is no such collection or source; the error names the most similar
            names.
        SelectionError, MemberNotFound: the collection lacks the requested members.
        FormatError, DamagedError: the manifest does not follow the format.
        NetworkError, AccessError: the source is on the Hub and can't be reached or may not be read.

    >>> import checkpoints_zoo as zoo
    >>> zoo.load("convnet-digits", n=8)
    Collection('convnet-digits', 8 members, convnet on digits, from embedded)
    """
    if (not isinstance(name, str) and isinstance(name, Iterable)) or " + " in str(name):
        options: dict[str, Any] = {
            "n": n, "where": where, "members": members, "sample": sample, "snapshots": snapshots, "source": source,
            "architecture": architecture, "check": check,
        }  # fmt: skip
        citations_or_collections = name.split(" + ") if isinstance(name, str) else name
        return _join(
            [part if isinstance(part, Collection) else load(part, **options) for part in citations_or_collections]
        )
    selection = select_members(
        name, n=n, where=where, members=members, sample=sample, snapshots=snapshots, source=source, check=check
    )
    return Collection._of_selected(selection, architecture)


def _join(collections: Sequence[Collection]) -> Collection:
    """Join the members of collections of one network; return them as one collection."""
    if not collections:
        raise UsageError("collections to join", expected="one or more", found="none")
    for part in collections:
        part._check_not_empty()
        row_checks.check_located(part.rows, part.name)
    joined_members = join(
        [
            SelectedMembers(collection.source, collection._commit, collection.description, collection.rows)
            for collection in collections
        ]
    )
    view = collections[0]._view
    all_steps_canonical = all(isinstance(step, Canonical) for step in view.steps)
    if any(collection._view != view for collection in collections) or (
        isinstance(joined_members.source, JoinedSource) and not all_steps_canonical
    ):
        raise UsageError(
            f"views of {joined_members.description.name}",
            expected="the same canonical form of all members, or none",
            found="; ".join(
                dict.fromkeys(
                    ", ".join(map(str, collection._view.steps)) or "weights as stored" for collection in collections
                )
            ),
            do="Join the members as they are stored, then call align() or canonicalize()",
        )
    build_functions = [collection._architecture for collection in collections if collection._architecture is not None]
    build = build_functions[0] if build_functions else None
    return Collection(
        joined_members.source, joined_members.commit, joined_members.description, joined_members.rows, build, view=view
    )


def collections() -> pd.DataFrame:
    """Return the catalog as a DataFrame: name, title, architecture, dataset, members, bytes, licence, source.

    The bytes are those of all members, <NA> if they are unknown. Printing the DataFrame shows all its columns.
    """
    import pandas as pd

    class Catalog(pd.DataFrame):
        """A DataFrame that prints all columns; operations on it return plain DataFrames."""

        def __str__(self) -> str:
            return str(self.to_string(max_rows=60))

        def __reduce__(self) -> Any:
            return pd.DataFrame(self).__reduce__()  # In another process the object is a plain DataFrame.

    listings = catalog.collections().values()
    columns = ("name", "title", "architecture", "dataset", "members", "bytes", "licence")
    found = Catalog([{c: getattr(x, c) for c in columns} | {"source": x.sources[0]} for x in listings])
    found["bytes"] = pd.array([x.bytes or None for x in listings], dtype="Int64")
    return found
