"""The choice of an engine by the number of workers, the devices and Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.workers.engine import Engine, InProcess
from checkpoints_zoo.workers.processes import Processes
from checkpoints_zoo.workers.ray_cluster import RayCluster


def choose_engine(
    workers: int | None = None,
    devices: Sequence[str] = ("cpu",),
    ray: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Engine:
    """Choose an engine by the number of workers, the devices and Ray; return the engine. The engine starts its workers
    only when it runs jobs.

    Args:
        workers: number of jobs that run at a time; None for one job on each device, or with Ray as many jobs as the
            cluster can run.
        devices: devices that the workers get in turn; with Ray, "cuda" reserves one GPU for each job.
        ray: the Ray cluster: "auto" for the running cluster of this machine, "local" for a new cluster, or an address;
            None to run without Ray.
        say: function that is called with a line of text about each worker that died.

    Raises:
        UsageError: the list of devices is empty, or fewer than one worker is requested.

    >>> choose_engine(), choose_engine(workers=4)
    (InProcess(device='cpu'), Processes(workers=4, devices=('cpu',)))
    """
    if not devices:
        raise UsageError("devices", expected="one or more", found="none")
    if workers is not None and workers < 1:
        raise UsageError("workers", expected="a whole number from 1", found=str(workers))
    if ray is not None:
        return RayCluster(ray, workers, gpus=int(devices[0].startswith("cuda")), say=say)
    worker_count = len(devices) if workers is None else workers
    return InProcess(devices[0]) if worker_count == 1 else Processes(worker_count, tuple(devices), say=say)
