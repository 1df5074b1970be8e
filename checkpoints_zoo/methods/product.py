"""The posteriors of all runs as one: their product, which the package posteriors samples as any other.

Runs are independent given the images, so that the log density of the product is the sum of theirs, its gradient holds
each run's own, and rules that treat each parameter by itself (SGLD, SGHMC, a diagonal Gaussian under Adam) do to the
product what they do to each run. One backward pass of all is quicker than one mapped over the runs.

Axes: stacked tensors are (run, *shape); a batch's images are (run, batch, channel, height, width).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, vmap

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.methods.modes import Tensors
from checkpoints_zoo.methods.problem import Problem
from checkpoints_zoo.training.recipe import said

REQUIREMENT = "posteriors>=0.1,<0.2"
Batch = tuple[Tensor, Tensor]


def log_posterior(problem: Problem) -> Callable[[Tensors, Batch], tuple[Tensor, Tensor]]:
    """Make the log density of the product of all runs' posteriors, as posteriors takes one; return it.

    It takes stacked parameters and a batch for each run, and returns the sum over the runs, in nats of the whole data,
    and beside it each run's own, (run,). It raises UsageError for a network that torch.vmap can't map over the runs.
    """
    each = vmap(lambda params, batch: problem.log_posterior(params, batch)[0])

    def of_all(params: Tensors, batch: Batch) -> tuple[Tensor, Tensor]:
        try:
            own = each(params, batch)
        except RuntimeError as error:
            if not any(text in str(error) for text in ("vmap", "Batching rule")):
                raise
            raise UsageError(
                f"architecture {problem.recipe.architecture!r}",
                expected="a module that torch.vmap maps over the runs: no random numbers, no branches on values",
                found=said(error),
                do="Take swag, hmc or laplace, which run one network after another",
            ) from error
        return own.sum(), own

    return of_all
