"""The rules of operations: how the symmetries of its operands determine the symmetries of its result."""

from __future__ import annotations

from collections.abc import Mapping

from checkpoints_zoo.symmetry.attention.rules import activations, arithmetic, attention, layers, moves, products
from checkpoints_zoo.symmetry.attention.trace import Rule

_RULES_OF_NAMES = {
    "linear": Rule(layers.linear, takes_parameters=True),
    "embedding": Rule(layers.embedding, takes_parameters=True),
    "conv2d": Rule(layers.conv2d, takes_parameters=True),
    "layer_norm": Rule(layers.layer_norm, takes_fixed=True),
    "rms_norm": Rule(layers.rms_norm, takes_fixed=True),
    "add": Rule(arithmetic.add, takes_fixed=True),
    "sub": Rule(arithmetic.subtract),
    "rsub": Rule(arithmetic.subtract_from),
    "neg": Rule(arithmetic.negate),
    "mul": Rule(arithmetic.multiply, takes_fixed=True),
    "div": Rule(arithmetic.divide),
    "pow": Rule(arithmetic.power),
    "square": Rule(arithmetic.square),
    "mean sum": Rule(arithmetic.mean),
    "relu": Rule(activations.relu),
    "tanh sin erf": Rule(activations.odd_function),
    "gelu silu sigmoid elu selu softplus mish exp log cos hardswish relu6 leaky_relu clamp": Rule(
        activations.unit_function
    ),
    "scaled_dot_product_attention": Rule(attention.scaled_dot_product_attention, takes_fixed=True),
    "softmax _softmax": Rule(attention.softmax),
    "where": Rule(attention.where),
    "masked_fill": Rule(attention.masked_fill),
    "addmm": Rule(products.addmm, takes_parameters=True),
    "matmul mm": Rule(products.matmul, takes_parameters=True),
    "bmm": Rule(products.matmul),
    "baddbmm": Rule(products.baddbmm),
    "_assert_tensor_metadata": Rule(moves.nothing),
}
RULES: Mapping[str, Rule] = {
    **{name: rule for names, rule in _RULES_OF_NAMES.items() for name in names.split()},
    **dict.fromkeys(moves.MOVES, Rule(moves.move, takes_parameters=True)),
    **dict.fromkeys(moves.SAME, Rule(moves.same)),
}
