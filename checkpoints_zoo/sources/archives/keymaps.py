"""Translate torch-uncertainty's tensor names into this package's, and recognise a network by its tensors.

Upstream is torch-uncertainty, which trained the archived members on the Hub; this package uses timm's tensor names.
Values and the order of bytes never change; the shape (1, C, 1, 1) of tensors of a filter response norm is read as (C,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.formats.layout import FLOATS, Shape, compare_shapes, is_counter

# Prefixes that DataParallel, torch.compile, Lightning, Fabric, Opacus or users put before all tensor names of a module.
WRAPPERS = (
    "module.", "_orig_mod.", "model.", "net.", "network.", "_forward_module.", "_module.", "_fsdp_wrapped_module.",
)  # fmt: skip
# Parts that a wrapped submodule adds inside tensor names, as in features.module.0.weight.
INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrap_names(stored: Mapping[str, Shape], expected: Mapping[str, Shape]) -> dict[str, str]:
    """Remove the prefixes of wrappers until names and shapes match exactly; return stored name -> name without
    prefixes.

    Args:
        stored, expected: name -> shape of the stored and of the expected tensors; counters may be missing in either.

    Raises:
        LayoutError: no removal matches; the error lists the missing, extra and misshapen tensors of the closest one.

    >>> unwrap_names({"module.features._orig_mod.0.bias": (8,)}, {"features.0.bias": (8,)})
    {'module.features._orig_mod.0.bias': 'features.0.bias'}
    >>> unwrap_names({"module._orig_mod.fc.weight": (2, 3)}, {"fc.weight": (2, 3)})
    {'module._orig_mod.fc.weight': 'fc.weight'}
    """
    target = {name: shape for name, shape in expected.items() if not is_counter(name)}
    failed_attempts: list[tuple[list[str], str]] = []
    for bare_names in _unwrapped_everywhere(list(stored)):
        if len(set(bare_names)) < len(bare_names):  # The removed part was the only difference between two names.
            continue
        shapes = {name: shape for name, shape in zip(bare_names, stored.values(), strict=True) if not is_counter(name)}
        names_that_differ, phrase = compare_shapes(shapes, target)
        if not names_that_differ:
            return dict(zip(stored, bare_names, strict=True))
        failed_attempts.append((names_that_differ, phrase))
    names_that_differ, phrase = min(failed_attempts, key=lambda one: len(one[0]))
    raise LayoutError("names of tensors", expected=f"{len(target)} exactly", found=phrase, tensor=names_that_differ[0])


def _unwrapped_everywhere(names: list[str]) -> Iterator[list[str]]:
    """Yield stored name -> bare name, with more and more wrappers removed, at the start of names and inside."""
    yield from unwrapped(names)
    parts = [name.split(".") for name in names]
    present_prefixes = [inside for inside in INSIDE if any(inside in name_parts[1:] for name_parts in parts)]
    for count in range(1, len(present_prefixes) + 1):
        for dropped in combinations(present_prefixes, count):
            yield from unwrapped(
                [".".join([name_parts[0], *(p for p in name_parts[1:] if p not in dropped)]) for name_parts in parts]
            )


def unwrapped(names: list[str]) -> Iterator[list[str]]:
    """Yield the names, then the names without their first common prefix, then without the second, and so on."""
    yield names
    while names and (wrapper := next((w for w in WRAPPERS if all(n.startswith(w) for n in names)), "")):
        names = [name.removeprefix(wrapper) for name in names]
        yield names


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Rules that translate stored tensor names into this package's names, and back.

    Args:
        parts: (stored text, our text) pairs for a part of a name between two dots.
        norms: endings of our names of norm layers, whose stored tensors have other names and the shape (1, C, 1, 1).
        leaves: (stored name, our name) pairs for the tensors of these norm layers.
        by_shape: whether tensors are matched by shape, because stored names are unknown and all shapes differ.
    """

    parts: tuple[tuple[str, str], ...] = ()
    norms: tuple[str, ...] = ()
    leaves: tuple[tuple[str, str], ...] = ()
    by_shape: bool = False

    def ours(self, name: str, shape: Shape) -> tuple[str, Shape]:
        """Translate the stored name and shape of a tensor into ours; return them. Names in our form already stay
        unchanged.

        >>> UPSTREAM["resnet20-frn-silu"].ours("layer2.0.shortcut.1.gamma", (1, 32, 1, 1))
        ('layer2.0.downsample.1.weight', (32,))
        """
        parts, leaves = dict(self.parts), dict(self.leaves)
        *path, leaf = [parts.get(part, part) for part in name.split(".")]
        if leaf in leaves and self._is_norm(path):
            flat = len(shape) == 4 and shape == (1, shape[1], 1, 1)
            leaf, shape = leaves[leaf], shape[1:2] if flat else shape
        return ".".join([*path, leaf]), shape

    def stored(self, name: str, shape: Shape) -> tuple[str, Shape]:
        """Translate our name and shape of a tensor into upstream's; return them.

        >>> UPSTREAM["resnet18"].stored("layer2.0.downsample.1.weight", (128,))
        ('layer2.0.shortcut.1.weight', (128,))
        """
        parts, leaves = ({ours: stored for stored, ours in rule} for rule in (self.parts, self.leaves))
        *path, leaf = name.split(".")
        if leaf in leaves and self._is_norm(path):
            leaf, shape = leaves[leaf], (1, *shape, 1, 1)
        return ".".join([parts.get(part, part) for part in path] + [leaf]), shape

    def _is_norm(self, path: list[str]) -> bool:
        layer = "." + ".".join(path)
        return any(layer.endswith("." + norm) for norm in self.norms)


