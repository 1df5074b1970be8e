"""Recipes: everything that determines the training of a member, except its seed, which is the member's id.

A recipe may hold functions of the user, which build the network and load the images. An exception in a user's function
becomes an error that names the line in the user's file.

This is one file, because most of it is one class, `Recipe`; the rest loads what the fields of a recipe name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from checkpoints_zoo.errors import UsageError, ZooError
from checkpoints_zoo.formats import catalog
from checkpoints_zoo.images import DATASETS, ImageData, Prepared, Preprocess, load
from checkpoints_zoo.images.conversion import image_data_name
from checkpoints_zoo.networks import architectures
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.training.augment import AUGMENTATIONS
from checkpoints_zoo.training.seeds import derive_seed

_PACKAGE_FOLDER = Path(__file__).parents[1]
_NOT_USER_CODE_PREFIXES = ("<", str(_PACKAGE_FOLDER), *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib")))
SPLITS = ("train", "test")
# Fields that do not change a byte of a member.
UNHASHED_FIELDS = ("name", "title", "licence", "save_every", "members", "eval_every", "made_from")
# Fields added after the first recipes, with their defaults. A default is left out of the hash, so that old hashes stay.
_LATER_DEFAULTS: dict[str, Any] = {
    "init_seed": None, "init_permutation": 0, "build": None, "milestones": (), "gamma": 0.1, "schedule_unit": "step",
    "warmup_epochs": 0, "label_smoothing": 0.0, "channels_last": False, "compile": False, "averaging": "none",
    "averaging_decay": 0.999, "averaging_start": 0, "snapshots": (), "members": 1, "eval_every": 0, "made_from": "",
    "images": None, "beta2": 0.999, "epsilon": 1e-8, "varied": {},
}  # fmt: skip
MAPPING_FIELDS = ("arguments", "varied")
STORAGE_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "augmentation": tuple(AUGMENTATIONS),
    "optimizer": ("sgd", "adam", "adamw"),
    "schedule": ("cosine", "cosine-restarts", "constant", "multistep", "one-cycle"),
    "schedule_unit": ("step", "epoch"),
    "precision": ("float32", "bfloat16", "float16"),
    "storage": tuple(STORAGE_DTYPES),
    "averaging": ("none", "ema", "swa"),
    "nesterov": (False, True),
    "channels_last": (False, True),
    "compile": (False, True),
}
# Fields that may differ from member to member: each has a column in the manifest.
VARIABLE_FIELDS = ("optimizer", "lr", "momentum", "weight_decay", "batch_size", "schedule", "augmentation")
# Fields with whole numbers: the smallest and the largest allowed value. Larger numbers are typing errors: training
# would never end, or memory would be full.
_WHOLE_NUMBER_RANGES = {
    "epochs": (1, 1_000_000), "batch_size": (1, 1_000_000), "stack_width": (1, 4096), "save_every": (1, 1_000_000),
    "members": (1, 2**31 - 1), "init_permutation": (0, 1_000_000), "warmup_epochs": (0, 1_000_000),
    "averaging_start": (0, 1_000_000), "eval_every": (0, 1_000_000),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How the members of a collection are trained.

    Args:
        name: name of the collection.
        architecture, arguments: name and keyword arguments of the network, as in
            `checkpoints_zoo.networks.modules.build_architecture`; with `build`, any name and the arguments of `build`.
        dataset, split_rule: names of the data set and of the rule that splits it; with `images`, any rule and any name
            except those of the package's data sets.
        preprocess: preprocessing that turns pixels into inputs; its statistics come from the training split.
        epochs: number of passes over the training split; an incomplete last batch is dropped.
        batch_size: number of images per member in each step.
        lr: highest learning rate; `schedule` "cosine" brings the rate to 0, "cosine-restarts" brings the rate from `lr`
            to 0 again between two `milestones`, "multistep" multiplies the rate by `gamma` at each of the `milestones`,
            "one-cycle" raises the rate first, "constant" keeps the rate. See `checkpoints_zoo.training.optimizers`.
        optimizer: "sgd", "adam" or "adamw", as torch.optim.SGD, Adam and AdamW. Weight decay is on all parameters:
            "sgd" and "adam" add the decay to the gradient, "adamw" shrinks the weights.
        momentum, nesterov, weight_decay: settings of the optimizer; the momentum of Adam is the first of torch's
            `betas`.
        beta2, epsilon: settings of Adam: the second of torch's `betas`, and `eps`.
        augmentation: name of the augmentation, a key of `checkpoints_zoo.training.augment.AUGMENTATIONS`.
        precision: precision of the computation; "bfloat16" and "float16" use torch.autocast, and float16 scales the
            loss.
        storage: dtype of the stored weights; normalisation statistics are always float32.
        stack_width: number of members trained at once; 1 trains one after another. A member's last bits depend on the
            stack width, so the width is part of the recipe, and short stacks are filled up.
        save_every: number of epochs between two saved states.
        init_seed: seed of the initialisation that all members share; None initialises each from its own seed.
        init_permutation: number of transpositions of units, drawn from the member's seed and applied between
            initialisation and training.
        build: function that builds the module, for an architecture that the package lacks. The text of its file enters
            the recipe's hash: any change of the file, even of a comment, makes another recipe.
        images: function that returns your own images for training and for testing, each from `zoo.images.of`. The
            recipe's hash covers the pixels, not the text of the function.
        milestones, gamma: epochs at which the schedule changes, in order; factor that "multistep" applies at each of
            these epochs.
        schedule_unit: "step" or "epoch": how often the rate changes.
        warmup_epochs: number of epochs at the start in which the rate rises to `lr`.
        label_smoothing: share of the target that is spread evenly over all classes.
        channels_last: whether images and kernels have this memory format on a GPU; needs a stack width of 1.
        compile: whether torch.compile is used; torch.compile changes the last bits of the weights.
        averaging: kind of average of the weights. "ema" averages weights and buffers after each step, with factor
            `averaging_decay`; "swa" averages the weights of all epochs equally and estimates batch norm's statistics
            again. The averaged weights are stored.
        averaging_start: number of epochs before averaging begins.
        snapshots: earlier epochs after which the weights are stored too; 0 is the initialisation.
        members: number of members of the whole collection.
        eval_every: number of epochs between two measurements on the test split, which are only printed; 0 for no
        measurements.
        made_from: name of the original recipe and the fields that were set, for the manifest; "" if the recipe is no
            variant.
        title, licence: title and licence of the collection, for its description.
        varied: name of a field -> values of which each member has one, in place of the field's own value; see
            `of_member`. The fields of `VARIABLE_FIELDS` can be varied, with a stack width of 1.

    Raises:
        UsageError: a value is out of range, or a name is unknown.
    """

    name: str
    architecture: str
    arguments: Mapping[str, Any]
    dataset: str
    split_rule: str
    preprocess: Preprocess
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    stack_width: int
    save_every: int
    optimizer: str = "sgd"
    nesterov: bool = False
    schedule: str = "cosine"
    augmentation: str = "none"
    precision: str = "float32"
    storage: str = "float32"
    init_seed: int | None = None
    init_permutation: int = 0
    build: Callable[..., nn.Module] | None = None
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    schedule_unit: str = "step"
    warmup_epochs: int = 0
    label_smoothing: float = 0.0
    channels_last: bool = False
    compile: bool = False
    averaging: str = "none"
    averaging_decay: float = 0.999
    averaging_start: int = 0
    snapshots: tuple[int, ...] = ()
    members: int = 1
    eval_every: int = 0
    made_from: str = ""
    images: Callable[[], tuple[ImageData, ImageData]] | None = None
    title: str = ""
    licence: str = "Apache-2.0"
    beta2: float = 0.999
    epsilon: float = 1e-8
    varied: Mapping[str, tuple[Any, ...]] = dataclass_field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in MAPPING_FIELDS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        catalog.check_name(self.name)
        if self.build is None:
            known_architectures = tuple(architectures.ARCHITECTURES)
            self._check(
                "architecture", self.architecture in known_architectures, f"one of {', '.join(known_architectures)}"
            )
        if self.images is None:
            self._check("dataset", self.dataset in DATASETS, f"one of {', '.join(DATASETS)}")
        else:
            self._check(
                "dataset",
                is_image_name(self.dataset),
                f"a lower-case name for your own images, other than {', '.join(DATASETS)}",
            )
        for field, choices in _ALLOWED_VALUES.items():
            is_allowed = any(type(getattr(self, field)) is type(c) and getattr(self, field) == c for c in choices)
            self._check(field, is_allowed, f"one of {', '.join(map(str, choices))}")
        for field, (smallest, largest) in _WHOLE_NUMBER_RANGES.items():
            expected = f"a whole number from {smallest} to {largest:,}"
            self._check(field, _is_whole_in_range(getattr(self, field), smallest, largest), expected)
        is_valid_seed = self.init_seed is None or _is_whole_in_range(self.init_seed, 0, 2**31 - 1)
        self._check("init_seed", is_valid_seed, "None, or a whole number in [0, 2^31)")
        for field, low, high in (
            ("lr", 0.0, math.inf),
            ("momentum", 0.0, 1.0),
            ("weight_decay", 0.0, math.inf),
            ("gamma", 0.0, math.inf),
            ("label_smoothing", 0.0, 1.0),
            ("averaging_decay", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("epsilon", 0.0, 1.0),
        ):
            value = getattr(self, field)
            self._check(field, type(value) is float and low <= value < high, f"a float in [{low:g}, {high:g})")
        self._check("nesterov", self.momentum > 0 or not self.nesterov, "a momentum above 0 to go with it")
        self._check("nesterov", self.optimizer == "sgd" or not self.nesterov, "False: it belongs to the optimizer sgd")
        for field in ("beta2", "epsilon"):
            is_used = self.optimizer != "sgd" or getattr(self, field) == _LATER_DEFAULTS[field]
            self._check(
                field, is_used, f"{_LATER_DEFAULTS[field]:g} with sgd: it belongs to the optimizers adam and adamw"
            )
        self._check("milestones", _are_epochs(self.milestones, 1, 1_000_001), "epochs from 1, in order")
        milestones_fit = bool(self.milestones) == (self.schedule in ("cosine-restarts", "multistep"))
        self._check("milestones", milestones_fit, "epochs with cosine-restarts and multistep alone")
        has_two_warmups = self.schedule == "one-cycle" and self.warmup_epochs > 0
        self._check("warmup_epochs", not has_two_warmups, "0: the schedule one-cycle has a warm-up")
        expected = f"epochs from 0, in order and below the last, {self.epochs}"
        self._check("snapshots", _are_epochs(self.snapshots, 0, self.epochs), expected)
        averaging_can_start = self.averaging == "none" or self.averaging_start < self.epochs
        self._check("averaging_start", averaging_can_start, f"less than the {self.epochs} epochs of the recipe")
        self._check(
            "channels_last", not self.channels_last or self.stack_width == 1, "a stack_width of 1 to go with it"
        )
        if self.varied and self.stack_width != 1:
            raise UsageError(
                f"stack_width of recipe {self.name!r}",
                expected="1 with `varied`: the members of a stack have one learning rate, and the like",
                found=str(self.stack_width),
                do="Set stack_width to 1",
            )
        for name, values in self.varied.items():
            self._check_varied(name, values)

    def _check_varied(self, field_name: str, field_values: object) -> None:
        """Check that a field can be varied, and that its values are values that the field may have."""
        label = f"varied.{field_name} of recipe {self.name!r}"
        if field_name not in VARIABLE_FIELDS:
            raise UsageError(label, expected=f"one of the fields {', '.join(VARIABLE_FIELDS)}", found=repr(field_name))
        if not isinstance(field_values, tuple) or not field_values:
            raise UsageError(label, expected="a tuple of one or more values", found=repr(field_values))
        for value in field_values:
            try:
                replace(self, varied={}, **{field_name: value})
            except UsageError as error:
                raise UsageError(label, expected="values for this field", found=f"{value!r}: {error}") from error

    def of_member(self, member: int) -> Recipe:
        """Return the recipe by which a member is trained: each varied field has the member's value.

        The value has the position `derive_seed(member, "varied FIELD")` modulo the number of values. The collection's
        recipe and its hash stay those of the rows; without varied fields this recipe is returned.

        Args:
            member: id of the member, which is its seed as well.

        >>> from checkpoints_zoo.training.recipes import mlp_digits
        >>> recipe = replace(mlp_digits(), stack_width=1, varied={"lr": (0.01, 0.1)})
        >>> [recipe.of_member(member).lr for member in range(4)]
        [0.1, 0.01, 0.1, 0.1]
        """
        if not self.varied:
            return self
        values = {name: v[derive_seed(member, f"varied {name}") % len(v)] for name, v in self.varied.items()}
        return replace(self, varied={}, **values)

    def _check(self, field: str, is_allowed: bool, expected: str) -> None:
        if not is_allowed:
            raise UsageError(f"{field} of recipe {self.name!r}", expected=expected, found=repr(getattr(self, field)))

    def module(self) -> nn.Module:
        """Build a member's module in training mode, with random initial parameters from torch's generator; return it.

        Raises:
            UsageError: `build` takes other arguments, returns no module, or returns one with frozen parameters.
        """
        if self.build is None:
            return build_architecture(self.architecture, **self.arguments)
        try:
            inspect.signature(self.build).bind(**self.arguments)
        except TypeError as error:
            raise UsageError(
                f"arguments of recipe {self.name!r}",
                expected=f"what {self.build.__qualname__}{inspect.signature(self.build)} takes",
                found=f"{dict(self.arguments)!r}: {error}",
            ) from error
        with user_code_errors(f"function `build` of recipe {self.name!r}", "a module"):
            network: Any = self.build(**self.arguments)
        is_module = isinstance(network, nn.Module)
        frozen_parameters = [n for n, p in network.named_parameters() if not p.requires_grad] if is_module else []
        if not is_module or frozen_parameters:
            raise UsageError(
                f"function `build` of recipe {self.name!r}",
                expected="a function that returns a torch.nn.Module whose parameters are all trained",
                found=f"parameter {frozen_parameters[0]!r} without requires_grad"
                if frozen_parameters
                else repr(network)[:80],
            )
        module: nn.Module = network.train()
        return module

    def split(self, name: str) -> ImageData:
        """Return a split of the recipe's data set; images of the user's function are loaded once.

        Args:
            name: name of the split: "train" or "test".

        Raises:
            UsageError: `images` does not return two splits that fit the recipe.
            ZooError: the package's images can't be loaded; see `zoo.images.load`.
        """
        return load(self.dataset, name) if self.images is None else self._custom_images[name]

    @cached_property
    def _custom_images(self) -> dict[str, ImageData]:
        if self.images is None:
            raise RuntimeError("this recipe has no function `images`")
        return load_images(self.images, self.name, self.dataset, self.preprocess)

    def skeleton(self) -> nn.Module:
        """Build a member's module, for its tensor names and shapes; return it. The state of torch's generator does
        not change."""
        with torch.random.fork_rng(devices=[]):
            return self.module()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON; a field in `_LATER_DEFAULTS` is left out if it has the default
        value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {
            name: value
            for name, value in values.items()
            if name not in _LATER_DEFAULTS or value != _LATER_DEFAULTS[name]
        }
        if self.build is not None:
            values["build"] = _name_and_code_hash(self.name, self.build)
        if self.images is not None:
            values["images"] = {name: data.fingerprint for name, data in self._custom_images.items()}
        values |= {name: dict(values[name]) for name in MAPPING_FIELDS if name in values}
        return {**values, "preprocess": self.preprocess.to_json()}

    @cached_property
    def hash(self) -> str:
        """Return the first 16 hex digits of the sha256 over all fields that change a member's bytes.

        The file of `build` is hashed once: editing it during a run changes nothing.
        """
        hashed_fields = {name: value for name, value in self.to_json().items() if name not in UNHASHED_FIELDS}
        canonical_json = json.dumps(hashed_fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical_json.encode()).hexdigest()[:16]


def _is_whole_in_range(value: object, smallest: int, largest: float = math.inf) -> bool:
    return type(value) is int and smallest <= value <= largest


def _are_epochs(epochs: object, smallest: int, end_epoch: float) -> bool:
    """Return whether a value is a tuple of whole numbers in [smallest, end), each larger than the one before."""
    if not isinstance(epochs, tuple) or not all(
        _is_whole_in_range(epoch, smallest) and epoch < end_epoch for epoch in epochs
    ):
        return False
    return all(one < other for one, other in itertools.pairwise(epochs))


def _name_and_code_hash(recipe_name: str, build: Callable[..., nn.Module]) -> str:
    """Return a function's name and the hash of its file."""
    code = getattr(getattr(build, "__init__", None) if isinstance(build, type) else build, "__code__", None)
    path = Path(code.co_filename) if code is not None else None
    if path is None or not path.is_file():
        raise UsageError(
            f"function `build` of recipe {recipe_name!r}",
            expected="a function or class written in Python, in a file",
            found=repr(build)[:80],
            do="Write it into a file: the recipe's hash covers its text",
        )
    return f"{build.__qualname__} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def initial_seed(recipe: Recipe, member: int) -> int:
    """Return the seed of a member's initialisation."""
    return derive_seed(member if recipe.init_seed is None else recipe.init_seed, "init")


def is_image_name(name: str) -> bool:
    """Return whether a text is a valid name for your own images, as `zoo.images.of(…, name=…)` takes it.

    >>> is_image_name("my-flowers"), is_image_name("digits")
    (True, False)
    """
    try:
        return image_data_name(name, "") == name
    except UsageError:
        return False


def load_images(
    images_function: Callable[[], tuple[ImageData, ImageData]],
    recipe_name: str,
    dataset_name: str,
    preprocess: Preprocess,
) -> dict[str, ImageData]:
    """Call a recipe's function `images_function`; return both splits by name, with the recipe's name of the data set.

    Args:
        images_function: function that returns the images for training and for testing.
        recipe_name: name of the recipe, for error texts.
        dataset_name: name of the images.
        preprocess: preprocessing whose input shape the images must have.

    Raises:
        UsageError: the function returns no two splits; or images lack labels or class names, or have another shape; or
            the splits have different classes.
    """
    images_label = f"images of recipe {recipe_name!r}"
    with user_code_errors(images_label, "a function that returns (train, test)"):
        splits: Any = images_function()
    if not (isinstance(splits, tuple) and len(splits) == 2 and all(_is_image_data(data) for data in splits)):
        raise UsageError(
            images_label,
            expected="a function that returns (train, test), each as `zoo.images.of(…)` gives it",
            found=repr(splits)[:80],
        )
    shape = (preprocess.channels, *preprocess.size)
    for name, data in zip(SPLITS, splits, strict=True):
        if data.labels is None or not data.classes:
            raise UsageError(
                f"{images_label}, {name}",
                expected="labels and the names of their classes",
                found="no labels" if data.labels is None else "labels without class names",
                do="Give them to `zoo.images.of((images, labels), classes=[…])`",
            )
        if tuple(data.images.shape[1:]) != shape:
            raise UsageError(
                f"{images_label}, {name}",
                expected=f"shape (input, {', '.join(map(str, shape))}), as the recipe's preprocess has it",
                found=f"shape ({', '.join(map(str, data.images.shape))})",
                do=f"`zoo.images.of(…, size={preprocess.size}, channels={shape[0]})` makes them fit",
            )
    train, test = splits
    if train.classes != test.classes:
        raise UsageError(
            f"{images_label}, test",
            expected=f"the classes of train, in their order: {', '.join(train.classes[:12])}",
            found=", ".join(test.classes[:12]),
            do="`zoo.images.in_order(test, train.classes)` puts them in order",
        )
    return {name: replace(data, name=dataset_name, split=name) for name, data in zip(SPLITS, splits, strict=True)}


def _is_image_data(candidate: object) -> bool:
    return isinstance(candidate, ImageData) and not isinstance(candidate, Prepared)


@contextmanager
def user_code_errors(label: str, expected: str) -> Iterator[None]:
    """Turn any exception of the user's code in the block into a UsageError.

    Args:
        label: name of the code, for the error text.
        expected: text about the expected behaviour, for the error.
    """
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise UsageError(label, expected=expected, found=error_line(error)) from error


def run_module(path: Path, module_name: str) -> ModuleType:
    """Run a Python file as a module; return the module, which is imported under the name from then on.

    Raises:
        UsageError: the file is not valid Python.
    """
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"recipe file {path}", expected="a Python file", found="another one")
    module, previous = importlib.util.module_from_spec(spec), sys.modules.get(module_name)
    sys.modules[module_name] = module  # Dataclasses and pickle look the module up there.
    try:
        with warnings.catch_warnings():
            # A recipe file for version 0.1 can't be edited, since its text is hashed: no deprecation warning may stop
            # the file.
            warnings.filterwarnings("default", r"training\.recipe is ", DeprecationWarning)
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        if previous is not None:
            sys.modules[module_name] = previous
        raise
    return module


def error_line(error: Exception) -> str:
    """Describe an exception in one line, with the line of the user's code if there is one; return the text.

    >>> error_line(ValueError("too few"))
    'ValueError: too few'
    """
    traceback_frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in traceback_frames if not frame.filename.startswith(_NOT_USER_CODE_PREFIXES)]
    line_text = f" (in line {user_frames[-1].lineno} of {user_frames[-1].filename})" if user_frames else ""
    if isinstance(error, SyntaxError):
        line_text = f" (in line {error.lineno} of {error.filename})"
    message = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().split("\n")[0]
    return f"{type(error).__name__}: {message[:200]}{line_text}"
