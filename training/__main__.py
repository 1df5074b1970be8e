"""Train members: `python -m training RECIPE`."""

from __future__ import annotations

from checkpoints_zoo.cli.train import command

if __name__ == "__main__":
    command()
