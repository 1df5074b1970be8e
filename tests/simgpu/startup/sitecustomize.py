"""Python imports this when it starts: worker processes of a simulated process see the same cards."""

import sys

if "--multiprocessing-fork" in sys.orig_argv:  # multiprocessing started this process
    from tests.simgpu.cards import install

    install()