_PARTS = (("shortcut", "downsample"), ("linear", "fc"))

UPSTREAM: dict[str, KeyMap] = {
    "resnet18": KeyMap(_PARTS),
    "resnet20-frn-silu": KeyMap(
        _PARTS,
        norms=("bn1", "bn2", "downsample.1"),
        leaves=(("gamma", "weight"), ("beta", "bias"), ("tau", "tau")),
    ),
    "optunet": KeyMap(_PARTS, by_shape=True),
}


class RecognisedNetwork(NamedTuple):
    """The network that was recognised from the tensors of a member.

    Args:
        architecture: name of the network, a key of `ARCHITECTURES`.
        arguments: arguments of the function that builds the network.
        tensors: our name -> (dtype, our shape), in the order of the stored tensors; counters are included only if
            stored.
    """

    architecture: str
    arguments: dict[str, Any]
    tensors: dict[str, tuple[str, Shape]]


def recognise(tensors: Mapping[str, tuple[str, Shape]]) -> RecognisedNetwork:
    """Recognise one of upstream's networks by its tensors; return it with the tensors under our names.

    Args:
        tensors: stored name -> (dtype, shape) of one member, with or without wrapper prefixes and counters.

    Raises:
        LayoutError: the tensors are of none of the networks (the error lists the differences from the nearest), or a
            weight is no float.

    >>> recognise({"a": ("F16", (2, 1, 4, 4)), "b": ("F16", (10, 1, 5, 5)),
    ...            "c.w": ("F16", (10, 10)), "c.b": ("F16", (10,))}).arguments
    {'classes': 10, 'hidden': None}
    """
    *_, bare = unwrapped(list(tensors))
    tried = []
    for architecture in UPSTREAM:
        for renamed in _renamings(architecture, bare, tensors):
            shapes = {name: shape for name, (_, shape) in renamed.items()}
            arguments = _NETS[architecture].arguments(shapes)
            expected = tensor_shapes(architecture, **arguments)
            expected = {n: s for n, s in expected.items() if n in shapes or not is_counter(n)}
            names_that_differ, phrase = compare_shapes(shapes, expected)
            if not names_that_differ:
                _check_floats(renamed)
                return RecognisedNetwork(architecture, arguments, renamed)
            tried.append((names_that_differ, f"{phrase}, against {architecture}"))
    names_that_differ, phrase = min(tried, key=lambda one: len(one[0]))
    raise LayoutError(
        "tensors of a member",
        expected=f"those of {' or '.join(UPSTREAM)} by name and shape",
        found=phrase,
        do="Give the architecture that the members were trained with",
        tensor=names_that_differ[0],
    )


