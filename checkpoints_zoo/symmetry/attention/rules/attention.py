"""The rules of attention: its heads, its softmax, and the masks and biases of its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from checkpoints_zoo.symmetry.attention.frames import FIXED, ONE, ZERO, Limit
from checkpoints_zoo.symmetry.attention.labels import Core, Gain, Label, Parameter, padded
from checkpoints_zoo.symmetry.attention.trace import Trace


def scaled_dot_product_attention(
    trace: Trace, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Label:  # fmt: skip
    """Attend: softmax(query · key) · value, with heads before the last two axes."""
    q, k, v = trace.value(query), trace.value(key), trace.value(value)
    heads = trace.node.args[0].meta["val"].shape[:-2]  # type: ignore[union-attr]
    if enable_gqa:
        times = heads[-1] // k.coordinates.shape[-3]
        k, v = (_repeat_heads(label, times) for label in (k, v))
    core, rows = score(trace, q, k, heads)
    if attn_mask is not None:
        scores = (*heads, q.coordinates.shape[-2], k.coordinates.shape[-2])
        _bias_heads(trace, core, trace.value(attn_mask), attn_mask, scores)
    return attend(trace, core, v, heads, rows)


def softmax(trace: Trace, x: Any, *options: Any, **named: Any) -> Label:
    """Apply softmax: to the scores of an attention over the keys, or to an activation."""
    label = trace.value(x)
    return label if label.core is not None else trace.one(label)


def where(trace: Trace, condition: Any, x: Any, y: Any) -> Label:
    """Choose between two activations, or between scores and a number."""
    for operand, other in ((x, y), (y, x)):
        if isinstance(operand, Label | Parameter) and _hides(other):
            return _hidden(trace, trace.value(operand), condition)
    trace.refuse("a choice between activations, or scores replaced by a number that softmax does not ignore")


def masked_fill(trace: Trace, x: Any, mask: Any, value: Any) -> Label:
    """Replace scores that a mask hides."""
    if not _hides(value):
        trace.refuse("a number in the place of activations that softmax does not ignore")
    return _hidden(trace, trace.value(x), mask)


def _hidden(trace: Trace, label: Label, mask: Any) -> Label:
    """Hide some scores, or some learned biases of scores, from a softmax."""
    if label.core is not None:
        _mask_heads(trace, label.core, mask, trace.shape)
    elif not isinstance(mask, Tensor) and not _is_one_for_all_heads(mask):
        trace.refuse("a mask of learned biases that is computed from inputs")
    return replace(label, coordinates=label.coordinates.expand(trace.shape))


def add_to_scores(trace: Trace, a: Label, b: Label, x: Any, y: Any) -> Label:
    """Add a mask, a learned bias or fixed slopes to the scores of an attention."""
    label, other, operand = (a, b, y) if a.core is not None else (b, a, x)
    if other.core is not None:
        label.core.pinned = other.core.pinned = True  # type: ignore[union-attr]
        return label
    assert label.core is not None
    _bias_heads(trace, label.core, other, operand, trace.shape)
    return replace(label, coordinates=label.coordinates.expand(trace.shape))


def multiply_scores(trace: Trace, a: Label, b: Label, x: Any, y: Any) -> Label:
    """Multiply the scores or weights of an attention: a learned number a head moves with its head."""
    label, other, operand = (a, b, y) if a.core is not None else (b, a, x)
    assert label.core is not None
    core = label.core
    if not other.is_fixed and other.core is None:
        is_first = isinstance(operand, Parameter) and core.values is None and not (core.biases or core.slopes)
        _bias_heads(trace, core, other, operand, trace.shape)
        core.scales += [core.biases[-1]] if is_first else []
    elif other.core is not None or any(size > 1 for size in other.coordinates.shape):
        core.pinned = True
    return replace(label, coordinates=label.coordinates.expand(trace.shape))


def _bias_heads(trace: Trace, core: Core, bias: Label, operand: Any, shape: tuple[int, ...]) -> None:
    """Record what is added to the scores (*heads, query, key) of an attention."""
    heads = heads_of(core, shape)
    coordinates = trace.plain(bias).coordinates.expand(shape)
    if bool((coordinates >= 0).any()):
        flat = coordinates.reshape(-1, shape[-2] * shape[-1])
        column = torch.stack([trace.rows(row[:, None])[0] for row in flat])
        trace.frames.claim_units(column, ONE)
        core.biases.append(_one_a_head(trace, core, column, heads))
    else:
        _mask_heads(trace, core, operand, shape)


def _mask_heads(trace: Trace, core: Core, mask: Any, shape: tuple[int, ...]) -> None:
    """Record a mask or fixed numbers of the scores (*heads, query, key): heads with other ones do not change
    places, nor do heads whose masks are computed from inputs."""
    if isinstance(mask, Tensor):
        numbers = mask.expand(shape).reshape(-1, shape[-2] * shape[-1])
        core.slopes.append(_one_a_head(trace, core, numbers.double(), heads_of(core, shape)))
    elif padded(mask.coordinates.shape, len(shape))[-3] > 1:
        core.pinned = True


def heads_of(core: Core, shape: tuple[int, ...]) -> Tensor:
    """Return the number of the head of each matrix of scores, (matrix)."""
    count = 1
    for size in shape[:-2]:
        count *= size
    return torch.arange(count) % len(core.queries)


def _one_a_head(trace: Trace, core: Core, values: Tensor, heads: Tensor) -> Tensor:
    """Return the value of each head, (head, …); heads whose values differ from one position to another are
    pinned."""
    first = values[: len(core.queries)]
    if values.dtype is torch.int64:
        trace.frames.join(first[heads], values)
    elif bool((first[heads] != values).any()):
        core.pinned = True
    return first


def score(trace: Trace, q: Label, k: Label, heads: Sequence[int]) -> tuple[Core, Tensor]:
    """Contract queries and keys (*heads, token, unit); return the heads, and the head of each matrix."""
    q, k = _unmixed(trace, q), _unmixed(trace, k)
    if q.gain is not None and k.gain is not None:
        q, k = trace.without_gain(q), trace.without_gain(k)
    q, k = trace.plain(q), trace.plain(k)
    queries, keys = (_heads(trace, label.coordinates, heads) for label in (q, k))
    pairs, rows = torch.cat([queries, keys], 1).unique(dim=0, return_inverse=True)
    order = torch.stack([(rows == i).nonzero()[0, 0] for i in range(len(pairs))]).argsort()
    rank = order.argsort()
    pairs, rows = pairs[order], rank[rows]
    queries, keys = pairs[:, : queries.shape[1]], pairs[:, queries.shape[1] :]
    for part in (queries, keys):
        trace.frames.claim(part.unbind())
    trace.frames.join(queries, keys, dual=True, place=False)
    core = Core(trace.layer, queries, keys)
    trace.cores.append(core)
    return core, rows


def _heads(trace: Trace, coordinates: Tensor, heads: Sequence[int]) -> Tensor:
    """Return the coordinates of each matrix (*heads), (matrix, unit), the same at all tokens."""
    expanded = coordinates.expand(*heads, *coordinates.shape[-2:])
    flat = expanded.reshape(-1, *expanded.shape[-2:])
    for token in range(1, flat.shape[1]):
        if bool((flat[:, token] != flat[:, 0]).any()):
            trace.frames.join(flat[:, 0], flat[:, token])
    return flat[:, 0]


def attend(trace: Trace, core: Core, v: Label, heads: Sequence[int], rows: Tensor) -> Label:
    """Multiply attention weights by values (*heads, token, unit); `rows` has the head of each matrix."""
    v = trace.plain(v)
    values = _heads(trace, v.coordinates, heads)
    core.values = torch.full((len(core.queries), values.shape[1]), FIXED)
    for head, row in zip(rows.tolist(), values, strict=True):
        if int(core.values[head, 0]) == FIXED:
            core.values[head] = row
        else:
            trace.frames.join(core.values[head], row)
    trace.frames.claim(core.values.unbind())
    core.outputs = trace.frames.new(core.values.numel(), core.name).reshape(core.values.shape)
    trace.frames.join(core.outputs, core.values, place=False)
    result = core.outputs[rows].reshape(*heads, 1, -1)
    return Label(result.expand(trace.shape))


def _unmixed(trace: Trace, label: Label) -> Label:
    """Limit the frames of queries or keys that positions have turned; return the label before the turn."""
    if not label.is_mixed:
        return label
    label = trace.without_gain(label)
    terms = [(label.coordinates, label.factors), *label.more]
    head = [(c.reshape(-1, *c.shape[-2:]), f.expand(c.shape).reshape(-1, *c.shape[-2:])) for c, f in terms]
    first = head[0][0][:, 0]
    pairs: list[Tensor] = []
    for row in range(len(first)):
        turned = _rotations([(c[row], f[row]) for c, f in head])
        if turned is None:
            return trace.one(label)
        pairs += turned
    trace.frames.claim([*pairs, *_others(first, pairs)])
    for pair in pairs:
        trace.frames.limit(pair, Limit.ROTATION)
    trace.frames.rotations += pairs
    return Label(label.coordinates)


def _rotations(terms: list[tuple[Tensor, Tensor]]) -> list[Tensor] | None:
    """Return the pairs of coordinates that positions turn, or None if the positions do something else.

    Args:
        terms: (coordinates, factors), each (token, unit): the sum of factors times coordinates.
    """
    units = terms[0][0][0]
    position = {c: i for i, c in enumerate(units.tolist())}
    tokens, count = terms[0][0].shape
    matrices = torch.zeros(tokens, count, count, dtype=torch.float64)
    for coordinates, factors in terms:
        for u in range(count):
            for t in range(tokens):
                c = int(coordinates[t, u])
                if c == ZERO or not float(factors[t, u]):
                    continue
                if c not in position:
                    return None
                matrices[t, u, position[c]] += factors[t, u]
    pairs, seen = [], set()
    is_mixed = (matrices != 0).any(0).fill_diagonal_(False)
    changes = (matrices != matrices[0]).any(0).diagonal().tolist()
    if bool((is_mixed.sum(1) > 1).any()):
        return None
    for u, partners in enumerate(is_mixed.tolist()):
        if not any(partners):
            if changes[u]:
                return None
            continue
        v = partners.index(True)
        block = matrices[:, [[u, u], [v, v]], [[u, v], [u, v]]]
        if not torch.allclose(block[:, 0, 0], block[:, 1, 1]) or not torch.allclose(block[:, 0, 1], -block[:, 1, 0]):
            return None
        if u not in seen:
            pairs.append(units[[u, v]])
            seen |= {u, v}
    return pairs


def _others(rows: Tensor, pairs: list[Tensor]) -> list[Tensor]:
    """Return the coordinates of each row that are in no pair."""
    paired = {c for pair in pairs for c in pair.tolist()}
    others = [
        torch.tensor([c for c in row if c not in paired], dtype=torch.int64) for row in rows.unique(dim=0).tolist()
    ]
    return [row for row in others if len(row)]


def _repeat_heads(label: Label, times: int) -> Label:
    coordinates = label.coordinates.repeat_interleave(times, -3)
    factor = None if label.factor is None else label.factors.repeat_interleave(times, -3)
    more = tuple(
        (c.repeat_interleave(times, -3), f.expand(c.shape).repeat_interleave(times, -3)) for c, f in label.more
    )
    gain = label.gain and Gain(label.gain.record, label.gain.coordinates.repeat_interleave(times, -3))
    return Label(coordinates, factor, more, gain)


def _hides(number: Any) -> bool:
    """Return whether a softmax ignores an entry that has this number."""
    if isinstance(number, Tensor):
        return bool((number < -1e4).all())
    return isinstance(number, int | float) and number < -1e4


def _is_one_for_all_heads(mask: Label) -> bool:
    return mask.coordinates.ndim < 3 or mask.coordinates.shape[-3] == 1
