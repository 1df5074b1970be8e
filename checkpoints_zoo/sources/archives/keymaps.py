"""Translate torch-uncertainty's tensor names into this package's names, and recognise a network by its tensors.

Upstream is torch-uncertainty, which trained the archived members on the Hub; this package uses timm's tensor names.
Values and the order of bytes never change; the shape (1, C, 1, 1) of tensors of a filter response norm is read as (C,).

This is one file, because a network is recognised by the names that are translated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.formats.layout import FLOAT_DTYPES, Shape, compare_shapes, is_counter

# Prefixes that DataParallel, torch.compile, Lightning, Fabric, Opacus or users put before all tensor names of a module.
WRAPPER_PREFIXES = (
    "module.", "_orig_mod.", "model.", "net.", "network.", "_forward_module.", "_module.", "_fsdp_wrapped_module.",
)  # fmt: skip
# Name parts that a wrapper around a submodule adds inside tensor names, as in features.module.0.weight.
INNER_WRAPPER_PARTS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap_names(stored_shapes: Mapping[str, Shape], expected_shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Remove the prefixes of wrappers until names and shapes match exactly; return stored name -> name without
    prefixes.

    Args:
        stored_shapes, expected_shapes: tensor name -> shape, of the stored and of the expected tensors; batch counters
            may be missing in both.

    Raises:
        LayoutError: no removal of prefixes gives the expected names and shapes; the error lists the missing, extra and
            misshapen tensors of the closest attempt.

    >>> unwrap_names({"module.features._orig_mod.0.bias": (8,)}, {"features.0.bias": (8,)})
    {'module.features._orig_mod.0.bias': 'features.0.bias'}
    >>> unwrap_names({"module._orig_mod.fc.weight": (2, 3)}, {"fc.weight": (2, 3)})
    {'module._orig_mod.fc.weight': 'fc.weight'}
    """
    target_shapes = {name: shape for name, shape in expected_shapes.items() if not is_counter(name)}
    failed_attempts: list[tuple[list[str], str]] = []
    for bare_names in _names_without_inner_wrappers(list(stored_shapes)):
        if len(set(bare_names)) < len(bare_names):  # Two names differed only in the removed part.
            continue
        bare_shapes = {
            name: shape for name, shape in zip(bare_names, stored_shapes.values(), strict=True) if not is_counter(name)
        }
        names_that_differ, difference_text = compare_shapes(bare_shapes, target_shapes)
        if not names_that_differ:
            return dict(zip(stored_shapes, bare_names, strict=True))
        failed_attempts.append((names_that_differ, difference_text))
    names_that_differ, difference_text = min(failed_attempts, key=lambda one: len(one[0]))
    raise LayoutError(
        "names of tensors", expected=f"{len(target_shapes)} exactly", found=difference_text, tensor=names_that_differ[0]
    )


def _names_without_inner_wrappers(tensor_names: list[str]) -> Iterator[list[str]]:
    """Yield the names with more and more wrapper parts removed, at the start of each name and inside it."""
    yield from names_without_wrappers(tensor_names)
    split_names = [name.split(".") for name in tensor_names]
    present_wrappers = [
        wrapper_part
        for wrapper_part in INNER_WRAPPER_PARTS
        if any(wrapper_part in name_parts[1:] for name_parts in split_names)
    ]
    for wrapper_count in range(1, len(present_wrappers) + 1):
        for removed_wrappers in combinations(present_wrappers, wrapper_count):
            yield from names_without_wrappers(
                [
                    ".".join([name_parts[0], *(p for p in name_parts[1:] if p not in removed_wrappers)])
                    for name_parts in split_names
                ]
            )


