"""`python -m checkpoints_zoo.cli.training RECIPE`, in a clone `python -m training RECIPE`: train, merge, verify."""