def _renamings(
    architecture: str, stored_names: list[str], tensors: Mapping[str, tuple[str, Shape]]
) -> Iterator[dict[str, tuple[str, Shape]]]:
    """Yield the tensors under our names, translated by the rules or, if the stored names are unknown, by shape."""
    key_map = UPSTREAM[architecture]
    renamed: dict[str, tuple[str, Shape]] = {}
    for name, (dtype, shape) in zip(stored_names, tensors.values(), strict=True):
        ours, flat = key_map.ours(name, shape)
        # If two stored names translate to the same name, the second tensor counts as extra.
        renamed[f"{ours} (twice)" if ours in renamed else ours] = dtype, flat
    yield renamed
    if key_map.by_shape:
        for arguments in _OPTUNETS:
            names = {shape: name for name, shape in tensor_shapes(architecture, **arguments).items()}
            if sorted(names) == sorted(shape for _, shape in tensors.values()):
                yield {names[shape]: (dtype, shape) for dtype, shape in tensors.values()}


def _check_floats(renamed: Mapping[str, tuple[str, Shape]]) -> None:
    for name, (dtype, _) in renamed.items():
        if dtype not in FLOATS and not is_counter(name):
            expected = f"a dtype among {', '.join(FLOATS)}"
            raise LayoutError(f"tensor {name!r}", expected=expected, found=dtype, tensor=name)


def tensor_shapes(architecture: str, /, **arguments: Any) -> dict[str, Shape]:
    """Return name -> shape of a network's tensors, counters included, in the order of the module; this needs no torch.

    Args:
        architecture: name of the architecture, a key of `UPSTREAM`.
        arguments: arguments of the architecture without `channels`, since upstream's networks have three and OptuNet
            one.
    """
    return _NETS[architecture].shapes(**arguments)


_BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _resnet(
    widths: tuple[int, ...], blocks: int, norm: tuple[str, ...], classes: int, conv_bias: bool
) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}

    def conv_and_norm(conv: str, norm_layer: str, width: int, width_in: int, kernel: int) -> None:
        shapes[f"{conv}.weight"] = (width, width_in, kernel, kernel)
        if conv_bias:
            shapes[f"{conv}.bias"] = (width,)
        shapes.update({f"{norm_layer}.{leaf}": () if is_counter(leaf) else (width,) for leaf in norm})

    conv_and_norm("conv1", "bn1", widths[0], 3, 3)
    width_in = widths[0]
    for stage, width in enumerate(widths, 1):
        for number in range(blocks):
            block = f"layer{stage}.{number}"
            conv_and_norm(f"{block}.conv1", f"{block}.bn1", width, width_in, 3)
            conv_and_norm(f"{block}.conv2", f"{block}.bn2", width, width, 3)
            if width != width_in:
                conv_and_norm(f"{block}.downsample.0", f"{block}.downsample.1", width, width_in, 1)
            width_in = width
    return {**shapes, "fc.weight": (classes, width_in), "fc.bias": (classes,)}


def _resnet18(classes: int) -> dict[str, Shape]:
    return _resnet((64, 128, 256, 512), 2, _BATCH_NORM, classes, conv_bias=False)


def _resnet20(classes: int, conv_bias: bool) -> dict[str, Shape]:
    return _resnet((16, 32, 64), 3, ("weight", "bias", "tau"), classes, conv_bias)


def _optunet(classes: int, hidden: int | None) -> dict[str, Shape]:
    layers = {"fc": (classes, 10)} if hidden is None else {"fc1": (hidden, 10), "fc2": (classes, hidden)}
    shapes: dict[str, Shape] = {"conv1.weight": (2, 1, 4, 4), "conv2.weight": (10, 1, 5, 5)}
    for layer, shape in layers.items():
        shapes.update({f"{layer}.weight": shape, f"{layer}.bias": shape[:1]})
    return shapes


_OPTUNETS: tuple[dict[str, Any], ...] = ({"classes": 10, "hidden": None}, {"classes": 10, "hidden": 3})


class _UpstreamNet(NamedTuple):
    shapes: Callable[..., dict[str, Shape]]
    arguments: Callable[[Mapping[str, Shape]], dict[str, Any]]


def _row_count(shapes: Mapping[str, Shape], name: str) -> int:
    """Return the number of rows of the named matrix; 10 if it is missing, so that it is reported later."""
    shape = shapes.get(name, ())
    return shape[0] if len(shape) == 2 and shape[0] > 0 else 10


_NETS = {
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
