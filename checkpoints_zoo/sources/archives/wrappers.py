"""What wraps a module leaves in the names of its tensors: taken off only where the rest fits exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.formats.layout import Shape, differences, is_counter

# What DataParallel, torch.compile, Lightning, Fabric, Opacus and people put before every name of a module they wrap.
WRAPPERS = (
    "module.", "_orig_mod.", "model.", "net.", "network.", "_forward_module.", "_module.", "_fsdp_wrapped_module.",
)  # fmt: skip
# What wrapping a part of a net puts into the names below it: features.module.0.weight.
INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def fit(stored: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Take wrappers off the names of tensors until these fit exactly, by name and shape; return stored -> bare name.

    Args:
        stored, wanted: name -> shape; counters may lack on either side.

    Raises:
        LayoutError: nothing fits; what is missing, extra and misshapen at the best is named.

    >>> fit({"module.features._orig_mod.0.bias": (8,)}, {"features.0.bias": (8,)})
    {'module.features._orig_mod.0.bias': 'features.0.bias'}
    >>> fit({"module._orig_mod.fc.weight": (2, 3)}, {"fc.weight": (2, 3)})
    {'module._orig_mod.fc.weight': 'fc.weight'}
    """
    target = {name: shape for name, shape in wanted.items() if not is_counter(name)}
    tried: list[tuple[list[str], str]] = []
    for bare in _bare(list(stored)):
        if len(set(bare)) < len(bare):  # what was taken off told two tensors apart
            continue
        found = {name: shape for name, shape in zip(bare, stored.values(), strict=True) if not is_counter(name)}
        wrong, phrase = differences(found, target)
        if not wrong:
            return dict(zip(stored, bare, strict=True))
        tried.append((wrong, phrase))
    wrong, phrase = min(tried, key=lambda one: len(one[0]))
    raise LayoutError("names of tensors", expected=f"{len(target)} exactly", found=phrase, tensor=wrong[0])


def _bare(names: list[str]) -> Iterator[list[str]]:
    """Yield the names with ever more of what wraps them off."""
    yield from unwrapped(names)
    parts = [name.split(".") for name in names]
    present = [inside for inside in INSIDE if any(inside in some[1:] for some in parts)]
    for count in range(1, len(present) + 1):
        for dropped in combinations(present, count):
            yield from unwrapped([".".join([some[0], *(p for p in some[1:] if p not in dropped)]) for some in parts])


def unwrapped(names: list[str]) -> Iterator[list[str]]:
    """Yield names as they are, then with one prefix after the other off, while all share one."""
    yield names
    while names and (wrapper := next((w for w in WRAPPERS if all(n.startswith(w) for n in names)), "")):
        names = [name.removeprefix(wrapper) for name in names]
        yield names
