"""The net of the members: recognised by its tensors, named by the user, or built by the user's function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from checkpoints_zoo.errors import LayoutError, UsageError
from checkpoints_zoo.formats.layout import Layout, Shape, compare_shapes, is_counter
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.sources import archives
from checkpoints_zoo.sources.archives import IdentifyNet, MemberGroup, MemberHeader
from checkpoints_zoo.sources.archives.keymaps import KEY_MAPS, RecognisedNetwork, unwrap_names

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NetSpec:
    """The user's options on the members' net; all empty if the tensors show the net.

    Args:
        architecture: name in `ARCHITECTURES`.
        arguments: arguments of the architecture, JSON values.
        custom_name: name for a net that the package lacks; its tensors are imported unchanged.
        prefix: prefix to remove from the stored tensor names ("model.").
        key: key of the state dict ("ema", "model/state_dict"), if a file of torch.save has several state dicts.
    """

    architecture: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    custom_name: str | None = None
    prefix: str = ""
    key: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values, under the names of version 0.1: their hash identifies an import."""
        values = asdict(self)
        values["own"] = values.pop("custom_name")
        return values


Build = Callable[[], "nn.Module"]


def recogniser_of_user_net(net: NetSpec, build: Build | None) -> IdentifyNet | None:
    """Return the recogniser of the net that the user names; None if the user names none."""
    return None if net.architecture is None and build is None else make_recogniser(net, (), build)


def make_recogniser(net: NetSpec, member_groups: Sequence[MemberGroup], build: Build | None = None) -> IdentifyNet:
    """Return the function that maps a header to its net and layout.

    Args:
        net: the user's options.
        member_groups: the members. For a custom net without `build`, the tensors that most members have are expected.
        build: function that builds the user's net.

    Raises:
        UsageError: the architecture is unknown, or the custom name is the name of an architecture.
    """
    if net.custom_name is not None and build is not None:
        _check_custom_name(net)
        custom_shapes = tensor_shapes(net, build)
        return lambda head: _match_custom_network(
            head, net, RecognisedNetwork(net.custom_name or "", {}, {}), custom_shapes
        )
    if net.custom_name is not None:
        _check_custom_name(net)
        counts = Counter(id(m.header) for group in member_groups for m in group.members)
        header_by_id = {id(m.header): m.header for group in member_groups for m in group.members}
        commonest_header = header_by_id[counts.most_common(1)[0][0]] if counts else None
        expected = (
            {name: shape for name, (_, shape) in _tensors_without_prefix(commonest_header, net.prefix).items()}
            if commonest_header
            else {}
        )
        return lambda head: _match_custom_network(head, net, RecognisedNetwork(net.custom_name or "", {}, {}), expected)
    if net.architecture is None:
        return lambda head: _recognise(head, net)
    network = RecognisedNetwork(net.architecture, dict(net.arguments), {})
    if net.architecture in KEY_MAPS:
        return lambda head: _recognise_or_match(head, net, network)
    shapes = tensor_shapes(net, None)
    return lambda head: _match_custom_network(head, net, network, shapes)


def _check_custom_name(net: NetSpec) -> None:
    if net.architecture is not None or net.arguments:
        raise UsageError(
            "net of the members", expected="an architecture of the package, or a name for your own net", found="both"
        )
    if not net.custom_name or net.custom_name in ARCHITECTURES:
        raise UsageError(
            f"name {net.custom_name!r} of a net of your own",
            expected=f"a name that no architecture of the package has ({', '.join(ARCHITECTURES)})",
            found="one of these" if net.custom_name else "none",
            do="Give it as --architecture if the members are this net",
        )


