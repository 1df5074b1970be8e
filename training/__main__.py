"""Train members: `python -m training RECIPE`, as `python -m checkpoints_zoo.cli.train RECIPE`."""

from checkpoints_zoo.cli.train import command

if __name__ == "__main__":
    command()
