"""Which net the members are: one that the package tells by its tensors, one that it is told, or the user's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats.layout import Layout, Shape, differences, is_counter
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.archives import Head, Lot, Tell
from checkpoints_zoo.sources.archives.keymaps import UPSTREAM, Recognised, fit

if TYPE_CHECKING:
    from torch import nn

Tensors = Mapping[str, tuple[str, Shape]]


@dataclass(frozen=True)
class Net:
    """What a user says of the members' net; nothing where its tensors tell.

    Args:
        architecture: a name in `ARCHITECTURES`.
        arguments: of that function, JSON values.
        own: what to call a net that the package lacks: its tensors are taken as they are.
        prefix: what stands before all stored names and is to be taken off ("model.").
        key: under what a file of torch.save has the state dict ("ema", "model/state_dict"), where it has several.
    """

    architecture: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    own: str | None = None
    prefix: str = ""
    key: str = ""


Build = Callable[[], "nn.Module"]


def knower(net: Net, build: Build | None) -> Tell | None:
    """Return what tells whether a head's tensors are those of the net that the user names; None if it is not known."""
    return None if net.architecture is None and build is None else teller(net, (), build)


def teller(net: Net, lots: Sequence[Lot], build: Build | None = None) -> Tell:
    """Return what tells the nets of the members' heads.

    Args:
        net: what the user says.
        lots: the members. A net of the user's own that nothing builds has the tensors that most of them have.
        build: builds a net of the user's own.

    Raises:
        UsageError: no architecture of that name, or one that the package has under a name that it lacks.
    """
    if net.own is not None and build is not None:
        _check_own(net)
        own = shapes_of(net, build)
        return lambda head: _fitted(head, net, Recognised(net.own or "", {}, {}), own)
    if net.own is not None:
        _check_own(net)
        counts = Counter(id(m.head) for lot in lots for m in lot.members)
        heads = {id(m.head): m.head for lot in lots for m in lot.members}
        most = heads[counts.most_common(1)[0][0]] if counts else None
        wanted = {name: shape for name, (_, shape) in _bare(most, net.prefix).items()} if most else {}
        return lambda head: _fitted(head, net, Recognised(net.own or "", {}, {}), wanted)
    if net.architecture is None:
        return lambda head: _recognised(head, net)
    known = Recognised(net.architecture, dict(net.arguments), {})
    if net.architecture in UPSTREAM:
        return lambda head: _recognised_or_fitted(head, net, known)
    shapes = shapes_of(net, None)
    return lambda head: _fitted(head, net, known, shapes)


def _check_own(net: Net) -> None:
    from checkpoints_zoo.networks.architectures import ARCHITECTURES

    if net.architecture is not None or net.arguments:
        raise UsageError("net of the members", expected="one of the package's, or one of your own", found="both")
    if not net.own or net.own in ARCHITECTURES:
        raise UsageError(
            f"name {net.own!r} of a net of your own",
            expected=f"another name than the package's nets have ({', '.join(ARCHITECTURES)})",
            found="one of these" if net.own else "none",
            do="Give it as --architecture if the members are this net",
        )


def shapes_of(net: Net, build: Build | None) -> dict[str, Shape]:
    """Build a net, the package's or the user's own; return name -> shape of its tensors.

    Raises:
        UsageError: no architecture of that name, or nothing that builds a module.
    """
    from checkpoints_zoo.networks import modules

    make = build or (lambda: modules.build_architecture(str(net.architecture), **net.arguments))
    module = modules.build_module(make, "the members")
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _bare(head: Head, prefix: str) -> dict[str, tuple[str, Shape]]:
    """Take a prefix off the names of a head's tensors; return bare name -> (dtype, shape).

    Raises:
        LayoutError: a name without it.
    """
    for name, _, _ in head.tensors:
        if not name.startswith(prefix) or name == prefix:
            raise LayoutError(f"tensor {name!r}", expected=f"a name that starts with {prefix!r}", tensor=name)
    return {name.removeprefix(prefix): (dtype, shape) for name, dtype, shape in head.tensors}


def _recognised(head: Head, net: Net) -> tuple[Recognised, Layout]:
    found, layout = archives.layout_of_head(_without(head, net.prefix))
    wrong = {k: v for k, v in net.arguments.items() if found.arguments.get(k) != v}
    if net.architecture not in (None, found.architecture) or wrong:
        raise LayoutError(
            "tensors of a member",
            expected=f"those of {net.architecture} {wrong or ''}".rstrip(),
            found=f"{found.architecture} with {found.arguments}",
        )
    return found, _stored_with(layout, net.prefix)


def _recognised_or_fitted(head: Head, net: Net, known: Recognised) -> tuple[Recognised, Layout]:
    """Tell one of upstream's nets by the names that it has there or here; else fit the tensors to the arguments."""
    try:
        return _recognised(head, net)
    except LayoutError as error:
        if not net.arguments:
            raise
        try:  # an argument that upstream's nets lack, such as the channels of the images
            return _fitted(head, net, known, shapes_of(net, None))
        except LayoutError:
            raise error from None


def _without(head: Head, prefix: str) -> Head:
    return Head(head.lead, tuple((n, d, s) for n, (d, s) in _bare(head, prefix).items())) if prefix else head


def _stored_with(layout: Layout, prefix: str) -> Layout:
    """Put a prefix that was taken off back into the stored names; return the layout."""
    if not prefix:
        return layout
    stored = ((t.stored or t.name, t.shape if t.stored_shape is None else t.stored_shape) for t in layout.tensors)
    tensors = [(t.name, t.dtype, t.shape, prefix + n, s) for t, (n, s) in zip(layout.tensors, stored, strict=True)]
    return Layout.of_stored(tensors, layout.counters, layout.lead)


def _fitted(head: Head, net: Net, known: Recognised, wanted: Mapping[str, Shape]) -> tuple[Recognised, Layout]:
    """Fit a head's tensors to those of a net, wrappers' prefixes taken off; return the net and their layout.

    Raises:
        LayoutError: what is missing, extra and misshapen.
    """
    bare = _bare(head, net.prefix)
    names = fit({name: shape for name, (_, shape) in bare.items()}, wanted)
    found = {names[name]: shape for name, (_, shape) in bare.items()}
    wrong, phrase = differences(found, {n: s for n, s in wanted.items() if n in found or not is_counter(n)})
    if wrong:
        raise LayoutError(
            "tensors of a member", expected=f"those of {known.architecture} by name and shape", found=phrase,
            tensor=wrong[0],
        )  # fmt: skip
    tensors = ((names[n], dtype, shape, net.prefix + n, shape) for n, (dtype, shape) in bare.items())
    missing = [name for name in wanted if is_counter(name) and name not in found]
    return known, Layout.of_stored(tensors, missing, head.lead)
