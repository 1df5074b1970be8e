"""`python -m checkpoints_zoo.cli.training`, the name that `zoo-cli train` had in version 0.1."""

from checkpoints_zoo.cli.old_forms import run_old_form

if __name__ == "__main__":
    run_old_form("python -m checkpoints_zoo.cli.training")
