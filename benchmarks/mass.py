"""Find minimal masses, against cvxpy (its default solver) and scipy on the same problems.

Run: OMP_NUM_THREADS=1 uv run python benchmarks/mass.py. The last line is one JSON object: ratios (how many times
longer the other way takes a member) under short names, the medians and the shortest times in milliseconds a member
beside them. All on one thread; sides are taken in turns in one process.

mlp_single_vs_cvxpy   784-256-256-10, one member; cvxpy's expression is a matrix a layer, built and solved
mlp_batch_vs_cvxpy    the same, 64 members at once, a member
resnet18_vs_scipy     ResNet-18 without norms; against the faster of L-BFGS-B and Newton-CG, stopped by an oracle as
                      soon as they are within 1e-6. Both begin with kernels squared and summed over their windows,
                      which takes either side `resnet18_sums_ms`
small_vs_lbfgs        one convnet-digits member, from its parameters on; L-BFGS-B is stopped by the same oracle
small_batch_vs_lbfgs  64 of them at once, a member; L-BFGS-B takes them one by one

Ours stop by their own rule. `*_left` is how far above the oracle's their answers are, as a share; 1e-6 is allowed.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read by numpy's BLAS once

import cvxpy
import numpy as np
import timm
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import checkpoints_zoo as zoo
from checkpoints_zoo.symmetry import Table, symmetries
from checkpoints_zoo.symmetry.canonical.balancing import balance_scales
from checkpoints_zoo.symmetry.canonical.mass import minimal_mass
from checkpoints_zoo.symmetry.canonical.monomials import collect_monomials

CLOSE = 1e-6
TIGHT = 1e-13
MEMBERS = 64
Matrix = tuple[
    np.ndarray, str | None, str | None
]  # of squares; the scales of its rows (times) and columns (divided by)


def drawn(module: nn.Module, members: int) -> dict[str, Tensor]:
    """Draw members whose channels have lognormal scales; return their weights, stacked."""
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, tensor in module.state_dict().items():
        if tensor.ndim > 1:
            shape = (members, *tensor.shape)
            rows = torch.randn(members, len(tensor), *[1] * (tensor.ndim - 1), generator=generator)
            columns = torch.randn(members, 1, tensor.shape[1], *[1] * (tensor.ndim - 2), generator=generator)
            weights = torch.randn(shape, generator=generator) * (2 / tensor[0].numel()) ** 0.5
            result[name] = weights * (0.5 * (rows + columns)).exp()
    return result


def timed(sides: Sequence[Callable[[], Any]], repeats: int) -> Iterator[list[float]]:
    """Run sides in turns, once before it counts; return each one's times in milliseconds."""
    times: list[list[float]] = [[] for _ in sides]
    for i in range(repeats + 1):
        for side, kept in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            kept.extend([(time.perf_counter() - start) * 1000] * (i > 0))
    return iter(times)


class Reached(Exception):
    """The objective is close enough to the minimum."""