def names_without_wrappers(tensor_names: list[str]) -> Iterator[list[str]]:
    """Yield the names, then the names without their first wrapper prefix, then without the second, and so on."""
    yield tensor_names
    while tensor_names and (
        wrapper := next((w for w in WRAPPER_PREFIXES if all(n.startswith(w) for n in tensor_names)), "")
    ):
        tensor_names = [name.removeprefix(wrapper) for name in tensor_names]
        yield tensor_names


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Rules that translate stored tensor names into this package's names, and back.

    Args:
        part_renames: pairs (stored text, our text): a part of a tensor name between two dots is replaced.
        norm_layer_endings: endings of our layer names: norm layers whose stored tensors have other names and the shape
            (1, C, 1, 1).
        tensor_renames: pairs (stored name, our name) of the tensors in the norm layers that `norm_layer_endings` lists.
        matches_by_shape: whether tensors are matched by shape, because stored names are unknown and all shapes differ.
    """

    part_renames: tuple[tuple[str, str], ...] = ()
    norm_layer_endings: tuple[str, ...] = ()
    tensor_renames: tuple[tuple[str, str], ...] = ()
    matches_by_shape: bool = False

    def translate_to_ours(self, stored_name: str, shape: Shape) -> tuple[str, Shape]:
        """Translate the stored name and shape of a tensor into our name and shape; return both. A name that is ours
        already stays unchanged.

        >>> KEY_MAPS["resnet20-frn-silu"].translate_to_ours("layer2.0.shortcut.1.gamma", (1, 32, 1, 1))
        ('layer2.0.downsample.1.weight', (32,))
        """
        our_part_of_stored, our_leaf_of_stored = dict(self.part_renames), dict(self.tensor_renames)
        *layer_parts, tensor_part = [our_part_of_stored.get(part, part) for part in stored_name.split(".")]
        if tensor_part in our_leaf_of_stored and self._is_norm(layer_parts):
            has_norm_shape = len(shape) == 4 and shape == (1, shape[1], 1, 1)
            tensor_part, shape = our_leaf_of_stored[tensor_part], shape[1:2] if has_norm_shape else shape
        return ".".join([*layer_parts, tensor_part]), shape

    def translate_to_stored(self, our_name: str, shape: Shape) -> tuple[str, Shape]:
        """Translate our name and shape of a tensor into torch-uncertainty's name and shape; return both.

        >>> KEY_MAPS["resnet18"].translate_to_stored("layer2.0.downsample.1.weight", (128,))
        ('layer2.0.shortcut.1.weight', (128,))
        """
        stored_part_of_ours, stored_leaf_of_ours = (
            {ours: stored for stored, ours in rule} for rule in (self.part_renames, self.tensor_renames)
        )
        *layer_parts, tensor_part = our_name.split(".")
        if tensor_part in stored_leaf_of_ours and self._is_norm(layer_parts):
            tensor_part, shape = stored_leaf_of_ours[tensor_part], (1, *shape, 1, 1)
        return ".".join([stored_part_of_ours.get(part, part) for part in layer_parts] + [tensor_part]), shape

    def _is_norm(self, name_parts: list[str]) -> bool:
        layer = "." + ".".join(name_parts)
        return any(layer.endswith("." + norm) for norm in self.norm_layer_endings)


_RESNET_RENAMES = (("shortcut", "downsample"), ("linear", "fc"))

KEY_MAPS: dict[str, KeyMap] = {
    "resnet18": KeyMap(_RESNET_RENAMES),
    "resnet20-frn-silu": KeyMap(
        _RESNET_RENAMES,
        norm_layer_endings=("bn1", "bn2", "downsample.1"),
        tensor_renames=(("gamma", "weight"), ("beta", "bias"), ("tau", "tau")),
    ),
    "optunet": KeyMap(_RESNET_RENAMES, matches_by_shape=True),
}


class RecognisedNetwork(NamedTuple):
    """The network that was recognised from the tensors of a member.

    Args:
        architecture: name of the network, a key of `ARCHITECTURES`.
        arguments: arguments of the function that builds the network.
        tensors: our tensor name -> (dtype, our shape), in the order of the stored tensors; batch counters are included
            only if stored.
    """

    architecture: str
    arguments: dict[str, Any]
    tensors: dict[str, tuple[str, Shape]]


def recognise(tensors: Mapping[str, tuple[str, Shape]]) -> RecognisedNetwork:
    """Recognise one of torch-uncertainty's networks by its tensors; return the network, with the tensors under our
    names.

    Args:
        tensors: stored tensor name -> (dtype, shape) of one member, with or without wrapper prefixes and batch
            counters.

    Raises:
        LayoutError: no network has these tensors (the error lists the differences from the closest network), or the
            dtype of a weight is not a float type.

    >>> recognise({"a": ("F16", (2, 1, 4, 4)), "b": ("F16", (10, 1, 5, 5)),
    ...            "c.w": ("F16", (10, 10)), "c.b": ("F16", (10,))}).arguments
    {'classes': 10, 'hidden': None}
    """
    *_, bare_names = names_without_wrappers(list(tensors))
    failed_attempts = []
    for architecture in KEY_MAPS:
        for renamed_tensors in _renamings(architecture, bare_names, tensors):
            renamed_shapes = {name: shape for name, (_, shape) in renamed_tensors.items()}
            arguments = _UPSTREAM_NETS[architecture].arguments(renamed_shapes)
            expected_shapes = tensor_shapes(architecture, **arguments)
            expected_shapes = {n: s for n, s in expected_shapes.items() if n in renamed_shapes or not is_counter(n)}
            names_that_differ, difference_text = compare_shapes(renamed_shapes, expected_shapes)
            if not names_that_differ:
                _check_floats(renamed_tensors)
                return RecognisedNetwork(architecture, arguments, renamed_tensors)
            failed_attempts.append((names_that_differ, f"{difference_text}, against {architecture}"))
    names_that_differ, difference_text = min(failed_attempts, key=lambda one: len(one[0]))
    raise LayoutError(
        "tensors of a member",
        expected=f"names and shapes of {' or '.join(KEY_MAPS)}",
        found=difference_text,
        do="Give the architecture that the members were trained with",
        tensor=names_that_differ[0],
    )


def _renamings(
    architecture: str, stored_names: list[str], tensors: Mapping[str, tuple[str, Shape]]
) -> Iterator[dict[str, tuple[str, Shape]]]:
    """Yield the tensors under our names, translated by the rules or, if the stored names are unknown, by shape."""
    key_map = KEY_MAPS[architecture]
    renamed_tensors: dict[str, tuple[str, Shape]] = {}
    for name, (dtype, shape) in zip(stored_names, tensors.values(), strict=True):
        our_name, our_shape = key_map.translate_to_ours(name, shape)
        # If two stored names translate to the same name, the second tensor counts as extra.
        renamed_tensors[f"{our_name} (twice)" if our_name in renamed_tensors else our_name] = dtype, our_shape
    yield renamed_tensors
    if key_map.matches_by_shape:
        for arguments in _OPTUNET_ARGUMENTS:
            name_of_shape = {shape: name for name, shape in tensor_shapes(architecture, **arguments).items()}
            if sorted(name_of_shape) == sorted(shape for _, shape in tensors.values()):
                yield {name_of_shape[shape]: (dtype, shape) for dtype, shape in tensors.values()}


def _check_floats(renamed_tensors: Mapping[str, tuple[str, Shape]]) -> None:
    for name, (dtype, _) in renamed_tensors.items():
        if dtype not in FLOAT_DTYPES and not is_counter(name):
            expected = f"a dtype among {', '.join(FLOAT_DTYPES)}"
            raise LayoutError(f"tensor {name!r}", expected=expected, found=dtype, tensor=name)


def tensor_shapes(architecture: str, /, **arguments: Any) -> dict[str, Shape]:
    """Return tensor name -> shape of a network, batch counters included, in the order of the module; torch is not
    needed.

    Args:
        architecture: name of the architecture, a key of `KEY_MAPS`.
        arguments: arguments of the architecture, except `channels`, which is fixed: torch-uncertainty's networks take
            3 channels, OptuNet takes 1.
    """
    return _UPSTREAM_NETS[architecture].shapes(**arguments)


_BATCH_NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _resnet(
    stage_widths: tuple[int, ...],
    blocks_per_stage: int,
    norm_tensors: tuple[str, ...],
    class_count: int,
    conv_bias: bool,
) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}

    def conv_and_norm(conv_name: str, norm_name: str, width: int, input_width: int, kernel_size: int) -> None:
        shapes[f"{conv_name}.weight"] = (width, input_width, kernel_size, kernel_size)
        if conv_bias:
            shapes[f"{conv_name}.bias"] = (width,)
        shapes.update(
            {f"{norm_name}.{tensor_name}": () if is_counter(tensor_name) else (width,) for tensor_name in norm_tensors}
        )

    conv_and_norm("conv1", "bn1", stage_widths[0], 3, 3)
    width_in = stage_widths[0]
    for stage, width in enumerate(stage_widths, 1):
        for block_number in range(blocks_per_stage):
            block_name = f"layer{stage}.{block_number}"
            conv_and_norm(f"{block_name}.conv1", f"{block_name}.bn1", width, width_in, 3)
            conv_and_norm(f"{block_name}.conv2", f"{block_name}.bn2", width, width, 3)
            if width != width_in:
                conv_and_norm(f"{block_name}.downsample.0", f"{block_name}.downsample.1", width, width_in, 1)
            width_in = width
    return {**shapes, "fc.weight": (class_count, width_in), "fc.bias": (class_count,)}


def _resnet18(classes: int) -> dict[str, Shape]:
    return _resnet((64, 128, 256, 512), 2, _BATCH_NORM_TENSORS, classes, conv_bias=False)


def _resnet20(classes: int, conv_bias: bool) -> dict[str, Shape]:
    return _resnet((16, 32, 64), 3, ("weight", "bias", "tau"), classes, conv_bias)


def _optunet(classes: int, hidden: int | None) -> dict[str, Shape]:
    shape_of_layer = {"fc": (classes, 10)} if hidden is None else {"fc1": (hidden, 10), "fc2": (classes, hidden)}
    shapes: dict[str, Shape] = {"conv1.weight": (2, 1, 4, 4), "conv2.weight": (10, 1, 5, 5)}
    for layer, shape in shape_of_layer.items():
        shapes.update({f"{layer}.weight": shape, f"{layer}.bias": shape[:1]})
    return shapes


_OPTUNET_ARGUMENTS: tuple[dict[str, Any], ...] = ({"classes": 10, "hidden": None}, {"classes": 10, "hidden": 3})


class _UpstreamNet(NamedTuple):
    shapes: Callable[..., dict[str, Shape]]
    arguments: Callable[[Mapping[str, Shape]], dict[str, Any]]


def _row_count(shapes: Mapping[str, Shape], matrix_name: str) -> int:
    """Return the number of rows of the named matrix; 10 if the matrix is missing, so that a later check reports it."""
    shape = shapes.get(matrix_name, ())
    return shape[0] if len(shape) == 2 and shape[0] > 0 else 10


_UPSTREAM_NETS = {
    "resnet18": _UpstreamNet(_resnet18, lambda found: {"classes": _row_count(found, "fc.weight")}),
    "resnet20-frn-silu": _UpstreamNet(
        _resnet20,
        lambda found: {"classes": _row_count(found, "fc.weight"), "conv_bias": "conv1.bias" in found},
    ),
    "optunet": _UpstreamNet(
        _optunet,
        lambda found: (
            {"classes": _row_count(found, "fc2.weight"), "hidden": _row_count(found, "fc1.weight")}
            if "fc1.weight" in found
            else {"classes": _row_count(found, "fc.weight"), "hidden": None}
        ),
    ),
}
