"""`python -m training`: the same program as `zoo-cli`, which also knows the forms of version 0.1."""

from checkpoints_zoo.cli.old_forms import run_old_form

if __name__ == "__main__":
    run_old_form("python -m training", name_is_valid=True)
