"""ResNet-20-FRN-Swish: equal to a plain numpy forward of the JAX network, under haiku's names and axes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from checkpoints_zoo.errors import LayoutError
from checkpoints_zoo.networks.architectures import ARCHITECTURES
from checkpoints_zoo.networks.ensemble import Ensemble
from checkpoints_zoo.networks.ensemble.compiling import derive_program
from checkpoints_zoo.networks.modules import build_architecture
from checkpoints_zoo.sources.archives.keymaps import tensor_shapes
from checkpoints_zoo.sources.haiku import haiku_names, translate_parameters
from checkpoints_zoo.symmetry import symmetries
from tests.support.haiku_network import Network, Parameters, drawn_parameters

NAME = "resnet20-frn-swish"


def translated(draws: list[Parameters]) -> dict[str, torch.Tensor]:
    joined = {m: {n: np.stack([d[m][n] for d in draws]) for n in own} for m, own in draws[0].items()}
    return {name: torch.from_numpy(array.copy()) for name, array in translate_parameters(joined, "file x.pkl")}


@pytest.mark.slow
def test_it_is_the_network_of_the_draws() -> None:
    draws = [drawn_parameters(seed) for seed in (0, 1)]
    images = np.random.default_rng(2).standard_normal((3, 32, 32, 3))
    wanted = [Network(parameters)(images) for parameters in draws]
    stacked = translated(draws)
    assert sum(t[0].numel() for t in stacked.values()) == 274_042
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2)
    for draw, logits in enumerate(wanted):
        module = build_architecture(NAME).double().eval()
        module.load_state_dict({n: t[draw] for n, t in stacked.items()})
        np.testing.assert_allclose(module(inputs).detach().numpy(), logits, rtol=0, atol=1e-6)
    symmetric = Network(draws[0], symmetric=True)(images)
    assert np.abs(symmetric - wanted[0]).max() > 0.1
    # Padding on both sides is the other architecture of the package.
    other = build_architecture("resnet20-frn-silu", conv_bias=True).double().eval()
    other.load_state_dict({n: t[0] for n, t in stacked.items()})
    np.testing.assert_allclose(other(inputs).detach().numpy(), symmetric, rtol=0, atol=1e-6)
    ensemble = Ensemble(build_architecture(NAME).eval(), {n: t.float() for n, t in stacked.items()}, [0, 1])
    assert derive_program(build_architecture(NAME).eval(), 4) is not None  # Members run side by side.
    with torch.no_grad():
        np.testing.assert_allclose(ensemble(inputs.float()).numpy(), np.stack(wanted), rtol=1e-4, atol=1e-4)


def test_names_and_shapes_are_the_modules_own() -> None:
    with torch.device("meta"):
        state = ARCHITECTURES[NAME]().state_dict()
    shapes = tensor_shapes("resnet20-frn-silu", classes=10, conv_bias=True)
    assert {n: tuple(t.shape) for n, t in state.items()} == shapes
    assert set(haiku_names()) == set(shapes)
    numbers = {module for module, _ in haiku_names().values()}
    assert {"conv2_d", "conv2_d_20", "frn", "frn_20", "linear"} <= numbers
    assert len(numbers) == 43


def test_padding_changes_no_symmetry() -> None:
    images = torch.zeros(2, 3, 32, 32)
    padded, other = (symmetries(build_architecture(*net), images) for net in ((NAME,), ("resnet20-frn-silu",)))
    assert padded.log10_permutations() == pytest.approx(551.4, abs=0.05)
    assert (padded.groups, padded.scaling_freedom) == (other.groups, 0)
    assert padded.approximate_scaling_freedom == other.approximate_scaling_freedom == 784


def test_other_parameters_are_refused() -> None:
    parameters = {m: {n: x[None] for n, x in own.items()} for m, own in drawn_parameters(0).items()}
    lacking = {m: own for m, own in parameters.items() if m != "frn_7"}
    with pytest.raises(
        LayoutError, match=r"expected the 107 parameters of haiku's .*; found 104; frn_7/beta is only in"
    ):
        list(translate_parameters(lacking, "file x.pkl"))
    transposed = {**parameters, "linear": {**parameters["linear"], "w": parameters["linear"]["w"].swapaxes(1, 2)}}
    with pytest.raises(
        LayoutError, match=r"linear/w of file x.pkl: expected .* \(draws, 64, 10\); found .* \(1, 10, 64\)"
    ):
        list(translate_parameters(transposed, "file x.pkl"))
    other_count = {**parameters, "linear": {n: x.repeat(2, 0) for n, x in parameters["linear"].items()}}
    with pytest.raises(LayoutError, match="linear"):
        list(translate_parameters(other_count, "file x.pkl"))
