"""Find the net's tensors in a state dict that has further tensors, or older names for the net's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.layout import Shape, is_counter
from checkpoints_zoo.interop.ingest.networks import Build, NetSpec

if TYPE_CHECKING:
    from torch import Tensor

    StateDict = dict[str, Tensor]

# Ends of tensor names: of torch.nn.utils.weight_norm -> of torch.nn.utils.parametrizations.weight_norm.
NEW_END_OF_OLD_END = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
OLD_END_OF_NEW_END = {new: old for old, new in NEW_END_OF_OLD_END.items()}


@dataclass(frozen=True)
class NetTensors:
    """Names and shapes of the net's tensors, by which they are found in a state dict.

    Args:
        shapes: name -> shape in the net's state dict; {} if the net is not known.
        first_names: tensor name -> first name of the same tensor; the two differ for tied tensors.
        prefix: prefix of the network's tensor names in the state dict, as the user states it; with "" the prefix is
            searched for.
    """

    shapes: Mapping[str, Shape]
    first_names: Mapping[str, str]
    prefix: str = ""

    @classmethod
    def of(cls, net: NetSpec, build: Build | None) -> NetTensors:
        """Return the tensors of a net that the user names or builds; no tensors for any other net.

        Raises:
            UsageError: an unknown architecture, or a function that builds no module.
        """
        if net.architecture is None and build is None:
            return cls({}, {}, net.prefix)
        from checkpoints_zoo.networks import modules

        make = build or (lambda: modules.build_architecture(str(net.architecture), **net.arguments))
        module = modules.build_module(make, "the members")
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        return cls(shapes, modules.first_names(module), net.prefix)

    def select(self, state_dict: StateDict, file_name: str) -> StateDict:
        """Return the net's tensors; the complete state dict if it is unclear which tensors are the net's.

        Tensors are left out only if all tensors of the net share a prefix that no other tensor has.

        Args:
            state_dict: tensors by name.
            file_name: name of the file, for errors.

        Raises:
            UsageError: the state dict has the net's tensors under several prefixes.
        """
        state_dict = self._rename_weight_norm(state_dict)
        if self.prefix:
            inside = {
                name.removeprefix(self.prefix): t for name, t in state_dict.items() if name.startswith(self.prefix)
            }
            return (
                {self.prefix + name: t for name, t in self._add_tied_tensors(inside).items()} if inside else state_dict
            )
        tensors_by_prefix = {}
        for prefix in sorted(self._possible_prefixes(state_dict)):
            inside = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
            if (completed_tensors := self._add_tied_tensors(inside)) and self._matches_net(completed_tensors):
                tensors_by_prefix[prefix] = completed_tensors
        if len(tensors_by_prefix) > 1:
            first = next(iter(tensors_by_prefix))
            raise UsageError(
                f"file {file_name}",
                expected="tensors of the net under one prefix",
                found=f"{len(tensors_by_prefix)} prefixes that fit, {', '.join(map(repr, tensors_by_prefix))}",
                do=f"Choose one with prefix={first!r}, or --strip-prefix {first}",
                path=file_name,
            )
        return next(iter(tensors_by_prefix.values()), state_dict)

    def _rename_weight_norm(self, state_dict: StateDict) -> StateDict:
        """Return the state dict with weight norm's tensors renamed as in the net."""
        for names in (NEW_END_OF_OLD_END, OLD_END_OF_NEW_END):
            if any(name.endswith(f".{new}") or name == new for name in self.shapes for new in names.values()):
                ends = [(old, new) for old, new in names.items()]
                state_dict = {
                    next((name.removesuffix(old) + new for old, new in ends if f".{name}".endswith(f".{old}")), name): t
                    for name, t in state_dict.items()
                }
        return state_dict

    def _possible_prefixes(self, state_dict: StateDict) -> set[str]:
        """Return the prefixes of names in a state dict that precede a name of the net's first tensor."""
        if not self.shapes:
            return set()
        first = next(iter(self.first_names.values()))
        tied_names = [name for name, other in self.first_names.items() if other == first]
        return {name.removesuffix(end) for name in state_dict for end in tied_names if f".{name}".endswith(f".{end}")}

    def _add_tied_tensors(self, state_dict: StateDict) -> StateDict:
        """Return a state dict with each tied tensor under all of its names."""
        tensor_by_first_name = {self.first_names[name]: t for name, t in state_dict.items() if name in self.first_names}
        missing = {
            n: tensor_by_first_name[f]
            for n, f in self.first_names.items()
            if n not in state_dict and f in tensor_by_first_name
        }
        return {**state_dict, **missing} if missing else state_dict

    def _matches_net(self, state_dict: StateDict) -> bool:
        found = {name: tuple(tensor.shape) for name, tensor in state_dict.items() if not is_counter(name)}
        return found == {name: shape for name, shape in self.shapes.items() if not is_counter(name)}