def tensor_shapes(net: NetSpec, build: Build | None) -> dict[str, Shape]:
    """Build a net; return name -> shape of its tensors.

    Raises:
        UsageError: an unknown architecture, or a function that builds no module.
    """
    from checkpoints_zoo.networks import modules

    make = build or (lambda: modules.build_architecture(str(net.architecture), **net.arguments))
    module = modules.build_module(make, "the members")
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _tensors_without_prefix(head: MemberHeader, prefix: str) -> dict[str, tuple[str, Shape]]:
    """Remove a prefix from the names of a header's tensors; return bare name -> (dtype, shape).

    Raises:
        LayoutError: a name lacks the prefix.
    """
    for name, _, _ in head.tensors:
        if not name.startswith(prefix) or name == prefix:
            raise LayoutError(f"tensor {name!r}", expected=f"a name that starts with {prefix!r}", tensor=name)
    return {name.removeprefix(prefix): (dtype, shape) for name, dtype, shape in head.tensors}


def _recognise(head: MemberHeader, net: NetSpec) -> tuple[RecognisedNetwork, Layout]:
    recognised_network, layout = archives.layout_of_header(_head_without_prefix(head, net.prefix))
    different_arguments = {k: v for k, v in net.arguments.items() if recognised_network.arguments.get(k) != v}
    if net.architecture not in (None, recognised_network.architecture) or different_arguments:
        raise LayoutError(
            "tensors of a member",
            expected=f"those of {net.architecture} {different_arguments or ''}".rstrip(),
            found=f"{recognised_network.architecture} with {recognised_network.arguments}",
        )
    return recognised_network, _layout_with_prefix(layout, net.prefix)


def _recognise_or_match(
    head: MemberHeader, net: NetSpec, network: RecognisedNetwork
) -> tuple[RecognisedNetwork, Layout]:
    """Recognise a net of torch-uncertainty by its tensor names; otherwise fit the tensors to the arguments."""
    try:
        return _recognise(head, net)
    except LayoutError as error:
        if not net.arguments:
            raise
        try:  # arguments that torch-uncertainty's nets do not have, such as channels
            return _match_custom_network(head, net, network, tensor_shapes(net, None))
        except LayoutError:
            raise error from None


def _head_without_prefix(head: MemberHeader, prefix: str) -> MemberHeader:
    return (
        MemberHeader(
            head.header_nbytes, tuple((n, d, s) for n, (d, s) in _tensors_without_prefix(head, prefix).items())
        )
        if prefix
        else head
    )


def _layout_with_prefix(layout: Layout, prefix: str) -> Layout:
    """Return a layout with the removed prefix in its stored names."""
    if not prefix:
        return layout
    stored = ((t.stored or t.name, t.shape if t.stored_shape is None else t.stored_shape) for t in layout.tensors)
    tensors = [(t.name, t.dtype, t.shape, prefix + n, s) for t, (n, s) in zip(layout.tensors, stored, strict=True)]
    return Layout.of_stored(tensors, layout.counters, layout.header_nbytes)


def _match_custom_network(
    head: MemberHeader, net: NetSpec, network: RecognisedNetwork, expected_shapes: Mapping[str, Shape]
) -> tuple[RecognisedNetwork, Layout]:
    """Fit a header's tensors to a net, removing prefixes of wrappers; return the net and the layout.

    Raises:
        LayoutError: tensors are missing, extra or misshapen.
    """
    bare_tensors = _tensors_without_prefix(head, net.prefix)
    names = unwrap_names({name: shape for name, (_, shape) in bare_tensors.items()}, expected_shapes)
    shapes = {names[name]: shape for name, (_, shape) in bare_tensors.items()}
    differing_names, problem = compare_shapes(
        shapes, {n: s for n, s in expected_shapes.items() if n in shapes or not is_counter(n)}
    )
    if differing_names:
        raise LayoutError(
            "tensors of a member", expected=f"those of {network.architecture} by name and shape", found=problem,
            tensor=differing_names[0],
        )  # fmt: skip
    tensors = ((names[n], dtype, shape, net.prefix + n, shape) for n, (dtype, shape) in bare_tensors.items())
    missing = [name for name in expected_shapes if is_counter(name) and name not in shapes]
    return network, Layout.of_stored(tensors, missing, head.header_nbytes)
