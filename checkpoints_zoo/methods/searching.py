"""Old path of a module in version 0.1: see `checkpoints_zoo._moved`."""

from checkpoints_zoo._moved import redirect

redirect(__name__)
