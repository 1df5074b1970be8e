"""Many jobs over this process, several processes, or a Ray cluster: results as they finish, to one caller.

The same work gives the same results on every engine. The caller is the one who writes; workers only compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.executor.cluster import RayCluster
from checkpoints_zoo.executor.jobs import Engine, Here, Job, Work, check_picklable
from checkpoints_zoo.executor.processes import Processes, cores

__all__ = ["Engine", "Here", "Job", "Processes", "RayCluster", "Work", "check_picklable", "cores", "engine"]


def engine(
    workers: int | None = None,
    devices: Sequence[str] = ("cpu",),
    ray: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Engine:
    """Choose an engine; return it, with nothing started yet.

    Args:
        workers: jobs at a time; None for one a device, or with Ray as many as the cluster has room for.
        devices: what workers compute on, in turn; with Ray "cuda" asks for one GPU a job.
        ray: "auto" for the cluster that this machine belongs to, "local" for one of this machine alone, or an address;
            None for no Ray.
        say: told of workers that died, a line each.

    Raises:
        UsageError: no devices, or fewer than one worker.

    >>> engine(), engine(workers=4)
    (Here(device='cpu'), Processes(workers=4, devices=('cpu',)))
    """
    if not devices:
        raise UsageError("devices", expected="one or more", found="none")
    if workers is not None and workers < 1:
        raise UsageError("workers", expected="a whole number from 1", found=str(workers))
    if ray is not None:
        return RayCluster(ray, workers, gpus=int(devices[0].startswith("cuda")), say=say)
    wanted = len(devices) if workers is None else workers
    return Here(devices[0]) if wanted == 1 else Processes(wanted, tuple(devices), say=say)
