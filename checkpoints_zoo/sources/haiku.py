"""Names and axes of haiku's parameters, translated into ours: for the ResNet-20-FRN-Swish of the public HMC draws.

haiku numbers the layers of one kind in the order in which the network calls them. Its kernels have the axes (height,
width, in, out), ours (out, in, height, width); its matrices (in, out), ours (out, in); its norms (1, 1, 1, channel).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.sources.archives.keymaps import tensor_shapes

Array = np.ndarray[Any, Any]

ARCHITECTURE = "resnet20-frn-swish"
_OUR_NORM_TENSORS = {"weight": "gamma", "bias": "beta", "tau": "tau"}


def haiku_names(classes: int = 10) -> dict[str, tuple[str, str]]:
    """Return our tensor name -> (haiku's module, haiku's parameter) of the ResNet-20-FRN-Swish, in our order.

    >>> haiku_names()["layer2.0.downsample.1.weight"], haiku_names()["fc.weight"]
    (('frn_9', 'gamma'), ('linear', 'w'))
    """
    names: dict[str, tuple[str, str]] = {}
    conv_count = 0
    for our_name in tensor_shapes("resnet20-frn-silu", classes=classes, conv_bias=True):
        layer, _, tensor = our_name.rpartition(".")
        is_norm = layer.endswith(("bn1", "bn2", "downsample.1"))
        if layer == "fc":
            module = "linear"
        else:
            # Each convolution has one norm after it, and both have the same number.
            conv_count += not is_norm and tensor == "weight"
            module = ("frn" if is_norm else "conv2_d") + (f"_{conv_count - 1}" if conv_count > 1 else "")
        names[our_name] = module, _OUR_NORM_TENSORS[tensor] if is_norm else tensor[0]
    return names


def translate_parameters(parameters: Mapping[Any, Any], label: str) -> Iterator[tuple[str, Array]]:
    """Yield (our tensor name, array (draw, …) with our axes) of the parameters of several draws, in our order.

    Args:
        parameters: haiku's module -> parameter -> array, whose first axis is the draw.
        label: name of the file in errors.

    Raises:
        LayoutError: modules, parameters or shapes are not those of the network.
    """
    draw_count = -1
    names = haiku_names()
    shapes = tensor_shapes("resnet20-frn-silu", classes=10, conv_bias=True)
    found = {
        (module, parameter)
        for module, arrays in parameters.items()
        for parameter in (arrays if isinstance(arrays, Mapping) else ())
    }
    if found != set(names.values()):
        differing = [f"{module}/{parameter}" for module, parameter in sorted(map(_texts, found ^ set(names.values())))]
        raise LayoutError(
            label,
            expected=f"the {len(names)} parameters of haiku's ResNet-20-FRN-Swish",
            found=f"{len(found)}; {differing[0]} is only in one of the two",
            tensor=differing[0],
        )
    for our_name, (module, parameter) in names.items():
        array, shape = parameters[module][parameter], shapes[our_name]
        is_array = isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.ndim > 0
        draw_count = len(array) if is_array and draw_count < 0 else draw_count
        haiku_shape = _haiku_shape(shape, module)
        if not is_array or draw_count < 1 or array.shape != (draw_count, *haiku_shape):
            found_text = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise LayoutError(
                f"parameter {module}/{parameter} of {label}",
                expected=f"floats of the shape (draws, {', '.join(map(str, haiku_shape))})",
                found=found_text,
                tensor=our_name,
            )
        axes = {4: (0, 4, 3, 1, 2), 2: (0, 2, 1)}.get(len(shape))
        yield our_name, array.reshape(draw_count, *shape) if axes is None else array.transpose(axes)


def _haiku_shape(our_shape: tuple[int, ...], module: str) -> tuple[int, ...]:
    match our_shape:
        case (out, width_in, height, width):
            return height, width, width_in, out
        case (out, width_in):
            return width_in, out
    return (1, 1, 1, *our_shape) if module.startswith("frn") else our_shape


def _texts(name: tuple[Any, Any]) -> tuple[str, str]:
    return str(name[0])[:80], str(name[1])[:80]
