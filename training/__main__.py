"""Train members: `python -m training RECIPE`."""

from __future__ import annotations

from checkpoints_zoo.cli.training.__main__ import command

if __name__ == "__main__":
    command()
