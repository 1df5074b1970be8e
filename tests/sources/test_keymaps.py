"""Key maps: rules both ways, wrappers, and which net the tensors of a file are.

That names and shapes are upstream's, and those of our modules, is for `test_upstream_architectures.py` to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.formats.layout import is_counter
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, KeyMap, recognise, tensor_shapes, unwrap_names

Rule = Callable[[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]
Specs = dict[str, tuple[str, tuple[int, ...]]]

RESNETS: list[tuple[str, dict[str, Any]]] = [
    ("resnet18", {"classes": 10}),
    ("resnet18", {"classes": 100}),
    ("resnet18", {"classes": 200}),
    ("resnet20-frn-silu", {"classes": 10, "conv_bias": False}),
    ("resnet20-frn-silu", {"classes": 10, "conv_bias": True}),
]


@pytest.mark.parametrize(("name", "arguments"), RESNETS)
@pytest.mark.parametrize("wrapper", ["", "module.", "model._orig_mod.module."])
@pytest.mark.parametrize("names", ["stored", "ours"])
def test_a_net_is_told_by_its_tensors(names: str, wrapper: str, name: str, arguments: dict[str, Any]) -> None:
    shapes = tensor_shapes(name, **arguments)
    rule: Rule = KEY_MAPS[name].translate_to_stored if names == "stored" else KeyMap().translate_to_stored
    for counters in ("I64", "F16", None):
        found: Specs = {}
        for key, shape in shapes.items():
            stored, as_stored = rule(key, shape)
            if not is_counter(key) or counters:
                found[wrapper + stored] = (counters or "" if is_counter(key) else "F16", as_stored)
        told = recognise(found)
        assert (told.architecture, told.arguments) == (name, arguments)
        assert list(told.tensors) == [k for k in shapes if counters or not is_counter(k)]
        assert {k: shape for k, (_, shape) in told.tensors.items()}.items() <= shapes.items()
        assert [dtype for dtype, _ in told.tensors.values()] == [dtype for dtype, _ in found.values()]


@pytest.mark.parametrize(("arguments", "names"), [
    ({"classes": 10, "hidden": None}, ["conv1.weight", "conv2.weight", "fc.weight", "fc.bias"]),
    ({"classes": 10, "hidden": None}, ["conv1.weight", "conv2.weight", "linear.weight", "linear.bias"]),
    ({"classes": 10, "hidden": None}, ["conv1.weight", "conv2.weight", "fc1.weight", "fc1.bias"]),
    ({"classes": 10, "hidden": None}, ["net.0.weight", "net.3.weight", "net.7.weight", "net.7.bias"]),
    ({"classes": 10, "hidden": 3}, ["conv1.weight", "conv2.weight", "fc1.weight", "fc1.bias", "fc2.weight",
                                    "fc2.bias"]),
    ({"classes": 10, "hidden": 3}, ["model.0.weight", "model.3.weight", "model.7.weight", "model.7.bias",
                                    "model.9.weight", "model.9.bias"]),
])  # fmt: skip
def test_optunet_is_told_by_its_shapes(arguments: dict[str, Any], names: list[str]) -> None:
    shapes = tensor_shapes("optunet", **arguments)
    found: Specs = {name: ("F16", shape) for name, shape in zip(names, shapes.values(), strict=True)}
    backwards = dict(reversed(found.items()))
    for tensors in (found, backwards):
        told = recognise(tensors)
        assert (told.architecture, told.arguments) == ("optunet", arguments)
        assert {k: shape for k, (_, shape) in told.tensors.items()} == shapes
        assert list(told.tensors.values()) == list(tensors.values())


SMALL: Specs = {key: ("F16", shape) for key, shape in tensor_shapes("optunet", classes=10, hidden=3).items()}
LARGE: Specs = {key: ("F16", shape) for key, shape in tensor_shapes("resnet18", classes=10).items()}
NORMED: Specs = {
    key: ("F16", shape) for key, shape in tensor_shapes("resnet20-frn-silu", classes=10, conv_bias=True).items()
}
THESE = "tensors of a member: expected names and shapes of resnet18 or resnet20-frn-silu or optunet; found"
GIVE = "Give the architecture that the members were trained with."


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {},
            f"{THESE} missing conv1.weight, conv2.weight, fc.weight, fc.bias, against optunet. {GIVE}",
        ),
        (
            {k: v for k, v in LARGE.items() if k != "layer4.1.bn2.running_var"},
            f"{THESE} missing layer4.1.bn2.running_var, against resnet18. {GIVE}",
        ),
        (
            {**LARGE, "conv1.weight": ("F16", (64, 3, 7, 7)), "ema.decay": ("F32", ())},
            f"{THESE} extra ema.decay; misshapen conv1.weight [64, 3, 7, 7] for [64, 3, 3, 3], against resnet18."
            f" {GIVE}",
        ),
        (
            {**LARGE, "linear.weight": ("F16", (10, 512))},
            f"{THESE} extra fc.weight (twice), against resnet18. {GIVE}",
        ),
        (
            {**LARGE, "fc.weight": ("F16", (0, 512))},
            f"{THESE} misshapen fc.weight [0, 512] for [10, 512], against resnet18. {GIVE}",
        ),
        (
            {**NORMED, "bn1.num_batches_tracked": ("I64", ())},
            f"{THESE} extra bn1.num_batches_tracked, against resnet20-frn-silu. {GIVE}",
        ),
        (
            {k: v for k, v in NORMED.items() if k != "layer2.0.conv1.bias"},
            f"{THESE} missing layer2.0.conv1.bias, against resnet20-frn-silu. {GIVE}",
        ),
        (
            {("module." if k == "fc.bias" else "") + k: v for k, v in NORMED.items()},
            f"{THESE} missing fc.bias; extra module.fc.bias, against resnet20-frn-silu. {GIVE}",
        ),
        (
            {**SMALL, "fc2.bias": ("I8", (10,))},
            "tensor 'fc2.bias': expected a dtype among F64, F32, F16, BF16; found I8.",
        ),
    ],
)
def test_what_fits_no_net_is_refused(tensors: Specs, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        recognise(tensors)
    assert str(error.value) == text
    assert error.value.tensor


@pytest.mark.parametrize(
    ("names", "bare"),
    [
        (["a.weight", "b.weight"], ["a.weight", "b.weight"]),
        (["module.a.weight", "module.b.weight"], ["a.weight", "b.weight"]),
        (["model.module._orig_mod.a.weight", "model.module._orig_mod.b.weight"], ["a.weight", "b.weight"]),
        # A net may have a part called `model`: no more is taken off than has to be.
        (["module.model.a", "module.model.b"], ["model.a", "model.b"]),
        (["model.a", "model.a.num_batches_tracked"], ["a", "a.num_batches_tracked"]),
    ],
)
def test_wrappers_are_stripped(names: list[str], bare: list[str]) -> None:
    assert unwrap_names(dict.fromkeys(names, ()), dict.fromkeys(bare, ())) == dict(zip(names, bare, strict=True))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["module.a", "b"], "names of tensors: expected 2 exactly; found missing a; extra module.a."),
        (["module.a", "module.c"], "names of tensors: expected 2 exactly; found missing b; extra c."),
        (["own.a", "own.b"], "names of tensors: expected 2 exactly; found missing a, b; extra own.a, own.b."),
        ([], "names of tensors: expected 2 exactly; found missing a, b."),
        (["a", "a.module.b", "b"], "names of tensors: expected 2 exactly; found extra a.module.b."),
    ],
)
def test_wrappers_come_off_only_where_the_rest_fits_exactly(names: list[str], text: str) -> None:
    with pytest.raises(LayoutError) as error:
        unwrap_names(dict.fromkeys(names, ()), {"a": (), "b": ()})
    assert str(error.value) == text


def test_rules_do_not_reach_into_other_names() -> None:
    frn = KEY_MAPS["resnet20-frn-silu"]
    assert frn.translate_to_ours("layer1.0.conv1.bias", (16,)) == ("layer1.0.conv1.bias", (16,))
    assert frn.translate_to_stored("layer1.0.conv1.bias", (16,)) == ("layer1.0.conv1.bias", (16,))
    assert frn.translate_to_stored("fc.bias", (10,)) == ("linear.bias", (10,))
    assert frn.translate_to_ours("bn1.tau", (16,)) == ("bn1.tau", (16,))  # ours already
    assert frn.translate_to_ours("bn1.gamma", (2, 16, 1, 1)) == (
        "bn1.weight",
        (2, 16, 1, 1),
    )  # and found to be misshapen
    assert frn.translate_to_ours("nonlinear.gamma", (1, 4, 1, 1)) == ("nonlinear.gamma", (1, 4, 1, 1))
    assert KeyMap().translate_to_ours("shortcut.weight", (1,)) == ("shortcut.weight", (1,))
