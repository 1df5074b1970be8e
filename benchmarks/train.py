"""Train 64 small networks at once, against one after another in a plain torch script.

Run: uv run python benchmarks/train.py [--epochs 2] [--rounds 3] [--looped 8]. The last line is one JSON object: ratios
under short names (how many times longer the script takes for 64 members), the medians in seconds beside them.

convnet   3,658 parameters (the recipe convnet-digits), on handwritten digits
mlp       8,970 parameters, 64-64-64-10, likewise; the members' weights are compared bit by bit with the script's

The script is what one would write: a module, autograd, torch.optim.SGD, torch's scheduler, the images normalised once
before. It trains some of the members (`looped`), the same ones on the same images in the same order, and its time is
scaled to 64. Both sides run with each number of threads and count with their best; they are taken in turns, and each
once before it counts. `mlp_bit_equal` is whether all weights of all members that the script trains are ours, to the
last bit, once its optimiser's sums and products are separate operations as in ours (torch's own fuses some); before
that `mlp_torch_sgd_difference` is the largest difference. `convnet_difference` is the largest of a convnet's weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoints_zoo import images
from checkpoints_zoo.images import ImageData
from checkpoints_zoo.training.loop import initial_state, train_epochs
from checkpoints_zoo.training.recipe import Recipe, initial_seed
from checkpoints_zoo.training.recipes import convnet_digits
from checkpoints_zoo.training.seeds import epoch_order

MEMBERS = 64
State = dict[str, Tensor]


def mlp() -> nn.Module:
    """Build a perceptron with two hidden layers for 8x8 images."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )  # fmt: skip


class SeparateSGD(torch.optim.Optimizer):
    """SGD with momentum and coupled decay, each sum and product an operation of its own."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                velocity = kept.setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad + parameter * group["weight_decay"])
                parameter.sub_(velocity * group["lr"])


def at_once(recipe: Recipe, data: ImageData) -> list[State]:
    """Train all members in one stack; return the first ones' weights."""
    members = list(range(MEMBERS))
    state = initial_state(recipe, members)
    for _ in train_epochs(recipe, members, state, data):
        pass
    return [{name: tensor[member] for name, tensor in state.params.items()} for member in members]


def one_by_one(recipe: Recipe, data: ImageData, members: int, sgd: Callable[..., Any] = torch.optim.SGD) -> list[State]:
    """Train members one after another, as a plain script does; return their weights."""
    inputs, labels, found = recipe.preprocess(data.images), data.labels, []
    assert labels is not None
    each = len(data) // recipe.batch_size
    for member in range(members):
        torch.manual_seed(initial_seed(recipe, member))
        module = recipe.module()
        optimizer = sgd(
            module.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, each * recipe.epochs))
        for epoch in range(recipe.epochs):
            order = epoch_order(member, epoch, len(data))
            for step in range(each):
                seen = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
                optimizer.zero_grad()
                F.cross_entropy(module(inputs[seen]), labels[seen]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
        found.append({name: tensor.detach() for name, tensor in module.state_dict().items()})
    return found


def cosine(step: int, steps: int) -> float:
    """Return the share of the first learning rate that a step has."""
    return float((1 + torch.cos(torch.tensor(torch.pi * step / steps, dtype=torch.float64))) / 2)


def timed(sides: dict[str, Callable[[], Any]], threads: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """Run sides in turns with each number of threads, once before it counts; return median seconds."""
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in threads} for name in sides}
    for turn in range(rounds + 1):
        for count in threads:
            torch.set_num_threads(count)
            for name, side in sides.items():
                began = time.perf_counter()
                side()
                times[name][count] += [time.perf_counter() - began] * (turn > 0)
    return {name: {n: statistics.median(t) for n, t in by.items()} for name, by in times.items()}


def compared(key: str, recipe: Recipe, data: ImageData, rounds: int, looped: int) -> dict[str, Any]:
    """Time both sides of one network; return the ratio and the seconds for 64 members."""
    cores = len(os.sched_getaffinity(0))
    sides = {"ours": lambda: at_once(recipe, data), "loop": lambda: one_by_one(recipe, data, looped)}
    medians = timed(sides, sorted({1, cores}), rounds)
    best = {name: min(by, key=lambda n: by[n]) for name, by in medians.items()}
    ours, loop = medians["ours"][best["ours"]], medians["loop"][best["loop"]] * MEMBERS / looped
    print(f"{key}: {ours:.2f} s at once, {loop:.2f} s one after another", flush=True)
    return {
        key: round(loop / ours, 2), f"{key}_s": round(ours, 3), f"{key}_loop_s": round(loop, 3),
        f"{key}_threads": best["ours"], f"{key}_loop_threads": best["loop"],
    }  # fmt: skip


def difference(ours: Sequence[State], theirs: Sequence[State]) -> float:
    """Return the largest difference of any weight."""
    pairs = zip(ours, theirs, strict=False)
    return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in b)


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, value in (("--epochs", 2), ("--rounds", 3), ("--looped", 8)):
        parser.add_argument(option, type=int, default=value)
    options = parser.parse_args()
    data = images.load("digits", "train")
    convnet = dataclasses.replace(convnet_digits(), epochs=options.epochs)
    perceptron = dataclasses.replace(convnet, name="mlp", architecture="mlp", arguments={}, build=mlp)
    results: dict[str, Any] = {}
    for key, recipe in (("convnet", convnet), ("mlp", perceptron)):
        results |= compared(key, recipe, data, options.rounds, options.looped)
    torch.set_num_threads(1)
    stacks = {key: at_once(recipe, data) for key, recipe in (("convnet", convnet), ("mlp", perceptron))}
    separate = one_by_one(perceptron, data, options.looped, SeparateSGD)
    results |= {
        "mlp_bit_equal": all(torch.equal(a[n], b[n]) for a, b in zip(stacks["mlp"], separate, strict=False) for n in b),
        "mlp_torch_sgd_difference": difference(stacks["mlp"], one_by_one(perceptron, data, options.looped)),
        "convnet_difference": difference(stacks["convnet"], one_by_one(convnet, data, options.looped)),
        "members": MEMBERS, "looped": options.looped, "epochs": options.epochs, "torch": str(torch.__version__),
    }  # fmt: skip
    print(json.dumps(results))


if __name__ == "__main__":
    main()