def problem(matrices: Sequence[Matrix], sizes: dict[str, int]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an objective with its gradient, and products with its second derivative, for scipy."""
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    place = {name: slice(start, start + sizes[name]) for name, start in starts.items()}

    def objective(t: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient, u = 0.0, np.zeros_like(t), np.exp(2 * t)
        down = 1 / u
        for matrix, rows, columns in matrices:
            if rows is None:
                only = place[str(columns)]
                terms = down[only] * matrix
                gradient[only] -= terms
            else:
                terms = u[place[rows]] * (matrix if columns is None else matrix @ down[place[columns]])
                gradient[place[rows]] += terms
                if columns is not None:
                    gradient[place[columns]] -= down[place[columns]] * (u[place[rows]] @ matrix)
            value += terms.sum()
        return value, 2 * gradient

    def second(t: np.ndarray, v: np.ndarray) -> np.ndarray:
        product, u = np.zeros_like(t), np.exp(2 * t)
        down = 1 / u
        for matrix, rows, columns in matrices:
            if rows is None or columns is None:
                only = place[str(columns if rows is None else rows)]
                product[only] += (down if rows is None else u)[only] * matrix * v[only]
                continue
            r, c = place[rows], place[columns]
            product[r] += u[r] * (v[r] * (matrix @ down[c]) - matrix @ (down[c] * v[c]))
            product[c] += down[c] * (v[c] * (u[r] @ matrix) - (u[r] * v[r]) @ matrix)
        return 4 * product

    return objective, second


def by_scipy(matrices: Sequence[Matrix], sizes: dict[str, int], method: str, least: float) -> None:
    """Minimise until the oracle says stop."""
    objective, second = problem(matrices, sizes)

    def watched(t: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(t)
        if value <= least * (1 + CLOSE):
            raise Reached
        return value, gradient

    options: dict[str, Any] = {"xtol": 1e-14} if method == "Newton-CG" else {"ftol": 0, "gtol": 0, "maxfun": 10**6}
    more = {"hessp": second} if method == "Newton-CG" else {}
    try:
        minimize(watched, np.zeros(sum(sizes.values())), jac=True, method=method, options=options, **more)
    except Reached:
        return
    raise RuntimeError(f"{method} stopped before it was close")


def digits_matrices(state: dict[str, np.ndarray]) -> list[Matrix]:
    return [
        ((state["conv1.weight"] ** 2).sum((1, 2, 3)), "conv1", None),
        ((state["conv2.weight"] ** 2).sum((2, 3)), "conv2", "conv1"),
        ((state["fc1.weight"] ** 2).reshape(32, 16, 4).sum(2), "fc1", "conv2"),
        ((state["fc2.weight"] ** 2).sum(0), None, "fc1"),
    ]


def small(repeats: int) -> dict[str, float]:
    """Time convnet-digits."""
    table, stacked = symmetries("convnet-digits"), zoo.load("convnet-digits").stack()
    least = minimal_mass(table, stacked, tolerance=TIGHT).after.tolist()
    sizes = {name: scale.size for name, scale in table.scales.items()}

    def theirs(member: int) -> None:
        state = {n: t[member].double().numpy() for n, t in stacked.items()}
        by_scipy(digits_matrices(state), sizes, "L-BFGS-B", least[member])

    first = {n: t[:1] for n, t in stacked.items()}
    ours, other = timed([lambda: minimal_mass(table, first), lambda: theirs(0)], 10 * repeats)

    def all_of_theirs() -> None:
        for member in range(64):
            theirs(member)

    batch, others = timed([lambda: minimal_mass(table, stacked), all_of_theirs], repeats)
    left = minimal_mass(table, stacked).after / torch.tensor(least) - 1
    per = [[t / len(least) for t in times] for times in (batch, others)]
    return {
        **figures("small_vs_lbfgs", ours, other),
        **figures("small_batch_vs_lbfgs", *per),
        "small_left": float(left.max()),
    }


def resnet18(repeats: int) -> dict[str, float]:
    """Time ResNet-18 without norms."""
    module = timm.create_model("resnet18", num_classes=10, norm_layer=lambda *_, **__: nn.Identity())
    module.conv1, module.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    table, params = symmetries(module, torch.zeros(1, 3, 32, 32)), drawn(module, 1)
    names = [name for name, axes in table.tensors.items() if axes.role == "weight"]

    def sums() -> Any:
        with torch.inference_mode():
            return collect_monomials(table, params, names, list(table.scales), torch.float64)

    monomials = sums()
    least = float(balance_scales(monomials, TIGHT, 1000).history[-1])
    matrices: list[Matrix] = []
    for block in monomials.blocks:
        mass, (rows,) = block.mass[0].numpy(), block.rows
        if block.columns:
            matrices.append((mass, rows.scale, block.columns[0].scale))
        else:
            matrices.append((mass[:, 0], *((rows.scale, None) if rows.power > 0 else (None, rows.scale))))

    def ours() -> Any:
        with torch.inference_mode():
            return balance_scales(monomials, 2.5e-7, 1000)

    sides = [
        ours,
        *(lambda m=m: by_scipy(matrices, monomials.sizes, m, least) for m in ("L-BFGS-B", "Newton-CG")),
        sums,
    ]
    own, lbfgs, newton, summing = timed(sides, repeats)
    better = min(lbfgs, newton, key=statistics.median)
    return {
        **figures("resnet18_vs_scipy", own, better), "resnet18_lbfgs_ms": round(statistics.median(lbfgs), 2),
        "resnet18_newton_ms": round(statistics.median(newton), 2),
        "resnet18_sums_ms": round(statistics.median(summing), 2),
        "resnet18_left": float(ours().history[-1]) / least - 1,
    }  # fmt: skip


def by_cvxpy(weights: dict[str, np.ndarray]) -> float:
    """Build and solve an MLP's problem; return the minimum."""
    first, second, last = (weights[f"{i}.weight"] ** 2 for i in (0, 2, 4))
    whole = first.sum() + second.sum() + last.sum()
    x, y = cvxpy.Variable((1, 256)), cvxpy.Variable((256, 1))
    between = y @ np.ones((1, 256)) - np.ones((256, 1)) @ x
    mass = (
        cvxpy.sum(cvxpy.multiply(first.sum(1)[None] / whole, cvxpy.exp(2 * x)))
        + cvxpy.sum(cvxpy.multiply(second / whole, cvxpy.exp(2 * between)))
        + cvxpy.sum(cvxpy.multiply(last.sum(0)[:, None] / whole, cvxpy.exp(-2 * y)))
    )
    return float(cvxpy.Problem(cvxpy.Minimize(mass)).solve()) * float(whole)


def mlp(repeats: int, calls: int) -> dict[str, float]:
    """Time an MLP."""
    module = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    table: Table = symmetries(module, torch.zeros(1, 784))
    params = drawn(module, MEMBERS)
    first = {name: tensor[:1] for name, tensor in params.items()}
    found = minimal_mass(table, params)
    single: list[float] = []
    batch: list[float] = []
    theirs: list[float] = []
    left: list[float] = []
    for i in range(calls):
        start = time.perf_counter()
        least = by_cvxpy({name: tensor[i].double().numpy() for name, tensor in params.items()})
        theirs.append((time.perf_counter() - start) * 1000)
        left.append(float(found.after[i]) / least - 1)
        print(f"cvxpy: {theirs[-1] / 1000:.1f} s", flush=True)
        one, all_ = timed([lambda: minimal_mass(table, first), lambda: minimal_mass(table, params)], repeats)
        single, batch = single + one, batch + all_
    each = [t / MEMBERS for t in batch]
    return {
        **figures("mlp_single_vs_cvxpy", single, theirs), **figures("mlp_batch_vs_cvxpy", each, theirs),
        "mlp_left": max(left, key=abs),
    }  # fmt: skip


def figures(key: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Return the ratio of the medians, medians and shortest times, in milliseconds."""
    (a, b), least = (statistics.median(t) for t in (ours, theirs)), (min(ours), min(theirs))
    print(f"{key}: {a:.3f} ms against {b:.1f} ms", flush=True)
    rounded = [round(value, 3) for value in (a, least[0], b, least[1])]
    names = (f"{key}_ms", f"{key}_min_ms", f"{key}_other_ms", f"{key}_other_min_ms")
    return {key: round(b / a, 2), **dict(zip(names, rounded, strict=True))}


def main() -> None:
    torch.set_num_threads(1)
    results = {**small(7), **resnet18(7), **mlp(3, calls=3)}
    print(json.dumps({**results, "members": MEMBERS, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
