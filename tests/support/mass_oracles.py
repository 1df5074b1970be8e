"""Networks for minimal masses, and their minima by scipy and cvxpy, from what rescaling does to each entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_array
from torch import Tensor, nn

from checkpoints_zoo.symmetry import Table, symmetries
from checkpoints_zoo.symmetry.applying import rescale
from checkpoints_zoo.symmetry.elements import random_element
from tests.support.symmetry_nets import NETS, Shaped, conv, randomised

Params = dict[str, Tensor]
HAVE_MASS = ("weight", "gain")


def stream_net() -> nn.Module:
    """A residual stream without norms: three writers, four readers, one of them a layer that is both."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.stem(x).relu()
        x = (x + net.conv2(net.conv1(x).relu())).relu()
        x = (x + net.both(x)).relu()
        logits: Tensor = net.last(x.mean((2, 3)))
        return logits

    return Shaped(
        forward, stem=conv(2, 6), conv1=conv(6, 4), conv2=conv(4, 6), both=conv(6, 6), last=nn.Linear(6, 3)
    )  # fmt: skip


def deep_net() -> nn.Module:
    layers = [layer for _ in range(12) for layer in (nn.Linear(6, 6), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(6, 2))


def two_readers() -> nn.Module:
    """A layer that a batch norm's kernel and a plain kernel read: rows before the norm are degenerate, it is not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.one(x).relu()
        logits: Tensor = net.last(x) + net.end(net.norm(net.two(x)).relu())
        return logits

    return Shaped(
        forward, one=nn.Linear(3, 5), two=nn.Linear(5, 4), norm=nn.BatchNorm1d(4), end=nn.Linear(4, 2),
        last=nn.Linear(5, 2),
    )  # fmt: skip


OWN = {"stream": (stream_net, (2, 4, 4)), "deep": (deep_net, (6,)), "two_readers": (two_readers, (3,))}
EVERY = {**NETS, **OWN}
# All of their scales have a best value.
BOUNDED = ("mlp", "functional", "grouped_input", "upsampled", "stream", "deep")


def random_members(
    name: str, members: int, spread: float = 0.0, seed: int = 0
) -> tuple[Table, Params, nn.Module, Tensor]:
    """Build a net of that name and draw members; return its table, stacked tensors, the module and some inputs."""
    build, shape = EVERY[name]
    nets = [randomised(build(), seed + i) for i in range(members)]
    table = symmetries(nets[0], torch.zeros(1, *shape, dtype=torch.float64))
    stacked = {n: torch.stack([net.state_dict()[n] for net in nets]) for n in nets[0].state_dict()}
    if spread:
        generator = torch.Generator().manual_seed(seed)
        stacked = rescale(table, stacked, random_element(table, generator, members=members, spread=spread).scales)
    inputs = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return table, stacked, nets[0], inputs


def member_of(params: Mapping[str, Tensor], member: int = 0) -> Params:
    return {name: tensor[member : member + 1] for name, tensor in params.items()}


def mass_of(table: Table, params: Mapping[str, Tensor], roles: Iterable[str] = HAVE_MASS) -> Tensor:
    squares = [params[n].double().square().flatten(1).sum(1) for n, axes in table.tensors.items() if axes.role in roles]
    return torch.stack(squares).sum(0)


def monomials(table: Table, params: Params, roles: Iterable[str] = HAVE_MASS) -> tuple[np.ndarray, np.ndarray]:
    """Find out what powers of which values each entry has by rescaling ones; return (monomial), (monomial, value)."""
    sizes = {name: scale.size for name, scale in table.scales.items() if scale.exact}
    identity = torch.eye(sum(sizes.values()), dtype=torch.float64)
    values = dict(zip(sizes, torch.split(identity.mul(np.log(2)).exp(), list(sizes.values()), 1), strict=True))
    named = [n for n, axes in table.tensors.items() if axes.role in roles]
    ones = {n: torch.ones(len(identity), *table.tensors[n].shape, dtype=torch.float64) for n in named}
    moved = rescale(table, ones, values)
    powers = torch.cat([moved[n].log2().flatten(1) for n in named], 1).T.numpy().round(6)
    squares = torch.cat([params[n].double().square().flatten() for n in named]).numpy()
    distinct, places = np.unique(powers, axis=0, return_inverse=True)
    return np.bincount(places.flatten(), squares), distinct


def minimum_by_scipy(table: Table, params: Params, roles: Iterable[str] = HAVE_MASS) -> float:
    """Minimise the brute-force objective; return the minimum."""
    squares, powers = monomials(table, params, roles)

    def objective(t: np.ndarray) -> tuple[float, np.ndarray]:
        terms = squares * np.exp(2 * powers @ t)
        return float(terms.sum()), 2 * powers.T @ terms

    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0, "gtol": 1e-10 * squares.sum()}
    return float(minimize(objective, np.zeros(powers.shape[1]), jac=True, method="L-BFGS-B", options=options).fun)


def minimum_by_cvxpy(cvxpy: ModuleType, table: Table, params: Params, roles: Iterable[str] = HAVE_MASS) -> float:
    squares, powers = monomials(table, params, roles)
    used = squares > 0
    t = cvxpy.Variable(powers.shape[1])
    terms = cvxpy.multiply(squares[used] / squares.sum(), cvxpy.exp(2 * (csr_array(powers[used]) @ t)))
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(terms)))
    least = float(problem.solve())
    assert problem.status == "optimal"
    return least * float(squares.sum())
