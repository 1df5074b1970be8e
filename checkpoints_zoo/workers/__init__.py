"""Engines that run jobs in this process, in several processes, or on a Ray cluster, and yield each result when its job
ends.

The same jobs give the same results on every engine. Workers only compute; the caller writes the files.
"""

from checkpoints_zoo.workers.engine import Engine, InProcess, Job, Work
from checkpoints_zoo.workers.engine_choice import choose_engine
from checkpoints_zoo.workers.jobs import pickle_for_worker
from checkpoints_zoo.workers.processes import Processes, usable_cores
from checkpoints_zoo.workers.ray_cluster import RayCluster

__all__ = [
    "Engine",
    "InProcess",
    "Job",
    "Processes",
    "RayCluster",
    "Work",
    "choose_engine",
    "pickle_for_worker",
    "usable_cores",
]
