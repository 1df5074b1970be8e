"""A module path of 0.1: see `checkpoints_zoo._moved`."""

from checkpoints_zoo._moved import redirect
from checkpoints_zoo.networks import architectures
from checkpoints_zoo.networks.modules import build_architecture

architectures.build = build_architecture  # type: ignore[attr-defined]  # its name in 0.1
redirect(__name__)
